// Faults of accesses to shared memory, for every kind of instruction that makes them.
#pragma once

#include "block.hpp"

namespace flashgen::simulator {

// The offset in the block's shared memory of an access of `size` bytes, `what` in words; fails where it has no place there.
uint32_t shared_offset(Block& block, const Thread& thread, uint32_t address, int size, const char* what, Location where);

// Likewise, of an instruction that takes an address in any block of the cluster.
uint32_t cluster_offset(Block& block, const Thread& thread, uint32_t address, int size, const char* what, Location where);

// Likewise, in the block of that rank.
uint32_t bounded_offset(Block& block, const Thread& thread, uint32_t address, int size, int rank, const char* what, Location where);

// Fails where there is a collision.
void fail_collision(Block& block, const Thread& thread, const char* what, const Collision& collision, Location where);

}  // namespace flashgen::simulator
