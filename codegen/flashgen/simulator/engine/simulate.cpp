// A launch: checked as a driver checks it, then run block by block.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <span>
#include <vector>

#include "block.hpp"

namespace flashgen::simulator {
namespace {

constexpr uint64_t kMaxThreads = 1024;
constexpr uint32_t kMaxCluster = 16;  // blocks; more than 8 where the GPU allows them
constexpr uint32_t kMaxGrid[3] = {2147483647, 65535, 65535};
constexpr uint32_t kMaxBlock[3] = {1024, 1024, 64};

uint64_t volume(const uint32_t (&size)[3]) { return uint64_t{size[0]} * size[1] * size[2]; }

// What a driver would refuse the launch for, or an empty string.
std::string refusal(const Kernel& kernel, const SimLaunch& launch) {
    for (int i = 0; i < 3; ++i) {
        if (launch.grid[i] < 1 || launch.grid[i] > kMaxGrid[i]) {
            return format("%u blocks in dimension %d of the grid; it has 1 to %u", launch.grid[i], i, kMaxGrid[i]);
        }
        if (launch.block[i] < 1 || launch.block[i] > kMaxBlock[i]) {
            return format("%u threads in dimension %d of a block; it has 1 to %u", launch.block[i], i, kMaxBlock[i]);
        }
    }
    const auto threads = static_cast<unsigned long long>(volume(launch.block));
    if (threads > kMaxThreads) return format("%llu threads a block; the limit is %llu", threads, 1ull * kMaxThreads);
    if (threads > kernel.max_threads) {
        return format("%llu threads a block; the kernel's launch bounds allow %u", threads, kernel.max_threads);
    }
    const uint64_t most = launch.max_shared_bytes == 0 ? kMaxSharedBytes : std::min(launch.max_shared_bytes, kMaxSharedBytes);
    if (launch.shared_bytes > most) {
        return format("%llu bytes of dynamic shared memory; the limit is %llu", 1ull * launch.shared_bytes, 1ull * most);
    }
    if (launch.params_bytes != kernel.params_bytes) {
        return format("%llu bytes of parameters; the kernel has %llu", 1ull * launch.params_bytes,
                      1ull * kernel.params_bytes);
    }
    if (kernel.cluster > kMaxCluster) return format("clusters of %u blocks; they have at most %u", kernel.cluster, kMaxCluster);
    if (kernel.cluster > 1 && (threads % 32 != 0 || threads * kernel.cluster > 32 * kMostWarps)) {
        return format("clusters of %u blocks of %llu threads; the simulator knows blocks of whole warps, and at most %d warps in a cluster",
                      kernel.cluster, threads, kMostWarps);
    }
    if (launch.grid[0] % kernel.cluster != 0 || launch.first_block % kernel.cluster != 0 || launch.num_blocks % kernel.cluster != 0) {
        return format("blocks %llu and %llu more of %u in dimension 0 of the grid, in clusters of %u", 1ull * launch.first_block,
                      1ull * launch.num_blocks, launch.grid[0], kernel.cluster);
    }
    const uint64_t blocks = volume(launch.grid);
    if (launch.first_block >= blocks || launch.num_blocks > blocks - launch.first_block) {
        return format("blocks %llu and %llu more of a grid of %llu", 1ull * launch.first_block, 1ull * launch.num_blocks,
                      1ull * blocks);
    }
    return "";
}

void refuse(SimReport& report, const Kernel& kernel, const std::string& text) {
    report.error = SIM_LAUNCH;
    std::snprintf(report.message, sizeof report.message, "%s: %s", kernel.name, text.c_str());
}

}  // namespace

int simulate(const Kernel& kernel, unsigned char* shared_memory, const SimLaunch& launch, SimReport& report) {
    report.error = SIM_OK;
    report.line = report.other_line = 0;
    report.thread = report.other_thread = -1;
    std::fill(std::begin(report.block), std::end(report.block), 0);
    report.message[0] = '\0';
    report.counters = {};
    report.num_sites = 0;
    if (const std::string text = refusal(kernel, launch); !text.empty()) {
        refuse(report, kernel, text);
        return report.error;
    }
    try {
        // Aligned for any member.
        std::vector<unsigned char> buffer(launch.params_bytes + kernel.params_align);
        auto* params = reinterpret_cast<unsigned char*>(
            (reinterpret_cast<uintptr_t>(buffer.data()) + kernel.params_align - 1) / kernel.params_align * kernel.params_align);
        if (launch.params_bytes > 0) std::memcpy(params, launch.params, launch.params_bytes);
        LaunchState state{kernel, launch, report, params, GlobalMemory({launch.regions, launch.num_regions}),
                          Traffic(report.counters)};
        Block block(state, shared_memory);
        const uint64_t end =
            launch.num_blocks == 0 ? volume(launch.grid) : launch.first_block + launch.num_blocks;
        for (uint64_t index = launch.first_block; index < end; index += kernel.cluster) {
            if (!block.run(index)) break;
        }
        state.traffic.write(report);
    } catch (const std::bad_alloc&) {
        refuse(report, kernel, "no memory for the simulator's threads");
    }
    return report.error;
}

}  // namespace flashgen::simulator
