// Integer and storage types, alike under NVRTC, which has no standard library, and nvcc.
#pragma once

#if defined(__CUDACC_RTC__)
using int32_t = int;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
// The one spelling of an offset that NVRTC accepts in a constant expression.
#define offsetof(type, member) __INTADDR__(&((type*)0)->member)
#define INFINITY __int_as_float(0x7f800000)
#else
#include <cmath>
#include <cstddef>
#include <cstdint>
#endif

// Arithmetic on the 16-bit types happens only inside the matrix instructions.
struct fp16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};
// A code: 4 bits of exponent and 3 of fraction.
struct e4m3 {
    uint8_t bits;
};
using fp32 = float;
