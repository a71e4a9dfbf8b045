#include "shared_memory.hpp"

#include <bit>
#include <cstring>

namespace flashgen::simulator {
namespace {

constexpr uint32_t kChunkBytes = 16;
constexpr unsigned char kPoison = 0xff;  // NaN in every format

uint16_t bytes_of(uint32_t offset, int size) {
    return static_cast<uint16_t>(((1u << size) - 1) << offset % kChunkBytes);
}

bool writes(Touch touch) { return touch >= Touch::store; }

}  // namespace

const char* name_of(Touch touch) {
    switch (touch) {
        case Touch::load: return "load";
        case Touch::load_matrices: return "ldmatrix";
        case Touch::store: return "store";
        case Touch::copy_in_flight:
        case Touch::copy: return "cp.async";
    }
    return "";
}

SharedMemory::SharedMemory(unsigned char* bytes, uint32_t size, const Order& order)
    : bytes_(bytes), size_(size), order_(order), chunks_((size + kChunkBytes - 1) / kChunkBytes) {}

void SharedMemory::reset() {
    std::memset(bytes_, kPoison, size_);
    for (Chunk& chunk : chunks_) {
        chunk.written = 0;
        chunk.accesses.clear();
    }
}

Collision SharedMemory::load(int thread, uint32_t offset, int size, Touch touch, Location where) {
    Chunk& chunk = chunks_[offset / kChunkBytes];
    const uint16_t bytes = bytes_of(offset, size);
    const uint32_t chunk_offset = offset / kChunkBytes * kChunkBytes;
    size_t kept = 0;
    Collision collision;
    for (size_t i = 0; i < chunk.accesses.size(); ++i) {
        Access& access = chunk.accesses[i];
        const uint16_t common = access.bytes & bytes;
        if (common != 0) {
            if (access.touch == Touch::copy_in_flight) {
                return {Collision::in_flight, access, chunk_offset + std::countr_zero(common)};
            }
            const bool ordered = order_.before(access.thread, access.stamp, thread);
            if (writes(access.touch)) {
                if (!ordered && collision.kind == Collision::none) {
                    collision = {Collision::race, access, chunk_offset + std::countr_zero(common)};
                }
            } else if (ordered) {
                // What comes after this load comes after that one too.
                access.bytes &= static_cast<uint16_t>(~bytes);
                if (access.bytes == 0) continue;
            }
        }
        if (kept != i) chunk.accesses[kept] = access;
        ++kept;
    }
    chunk.accesses.resize(kept);
    if (collision.kind != Collision::none) return collision;
    if (const uint16_t missing = bytes & ~chunk.written; missing != 0) {
        return {Collision::uninitialised, {}, chunk_offset + std::countr_zero(missing)};
    }
    chunk.accesses.push_back({where, order_.stamp(thread), static_cast<uint16_t>(thread), bytes, touch});
    return {};
}

Collision SharedMemory::store(int thread, uint32_t offset, int size, Touch touch, Location where) {
    Chunk& chunk = chunks_[offset / kChunkBytes];
    const uint16_t bytes = bytes_of(offset, size);
    const uint32_t chunk_offset = offset / kChunkBytes * kChunkBytes;
    size_t kept = 0;
    for (size_t i = 0; i < chunk.accesses.size(); ++i) {
        Access& access = chunk.accesses[i];
        const uint16_t common = access.bytes & bytes;
        if (common != 0) {
            const uint32_t address = chunk_offset + std::countr_zero(common);
            if (access.touch == Touch::copy_in_flight) return {Collision::in_flight, access, address};
            // An ldmatrix has read for all lanes when the first of them goes on.
            const bool ordered = order_.before(access.thread, access.stamp, thread) ||
                                 (access.touch == Touch::load_matrices && access.thread / 32 == thread / 32);
            if (!ordered) return {Collision::race, access, address};
            access.bytes &= static_cast<uint16_t>(~bytes);
            if (access.bytes == 0) continue;
        }
        if (kept != i) chunk.accesses[kept] = access;
        ++kept;
    }
    chunk.accesses.resize(kept);
    chunk.accesses.push_back({where, order_.stamp(thread), static_cast<uint16_t>(thread), bytes, touch});
    if (touch == Touch::store) chunk.written |= bytes;
    return {};
}

void SharedMemory::arrive(int thread, uint32_t offset, int size) {
    Chunk& chunk = chunks_[offset / kChunkBytes];
    const uint16_t bytes = bytes_of(offset, size);
    for (Access& access : chunk.accesses) {
        if (access.touch == Touch::copy_in_flight && access.thread == thread && access.bytes == bytes) {
            access.touch = Touch::copy;
            access.stamp = order_.stamp(thread);
        }
    }
    chunk.written |= bytes;
}

}  // namespace flashgen::simulator
