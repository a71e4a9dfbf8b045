// PTX of Hopper for mbarriers and for transfers between the thread blocks of a cluster. Thin wrappers of PTX; the comment of each names its
// instruction. The headers of the architectures include it.
#pragma once

#include "flashgen/ptx.cuh"

// mbarrier.init: a barrier whose phase ends after `arrivals` arrivals (and the bytes that were announced).
__device__ __forceinline__ void mbarrier_init(shared_address barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes initialised barriers visible to TMA and to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive(shared_address barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrives and announces bytes that asynchronous copies will bring in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(shared_address barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity in a loop: returns when the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(shared_address barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// mbarrier.try_wait.parity.acquire.cluster: as mbarrier_wait(), for data that other blocks of the cluster have sent by st.async.
__device__ __forceinline__ void mbarrier_wait_cluster(shared_address barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// mapa: the address in shared::cluster of this shared memory address of the block with rank `rank`.
__device__ __forceinline__ shared_address map_shared(shared_address address, int rank) {
    shared_address mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// mbarrier.arrive: at a barrier of any block of the cluster, at an address of map_shared(). Its release has the scope of the block, so it
// publishes no writes to the other block. That is enough to release a buffer: the wgmmas and copies that read it have been awaited. A release at the
// scope of the cluster would wait for all outstanding writes to global memory, too.
__device__ __forceinline__ void mbarrier_arrive_cluster(shared_address barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// cp.async.bulk: `bytes` of shared memory, a multiple of 16 as both addresses are, to a block of the cluster. Reports them to `barrier`
// there; both are addresses of map_shared().
__device__ __forceinline__ void bulk_send(shared_address destination, shared_address source, shared_address barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(destination),
                 "r"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// st.async: two and four floats to a block of the cluster. Reports its bytes to `barrier` there; both are addresses of map_shared().
__device__ __forceinline__ void store_async_64(shared_address destination, float a, float b, shared_address barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];\n" ::"r"(destination), "f"(a), "f"(b),
                 "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_async_128(shared_address destination, const float (&values)[4], shared_address barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(destination),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
                 : "memory");
}

// barrier.cluster.arrive.relaxed: all threads of the cluster arrive. Call fence_mbarrier_init() before it, to make initialised barriers visible.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory"); }

// barrier.cluster.wait.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }
