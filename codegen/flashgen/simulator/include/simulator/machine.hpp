// What a simulated kernel may ask of the machine: the seam between the wrappers of an architecture and the engine.
//
// Every function runs on the stack of the CUDA thread that calls it. One that finds a fault does not return.
#pragma once

#include <cstdint>
#include <source_location>

#include "simulator/abi.h"
#include "simulator/vectors.hpp"

namespace flashgen::simulator {

using Location = std::source_location;

// The part of a block that its threads see.
struct BlockView {
    uint3 block_index;
    dim3 block_dim;
    dim3 grid_dim;
    SimCounters* counters;
};

struct ThreadView {
    uint3 thread_index;
    BlockView* block;
};

// Each thread has a stack of this size, at a multiple of it, whose last word points to the thread: who is running is
// known from the stack pointer, without thread-local storage.
constexpr uintptr_t kStackBytes = 256 * 1024;

inline ThreadView& this_thread() {
    uintptr_t stack;
#if defined(__x86_64__)
    asm("mov %%rsp, %0" : "=r"(stack));
#elif defined(__aarch64__)
    asm("mov %0, sp" : "=r"(stack));
#else
    stack = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
#endif
    return **reinterpret_cast<ThreadView**>((stack | (kStackBytes - 1)) - (sizeof(void*) - 1));
}

// Shared memory. Addresses are bytes of the shared window; `size` is 1, 2, 4, 8 or 16.
uint32_t to_shared_window(const void* pointer, Location where);
void load_shared(void* value, uint32_t address, int size, Location where);
void store_shared(uint32_t address, const void* value, int size, Location where);

// Global memory.
void load_global(void* value, const void* address, int size, Location where);
void store_global(void* address, const void* value, int size, Location where);
// ld.relaxed of 32 bits. Ahead of griddepcontrol.wait it may find another value than behind it.
uint32_t load_relaxed(const void* address, Location where);

// Adds `count` neighbouring floats in one instruction: each on its own is atomic, with blocks of other calls too.
void add_global(float* address, const float* values, int count, Location where);

// A load that sees what was done before the store_release of the value that it finds. The loading thread may be waiting for another
// value: others go on first, and a value that nobody is left to change is a deadlock.
uint32_t load_acquire(const void* address, Location where);
void store_release(void* address, uint32_t value, Location where);
// An atomic addition that releases as store_release does.
void add_release(void* address, uint32_t value, Location where);
// An atomic increment from `largest` to 0. Returns what was there.
uint32_t increment_and_wrap(void* address, uint32_t largest, Location where);
// An atomic addition that returns the value before it, and orders nothing else.
uint32_t fetch_add(void* address, uint32_t value, Location where);

// Asynchronous copies of a thread, and its groups of them.
void copy_async(uint32_t destination, const void* source, int size, int source_bytes, Location where);
void copy_commit();
void copy_wait(int pending);

// Warp-wide operations: every lane of the mask calls the same one from the same line.
enum class Shuffle { index, up, down, exclusive_or };
uint64_t shuffle(uint32_t mask, uint64_t value, Shuffle kind, int operand, int width, Location where);
struct Votes {
    uint32_t voters;
    uint32_t ayes;
};
Votes vote(uint32_t mask, bool predicate, Location where);
void sync_warp(uint32_t mask, Location where);
// True for one lane of the whole warp. Which it is, the PTX ISA leaves open; it is the same one each time.
bool elect(Location where);

// Barrier `id` of the block, for `threads` threads or for all that have not returned.
constexpr int kAllThreads = -1;
void block_barrier(int id, int threads, Location where);

// ldmatrix.x4, stmatrix.x4, and mma.sync with fp32 accumulators.
void load_matrices(uint32_t (&fragment)[4], uint32_t row, bool transposed, Location where);
void store_matrices(uint32_t row, const uint32_t (&matrices)[4], Location where);
enum class MatrixProduct { m16n8k16_f16, m16n8k16_bf16, m16n8k8_tf32, m16n8k32_e4m3 };
void multiply_matrices(MatrixProduct kind, float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                       Location where);

}  // namespace flashgen::simulator
