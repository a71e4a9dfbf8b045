// The memory that a launch may touch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "simulator/abi.h"

namespace flashgen::simulator {

class GlobalMemory {
  public:
    explicit GlobalMemory(std::span<const SimRegion> regions);

    struct Fault {
        SimError error = SIM_OK;
        std::string text;  // what is wrong, to follow "load of 16 bytes"
    };

    // Checks a load or store of `size` bytes at a multiple of `alignment`, and notes what a store fills.
    Fault load(const void* address, int size, int alignment);
    Fault store(const void* address, int size, int alignment);

    // Marks a word that an access acquires or releases: through it blocks tell each other what is done. Later accesses must do so, too.
    void synchronise(const void* address);
    // Checks an access that neither acquires nor releases.
    Fault plain(const void* address, int size) const;

    // Whether no grid that may still be running writes there.
    bool settled(const void* address, int size);

    // The name of the array that may be loaded there.
    const char* name_of(const void* address, int size);

  private:
    struct Region {
        uintptr_t begin;
        uintptr_t end;
        const char* name;
        uint32_t access;
        uintptr_t furthest;         // end of this region and of those that begin before it
        std::vector<bool> written;  // empty where every byte holds a value, or none may be read
    };

    Region* find(uintptr_t address, int size, SimRegionAccess access);
    std::string place(uintptr_t address, int size) const;

    std::vector<Region> regions_;  // by where they begin
    std::unordered_set<uintptr_t> synchronising_;  // addresses of these words; below, the range that they lie in
    uintptr_t first_synchronising_ = UINTPTR_MAX;
    uintptr_t end_synchronising_ = 0;
    size_t recent_ = 0;
};

}  // namespace flashgen::simulator
