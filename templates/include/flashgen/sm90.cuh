// PTX of compute capability 9.0a (Hopper). Thin wrappers of PTX; the comment of each names its instruction. A kernel defines
// the wgmma.mma_async of its shapes itself.
//
// A kernel includes only this header, so a header of the same name with other bodies, for example the simulator's, can replace it.
#pragma once

#include "flashgen/cluster.cuh"
#include "flashgen/ptx.cuh"

// A CUtensorMap: the description of a tensor in global memory that TMA reads. The host encodes it; it is opaque here.
struct alignas(64) tensor_map {
    uint64_t opaque[16];
};

__device__ __forceinline__ shared_address to_shared(const void* pointer) {
    shared_address address;
    asm volatile("{\n.reg .u64 shared;\ncvta.to.shared.u64 shared, %1;\ncvt.u32.u64 %0, shared;\n}\n" : "=r"(address) : "l"(pointer));
    return address;
}

// prefetch.tensormap: brings a tensor map into TMA's cache.
__device__ __forceinline__ void prefetch_tensormap(const tensor_map& map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// elect.sync: true in one lane, always the same. All 32 lanes must call it. ptxas then knows that one lane takes the branch, and puts no loop
// over lanes around TMA.
__device__ __forceinline__ bool elect_one() {
    int elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.s32 %0, 1, 0, p;\n}\n" : "=r"(elected));
    return elected != 0;
}

// cp.async.bulk.tensor.4d: copies a box of the tensor, at coordinates c0 to c3, into shared memory. Elements outside of the
// tensor become zeros. Reports its bytes to `barrier`.
__device__ __forceinline__ void tma_load_4d(shared_address destination, const tensor_map& map, shared_address barrier, int c0,
                                            int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(
            destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// cp.async.bulk.prefetch.tensor.4d: brings the lines of a box of the tensor into L2.
__device__ __forceinline__ void tma_prefetch_4d(const tensor_map& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];\n" ::"l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// cp.async.bulk.tensor.5d.
__device__ __forceinline__ void tma_load_5d(shared_address destination, const tensor_map& map, shared_address barrier, int c0,
                                            int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];\n" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// cp.async.bulk.tensor.4d: copies a box of shared memory to coordinates c0 to c3 of the tensor. Elements outside of it are skipped.
__device__ __forceinline__ void tma_store_4d(const tensor_map& map, shared_address source, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&map),
                 "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// cp.async.bulk.tensor.5d.
__device__ __forceinline__ void tma_store_5d(const tensor_map& map, shared_address source, int c0, int c1, int c2, int c3,
                                             int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n" ::"l"(&map),
                 "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

// cp.async.bulk: `bytes` of global memory, a multiple of 16 as both addresses are, into shared memory. Reports them to `barrier`.
__device__ __forceinline__ void bulk_load(shared_address destination, const void* source, shared_address barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// cp.async.bulk.commit_group: the thread's stores since the last one form a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// cp.async.bulk.wait_group.read: all but the last kPending groups of the thread have read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

// fence.proxy.async: orders the thread's accesses to shared memory before later accesses by TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// stmatrix.x4: four 8x8 matrices of 16-bit elements, whose rows go where lane 8 i + j says for row j of matrix i.
__device__ __forceinline__ void stmatrix_x4(shared_address row, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

// ld.shared.v2.f32, st.shared.v2.u32, st.shared.v4.f32.
__device__ __forceinline__ float2 load_shared_64(shared_address source) {
    float2 values;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(values.x), "=f"(values.y) : "r"(source) : "memory");
    return values;
}

__device__ __forceinline__ void store_shared_64(shared_address destination, uint32_t low, uint32_t high) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(destination), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void store_shared_128(shared_address destination, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(destination), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// bar.sync / bar.arrive: named barriers, 0 to 15, that `threads` threads complete.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// bar.red.or: bar.sync that tells whether `predicate` holds for any of the threads.
__device__ __forceinline__ bool barrier_red_or(int barrier, int threads, bool predicate) {
    int any;
    asm volatile(
        "{\n.reg .pred given, found;\n"
        "setp.ne.s32 given, %1, 0;\n"
        "bar.red.or.pred found, %2, %3, given;\n"
        "selp.s32 %0, 1, 0, found;\n}\n"
        : "=r"(any)
        : "r"(int(predicate)), "r"(barrier), "r"(threads)
        : "memory");
    return any;
}

// setmaxnreg: a warpgroup takes registers from the thread block's pool, or returns registers to it.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// wgmma.fence: orders register accesses before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// wgmma.commit_group / wgmma.wait_group: closes a group of wgmmas; waits until at most kPending groups are in flight.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// No instruction: hides from the compiler how the value was computed, so that it keeps the value instead of recomputing it.
__device__ __forceinline__ void opaque(int& value) { asm volatile("" : "+r"(value)); }

// No instruction: keeps the compiler from moving uses of registers that a wgmma works on across this point.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin_registers(uint32_t (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
