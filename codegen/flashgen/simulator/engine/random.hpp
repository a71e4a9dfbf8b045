// Random numbers that are the same everywhere.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

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
    template <typename Bits>
    int bit_of(Bits bits) {
        constexpr int kBits = std::numeric_limits<Bits>::digits;
        const int turn = static_cast<int>((next() >> 32) * kBits >> 32);
        return (std::countr_zero(std::rotr(bits, turn)) + turn) % kBits;
    }

  private:
    uint64_t state_;
};

}  // namespace flashgen::simulator
