"""What the engine finds in kernels with one fault, and not in those without; orders of threads; figures."""

import struct

import numpy as np
import pytest

from flashgen.errors import SimulationError
from flashgen.simulator import library
from flashgen.simulator.execute import SimulatedGrid
from simulator.kernels import check_of, fault, run

pytestmark = pytest.mark.usefixtures("compiler")

WORD = "shared + 4 * threadIdx.x"
NEXT = "shared + 4 * ((threadIdx.x + {step}) % blockDim.x)"


def words(count):
    return np.zeros(count, np.uint32)


# Launches that a driver refuses.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block": 128, "bounds": 64}, "128 threads a block; the kernel's launch bounds allow 64"),
        ({"block": (32, 33, 1)}, "1056 threads a block; the limit is 1024"),
        ({"block": (1, 1, 65)}, "65 threads in dimension 2 of a block"),
        ({"grid": (0, 1, 1)}, "0 blocks in dimension 0 of the grid"),
        ({"grid": (1, 65536, 1)}, "65536 blocks in dimension 1 of the grid"),
        ({"shared_bytes": 227 * 1024 + 1}, "232449 bytes of dynamic shared memory; the limit is 232448"),
        ({"shared_bytes": 5000, "max_shared_bytes": 4999}, "5000 bytes.*the limit is 4999"),
    ],
)
def test_launches_that_a_driver_refuses(options, text):
    with pytest.raises(SimulationError, match=text) as caught:
        run("store_shared_32(shared, 1);", **options)
    assert caught.value.check == "launch"


def test_an_empty_grid_is_refused_where_grids_overlap():
    def launch(*args, threads, **options):
        SimulatedGrid(*args, **options).run_overlapped(None)

    with pytest.raises(SimulationError, match="0 blocks in dimension 0 of the grid") as caught:
        run("", grid=(0, 1, 1), launch=launch)
    assert caught.value.check == "launch"


def test_launch_bounds_may_be_expressions_of_the_source():
    functions = "constexpr int kWarps = 2;\nconstexpr int kThreads = 32 * kWarps;"
    run("", functions=functions, bounds="kThreads, 1", block=64)
    with pytest.raises(SimulationError, match="launch bounds allow 64"):
        run("", functions=functions, bounds="kThreads, 1", block=65)


# Warps.


def test_lanes_at_different_lines():
    error = fault(
        """
        if (lane < 7) {
            params.out[lane] = __shfl_xor_sync(0xffffffff, lane, 1);  // HERE
        } else {
            params.out[lane] = __shfl_xor_sync(0xffffffff, lane, 1);  // THERE
        }
        """,
        {},
        {"out": words(32)},
    )
    assert error.check == "divergence"
    assert {error.thread < 7, error.other_thread < 7} == {True, False}


def test_lanes_at_different_operations():
    body = "lane < 9 ? (void)__any_sync(0xffffffff, lane) : __syncwarp();  // HERE"
    error = fault(body)
    assert error.check == "divergence"
    assert "vote" in str(error)
    assert "__syncwarp" in str(error)


def test_a_matrix_instruction_that_one_lane_skips():
    body = """
        float c[4] = {};
        const uint32_t a[4] = {};
        if (lane != 5) mma_m16n8k16<fp16>(c, a, 0, 0);  // HERE
    """
    error = fault(body)
    assert error.check == "divergence"
    assert "thread 5" in str(error)
    assert "mma" in str(error)


def test_lanes_that_wait_for_each_other_at_different_masks():
    body = """
        if (lane == 3) {
            barrier_sync(32);  // THERE
        } else {
            __syncwarp(0x0000ffff << lane / 16 * 16);  // HERE
        }
    """
    error = fault(body)
    assert error.check == "divergence"
    assert 3 in (error.thread, error.other_thread)


def test_a_mask_that_leaves_its_caller_out():
    error = fault("if (lane < 8) __syncwarp(0x7f);  // HERE")
    assert (error.check, error.thread) == ("divergence", 7)


