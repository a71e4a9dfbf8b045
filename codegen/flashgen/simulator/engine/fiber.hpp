// Threads of execution that switch to each other by hand.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace flashgen::simulator {

// Where a fiber that is not running goes on.
struct Context {
#if defined(__x86_64__) || defined(__aarch64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t registers;
#endif
};

// Keeps the running fiber in `from` and goes on with `to`.
void switch_context(Context& from, Context& to);

// Stacks of kStackBytes for `count` fibers, each with a page at its end that faults.
class Stacks {
  public:
    explicit Stacks(int count);
    ~Stacks();
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;

    // Makes `context` begin `entry`, which never returns, on stack `index`, whose last word becomes `owner`.
    void prepare(int index, Context& context, void (*entry)(), void* owner);

  private:
    unsigned char* mapping_;
    size_t mapping_bytes_;
    unsigned char* first_;
};

}  // namespace flashgen::simulator
