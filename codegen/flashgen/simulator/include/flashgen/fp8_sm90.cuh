// Host bodies for the functions of templates/include/flashgen/fp8_sm90.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/e4m3.cuh"
#include "flashgen/sm90.cuh"

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], shared_address row,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::load_matrices(fragment, row, true, where);
}

// wgmma_m64nNk32_e4m3_ss and its like, of the widths that kernels have.
#define FLASHGEN_WGMMA_E4M3(n)                                                                                                  \
    inline void wgmma_m64n##n##k32_e4m3_ss(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate,                           \
                                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {    \
        flashgen::simulator::multiply_step_e4m3(d, nullptr, a, b, accumulate, where);                                           \
    }                                                                                                                           \
    inline void wgmma_m64n##n##k32_e4m3_rs(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate,               \
                                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {    \
        flashgen::simulator::multiply_step_e4m3(d, a, 0, b, accumulate, where);                                                 \
    }
FLASHGEN_WGMMA_E4M3(64) FLASHGEN_WGMMA_E4M3(96) FLASHGEN_WGMMA_E4M3(128) FLASHGEN_WGMMA_E4M3(160) FLASHGEN_WGMMA_E4M3(192)
FLASHGEN_WGMMA_E4M3(224) FLASHGEN_WGMMA_E4M3(256)
#undef FLASHGEN_WGMMA_E4M3
