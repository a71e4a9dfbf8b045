// A block's dynamic shared memory: its bytes, which of them hold a value, and who has touched them last.
#pragma once

#include <cstdint>
#include <vector>

#include "order.hpp"
#include "simulator/machine.hpp"

namespace flashgen::simulator {

// Where shared memory begins in the shared window; the first kilobyte belongs to the system, as on compute capability 9.0.
constexpr uint32_t kSharedWindow = 1024;

enum class Touch : uint8_t { load, load_matrices, store, copy_in_flight, copy };
const char* name_of(Touch touch);

// An access that a later one may collide with.
struct Access {
    Location where;
    uint32_t stamp;
    uint16_t thread;
    uint16_t bytes;  // of the 16-byte chunk, as bits
    Touch touch;
};

// Why an access is wrong.
struct Collision {
    enum Kind { none, race, in_flight, uninitialised } kind = none;
    Access other = {};
    uint32_t address = 0;  // of the first byte concerned
};

// Accesses are of 1, 2, 4, 8 or 16 bytes at a multiple of their size, so that each lies in one chunk of 16 bytes.
// `offset` counts from the start of the block's shared memory.
class SharedMemory {
  public:
    SharedMemory(unsigned char* bytes, uint32_t size, const Order& order);

    void reset();
    uint32_t size() const { return size_; }
    unsigned char* bytes() { return bytes_; }

    // The bytes may be read when the returned kind is none.
    Collision load(int thread, uint32_t offset, int size, Touch touch, Location where);
    // Notes a store or the start of a copy; the bytes are the caller's to write, at once or at the copy's arrival.
    Collision store(int thread, uint32_t offset, int size, Touch touch, Location where);
    // The copy that `thread` started arrives; the bytes hold a value now.
    void arrive(int thread, uint32_t offset, int size);

  private:
    struct Chunk {
        uint16_t written = 0;  // bytes that hold a value, as bits
        std::vector<Access> accesses;
    };

    unsigned char* bytes_;
    uint32_t size_;
    const Order& order_;
    std::vector<Chunk> chunks_;
};

}  // namespace flashgen::simulator
