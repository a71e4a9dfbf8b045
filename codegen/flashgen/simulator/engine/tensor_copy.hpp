// Copies between tensors in global memory and boxes in shared memory, which the copy engine makes when it gets to them.
#pragma once

#include <cstdint>
#include <vector>

#include "random.hpp"
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
    void store(Thread& thread, const void* map, uint32_t source, const int* coordinates, int rank, Location where);
    void commit(Thread& thread);
    void wait(Thread& thread, int pending);

    // Loads and sends that have been started and are not there.
    bool any_under_way() const { return !loads_.empty() || !sends_.empty(); }
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

    Block& block_;
    void finish_send(const Send& send);

    std::vector<Load> loads_;
    std::vector<Send> sends_;
    std::vector<Store> stores_;
    std::vector<int> groups_;  // that each thread has committed
};

}  // namespace flashgen::simulator
