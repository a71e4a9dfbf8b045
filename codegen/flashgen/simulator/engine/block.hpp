// One thread block, or those of a cluster: its threads as fibers, its warps, who may run, and where they meet.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "fiber.hpp"
#include "global_memory.hpp"
#include "mbarrier.hpp"
#include "order.hpp"
#include "random.hpp"
#include "register_pool.hpp"
#include "shared_memory.hpp"
#include "simulator/kernel.hpp"
#include "simulator/machine.hpp"
#include "tensor_copy.hpp"
#include "traffic.hpp"
#include "warpgroup.hpp"

namespace flashgen::simulator {

class Block;
struct Warp;

constexpr int kMostWarps = 64;  // of a block or a cluster: ready warps are the bits of a word

// An operation of which all lanes of a mask make one.
enum class Operation {
    shuffle,
    vote,
    sync_warp,
    elect,
    barrier,
    load_matrices,
    store_matrices,
    multiply_matrices,
    set_registers,
    warpgroup_product,
    warpgroup_fence,
    warpgroup_commit,
    warpgroup_wait,
};
const char* name_of(Operation operation);

// A copy that has been issued and has not arrived.
struct PendingCopy {
    uint32_t destination;  // offset in the block's dynamic shared memory
    uint8_t size;
    uint8_t source_bytes;
    const void* source;
};

struct Thread : ThreadView {
    Block* owner;
    Warp* warp;
    int lane;
    int index;
    int rank;  // of its block in the cluster
    Context context;
    const char* waits_for = nullptr;  // null while it can run
    Location waits_at;
    bool finished = false;
    bool waited = false;  // for the grids ahead of this one
    std::optional<Location> unwaited;  // its first ld.acquire, or access to global memory behind one, without such a wait
    Clock fenced_inits;   // what it had done at its last fence.mbarrier_init
    bool at_cluster_barrier = false;  // has arrived, and not waited
    uint64_t cluster_phase = 0;       // in which it arrived
    const void* spins_at = nullptr;  // where it last made a load that may wait, what it found, how often, and since when
    uint32_t spins_on = 0;
    uint64_t spins = 0;
    std::chrono::steady_clock::time_point spins_since;
    std::vector<PendingCopy> copies;     // oldest first
    std::vector<size_t> copies_of_group;  // of each group that was closed and is under way
    size_t open_copies = 0;              // of the group that is still open
};

// Lanes of a mask on their way to one operation.
struct Meeting {
    // Returns whether the lanes go on now; otherwise somebody else makes them.
    using Complete = bool (*)(Warp& warp, uint32_t lanes, Location where);

    Operation operation;
    bool aligned;
    uint32_t mask;
    uint32_t arrived;
    int first_thread;
    Location where;
    Complete complete;
};

struct Warp {
    Block* block;
    int index;
    uint32_t lanes;         // that exist
    uint32_t finished = 0;  // whose threads have returned
    uint32_t ready = 0;     // that can run and do not
    std::vector<Meeting> meetings;
    void* operands[32];  // of the lanes that have arrived at a meeting
    WarpTraffic traffic;

    int first_thread() const { return 32 * index; }
};

// What a lane brings to a barrier of the block.
struct BarrierOperand {
    int id;
    int threads;
    bool waits;
    bool predicate;
    bool any;  // of all the predicates, once the lane goes on
};

struct Barrier {
    int expected = 0;  // threads; 0 while nobody has arrived, or kAllThreads
    int arrived = 0;
    int first_thread = -1;
    bool any = false;
    Location where;
    Clock clock;
    std::vector<std::pair<Warp*, uint32_t>> waiting;
    uint32_t warps = 0;  // of the block, that have arrived
    uint32_t warps_before = 0;  // … in the last phase that has ended
};

// What a block of a cluster has of its own. A block without a cluster is the only one of its own.
struct Member {
    BlockView view;
    int num_running = 0;
    bool waited = false;  // some thread, for the grids ahead of this one
    bool launched_ahead = false;  // some thread has launched dependents, and not waited before
    std::vector<Barrier> barriers;
    // The first ld.acquire of each thread that had not waited: by it a block of a grid ahead tells what it has done.
    struct Acquire {
        int thread;
        uint32_t stamp;
    };
    std::vector<Acquire> acquires;
    // The last access of each party from elsewhere, which the block must have heard of when it ends.
    struct Touched {
        int party;
        uint32_t stamp;
        int thread;
        Location where;
        const char* what;
    };
    std::vector<Touched> touched;
};

// barrier.cluster.
struct ClusterBarrier {
    int arrived = 0;  // of the threads that have not returned
    uint64_t phase = 0;
    Clock clock;
    Clock completed;
    std::vector<Thread*> waiting;
};

// What the blocks of a launch share.
struct LaunchState {
    const Kernel& kernel;
    const SimLaunch& launch;
    SimReport& report;
    const void* params;
    GlobalMemory global;
    Traffic traffic;
};

// Who else has to do with a fault.
struct Other {
    Location where = {};
    int thread = -1;
};

class Block : public BlockView {
  public:
    Block(LaunchState& launch, unsigned char* shared_memory);

    // Runs one block, or the cluster that begins with it, to its end. Returns false when it found a fault, which the report then has, or
    // has given up.
    bool run(uint64_t linear_index);

    // Ends the simulation with a fault of a thread.
    [[noreturn]] void fail(const Thread& thread, SimError error, Location where, const std::string& text,
                           Other other = {});

