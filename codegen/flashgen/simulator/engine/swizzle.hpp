// How tensor copies and matrix products permute chunks of 16 bytes in shared memory.
#pragma once

#include <cstdint>

namespace flashgen::simulator {

// The address at which the chunk of `address` lies under a swizzle with a period of 32, 64 or 128 bytes, or without one (0):
// the bits from 7 up change those from 4 up.
constexpr uint32_t swizzled(uint32_t address, uint32_t period) {
    return period == 0 ? address : address ^ ((address >> 7 & (period / 16 - 1)) << 4);
}

}  // namespace flashgen::simulator
