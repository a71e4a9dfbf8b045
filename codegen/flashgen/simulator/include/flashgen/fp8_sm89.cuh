// Host bodies for the functions of templates/include/flashgen/fp8_sm89.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/e4m3.cuh"
#include "flashgen/sm80.cuh"

inline void mma_m16n8k32_e4m3(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::multiply_matrices(flashgen::simulator::MatrixProduct::m16n8k32_e4m3, accumulator, a, b0, b1, where);
}
