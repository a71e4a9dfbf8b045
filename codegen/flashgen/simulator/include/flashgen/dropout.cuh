// Host bodies for the functions of templates/include/flashgen/dropout.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/types.cuh"
#include "simulator/machine.hpp"
#include "simulator/numbers.hpp"

inline uint32_t halves_at_most(uint32_t a, uint32_t b) {
    using flashgen::simulator::fp16_to_float;
    const auto at_most = [](uint32_t x, uint32_t y) {
        return fp16_to_float(static_cast<uint16_t>(x)) <= fp16_to_float(static_cast<uint16_t>(y)) ? 0xffffu : 0u;
    };
    return at_most(a, b) | at_most(a >> 16, b >> 16) << 16;
}

inline uint32_t transpose_matrix(uint32_t pair,
                                 flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(pair, where);
    const int lane = static_cast<int>(threadIdx.x % 32);
    uint32_t halves[2];
    for (int half = 0; half < 2; ++half) {
        const int row = lane % 4 * 2 + half, column = lane / 4;
        const uint32_t source = __shfl_sync(0xffffffff, pair, row * 4 + column / 2, 32, where);
        halves[half] = source >> 16 * (column % 2) & 0xffff;
    }
    return halves[0] | halves[1] << 16;
}
