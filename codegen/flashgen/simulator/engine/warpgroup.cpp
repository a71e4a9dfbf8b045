#include "warpgroup.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "block.hpp"
#include "collision.hpp"
#include "descriptor.hpp"
#include "simulator/numbers.hpp"

namespace flashgen::simulator {
namespace {

constexpr int kRows = 64;
constexpr int kDepth = 16;

// All lanes of a warp, and all warps of the group, must say the same.
bool same_product(const WarpgroupProduct& a, const WarpgroupProduct& b) {
    return a.bf16 == b.bf16 && a.e4m3 == b.e4m3 && a.count == b.count && (a.a == nullptr) == (b.a == nullptr) &&
           a.a_descriptor == b.a_descriptor && a.b_descriptor == b.b_descriptor && a.a_major == b.a_major && a.b_major == b.b_major &&
           a.accumulate == b.accumulate;
}

float number(bool bf16, uint16_t bits) { return bf16 ? bf16_to_float(bits) : fp16_to_float(bits); }

// Chunks of an operand, read and checked one by one.
class Operand {
  public:
    Operand(Block& block, const Party& party, const Thread& thread, uint64_t bits, const char* what, Location where)
        : block_(block), party_(party), thread_(thread), matrix_(decode(bits)), what_(what), where_(where) {
        // Where the pattern of the swizzle begins elsewhere than at a multiple of its size, a base offset has to say so.
        const uint32_t phase = matrix_.start >> 7 & (matrix_.swizzle == 0 ? 0 : matrix_.swizzle / 16 - 1);
        if (matrix_.base_offset != 0 || phase != 0) {
            block.fail(thread, SIM_OPERAND, where,
                       format("%s: start address 0x%x and base offset %u under a swizzle of %u bytes; the pattern must begin at a "
                              "multiple of %u, with base offset 0",
                              what, matrix_.start, matrix_.base_offset, matrix_.swizzle, 8 * matrix_.swizzle));
        }
    }

    void read(Major major, uint32_t row, uint32_t step, uint16_t (&elements)[8]) {
        const uint32_t address = chunk_address(matrix_, major, row, step);
        // A descriptor has the address within the window of its thread's block.
        const uint32_t offset = shared_offset(block_, thread_, address + thread_.rank * kBlockWindow, kChunkBytes, what_, where_);
        fail_collision(block_, thread_, what_, block_.shared().load(party_, offset, kChunkBytes, Touch::matrix_product, where_),
                       where_);
        std::memcpy(elements, block_.shared().bytes() + offset, kChunkBytes);
        // Eight chunks in turn are read together, ideally from all 32 banks.
        const uint32_t bank = address / kChunkBytes % 8;
        worst_ = std::max(worst_, ++depths_[bank]);
        if (++in_turn_ < 8) return;
        passes.ideal += 1;
        passes.actual += worst_;
        in_turn_ = worst_ = 0;
        std::fill(std::begin(depths_), std::end(depths_), 0);
    }

    Passes passes = {0, 0};

