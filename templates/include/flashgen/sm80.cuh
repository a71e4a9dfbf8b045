// PTX of compute capability 8.0. Thin wrappers of PTX; the comment of each names its instruction.
//
// All PTX of the Ampere kernels is here and in ptx.cuh. A kernel includes this header and nothing else, so that a header of the same name
// with other bodies (a simulator's, say) can stand in for it.
#pragma once

#include "flashgen/ptx.cuh"

__device__ __forceinline__ shared_address to_shared(const void* pointer) {
    return static_cast<shared_address>(__cvta_generic_to_shared(pointer));
}

// bar.sync 1: waits until `threads` threads have arrived, from wherever in the program, and makes their writes visible.
__device__ __forceinline__ void barrier_sync(int threads) { asm volatile("bar.sync 1, %0;\n" ::"r"(threads) : "memory"); }

// bar.sync with a number of its own: 0 to 15.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// bar.arrive: arrives at such a barrier without waiting for the others.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// ldmatrix.x4.trans: as ldmatrix_x4, each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
}

// ld.shared.u8, ld.shared.v2.f32.
__device__ __forceinline__ uint32_t load_shared_8(shared_address source) {
    uint32_t value;
    asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(value) : "r"(source) : "memory");
    return value;
}

__device__ __forceinline__ float2 load_shared_64(shared_address source) {
    float2 values;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(values.x), "=f"(values.y) : "r"(source) : "memory");
    return values;
}

// st.shared.v2.u32, st.shared.v4.u32.
__device__ __forceinline__ void store_shared_64(shared_address destination, uint32_t low, uint32_t high) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(destination), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void store_shared_128(shared_address destination, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(destination), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// mma.m16n8k16: accumulator (16x8, fp32) += a (16x16) . b (16x8), a and b of 16-bit elements.
template <typename Element>
__device__ void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<fp16>(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The bits of a float that make its TF32 number: sign, exponent and 10 bits of the mantissa.
constexpr uint32_t kTf32Bits = 0xffffe000;
constexpr uint32_t kTf32Half = 0x00001000;  // half a unit of its last place

// mma.m16n8k8: accumulator (16x8, fp32) += a (16x8) . b (8x8), a and b floats of which only kTf32Bits are read.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
