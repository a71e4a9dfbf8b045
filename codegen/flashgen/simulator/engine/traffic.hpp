// How much memory traffic each source line makes, in the units in which the hardware moves it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "simulator/machine.hpp"

namespace flashgen::simulator {

// What one instruction of a warp touches: `sizes[lane]` bytes at `addresses[lane]` for each of `lanes`.
struct WarpAccess {
    uint64_t addresses[32];
    uint8_t sizes[32];
    uint32_t lanes = 0;
};

struct Passes {
    uint32_t ideal;
    uint32_t actual;
};

// Passes over the 32 banks of shared memory that the access needs, and the fewest that it would need if no two lanes met
// in a bank. All sizes are the same.
Passes shared_wavefronts(const WarpAccess& access);

// Sectors of 32 bytes that hold the bytes of the access, and the fewest that could hold as many.
Passes global_sectors(const WarpAccess& access);

// The totals of a launch, by source line.
class Traffic {
  public:
    explicit Traffic(SimCounters& counters) : counters_(counters) {}

    SimSite& site(Location where, SimAccess kind) { return sites_[{where.line(), kind}]; }

    // Counts one instruction of a warp.
    void add(SimSite& site, SimAccess kind, uint64_t bytes, Passes passes);

    void write(SimReport& report) const;

  private:
    SimCounters& counters_;
    std::map<std::pair<uint32_t, SimAccess>, SimSite> sites_;
};

// The accesses that the lanes of one warp make each on its own, put together again into instructions of the warp: the
// n-th time that a lane passes a line, counted from the warp's last meeting, goes with the n-th time of the others.
class WarpTraffic {
  public:
    explicit WarpTraffic(Traffic& traffic) : traffic_(traffic) {}

    void add(int lane, SimAccess kind, uint64_t address, int size, Location where);

    // The warp meets here: what has been recorded is complete.
    void flush() {
        if (active_ > 0) count();
    }

  private:
    struct Line {
        const void* key = nullptr;
        SimAccess kind;
        SimSite* site = nullptr;
        uint16_t times[32] = {};  // that each lane has passed here
        size_t instructions_used = 0;
        std::vector<WarpAccess> instructions;
    };

    Line& line(SimAccess kind, Location where);
    void count();

    Traffic& traffic_;
    std::vector<std::unique_ptr<Line>> lines_;  // the first `active_` were passed since the last meeting
    size_t active_ = 0;
    size_t recent_ = 0;
};

}  // namespace flashgen::simulator
