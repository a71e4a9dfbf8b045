#include "global_memory.hpp"

#include <algorithm>
#include <cinttypes>

#include "block.hpp"

namespace flashgen::simulator {

GlobalMemory::GlobalMemory(std::span<const SimRegion> regions) {
    for (const SimRegion& region : regions) {
        const auto begin = reinterpret_cast<uintptr_t>(region.address);
        const bool tracked = region.access & SIM_READABLE && !(region.access & SIM_INITIALISED);
        regions_.push_back({begin, begin + region.bytes, region.name != nullptr ? region.name : "memory", region.access,
                            0, std::vector<bool>(tracked ? region.bytes : 0)});
    }
    std::ranges::sort(regions_, {}, &Region::begin);
    uintptr_t furthest = 0;
    for (Region& region : regions_) region.furthest = furthest = std::max(furthest, region.end);
}

GlobalMemory::Fault GlobalMemory::load(const void* pointer, int size, int alignment) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address % alignment != 0) {
        return {SIM_MISALIGNED, "at " + place(address, size) + format(", which is no multiple of %d", alignment)};
    }
    const Region* region = find(address, size, SIM_READABLE);
    if (region == nullptr) return {SIM_GLOBAL_BOUNDS, "out of bounds: " + place(address, size)};
    if (!(region->access & SIM_READABLE)) return {SIM_GLOBAL_ACCESS, format("of %s, which is write-only", region->name)};
    if (!region->written.empty()) {
        for (int i = 0; i < size; ++i) {
            if (!region->written[address - region->begin + i]) {
                return {SIM_UNINITIALISED_GLOBAL, "that nothing wrote: " + place(address + i, 1)};
            }
        }
    }
    return {};
}

GlobalMemory::Fault GlobalMemory::store(const void* pointer, int size, int alignment) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address % alignment != 0) {
        return {SIM_MISALIGNED, "at " + place(address, size) + format(", which is no multiple of %d", alignment)};
    }
    Region* region = find(address, size, SIM_WRITABLE);
    if (region == nullptr) return {SIM_GLOBAL_BOUNDS, "out of bounds: " + place(address, size)};
    if (!(region->access & SIM_WRITABLE)) return {SIM_GLOBAL_ACCESS, format("to %s, which is read-only", region->name)};
    if (!region->written.empty()) {
        const auto first = region->written.begin() + static_cast<ptrdiff_t>(address - region->begin);
        std::fill(first, first + size, true);
    }
    return {};
}

void GlobalMemory::synchronise(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    synchronising_.insert(address);
    first_synchronising_ = std::min(first_synchronising_, address);
    end_synchronising_ = std::max(end_synchronising_, address + 4);
}

GlobalMemory::Fault GlobalMemory::plain(const void* pointer, int size) const {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t end = std::min(address + size, end_synchronising_);
    for (uintptr_t word = std::max(address, first_synchronising_) / 4 * 4; word < end; word += 4) {
        if (!synchronising_.contains(word)) continue;
        return {SIM_RACE, "that neither acquires nor releases, of a word by which blocks tell each other what is done: " +
                              place(address, size)};
    }
    return {};
}

bool GlobalMemory::settled(const void* pointer, int size) {
    const Region* region = find(reinterpret_cast<uintptr_t>(pointer), size, SIM_READABLE);
    return region != nullptr && region->access & SIM_SETTLED;
}

const char* GlobalMemory::name_of(const void* pointer, int size) {
    const Region* region = find(reinterpret_cast<uintptr_t>(pointer), size, SIM_READABLE);
    return region != nullptr ? region->name : "";
}

// The region that holds the bytes; of several, one that gives the access.
GlobalMemory::Region* GlobalMemory::find(uintptr_t address, int size, SimRegionAccess access) {
    auto holds = [&](const Region& region) { return address >= region.begin && address + size <= region.end; };
    if (recent_ < regions_.size() && holds(regions_[recent_]) && regions_[recent_].access & access) {
        return &regions_[recent_];
    }
    Region* found = nullptr;
    size_t i = std::ranges::upper_bound(regions_, address, {}, &Region::begin) - regions_.begin();
    while (i-- > 0 && regions_[i].furthest > address) {
        if (!holds(regions_[i])) continue;
        found = &regions_[i];
        if (found->access & access) {
            recent_ = i;
            break;
        }
    }
    return found;
}

// The address in relation to the nearest region.
std::string GlobalMemory::place(uintptr_t address, int size) const {
    if (address == 0) return "a null pointer";
    const Region* nearest = nullptr;
    uintptr_t least = UINTPTR_MAX;
    for (const Region& region : regions_) {
        const uintptr_t distance =
            address < region.begin ? region.begin - address : address >= region.end ? address - region.end + 1 : 0;
        if (distance < least) {
            least = distance;
            nearest = &region;
        }
    }
    constexpr uintptr_t kNear = 1 << 30;
    if (nearest == nullptr || least > kNear) return format("address 0x%" PRIxPTR ", far from every array", address);
    if (address < nearest->begin) {
        return format("%" PRIuPTR " bytes before the start of %s", nearest->begin - address, nearest->name);
    }
    if (address >= nearest->end) {
        return format("%" PRIuPTR " bytes past the end of %s", address - nearest->end, nearest->name);
    }
    return format("bytes %" PRIuPTR "..%" PRIuPTR " of %s, which has %" PRIuPTR, address - nearest->begin,
                  address - nearest->begin + size - 1, nearest->name, nearest->end - nearest->begin);
}

}  // namespace flashgen::simulator
