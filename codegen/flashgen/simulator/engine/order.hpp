// Which accesses of which parties come before which: a vector clock for each thread of a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flashgen::simulator {

// For each party, the last of its stamps that is known to lie in the past, and the last of those that a proxy fence
// separates from the present. An entry that is not there is 0.
struct Clock {
    std::vector<uint32_t> past;
    std::vector<uint32_t> fenced;

    void set(int party, uint32_t stamp) {
        if (past.size() <= static_cast<size_t>(party)) past.resize(party + 1);
        past[party] = stamp;
    }

    void clear() {
        past.clear();
        fenced.clear();
    }

    void join(const Clock& other) {
        join(past, other.past);
        join(fenced, other.fenced);
    }

    static void join(std::vector<uint32_t>& into, const std::vector<uint32_t>& from) {
        if (into.size() < from.size()) into.resize(from.size());
        uint32_t* a = into.data();
        const uint32_t* b = from.data();
        for (size_t i = 0, n = from.size(); i < n; ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
    }
};

// The parties are the threads, and after them actors: what works on its own once a thread has started it.
class Order {
  public:
    explicit Order(int threads) : threads_(threads), parties_(threads), clocks_(threads) { reset(); }

    void reset() {
        fences_ = false;
        for (int thread = 0; thread < threads_; ++thread) {
            clocks_[thread].past.assign(parties_, 0);
            clocks_[thread].fenced.assign(parties_, 0);
            clocks_[thread].past[thread] = 1;
        }
    }

    // One more party, by its number. It stays from block to block.
    int add_actor() {
        ++parties_;
        for (Clock& clock : clocks_) {
            clock.past.resize(parties_);
            clock.fenced.resize(parties_);
        }
        return parties_ - 1;
    }

    // What an access that `thread` makes now is stamped with.
    uint32_t stamp(int thread) const { return clocks_[thread].past[thread]; }

    // Whether an access of `earlier` comes before whatever the thread `later` does now.
    bool before(int earlier, uint32_t stamp, int later) const {
        return earlier == later || clocks_[later].past[earlier] >= stamp;
    }

    // The last stamp of `earlier` that the thread `later` has in its past.
    uint32_t known(int earlier, int later) const { return clocks_[later].past[earlier]; }

    // Whether, besides, a proxy fence stands between the two.
    bool fenced(int earlier, uint32_t stamp, int later) const { return clocks_[later].fenced[earlier] >= stamp; }

    // Adds what `thread` knows, and all that it has done, to `clock`.
    void publish(int thread, Clock& clock) const {
        Clock::join(clock.past, clocks_[thread].past);
        if (fences_) Clock::join(clock.fenced, clocks_[thread].fenced);
    }

    // What the thread does from here on is not in any clock yet.
    void advance(int thread) { ++clocks_[thread].past[thread]; }

    // Tells `thread` what `clock` knows.
    void learn(int thread, const Clock& clock) {
        Clock::join(clocks_[thread].past, clock.past);
        if (fences_) Clock::join(clocks_[thread].fenced, clock.fenced);
        advance(thread);
    }

    // Likewise, where `thread` itself has published to `clock`.
    void adopt(int thread, const Clock& clock) {
        std::copy(clock.past.begin(), clock.past.end(), clocks_[thread].past.begin());
        if (fences_) std::copy(clock.fenced.begin(), clock.fenced.end(), clocks_[thread].fenced.begin());
        advance(thread);
    }

    // Tells `thread` that what `actor` has done up to `stamp` lies in the past.
    void learn(int thread, int actor, uint32_t stamp) {
        uint32_t& known = clocks_[thread].past[actor];
        known = std::max(known, stamp);
    }

    // A proxy fence of `thread`.
    void fence(int thread) {
        fences_ = true;
        Clock::join(clocks_[thread].fenced, clocks_[thread].past);
        advance(thread);
    }

    int threads() const { return threads_; }

  private:
    int threads_;
    int parties_;
    bool fences_;  // whether there has been one
    std::vector<Clock> clocks_;
};

}  // namespace flashgen::simulator
