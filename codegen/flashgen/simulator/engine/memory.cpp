// What a thread does with memory on its own: loads, stores and asynchronous copies.
#include <atomic>
#include <cstring>

#include "block.hpp"
#include "collision.hpp"

namespace flashgen::simulator {
namespace {

struct Here {
    Thread& thread = running_thread();
    Block& block = *thread.owner;

    Party party() const { return Party(block.order(), thread.index); }
};

void check(Here& here, const GlobalMemory::Fault& fault, const char* what, int size, Location where) {
    if (fault.error == SIM_OK) return;
    here.block.fail(here.thread, fault.error, where, format("%s of %d bytes ", what, size) + fault.text);
}

}  // namespace

uint32_t to_shared_window(const void* pointer, Location where) {
    Here here;
    const auto* byte = static_cast<const unsigned char*>(pointer);
    const unsigned char* first = here.block.shared().window();
    if (byte < first || byte > first + here.block.shared().size()) {
        here.block.fail(here.thread, SIM_SHARED_BOUNDS, where,
                        "a pointer that does not point to the block's dynamic shared memory");
    }
    return kSharedWindow + here.thread.rank * kBlockWindow + static_cast<uint32_t>(byte - first);
}

void load_shared(void* value, uint32_t address, int size, Location where) {
    Here here;
    const uint32_t offset = shared_offset(here.block, here.thread, address, size, "load", where);
    fail_collision(here.block, here.thread, "load",
                   here.block.shared().load(here.party(), offset, size, Touch::load, where), where);
    std::memcpy(value, here.block.shared().bytes() + offset, size);
    here.block.counters->shared_bytes_read += size;
    here.thread.warp->traffic.add(here.thread.lane, SIM_SHARED_LOAD, offset, size, where);
}

void store_shared(uint32_t address, const void* value, int size, Location where) {
    Here here;
    const uint32_t offset = shared_offset(here.block, here.thread, address, size, "store", where);
    fail_collision(here.block, here.thread, "store",
                   here.block.shared().store(here.party(), offset, size, Touch::store, where), where);
    std::memcpy(here.block.shared().bytes() + offset, value, size);
    here.block.counters->shared_bytes_written += size;
    here.thread.warp->traffic.add(here.thread.lane, SIM_SHARED_STORE, offset, size, where);
}

void load_global(void* value, const void* address, int size, Location where) {
    Here here;
    GlobalMemory& memory = here.block.global_to_load(here.thread, address, size, where);
    check(here, memory.load(address, size, size), "load", size, where);
    check(here, memory.plain(address, size), "load", size, where);
    std::memcpy(value, address, size);
    here.block.counters->global_bytes_read += size;
    here.thread.warp->traffic.add(here.thread.lane, SIM_GLOBAL_LOAD, reinterpret_cast<uintptr_t>(address), size, where);
}

uint32_t load_relaxed(const void* address, Location where) {
    Here here;
    check(here, here.block.any_global().load(address, 4, 4), "ld.relaxed", 4, where);
    check(here, here.block.any_global().plain(address, 4), "ld.relaxed", 4, where);
    here.block.counters->global_bytes_read += 4;
    here.thread.warp->traffic.add(here.thread.lane, SIM_GLOBAL_LOAD, reinterpret_cast<uintptr_t>(address), 4, where);
    uint32_t value;
    std::memcpy(&value, address, sizeof value);
    // It may be waiting here by mistake, and what it waits for does not come meanwhile. So more than eight loads of one unchanged word in a
    // row give the block up, whether something waits or not.
    if (here.block.is_early()) here.block.spin(here.thread, address, value, where);
    return here.block.perhaps_old(here.thread, address, value);
}

void store_global(void* address, const void* value, int size, Location where) {
    Here here;
    check(here, here.block.global_to_store(here.thread, where).store(address, size, size), "store", size, where);
    check(here, here.block.any_global().plain(address, size), "store", size, where);
    std::memcpy(address, value, size);
    here.block.counters->global_bytes_written += size;
    here.thread.warp->traffic.add(here.thread.lane, SIM_GLOBAL_STORE, reinterpret_cast<uintptr_t>(address), size, where);
}

void add_global(float* address, const float* values, int count, Location where) {
    Here here;
    const int size = count * static_cast<int>(sizeof(float));
    GlobalMemory& memory = here.block.global_to_store(here.thread, where);
    // It reads what it adds to.
    check(here, memory.load(address, size, size), "red", size, where);
    check(here, memory.store(address, size, size), "red", size, where);
    check(here, memory.plain(address, size), "red", size, where);
    for (int i = 0; i < count; ++i) std::atomic_ref(address[i]).fetch_add(values[i], std::memory_order_relaxed);
    here.block.counters->global_bytes_written += size;
    here.thread.warp->traffic.add(here.thread.lane, SIM_GLOBAL_ADD, reinterpret_cast<uintptr_t>(address), size, where);
}

uint32_t load_acquire(const void* address, Location where) {
    Here here;
    check(here, here.block.any_global().load(address, 4, 4), "ld.acquire", 4, where);
    here.block.any_global().synchronise(address);
    const uint32_t value =
        std::atomic_ref(*static_cast<uint32_t*>(const_cast<void*>(address))).load(std::memory_order_acquire);
    here.block.acquire(here.thread, where);
    here.block.spin(here.thread, address, value, where);
    return value;
}

void store_release(void* address, uint32_t value, Location where) {
    Here here;
    check(here, here.block.global_to_store(here.thread, where).store(address, 4, 4), "st.release", 4, where);
    here.block.any_global().synchronise(address);
    std::atomic_ref(*static_cast<uint32_t*>(address)).store(value, std::memory_order_release);
}

void add_release(void* address, uint32_t value, Location where) {
    Here here;
    GlobalMemory& memory = here.block.global_to_store(here.thread, where);
    // It reads what it adds to.
    check(here, memory.load(address, 4, 4), "red.release", 4, where);
    check(here, memory.store(address, 4, 4), "red.release", 4, where);
    memory.synchronise(address);
    std::atomic_ref(*static_cast<uint32_t*>(address)).fetch_add(value, std::memory_order_release);
}

uint32_t increment_and_wrap(void* address, uint32_t largest, Location where) {
    Here here;
    GlobalMemory& memory = here.block.global_to_store(here.thread, where);
    check(here, memory.load(address, 4, 4), "atom.inc", 4, where);
    check(here, memory.store(address, 4, 4), "atom.inc", 4, where);
    memory.synchronise(address);
    std::atomic_ref counter(*static_cast<uint32_t*>(address));
    uint32_t before = counter.load(std::memory_order_relaxed);
    while (!counter.compare_exchange_weak(before, before >= largest ? 0 : before + 1, std::memory_order_relaxed)) {
    }
    return before;
}

uint32_t fetch_add(void* address, uint32_t value, Location where) {
    Here here;
    GlobalMemory& memory = here.block.global_to_store(here.thread, where);
    check(here, memory.load(address, 4, 4), "atom", 4, where);
    check(here, memory.store(address, 4, 4), "atom", 4, where);
    memory.synchronise(address);
    return std::atomic_ref(*static_cast<uint32_t*>(address)).fetch_add(value, std::memory_order_relaxed);
}

void copy_async(uint32_t destination, const void* source, int size, int source_bytes, Location where) {
    Here here;
    const uint32_t offset = shared_offset(here.block, here.thread, destination, size, "cp.async", where);
    if (source_bytes < 0 || source_bytes > size) {
        here.block.fail(here.thread, SIM_OPERAND, where,
                        format("cp.async of %d bytes of a source of %d", size, source_bytes));
    }
    if (source_bytes > 0) {
        check(here, here.block.global(here.thread, where).load(source, source_bytes, size), "cp.async", source_bytes, where);
        here.block.counters->global_bytes_read += source_bytes;
        here.thread.warp->traffic.add(here.thread.lane, SIM_GLOBAL_COPY, reinterpret_cast<uintptr_t>(source), source_bytes,
                                      where);
    }
    // The bytes may arrive at once or as late as the wait, so from here to there nobody can rely on what lies there.
    fail_collision(here.block, here.thread, "cp.async",
                   here.block.shared().store(here.party(), offset, size, Touch::copy_in_flight, where), where);
    here.thread.copies.push_back(
        {offset, static_cast<uint8_t>(size), static_cast<uint8_t>(source_bytes), source});
    ++here.thread.open_copies;
    here.thread.warp->traffic.add(here.thread.lane, SIM_SHARED_COPY, offset, size, where);
}

void copy_commit() {
    Here here;
    ++here.block.counters->cp_async_commit;
    here.thread.copies_of_group.push_back(here.thread.open_copies);
    here.thread.open_copies = 0;
}

void copy_wait(int pending) {
    Here here;
    ++here.block.counters->cp_async_wait;
    auto& groups = here.thread.copies_of_group;
    if (groups.size() <= static_cast<size_t>(pending)) return;
    const auto complete = groups.begin() + static_cast<ptrdiff_t>(groups.size() - pending);
    size_t arriving = 0;
    for (auto group = groups.begin(); group != complete; ++group) arriving += *group;
    groups.erase(groups.begin(), complete);

    auto& copies = here.thread.copies;
    const auto last = copies.begin() + static_cast<ptrdiff_t>(arriving);
    for (auto copy = copies.begin(); copy != last; ++copy) {
        unsigned char* destination = here.block.shared().bytes() + copy->destination;
        if (copy->source_bytes > 0) std::memcpy(destination, copy->source, copy->source_bytes);
        std::memset(destination + copy->source_bytes, 0, copy->size - copy->source_bytes);
        here.block.shared().arrive(here.thread.index, here.block.order().stamp(here.thread.index), copy->destination,
                                   copy->size, Touch::copy_in_flight, Touch::copy);
        here.block.counters->shared_bytes_written += copy->size;
    }
    copies.erase(copies.begin(), last);
}

}  // namespace flashgen::simulator
