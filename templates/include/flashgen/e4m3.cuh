// PTX of compute capability 8.9 for elements that are e4m3. Thin wrappers of PTX; the comment of each names its instruction.
#pragma once

#include "flashgen/ptx.cuh"

// cvt.rn.satfinite.e4m3x2.f32, twice: four floats rounded to nearest even e4m3, the first in the lowest byte. What is past 448 becomes 448.
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}\n"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
