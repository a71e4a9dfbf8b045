// PTX that kernels with dropout use, on every architecture. Thin wrappers of PTX; the comment of each names its instruction.
#pragma once

#include "flashgen/types.cuh"

// set.le.u32.f16x2: 0xffff in each half where a <= b, else 0. Halves below 0x7c00 compare as integers.
__device__ __forceinline__ uint32_t halves_at_most(uint32_t a, uint32_t b) {
    uint32_t mask;
    asm("set.le.u32.f16x2 %0, %1, %2;\n" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
}

// movmatrix.trans: an 8x8 matrix of 16-bit elements, of which lane l has elements 2*(l%4), 2*(l%4)+1 of row l/4, becomes its transpose.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(pair));
    return transposed;
}
