#include "block.hpp"

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

// For a debugger: a breakpoint here stops on the stack of the thread at fault.
extern "C" __attribute__((noinline)) void flashgen_simulator_error(const char* message) { asm volatile("" ::"r"(message)); }

// For a debugger, on the stack of any simulated thread.
extern "C" __attribute__((used)) void flashgen_print_threads() {
    std::fputs(flashgen::simulator::running_thread().owner->describe_threads().c_str(), stderr);
}

namespace flashgen::simulator {
namespace {

constexpr int kNumBarriers = 16;

}  // namespace

const char* name_of(Operation operation) {
    switch (operation) {
        case Operation::shuffle: return "shuffle";
        case Operation::vote: return "vote";
        case Operation::sync_warp: return "__syncwarp";
        case Operation::elect: return "elect.sync";
        case Operation::barrier: return "block barrier";
        case Operation::load_matrices: return "ldmatrix";
        case Operation::store_matrices: return "stmatrix";
        case Operation::multiply_matrices: return "mma";
        case Operation::set_registers: return "setmaxnreg";
        case Operation::warpgroup_product: return "wgmma";
        case Operation::warpgroup_fence: return "wgmma.fence";
        case Operation::warpgroup_commit: return "wgmma.commit_group";
        case Operation::warpgroup_wait: return "wgmma.wait_group";
    }
    return "";
}

std::string format(const char* text, ...) {
    char buffer[512];
    va_list args;
    va_start(args, text);
    std::vsnprintf(buffer, sizeof buffer, text, args);
    va_end(args);
    return buffer;
}

std::string text_of(Location where) {
    const char* file = where.file_name();
    const char* slash = std::strrchr(file, '/');
    return format("%s:%u", slash != nullptr ? slash + 1 : file, static_cast<unsigned>(where.line()));
}

Block::Block(LaunchState& launch, unsigned char* shared_memory)
    : launch_(launch),
      order_(static_cast<int>(launch.launch.block[0] * launch.launch.block[1] * launch.launch.block[2] * launch.kernel.cluster)),
      shared_(shared_memory, static_cast<uint32_t>(launch.launch.shared_bytes), static_cast<int>(launch.kernel.cluster)),
      threads_(order_.threads()),
      members_(launch.kernel.cluster),
      mbarriers_(*this),
      tensor_copies_(*this),
      register_pool_(*this, static_cast<int>(launch.kernel.max_threads), static_cast<int>(launch.kernel.min_blocks),
                     (order_.threads() + 31) / 32, static_cast<int>(launch.kernel.cluster)),
      stacks_(order_.threads()),
      block_threads_(order_.threads() / static_cast<int>(launch.kernel.cluster)) {
    const auto& size = launch.launch.block;
    block_dim = {size[0], size[1], size[2]};
    grid_dim = {launch.launch.grid[0], launch.launch.grid[1], launch.launch.grid[2]};
    counters = &launch.report.counters;
    const int num_threads = order_.threads();
    const int num_warps = (num_threads + 31) / 32;
    warps_.reserve(num_warps);
    for (int i = 0; i < num_warps; ++i) {
        const int lanes = std::min(32, num_threads - 32 * i);
        warps_.push_back({this, i, lanes == 32 ? ~0u : (1u << lanes) - 1, 0, 0, {}, {}, WarpTraffic(launch.traffic)});
    }
    for (int i = 0; i < num_threads; ++i) {
        Thread& thread = threads_[i];
        const auto linear = static_cast<unsigned>(i % block_threads_);
        thread.thread_index = {linear % size[0], linear / size[0] % size[1], linear / size[0] / size[1]};
        thread.rank = i / block_threads_;
        thread.block = &members_[thread.rank].view;
        thread.owner = this;
        thread.warp = &warps_[i / 32];
        thread.lane = i % 32;
        thread.index = i;
    }
    for (int first = 0; first < num_threads; first += block_threads_) {
        for (int i = 0; i < block_threads_ / kThreadsOfGroup; ++i) warpgroups_.emplace_back(*this, first + i * kThreadsOfGroup);
    }
}

bool Block::run(uint64_t linear_index) {
    const uint64_t x = grid_dim.x, y = grid_dim.y;
    for (Member& member : members_) {
        // The blocks of a cluster are neighbours along x.
        const uint64_t linear = linear_index + (&member - members_.data());
        member.view = *this;
        member.view.block_index = {static_cast<unsigned>(linear % x), static_cast<unsigned>(linear / x % y),
                                   static_cast<unsigned>(linear / x / y)};
        member.num_running = block_threads_;
        member.waited = member.launched_ahead = false;
        member.acquires.clear();
        member.touched.clear();
        member.barriers.assign(kNumBarriers, {});
    }
    cluster_barrier_ = {};
    random_ = Random(launch_.launch.seed, linear_index);
    // Some blocks run in near lockstep, in others a warp runs far ahead: different mistakes need different orders.
    constexpr uint64_t kChanges[] = {1 << 16, 1 << 13, 1 << 9, 1 << 5};
    change_warp_ = kChanges[random_.next() % std::size(kChanges)];
    // Copies may be there at once, or only when everybody waits for them.
    constexpr uint64_t kFinishes[] = {1 << 16, 1 << 12, 1 << 8, 0};
    finish_copy_ = kFinishes[random_.next() % std::size(kFinishes)];

    old_arrays_ = Random(~launch_.launch.seed, linear_index).next();  // apart from the order of threads

    order_.reset();
    shared_.reset();
    mbarriers_.reset();
    tensor_copies_.reset();
    register_pool_.reset();
    for (Warpgroup& warpgroup : warpgroups_) warpgroup.reset();
    num_running_ = order_.threads();
    first_write_ = {};
    for (Thread& thread : threads_) {
        thread.waits_for = nullptr;
        thread.finished = thread.waited = thread.at_cluster_barrier = false;
        thread.unwaited.reset();
        thread.fenced_inits.clear();
        thread.spins_at = nullptr;
        thread.copies.clear();
        thread.copies_of_group.clear();
        thread.open_copies = 0;
        stacks_.prepare(thread.index, thread.context, &Block::run_thread, static_cast<ThreadView*>(&thread));
    }
    for (Warp& warp : warps_) {
        warp.finished = 0;
        warp.meetings.clear();
        make_ready(warp, warp.lanes);
    }
    current_warp_ = random_.bit_of(ready_warps_);
    switch_context(main_, pick()->context);
    for (Warp& warp : warps_) warp.traffic.flush();
    if (!failed_) counters->blocks += members_.size();
    return !failed_;
}

void Block::run_thread() {
    Thread& thread = running_thread();
    thread.owner->launch_.kernel.call(thread.owner->launch_.params);
    thread.owner->finish(thread);
}

void Block::finish(Thread& thread) {
    thread.finished = true;
    thread.warp->finished |= 1u << thread.lane;
    Member& member = members_[thread.rank];
    --num_running_;
    --member.num_running;
    complete_meetings_without(thread);
    for (Barrier& barrier : member.barriers) {
        if (barrier.expected == kAllThreads) release_if_full(member, barrier);
    }
    // Who has returned counts as arrived.
    if (thread.at_cluster_barrier && thread.cluster_phase == cluster_barrier_.phase) --cluster_barrier_.arrived;
    release_cluster_if_full();
    if (member.num_running == 0) finish_member(member, thread);
    if (num_running_ == 0) register_pool_.check_end();
    switch_to_another(thread);
    __builtin_unreachable();  // nobody goes on with a thread that has returned
}

void Block::finish_member(Member& member, const Thread& last) {
    tensor_copies_.check_end(last);
    for (size_t id = 0; id < member.barriers.size(); ++id) {
        const Barrier& barrier = member.barriers[id];
        if (barrier.expected == 0) continue;
        fail(threads_[barrier.first_thread], SIM_BARRIER, barrier.where,
             format("barrier %zu is left with %d of %d threads: nobody waits for these arrivals", id, barrier.arrived,
                    barrier.expected));
    }
    for (const Member::Touched& touched : member.touched) {
        bool heard = false;
        for (const Thread& thread : threads_) {
            heard |= thread.rank == last.rank && order_.before(touched.party, touched.stamp, thread.index);
        }
        if (heard) continue;
        fail(last, SIM_COPY_IN_FLIGHT, {},
             format("the block ends, and none of its threads has waited for the %s of thread %d at %s", touched.what, touched.thread,
                    text_of(touched.where).c_str()),
             {touched.where, touched.thread});
    }
    if (launch_.launch.flags & SIM_DEPENDENT && !member.waited && member.acquires.empty()) {
        fail(last, SIM_DEPENDENCY, {},
             "the block of a dependent launch ends and none of its threads has waited for the grids ahead of it, so that "
             "the next one may run beside them");
    }
    const bool each_waits = launch_.launch.flags & SIM_DEPENDENT && member.waited;
    for (const Thread& thread : threads_) {
        if (!each_waits || thread.rank != last.rank || thread.waited || !thread.unwaited) continue;
        fail(thread, SIM_DEPENDENCY, *thread.unwaited,
             "ld.acquire, or global memory behind one, in a thread that ends without griddepcontrol.wait: where threads of a block "
             "wait, each has to");
    }
    if (member.waited && !(launch_.launch.flags & SIM_FOLLOWED && member.launched_ahead)) ++counters->grid_waits;
}

void Block::touch(const Thread& thread, int rank, int party, uint32_t stamp, const char* what, Location where) {
    Member& member = members_[rank];
    if (member.num_running == 0) {
        fail(thread, SIM_COPY_IN_FLIGHT, where, format("%s in block %d of the cluster, which has ended", what, rank));
    }
    for (Member::Touched& touched : member.touched) {
        if (touched.party != party) continue;
        touched = {party, stamp, thread.index, where, what};
        return;
    }
    member.touched.push_back({party, stamp, thread.index, where, what});
}

void Block::arrive_at_cluster(Thread& thread, Location where) {
    if (thread.at_cluster_barrier) fail(thread, SIM_BARRIER, where, "barrier.cluster.arrive twice, with no wait between");
    thread.at_cluster_barrier = true;
    thread.cluster_phase = cluster_barrier_.phase;
    cluster_barrier_.clock.join(thread.fenced_inits);
    ++cluster_barrier_.arrived;
    release_cluster_if_full();
}

void Block::wait_for_cluster(Thread& thread, Location where) {
    if (!thread.at_cluster_barrier) fail(thread, SIM_BARRIER, where, "barrier.cluster.wait of a thread that has not arrived");
    while (thread.cluster_phase == cluster_barrier_.phase) {
        cluster_barrier_.waiting.push_back(&thread);
        park(thread, "barrier.cluster", where);
    }
    thread.at_cluster_barrier = false;
    order_.learn(thread.index, cluster_barrier_.completed);
}

void Block::release_cluster_if_full() {
    if (cluster_barrier_.arrived == 0 || cluster_barrier_.arrived < num_running_) return;
    ++cluster_barrier_.phase;
    cluster_barrier_.arrived = 0;
    cluster_barrier_.completed = cluster_barrier_.clock;
    for (Thread* thread : cluster_barrier_.waiting) resume(*thread);
    cluster_barrier_.waiting.clear();
}

bool Block::is_behind(const Thread& thread) const {
    if (!(launch_.launch.flags & SIM_DEPENDENT) || thread.waited) return true;
    return std::ranges::any_of(members_[thread.rank].acquires, [&](const Member::Acquire& acquire) {
        return order_.before(acquire.thread, acquire.stamp, thread.index);
    });
}

// Not of a thread that has waited: where threads wait, each has to. finish_member() sees to it.
void Block::acquire(Thread& thread, Location where) {
    if (thread.waited) return;
    if (!thread.unwaited) thread.unwaited = where;
    std::vector<Member::Acquire>& acquires = members_[thread.rank].acquires;
    if (std::ranges::find(acquires, thread.index, &Member::Acquire::thread) != acquires.end()) return;
    acquires.push_back({thread.index, order_.stamp(thread.index)});
}

GlobalMemory& Block::global(Thread& thread, Location where) {
    if (!is_behind(thread)) {
        fail(thread, SIM_DEPENDENCY, where,
             "global memory before griddepcontrol.wait: in a dependent launch, grids ahead of this one may be at work on it");
    }
    if (!thread.waited && !thread.unwaited) thread.unwaited = where;
    return launch_.global;
}

GlobalMemory& Block::global_to_store(Thread& thread, Location where) {
    GlobalMemory& memory = global(thread, where);
    if (is_early() && first_write_.thread < 0) first_write_ = {where, thread.index};
    return memory;
}

GlobalMemory& Block::global_to_load(Thread& thread, const void* address, int size, Location where) {
    return launch_.global.settled(address, size) ? launch_.global : global(thread, where);
}

uint32_t Block::perhaps_old(const Thread& thread, const void* address, uint32_t value) {
    if (is_behind(thread) || launch_.global.settled(address, sizeof value)) return value;
    // A warp finds one array as it was and another as it will be.
    uint32_t bit = thread.index / 32;
    for (const char* letter = launch_.global.name_of(address, sizeof value); *letter != 0; ++letter) bit = bit * 31 + *letter;
    if (!(old_arrays_ >> bit % 64 & 1)) return value;
    const uint32_t random = static_cast<uint32_t>(random_.next());
    switch (random % 4) {
        case 0: return value;
        case 1: return value - 1;  // the length before this token
        case 2: return value + random / 4 % 256;
        default: return random;
    }
}

void Block::launch_dependents(const Thread& thread, Location where) {
    if (!thread.waited) members_[thread.rank].launched_ahead = true;
    if (launch_.launch.flags & SIM_FOLLOWED && !is_behind(thread)) {
        fail(thread, SIM_DEPENDENCY, where,
             "griddepcontrol.launch_dependents before griddepcontrol.wait: the next step counts on the grids ahead of this one to "
             "have ended");
    }
}

void Block::wait_for_grids(Thread& thread, Location where) {
    if (is_early()) give_up(thread, where);
    thread.waited = members_[thread.rank].waited = true;
    pause(thread);
}

void cluster_arrive_relaxed(Location where) {
    Thread& thread = running_thread();
    thread.owner->arrive_at_cluster(thread, where);
}

void cluster_wait(Location where) {
    Thread& thread = running_thread();
    thread.owner->wait_for_cluster(thread, where);
}

uint32_t map_shared(uint32_t address, int rank, Location where) {
    Thread& thread = running_thread();
    Block& block = *thread.owner;
    if (rank < 0 || rank >= block.num_blocks()) {
        block.fail(thread, SIM_OPERAND, where, format("mapa to block %d of a cluster of %d", rank, block.num_blocks()));
    }
    return address + (rank - thread.rank) * kBlockWindow;
}

void launch_dependents(Location where) {
    const Thread& thread = running_thread();
    thread.owner->launch_dependents(thread, where);
}

void wait_for_grids(Location where) {
    Thread& thread = running_thread();
    thread.owner->wait_for_grids(thread, where);
}

// A lane has returned, and others may have been waiting for it alone.
void Block::complete_meetings_without(const Thread& gone) {
    Warp& warp = *gone.warp;
    for (size_t i = 0; i < warp.meetings.size();) {
        const Meeting& meeting = warp.meetings[i];
        if (meeting.aligned && meeting.mask >> gone.lane & 1) {
            fail(gone, SIM_DIVERGENCE, {},
                 format("divergent warp operation: it returns while thread %d of its warp waits for it at %s, %s",
                        meeting.first_thread, name_of(meeting.operation), text_of(meeting.where).c_str()),
                 {meeting.where, meeting.first_thread});
        }
        if (is_complete(warp, meeting)) {
            complete(warp, i);
        } else {
            ++i;
        }
    }
}

void Block::check_mask(const Thread& thread, Operation operation, bool aligned, uint32_t mask, Location where) {
    const Warp& warp = *thread.warp;
    if (!(mask >> thread.lane & 1)) {
        fail(thread, SIM_DIVERGENCE, where,
             format("%s with the mask 0x%08x, which leaves out lane %d itself", name_of(operation), mask, thread.lane));
    }
    if (!aligned) return;
    if (warp.lanes != ~0u) {
        fail(thread, SIM_DIVERGENCE, where,
             format("%s in a warp of %d threads, and it needs all 32", name_of(operation), std::popcount(warp.lanes)));
    }
    if (warp.finished != 0) {
        const int other = warp.first_thread() + std::countr_zero(warp.finished);
        fail(thread, SIM_DIVERGENCE, where,
             format("divergent warp operation: %s needs the whole warp, and thread %d has returned", name_of(operation),
                    other),
             {{}, other});
    }
}

void Block::meet(Operation operation, bool aligned, uint32_t mask, void* operand, Meeting::Complete complete,
                 Location where) {
    Thread& thread = running_thread();
    Warp& warp = *thread.warp;
    check_mask(thread, operation, aligned, mask, where);
    size_t index = 0;
    while (index < warp.meetings.size() && warp.meetings[index].mask != mask) ++index;
    if (index == warp.meetings.size()) {
        warp.meetings.push_back({operation, aligned, mask, 0, thread.index, where, complete});
    }
    Meeting& meeting = warp.meetings[index];
    if (meeting.operation != operation || meeting.where.line() != where.line()) {
        fail(thread, SIM_DIVERGENCE, where,
             format("divergent warp operation: %s here, while thread %d of the same warp waits at %s, %s",
                    name_of(operation), meeting.first_thread, name_of(meeting.operation),
                    text_of(meeting.where).c_str()),
             {meeting.where, meeting.first_thread});
    }
    warp.operands[thread.lane] = operand;
    meeting.arrived |= 1u << thread.lane;
    thread.waits_for = name_of(operation);
    thread.waits_at = where;
    if (is_complete(warp, meeting)) {
        this->complete(warp, index);
        if ((random_.next() & 0xffff) < change_warp_ && ready_warps_ != 0) current_warp_ = random_.bit_of(ready_warps_);
    }
    switch_to_another(thread);
}

bool Block::is_complete(const Warp& warp, const Meeting& meeting) const {
    return (meeting.mask & warp.lanes & ~warp.finished & ~meeting.arrived) == 0;
}

void Block::complete(Warp& warp, size_t index) {
    const Meeting meeting = warp.meetings[index];
    warp.meetings.erase(warp.meetings.begin() + static_cast<ptrdiff_t>(index));
    if (meeting.arrived == (warp.lanes & ~warp.finished)) warp.traffic.flush();
    if (meeting.complete(warp, meeting.arrived, meeting.where)) make_ready(warp, meeting.arrived);
}

bool Block::arrive(Warp& warp, uint32_t lanes, Location where) {
    auto operand_of = [&warp](int lane) -> const BarrierOperand& { return *static_cast<BarrierOperand*>(warp.operands[lane]); };
    const BarrierOperand first = operand_of(std::countr_zero(lanes));
    const int id = first.id, threads = first.threads;
    ++counters->barriers;
    const Thread& thread = threads_[warp.first_thread() + std::countr_zero(lanes)];
    if (id < 0 || id >= kNumBarriers) fail(thread, SIM_BARRIER, where, format("barrier %d; there are 0 to 15", id));
    if (threads != kAllThreads && (threads <= 0 || threads % 32 != 0)) {
        fail(thread, SIM_BARRIER, where, format("barrier %d for %d threads, which is no number of whole warps", id, threads));
    }
    if (threads > (block_threads_ + 31) / 32 * 32) {
        fail(thread, SIM_BARRIER, where,
             format("barrier %d for %d threads in a block of %d: it can never be full", id, threads, block_threads_));
    }
    Member& member = members_[thread.rank];
    Barrier& barrier = member.barriers[id];
    if (barrier.expected == 0) {
        barrier.expected = threads;
        barrier.first_thread = thread.index;
        barrier.where = where;
    } else if (barrier.expected != threads) {
        auto words = [](int count) { return count == kAllThreads ? std::string("all") : format("%d", count); };
        fail(thread, SIM_BARRIER, where,
             format("barrier %d for %s threads here, while thread %d waits at it for %s threads, %s", id,
                    words(threads).c_str(), barrier.first_thread, words(barrier.expected).c_str(),
                    text_of(barrier.where).c_str()),
             {barrier.where, barrier.first_thread});
    }
    // Two groups of warps that share a barrier by mistake seldom meet there, but then go on too early.
    const int warp_of_block = warp.index - thread.rank * ((block_threads_ + 31) / 32);
    if (barrier.warps_before != 0 && !(barrier.warps_before >> warp_of_block & 1)) {
        fail(thread, SIM_BARRIER, where,
             format("barrier %d is of other warps: warp %d took no part in its last phase", id, warp_of_block));
    }
    barrier.warps |= 1u << warp_of_block;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        order_.publish(warp.first_thread() + lane, barrier.clock);
        barrier.any |= operand_of(lane).predicate;
        if (!first.waits) order_.advance(warp.first_thread() + lane);
    }
    // A barrier counts warps, whether or not all of their lanes are there.
    barrier.arrived += threads == kAllThreads ? std::popcount(lanes) : 32;
    if (first.waits) barrier.waiting.emplace_back(&warp, lanes);
    release_if_full(member, barrier);
    return !first.waits;
}

