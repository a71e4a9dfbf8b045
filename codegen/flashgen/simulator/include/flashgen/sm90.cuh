// Host bodies for the functions of templates/include/flashgen/sm90.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/cluster.cuh"
#include "flashgen/ptx.cuh"
#include "simulator/async.hpp"
#include "simulator/machine.hpp"

struct alignas(64) tensor_map {
    uint64_t opaque[16];
};
static_assert(sizeof(tensor_map) == sizeof(SimTensorMap));

inline shared_address to_shared(const void* pointer,
                                flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::to_shared_window(pointer, where);
}

inline void prefetch_tensormap(const tensor_map& map,
                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::prefetch_tensor_map(&map, where);
}

inline bool elect_one(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::elect(where);
}

inline void fence_proxy_async(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::fence_proxy_async(where);
}

inline void tma_load_4d(shared_address destination, const tensor_map& map, shared_address barrier, int c0, int c1, int c2,
                        int c3, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const int coordinates[4] = {c0, c1, c2, c3};
    flashgen::simulator::tensor_load(destination, &map, barrier, coordinates, 4, where);
}

inline void tma_prefetch_4d(const tensor_map& map, int c0, int c1, int c2, int c3,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::prefetch_tensor_map(&map, where);
}

inline void tma_load_5d(shared_address destination, const tensor_map& map, shared_address barrier, int c0, int c1, int c2,
                        int c3, int c4, flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const int coordinates[5] = {c0, c1, c2, c3, c4};
    flashgen::simulator::tensor_load(destination, &map, barrier, coordinates, 5, where);
}

inline void tma_store_4d(const tensor_map& map, shared_address source, int c0, int c1, int c2, int c3,
                         flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const int coordinates[4] = {c0, c1, c2, c3};
    flashgen::simulator::tensor_store(&map, source, coordinates, 4, where);
}

inline void tma_store_5d(const tensor_map& map, shared_address source, int c0, int c1, int c2, int c3, int c4,
                         flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const int coordinates[5] = {c0, c1, c2, c3, c4};
    flashgen::simulator::tensor_store(&map, source, coordinates, 5, where);
}

inline void bulk_load(shared_address destination, const void* source, shared_address barrier, int bytes,
                      flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::bulk_load(destination, source, barrier, bytes, where);
}

inline void tma_store_commit() { flashgen::simulator::tensor_store_commit(); }

template <int kPending>
inline void tma_store_wait_read() {
    flashgen::simulator::tensor_store_wait(kPending);
}

template <int kPending>
inline void tma_store_wait() {
    flashgen::simulator::tensor_store_wait(kPending);
}

inline void stmatrix_x4(shared_address row, const uint32_t (&matrices)[4],
                        flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_matrices(row, matrices, where);
}

inline void barrier_sync(int barrier, int threads,
                         flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::block_barrier(barrier, threads, where);
}

inline void barrier_arrive(int barrier, int threads,
                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::barrier_arrive(barrier, threads, where);
}

inline bool barrier_red_or(int barrier, int threads, bool predicate,
                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::barrier_any(barrier, threads, predicate, where);
}

template <int kRegisters>
inline void setmaxnreg_inc(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::set_registers(kRegisters, true, where);
}

template <int kRegisters>
inline void setmaxnreg_dec(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::set_registers(kRegisters, false, where);
}

inline void wgmma_fence(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::warpgroup_fence(where);
}

inline void wgmma_commit(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::warpgroup_commit(where);
}

template <int kPending>
inline void wgmma_wait(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::warpgroup_wait(kPending, where);
}

inline void store_shared_64(shared_address destination, uint32_t low, uint32_t high,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const uint32_t values[2] = {low, high};
    flashgen::simulator::store_shared(destination, values, 8, where);
}

inline void store_shared_128(shared_address destination, float a, float b, float c, float d,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    const float values[4] = {a, b, c, d};
    for (const float value : values) flashgen::simulator::check_register(value, where);
    flashgen::simulator::store_shared(destination, values, 16, where);
}

