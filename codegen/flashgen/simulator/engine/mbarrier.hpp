// mbarriers: objects in shared memory whose phase ends when so many threads have arrived and all announced bytes are there.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "order.hpp"
#include "simulator/machine.hpp"

namespace flashgen::simulator {

class Block;
struct Thread;
struct Other;

struct Mbarrier {
    struct Waiter {
        Thread* thread;
        int parity;
        Location where;
    };

    uint32_t offset;
    int actor;  // the party that brings bytes to this barrier; its stamps are phases, the first of them 1
    int count;  // arrivals of a phase
    int missing;
    int64_t announced;  // bytes in this phase
    int64_t awaited;    // bytes announced and not there; less than 0 where they came first
    uint32_t phase;     // how many have ended
    Clock clock;        // of all that has arrived
    Clock completed;    // likewise, up to the phase that ended last
    int init_thread;
    uint32_t init_stamp;
    bool init_fenced;
    Location init_at;
    std::vector<Waiter> waiters;
    bool sent = false;      // st.async of another block has brought bytes in this phase
    bool was_sent = false;  // likewise, in the phase that ended last
};

class Mbarriers {
  public:
    explicit Mbarriers(Block& block) : block_(block) {}

    void reset() { barriers_.clear(); }

    void init(Thread& thread, uint32_t address, int arrivals, Location where);
    void fence_init(Thread& thread);
    void arrive(Thread& thread, uint32_t address, Location where);
    // At a barrier of any block of the cluster.
    void arrive_in_cluster(Thread& thread, uint32_t address, Location where);
    void expect(Thread& thread, uint32_t address, int bytes, Location where);
    // `in_cluster` is the scope of its acquire: that of the cluster, or of the block.
    void wait(Thread& thread, uint32_t address, int parity, bool in_cluster, Location where);

    // The barrier to which a copy of `thread` will bring its bytes.
    Mbarrier& of_copy(Thread& thread, uint32_t address, Location where);
    // Likewise, where it may be one of any block of the cluster.
    Mbarrier& of_send(Thread& thread, uint32_t address, Location where);
    // Bytes of a copy that `thread` started are there.
    void bring(Mbarrier& barrier, int64_t bytes, const Thread& thread, Location where);

    // Who waits for what, in words, each sentence with a space before it; adds the first waiter of each barrier.
    std::string describe(std::vector<Other>& firsts) const;

  private:
    Mbarrier& find(Thread& thread, uint32_t address, const char* what, Location where);
    Mbarrier& find_at(Thread& thread, uint32_t offset, const char* what, Location where);
    void arrive_at(Thread& thread, Mbarrier& barrier, Location where);
    void check_fenced(Thread& thread, const Mbarrier& barrier, const char* what, Location where);
    void end_phase_if_complete(Mbarrier& barrier);

    Block& block_;
    std::deque<Mbarrier> barriers_;
    std::vector<int> actors_;
};

}  // namespace flashgen::simulator