def test_matrix_instructions_need_a_whole_warp():
    body = "uint32_t f[4]; if (warp == 1) ldmatrix_x4(f, shared);  // HERE"
    error = fault(body, block=48)
    assert error.check == "divergence"
    assert "warp of 16 threads" in str(error)


def test_threads_that_have_returned_are_not_waited_for(fresh_seed):
    out = words(70)
    body = """
        if (lane % 5 == 4) return;
        __syncwarp();
        params.out[threadIdx.x] = __popc(__ballot_sync(0xffffffff, lane % 2));
        __syncthreads();
        params.out[threadIdx.x] += 100;
    """
    run(body, {}, {"out": out}, block=70, seed=fresh_seed)
    lanes = np.arange(70) % 32
    voters = [sum(lane % 5 != 4 and lane % 2 for lane in range(count)) for count in (32, 32, 6)]
    np.testing.assert_array_equal(out, np.where(lanes % 5 == 4, 0, np.repeat(voters, [32, 32, 6]) + 100))


# Barriers of the block.


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("barrier_sync(128)", "can never be full"),
        ("barrier_sync(48)", "no number of whole warps"),
        ("barrier_sync(0)", "no number of whole warps"),
        ("barrier_sync(lane == 4 ? 32 : 64)", "another lane"),
    ],
)
def test_barriers_for_a_wrong_number_of_threads(call, text):
    error = fault(f"{call};  // HERE", block=64)
    assert error.check == "barrier"
    assert text in str(error)


def test_warps_that_disagree_about_a_barrier():
    body = """
        if (warp == 0) {
            barrier_sync(96);  // HERE
        } else {
            barrier_sync(64);  // THERE
        }
    """
    error = fault(body, block=96)
    assert error.check == "barrier"
    assert "96 threads" in str(error)
    assert "64 threads" in str(error)


def test_a_barrier_that_a_warp_skips():
    error = fault("if (warp != 2) barrier_sync(128);  // HERE", block=128)
    assert error.check == "deadlock"
    assert "barrier 1 has 96 of 128 threads" in str(error)
    assert "32 of 128 threads have returned" in str(error)


def test_arrivals_for_which_nobody_waits():
    error = fault("if (warp == 1) barrier_arrive(2, 64);  // HERE", block=64)
    assert error.check == "barrier"
    assert "barrier 2 is left with 32 of 64 threads" in str(error)


def test_groups_of_warps_that_share_a_barrier():
    """They never meet there, as the second comes behind the first; on a GPU they may."""
    body = """
        if (warp < 2) {
            barrier_sync(3, 64);
            barrier_arrive(4, 128);
        } else {
            barrier_sync(4, 128);
            barrier_sync(3, 64);  // HERE
        }
    """
    error = fault(body, block=128)
    assert error.check == "barrier"
    assert "barrier 3 is of other warps" in str(error)


def test_warps_that_wait_at_different_barriers():
    body = """
        if (warp == 0) {
            barrier_sync(64);  // HERE
        } else {
            __syncthreads();  // THERE
        }
    """
    error = fault(body, block=64)
    assert error.check == "deadlock"


# Shared memory.


def test_shared_memory_that_nothing_wrote():
    body = """
        store_shared_32(shared + 16 * lane, 1);
        store_shared_8(shared + 16 * lane + 4, 1);
        __syncwarp();
        load_shared_32(shared + 16 * lane);
        load_shared_32(shared + 16 * lane + 4);  // HERE
    """
    error = fault(body)
    assert error.check == "uninitialised shared memory"
    assert f"offset {16 * error.thread + 5}," in str(error)


def test_a_block_does_not_see_what_the_one_before_it_left():
    body = """
        if (blockIdx.x == 0) store_shared_32(shared + 4 * lane, 1);
        load_shared_32(shared + 4 * lane);  // HERE
    """
    error = fault(body, grid=(2, 1, 1))
    assert error.check == "uninitialised shared memory"
    assert error.block == 1
    assert "block (1, 0, 0)" in str(error)


