// Matrix descriptors: where wgmma finds an operand in shared memory.
#pragma once

#include <cstdint>

#include "simulator/async.hpp"
#include "swizzle.hpp"

namespace flashgen::simulator {

// The fields of a descriptor, in bytes.
struct MatrixDescriptor {
    uint32_t start;
    uint32_t leading;
    uint32_t stride;
    uint32_t base_offset;
    uint32_t swizzle;  // period; 0: none
};

constexpr MatrixDescriptor decode(uint64_t bits) {
    constexpr uint32_t kSwizzles[] = {0, 128, 64, 32};
    auto field = [bits](int first) { return static_cast<uint32_t>(bits >> first & 0x3fff) << 4; };
    return {field(0), field(16), field(32), static_cast<uint32_t>(bits >> 49 & 7), kSwizzles[bits >> 62]};
}

// The address of eight elements of 16 bits that lie together: where the summed dimension is contiguous, `row` (of A, or
// column of B) and eight of it from 8 * `step`; where it is not, one of it, `row`, and eight columns from 8 * `step`. These
// are the canonical layouts of the PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout".
constexpr uint32_t chunk_address(const MatrixDescriptor& matrix, Major major, uint32_t row, uint32_t step) {
    const uint32_t chunks = matrix.swizzle / 16;  // of a row of the swizzle's atom, which has eight rows
    uint32_t address = matrix.start;
    if (major == Major::k) {
        address += row / 8 * matrix.stride;
        address += chunks == 0 ? row % 8 * 16 + step * matrix.leading : row % 8 * matrix.swizzle + step * 16;
    } else if (chunks == 0) {
        address += row % 8 * 16 + row / 8 * matrix.leading + step * matrix.stride;
    } else {
        address += row % 8 * matrix.swizzle + row / 8 * matrix.stride + step % chunks * 16 + step / chunks * matrix.leading;
    }
    return swizzled(address, matrix.swizzle);
}

}  // namespace flashgen::simulator
