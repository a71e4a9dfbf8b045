// What the lanes of a warp do together, apart from matrices: shuffles, votes and barriers.
#include <bit>

#include "block.hpp"
#include "simulator/async.hpp"

namespace flashgen::simulator {
namespace {

struct ShuffleOperand {
    uint64_t value;
    Shuffle kind;
    int operand;
    int width;
    uint64_t result;
};

// The lane whose value `lane` gets, which is itself where the shuffle would leave its segment of `width` lanes.
int source_lane(const ShuffleOperand& operand, int lane) {
    const int first = lane & ~(operand.width - 1);
    const int last = first + operand.width - 1;
    switch (operand.kind) {
        case Shuffle::index: return first + (operand.operand & (operand.width - 1));
        case Shuffle::up: return lane - operand.operand >= first ? lane - operand.operand : lane;
        case Shuffle::down: return lane + operand.operand <= last ? lane + operand.operand : lane;
        case Shuffle::exclusive_or: return (lane ^ operand.operand) <= last ? lane ^ operand.operand : lane;
    }
    return lane;
}

// CUDA promises no order of memory accesses by shuffles and votes, and the PTX ISA none by elect.sync.
bool complete_shuffle(Warp& warp, uint32_t lanes, Location where) {
    Block& block = *warp.block;
    ++block.counters->shuffles;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        auto& operand = *static_cast<ShuffleOperand*>(warp.operands[lane]);
        const Thread& thread = block.thread(warp.first_thread() + lane);
        const int source = source_lane(operand, lane);
        if (source < 0 || source > 31 || !(lanes >> source & 1)) {
            block.fail(thread, SIM_OPERAND, where, format("shuffle from lane %d, which takes no part in it", source));
        }
        operand.result = static_cast<ShuffleOperand*>(warp.operands[source])->value;
    }
    return true;
}

struct VoteOperand {
    bool predicate;
    Votes result;
};

bool complete_vote(Warp& warp, uint32_t lanes, Location) {
    ++warp.block->counters->votes;
    Votes votes = {lanes, 0};
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        if (static_cast<VoteOperand*>(warp.operands[lane])->predicate) votes.ayes |= 1u << lane;
    }
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
        static_cast<VoteOperand*>(warp.operands[std::countr_zero(left)])->result = votes;
    }
    return true;
}

bool complete_sync(Warp& warp, uint32_t lanes, Location) {
    ++warp.block->counters->warp_syncs;
    warp.block->order_lanes(warp, lanes);
    return true;
}

bool complete_elect(Warp&, uint32_t, Location) { return true; }

bool complete_barrier(Warp& warp, uint32_t lanes, Location where) {
    const auto& operand = *static_cast<BarrierOperand*>(warp.operands[std::countr_zero(lanes)]);
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        const auto& other = *static_cast<BarrierOperand*>(warp.operands[lane]);
        if (other.id != operand.id || other.threads != operand.threads || other.waits != operand.waits) {
            warp.block->fail(warp.block->thread(warp.first_thread() + lane), SIM_BARRIER, where,
                             format("barrier %d for %d threads, and another lane of the warp is at barrier %d for %d",
                                    other.id, other.threads, operand.id, operand.threads));
        }
    }
    return warp.block->arrive(warp, lanes, where);
}

}  // namespace

uint64_t shuffle(uint32_t mask, uint64_t value, Shuffle kind, int operand, int width, Location where) {
    Thread& thread = running_thread();
    if (width < 1 || width > 32 || !std::has_single_bit(static_cast<unsigned>(width))) {
        thread.owner->fail(thread, SIM_OPERAND, where, format("shuffle of width %d, which is no power of two up to 32", width));
    }
    ShuffleOperand own = {value, kind, operand, width, 0};
    thread.owner->meet(Operation::shuffle, false, mask, &own, complete_shuffle, where);
    return own.result;
}

Votes vote(uint32_t mask, bool predicate, Location where) {
    VoteOperand own = {predicate, {}};
    running_thread().owner->meet(Operation::vote, false, mask, &own, complete_vote, where);
    return own.result;
}

void sync_warp(uint32_t mask, Location where) {
    running_thread().owner->meet(Operation::sync_warp, false, mask, nullptr, complete_sync, where);
}

bool elect(Location where) {
    const Thread& thread = running_thread();
    thread.owner->meet(Operation::elect, false, 0xffffffff, nullptr, complete_elect, where);
    return thread.lane == 31;
}

void block_barrier(int id, int threads, Location where) {
    BarrierOperand own = {id, threads, true, false, false};
    running_thread().owner->meet(Operation::barrier, false, 0xffffffff, &own, complete_barrier, where);
}

void barrier_arrive(int id, int threads, Location where) {
    BarrierOperand own = {id, threads, false, false, false};
    running_thread().owner->meet(Operation::barrier, false, 0xffffffff, &own, complete_barrier, where);
}

bool barrier_any(int id, int threads, bool predicate, Location where) {
    BarrierOperand own = {id, threads, true, predicate, false};
    running_thread().owner->meet(Operation::barrier, false, 0xffffffff, &own, complete_barrier, where);
    return own.any;
}

}  // namespace flashgen::simulator