void Block::release_if_full(const Member& member, Barrier& barrier) {
    const int expected = barrier.expected == kAllThreads ? member.num_running : barrier.expected;
    if (barrier.arrived == expected) release(barrier);
}

void Block::release(Barrier& barrier) {
    for (auto [warp, lanes] : barrier.waiting) {
        for (int lane = 0; lane < 32; ++lane) {
            if (!(lanes >> lane & 1)) continue;
            order_.learn(warp->first_thread() + lane, barrier.clock);
            static_cast<BarrierOperand*>(warp->operands[lane])->any = barrier.any;
        }
        make_ready(*warp, lanes);
    }
    barrier.expected = barrier.arrived = 0;
    barrier.any = false;
    barrier.warps_before = std::exchange(barrier.warps, 0);
    barrier.waiting.clear();
    barrier.clock.clear();
    if (ready_warps_ != 0) current_warp_ = random_.bit_of(ready_warps_);
}

void Block::order_lanes(Warp& warp, uint32_t lanes) {
    scratch_.clear();
    for (int lane = 0; lane < 32; ++lane) {
        if (lanes >> lane & 1) order_.publish(warp.first_thread() + lane, scratch_);
    }
    for (int lane = 0; lane < 32; ++lane) {
        if (lanes >> lane & 1) order_.adopt(warp.first_thread() + lane, scratch_);
    }
}

