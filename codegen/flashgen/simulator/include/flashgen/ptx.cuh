// Host bodies for the functions of templates/include/flashgen/ptx.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/types.cuh"
#include "simulator/async.hpp"
#include "simulator/machine.hpp"
#include "simulator/numbers.hpp"

using shared_address = uint32_t;

inline int block_index() { return static_cast<int>(flashgen::simulator::this_thread().block->block_index.x); }

constexpr bool kGridsOverlap = true;

inline void griddepcontrol_wait(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::wait_for_grids(where);
}

// Blocks of other launches are not simulated.
inline void griddepcontrol_launch_dependents(
    flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::launch_dependents(where);
}

// Changes nothing that a kernel could see.
inline void prefetch_l2(const void* address) { (void)address; }

template <typename Element>
inline uint32_t pack(float low, float high,
                     flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(low, where);
    flashgen::simulator::check_register(high, where);
    static_assert(std::is_same_v<Element, fp16> || std::is_same_v<Element, bf16>);
    if constexpr (std::is_same_v<Element, fp16>) {
        return flashgen::simulator::float_to_fp16(low) | uint32_t{flashgen::simulator::float_to_fp16(high)} << 16;
    } else {
        return flashgen::simulator::float_to_bf16(low) | uint32_t{flashgen::simulator::float_to_bf16(high)} << 16;
    }
}

template <typename Element>
inline float2 unpack(uint32_t pair,
                     flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(pair, where);
    static_assert(std::is_same_v<Element, fp16> || std::is_same_v<Element, bf16>);
    const uint16_t low = static_cast<uint16_t>(pair), high = static_cast<uint16_t>(pair >> 16);
    if constexpr (std::is_same_v<Element, fp16>) {
        return {flashgen::simulator::fp16_to_float(low), flashgen::simulator::fp16_to_float(high)};
    } else {
        return {flashgen::simulator::bf16_to_float(low), flashgen::simulator::bf16_to_float(high)};
    }
}

inline uint32_t pack_e4m3(float low, float high,
                          flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(low, where);
    flashgen::simulator::check_register(high, where);
    return flashgen::simulator::float_to_e4m3(low) | uint32_t{flashgen::simulator::float_to_e4m3(high)} << 8;
}

template <typename Element>
inline uint32_t unpack_e4m3(uint32_t codes,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(codes, where);
    const float low = flashgen::simulator::e4m3_to_float(static_cast<uint8_t>(codes));
    const float high = flashgen::simulator::e4m3_to_float(static_cast<uint8_t>(codes >> 8));
    return pack<Element>(low, high, where);
}

inline float exp2_approx(float x, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(x, where);
    ++flashgen::simulator::this_thread().block->counters->exp2;
    return flashgen::simulator::exp2_ftz(x);
}

inline float log2_approx(float x, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(x, where);
    ++flashgen::simulator::this_thread().block->counters->log2;
    return flashgen::simulator::log2_canonical(x);
}

inline float rcp_approx(float x, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(x, where);
    return 1.0f / x;
}

inline float tanh_approx(float x, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(x, where);
    return flashgen::simulator::tanh_rounded(x);
}

inline uint32_t load_global_8(const uint8_t* source,
                              flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint8_t value;
    flashgen::simulator::load_global(&value, source, 1, where);
    return value;
}

inline uint32_t load_global_32(const void* source,
                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint32_t value;
    flashgen::simulator::load_global(&value, source, 4, where);
    return value;
}

inline uint32_t load_relaxed_32(const void* source,
                                flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::load_relaxed(source, where);
}

inline float2 load_global_64(const float* source,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    float2 values;
    flashgen::simulator::load_global(&values, source, 8, where);
    return values;
}

inline uint4 load_global_128(const void* source,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint4 value;
    flashgen::simulator::load_global(&value, source, 16, where);
    return value;
}

inline void store_global_32(float* destination, float value,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(value, where);
    flashgen::simulator::store_global(destination, &value, 4, where);
}

inline void store_global_32(void* destination, uint32_t value,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_global(destination, &value, 4, where);
}

inline void store_global_64(float* destination, float low, float high,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(low, where);
    flashgen::simulator::check_register(high, where);
    const float values[2] = {low, high};
    flashgen::simulator::store_global(destination, values, 8, where);
}

inline void store_global_64(void* destination, uint2 value,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_global(destination, &value, 8, where);
}

inline void store_global_128(void* destination, uint4 value,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_global(destination, &value, 16, where);
}

constexpr int kRedWidth = 4;

template <typename T>
inline void opaque(T*& pointer) {
    static_cast<void>(pointer);
}

inline void red_add(float* destination, float value,
                    flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(value, where);
    flashgen::simulator::add_global(destination, &value, 1, where);
}

inline void red_add_128(float* destination, const float (&values)[4],
                        flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    for (const float value : values) flashgen::simulator::check_register(value, where);
    flashgen::simulator::add_global(destination, values, 4, where);
}

inline uint32_t load_acquire_32(const void* source,
                                flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::load_acquire(source, where);
}

inline void store_release_32(void* destination, uint32_t value,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_release(destination, value, where);
}

inline void add_release_32(void* destination, uint32_t value,
                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::add_release(destination, value, where);
}

inline uint32_t increment_and_wrap(int32_t* counter, int largest,
                                   flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::increment_and_wrap(counter, largest, where);
}

inline uint32_t fetch_add_32(void* destination, uint32_t value,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::fetch_add(destination, value, where);
}

inline void cp_async_16(shared_address destination, const void* source, int source_bytes,
                        flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::copy_async(destination, source, 16, source_bytes, where);
}

inline void cp_async_4(shared_address destination, const void* source, int source_bytes,
                       flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::copy_async(destination, source, 4, source_bytes, where);
}

inline void cp_async_commit() { flashgen::simulator::copy_commit(); }

template <int kPending>
inline void cp_async_wait() {
    flashgen::simulator::copy_wait(kPending);
}

inline uint32_t load_shared_16(shared_address source,
                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint16_t value;
    flashgen::simulator::load_shared(&value, source, 2, where);
    return value;
}

inline uint32_t load_shared_32(shared_address source,
                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint32_t value;
    flashgen::simulator::load_shared(&value, source, 4, where);
    return value;
}

inline uint4 load_shared_128(shared_address source,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    uint4 value;
    flashgen::simulator::load_shared(&value, source, 16, where);
    return value;
}

inline void ldmatrix_x4(uint32_t (&fragment)[4], shared_address row,
                        flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::load_matrices(fragment, row, false, where);
}

inline void store_shared_8(shared_address destination, uint32_t value,
                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const uint8_t byte = static_cast<uint8_t>(value);
    flashgen::simulator::store_shared(destination, &byte, 1, where);
}

inline void store_shared_32(shared_address destination, uint32_t value,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_shared(destination, &value, 4, where);
}
