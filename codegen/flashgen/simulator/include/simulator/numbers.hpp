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

// cvt.rn.f16x2.e4m3x2 of one code, which a float holds as well.
inline float e4m3_to_float(uint8_t code) {
    const int exponent = code >> 3 & 15, steps = code & 7;
    if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(kCanonicalNan32);
    const float size = exponent == 0 ? std::ldexp(float(steps), -9) : std::ldexp(float(8 + steps), exponent - 10);
    return code & 0x80 ? -size : size;
}

// The value of a code, but for its sign, is `fraction` * 2^(exponent - 3). NaN has the fraction -1.
struct E4m3 {
    int fraction;
    int exponent;
};

inline E4m3 decode_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 0x7f) == 0x7f) return {-1, 0};
    return exponent == 0 ? E4m3{fraction, -6} : E4m3{8 + fraction, exponent - 7};
}

// A sum of the e4m3 tensor core: cut off towards zero after 13 bits of fraction.
inline double truncate_to_13_bits(double value) {
    if (value == 0.0 || !std::isfinite(value)) return value;
    const int exponent = std::ilogb(value);
    return std::ldexp(std::trunc(std::ldexp(value, 13 - exponent)), exponent - 13);
}

constexpr int kDepthE4m3 = 32;  // products of an e4m3 instruction

// sum + a . b in the e4m3 tensor core; `left` is a, decoded. Products and the sum are cut off at 2^-13 of the largest of them, by exponent.
inline float add_products_e4m3(float sum, const uint8_t* a, const E4m3* left, const uint8_t* b) {
    E4m3 right[kDepthE4m3];
    int largest = sum == 0.0f || !std::isfinite(sum) ? -1000 : std::ilogb(sum);
    bool is_nan = !std::isfinite(sum);
    for (int k = 0; k < kDepthE4m3; ++k) {
        right[k] = decode_e4m3(b[k]);
        is_nan |= left[k].fraction < 0 || right[k].fraction < 0;
        if (left[k].fraction * right[k].fraction != 0) largest = std::max(largest, left[k].exponent + right[k].exponent);
    }
    if (is_nan) return std::bit_cast<float>(kCanonicalNan32);
    if (largest == -1000) return 0.0f;
    int64_t units = 0;  // of 2^(largest - 13)
    for (int k = 0; k < kDepthE4m3; ++k) {
        const int fraction = left[k].fraction * right[k].fraction;
        // fraction counts 2^(exponents - 6).
        const int shift = left[k].exponent + right[k].exponent - largest + 7;
        const int64_t size = fraction == 0 || shift < -16 ? 0 : shift >= 0 ? int64_t{fraction} << shift : fraction >> -shift;
        units += (a[k] ^ b[k]) & 0x80 ? -size : size;
    }
    const double carried = std::trunc(std::ldexp(static_cast<double>(sum), 13 - largest));
    return static_cast<float>(truncate_to_13_bits(std::ldexp(static_cast<double>(units) + carried, largest - 13)));
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
