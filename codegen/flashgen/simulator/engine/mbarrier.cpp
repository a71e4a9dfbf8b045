#include "mbarrier.hpp"

#include <cstdlib>

#include "block.hpp"
#include "collision.hpp"
#include "simulator/async.hpp"

namespace flashgen::simulator {
namespace {

constexpr int kBytes = 8;
constexpr int64_t kMost = (1 << 20) - 1;  // arrivals, and bytes awaited, of a phase

}  // namespace

void Mbarriers::init(Thread& thread, uint32_t address, int arrivals, Location where) {
    const uint32_t offset = shared_offset(block_, thread, address, kBytes, "mbarrier.init", where);
    if (arrivals < 1 || arrivals > kMost) {
        block_.fail(thread, SIM_MBARRIER, where, format("mbarrier.init with %d arrivals; it has 1 to 2^20 - 1", arrivals));
    }
    fail_collision(block_, thread, "mbarrier.init",
                   block_.shared().store(Party(block_.order(), thread.index), offset, kBytes, Touch::mbarrier, where), where);
    if (actors_.size() == barriers_.size()) actors_.push_back(block_.order().add_actor());
    const int actor = actors_[barriers_.size()];
    barriers_.push_back({offset, actor, arrivals, arrivals, 0, 0, 0, {}, {}, thread.index,
                         block_.order().stamp(thread.index), false, where, {}});
}

void Mbarriers::fence_init(Thread& thread) {
    for (Mbarrier& barrier : barriers_) barrier.init_fenced |= barrier.init_thread == thread.index;
    thread.fenced_inits.clear();
    block_.order().publish(thread.index, thread.fenced_inits);
    block_.order().advance(thread.index);
}

Mbarrier& Mbarriers::find(Thread& thread, uint32_t address, const char* what, Location where) {
    return find_at(thread, shared_offset(block_, thread, address, kBytes, what, where), what, where);
}

Mbarrier& Mbarriers::find_at(Thread& thread, uint32_t offset, const char* what, Location where) {
    for (Mbarrier& barrier : barriers_) {
        if (barrier.offset != offset) continue;
        if (!block_.order().before(barrier.init_thread, barrier.init_stamp, thread.index)) {
            block_.fail(thread, SIM_RACE, where,
                        format("race: %s of the barrier at offset %u here, and mbarrier.init of thread %d at %s, with no "
                               "barrier between them",
                               what, offset, barrier.init_thread, text_of(barrier.init_at).c_str()),
                        {barrier.init_at, barrier.init_thread});
        }
        return barrier;
    }
    block_.fail(thread, SIM_MBARRIER, where, format("%s at offset %u, where no mbarrier has been initialised", what, offset));
}

void Mbarriers::arrive(Thread& thread, uint32_t address, Location where) {
    arrive_at(thread, find(thread, address, "mbarrier.arrive", where), where);
}

void Mbarriers::arrive_in_cluster(Thread& thread, uint32_t address, Location where) {
    constexpr const char* kWhat = "mbarrier.arrive in a cluster";
    const uint32_t offset = cluster_offset(block_, thread, address, kBytes, kWhat, where);
    block_.touch(thread, static_cast<int>(offset / kBlockWindow), thread.index, block_.order().stamp(thread.index), kWhat, where);
    Mbarrier& barrier = find_at(thread, offset, kWhat, where);
    check_fenced(thread, barrier, kWhat, where);
    arrive_at(thread, barrier, where);
}

void Mbarriers::arrive_at(Thread& thread, Mbarrier& barrier, Location where) {
    ++block_.counters->mbarrier_arrivals;
    if (barrier.missing == 0) {
        block_.fail(thread, SIM_MBARRIER, where,
                    format("one more than the %d arrivals of a phase at the mbarrier at offset %u, initialised at %s, which "
                           "still waits for %lld bytes",
                           barrier.count, barrier.offset, text_of(barrier.init_at).c_str(),
                           static_cast<long long>(barrier.awaited)),
                    {barrier.init_at, barrier.init_thread});
    }
    block_.order().publish(thread.index, barrier.clock);
    block_.order().advance(thread.index);
    --barrier.missing;
    end_phase_if_complete(barrier);
    block_.pause(thread);
}

void Mbarriers::expect(Thread& thread, uint32_t address, int bytes, Location where) {
    Mbarrier& barrier = find(thread, address, "mbarrier.expect_tx", where);
    barrier.announced += bytes;
    barrier.awaited += bytes;
    if (bytes < 0 || barrier.awaited > kMost) {
        block_.fail(thread, SIM_MBARRIER, where,
                    format("mbarrier.expect_tx of %d bytes makes %lld; a phase waits for at most 2^20 - 1", bytes,
                           static_cast<long long>(barrier.awaited)));
    }
}

void Mbarriers::wait(Thread& thread, uint32_t address, int parity, bool in_cluster, Location where) {
    ++block_.counters->mbarrier_waits;
    Mbarrier& barrier = find(thread, address, "mbarrier.try_wait", where);
    if (parity != 0 && parity != 1) {
        block_.fail(thread, SIM_OPERAND, where, format("mbarrier.try_wait for parity %d; it is 0 or 1", parity));
    }
    // The phases are 0, 1, ...; that of the parity has ended unless it is the one under way. Who comes to look when two
    // more have ended waits again, as on a GPU.
    while ((barrier.phase & 1) == static_cast<uint32_t>(parity)) {
        barrier.waiters.push_back({&thread, parity, where});
        block_.park(thread, "mbarrier", where);
    }
    if (barrier.was_sent && !in_cluster) {
        block_.fail(thread, SIM_RACE, where,
                    format("race: this wait acquires at the scope of the block, and in the phase that has ended st.async of another "
                           "block brought bytes to the mbarrier at offset %u, which takes the scope of the cluster",
                           barrier.offset),
                    {barrier.init_at, barrier.init_thread});
    }
    block_.order().learn(thread.index, barrier.completed);
    block_.pause(thread);
}

Mbarrier& Mbarriers::of_copy(Thread& thread, uint32_t address, Location where) {
    constexpr const char* kWhat = "tensor load to the mbarrier";
    Mbarrier& barrier = find(thread, address, kWhat, where);
    check_fenced(thread, barrier, kWhat, where);
    return barrier;
}

Mbarrier& Mbarriers::of_send(Thread& thread, uint32_t address, Location where) {
    constexpr const char* kWhat = "copy to the mbarrier";
    Mbarrier& barrier = find_at(thread, cluster_offset(block_, thread, address, kBytes, kWhat, where), kWhat, where);
    check_fenced(thread, barrier, kWhat, where);
    return barrier;
}

void Mbarriers::check_fenced(Thread& thread, const Mbarrier& barrier, const char* what, Location where) {
    if (!barrier.init_fenced && !block_.order().fenced(barrier.init_thread, barrier.init_stamp, thread.index)) {
        block_.fail(thread, SIM_PROXY, where,
                    format("%s at offset %u, whose initialisation at %s no fence.mbarrier_init has made visible beyond its block's "
                           "threads",
                           what, barrier.offset, text_of(barrier.init_at).c_str()),
                    {barrier.init_at, barrier.init_thread});
    }
}

void Mbarriers::bring(Mbarrier& barrier, int64_t bytes, const Thread& thread, Location where) {
    barrier.awaited -= bytes;
    if (barrier.awaited < -kMost) {
        block_.fail(thread, SIM_MBARRIER, where,
                    format("the bytes of this copy make %lld more than were announced to the mbarrier at offset %u in this "
                           "phase; the limit is 2^20 - 1",
                           static_cast<long long>(-barrier.awaited), barrier.offset),
                    {barrier.init_at, barrier.init_thread});
    }
    end_phase_if_complete(barrier);
}

void Mbarriers::end_phase_if_complete(Mbarrier& barrier) {
    if (barrier.missing != 0 || barrier.awaited != 0) return;
    ++barrier.phase;
    barrier.missing = barrier.count;
    barrier.announced = 0;
    barrier.was_sent = barrier.sent;
    barrier.sent = false;
    barrier.clock.set(barrier.actor, barrier.phase);
    barrier.completed = barrier.clock;
    for (const Mbarrier::Waiter& waiter : barrier.waiters) block_.resume(*waiter.thread);
    barrier.waiters.clear();
}

std::string Mbarriers::describe(std::vector<Other>& firsts) const {
    std::string text;
    for (const Mbarrier& barrier : barriers_) {
        if (barrier.waiters.empty()) continue;
        const Mbarrier::Waiter& first = barrier.waiters.front();
        int low = first.thread->index, high = low;
        for (const Mbarrier::Waiter& waiter : barrier.waiters) {
            low = std::min(low, waiter.thread->index);
            high = std::max(high, waiter.thread->index);
        }
        text += format(" the mbarrier at offset %u (mbarrier.init at %s) is in phase %u with %d of %d arrivals", barrier.offset,
                       text_of(barrier.init_at).c_str(), barrier.phase, barrier.count - barrier.missing, barrier.count);
        if (barrier.announced != 0 || barrier.awaited != 0) {
            text += format(" and %lld of %lld bytes", static_cast<long long>(barrier.announced - barrier.awaited),
                           static_cast<long long>(barrier.announced));
        }
        text += format(", and %zu of the threads %d to %d wait for parity %d at %s;", barrier.waiters.size(), low, high,
                       first.parity, text_of(first.where).c_str());
        firsts.push_back({first.where, first.thread->index});
    }
    return text;
}

void mbarrier_init(uint32_t barrier, int arrivals, Location where) {
    Thread& thread = running_thread();
    thread.owner->mbarriers().init(thread, barrier, arrivals, where);
}

void fence_mbarrier_init(Location) {
    Thread& thread = running_thread();
    thread.owner->mbarriers().fence_init(thread);
}

void mbarrier_arrive(uint32_t barrier, Location where) {
    Thread& thread = running_thread();
    thread.owner->mbarriers().arrive(thread, barrier, where);
}

void mbarrier_arrive_cluster(uint32_t barrier, Location where) {
    Thread& thread = running_thread();
    thread.owner->mbarriers().arrive_in_cluster(thread, barrier, where);
}

void mbarrier_expect_tx(uint32_t barrier, int bytes, Location where) {
    Thread& thread = running_thread();
    thread.owner->mbarriers().expect(thread, barrier, bytes, where);
}

void mbarrier_wait(uint32_t barrier, int parity, bool in_cluster, Location where) {
    Thread& thread = running_thread();
    thread.owner->mbarriers().wait(thread, barrier, parity, in_cluster, where);
}

void fence_proxy_async(Location) {
    Thread& thread = running_thread();
    thread.owner->order().fence(thread.index);
}

}  // namespace flashgen::simulator
