// Storage types, as templates/include/flashgen/types.cuh has them; the simulator's built-ins stand in for CUDA's.
#pragma once

#include "simulator/cuda.hpp"

// Arithmetic on the 16-bit types happens only inside the matrix instructions.
struct fp16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};
struct e4m3 {
    uint8_t bits;
};
using fp32 = float;
