// PTX of kernels of compute capability 9.0a that stage 16-bit elements of a score modification in shared memory. As ptx.cuh.
#pragma once

#include "flashgen/ptx.cuh"

// st.shared.u16: the lower half of a value.
__device__ __forceinline__ void store_shared_16(shared_address destination, uint32_t value) {
    asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(destination), "h"(uint16_t(value)) : "memory");
}

// cp.async.mbarrier.arrive.noinc: arrives once all cp.async of the thread so far are complete. The barrier's count includes it.
__device__ __forceinline__ void cp_async_mbarrier_arrive(shared_address barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

// ldmatrix.x4.trans: as ldmatrix_x4, each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
}