inline float2 load_shared_64(shared_address source,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    float2 values;
    flashgen::simulator::load_shared(&values, source, 8, where);
    return values;
}

inline void opaque(int& value) { (void)value; }

template <int kCount>
inline void pin_registers(float (&registers)[kCount],
                          flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::pin(registers, kCount, where);
}

// Words are operands only, which a wgmma reads: no result waits to be pinned.
template <int kCount>
inline void pin_registers(uint32_t (&registers)[kCount]) {
    (void)registers;
}

// wgmma_m64nNk16_fp16_ss and its like, of every width: a kernel leaves its own out where FLASHGEN_SIMULATOR is defined.
#define FLASHGEN_SIMULATOR
#define FLASHGEN_WGMMA_OF(n, type)                                                                                               \
    inline void wgmma_m64n##n##k16_##type##_ss(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate,                        \
                                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) { \
        using enum flashgen::simulator::Major;                                                                                   \
        flashgen::simulator::multiply_step(std::is_same_v<type, bf16>, d, nullptr, a, k, b, k, accumulate, where);               \
    }                                                                                                                            \
    inline void wgmma_m64n##n##k16_##type##_ss_mn(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate,                     \
                                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) { \
        using enum flashgen::simulator::Major;                                                                                   \
        flashgen::simulator::multiply_step(std::is_same_v<type, bf16>, d, nullptr, a, mn, b, mn, accumulate, where);             \
    }                                                                                                                            \
    inline void wgmma_m64n##n##k16_##type##_rs(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate,            \
                                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) { \
        using enum flashgen::simulator::Major;                                                                                   \
        flashgen::simulator::multiply_step(std::is_same_v<type, bf16>, d, a, 0, k, b, mn, accumulate, where);                    \
    }                                                                                                                            \
    inline void wgmma_m64n##n##k16_##type##_rs_k(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate,          \
                                               flashgen::simulator::Location where = flashgen::simulator::Location::current()) { \
        using enum flashgen::simulator::Major;                                                                                   \
        flashgen::simulator::multiply_step(std::is_same_v<type, bf16>, d, a, 0, k, b, k, accumulate, where);                     \
    }
#define FLASHGEN_WGMMA(n) FLASHGEN_WGMMA_OF(n, fp16) FLASHGEN_WGMMA_OF(n, bf16)
FLASHGEN_WGMMA(8) FLASHGEN_WGMMA(16) FLASHGEN_WGMMA(24) FLASHGEN_WGMMA(32) FLASHGEN_WGMMA(40) FLASHGEN_WGMMA(48) FLASHGEN_WGMMA(56) FLASHGEN_WGMMA(64)
FLASHGEN_WGMMA(72) FLASHGEN_WGMMA(80) FLASHGEN_WGMMA(88) FLASHGEN_WGMMA(96) FLASHGEN_WGMMA(104) FLASHGEN_WGMMA(112) FLASHGEN_WGMMA(120) FLASHGEN_WGMMA(128)
FLASHGEN_WGMMA(136) FLASHGEN_WGMMA(144) FLASHGEN_WGMMA(152) FLASHGEN_WGMMA(160) FLASHGEN_WGMMA(168) FLASHGEN_WGMMA(176) FLASHGEN_WGMMA(184) FLASHGEN_WGMMA(192)
FLASHGEN_WGMMA(200) FLASHGEN_WGMMA(208) FLASHGEN_WGMMA(216) FLASHGEN_WGMMA(224) FLASHGEN_WGMMA(232) FLASHGEN_WGMMA(240) FLASHGEN_WGMMA(248) FLASHGEN_WGMMA(256)
#undef FLASHGEN_WGMMA
#undef FLASHGEN_WGMMA_OF

inline void store_shared_128(shared_address destination, uint4 value,
                             flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::store_shared(destination, &value, 16, where);
}
