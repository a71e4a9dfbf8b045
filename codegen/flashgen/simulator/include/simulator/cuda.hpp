// The part of CUDA C++ that is in the language and not in a header: qualifiers, built-in variables and intrinsics.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simulator/machine.hpp"
#include "simulator/math.hpp"
#include "simulator/vectors.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__
// One copy for each host thread, and a host thread runs one block at a time.
#define __shared__ thread_local

#define threadIdx (::flashgen::simulator::this_thread().thread_index)
#define blockIdx (::flashgen::simulator::this_thread().block->block_index)
#define blockDim (::flashgen::simulator::this_thread().block->block_dim)
#define gridDim (::flashgen::simulator::this_thread().block->grid_dim)
constexpr int warpSize = 32;

template <typename A, typename B>
    requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using Common = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<Common>) return std::fmin(static_cast<Common>(a), static_cast<Common>(b));
    return static_cast<Common>(b) < static_cast<Common>(a) ? static_cast<Common>(b) : static_cast<Common>(a);
}

template <typename A, typename B>
    requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using Common = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<Common>) return std::fmax(static_cast<Common>(a), static_cast<Common>(b));
    return static_cast<Common>(a) < static_cast<Common>(b) ? static_cast<Common>(b) : static_cast<Common>(a);
}

inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }

inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<uint32_t>(bits)); }
inline int __ffs(int bits) { return bits == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(bits)) + 1; }
inline uint32_t __brev(uint32_t bits) {
    uint32_t reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (bits >> i & 1) << (31 - i);
    return reversed;
}

// Four of the eight bytes of `high` and `low`, by three bits of each nibble of `selector`; the fourth bit asks for the sign.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    uint32_t chosen = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t nibble = selector >> 4 * i & 0xf;
        uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (nibble & 7)) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        chosen |= byte << 8 * i;
    }
    return chosen;
}

// Words of `high` and `low` as one of 64 bits, shifted by so many bits modulo 32, or by at most 32.
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline uint32_t __funnelshift_rc(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift < 32 ? shift : 32));
}

// Four products of bytes and a sum.
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
    for (int i = 0; i < 4; ++i) sum += (a >> 8 * i & 0xff) * (b >> 8 * i & 0xff);
    return sum;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
    return sum;
}

inline float __fdividef(float a, float b) {
    // A divisor of 2^126 or more gives 0.
    return std::fabs(b) > 0x1p126f && !std::isinf(a) && !std::isnan(b) ? 0.0f * a : a / b;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// a b + c, rounded up. The product is exact in double; the error of the sum is found exactly, too (Knuth's two-sum).
inline float __fmaf_ru(float a, float b, float c) {
    const double product = double(a) * b;
    const double sum = product + c;
    const float nearest = static_cast<float>(sum);
    if (!std::isfinite(sum)) return nearest;
    const double of_c = sum - product;
    const double error = (product - (sum - of_c)) + (c - of_c);
    const bool below = nearest < sum || (nearest == sum && error > 0.0);
    return below ? std::nextafter(nearest, HUGE_VALF) : nearest;
}
inline float __fmul_ru(float a, float b) { return __fmaf_ru(a, b, -0.0f); }
inline float __fsub_ru(float a, float b) { return __fmaf_ru(a, 1.0f, -b); }
inline float __fadd_rd(float a, float b) { return -__fmaf_ru(-a, 1.0f, -b); }

inline size_t __cvta_generic_to_shared(
    const void* pointer, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::to_shared_window(pointer, where);
}

namespace flashgen::simulator {

template <typename T>
T shuffle_value(uint32_t mask, T value, Shuffle kind, int operand, int width, Location where) {
    static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = shuffle(mask, bits, kind, operand, width, where);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace flashgen::simulator

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = 32,
              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    using flashgen::simulator::Shuffle;
    return flashgen::simulator::shuffle_value(mask, value, Shuffle::index, lane, width, where);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned int delta, int width = 32,
                 flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    using flashgen::simulator::Shuffle;
    return flashgen::simulator::shuffle_value(mask, value, Shuffle::up, static_cast<int>(delta), width, where);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned int delta, int width = 32,
                   flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    using flashgen::simulator::Shuffle;
    return flashgen::simulator::shuffle_value(mask, value, Shuffle::down, static_cast<int>(delta), width, where);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32,
                  flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    using flashgen::simulator::Shuffle;
    return flashgen::simulator::shuffle_value(mask, value, Shuffle::exclusive_or, lane_mask, width, where);
}

// The sum over all lanes of `mask`, which has to be the whole warp.
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value,
                                  flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(mask, value, distance, 32, where);
    return value;
}

inline int __reduce_add_sync(uint32_t mask, int value,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return static_cast<int>(__reduce_add_sync(mask, static_cast<uint32_t>(value), where));
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::vote(mask, predicate != 0, where).ayes;
}
inline int __any_sync(uint32_t mask, int predicate,
                      flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::vote(mask, predicate != 0, where).ayes != 0;
}
inline int __all_sync(uint32_t mask, int predicate,
                      flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const flashgen::simulator::Votes votes = flashgen::simulator::vote(mask, predicate != 0, where);
    return votes.ayes == votes.voters;
}
inline void __syncwarp(uint32_t mask = 0xffffffff,
                       flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::sync_warp(mask, where);
}
inline void __syncthreads(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::block_barrier(0, flashgen::simulator::kAllThreads, where);
}
