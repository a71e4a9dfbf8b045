// Stands for staged.cuh in the simulator.
#pragma once

#include "flashgen/ptx.cuh"

inline void store_shared_16(shared_address destination, uint32_t value,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const uint16_t half = uint16_t(value);
    flashgen::simulator::store_shared(destination, &half, 2, where);
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], shared_address row,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::load_matrices(fragment, row, true, where);
}
