// PTX that kernels of every architecture use. Thin wrappers of PTX; the comment of each names its instruction. The headers of the
// architectures include it.
#pragma once

#include "flashgen/types.cuh"

// Shared memory as PTX addresses it: bytes from the start of the shared window.
using shared_address = uint32_t;

// %ctaid.x, read anew: it need not be kept in a register.
__device__ __forceinline__ int block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(index));
    return index;
}

// Whether a grid may begin while the one before it is still running.
#if __CUDA_ARCH__ >= 900
constexpr bool kGridsOverlap = true;
#else
constexpr bool kGridsOverlap = false;
#endif

// griddepcontrol.wait: returns when all earlier grids have ended and their writes are visible. A dependent launch may start before that. Compiles to nothing before sm_90, where no launch is dependent.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: once all blocks have executed it or exited, the next grid may begin if it is a dependent
// launch. Compiles to nothing before sm_90.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// prefetch.global.L2: brings the line with this address into L2. Allowed before griddepcontrol.wait: a grid that still writes the line
// writes it in L2, too. Compiles to nothing before sm_90, where no launch is dependent.
__device__ __forceinline__ void prefetch_l2(const void* address) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
#endif
}

// cvt.rn.{f16x2,bf16x2}.f32: two floats rounded to nearest even, `low` in the lower half.
template <typename Element>
__device__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<fp16>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The two halves of a pair as floats: cvt.f32.f16 of each; a bf16 is the upper half of a float.
template <typename Element>
__device__ float2 unpack(uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack<fp16>(uint32_t pair) {
    float2 values;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
        : "=f"(values.x), "=f"(values.y)
        : "r"(pair));
    return values;
}

template <>
__device__ __forceinline__ float2 unpack<bf16>(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

// cvt.rn.satfinite.e4m3x2.f32: two floats rounded to nearest even e4m3, `low` in the lower byte of 16 bits. What is past 448 becomes 448;
// NaN becomes the code 0x7f.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    // Before sm_89 there is no such instruction.
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t bits = __float_as_uint(i == 0 ? low : high);
        const float size = fminf(__uint_as_float(bits & 0x7fffffff), 448.0f);
        // From 2^-6 on: round off all but 3 bits of the fraction, and count the exponent from -7.
        const uint32_t rounded = __float_as_uint(size) + 0x7ffff + (__float_as_uint(size) >> 20 & 1);
        const uint32_t normal = (rounded >> 20) - (120 << 3);
        // Below: whole steps of 2^-9, which is what the last bit of a float from 2^14 on counts.
        const uint32_t subnormal = __float_as_uint(size + 16384.0f) & 0xf;
        const uint32_t code = (size < 0x1p-6f ? subnormal : normal) | (bits >> 24 & 0x80);
        pair |= ((bits & 0x7fffffff) > 0x7f800000 ? 0x7f : code) << (8 * i);
    }
    return pair;
#endif
}

// cvt.rn.f16x2.e4m3x2: two e4m3 codes as 16-bit numbers, which hold them exactly; of `codes` the lower 16 bits count. NaN stays NaN.
template <typename Element>
__device__ uint32_t unpack_e4m3(uint32_t codes);

template <>
__device__ __forceinline__ uint32_t unpack_e4m3<fp16>(uint32_t codes) {
    uint32_t pair;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
#else
    // Before sm_89 there is no such instruction. A code has the exponent and fraction bits of an fp16 number that is 2^8 times smaller.
    const uint32_t spread = (codes & 0xff) | (codes & 0xff00) << 8;
    const uint32_t size = (spread & 0x007f007f) << 7;
    asm("mul.f16x2 %0, %1, %2;\n" : "=r"(pair) : "r"(size), "r"(0x5c005c00));
    // The code 0x7f is NaN, and 480 so far: only here the sum reaches bit 14.
    const uint32_t is_nan = (size + 0x00800080) & 0x40004000;
    pair |= (is_nan << 1) - (is_nan >> 14) | (spread & 0x00800080) << 8;
#endif
    return pair;
}

// From fp16, as there is no instruction for it.
template <>
__device__ __forceinline__ uint32_t unpack_e4m3<bf16>(uint32_t codes) {
    const float2 values = unpack<fp16>(unpack_e4m3<fp16>(codes));
    return pack<bf16>(values.x, values.y);
}

// ex2.approx.ftz.f32: 2^x; exactly 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// lg2.approx.f32: log2(x).
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// rcp.approx.ftz.f32: 1 / x.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// tanh.approx.f32: relative error 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// ld.global.u8, .u32, .v2.f32, .v4.u32. Not .nc, and volatile: the previous grid may write the source until griddepcontrol.wait
// returns.
__device__ __forceinline__ uint32_t load_global_8(const uint8_t* source) {
    uint32_t value;
    asm volatile("ld.global.u8 %0, [%1];\n" : "=r"(value) : "l"(source) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t load_global_32(const void* source) {
    uint32_t value;
    asm volatile("ld.global.u32 %0, [%1];\n" : "=r"(value) : "l"(source) : "memory");
    return value;
}

// ld.relaxed.gpu.global.u32: from L2. A value that is loaded before griddepcontrol.wait may be stale. It is not cached in L1, so that a load
// after the wait does not find it there.
__device__ __forceinline__ uint32_t load_relaxed_32(const void* source) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(source) : "memory");
    return value;
}

