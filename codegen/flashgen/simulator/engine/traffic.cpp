#include "traffic.hpp"

#include <algorithm>
#include <bit>

namespace flashgen::simulator {
namespace {

constexpr int kBankBytes = 4;
constexpr int kLineBytes = 128;  // one word of each bank
constexpr int kSectorBytes = 32;

// One location is one pointer to data that the compiler has laid down for it.
const void* identity(Location where) {
    static_assert(sizeof(Location) == sizeof(const void*));
    return std::bit_cast<const void*>(where);
}

bool is_global(SimAccess kind) { return kind >= SIM_GLOBAL_LOAD && kind != SIM_MATRIX_PRODUCT; }

}  // namespace

Passes shared_wavefronts(const WarpAccess& access) {
    // 8-byte accesses go by half warps, 16-byte accesses by quarter warps; lanes that want the same word share it.
    const int unit = std::max<int>(access.sizes[std::countr_zero(access.lanes)], kBankBytes);
    const int lanes_per_pass = std::min(32, kLineBytes / unit);
    const uint64_t units_per_line = kLineBytes / unit;
    Passes passes = {0, 0};
    for (int first = 0; first < 32; first += lanes_per_pass) {
        uint64_t words[32];
        int num_words = 0;
        uint32_t depths[32] = {};
        uint32_t deepest = 0;
        for (int lane = first; lane < first + lanes_per_pass; ++lane) {
            if (!(access.lanes >> lane & 1)) continue;
            const uint64_t word = access.addresses[lane] / unit;
            if (std::find(words, words + num_words, word) != words + num_words) continue;
            words[num_words++] = word;
            deepest = std::max(deepest, ++depths[word % units_per_line]);
        }
        passes.ideal += deepest > 0;
        passes.actual += deepest;
    }
    return passes;
}

Passes global_sectors(const WarpAccess& access) {
    uint64_t sectors[32];
    int count = 0;
    uint64_t bytes = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(access.lanes >> lane & 1)) continue;
        sectors[count++] = access.addresses[lane] / kSectorBytes;  // an aligned access lies in one
        bytes += access.sizes[lane];
    }
    std::sort(sectors, sectors + count);
    const uint64_t distinct = std::unique(sectors, sectors + count) - sectors;
    const uint64_t fewest = (bytes + kSectorBytes - 1) / kSectorBytes;
    // Lanes may read the same bytes.
    return {static_cast<uint32_t>(std::min(fewest, distinct)), static_cast<uint32_t>(distinct)};
}

void Traffic::add(SimSite& site, SimAccess kind, uint64_t bytes, Passes passes) {
    ++site.instructions;
    site.bytes += bytes;
    site.ideal += passes.ideal;
    site.actual += passes.actual;
    (is_global(kind) ? counters_.global_sectors_ideal : counters_.shared_wavefronts_ideal) += passes.ideal;
    (is_global(kind) ? counters_.global_sectors : counters_.shared_wavefronts) += passes.actual;
    if (kind == SIM_SHARED_COPY) ++counters_.cp_async;
}

void Traffic::write(SimReport& report) const {
    report.num_sites = 0;
    if (report.sites == nullptr) return;
    for (const auto& [key, site] : sites_) {
        if (report.num_sites == report.max_sites) break;
        SimSite& out = report.sites[report.num_sites++];
        out = site;
        out.line = key.first;
        out.kind = key.second;
    }
}

void WarpTraffic::add(int lane, SimAccess kind, uint64_t address, int size, Location where) {
    Line& here = line(kind, where);
    const uint16_t time = here.times[lane]++;
    if (time >= here.instructions_used) {
        if (time >= here.instructions.size()) here.instructions.emplace_back();
        here.instructions[time].lanes = 0;
        here.instructions_used = time + 1;
    }
    WarpAccess& instruction = here.instructions[time];
    instruction.addresses[lane] = address;
    instruction.sizes[lane] = static_cast<uint8_t>(size);
    instruction.lanes |= 1u << lane;
    if (time == UINT16_MAX - 1) count();  // long since the last meeting, if ever there comes one
}

WarpTraffic::Line& WarpTraffic::line(SimAccess kind, Location where) {
    const void* key = identity(where);
    auto matches = [&](const Line& line) { return line.key == key && line.kind == kind; };
    if (recent_ < active_ && matches(*lines_[recent_])) return *lines_[recent_];
    for (recent_ = 0; recent_ < active_; ++recent_) {
        if (matches(*lines_[recent_])) return *lines_[recent_];
    }
    if (active_ == lines_.size()) lines_.push_back(std::make_unique<Line>());
    Line& fresh = *lines_[active_++];
    fresh.key = key;
    fresh.kind = kind;
    fresh.site = &traffic_.site(where, kind);
    std::fill(std::begin(fresh.times), std::end(fresh.times), 0);
    fresh.instructions_used = 0;
    return fresh;
}

void WarpTraffic::count() {
    for (size_t i = 0; i < active_; ++i) {
        Line& line = *lines_[i];
        for (size_t time = 0; time < line.instructions_used; ++time) {
            const WarpAccess& instruction = line.instructions[time];
            uint64_t bytes = 0;
            for (int lane = 0; lane < 32; ++lane) {
                if (instruction.lanes >> lane & 1) bytes += instruction.sizes[lane];
            }
            traffic_.add(*line.site, line.kind, bytes,
                         is_global(line.kind) ? global_sectors(instruction) : shared_wavefronts(instruction));
        }
    }
    active_ = 0;
}

}  // namespace flashgen::simulator
