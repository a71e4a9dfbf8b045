// Which accesses of which threads come before which: a vector clock for each thread of a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flashgen::simulator {

// For each thread, the last of its stamps that is known to lie in the past.
using Clock = std::vector<uint32_t>;

class Order {
  public:
    explicit Order(int threads) : clocks_(threads, Clock(threads)) { reset(); }

    void reset() {
        for (size_t thread = 0; thread < clocks_.size(); ++thread) {
            std::fill(clocks_[thread].begin(), clocks_[thread].end(), 0);
            clocks_[thread][thread] = 1;
        }
    }

    // What an access that `thread` makes now is stamped with.
    uint32_t stamp(int thread) const { return clocks_[thread][thread]; }

    // Whether an access of `earlier` comes before whatever `later` does now.
    bool before(int earlier, uint32_t stamp, int later) const {
        return earlier == later || clocks_[later][earlier] >= stamp;
    }

    // Adds what `thread` knows, and all that it has done, to `clock`.
    void publish(int thread, Clock& clock) const { join(clock, clocks_[thread]); }

    // Tells `thread` what `clock` knows; what the thread does from here on is not in any clock yet.
    void learn(int thread, const Clock& clock) {
        join(clocks_[thread], clock);
        ++clocks_[thread][thread];
    }

    int threads() const { return static_cast<int>(clocks_.size()); }

  private:
    static void join(Clock& into, const Clock& from) {
        uint32_t* a = into.data();
        const uint32_t* b = from.data();
        for (size_t i = 0, n = into.size(); i < n; ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
    }

    std::vector<Clock> clocks_;
};

}  // namespace flashgen::simulator