@pytest.mark.parametrize(
    ("access", "check"),
    [
        ("load_shared_32(shared + 4096 - 128 + 4 * lane + 4)", "shared bounds"),
        ("store_shared_8(shared - 1, lane)", "shared bounds"),
        ("store_shared_32(0, lane)", "shared bounds"),
        ("to_shared(&shared_memory[4097])", "shared bounds"),
        ("to_shared(&lane)", "shared bounds"),
        ("cp_async_4(shared + 4096, nullptr, 0)", "shared bounds"),
        ("load_shared_128(shared + 8)", "alignment"),
        ("store_shared_64(shared + 4, 0, 0)", "alignment"),
        ("cp_async_16(shared + 8, nullptr, 0)", "alignment"),
        ("uint32_t f[4]; ldmatrix_x4(f, shared + 16 * lane + (lane == 9 ? 2 : 0))", "alignment"),
    ],
)
def test_shared_addresses(access, check):
    fill = "for (int i = lane; i < 1024; i += 32) store_shared_32(shared + 4 * i, 0);"
    error = fault(
        f"{'' if access.startswith(('store', 'to', 'cp')) else fill} __syncwarp(); {access};  // HERE"
    )
    assert error.check == check, str(error)
    if "ldmatrix" in access:
        assert error.thread == 9


@pytest.mark.parametrize("step", [1, 33])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("store_shared_32({own}, 1)", "load_shared_32({other})"),
        ("load_shared_32({own})", "store_shared_32({other}, 1)"),
        ("store_shared_32({own}, 1)", "store_shared_8({other}, 1)"),
        ("store_shared_32({own}, 1)", "cp_async_4({other}, nullptr, 0)"),
    ],
)
def test_races(first, second, step):
    # With a barrier between them the two accesses are in order; without it they are not, whoever is first.
    body = """
        store_shared_32({own}, 0);
        __syncthreads();
        {first};  // HERE
        {barrier}
        {second};  // THERE
    """
    addresses = {"own": WORD, "other": NEXT.format(step=step)}
    first, second = first.format(**addresses), second.format(**addresses)
    for seed in range(3):
        run(
            body.format(first=first, second=second, barrier="__syncthreads();", own=WORD), block=64, seed=seed
        )
        error = fault(body.format(first=first, second=second, barrier="", own=WORD), block=64, seed=seed)
        assert error.check in ("race", "copy in flight")
        assert (error.thread - error.other_thread) % 64 in (step, 64 - step)


@pytest.mark.parametrize(
    ("meeting", "orders"),
    [
        ("__syncwarp()", True),
        ("__shfl_sync(0xffffffff, lane, 0)", False),
        ("__any_sync(0xffffffff, lane)", False),
        ("barrier_sync(64)", True),
        ("__syncwarp(0xffff << lane / 16 * 16)", False),
        ("mma_m16n8k16<bf16>(c, a, 0, 0)", False),
        ("ldmatrix_x4(f, shared + 1024 + 16 * lane)", False),
    ],
)
def test_what_orders_the_lanes_of_a_warp(meeting, orders):
    body = f"""
        float c[4] = {{}};
        const uint32_t a[4] = {{}};
        uint32_t f[4];
        for (int i = threadIdx.x; i < 128; i += 64) store_shared_32(shared + 1024 + 4 * i, i);
        __syncthreads();
        store_shared_32({WORD}, lane);  // HERE
        {meeting};
        load_shared_32(shared + 4 * (32 * warp + (lane + 20) % 32));  // THERE
    """
    if orders:
        run(body, block=64)
    else:
        assert fault(body, block=64).check == "race"


def test_a_meeting_of_one_warp_does_not_order_another():
    body = f"""
        store_shared_32({WORD}, lane);
        __syncwarp();
        load_shared_32({NEXT.format(step=32)});
    """
    for seed in range(4):
        # Where the load comes first, nothing has been written.
        assert check_of(run, body, block=64, seed=seed) in ("race", "uninitialised shared memory")


