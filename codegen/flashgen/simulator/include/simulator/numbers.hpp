// Conversions between number formats, bit by bit as the hardware does them, and its approximate functions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "simulator/math.hpp"

namespace flashgen::simulator {

constexpr uint16_t kCanonicalNan16 = 0x7fff;
constexpr uint32_t kCanonicalNan32 = 0x7fffffff;

// What the compiler's -ftrivial-auto-var-init=pattern fills registers with that the kernel leaves unset.
#if defined(__clang__)
constexpr uint32_t kUnsetInteger = 0xaaaaaaaa;
constexpr uint32_t kUnsetFloat = 0xffffffff;
#else
constexpr uint32_t kUnsetInteger = 0xfefefefe;
constexpr uint32_t kUnsetFloat = 0xfefefefe;
#endif

inline bool is_unset(uint32_t value) { return value == kUnsetInteger; }
inline bool is_unset(float value) { return std::bit_cast<uint32_t>(value) == kUnsetFloat; }

// What registers hold while a matrix product is at work on them: a signalling NaN. Arithmetic makes it a quiet one, so that
// both a register that is written and a value that is derived from one are recognised.
inline float under_way_pattern() { return std::bit_cast<float>(0x7f9a5a5a); }
inline bool is_under_way(float value) { return (std::bit_cast<uint32_t>(value) & 0x7fbfffff) == 0x7f9a5a5a; }

inline float fp16_to_float(uint16_t bits) {
    // An exponent of all ones stays one; any other moves from bias 15 to bias 127, which a multiplication does for
    // subnormal numbers too.
    const uint32_t sign = uint32_t{bits} << 16 & 0x80000000;
    const uint32_t magnitude = uint32_t{bits} << 13 & 0x0fffe000;
    if (magnitude >= 0x0f800000) return std::bit_cast<float>(sign | 0x70000000 | magnitude);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// cvt.rn.f16.f32: to nearest even; too large becomes infinite, NaN the canonical one.
inline uint16_t float_to_fp16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return kCanonicalNan16;
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // Subnormal: an addition that leaves the units of 2^-24 in the lowest bits rounds them to nearest even.
        const float sum = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f)));
    }
    const uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | rounded >> 13);
}

// cvt.rn.bf16.f32, likewise.
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return kCanonicalNan16;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// cvt.rn.satfinite.e4m3x2.f32 of one number.
inline uint8_t float_to_e4m3(float value) {
    if (std::isnan(value)) return 0x7f;
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    const float size = std::min(std::fabs(value), 448.0f);
    const int exponent = std::max(size == 0.0f ? -6 : std::ilogb(size), -6);
    // In steps of the last bit, rounded to nearest even; 16 steps are the next exponent.
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
    return static_cast<uint8_t>(sign | (8 * (exponent + 6) + steps));
}

// ex2.approx.ftz.f32: subnormal arguments and results are zeros.
inline float exp2_ftz(float x) {
    const float y = std::exp2(x);
    if (std::isnan(y)) return std::bit_cast<float>(kCanonicalNan32);
    return y < 0x1p-126f ? 0.0f : y;
}

// lg2.approx.f32: -inf for zeros, NaN for what is below them.
inline float log2_canonical(float x) {
    return x < 0.0f || std::isnan(x) ? std::bit_cast<float>(kCanonicalNan32) : std::log2(x);
}

// tanh.approx.f32: its relative error is up to 2^-11, which dropping bits of the exact value comes near.
inline float tanh_rounded(float x) {
    const float y = std::tanh(x);
    return std::isnan(y) ? std::bit_cast<float>(kCanonicalNan32) : std::bit_cast<float>(std::bit_cast<uint32_t>(y) & 0xfffff000);
}

// The sum in a matrix instruction's accumulator: cut off towards zero where fp32 ends.
inline float truncate_to_float(double value) {
    const float nearest = static_cast<float>(value);
    if (std::isnan(nearest)) return std::bit_cast<float>(kCanonicalNan32);
    if (std::isinf(nearest) || std::fabs(static_cast<double>(nearest)) <= std::fabs(value)) return nearest;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(nearest) - 1);
}

}  // namespace flashgen::simulator
