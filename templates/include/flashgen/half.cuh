// PTX of 16-bit loads and stores, for kernels that read arrays of such elements one by one. As ptx.cuh.
#pragma once

#include "flashgen/ptx.cuh"

// ld.global.u16. Not .nc, and volatile, as load_global_32.
__device__ __forceinline__ uint32_t load_global_16(const void* source) {
    uint16_t value;
    asm volatile("ld.global.u16 %0, [%1];\n" : "=h"(value) : "l"(source) : "memory");
    return value;
}

// st.global.u16: the lower half of a value.
__device__ __forceinline__ void store_global_16(void* destination, uint32_t value) {
    asm volatile("st.global.u16 [%0], %1;\n" ::"l"(destination), "h"(uint16_t(value)) : "memory");
}
