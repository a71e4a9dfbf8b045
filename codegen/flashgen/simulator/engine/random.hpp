// Random numbers that are the same everywhere.
#pragma once

#include <cstdint>

namespace flashgen::simulator {

// splitmix64.
class Random {
  public:
    Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9e3779b97f4a7c15 ^ (stream + 1) * 0xd1b54a32d192ed03) {}

    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }

    // One of the bits that are set in `bits`, which is not 0, by its number.
    int bit_of(uint32_t bits) {
        const int turn = static_cast<int>(next() >> 59);
        const uint32_t turned = bits >> turn | bits << ((32 - turn) & 31);
        return (__builtin_ctz(turned) + turn) & 31;
    }

  private:
    uint64_t state_;
};

}  // namespace flashgen::simulator
