// Stands for half.cuh in the simulator.
#pragma once

#include "flashgen/ptx.cuh"

inline uint32_t load_global_16(const void* source,
                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint16_t value;
    flashgen::simulator::load_global(&value, source, 2, where);
    return value;
}

inline void store_global_16(void* destination, uint32_t value,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const uint16_t half = uint16_t(value);
    flashgen::simulator::store_global(destination, &half, 2, where);
}
