// PTX of compute capability 8.9 (Ada) for kernels whose elements are e4m3. Thin wrappers of PTX; the comment of each names its instruction.
//
// A kernel includes this header and nothing else, so that a header of the same name with other bodies (a simulator's, say) can stand in for
// it.
#pragma once

#include "flashgen/e4m3.cuh"
#include "flashgen/sm80.cuh"

// mma.m16n8k32: accumulator (16x8, fp32) += a (16x32) . b (32x8), a and b of e4m3. The tensor core cuts the 32 products and the accumulator off
// at 2^-13 of the largest, adds them, and keeps 13 bits of the fraction.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
