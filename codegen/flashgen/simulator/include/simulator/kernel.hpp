// A kernel as the engine sees it: how to call it from a buffer of parameters, and what it says about itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simulator/abi.h"

namespace flashgen::simulator {

// What compute capability 9.0 allows a block.
constexpr uint64_t kMaxSharedBytes = 227 * 1024;

struct Kernel {
    const char* name;
    void (*call)(const void* params);
    uint64_t params_bytes;
    uint64_t params_align;
    uint32_t max_threads;  // of a block, by its launch bounds
    uint32_t min_blocks;   // of a multiprocessor, likewise
    uint32_t cluster;      // blocks of a cluster, which have neighbouring indices
};

// Runs the blocks of a launch with `shared_memory`, kMaxSharedBytes long, as everybody's shared memory.
int simulate(const Kernel& kernel, unsigned char* shared_memory, const SimLaunch& launch, SimReport& report);

// Parameters follow each other at their natural alignment, as in the driver's parameter buffer.
template <auto kFunction>
struct Parameters;

template <typename... Args, void (*kFunction)(Args...)>
struct Parameters<kFunction> {
    static_assert((std::is_trivially_copyable_v<Args> && ...), "a kernel's parameters are copied as bytes");

    static constexpr uint64_t kAlign = [] {
        uint64_t align = 1;
        ((align = alignof(Args) > align ? alignof(Args) : align), ...);
        return align;
    }();

    static constexpr uint64_t kBytes = [] {
        uint64_t end = 0;
        ((end = (end + alignof(Args) - 1) / alignof(Args) * alignof(Args) + sizeof(Args)), ...);
        return end;
    }();

    static void call(const void* params) {
        auto* next = static_cast<const unsigned char*>(params);
        uint64_t offset = 0;
        auto take = [&]<typename T>(std::type_identity<T>) -> const T& {
            offset = (offset + alignof(T) - 1) / alignof(T) * alignof(T);
            const T& value = *reinterpret_cast<const T*>(next + offset);
            offset += sizeof(T);
            return value;
        };
        // Braces evaluate from left to right, a call's arguments in any order.
        struct Call {
            explicit Call(const Args&... args) { kFunction(args...); }
        };
        Call{take(std::type_identity<Args>{})...};
    }
};

}  // namespace flashgen::simulator