def test_order_is_handed_on_through_a_third_warp(fresh_seed):
    # Warp 0 meets warp 1 at one barrier, warp 1 meets warp 2 at the next: what warp 0 wrote, warp 2 may read.
    body = """
        if (warp == 0) store_shared_32(shared + 4 * lane, lane);
        if (warp < 2) barrier_sync(64);
        {meeting}
        if (warp == 2) params.out[lane] = load_shared_32(shared + 4 * (31 - lane));
    """
    out = words(32)
    meeting = (
        "if (warp > 0) flashgen::simulator::block_barrier(2, 64, flashgen::simulator::Location::current());"
    )
    run(body.replace("{meeting}", meeting), {}, {"out": out}, block=96, seed=fresh_seed)
    np.testing.assert_array_equal(out, np.arange(32)[::-1])
    error = fault(body.replace("{meeting}", ""), {}, {"out": out}, block=96, seed=fresh_seed)
    assert error.check in ("race", "uninitialised shared memory")


def test_neighbouring_bytes_are_nobodys_race(fresh_seed):
    body = """
        store_shared_8(shared + threadIdx.x, threadIdx.x);
        __syncthreads();
        store_shared_8(shared + (threadIdx.x + 1) % 64, 7);
    """
    run(body, block=64, seed=fresh_seed)


def test_ldmatrix_reads_for_the_whole_warp_but_not_for_others():
    body = """
        for (int i = threadIdx.x; i < 128; i += 64) store_shared_32(shared + 4 * i, i);
        __syncthreads();
        uint32_t f[4];
        if (warp == 0) ldmatrix_x4(f, shared + 16 * lane);  // HERE
        if (warp == {writer}) store_shared_32(shared + 4 * (31 - lane), 7);  // THERE
    """
    run(body.replace("{writer}", "0"), block=64)
    error = fault(body.replace("{writer}", "1"), block=64)
    assert error.check == "race"


# Asynchronous copies.

COPY = "cp_async_16(shared + 16 * threadIdx.x, params.source + 4 * threadIdx.x, 16);"


@pytest.mark.parametrize(
    "access",
    [
        "load_shared_32(shared + 16 * threadIdx.x + 4)",
        "load_shared_32(shared + 16 * (threadIdx.x ^ 1))",
        "store_shared_8(shared + 16 * threadIdx.x + 3, 1)",
        "cp_async_4(shared + 16 * threadIdx.x, params.source, 4)",
        "uint32_t f[4]; ldmatrix_x4(f, shared + 16 * threadIdx.x)",
    ],
)
@pytest.mark.parametrize(
    "wait", ["", "cp_async_commit();", "cp_async_wait<0>();", "cp_async_commit(); cp_async_wait<1>();"]
)
def test_bytes_of_a_copy_that_was_not_waited_for(access, wait):
    body = f"""
        {COPY}  // HERE
        {wait}
        __syncwarp();
        {access};  // THERE
    """
    assert fault(body, {"source": words(128)}).check == "copy in flight"


def test_a_wait_covers_all_but_the_last_groups():
    body = """
        for (int i = 0; i < 3; ++i) {
            cp_async_4(shared + 128 * i + 4 * lane, params.source + lane, 4);
            cp_async_commit();
        }
        cp_async_wait<1>();
        load_shared_32(shared + 4 * lane);
        load_shared_32(shared + 128 + 4 * lane);
        load_shared_32(shared + 256 + 4 * lane);
    """
    error = fault(body, {"source": words(32)})
    assert error.check == "copy in flight"
    assert f"offset {256 + 4 * error.thread}," in str(error)


def test_a_copy_is_seen_by_others_after_a_barrier():
    body = f"""
        {COPY}
        cp_async_commit();
        cp_async_wait<0>();
        BARRIER
        params.out[threadIdx.x] = load_shared_32(shared + 16 * ((threadIdx.x + 40) % 64));
    """
    source, out = np.arange(256, dtype=np.uint32), words(64)
    run(body.replace("BARRIER", "__syncthreads();"), {"source": source}, {"out": out}, block=64)
    np.testing.assert_array_equal(out, 4 * ((np.arange(64) + 40) % 64))
    for seed in range(4):
        unordered, arrays = body.replace("BARRIER", ""), ({"source": source}, {"out": out})
        check = check_of(run, unordered, *arrays, block=64, seed=seed)
        assert check in ("race", "copy in flight", "uninitialised shared memory")