  private:
    Block& block_;
    const Party& party_;
    const Thread& thread_;
    MatrixDescriptor matrix_;
    const char* what_;
    Location where_;
    uint32_t depths_[8] = {};
    uint32_t worst_ = 0;
    int in_turn_ = 0;
};

bool complete_multiply(Warp& warp, uint32_t, Location where) {
    warp.block->warpgroup(warp, where).multiply(warp, where);
    return true;
}

bool complete_fence(Warp& warp, uint32_t, Location where) {
    warp.block->warpgroup(warp, where).fence(warp);
    return true;
}

bool complete_commit(Warp& warp, uint32_t, Location where) {
    warp.block->warpgroup(warp, where).commit(warp);
    return true;
}

bool complete_wait(Warp& warp, uint32_t, Location where) {
    return warp.block->warpgroup(warp, where).wait(warp, *static_cast<int*>(warp.operands[0]), where);
}

}  // namespace

Warpgroup::Warpgroup(Block& block, int first_thread) : block_(block), first_thread_(first_thread), a_(kRows * kDepth) {}

int Warpgroup::member_of(const Thread& thread) const { return thread.index - first_thread_; }

Warpgroup::WarpState& Warpgroup::state_of(const Warp& warp) { return warps_[(warp.first_thread() - first_thread_) / 32]; }

void Warpgroup::reset() {
    for (WarpState& state : warps_) state = {};
    executed_ = 0;
    first_ = 1;
    products_.clear();
    for (auto& accumulators : accumulators_) accumulators.clear();
}

Accumulator* Warpgroup::find(const Thread& thread, const float* registers) {
    for (auto& accumulator : accumulators_[member_of(thread)]) {
        if (accumulator->registers == registers) return accumulator.get();
    }
    return nullptr;
}

// What the product works on. `under_way` says whether an earlier one still does.
Accumulator* Warpgroup::track(const Thread& thread, const WarpgroupProduct& operands, bool& under_way, Location where) {
    auto& accumulators = accumulators_[member_of(thread)];
    float* const begin = operands.accumulator;
    Accumulator* found = find(thread, begin);
    under_way = found != nullptr && !found->done;
    if (found != nullptr && found->values.size() == static_cast<size_t>(operands.count)) {
        if (found->done) {
            pin(block_.thread(thread.index), begin, operands.count, where);
        } else {
            return found;
        }
    }
    // Memory of which another array has become the owner.
    std::erase_if(accumulators, [&](const auto& other) {
        return begin < other->registers + other->values.size() && other->registers < begin + operands.count;
    });
    if (operands.accumulate) {
        for (int i = 0; i < operands.count; ++i) {
            if (is_unset(begin[i])) {
                block_.fail(thread, SIM_UNINITIALISED_REGISTER, where, "wgmma with a register of its accumulator that nothing has set");
            }
            if (is_under_way(begin[i])) fail_use(block_.thread(thread.index), where);
        }
    }
    accumulators.push_back(std::make_unique<Accumulator>(
        Accumulator{begin, std::vector<float>(begin, begin + operands.count), 0, false, where}));
    std::fill(begin, begin + operands.count, under_way_pattern());
    return accumulators.back().get();
}

void Warpgroup::multiply(Warp& warp, Location where) {
    if (actor_ < 0) actor_ = block_.order().add_actor();
    WarpState& state = state_of(warp);
    const auto& first = *static_cast<WarpgroupProduct*>(warp.operands[0]);
    const uint32_t number = ++state.made;
    if (number == first_ + products_.size()) {
        products_.emplace_back();
        products_.back().operands = first;
        products_.back().where = where;
        products_.back().group = state.groups;
    }
    Product& product = this->product(number);
    bool all_under_way = true;
    for (int lane = 0; lane < 32; ++lane) {
        const Thread& thread = block_.thread(warp.first_thread() + lane);
        const auto& operands = *static_cast<WarpgroupProduct*>(warp.operands[lane]);
        const int member = member_of(thread);
        if (!same_product(operands, product.operands) || product.where.line() != where.line() || product.group != state.groups) {
            block_.fail(thread, SIM_DIVERGENCE, where,
                        format("wgmma with other operands, or after another number of commits, than other threads of its "
                               "warpgroup have, at %s",
                               text_of(product.where).c_str()),
                        {product.where, -1});
        }
        bool under_way;
        Accumulator* accumulator = track(thread, operands, under_way, where);
        accumulator->last_product = number;
        accumulator->where = where;
        all_under_way &= under_way;
        product.accumulators[member] = accumulator;
        product.a[member] = operands.a;
        if (operands.a == nullptr) continue;
        for (int i = 0; i < 4; ++i) {
            product.a_values[member][i] = operands.a[i];
            if (is_unset(operands.a[i])) {
                block_.fail(thread, SIM_UNINITIALISED_REGISTER, where, "wgmma with a register of its left operand that nothing has set");
            }
        }
    }
    if (!state.fenced && !all_under_way) {
        block_.fail(block_.thread(warp.first_thread()), SIM_REGISTER_IN_FLIGHT, where,
                    "wgmma on registers that the threads may have written, and no wgmma.fence since they waited last");
    }
    if (++product.warps < kWarpsOfGroup) return;
    execute(product);
    executed_ = number;
    for (WarpState& waiting : warps_) {
        if (waiting.waiting == nullptr || waiting.target > executed_) continue;
        Warp& parked = *waiting.waiting;
        end_wait(waiting, parked);
        block_.resume(parked);
    }
}

// Everybody's sums += A . B. Products and their sum are exact up to the precision of double, and cut off towards zero to fp32
// once for each instruction.
void Warpgroup::execute(const Product& product) {
    const WarpgroupProduct& operands = product.operands;
    if (operands.e4m3) {
        execute_e4m3(product);
        return;
    }
    const Location where = product.where;
    const int columns = 2 * operands.count;
    const bool bf16 = operands.bf16;
    const Thread& thread = block_.thread(first_thread_);
    const Party party(block_.order(), actor_, executed_ + 1, first_thread_, kThreadsOfGroup);
    Passes passes = {0, 0};
    uint64_t bytes = 2 * kDepth * columns;
    uint16_t elements[8];
    if (operands.a == nullptr) {
        Operand a(block_, party, thread, operands.a_descriptor, "wgmma's A", where);
        if (operands.a_major == Major::k) {
            for (int step = 0; step < kDepth / 8; ++step) {
                for (int row = 0; row < kRows; ++row) {
                    a.read(Major::k, row, step, elements);
                    for (int e = 0; e < 8; ++e) a_[row * kDepth + 8 * step + e] = number(bf16, elements[e]);
                }
            }
        } else {
            for (int k = 0; k < kDepth; ++k) {
                for (int step = 0; step < kRows / 8; ++step) {
                    a.read(Major::mn, k, step, elements);
                    for (int e = 0; e < 8; ++e) a_[(8 * step + e) * kDepth + k] = number(bf16, elements[e]);
                }
            }
        }
        passes = a.passes;
        bytes += 2 * kRows * kDepth;
    } else {
        for (int member = 0; member < kThreadsOfGroup; ++member) {
            const int lane = member % 32;
            for (int i = 0; i < 4; ++i) {
                const int row = member / 32 * 16 + lane / 4 + i % 2 * 8, k = i / 2 * 8 + lane % 4 * 2;
                const uint32_t pair = product.a_values[member][i];
                a_[row * kDepth + k] = number(bf16, static_cast<uint16_t>(pair));
                a_[row * kDepth + k + 1] = number(bf16, static_cast<uint16_t>(pair >> 16));
            }
        }
    }
    b_.resize(kDepth * columns);
    Operand b(block_, party, thread, operands.b_descriptor, "wgmma's B", where);
    if (operands.b_major == Major::k) {
        for (int step = 0; step < kDepth / 8; ++step) {
            for (int column = 0; column < columns; ++column) {
                b.read(Major::k, column, step, elements);
                for (int e = 0; e < 8; ++e) b_[(8 * step + e) * columns + column] = number(bf16, elements[e]);
            }
        }
    } else {
        for (int k = 0; k < kDepth; ++k) {
            for (int step = 0; step < columns / 8; ++step) {
                b.read(Major::mn, k, step, elements);
                for (int e = 0; e < 8; ++e) b_[k * columns + 8 * step + e] = number(bf16, elements[e]);
            }
        }
    }
    passes.ideal += b.passes.ideal;
    passes.actual += b.passes.actual;

    double sums[256];
    for (int row = 0; row < kRows; ++row) {
        std::fill(sums, sums + columns, 0.0);
        for (int k = 0; k < kDepth; ++k) {
            const double left = a_[row * kDepth + k];
            const double* right = &b_[k * columns];
            for (int column = 0; column < columns; ++column) sums[column] += left * right[column];
        }
        // Thread (g, t) of a warp has columns 2 t and 2 t + 1 of every eight, in rows g and g + 8.
        const int half = row % 16 / 8;
        for (int t = 0; t < 4; ++t) {
            float* values = product.accumulators[row / 16 * 32 + row % 8 * 4 + t]->values.data();
            for (int i = 0; i < columns / 8; ++i) {
                for (int e = 0; e < 2; ++e) {
                    float& value = values[4 * i + 2 * half + e];
                    value = truncate_to_float((operands.accumulate ? value : 0.0f) + sums[8 * i + 2 * t + e]);
                }
            }
        }
    }
    ++(bf16 ? block_.counters->wgmma_bf16 : block_.counters->wgmma_f16);
    block_.counters->shared_bytes_read += bytes;
    block_.traffic().add(block_.traffic().site(where, SIM_MATRIX_PRODUCT), SIM_MATRIX_PRODUCT, bytes, passes);
}

// Everybody's sums += A . B of e4m3, K-major both. For each instruction the tensor core cuts the 32 products and the sum off towards zero at 2^-13
// of the largest of them, by exponent, adds them exactly, and cuts the result off after 13 bits of fraction (MMA-Sim,
// https://arxiv.org/abs/2511.10909).
void Warpgroup::execute_e4m3(const Product& product) {
    const WarpgroupProduct& operands = product.operands;
    const Location where = product.where;
    const int columns = 2 * operands.count;
    const Thread& thread = block_.thread(first_thread_);
    const Party party(block_.order(), actor_, executed_ + 1, first_thread_, kThreadsOfGroup);
    Passes passes = {0, 0};
    uint64_t bytes = kDepthE4m3 * columns;
    auto read = [&](uint64_t descriptor, const char* what, int rows, std::vector<uint8_t>& codes) {
        codes.resize(kDepthE4m3 * rows);
        Operand operand(block_, party, thread, descriptor, what, where);
        uint16_t elements[8];
        for (int step = 0; step < 2; ++step) {
            for (int row = 0; row < rows; ++row) {
                operand.read(Major::k, row, step, elements);
                std::memcpy(&codes[row * kDepthE4m3 + 16 * step], elements, sizeof elements);
            }
        }
        passes.ideal += operand.passes.ideal;
        passes.actual += operand.passes.actual;
    };
    if (operands.a == nullptr) {
        read(operands.a_descriptor, "wgmma's A", kRows, a_codes_);
        bytes += kRows * kDepthE4m3;
    } else {
        a_codes_.resize(kRows * kDepthE4m3);
        for (int member = 0; member < kThreadsOfGroup; ++member) {
            const int lane = member % 32;
            for (int i = 0; i < 4; ++i) {
                const int row = member / 32 * 16 + lane / 4 + i % 2 * 8, k = i / 2 * 16 + lane % 4 * 4;
                std::memcpy(&a_codes_[row * kDepthE4m3 + k], &product.a_values[member][i], 4);
            }
        }
    }
    read(operands.b_descriptor, "wgmma's B", columns, b_codes_);

    E4m3 left[kDepthE4m3];
    for (int row = 0; row < kRows; ++row) {
        const uint8_t* a = &a_codes_[row * kDepthE4m3];
        for (int k = 0; k < kDepthE4m3; ++k) left[k] = decode_e4m3(a[k]);
        const int half = row % 16 / 8;
        for (int column = 0; column < columns; ++column) {
            const uint8_t* b = &b_codes_[column * kDepthE4m3];
            const int t = column % 8 / 2;
            float& value = product.accumulators[row / 16 * 32 + row % 8 * 4 + t]->values[column / 8 * 4 + 2 * half + column % 2];
            value = add_products_e4m3(operands.accumulate ? value : 0.0f, a, left, b);
        }
    }
    ++block_.counters->wgmma_e4m3;
    block_.counters->shared_bytes_read += bytes;
    block_.traffic().add(block_.traffic().site(where, SIM_MATRIX_PRODUCT), SIM_MATRIX_PRODUCT, bytes, passes);
}

void Warpgroup::fence(Warp& warp) { state_of(warp).fenced = true; }

void Warpgroup::commit(Warp& warp) {
    WarpState& state = state_of(warp);
    state.closed.push_back(state.made);
    ++state.groups;
}

bool Warpgroup::wait(Warp& warp, int pending, Location where) {
    WarpState& state = state_of(warp);
    state.target = state.waited;
    if (state.closed.size() > static_cast<size_t>(pending)) {
        const auto last = state.closed.end() - pending;
        state.target = *(last - 1);
        state.closed.erase(state.closed.begin(), last);
    }
    state.fenced = false;
    if (state.target > executed_) {
        state.waiting = &warp;
        state.where = where;
        return false;
    }
    end_wait(state, warp);
    return true;
}

void Warpgroup::end_wait(WarpState& state, Warp& warp) {
    state.waiting = nullptr;
    for (uint32_t number = state.waited + 1; number <= state.target; ++number) {
        const Product& done = product(number);
        for (int lane = 0; done.operands.a != nullptr && lane < 32; ++lane) {
            const Thread& thread = block_.thread(warp.first_thread() + lane);
            const int member = member_of(thread);
            if (std::memcmp(done.a[member], done.a_values[member], sizeof done.a_values[member]) == 0) continue;
            block_.fail(thread, SIM_REGISTER_IN_FLIGHT, done.where,
                        "a register of the left operand of this wgmma has changed before the wait for it");
        }
    }
    state.waited = state.target;
    for (int lane = 0; lane < 32; ++lane) {
        const int thread = warp.first_thread() + lane;
        if (actor_ >= 0) block_.order().learn(thread, actor_, state.target);
        for (auto& accumulator : accumulators_[thread - first_thread_]) {
            if (accumulator->last_product <= state.target) accumulator->done = true;
        }
    }
    uint32_t least = UINT32_MAX;
    for (const WarpState& each : warps_) least = std::min(least, each.waited);
    for (; first_ <= least; ++first_) products_.pop_front();
}

// The accumulators within these registers: a product may have a part of an array.
void Warpgroup::pin(Thread& thread, float* registers, int count, Location where) {
    auto& accumulators = accumulators_[member_of(thread)];
    auto is_pinned = [&](const auto& each) {
        return each->done && each->registers >= registers && each->registers + each->values.size() <= registers + count;
    };
    for (const auto& accumulator : accumulators) {
        if (!is_pinned(accumulator)) continue;
        for (size_t i = 0; i < accumulator->values.size(); ++i) {
            if (std::bit_cast<uint32_t>(accumulator->registers[i]) == std::bit_cast<uint32_t>(under_way_pattern())) continue;
            block_.fail(thread, SIM_REGISTER_IN_FLIGHT, where,
                        format("register %zu of an accumulator was written while the wgmma at %s was at work on it, or before it "
                               "was pinned",
                               i, text_of(accumulator->where).c_str()),
                        {accumulator->where, -1});
        }
        std::copy(accumulator->values.begin(), accumulator->values.end(), accumulator->registers);
    }
    std::erase_if(accumulators, is_pinned);
}

void Warpgroup::fail_use(Thread& thread, Location where) {
    for (const auto& accumulator : accumulators_[member_of(thread)]) {
        block_.fail(thread, SIM_REGISTER_IN_FLIGHT, where,
                    format("a value from a register of the accumulator of the wgmma at %s, %s", text_of(accumulator->where).c_str(),
                           accumulator->done ? "which no pin_registers after the wait keeps in order" : "which has not been waited for"),
                    {accumulator->where, -1});
    }
    block_.fail(thread, SIM_REGISTER_IN_FLIGHT, where, "a value from a register that was read while a wgmma was at work on it");
}

std::string Warpgroup::describe(std::vector<Other>& firsts) const {
    std::string text;
    for (const WarpState& state : warps_) {
        if (state.waiting == nullptr) continue;
        text += format(" warp %d waits for other warps of its warpgroup to make the wgmma that it has made, %s;",
                       state.waiting->index, text_of(state.where).c_str());
        firsts.push_back({state.where, state.waiting->first_thread()});
    }
    return text;
}

void multiply_warpgroup(const WarpgroupProduct& product, Location where) {
    WarpgroupProduct own = product;
    running_thread().owner->meet(Operation::warpgroup_product, true, 0xffffffff, &own, complete_multiply, where);
}

void warpgroup_fence(Location where) {
    running_thread().owner->meet(Operation::warpgroup_fence, true, 0xffffffff, nullptr, complete_fence, where);
}

void warpgroup_commit(Location where) {
    running_thread().owner->meet(Operation::warpgroup_commit, true, 0xffffffff, nullptr, complete_commit, where);
}

void warpgroup_wait(int pending, Location where) {
    running_thread().owner->meet(Operation::warpgroup_wait, true, 0xffffffff, &pending, complete_wait, where);
}

void pin(float* registers, int count, Location where) {
    Thread& thread = running_thread();
    if (Warpgroup* group = thread.owner->warpgroup_of(*thread.warp)) group->pin(thread, registers, count, where);
}

void fail_register_under_way(Location where) {
    Thread& thread = running_thread();
    if (Warpgroup* group = thread.owner->warpgroup_of(*thread.warp)) group->fail_use(thread, where);
    thread.owner->fail(thread, SIM_REGISTER_IN_FLIGHT, where, "the pattern of a register on which a wgmma is at work");
}

}  // namespace flashgen::simulator
