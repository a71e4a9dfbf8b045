#include "shared_memory.hpp"

#include <bit>
#include <cstring>

namespace flashgen::simulator {
namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every format

uint16_t bytes_of(uint32_t offset, int size) {
    return static_cast<uint16_t>(((1u << size) - 1) << offset % kChunkBytes);
}

bool writes(Touch touch) { return touch >= Touch::store; }

bool writes_in_flight(Touch touch) {
    return touch == Touch::copy_in_flight || touch == Touch::tensor_load_in_flight || touch == Touch::remote_store_in_flight;
}

bool is_in_flight(Touch touch) { return writes_in_flight(touch) || touch == Touch::tensor_store_in_flight; }

// What is wrong with an access of `party` after `access`, a write, where they touch the same byte.
Collision::Kind after_write(const Party& party, const Access& access) {
    if (access.touch == Touch::mbarrier) return Collision::mbarrier;
    if (writes_in_flight(access.touch)) return Collision::in_flight;
    if (!party.knows(access)) return Collision::race;
    if (party.async && access.touch == Touch::store && !party.has_fenced(access)) return Collision::unfenced;
    return Collision::none;
}

}  // namespace

const char* name_of(Touch touch) {
    switch (touch) {
        case Touch::load: return "load";
        case Touch::load_matrices: return "ldmatrix";
        case Touch::matrix_product: return "wgmma";
        case Touch::tensor_store_in_flight:
        case Touch::tensor_store: return "tensor store";
        case Touch::store: return "store";
        case Touch::copy_in_flight:
        case Touch::copy: return "cp.async";
        case Touch::tensor_load_in_flight:
        case Touch::tensor_load: return "tensor load";
        case Touch::remote_store_in_flight:
        case Touch::remote_store: return "st.async";
        case Touch::mbarrier: return "mbarrier.init";
    }
    return "";
}

// The least of what its threads know of the access's party.
uint32_t Party::least_known(const Access& access) const {
    // Of a tensor copy and an st.async the party is the barrier, which does not order one after another.
    const bool of_barrier = access.touch == Touch::tensor_load || access.touch == Touch::remote_store;
    if (access.party == id && !of_barrier) return UINT32_MAX;
    if (count_ == 1) return order_.before(access.party, access.stamp, first_) ? UINT32_MAX : 0;
    const int slot = access.party % kRemembered;
    if (remembered_[slot] != access.party) {
        remembered_[slot] = access.party;
        least_[slot] = UINT32_MAX;
        for (int i = 0; i < count_; ++i) least_[slot] = std::min(least_[slot], order_.known(access.party, first_ + i));
    }
    return least_[slot];
}

bool Party::has_fenced(const Access& access) const {
    for (int i = 0; i < count_; ++i) {
        if (!order_.fenced(access.party, access.stamp, first_ + i)) return false;
    }
    return true;
}

SharedMemory::SharedMemory(unsigned char* bytes, uint32_t size, int blocks)
    : bytes_(bytes),
      size_(size),
      own_(blocks > 1 ? blocks * kBlockWindow : 0),
      chunks_(((blocks - 1) * kBlockWindow + size + kChunkBytes - 1) / kChunkBytes) {}

void SharedMemory::reset() {
    std::memset(bytes(), kPoison, own_.empty() ? size_ : own_.size());
    for (Chunk& chunk : chunks_) {
        chunk.written = 0;
        chunk.accesses.clear();
    }
}

Collision SharedMemory::load(const Party& party, uint32_t offset, int size, Touch touch, Location where) {
    Chunk& chunk = chunks_[offset / kChunkBytes];
    const uint16_t bytes = bytes_of(offset, size);
    const uint32_t chunk_offset = offset / kChunkBytes * kChunkBytes;
    size_t kept = 0;
    Collision collision;
    for (size_t i = 0; i < chunk.accesses.size(); ++i) {
        Access& access = chunk.accesses[i];
        const uint16_t common = access.bytes & bytes;
        if (common != 0) {
            if (writes(access.touch)) {
                if (collision.kind == Collision::none) {
                    collision = {after_write(party, access), access, chunk_offset + std::countr_zero(common)};
                }
            } else if (!is_in_flight(access.touch) && (party.async ? access.party == party.id : party.knows(access))) {
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
    chunk.accesses.push_back({where, party.stamp, party.id, party.thread, bytes, touch});
    return {};
}

Collision SharedMemory::store(const Party& party, uint32_t offset, int size, Touch touch, Location where) {
    Chunk& chunk = chunks_[offset / kChunkBytes];
    const uint16_t bytes = bytes_of(offset, size);
    const uint32_t chunk_offset = offset / kChunkBytes * kChunkBytes;
    size_t kept = 0;
    for (size_t i = 0; i < chunk.accesses.size(); ++i) {
        Access& access = chunk.accesses[i];
        const uint16_t common = access.bytes & bytes;
        if (common != 0) {
            const uint32_t address = chunk_offset + std::countr_zero(common);
            Collision::Kind kind = Collision::none;
            if (writes(access.touch)) {
                kind = after_write(party, access);
            } else if (access.touch == Touch::tensor_store_in_flight) {
                kind = Collision::in_flight;
            } else if (!party.knows(access)) {
                // An ldmatrix has read for all lanes when the first of them goes on.
                const bool same_warp = !party.async && access.party / 32 == party.id / 32;
                if (access.touch != Touch::load_matrices || !same_warp) kind = Collision::race;
            }
            if (kind != Collision::none) return {kind, access, address};
            access.bytes &= static_cast<uint16_t>(~bytes);
            if (access.bytes == 0) continue;
        }
        if (kept != i) chunk.accesses[kept] = access;
        ++kept;
    }
    chunk.accesses.resize(kept);
    chunk.accesses.push_back({where, party.stamp, party.id, party.thread, bytes, touch});
    if (!is_in_flight(touch)) chunk.written |= bytes;
    return {};
}

void SharedMemory::arrive(int party, uint32_t stamp, uint32_t offset, int size, Touch in_flight, Touch done) {
    Chunk& chunk = chunks_[offset / kChunkBytes];
    const uint16_t bytes = bytes_of(offset, size);
    for (Access& access : chunk.accesses) {
        if (access.touch == in_flight && access.party == party && access.bytes == bytes) {
            access.touch = done;
            access.stamp = stamp;
        }
    }
    if (writes(done)) chunk.written |= bytes;
}

}  // namespace flashgen::simulator