void Block::make_ready(Warp& warp, uint32_t lanes) {
    warp.ready |= lanes;
    ready_warps_ |= uint64_t{1} << warp.index;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
        threads_[warp.first_thread() + std::countr_zero(left)].waits_for = nullptr;
    }
}

Warpgroup* Block::warpgroup_of(const Warp& warp) {
    const int groups = block_threads_ / kThreadsOfGroup;  // of a block
    const int rank = threads_[warp.first_thread()].rank;
    const int group = (warp.first_thread() - rank * block_threads_) / kThreadsOfGroup;
    return group < groups ? &warpgroups_[rank * groups + group] : nullptr;
}

Warpgroup& Block::warpgroup(const Warp& warp, Location where) {
    if (Warpgroup* found = warpgroup_of(warp)) return *found;
    fail(threads_[warp.first_thread()], SIM_DIVERGENCE, where,
         format("wgmma in a block of %d threads, where the last %d make no warpgroup of 128", block_threads_,
                block_threads_ % kThreadsOfGroup));
}

void Block::park(Thread& thread, const char* waits_for, Location where) {
    thread.waits_for = waits_for;
    thread.waits_at = where;
    switch_to_another(thread);
}

void Block::pause(Thread& thread) {
    if ((random_.next() & 0xffff) >= change_warp_) return;
    resume(thread);
    current_warp_ = random_.bit_of(ready_warps_);
    switch_to_another(thread);
}

