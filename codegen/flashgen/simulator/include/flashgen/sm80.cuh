// Host bodies for the functions of templates/include/flashgen/sm80.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/ptx.cuh"
#include "simulator/machine.hpp"

inline shared_address to_shared(const void* pointer,
                                flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::to_shared_window(pointer, where);
}

inline void barrier_sync(int threads, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::block_barrier(1, threads, where);
}

inline void barrier_sync(int barrier, int threads,
                         flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::block_barrier(barrier, threads, where);
}

inline void barrier_arrive(int barrier, int threads,
                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::barrier_arrive(barrier, threads, where);
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], shared_address row,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::load_matrices(fragment, row, true, where);
}

inline uint32_t load_shared_8(shared_address source,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint8_t value;
    flashgen::simulator::load_shared(&value, source, 1, where);
    return value;
}

inline float2 load_shared_64(shared_address source,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    float2 values;
    flashgen::simulator::load_shared(&values, source, 8, where);
    return values;
}

inline void store_shared_64(shared_address destination, uint32_t low, uint32_t high,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const uint32_t values[2] = {low, high};
    flashgen::simulator::store_shared(destination, values, 8, where);
}

inline void store_shared_128(shared_address destination, uint4 value,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_shared(destination, &value, 16, where);
}

template <typename Element>
inline void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    static_assert(std::is_same_v<Element, fp16> || std::is_same_v<Element, bf16>);
    constexpr auto kKind = std::is_same_v<Element, fp16> ? flashgen::simulator::MatrixProduct::m16n8k16_f16
                                                         : flashgen::simulator::MatrixProduct::m16n8k16_bf16;
    flashgen::simulator::multiply_matrices(kKind, accumulator, a, b0, b1, where);
}

constexpr uint32_t kTf32Bits = 0xffffe000;
constexpr uint32_t kTf32Half = 0x00001000;  // half a unit of its last place

inline void mma_m16n8k8_tf32(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::multiply_matrices(flashgen::simulator::MatrixProduct::m16n8k8_tf32, accumulator, a, b0, b1,
                                           where);
}
