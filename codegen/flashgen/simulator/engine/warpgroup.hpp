// Matrix products of a warpgroup (wgmma): what is under way, on which registers, and who has waited for it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "shared_memory.hpp"
#include "simulator/async.hpp"

namespace flashgen::simulator {

class Block;
struct Other;
struct Thread;
struct Warp;

constexpr int kWarpsOfGroup = 4;
constexpr int kThreadsOfGroup = 32 * kWarpsOfGroup;

// Registers of a thread that products work on. Until they are done and pinned, the thread's own memory holds a pattern
// there, and what the products have made of them stands here.
struct Accumulator {
    float* registers;
    std::vector<float> values;
    uint32_t last_product;  // counted from 1
    bool done;              // all products have been waited for
    Location where;         // of the last product
};

class Warpgroup {
  public:
    Warpgroup(Block& block, int first_thread);

    void reset();

    // The lanes of a warp, which have just met, make a product, a fence, a commit or a wait; a wait returns false where the
    // warp does not go on yet.
    void multiply(Warp& warp, Location where);
    void fence(Warp& warp);
    void commit(Warp& warp);
    bool wait(Warp& warp, int pending, Location where);

    // One of its threads uses registers again.
    void pin(Thread& thread, float* registers, int count, Location where);

    // Registers that are used before that, where the value is one of them.
    [[noreturn]] void fail_use(Thread& thread, Location where);

    std::string describe(std::vector<Other>& firsts) const;

  private:
    struct Product {
        WarpgroupProduct operands;  // of the first lane
        Location where;
        int warps = 0;  // that have made it
        size_t group;   // of products, as the first warp counts them
        Accumulator* accumulators[kThreadsOfGroup];
        const uint32_t* a[kThreadsOfGroup];
        uint32_t a_values[kThreadsOfGroup][4];
    };
    struct WarpState {
        uint32_t made = 0;             // products
        uint32_t waited = 0;           // products that it has waited for
        bool fenced = false;           // since it waited last
        size_t groups = 0;             // closed
        std::vector<uint32_t> closed;  // products made when each group was closed that has not been waited for
        Warp* waiting = nullptr;       // for other warps to make their products
        uint32_t target = 0;
        Location where;
    };

    Accumulator* track(const Thread& thread, const WarpgroupProduct& operands, bool& under_way, Location where);
    Accumulator* find(const Thread& thread, const float* registers);
    void execute(const Product& product);
    void execute_e4m3(const Product& product);
    void end_wait(WarpState& state, Warp& warp);
    Product& product(uint32_t number) { return products_[number - first_]; }
    int member_of(const Thread& thread) const;
    WarpState& state_of(const Warp& warp);

    Block& block_;
    int first_thread_;
    int actor_ = -1;
    WarpState warps_[kWarpsOfGroup];
    uint32_t executed_ = 0;
    uint32_t first_ = 1;  // number of the first in products_
    std::deque<Product> products_;
    std::vector<std::unique_ptr<Accumulator>> accumulators_[kThreadsOfGroup];
    std::vector<double> a_, b_;
    std::vector<uint8_t> a_codes_, b_codes_;
};

}  // namespace flashgen::simulator
