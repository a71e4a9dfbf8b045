// Stands for staged.cuh in the simulator.
#pragma once

#include "flashgen/ptx.cuh"

inline void store_shared_16(shared_address destination, uint32_t value,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const uint16_t half = uint16_t(value);
    flashgen::simulator::store_shared(destination, &half, 2, where);
}

// The copies are complete at once, which is as early as they can be.
inline void cp_async_mbarrier_arrive(shared_address barrier,
                                     flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::copy_commit();
    flashgen::simulator::copy_wait(0);
    flashgen::simulator::mbarrier_arrive(barrier, where);
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], shared_address row,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::load_matrices(fragment, row, true, where);
}
