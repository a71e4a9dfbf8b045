// PTX of compute capability 9.0a (Hopper) for kernels whose elements are e4m3. Thin wrappers of PTX; the comment of each names its instruction.
//
// A kernel includes this header and nothing else, so that a header of the same name with other bodies (a simulator's, say) can stand in for
// it.
#pragma once

#include "flashgen/e4m3.cuh"
#include "flashgen/sm90.cuh"

// ldmatrix.x4.trans: as ldmatrix_x4, each matrix of 16-bit elements, here pairs of e4m3, transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
}
