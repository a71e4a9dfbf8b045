// A block's dynamic shared memory: its bytes, which of them hold a value, and who has touched them last.
#pragma once

#include <cstdint>
#include <vector>

#include "order.hpp"
#include "simulator/machine.hpp"

namespace flashgen::simulator {

// Where shared memory begins in the shared window; the first kilobyte belongs to the system, as on compute capability 9.0.
constexpr uint32_t kSharedWindow = 1024;
// Between the windows of the blocks of a cluster: as much as the addresses of matrix descriptors reach.
constexpr uint32_t kBlockWindow = 1 << 18;
constexpr uint32_t kChunkBytes = 16;

enum class Touch : uint8_t {
    load,
    load_matrices,
    matrix_product,
    tensor_store_in_flight,
    tensor_store,
    store,
    copy_in_flight,
    copy,
    tensor_load_in_flight,
    tensor_load,
    remote_store_in_flight,
    remote_store,
    mbarrier,
};
const char* name_of(Touch touch);

// An access that a later one may collide with.
struct Access {
    Location where;
    uint32_t stamp;
    uint16_t party;
    uint16_t thread;  // that made it, or started it
    uint16_t bytes;   // of the 16-byte chunk, as bits
    Touch touch;
};

// Who makes an access: as whom it is noted, and in whose past earlier accesses must lie.
class Party {
  public:
    // A thread on its own.
    Party(const Order& order, int thread) : Party(order, thread, order.stamp(thread), thread, 1, false) {}
    // What `count` threads have started from `first` on, which works in the async proxy.
    Party(const Order& order, int actor, uint32_t stamp, int first, int count) : Party(order, actor, stamp, first, count, true) {}

    bool knows(const Access& access) const { return least_known(access) >= access.stamp; }
    bool has_fenced(const Access& access) const;

    uint16_t id;
    uint16_t thread;
    uint32_t stamp;
    bool async;

  private:
    Party(const Order& order, int id, uint32_t stamp, int first, int count, bool async)
        : id(static_cast<uint16_t>(id)),
          thread(static_cast<uint16_t>(first)),
          stamp(stamp),
          async(async),
          order_(order),
          first_(first),
          count_(count) {}

    uint32_t least_known(const Access& access) const;

    static constexpr int kRemembered = 8;
    const Order& order_;
    int first_;
    int count_;
    mutable int remembered_[kRemembered] = {-1, -1, -1, -1, -1, -1, -1, -1};
    mutable uint32_t least_[kRemembered];
};

// Why an access is wrong.
struct Collision {
    enum Kind { none, race, in_flight, uninitialised, unfenced, mbarrier } kind = none;
    Access other = {};
    uint32_t address = 0;  // of the first byte concerned
};

// Accesses are of 1, 2, 4, 8 or 16 bytes at a multiple of their size, so that each lies in one chunk of 16 bytes.
// `offset` counts from the start of the shared memory of a cluster's first block; that of the next one begins kBlockWindow later.
class SharedMemory {
  public:
    // `bytes` is what the kernel's pointers point to. The blocks of a cluster have memory of their own, which only addresses reach.
    SharedMemory(unsigned char* bytes, uint32_t size, int blocks);

    void reset();
    uint32_t size() const { return size_; }  // of a block
    unsigned char* bytes() { return own_.empty() ? bytes_ : own_.data(); }
    const unsigned char* window() const { return bytes_; }

    // The bytes may be read when the returned kind is none.
    Collision load(const Party& party, uint32_t offset, int size, Touch touch, Location where);
    // Notes a store or the start of a copy; the bytes are the caller's to write, at once or at the copy's arrival.
    Collision store(const Party& party, uint32_t offset, int size, Touch touch, Location where);
    // What `party` noted as `in_flight` is done, and becomes `done` with the stamp. Bytes that it wrote hold a value now.
    void arrive(int party, uint32_t stamp, uint32_t offset, int size, Touch in_flight, Touch done);

  private:
    struct Chunk {
        uint16_t written = 0;  // bytes that hold a value, as bits
        std::vector<Access> accesses;
    };

    unsigned char* bytes_;
    uint32_t size_;
    std::vector<unsigned char> own_;  // of the blocks of a cluster
    std::vector<Chunk> chunks_;
};

}  // namespace flashgen::simulator