void Block::spin(Thread& thread, const void* address, uint32_t value, Location where) {
    using Clock = std::chrono::steady_clock;
    if (thread.spins_at != address || thread.spins_on != value) {
        thread.spins_at = address;
        thread.spins_on = value;
        thread.spins = 0;
        thread.spins_since = Clock::now();
    }
    // Blocks of this call run one after another, those of other calls beside them.
    constexpr uint64_t kSpins = 10000, kEarlySpins = 8;
    constexpr std::chrono::seconds kPatience{60};
    ++thread.spins;
    if (is_early() && thread.spins > kEarlySpins) give_up(thread, where);
    if (thread.spins > kSpins && (launch_.launch.flags & SIM_ALONE || Clock::now() - thread.spins_since > kPatience)) {
        fail(thread, SIM_DEADLOCK, where,
             format("ld.acquire finds %u again and again, and no block that is launched earlier is left to change it", value));
    }
    std::this_thread::yield();
    resume(thread);
    current_warp_ = random_.bit_of(ready_warps_);
    switch_to_another(thread);
}

// Goes on with a thread that can run, which may be `from` itself, or with the caller of run() when all have returned.
void Block::switch_to_another(Thread& from) {
    Thread* next = pick();
    if (next == &from) return;
    if (next == nullptr) {
        if (num_running_ > 0) fail_stuck();
        switch_context(from.context, main_);
    }
    ++counters->switches;
    switch_context(from.context, next->context);
    if (failed_) stop();
}

