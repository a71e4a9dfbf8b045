// Host bodies for the functions of templates/include/flashgen/e4m3.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/ptx.cuh"

inline uint32_t pack_e4m3x4(float a, float b, float c, float d,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return pack_e4m3(a, b, where) | pack_e4m3(c, d, where) << 16;
}