def test_a_copy_may_begin_only_when_readers_have_finished():
    body = """
        store_shared_32(shared + 4 * threadIdx.x, 1);
        __syncthreads();
        load_shared_32(shared + 4 * threadIdx.x);  // HERE
        cp_async_4(shared + 4 * ((threadIdx.x + 32) % 64), params.source, 4);  // THERE
    """
    assert fault(body, {"source": words(1)}, block=64).check in ("race", "copy in flight")


# Global memory.


@pytest.mark.parametrize(
    ("access", "check", "text"),
    [
        ("store_global_32((float*)params.out + 32, 0)", "global bounds", "0 bytes past the end of out"),
        ("store_global_128(params.out + 28 + 4, uint4{})", "global bounds", "past the end of out"),
        ("load_global_8((const uint8_t*)params.source - 3)", "global bounds",
         "3 bytes before the start of source"),
        ("load_global_8(nullptr)", "global bounds", "null pointer"),
        ("cp_async_16(shared, params.source + 32, 1)", "global bounds", "past the end of source"),
        ("cp_async_16(shared, params.source + 31 / 4 * 4 + 4, 16)", "global bounds",
         "past the end of source"),
        ("store_global_32((float*)params.source, 0)", "global access", "to source, which is read-only"),
        ("store_global_128(params.out + 2, uint4{})", "alignment", "no multiple of 16"),
        ("store_global_32((float*)((char*)params.out + 2), 0)", "alignment", "no multiple of 4"),
        ("cp_async_16(shared, params.source + 1, 16)", "alignment", "no multiple of 16"),
        ("load_global_8((const uint8_t*)params.out + 5)", "uninitialised global memory", "byte"),
        ("cp_async_4(shared, params.source, 5)", "operand", "5"),
        ("cp_async_16(shared, params.source, -1)", "operand", "-1"),
    ],
)  # fmt: skip
def test_global_addresses(access, check, text):
    arrays = aligned(2, 36)
    error = fault(f"if (lane == 11) {access};  // HERE", {"source": arrays[0][:32]}, {"out": arrays[1][:32]})
    assert (error.check, error.thread) == (check, 11), str(error)
    assert text in str(error)


def aligned(count, size):
    """Arrays of uint32 that begin at multiples of 256 bytes, far from each other."""
    memory = np.zeros(count * 4096 + 256, np.uint8)
    first = -memory.ctypes.data % 256
    return [memory[first + 4096 * i :][: 4 * size].view(np.uint32) for i in range(count)]


def test_what_a_kernel_wrote_it_may_read():
    out = words(32)
    body = """
        store_global_32((float*)params.out + lane, 1.0f);
        params.out[lane] = load_global_8((const uint8_t*)(params.out + lane) + 3);
    """
    run(body, {}, {"out": out})
    np.testing.assert_array_equal(out, 0x3F)


# Operands and registers.


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("__shfl_sync(0xffffffff, lane, 0, 3);  // HERE", "width 3"),
        ("if (lane < 8) __shfl_sync(0xff, lane, 8);  // HERE", "from lane 8"),
        ("if (lane == 6) return; __shfl_xor_sync(0xffffffff, lane, 1);  // HERE", "from lane 6"),
    ],
)
def test_operands_of_shuffles(body, text):
    error = fault(body)
    assert error.check == "operand"
    assert text in str(error)


@pytest.mark.parametrize("unset", ["c", "a", "b"])
def test_registers_that_nothing_set(unset):
    body = """
        float c[4];
        uint32_t a[4], b[2];
        for (int i = 0; i < 4; ++i) { SET }
        mma_m16n8k8_tf32(c, a, b[0], b[1]);  // HERE
    """
    sets = {"c": "c[i] = 0;", "a": "a[i] = 0;", "b": "b[i % 2] = 0;"}
    run(body.replace("SET", " ".join(sets.values())))
    error = fault(body.replace("SET", " ".join(text for name, text in sets.items() if name != unset)))
    assert error.check == "uninitialised register"