Thread* Block::pick() {
    if (tensor_copies_.any_under_way() && (random_.next() & 0xffff) < finish_copy_) tensor_copies_.finish_one(random_);
    while (ready_warps_ == 0) {
        if (!tensor_copies_.any_under_way()) return nullptr;
        tensor_copies_.finish_one(random_);
    }
    if (!(ready_warps_ >> current_warp_ & 1)) current_warp_ = random_.bit_of(ready_warps_);
    Warp& warp = warps_[current_warp_];
    const int lane = random_.bit_of(warp.ready);
    warp.ready &= ~(1u << lane);
    if (warp.ready == 0) ready_warps_ &= ~(uint64_t{1} << warp.index);
    return &threads_[warp.first_thread() + lane];
}

void Block::fail_stuck() {
    // Lanes that wait for others of their warp, which wait at another operation of it.
    for (const Warp& warp : warps_) {
        uint32_t meeting_lanes = 0;
        for (const Meeting& meeting : warp.meetings) meeting_lanes |= meeting.arrived;
        for (const Meeting& meeting : warp.meetings) {
            const uint32_t missing_lanes = meeting.mask & warp.lanes & ~warp.finished & ~meeting.arrived & meeting_lanes;
            if (missing_lanes == 0) continue;
            const Thread& missing = threads_[warp.first_thread() + std::countr_zero(missing_lanes)];
            fail(threads_[meeting.first_thread], SIM_DIVERGENCE, meeting.where,
                 format("divergent warp operation: %s waits for thread %d, which waits at %s, %s", name_of(meeting.operation),
                        missing.index, missing.waits_for, text_of(missing.waits_at).c_str()),
                 {missing.waits_at, missing.index});
        }
    }
    std::string text = "deadlock:";
    std::vector<Other> firsts;
    text += register_pool_.describe(firsts);
    text += mbarriers_.describe(firsts);
    for (const Warpgroup& warpgroup : warpgroups_) text += warpgroup.describe(firsts);
    text += describe_barriers(firsts);
    text += format(" %d of %d threads have returned", order_.threads() - num_running_, order_.threads());
    if (firsts.empty()) {
        const auto stuck = std::ranges::find(threads_, false, &Thread::finished);
        firsts.push_back({stuck->waits_at, stuck->index});
    }
    fail(threads_[firsts[0].thread], SIM_DEADLOCK, firsts[0].where, text, firsts.size() > 1 ? firsts[1] : Other());
}

