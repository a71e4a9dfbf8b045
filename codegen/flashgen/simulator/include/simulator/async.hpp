// What a simulated kernel of compute capability 9.0 may ask of the machine, besides machine.hpp: to wait for the grids ahead, and
// work that goes on by itself once a thread has started it, with the barriers and fences that say when it is done.
#pragma once

#include <cstdint>

#include "simulator/machine.hpp"
#include "simulator/numbers.hpp"

namespace flashgen::simulator {

// griddepcontrol.wait.
void launch_dependents(Location where);
void wait_for_grids(Location where);

// mbarriers, by their address in the shared window.
void mbarrier_init(uint32_t barrier, int arrivals, Location where);
void fence_mbarrier_init(Location where);
void mbarrier_arrive(uint32_t barrier, Location where);
void mbarrier_expect_tx(uint32_t barrier, int bytes, Location where);
// Its acquire has the scope of the cluster, or of the block.
void mbarrier_wait(uint32_t barrier, int parity, bool in_cluster, Location where);

// Clusters: mapa, mbarrier.arrive at a barrier of any block, barrier.cluster. A relaxed arrival publishes mbarriers that the thread has
// initialised and fenced, nothing else.
uint32_t map_shared(uint32_t address, int rank, Location where);
void mbarrier_arrive_cluster(uint32_t barrier, Location where);
void cluster_arrive_relaxed(Location where);
void cluster_wait(Location where);

// fence.proxy.async.
void fence_proxy_async(Location where);

// Tensor copies. `map` points to a SimTensorMap; there are as many coordinates as it has dimensions.
void prefetch_tensor_map(const void* map, Location where);
void tensor_load(uint32_t destination, const void* map, uint32_t barrier, const int* coordinates, int rank, Location where);
void tensor_store(const void* map, uint32_t source, const int* coordinates, int rank, Location where);
// `bytes` that lie together in global memory.
void bulk_load(uint32_t destination, const void* source, uint32_t barrier, int bytes, Location where);
// `bytes` of the thread's block to a block of its cluster, as are the addresses of the destination and the barrier.
void bulk_send(uint32_t destination, uint32_t source, uint32_t barrier, int bytes, Location where);
// st.async: `bytes` of registers, likewise.
void store_async(uint32_t destination, const void* values, int bytes, uint32_t barrier, Location where);
// Groups of a thread's tensor stores. A wait for reading ends when their source has been read.
void tensor_store_commit();
void tensor_store_wait(int pending);

// bar.arrive; bar.red.or.
void barrier_arrive(int id, int threads, Location where);
bool barrier_any(int id, int threads, bool predicate, Location where);

// setmaxnreg.
void set_registers(int count, bool increase, Location where);

// Matrix products of a warpgroup, 64 x 2 * `count` x 16, or x 32 where elements are e4m3. `a` is null where the left operand lies under `a_descriptor`.
enum class Major { k, mn };
struct WarpgroupProduct {
    bool bf16;
    float* accumulator;
    int count;  // of registers in `accumulator`
    const uint32_t* a;
    uint64_t a_descriptor;
    uint64_t b_descriptor;
    Major a_major;
    Major b_major;
    bool accumulate;
    bool e4m3 = false;
};
void multiply_warpgroup(const WarpgroupProduct& product, Location where);

// A wgmma of one step along the K dimension. A is in the registers `a`, or in shared memory under `a_descriptor` where `a` is null.
template <int kCount>
void multiply_step(bool bf16, float (&d)[kCount], const uint32_t* a, uint64_t a_descriptor, Major a_major, uint64_t b, Major b_major,
                   int accumulate, Location where) {
    multiply_warpgroup({.bf16 = bf16,
                        .accumulator = d,
                        .count = kCount,
                        .a = a,
                        .a_descriptor = a_descriptor,
                        .b_descriptor = b,
                        .a_major = a_major,
                        .b_major = b_major,
                        .accumulate = accumulate != 0},
                       where);
}

// The same of e4m3. Both operands are K-major.
template <int kCount>
void multiply_step_e4m3(float (&d)[kCount], const uint32_t* a, uint64_t a_descriptor, uint64_t b, int accumulate, Location where) {
    multiply_warpgroup({.bf16 = false,
                        .accumulator = d,
                        .count = kCount,
                        .a = a,
                        .a_descriptor = a_descriptor,
                        .b_descriptor = b,
                        .a_major = Major::k,
                        .b_major = Major::k,
                        .accumulate = accumulate != 0,
                        .e4m3 = true},
                       where);
}

void warpgroup_fence(Location where);
void warpgroup_commit(Location where);
void warpgroup_wait(int pending, Location where);
// The registers may be used again where the products on them have been waited for.
void pin(float* registers, int count, Location where);
// Fails where the number was read from a register on which a product is at work.
[[noreturn]] void fail_register_under_way(Location where);
inline void check_register(float value, Location where) {
    if (is_under_way(value)) fail_register_under_way(where);
}

}  // namespace flashgen::simulator
