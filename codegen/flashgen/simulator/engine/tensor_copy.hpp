// Asynchronous copies of TMA between global and shared memory, and what blocks of a cluster send each other. Loads and sends complete in any
// order.
#pragma once

#include <cstdint>
#include <vector>

#include "random.hpp"
#include "shared_memory.hpp"
#include "simulator/machine.hpp"

namespace flashgen::simulator {

class Block;
struct Mbarrier;
struct Thread;

class TensorCopies {
  public:
    explicit TensorCopies(Block& block) : block_(block) {}

    void reset();

    void check_map(const Thread& thread, const void* map, int rank, Location where);
    void load(Thread& thread, uint32_t destination, const void* map, uint32_t barrier, const int* coordinates, int rank,
              Location where);
    void load_bulk(Thread& thread, uint32_t destination, const void* source, uint32_t barrier, int bytes, Location where);
    // `bytes` from the thread's block to a block of the cluster.
    void send(Thread& thread, uint32_t destination, uint32_t source, uint32_t barrier, int bytes, Location where);
    // st.async: `bytes` of registers to a block of the cluster.
    void store_remote(Thread& thread, uint32_t destination, const void* values, int bytes, uint32_t barrier, Location where);
    void store(Thread& thread, const void* map, uint32_t source, const int* coordinates, int rank, Location where);
    void commit(Thread& thread);
    void wait(Thread& thread, int pending);

    // Loads, sends and remote stores that have been started and are not there.
    bool any_under_way() const { return !loads_.empty() || !sends_.empty() || !remote_stores_.empty(); }
    void finish_one(Random& random);

    // Fails where a copy is still at work on shared memory as the last thread of a block returns.
    void check_end(const Thread& last);

  private:
    struct Load {
        SimTensorMap map;
        int coordinates[5];
        uint32_t destination;  // in the shared window
        Mbarrier* barrier;
        Thread* thread;
        Location where;
    };
    struct Send {
        uint32_t destination;  // offsets in the cluster's shared memory
        uint32_t source;
        uint32_t bytes;
        Mbarrier* barrier;
        Thread* thread;
        Location where;
    };
    struct RemoteStore {
        uint32_t destination;  // an offset in the cluster's shared memory
        uint32_t bytes;
        unsigned char values[kChunkBytes];
        Mbarrier* barrier;
        Thread* thread;
        Location where;
    };
    struct Store {
        uint32_t source;
        uint32_t bytes;
        uint32_t swizzle;
        int thread;
        int group;  // of the thread
        Location where;
    };

    SimTensorMap read_map(const Thread& thread, const void* map, int rank, Location where);
    void check_bulk(const Thread& thread, int bytes, const char* what, Location where);
    uint32_t box_offset(const Thread& thread, uint32_t address, uint32_t bytes, uint32_t alignment, const char* what, Location where);
    void start_load(Thread& thread, uint32_t destination, const SimTensorMap& map, uint32_t barrier, const int* coordinates,
                    const char* what, Location where);

    uint32_t sent_offset(Thread& thread, uint32_t destination, uint32_t bytes, uint32_t alignment, const Mbarrier& barrier,
                         const char* what, Location where);
    void finish_load(const Load& load);
    void finish_send(const Send& send);
    void finish_remote_store(const RemoteStore& store);

    Block& block_;
    std::vector<Load> loads_;
    std::vector<Send> sends_;
    std::vector<RemoteStore> remote_stores_;
    std::vector<Store> stores_;
    std::vector<int> groups_;  // that each thread has committed
};

}  // namespace flashgen::simulator