__device__ __forceinline__ float2 load_global_64(const float* source) {
    float2 values;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];\n" : "=f"(values.x), "=f"(values.y) : "l"(source) : "memory");
    return values;
}

__device__ __forceinline__ uint4 load_global_128(const void* source) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source)
                 : "memory");
    return value;
}

// st.global.f32, st.global.u32, st.global.v2.f32, st.global.v2.u32, st.global.v4.u32.
__device__ __forceinline__ void store_global_32(float* destination, float value) {
    asm volatile("st.global.f32 [%0], %1;\n" ::"l"(destination), "f"(value) : "memory");
}

__device__ __forceinline__ void store_global_32(void* destination, uint32_t value) {
    asm volatile("st.global.u32 [%0], %1;\n" ::"l"(destination), "r"(value) : "memory");
}

__device__ __forceinline__ void store_global_64(float* destination, float low, float high) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};\n" ::"l"(destination), "f"(low), "f"(high) : "memory");
}

__device__ __forceinline__ void store_global_64(void* destination, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};\n" ::"l"(destination), "r"(value.x), "r"(value.y) : "memory");
}

__device__ __forceinline__ void store_global_128(void* destination, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(destination), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// No instruction: hides from the compiler how the value was computed, so that it keeps the value instead of recomputing it.
template <typename T>
__device__ __forceinline__ void opaque(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}

// Floats that red_add() of four adds with one instruction.
#if __CUDA_ARCH__ >= 900
constexpr int kRedWidth = 4;
#else
constexpr int kRedWidth = 1;
#endif

// red.global.add.f32: an atomic addition without a result; relaxed, at gpu scope.
__device__ __forceinline__ void red_add(float* destination, float value) {
    asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(destination), "f"(value) : "memory");
}

// red.global.add.v4.f32: the same for four floats, 16-byte aligned. Before sm_90 there is none, and this does nothing: kRedWidth.
__device__ __forceinline__ void red_add_128(float* destination, const float (&values)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(destination), "f"(values[0]), "f"(values[1]),
                 "f"(values[2]), "f"(values[3])
                 : "memory");
#endif
}

// ld.acquire.gpu.u32. Pairs with store_release_32() and add_release_32(): writes that precede the release are visible after this load.
__device__ __forceinline__ uint32_t load_acquire_32(const void* source) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(source) : "memory");
    return value;
}

// st.release.gpu.u32.
__device__ __forceinline__ void store_release_32(void* destination, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;\n" ::"l"(destination), "r"(value) : "memory");
}

// red.release.gpu.add.u32: an atomic addition without a result. A load_acquire_32() that reads the sum sees all writes before each of the
// additions.
__device__ __forceinline__ void add_release_32(void* destination, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(destination), "r"(value) : "memory");
}

// atom.inc: adds 1; a counter that is `largest` becomes 0. Returns the value before; relaxed, at gpu scope.
__device__ __forceinline__ uint32_t increment_and_wrap(int32_t* counter, int largest) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(counter), "r"(largest) : "memory");
    return before;
}

// atom.relaxed.gpu.add.u32: an atomic addition that returns the value before it.
__device__ __forceinline__ uint32_t fetch_add_32(void* destination, uint32_t value) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(destination), "r"(value) : "memory");
    return before;
}

// cp.async.cg.shared.global: 16 bytes, past L1. The first `source_bytes` are read, the rest become 0; with 0 the source
// need not be a valid address.
__device__ __forceinline__ void cp_async_16(shared_address destination, const void* source, int source_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(source_bytes)
                 : "memory");
}

// cp.async.ca.shared.global: 4 bytes, of which the first `source_bytes` (0 to 4) are read and the rest zero-filled.
__device__ __forceinline__ void cp_async_4(shared_address destination, const void* source, int source_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(destination), "l"(source), "r"(source_bytes)
                 : "memory");
}

// cp.async.commit_group: closes the group of copies that this thread has issued since the last one.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// cp.async.wait_group: waits until at most `kPending` of this thread's groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ld.shared.u16, ld.shared.u32, ld.shared.v4.u32, st.shared.u8, st.shared.u32.
__device__ __forceinline__ uint32_t load_shared_16(shared_address source) {
    uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(source) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t load_shared_32(shared_address source) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(source) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_shared_128(shared_address source) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(source)
                 : "memory");
    return value;
}

// ldmatrix.x4: four 8x8 matrices of 16-bit elements. Lane l gives the address of row l%8 of matrix l/8 and receives
// elements 2*(l%4), 2*(l%4)+1 of row l/4 of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void store_shared_8(shared_address destination, uint32_t value) {
    asm volatile("st.shared.u8 [%0], %1;\n" ::"r"(destination), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_32(shared_address destination, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(destination), "r"(value) : "memory");
}