    Thread& thread(int index) { return threads_[index]; }
    SharedMemory& shared() { return shared_; }
    // For an access of a thread; fails where grids ahead of this one may be at work on it.
    GlobalMemory& global(Thread& thread, Location where);
    GlobalMemory& global_to_load(Thread& thread, const void* address, int size, Location where);
    GlobalMemory& global_to_store(Thread& thread, Location where);
    GlobalMemory& any_global() { return launch_.global; }
    // Whether a thread has waited for the grids ahead, or comes behind an ld.acquire of its block.
    bool is_behind(const Thread& thread) const;
    void acquire(Thread& thread, Location where);
    bool is_early() const { return launch_.launch.flags & SIM_EARLY; }
    // What a load that does not wait for the grids ahead finds at an address where they leave `value`.
    uint32_t perhaps_old(const Thread& thread, const void* address, uint32_t value);
    void launch_dependents(const Thread& thread, Location where);
    // Under SIM_EARLY, this gives the block up.
    void wait_for_grids(Thread& thread, Location where);
    int num_blocks() const { return static_cast<int>(members_.size()); }
    // An access of `party`, at its `stamp`, to the shared memory of the block of that rank, from elsewhere or by what works on its own:
    // fails where the block has ended, or ends without having heard of it.
    void touch(const Thread& thread, int rank, int party, uint32_t stamp, const char* what, Location where);
    void arrive_at_cluster(Thread& thread, Location where);
    void wait_for_cluster(Thread& thread, Location where);
    Order& order() { return order_; }
    Mbarriers& mbarriers() { return mbarriers_; }
    TensorCopies& tensor_copies() { return tensor_copies_; }
    RegisterPool& register_pool() { return register_pool_; }
    // The warpgroup of a warp, warpgroups of a block being counted from its first warp; fails, or gives null, where the block ends before
    // the warpgroup does.
    Warpgroup& warpgroup(const Warp& warp, Location where);
    Warpgroup* warpgroup_of(const Warp& warp);
    Traffic& traffic() { return launch_.traffic; }

    // Brings the running thread to an operation of its warp and returns when all of `mask` have made it. The last to
    // arrive calls `complete(warp, lanes)`, with everybody's `operand` in the warp. `aligned` operations need the whole
    // warp, of which no lane has returned; others make do with the lanes that have not.
    void meet(Operation operation, bool aligned, uint32_t mask, void* operand, Meeting::Complete complete,
              Location where);

    // The lanes of a warp, which have just met, arrive at a barrier, and may wait there. Returns whether they go on.
    bool arrive(Warp& warp, uint32_t lanes, Location where);

    // The running thread, or a warp, stops until somebody resumes it.
    void park(Thread& thread, const char* waits_for, Location where);
    void resume(Thread& thread) { make_ready(*thread.warp, 1u << thread.lane); }
    void resume(Warp& warp) { make_ready(warp, warp.lanes); }

    // The running thread could go on, but others may do something first.
    void pause(Thread& thread);

    // The thread has found `value` at an address that it may be waiting at. Fails where nobody is left to change it, or
    // nobody has for long. Under SIM_EARLY, gives the block up where it finds the same again and again.
    void spin(Thread& thread, const void* address, uint32_t value, Location where);

    // What the lanes have done comes before what they do next.
    void order_lanes(Warp& warp, uint32_t lanes);

    // A table of who is where, for people.
    std::string describe_threads() const;

  private:
    static void run_thread();
    void finish(Thread& thread);
    void finish_member(Member& member, const Thread& last);
    void release_cluster_if_full();
    bool is_complete(const Warp& warp, const Meeting& meeting) const;
    void complete(Warp& warp, size_t meeting);
    void complete_meetings_without(const Thread& gone);
    void release(Barrier& barrier);
    void release_if_full(const Member& member, Barrier& barrier);
    void make_ready(Warp& warp, uint32_t lanes);
    void switch_to_another(Thread& from);
    Thread* pick();
    [[noreturn]] void fail_stuck();
    std::string describe_barriers(std::vector<Other>& firsts) const;
    [[noreturn]] void stop();
    // Ends the call without a fault: the block is to run again. Fails where it has written, as it would write twice.
    [[noreturn]] void give_up(const Thread& thread, Location where);
    [[noreturn]] void leave();
    void check_mask(const Thread& thread, Operation operation, bool aligned, uint32_t mask, Location where);

    LaunchState& launch_;
    Order order_;
    SharedMemory shared_;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    std::vector<Member> members_;
    ClusterBarrier cluster_barrier_;
    Mbarriers mbarriers_;
    TensorCopies tensor_copies_;
    RegisterPool register_pool_;
    std::deque<Warpgroup> warpgroups_;
    Stacks stacks_;
    Context main_;
    Random random_{0, 0};
    uint64_t ready_warps_ = 0;  // as bits
    int current_warp_ = 0;
    uint64_t old_arrays_ = 0;   // in which warps find old values ahead of griddepcontrol.wait, as bits; see perhaps_old()
    uint64_t change_warp_ = 0;  // a meeting of a warp is followed by another warp in so many of 2^16 cases
    uint64_t finish_copy_ = 0;  // likewise, a change of threads by the end of a copy
    int block_threads_;
    int num_running_ = 0;
    Clock scratch_;
    Other first_write_;  // to global memory, under SIM_EARLY
    bool failed_ = false;  // or given up
};

inline Thread& running_thread() { return static_cast<Thread&>(this_thread()); }

// "kernel.cu:12", without the folder.
std::string text_of(Location where);
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

}  // namespace flashgen::simulator