# The order of threads.

ORDER = """
    for (int round = 0; round < 4; ++round) {
        params.order[params.next[0]++] = threadIdx.x;
        __syncwarp();
    }
    __syncthreads();
"""


def order_of(seed):
    order, turn = words(4 * 128), words(1)
    run(ORDER, {}, {"order": order, "next": turn}, block=128, seed=seed)
    assert (np.bincount(order) == 4).all()
    return order


def test_a_seed_is_one_order_of_threads(fresh_seed):
    np.testing.assert_array_equal(order_of(fresh_seed), order_of(fresh_seed))


def test_seeds_give_different_orders():
    orders = [order_of(seed) for seed in range(24)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    # Anybody may be first; in some orders a warp runs to its barrier before another begins.
    assert len({int(order[0]) for order in orders}) > 12
    changes = [int((np.diff(order // 32) != 0).sum()) for order in orders]
    assert min(changes) == 3
    assert max(changes) >= 6


def test_a_missing_barrier_is_another_answer_even_in_memory_that_is_not_watched():
    # A static array goes by plain C++, which the race detector does not see.
    body = """
        __shared__ int values[64];
        values[threadIdx.x] = -1;
        __syncthreads();
        values[threadIdx.x] = threadIdx.x;
        BARRIER
        params.out[threadIdx.x] = values[(threadIdx.x + 1) % 64];
    """

    def answer(barrier, seed):
        out = np.zeros(64, np.int32)
        run(body.replace("BARRIER", barrier), {}, {"out": out}, block=64, seed=seed)
        return out.tolist()

    assert all(answer("__syncthreads();", seed) == [*range(1, 64), 0] for seed in range(4))
    assert len({tuple(answer("", seed)) for seed in range(4)}) == 4


# Launches.


def test_blocks_of_any_shape_know_where_they_are():
    grid, block = (3, 2, 2), (5, 4, 3)
    out = np.zeros((12, 60, 6), np.uint32)
    body = """
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        uint32_t* out = params.out + 6 * (60 * block + thread);
        const uint3 places[2] = {blockIdx, threadIdx};
        for (int i = 0; i < 2; ++i) {
            out[3 * i] = places[i].x;
            out[3 * i + 1] = places[i].y;
            out[3 * i + 2] = places[i].z;
        }
        if (block_index() != blockIdx.x) out[0] = 99;
    """
    report = run(body, {}, {"out": out}, grid=grid, block=block, threads=3)
    for index in np.ndindex(out.shape[:2]):
        blocks, threads = np.unravel_index(index[0], grid[::-1]), np.unravel_index(index[1], block[::-1])
        assert out[index].tolist() == [*blocks[::-1], *threads[::-1]]
    assert report.counters["blocks"] == 12


def test_blocks_do_not_depend_on_who_runs_them(fresh_seed):
    body = ORDER.replace("params.next[0]", "params.next[blockIdx.x]").replace("params.order", "order")
    body = "uint32_t* order = params.order + 512 * blockIdx.x;" + body
    results = []
    for threads in (1, 2, 5):
        order, turns = words(6 * 512), words(6)
        outputs = {"order": order, "next": turns}
        counters = run(
            body, {}, outputs, grid=(6, 1, 1), block=128, seed=fresh_seed, threads=threads
        ).counters
        results.append((order.tobytes(), counters))
    assert results[0] == results[1] == results[2]


def test_parameters_of_many_types():
    source = """
        #include "flashgen/sm80.cuh"
        struct Pair { short a; char b; };
        __global__ void many(char one, double two, Pair three, float* out, int64_t four) {
            if (threadIdx.x > 0) return;
            out[0] = one; out[1] = two; out[2] = three.a; out[3] = three.b; out[4] = four;
        }
    """
    loaded = library.load(source, "many")
    assert loaded.params_bytes == 40
    out = np.zeros(5, np.float32)
    params = struct.pack("=bxxxxxxxdhbxxxxxqq", 1, 2.5, -3, 4, out.ctypes.data, 1 << 40)
    SimulatedGrid(loaded, params, (1, 1, 1), (1, 1, 1), 0, []).run()
    assert out.tolist() == [1, 2.5, -3, 4, 2.0**40]


def test_the_first_block_with_a_fault_is_named():
    body = "if (blockIdx.x >= 5 && lane == 30) load_shared_32(shared);  // HERE"
    error = fault(body, grid=(8, 1, 1))
    assert (error.block, error.thread) == (5, 30)
    assert "block (5, 0, 0), thread 30 (warp 0, lane 30)" in str(error)


# Figures.


def access_of(statement, size=4096, block=32):
    """What the last line of a kernel did."""
    fill = f"for (int i = threadIdx.x; i < {size // 4}; i += blockDim.x) store_shared_32(shared + 4 * i, 0);"
    arrays = aligned(2, 1024)
    report = run(
        f"{fill} __syncthreads();\n{statement}",
        {"source": arrays[0]},
        {"out": arrays[1]},
        block=block,
        shared_bytes=size,
    )
    return [access for access in report.accesses if access.line == max(a.line for a in report.accesses)]


@pytest.mark.parametrize(
    ("statement", "ideal", "actual"),
    [
        ("load_shared_32(shared + 4 * lane)", 1, 1),
        ("load_shared_32(shared)", 1, 1),
        ("load_shared_32(shared + 8 * lane)", 1, 2),
        ("load_shared_32(shared + 128 * lane)", 1, 32),
        ("load_shared_32(shared + 132 * (lane % 16))", 1, 1),
        ("store_shared_8(shared + lane, 1)", 1, 1),
        ("store_shared_64(shared + 8 * lane, 0, 0)", 2, 2),
        ("store_shared_64(shared + 16 * lane, 0, 0)", 2, 4),
        ("load_shared_128(shared + 16 * lane)", 4, 4),
        ("load_shared_128(shared + 128 * lane)", 4, 32),
        ("load_shared_128(shared + 128 * lane + 16 * (lane % 8))", 4, 4),
        ("if (lane < 8) load_shared_128(shared + 32 * lane)", 1, 2),
        ("uint32_t f[4]; ldmatrix_x4(f, shared + 16 * lane)", 4, 4),
        ("uint32_t f[4]; ldmatrix_x4(f, shared + 64 * lane)", 4, 16),
        ("uint32_t f[4]; ldmatrix_x4(f, shared + 64 * lane + 16 * (lane / 2 % 4))", 4, 4),
        ("cp_async_16(shared + 128 * lane, nullptr, 0)", 4, 32),
    ],
)
def test_bank_conflicts(statement, ideal, actual):
    (access,) = access_of(f"{statement};")
    assert (access.instructions, access.ideal, access.actual) == (1, ideal, actual)


def test_lanes_that_pass_a_line_in_any_order_make_one_instruction_of_the_warp():
    (access,) = access_of(
        "for (int i = 0; i < 5; ++i) load_shared_32(shared + 128 * i + 4 * lane);", block=96
    )
    assert (access.instructions, access.bytes, access.ideal, access.actual) == (15, 15 * 128, 15, 15)


@pytest.mark.parametrize(
    ("statement", "ideal", "actual"),
    [
        ("store_global_32((float*)params.out + lane, 0)", 4, 4),
        ("store_global_32((float*)params.out + 8 * lane, 0)", 4, 32),
        ("load_global_8((const uint8_t*)params.source)", 1, 1),
        ("load_global_8((const uint8_t*)params.source + 16 + lane)", 1, 2),
        ("store_global_128(params.out + 4 * lane, uint4{})", 16, 16),
    ],
)
def test_sectors(statement, ideal, actual):
    (access,) = access_of(f"{statement};")
    assert (access.instructions, access.ideal, access.actual) == (1, ideal, actual)
