// setmaxnreg: warps that hand registers to each other.
#pragma once

#include <string>
#include <vector>

#include "simulator/machine.hpp"

namespace flashgen::simulator {

class Block;
struct Other;
struct Thread;
struct Warp;

class RegisterPool {
  public:
    // A block's threads begin with as many registers each as its launch bounds allow, with `min_blocks` of them on a multiprocessor. Each
    // block of a cluster has a pool of its own.
    RegisterPool(Block& block, int max_threads, int min_blocks, int warps, int blocks);

    void reset();

    // A warp asks for `count` registers a thread. Returns false where it has to wait for them.
    bool change(Warp& warp, int count, bool increase, Location where);

    std::string describe(std::vector<Other>& firsts) const;

    // Fails where the warps of a warpgroup have not all made the same changes as the last thread returns.
    void check_end();

  private:
    struct Request {
        Warp* warp;
        int count;
        Location where;
    };
    struct Change {
        int count;
        bool increase;
        Location where;
        int warp;
    };

    void grant();
    int groups_of_block() const;
    int group_of(int warp) const;

    Block& block_;
    int at_launch_;
    int warps_of_block_;
    std::vector<int> free_;                     // of each block
    std::vector<int> registers_;                // of a thread, by warp
    std::vector<size_t> changes_;               // that each warp has made
    std::vector<std::vector<Change>> history_;  // of each warpgroup, blocks one after another
    std::vector<Request> waiting_;
};

}  // namespace flashgen::simulator
