#include "collision.hpp"

namespace flashgen::simulator {

uint32_t shared_offset(Block& block, const Thread& thread, uint32_t address, int size, const char* what, Location where) {
    if (address % size != 0) {
        block.fail(thread, SIM_MISALIGNED, where,
                   format("%s of %d bytes at shared address 0x%x, which is no multiple of %d", what, size, address, size));
    }
    return bounded_offset(block, thread, address, size, thread.rank, what, where);
}

uint32_t cluster_offset(Block& block, const Thread& thread, uint32_t address, int size, const char* what, Location where) {
    const uint32_t rank = (address - kSharedWindow) / kBlockWindow;
    if (address < kSharedWindow || rank >= static_cast<uint32_t>(block.num_blocks())) {
        block.fail(thread, SIM_SHARED_BOUNDS, where,
                   format("%s of %d bytes at shared address 0x%x, in no block of the cluster", what, size, address));
    }
    return bounded_offset(block, thread, address, size, static_cast<int>(rank), what, where);
}

uint32_t bounded_offset(Block& block, const Thread& thread, uint32_t address, int size, int rank, const char* what, Location where) {
    const uint32_t limit = block.shared().size();
    const int64_t offset = int64_t{address} - kSharedWindow - int64_t{rank} * kBlockWindow;
    if (offset < 0 || offset + size > limit) {
        block.fail(thread, SIM_SHARED_BOUNDS, where,
                   format("%s of %d bytes at offset %lld of the block's shared memory, which has %u bytes", what, size,
                          static_cast<long long>(offset), limit));
    }
    return address - kSharedWindow;
}

void fail_collision(Block& block, const Thread& thread, const char* what, const Collision& collision, Location where) {
    const Access& other = collision.other;
    switch (collision.kind) {
        case Collision::none: return;
        case Collision::uninitialised:
            block.fail(thread, SIM_UNINITIALISED_SHARED, where,
                       format("%s of the shared byte at offset %u, which nothing has written", what, collision.address));
        case Collision::in_flight:
            block.fail(thread, SIM_COPY_IN_FLIGHT, where,
                       format("%s of the shared byte at offset %u, on which a %s of thread %d is at work that nobody has "
                              "waited for, %s",
                              what, collision.address, name_of(other.touch), other.thread, text_of(other.where).c_str()),
                       {other.where, other.thread});
        case Collision::unfenced:
            block.fail(thread, SIM_PROXY, where,
                       format("%s of the shared byte at offset %u here, in the async proxy, and %s of thread %d at %s, in the "
                              "generic one, with no fence.proxy.async between them",
                              what, collision.address, name_of(other.touch), other.thread, text_of(other.where).c_str()),
                       {other.where, other.thread});
        case Collision::mbarrier:
            block.fail(thread, SIM_MBARRIER, where,
                       format("%s of the shared byte at offset %u, which belongs to the mbarrier initialised at %s", what,
                              collision.address, text_of(other.where).c_str()),
                       {other.where, other.thread});
        case Collision::race:
            block.fail(thread, SIM_RACE, where,
                       format("race: %s of the shared byte at offset %u here, and %s of thread %d at %s, with no barrier "
                              "between them",
                              what, collision.address, name_of(other.touch), other.thread,
                              text_of(other.where).c_str()),
                       {other.where, other.thread});
    }
}

}  // namespace flashgen::simulator
