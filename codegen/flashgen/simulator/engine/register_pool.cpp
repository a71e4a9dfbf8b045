#include "register_pool.hpp"

#include <algorithm>

#include "block.hpp"
#include "simulator/async.hpp"

namespace flashgen::simulator {
namespace {

constexpr int kRegisters = 64 * 1024;  // of a multiprocessor
constexpr int kUnit = 8;
constexpr int kMost = 256;
constexpr int kLeast = 24;

struct Operand {
    int count;
    bool increase;
};

const char* name_of(bool increase) { return increase ? "setmaxnreg.inc" : "setmaxnreg.dec"; }

bool complete_change(Warp& warp, uint32_t, Location where) {
    const auto& operand = *static_cast<Operand*>(warp.operands[0]);
    return warp.block->register_pool().change(warp, operand.count, operand.increase, where);
}

}  // namespace

RegisterPool::RegisterPool(Block& block, int max_threads, int min_blocks, int warps, int blocks)
    : block_(block),
      at_launch_(std::min(kMost, kRegisters / (min_blocks * ((max_threads + 31) / 32 * 32)) / kUnit * kUnit)),
      warps_of_block_(warps / blocks),
      free_(blocks),
      registers_(warps),
      changes_(warps),
      history_(blocks * groups_of_block()) {}

int RegisterPool::groups_of_block() const { return (warps_of_block_ + kWarpsOfGroup - 1) / kWarpsOfGroup; }

int RegisterPool::group_of(int warp) const {
    return warp / warps_of_block_ * groups_of_block() + warp % warps_of_block_ / kWarpsOfGroup;
}

void RegisterPool::reset() {
    std::ranges::fill(free_, 0);
    std::ranges::fill(registers_, at_launch_);
    std::ranges::fill(changes_, 0);
    for (auto& changes : history_) changes.clear();
    waiting_.clear();
}

bool RegisterPool::change(Warp& warp, int count, bool increase, Location where) {
    const Thread& thread = block_.thread(warp.first_thread());
    const char* name = name_of(increase);
    int& held = registers_[warp.index];
    if (count < kLeast || count > kMost || count % kUnit != 0) {
        block_.fail(thread, SIM_REGISTER_POOL, where, format("%s to %d registers; it takes multiples of 8 from 24 to 256", name, count));
    }
    // The compiler gives no thread more at the launch than the largest setmaxnreg asks for.
    if (increase && changes_[warp.index] == 0) held = std::min(held, count);
    if (increase ? count < held : count > held) {
        block_.fail(thread, SIM_REGISTER_POOL, where, format("%s to %d registers of a warp that has %d", name, count, held));
    }
    auto& changes = history_[group_of(warp.index)];
    const size_t turn = changes_[warp.index]++;
    if (turn == changes.size()) {
        changes.push_back({count, increase, where, warp.index});
    } else if (changes[turn].count != count || changes[turn].increase != increase) {
        const Change& other = changes[turn];
        block_.fail(thread, SIM_REGISTER_POOL, where,
                    format("%s to %d registers, and warp %d of the same warpgroup makes it %s to %d, %s", name, count, other.warp,
                           name_of(other.increase), other.count, text_of(other.where).c_str()),
                    {other.where, 32 * other.warp});
    }
    if (increase) {
        waiting_.push_back({&warp, count, where});
        grant();
        return false;  // granted or not, the pool says when it goes on
    }
    free_[warp.index / warps_of_block_] += 32 * (held - count);
    held = count;
    grant();
    return true;
}

void RegisterPool::grant() {
    std::erase_if(waiting_, [&](const Request& request) {
        int& held = registers_[request.warp->index];
        const int wanted = 32 * (request.count - held);
        int& free = free_[request.warp->index / warps_of_block_];
        if (wanted > free) return false;
        free -= wanted;
        held = request.count;
        block_.resume(*request.warp);
        return true;
    });
}

std::string RegisterPool::describe(std::vector<Other>& firsts) const {
    if (waiting_.empty()) return "";
    const Request& first = waiting_.front();
    firsts.push_back({first.where, first.warp->first_thread()});
    return format(" %zu warps, the first of them warp %d at %s, wait for setmaxnreg.inc to %d registers a thread; it has %d, "
                  "and %d of the block's %d are free;",
                  waiting_.size(), first.warp->index, text_of(first.where).c_str(), first.count,
                  registers_[first.warp->index], free_[first.warp->index / warps_of_block_],
                  at_launch_ * 32 * warps_of_block_);
}

void RegisterPool::check_end() {
    for (size_t warp = 0; warp < changes_.size(); ++warp) {
        const auto& changes = history_[group_of(static_cast<int>(warp))];
        if (changes_[warp] == changes.size()) continue;
        const Change& missed = changes[changes_[warp]];
        block_.fail(block_.thread(32 * missed.warp), SIM_REGISTER_POOL, missed.where,
                    format("%s, which warp %zu of the same warpgroup does not execute", name_of(missed.increase), warp),
                    {{}, static_cast<int>(32 * warp)});
    }
}

void set_registers(int count, bool increase, Location where) {
    Operand own = {count, increase};
    running_thread().owner->meet(Operation::set_registers, true, 0xffffffff, &own, complete_change, where);
}

}  // namespace flashgen::simulator