std::string Block::describe_barriers(std::vector<Other>& firsts) const {
    std::string text;
    for (const Member& member : members_) {
        for (size_t id = 0; id < member.barriers.size(); ++id) {
            const Barrier& barrier = member.barriers[id];
            if (barrier.waiting.empty()) continue;
            text += format(" barrier %zu has %d of %d threads, the first of them thread %d at %s;", id, barrier.arrived,
                           barrier.expected == kAllThreads ? member.num_running : barrier.expected, barrier.first_thread,
                           text_of(barrier.where).c_str());
            firsts.push_back({barrier.where, barrier.first_thread});
        }
    }
    if (!cluster_barrier_.waiting.empty()) {
        const Thread& first = *cluster_barrier_.waiting.front();
        text += format(" barrier.cluster has %d of %d threads, the first that waits is thread %d at %s;", cluster_barrier_.arrived,
                       num_running_, first.index, text_of(first.waits_at).c_str());
        firsts.push_back({first.waits_at, first.index});
    }
    return text;
}

void Block::fail(const Thread& thread, SimError error, Location where, const std::string& text, Other other) {
    SimReport& report = launch_.report;
    report.error = error;
    report.line = where.line();
    report.other_line = other.where.line();
    report.thread = thread.index;
    report.other_thread = other.thread;
    const uint3 block_index = thread.block->block_index;
    report.block[0] = block_index.x;
    report.block[1] = block_index.y;
    report.block[2] = block_index.z;
    std::snprintf(report.message, sizeof report.message, "%s, block (%u, %u, %u), thread %d (warp %d, lane %d)%s%s: %s",
                  launch_.kernel.name, block_index.x, block_index.y, block_index.z, thread.index, thread.warp->index,
                  thread.lane, where.line() != 0 ? ", " : "", where.line() != 0 ? text_of(where).c_str() : "",
                  text.c_str());
    failed_ = true;
    // A debugger shall find the thread at fault on its own stack, also where the last of its warp to arrive found out.
    Thread& running = running_thread();
    if (&thread != &running) switch_context(running.context, threads_[thread.index].context);
    stop();
}

