#include "tensor_copy.hpp"

#include <algorithm>
#include <cstring>

#include "block.hpp"
#include "collision.hpp"
#include "mbarrier.hpp"
#include "simulator/async.hpp"
#include "swizzle.hpp"

namespace flashgen::simulator {
namespace {

constexpr uint32_t kSharedAlignment = 128;
constexpr uint64_t kMapAlignment = 64;
constexpr int kSectorBytes = 32;

uint32_t row_bytes(const SimTensorMap& map) { return map.box[0] * map.element_bytes; }

uint32_t box_bytes(const SimTensorMap& map) {
    uint32_t bytes = row_bytes(map);
    for (uint32_t i = 1; i < map.rank; ++i) bytes *= map.box[i];
    return bytes;
}

// The rows of a box one after another, as they lie in shared memory, and what each is in global memory.
struct Row {
    uint32_t index;
    unsigned char* address;  // of the first byte that lies in the tensor
    uint32_t skipped;        // bytes of the row before it
    uint32_t bytes;          // that lie in the tensor
};

template <typename Visit>
void for_each_row(const SimTensorMap& map, const int* coordinates, Visit visit) {
    const int64_t first = std::max<int64_t>(0, -int64_t{coordinates[0]});
    const int64_t last = std::min<int64_t>(map.box[0], int64_t{map.extents[0]} - coordinates[0]);
    const uint32_t rows = box_bytes(map) / row_bytes(map);
    for (uint32_t index = 0; index < rows; ++index) {
        uint64_t address = map.address + (coordinates[0] + first) * map.element_bytes;
        bool inside = last > first;
        uint32_t rest = index;
        for (uint32_t i = 1; i < map.rank; ++i) {
            const int64_t at = int64_t{coordinates[i]} + rest % map.box[i];
            rest /= map.box[i];
            inside &= at >= 0 && at < map.extents[i];
            address += static_cast<uint64_t>(at) * map.strides[i - 1];
        }
        const auto bytes = static_cast<uint32_t>(inside ? (last - first) * map.element_bytes : 0);
        visit(Row{index, reinterpret_cast<unsigned char*>(address), static_cast<uint32_t>(first * map.element_bytes), bytes});
    }
}

uint64_t sectors(const Row& row) {
    const auto first = reinterpret_cast<uintptr_t>(row.address);
    return (first + row.bytes + kSectorBytes - 1) / kSectorBytes - first / kSectorBytes;
}

// Takes one out, in no order.
template <typename T>
T take(std::vector<T>& from, size_t index) {
    const T taken = from[index];
    from[index] = from.back();
    from.pop_back();
    return taken;
}

}  // namespace

void TensorCopies::reset() {
    loads_.clear();
    sends_.clear();
    remote_stores_.clear();
    stores_.clear();
    groups_.assign(block_.order().threads(), 0);
}

void TensorCopies::check_map(const Thread& thread, const void* map, int rank, Location where) {
    read_map(thread, map, rank, where);
}

SimTensorMap TensorCopies::read_map(const Thread& thread, const void* pointer, int rank, Location where) {
    SimTensorMap map = {};
    if (reinterpret_cast<uintptr_t>(pointer) % kMapAlignment != 0) {
        block_.fail(thread, SIM_MISALIGNED, where, "a tensor map at an address that is no multiple of 64");
    }
    std::memcpy(&map, pointer, sizeof map);
    if (map.magic != FLASHGEN_TENSOR_MAP) block_.fail(thread, SIM_OPERAND, where, "what should be a tensor map is none");
    if (rank != 0 && map.rank != static_cast<uint32_t>(rank)) {
        block_.fail(thread, SIM_OPERAND, where, format("%d coordinates, and the tensor has %u dimensions", rank, map.rank));
    }
    if (map.address % 16 != 0) block_.fail(thread, SIM_MISALIGNED, where, "the map's tensor is at no multiple of 16 bytes");
    if (map.swizzle != 0 && row_bytes(map) > map.swizzle) {
        block_.fail(thread, SIM_OPERAND, where,
                    format("a box with rows of %u bytes under a swizzle of %u", row_bytes(map), map.swizzle));
    }
    return map;
}

// The offset in the block's shared memory of a box of so many bytes at `address`.
uint32_t TensorCopies::box_offset(const Thread& thread, uint32_t address, uint32_t bytes, uint32_t alignment, const char* what,
                                  Location where) {
    if (address % alignment != 0) {
        block_.fail(thread, SIM_MISALIGNED, where,
                    format("%s at shared address 0x%x, which is no multiple of %u", what, address, alignment));
    }
    return bounded_offset(block_, thread, address, static_cast<int>(bytes), thread.rank, what, where);
}

void TensorCopies::load(Thread& thread, uint32_t destination, const void* pointer, uint32_t barrier_address,
                        const int* coordinates, int rank, Location where) {
    const SimTensorMap map = read_map(thread, pointer, rank, where);
    box_offset(thread, destination, box_bytes(map), kSharedAlignment, "tensor load", where);
    start_load(thread, destination, map, barrier_address, coordinates, "tensor load", where);
}

void TensorCopies::check_bulk(const Thread& thread, int bytes, const char* what, Location where) {
    if (bytes <= 0 || bytes % static_cast<int>(kChunkBytes) != 0) {
        block_.fail(thread, SIM_OPERAND, where, format("%s of %d bytes, which is no positive multiple of 16", what, bytes));
    }
}

// Bytes that lie together are a tensor of one dimension, in chunks.
void TensorCopies::load_bulk(Thread& thread, uint32_t destination, const void* source, uint32_t barrier_address, int bytes,
                             Location where) {
    check_bulk(thread, bytes, "bulk load", where);
    box_offset(thread, destination, bytes, kChunkBytes, "bulk load", where);
    SimTensorMap map = {};
    map.address = reinterpret_cast<uintptr_t>(source);
    map.extents[0] = map.box[0] = static_cast<uint32_t>(bytes) / kChunkBytes;
    map.rank = 1;
    map.element_bytes = kChunkBytes;
    const int coordinates[1] = {0};
    start_load(thread, destination, map, barrier_address, coordinates, "bulk load", where);
}

void TensorCopies::start_load(Thread& thread, uint32_t destination, const SimTensorMap& map, uint32_t barrier_address,
                              const int* coordinates, const char* what, Location where) {
    ++block_.counters->tensor_loads;
    Mbarrier& barrier = block_.mbarriers().of_copy(thread, barrier_address, where);
    const uint32_t bytes = box_bytes(map);
    GlobalMemory& global = block_.global(thread, where);
    uint64_t read = 0;
    Passes passes = {0, 0};
    for_each_row(map, coordinates, [&](const Row& row) {
        if (row.bytes == 0) return;
        const auto fault = global.load(row.address, static_cast<int>(row.bytes), static_cast<int>(map.element_bytes));
        if (fault.error != SIM_OK) block_.fail(thread, fault.error, where, format("%s of %u bytes ", what, row.bytes) + fault.text);
        read += row.bytes;
        passes.ideal += (row.bytes + kSectorBytes - 1) / kSectorBytes;
        passes.actual += static_cast<uint32_t>(sectors(row));
    });
    block_.counters->global_bytes_read += read;
    block_.traffic().add(block_.traffic().site(where, SIM_TENSOR_LOAD), SIM_TENSOR_LOAD, read, passes);
    // From here on nobody can rely on what lies at the destination, until the phase of the barrier has ended.
    const Party engine(block_.order(), barrier.actor, barrier.phase + 1, thread.index, 1);
    for (uint32_t at = 0; at < bytes; at += kChunkBytes) {
        const uint32_t offset = swizzled(destination + at, map.swizzle) - kSharedWindow;
        fail_collision(block_, thread, what,
                       block_.shared().store(engine, offset, kChunkBytes, Touch::tensor_load_in_flight, where), where);
    }
    Load load = {map, {}, destination, &barrier, &thread, where};
    std::copy_n(coordinates, map.rank, load.coordinates);
    loads_.push_back(load);
}

// The offset in the cluster's shared memory of what a thread sends to a block, which must have heard of its arrival before it ends.
uint32_t TensorCopies::sent_offset(Thread& thread, uint32_t destination, uint32_t bytes, uint32_t alignment, const Mbarrier& barrier,
                                   const char* what, Location where) {
    const uint32_t to = cluster_offset(block_, thread, destination, static_cast<int>(bytes), what, where);
    if (to % alignment != 0) {
        block_.fail(thread, SIM_MISALIGNED, where,
                    format("%s at shared address 0x%x, which is no multiple of %u", what, destination, alignment));
    }
    if (to / kBlockWindow != barrier.offset / kBlockWindow) {
        block_.fail(thread, SIM_OPERAND, where, format("%s to one block of the cluster and an mbarrier of another one", what));
    }
    block_.touch(thread, static_cast<int>(to / kBlockWindow), barrier.actor, barrier.phase + 1, what, where);
    return to;
}

void TensorCopies::send(Thread& thread, uint32_t destination, uint32_t source, uint32_t barrier_address, int bytes, Location where) {
    constexpr const char* kWhat = "copy to a block of the cluster";
    ++block_.counters->tensor_loads;
    check_bulk(thread, bytes, kWhat, where);
    const uint32_t from = box_offset(thread, source, bytes, kChunkBytes, kWhat, where);
    Mbarrier& barrier = block_.mbarriers().of_send(thread, barrier_address, where);
    const uint32_t to = sent_offset(thread, destination, bytes, kChunkBytes, barrier, kWhat, where);
    block_.touch(thread, thread.rank, barrier.actor, barrier.phase + 1, kWhat, where);
    const Party engine(block_.order(), barrier.actor, barrier.phase + 1, thread.index, 1);
    for (uint32_t at = 0; at < static_cast<uint32_t>(bytes); at += kChunkBytes) {
        fail_collision(block_, thread, kWhat,
                       block_.shared().load(engine, from + at, kChunkBytes, Touch::tensor_store_in_flight, where), where);
        fail_collision(block_, thread, kWhat,
                       block_.shared().store(engine, to + at, kChunkBytes, Touch::tensor_load_in_flight, where), where);
    }
    sends_.push_back({to, from, static_cast<uint32_t>(bytes), &barrier, &thread, where});
}

void TensorCopies::finish_send(const Send& send) {
    const int actor = send.barrier->actor;
    const uint32_t stamp = send.barrier->phase + 1;
    SharedMemory& shared = block_.shared();
    std::memcpy(shared.bytes() + send.destination, shared.bytes() + send.source, send.bytes);
    for (uint32_t at = 0; at < send.bytes; at += kChunkBytes) {
        shared.arrive(actor, stamp, send.source + at, kChunkBytes, Touch::tensor_store_in_flight, Touch::tensor_store);
        shared.arrive(actor, stamp, send.destination + at, kChunkBytes, Touch::tensor_load_in_flight, Touch::tensor_load);
    }
    block_.counters->shared_bytes_read += send.bytes;
    block_.counters->shared_bytes_written += send.bytes;
    block_.mbarriers().bring(*send.barrier, send.bytes, *send.thread, send.where);
}

void TensorCopies::store_remote(Thread& thread, uint32_t destination, const void* values, int bytes, uint32_t barrier_address,
                                Location where) {
    constexpr const char* kWhat = "st.async";
    Mbarrier& barrier = block_.mbarriers().of_send(thread, barrier_address, where);
    const uint32_t to = sent_offset(thread, destination, bytes, bytes, barrier, kWhat, where);
    const Party sender(block_.order(), barrier.actor, barrier.phase + 1, thread.index, 1);
    fail_collision(block_, thread, kWhat, block_.shared().store(sender, to, bytes, Touch::remote_store_in_flight, where), where);
    RemoteStore store = {to, static_cast<uint32_t>(bytes), {}, &barrier, &thread, where};
    std::memcpy(store.values, values, bytes);
    remote_stores_.push_back(store);
}

void TensorCopies::finish_remote_store(const RemoteStore& store) {
    SharedMemory& shared = block_.shared();
    std::memcpy(shared.bytes() + store.destination, store.values, store.bytes);
    shared.arrive(store.barrier->actor, store.barrier->phase + 1, store.destination, static_cast<int>(store.bytes),
                  Touch::remote_store_in_flight, Touch::remote_store);
    block_.counters->shared_bytes_written += store.bytes;
    store.barrier->sent |= store.destination / kBlockWindow != static_cast<uint32_t>(store.thread->rank);
    block_.mbarriers().bring(*store.barrier, store.bytes, *store.thread, store.where);
}

void TensorCopies::finish_one(Random& random) {
    size_t chosen = random.next() % (loads_.size() + sends_.size() + remote_stores_.size());
    if (chosen < loads_.size()) return finish_load(take(loads_, chosen));
    chosen -= loads_.size();
    if (chosen < sends_.size()) return finish_send(take(sends_, chosen));
    finish_remote_store(take(remote_stores_, chosen - sends_.size()));
}

void TensorCopies::finish_load(const Load& load) {
    const uint32_t row = row_bytes(load.map);
    std::vector<unsigned char> bytes(row);
    for_each_row(load.map, load.coordinates, [&](const Row& from) {
        std::fill(bytes.begin(), bytes.end(), 0);
        if (from.bytes > 0) std::memcpy(bytes.data() + from.skipped, from.address, from.bytes);
        for (uint32_t at = 0; at < row; at += kChunkBytes) {
            const uint32_t offset = swizzled(load.destination + from.index * row + at, load.map.swizzle) - kSharedWindow;
            std::memcpy(block_.shared().bytes() + offset, bytes.data() + at, kChunkBytes);
            block_.shared().arrive(load.barrier->actor, load.barrier->phase + 1, offset, kChunkBytes,
                                   Touch::tensor_load_in_flight, Touch::tensor_load);
        }
    });
    block_.counters->shared_bytes_written += box_bytes(load.map);
    block_.mbarriers().bring(*load.barrier, box_bytes(load.map), *load.thread, load.where);
}

void TensorCopies::store(Thread& thread, const void* pointer, uint32_t source, const int* coordinates, int rank,
                         Location where) {
    ++block_.counters->tensor_stores;
    const SimTensorMap map = read_map(thread, pointer, rank, where);
    const uint32_t bytes = box_bytes(map), row = row_bytes(map);
    box_offset(thread, source, bytes, kSharedAlignment, "tensor store", where);
    for (int i = 0; i < rank; ++i) {
        // Loads may begin ahead of the tensor. For a store an H200 calls that an illegal instruction.
        if (coordinates[i] < 0) {
            block_.fail(thread, SIM_OPERAND, where,
                        format("tensor store at %d in dimension %d, where no coordinate may be negative", coordinates[i], i));
        }
    }
    GlobalMemory& global = block_.global_to_store(thread, where);
    // The source may be read at once or as late as the wait for it. What it holds cannot change in between.
    const Party engine(block_.order(), thread.index, block_.order().stamp(thread.index), thread.index, 1);
    uint64_t written = 0;
    Passes passes = {0, 0};
    std::vector<unsigned char> values(row);
    for_each_row(map, coordinates, [&](const Row& to) {
        if (to.bytes == 0) return;
        for (uint32_t at = 0; at < row; at += kChunkBytes) {
            // What lies outside of the tensor goes nowhere, so it may be anything.
            if (at + kChunkBytes <= to.skipped || at >= to.skipped + to.bytes) continue;
            const uint32_t offset = swizzled(source + to.index * row + at, map.swizzle) - kSharedWindow;
            fail_collision(block_, thread, "tensor store",
                           block_.shared().load(engine, offset, kChunkBytes, Touch::tensor_store_in_flight, where), where);
            std::memcpy(values.data() + at, block_.shared().bytes() + offset, kChunkBytes);
        }
        const auto fault = global.store(to.address, static_cast<int>(to.bytes), static_cast<int>(map.element_bytes));
        if (fault.error != SIM_OK) block_.fail(thread, fault.error, where, format("tensor store of %u bytes ", to.bytes) + fault.text);
        std::memcpy(to.address, values.data() + to.skipped, to.bytes);
        written += to.bytes;
        passes.ideal += (to.bytes + kSectorBytes - 1) / kSectorBytes;
        passes.actual += static_cast<uint32_t>(sectors(to));
    });
    block_.counters->shared_bytes_read += bytes;
    block_.counters->global_bytes_written += written;
    block_.traffic().add(block_.traffic().site(where, SIM_TENSOR_STORE), SIM_TENSOR_STORE, written, passes);
    stores_.push_back({source, bytes, map.swizzle, thread.index, groups_[thread.index], where});
}

void TensorCopies::commit(Thread& thread) { ++groups_[thread.index]; }

void TensorCopies::wait(Thread& thread, int pending) {
    std::erase_if(stores_, [&](const Store& store) {
        if (store.thread != thread.index || store.group >= groups_[thread.index] - pending) return false;
        for (uint32_t at = 0; at < store.bytes; at += kChunkBytes) {
            const uint32_t offset = swizzled(store.source + at, store.swizzle) - kSharedWindow;
            block_.shared().arrive(thread.index, block_.order().stamp(thread.index), offset, kChunkBytes,
                                   Touch::tensor_store_in_flight, Touch::tensor_store);
        }
        return true;
    });
}

void TensorCopies::check_end(const Thread& last) {
    constexpr const char* kText = "the block ends while this %s is at work on its shared memory: nobody has waited for it";
    for (const Load& load : loads_) {
        if (load.thread->rank != last.rank) continue;
        block_.fail(*load.thread, SIM_COPY_IN_FLIGHT, load.where, format(kText, "tensor load"), {{}, last.index});
    }
    for (const RemoteStore& store : remote_stores_) {
        if (store.destination / kBlockWindow != static_cast<uint32_t>(last.rank)) continue;
        block_.fail(*store.thread, SIM_COPY_IN_FLIGHT, store.where, format(kText, "st.async"), {{}, last.index});
    }
    for (const Store& store : stores_) {
        if (block_.thread(store.thread).rank != last.rank) continue;
        block_.fail(block_.thread(store.thread), SIM_COPY_IN_FLIGHT, store.where, format(kText, "tensor store"),
                    {{}, last.index});
    }
}

void prefetch_tensor_map(const void* map, Location where) {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().check_map(thread, map, 0, where);
}

void tensor_load(uint32_t destination, const void* map, uint32_t barrier, const int* coordinates, int rank, Location where) {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().load(thread, destination, map, barrier, coordinates, rank, where);
}

void bulk_load(uint32_t destination, const void* source, uint32_t barrier, int bytes, Location where) {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().load_bulk(thread, destination, source, barrier, bytes, where);
}

void bulk_send(uint32_t destination, uint32_t source, uint32_t barrier, int bytes, Location where) {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().send(thread, destination, source, barrier, bytes, where);
}

void store_async(uint32_t destination, const void* values, int bytes, uint32_t barrier, Location where) {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().store_remote(thread, destination, values, bytes, barrier, where);
}

void tensor_store(const void* map, uint32_t source, const int* coordinates, int rank, Location where) {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().store(thread, map, source, coordinates, rank, where);
}

void tensor_store_commit() {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().commit(thread);
}

void tensor_store_wait(int pending) {
    Thread& thread = running_thread();
    thread.owner->tensor_copies().wait(thread, pending);
}

}  // namespace flashgen::simulator