void Block::stop() {
    flashgen_simulator_error(launch_.report.message);
    leave();
}

void Block::give_up(const Thread& thread, Location where) {
    if (first_write_.thread >= 0) {
        fail(thread, SIM_DEPENDENCY, where,
             format("has to wait for grids ahead, and thread %d of the block has written at %s before: the block cannot be run again",
                    first_write_.thread, text_of(first_write_.where).c_str()),
             first_write_);
    }
    launch_.report.error = SIM_GIVEN_UP;
    failed_ = true;
    leave();
}

void Block::leave() {
    // The other threads' stacks are given up as they are.
    Context nowhere;
    switch_context(nowhere, main_);
    __builtin_unreachable();
}

std::string Block::describe_threads() const {
    auto state_of = [](const Thread& thread) -> std::string {
        if (thread.finished) return "returned";
        if (&thread == &this_thread()) return "runs";
        if (thread.waits_for == nullptr) return "can run";
        return format("waits at %s, %s", thread.waits_for, text_of(thread.waits_at).c_str());
    };
    std::string text;
    for (size_t first = 0, last; first < threads_.size(); first = last + 1) {
        const std::string state = state_of(threads_[first]);
        last = first;
        while (last + 1 < threads_.size() && last % 32 != 31 && state_of(threads_[last + 1]) == state) ++last;
        text += format("threads %zu to %zu (warp %d): %s\n", first, last, threads_[first].warp->index, state.c_str());
    }
    return text;
}

}  // namespace flashgen::simulator
