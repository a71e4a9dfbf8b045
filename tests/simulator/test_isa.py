"""Instructions in the simulator against NumPy formulas of the layouts that the PTX ISA documents."""

import math
import re

import numpy as np
import pytest

from flashgen.host import paths
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.simulator import library
from simulator.kernels import fault, run

pytestmark = pytest.mark.usefixtures("compiler")

LANES = np.arange(32)
GROUP, INDEX = LANES // 4, LANES % 4  # groupID and threadID_in_group of the PTX ISA
NAN = np.uint32(0x7FFFFFFF)


@pytest.fixture
def rng(fresh_seed):
    return np.random.default_rng(fresh_seed)


def truncated(exact):
    """float64 cut off towards zero to float32."""
    nearest = exact.astype(np.float32)
    too_far = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    return np.where(too_far, np.nextafter(nearest, np.float32(0)), nearest)


def bf16(values):
    """Bits of floats that are bfloat16 numbers."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def fp16(values):
    return np.asarray(values, np.float16).view(np.uint16)


def pairs(low, high):
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


WHERE = r",? ?flashgen::simulator::Location where = flashgen::simulator::Location::current\(\)"


def declarations(header):
    """What a header declares: functions with their parameters but the call's place, types, constants."""
    text = " ".join(line for line in header.splitlines() if not line.startswith(("//", "#")))
    text = re.sub(WHERE, "", re.sub(r" +", " ", text))
    functions = re.findall(
        r"(?:__device__(?: __forceinline__)?|inline) ([\w]+) (\w+)(?:<\w+>)?\((.*?)\) ?[{;]", text
    )
    return {*functions, *re.findall(r"\b(?:struct|using|constexpr \w+) (\w+) [={]", text)}


AHEAD = {
    "barrier_red_or",
    "load_shared_128",
    "load_shared_32",
    "store_shared_128",
    "store_shared_32",
    "store_shared_8",
    "tma_store_wait",
}


@pytest.mark.parametrize("name", ["sm80.cuh", "sm90.cuh", "cluster.cuh", "ptx.cuh", "types.cuh"])
def test_a_header_declares_what_the_one_does_that_it_stands_in_for(name):
    real = (paths.templates_dir() / "include" / "flashgen" / name).read_text()
    real = re.sub(r"#if defined\(__CUDACC_RTC__\).*?#else", "", real, flags=re.DOTALL)
    host = (library.INCLUDE / "flashgen" / name).read_text()
    assert len(declarations(real)) >= 3
    # Host bodies may be there before the first kernel that wants them.
    ahead = declarations(host) - {"kKind"} - declarations(real)
    assert {name for _, name, _ in ahead} <= (AHEAD if name == "sm90.cuh" else set())
    assert declarations(real) <= declarations(host)


# Matrix products.

MMA = """
    uint32_t a[4];
    float c[4];
    for (int i = 0; i < 4; ++i) a[i] = params.a[4 * threadIdx.x + i];
    for (int i = 0; i < 4; ++i) c[i] = params.c[4 * threadIdx.x + i];
    {call}(c, a, params.b[2 * threadIdx.x], params.b[2 * threadIdx.x + 1]);
    for (int i = 0; i < 4; ++i) params.d[4 * threadIdx.x + i] = c[i];
"""


def fragment_rows():
    """Row of the 16x8 accumulator for (lane, element)."""
    return np.stack([GROUP, GROUP, GROUP + 8, GROUP + 8], 1)


def fragment_columns():
    return np.stack([2 * INDEX, 2 * INDEX + 1, 2 * INDEX, 2 * INDEX + 1], 1)


def multiply(call, a, b, c):
    """D = A B + C by one instruction, from fragments and back to a 16x8 matrix."""
    rows, columns = fragment_rows(), fragment_columns()
    out = np.full((32, 4), np.nan, np.float32)
    fragment = np.ascontiguousarray(c[rows, columns], np.float32)
    report = run(MMA.replace("{call}", call), {"a": a, "b": b, "c": fragment}, {"d": out})
    assert report.mma == 1
    d = np.full((16, 8), np.nan, np.float32)
    d[rows, columns] = out
    return d


def multiply_16_bit(element, a, b, c):
    """a (16x16), b (16x8): bits."""
    a_fragment = np.stack(
        [
            pairs(a[row, column], a[row, column + 1])
            for column in (2 * INDEX, 2 * INDEX + 8)
            for row in (GROUP, GROUP + 8)
        ],
        1,
    )
    b_fragment = np.stack([pairs(b[row, GROUP], b[row + 1, GROUP]) for row in (2 * INDEX, 2 * INDEX + 8)], 1)
    return multiply(f"mma_m16n8k16<{element}>", a_fragment, b_fragment, c)


@pytest.mark.parametrize(("element", "bits", "unit"), [("fp16", fp16, 256), ("bf16", bf16, 32)])
def test_m16n8k16(element, bits, unit, rng):
    # Multiples of 1/unit: every product, and a float64 sum of them, is exact.
    a, b = (rng.integers(-255, 256, shape) / unit for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8), np.float32) * 100
    d = multiply_16_bit(element, bits(a), bits(b), c)
    np.testing.assert_array_equal(d, truncated(a @ b + c.astype(np.float64)))


def test_m16n8k16_counts_one_kind(rng):
    zeros, out = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.float32)
    for element, name in (("fp16", "mma_m16n8k16_f16"), ("bf16", "mma_m16n8k16_bf16")):
        body = MMA.replace("{call}", f"mma_m16n8k16<{element}>")
        counters = run(body, {"a": zeros, "b": zeros, "c": out}, {"d": out.copy()}).counters
        assert {kind: count for kind, count in counters.items() if kind.startswith("mma") and count} == {
            name: 1
        }


@pytest.mark.parametrize("element", ["fp16", "bf16"])
def test_every_finite_16_bit_number_is_read_exactly(element):
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = widened(bits.view(np.float16) if element == "fp16" else bits, element, np.float32)
    values, bits = values[np.isfinite(values)], bits[np.isfinite(values)]
    one = {"fp16": 0x3C00, "bf16": 0x3F80}[element]
    # B has ones on its diagonal, so that column k of A becomes column k of D, for k < 8.
    body = f"""
    for (int first = 0; first < {len(bits)}; first += 128) {{
        const int row = lane / 4, column = lane % 4 * 2;
        const int index = (first + 8 * row + column) / 2;
        uint32_t a[4] = {{params.pairs[index], params.pairs[index + 32], 0, 0}};
        float c[4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
        const uint32_t b = row == column ? {one} : row == column + 1 ? {one}u << 16 : 0;
        mma_m16n8k16<{element}>(c, a, b, 0);
        for (int e = 0; e < 2; ++e) {{
            params.out[first + 8 * row + column + e] = c[e];
            params.out[first + 64 + 8 * row + column + e] = c[2 + e];
        }}
    }}
    """
    assert len(bits) % 128 == 0
    out = np.full(len(bits), np.nan, np.float32)
    run(body, {"pairs": bits.view(np.uint32)}, {"out": out})
    np.testing.assert_array_equal(out, values)


def test_m16n8k8_tf32_reads_the_upper_bits_alone(rng):
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((16, 8), (8, 8)))
    c = rng.standard_normal((16, 8), np.float32)
    a_bits, b_bits = a.view(np.uint32), b.view(np.uint32)
    a_fragment = np.stack([a_bits[row, INDEX + step] for step in (0, 4) for row in (GROUP, GROUP + 8)], 1)
    b_fragment = np.stack([b_bits[INDEX, GROUP], b_bits[INDEX + 4, GROUP]], 1)
    d = multiply("mma_m16n8k8_tf32", a_fragment, b_fragment, c)

    a_tf32, b_tf32 = ((bits & 0xFFFFE000).view(np.float32).astype(np.float64) for bits in (a_bits, b_bits))
    terms = [*(a_tf32[:, k, None] * b_tf32[None, k] for k in range(8)), c.astype(np.float64)]
    exact = np.array([math.fsum(column) for column in np.stack(terms, -1).reshape(-1, 9)]).reshape(16, 8)
    # A sum in double may be on the other side of a float that the exact one is very near to.
    expected = truncated(exact)
    assert np.mean(d == expected) > 0.9
    np.testing.assert_allclose(d, expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_matrix_sum_is_cut_off_towards_zero(sign):
    # 1 + 3/4 ulp is nearer to 1 + ulp; 2^-12 squared is 2^-24, half an ulp of 1.
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    a[:, 0], b[0] = sign * 2.0**-12, 1.5 * 2.0**-12
    d = multiply_16_bit("fp16", fp16(a), fp16(b), np.full((16, 8), sign, np.float32))
    np.testing.assert_array_equal(d, np.float32(sign))


def test_matrix_sums_of_infinities_and_nan():
    a, b = np.ones((16, 16)), np.zeros((16, 8))
    b[0] = 1
    a[0, 0], a[1, 0], a[2, 0], a[3, 1] = np.inf, -np.inf, np.nan, np.inf  # the last meets a zero
    d = multiply_16_bit("fp16", fp16(a), fp16(b), np.zeros((16, 8), np.float32))
    assert (d[0] == np.inf).all()
    assert (d[1] == -np.inf).all()
    assert (d[2:4].view(np.uint32) == NAN).all()
    assert (d[4:] == 1).all()


# Shared memory.


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed, rng):
    tile = rng.integers(0, 1 << 16, (64, 8), np.uint16)
    rows = rng.permutation(64)[:32].astype(np.int32)  # lane l gives row l % 8 of matrix l // 8
    out = np.zeros((32, 4), np.uint32)
    report = run(
        f"""
        for (int i = threadIdx.x; i < 256; i += 32) store_shared_32(shared + 4 * i, params.tile[i]);
        __syncwarp();
        uint32_t fragment[4];
        ldmatrix_x4{"_trans" if transposed else ""}(fragment, shared + 16 * params.rows[lane]);
        for (int i = 0; i < 4; ++i) params.out[4 * lane + i] = fragment[i];
        """,
        {"tile": tile.view(np.uint32), "rows": rows},
        {"out": out},
    )
    matrices = tile[rows].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    expected = np.stack(
        [pairs(matrix[GROUP, 2 * INDEX], matrix[GROUP, 2 * INDEX + 1]) for matrix in matrices], 1
    )
    np.testing.assert_array_equal(out, expected)
    assert report.counters["ldmatrix"] == 1


def test_loads_and_stores_of_every_width(rng):
    words = rng.integers(0, 1 << 32, (32, 8), np.uint32)
    out = np.zeros((32, 8), np.uint32)
    last = np.zeros(32, np.float32)
    run(
        """
        const uint32_t* in = params.words + 8 * lane;
        const shared_address row = shared + 32 * lane;
        store_shared_64(row, in[0], in[1]);
        store_shared_32(row + 8, in[2]);
        for (int i = 0; i < 4; ++i) store_shared_8(row + 12 + i, (in[3] >> 8 * i & 0xff) | 0xabcd00);
        store_shared_64(row + 16, in[4], in[5]);
        store_shared_64(row + 24, in[6], in[7]);
        uint4 low = load_shared_128(row);
        const uint4 high = {load_shared_32(row + 16), load_shared_32(row + 20), load_shared_32(row + 24),
                            load_shared_32(row + 28)};
        low.x = load_global_8((const uint8_t*)&in[0]) | low.x & 0xffffff00;
        store_global_128(params.out + 8 * lane, low);
        store_global_128(params.out + 8 * lane + 4, high);
        store_global_32(params.last + lane, 0.5f * lane);
        """,
        {"words": words},
        {"out": out, "last": last},
    )
    np.testing.assert_array_equal(out, words)
    np.testing.assert_array_equal(last, 0.5 * LANES)


@pytest.mark.parametrize(("size", "step"), [(16, 1), (4, 4)])
def test_cp_async_fills_with_zeros_past_the_source(size, step, rng):
    source = rng.integers(1, 256, (32, size), np.uint8)
    lengths = rng.integers(0, size // step + 1, 32).astype(np.int32) * step
    lengths[:2] = 0, size
    out = np.full((32, size), 7, np.uint8)
    # A copy of nothing must not look at where its source points.
    run(
        f"""
        const int bytes = params.lengths[lane];
        const void* source = bytes == 0 ? (const void*)1 : params.source + {size} * lane;
        cp_async_{size}(shared + {size} * lane, source, bytes);
        cp_async_commit();
        cp_async_wait<0>();
        for (int i = 0; i < {size}; i += 4) {{
            ((uint32_t*)(params.out + {size} * lane))[i / 4] = load_shared_32(shared + {size} * lane + i);
        }}
        """,
        {"source": source, "lengths": lengths},
        {"out": out},
    )
    np.testing.assert_array_equal(out, np.where(np.arange(size) < lengths[:, None], source, 0))


def test_reds_of_all_threads_add_up(rng):
    values = rng.integers(-8, 9, (96, 4)).astype(np.float32)
    sums, singles = np.zeros((8, 4), np.float32), np.zeros(8, np.float32)
    body = """
        if (threadIdx.x < 8) {
            store_global_128(params.sums + 4 * threadIdx.x, {});
            store_global_32(params.singles + threadIdx.x, 0.0f);
        }
        barrier_sync(96);
        const uint4 words = load_global_128(params.values + 4 * threadIdx.x);
        const float values[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                                 __uint_as_float(words.w)};
        red_add_128(params.sums + threadIdx.x % 8 * 4, values);
        red_add(params.singles + threadIdx.x % 8, values[0]);
    """
    report = run(body, {"values": values}, {"sums": sums, "singles": singles}, block=96)
    expected = values.reshape(12, 8, 4).sum(0)
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(singles, expected[:, 0])
    assert sum(access.instructions for access in report.accesses if access.kind == "global add") == 6


def test_a_release_is_seen_by_who_waits_for_it(fresh_seed):
    flag, told, found = (np.zeros(1, np.uint32) for _ in range(3))
    body = """
        if (threadIdx.x == 0) store_release_32(params.flag, 0);
        barrier_sync(64);
        if (threadIdx.x == 32) {
            store_global_32(params.told, 7);
            store_release_32(params.flag, 1);
        }
        if (threadIdx.x == 0) {
            while (load_acquire_32(params.flag) != 1) {}
            store_global_32(params.found, load_global_32(params.told));
        }
    """
    for seed in range(fresh_seed, fresh_seed + 10):
        run(body, {}, {"flag": flag, "told": told, "found": found}, block=64, seed=seed)
        assert found == 7


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("store_release_32(word, 1)", "load_relaxed_32(word)"),
        ("store_release_32(word, 1)", "load_global_128(word)"),
        ("add_release_32(word, 1)", "load_global_32(word)"),
        ("load_acquire_32(word)", "store_global_32(word, 1)"),
        ("load_acquire_32(word)", "red_add((float*)word, 1.0f)"),
    ],
)
def test_a_word_that_one_access_acquires_or_releases_is_accessed_so_by_all(first, second):
    """The words beside it are not."""
    body = """
        uint32_t* word = params.words + (blockIdx.x == 0 ? 4 : OTHER);
        if (blockIdx.x == 0 && lane == 0) {
            for (int i = 0; i < 12; ++i) store_global_32(params.words + i, 0);
            FIRST;
        }
        if (blockIdx.x == 1 && lane == 0) SECOND;  // HERE
    """
    body = body.replace("FIRST", first).replace("SECOND", second)
    memory = np.zeros(16, np.uint32)
    arrays = {"words": memory[-(memory.ctypes.data // 4) % 4 :][:12]}
    for beside in (0, 8):
        run(body.replace("OTHER", str(beside)), {}, arrays, grid=(2, 1, 1))
    assert fault(body.replace("OTHER", "4"), {}, arrays, grid=(2, 1, 1)).check == "race"


def test_waiting_for_what_nobody_writes_is_a_deadlock(fresh_seed):
    error = fault(
        """
        store_release_32(params.flag, 0);
        while (load_acquire_32(params.flag) != 7) {}  // HERE
        """,
        {},
        {"flag": np.zeros(1, np.uint32)},
        block=1,
    )
    assert error.check == "deadlock"


def test_cp_async_groups_arrive_one_by_one(rng):
    source = rng.integers(0, 1 << 32, (3, 32, 4), np.uint32)
    out = np.zeros((3, 32, 4), np.uint32)
    body = """
        for (int i = 0; i < 3; ++i) {
            cp_async_16(shared + 512 * i + 16 * lane, params.source + 128 * i + 4 * lane, 16);
            cp_async_commit();
        }
        cp_async_wait<2>();
        store_global_128(params.out + 4 * lane, load_shared_128(shared + 16 * lane));
        cp_async_wait<1>();
        store_global_128(params.out + 128 + 4 * lane, load_shared_128(shared + 512 + 16 * lane));
        cp_async_wait<0>();
        store_global_128(params.out + 256 + 4 * lane, load_shared_128(shared + 1024 + 16 * lane));
    """
    report = run(body, {"source": source}, {"out": out})
    np.testing.assert_array_equal(out, source)
    assert report.counters["cp_async"] == 3
    assert report.counters["global_bytes_read"] == source.nbytes


# Shuffles and votes.


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("kind", ["idx", "up", "down", "xor"])
def test_shuffles(kind, width, rng):
    values = rng.standard_normal(32, np.float32)
    operands = rng.integers(0, 32, 32).astype(np.int32)
    if kind != "idx":
        operands[:] = rng.integers(0, width)
    out = np.zeros(32, np.float32)
    call = {"idx": "__shfl_sync"}.get(kind, f"__shfl_{kind}_sync")
    run(
        f"params.out[lane] = {call}(0xffffffff, params.values[lane], params.operands[lane], {width});",
        {"values": values, "operands": operands},
        {"out": out},
    )
    segment = LANES // width * width
    source = {
        "idx": segment + operands % width,
        "up": np.where(LANES - operands >= segment, LANES - operands, LANES),
        "down": np.where(LANES + operands < segment + width, LANES + operands, LANES),
        "xor": np.where((LANES ^ operands) < segment + width, LANES ^ operands, LANES),
    }[kind]
    np.testing.assert_array_equal(out, values[source])


def test_shuffles_of_eight_bytes_and_of_half_a_warp(rng):
    values = rng.integers(0, 1 << 63, 32, np.int64)
    out = np.zeros(32, np.int64)
    run(
        """
        if (lane < 16) {
            params.out[lane] = __shfl_sync(0x0000ffff, params.values[lane], 15 - lane);
        } else {
            params.out[lane] = __shfl_sync(0xffff0000, params.values[lane], 16);
        }
        """,
        {"values": values},
        {"out": out},
    )
    np.testing.assert_array_equal(out, values[[*range(15, -1, -1), *[16] * 16]])


def test_votes(rng):
    cases = np.array([0, 1, 1 << 31, 0xFFFFFFFF, rng.integers(1 << 32)], np.uint32)
    out = np.zeros((5, 3), np.uint32)
    run(
        """
        for (int i = 0; i < 5; ++i) {
            const int aye = params.cases[i] >> lane & 1;
            const uint32_t ballot = __ballot_sync(0xffffffff, aye ? 4 : 0);
            const int any = __any_sync(0xffffffff, aye);
            const int all = __all_sync(0xffffffff, aye);
            if (lane == i) {
                params.out[3 * i] = ballot;
                params.out[3 * i + 1] = any;
                params.out[3 * i + 2] = all;
            }
        }
        """,
        {"cases": cases},
        {"out": out},
    )
    np.testing.assert_array_equal(out, np.stack([cases, cases != 0, cases == 0xFFFFFFFF], 1))


# Barriers.


@pytest.mark.parametrize("barrier", ["barrier_sync(128)", "__syncthreads()"])
def test_a_barrier_makes_writes_visible_to_all(barrier, fresh_seed):
    out = np.zeros((4, 128), np.uint32)
    # Each warp adds one to what its neighbour left, turn by turn.
    body = f"""
        store_shared_32(shared + 4 * threadIdx.x, threadIdx.x);
        for (int turn = 0; turn < 4; ++turn) {{
            {barrier};
            const uint32_t value = load_shared_32(shared + 4 * ((threadIdx.x + 32) % 128));
            {barrier};
            store_shared_32(shared + 4 * threadIdx.x, value + 1);
            params.out[128 * turn + threadIdx.x] = value;
        }}
    """
    report = run(body, {}, {"out": out}, block=128, seed=fresh_seed)
    turns, threads = np.arange(4)[:, None], np.arange(128)
    np.testing.assert_array_equal(out, (threads + 32 * (turns + 1)) % 128 + turns)
    assert report.counters["barriers"] == 4 * 8


def test_a_barrier_is_met_from_different_lines(fresh_seed):
    out = np.zeros(64, np.uint32)
    run(
        """
        store_shared_32(shared + 4 * threadIdx.x, threadIdx.x);
        if (warp == 0) {
            barrier_sync(64);
        } else {
            barrier_sync(64);
        }
        params.out[threadIdx.x] = load_shared_32(shared + 4 * (63 - threadIdx.x));
        """,
        {},
        {"out": out},
        block=64,
        seed=fresh_seed,
    )
    np.testing.assert_array_equal(out, np.arange(64)[::-1])


# Numbers.


def test_unpack_gives_back_what_was_packed(rng):
    bits = rng.integers(0, 1 << 32, 1 << 12, np.uint32)
    out = np.zeros((2, len(bits), 2), np.float32)
    run(
        f"""
        for (int i = lane; i < {len(bits)}; i += 32) {{
            const float2 half = unpack<fp16>(params.values[i]), brain = unpack<bf16>(params.values[i]);
            params.out[2 * i] = half.x;
            params.out[2 * i + 1] = half.y;
            params.out[{2 * len(bits)} + 2 * i] = brain.x;
            params.out[{2 * len(bits)} + 2 * i + 1] = brain.y;
        }}
        """,
        {"values": bits},
        {"out": out},
    )
    words = bits.view(np.uint16).reshape(-1, 2)
    np.testing.assert_array_equal(out[0], words.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(out[1], widened(words, "bf16", np.float32))


def test_pack_rounds_to_nearest_even(rng):
    every_half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    halfway = (every_half[:-1] + every_half[1:]) / 2
    edges = [0, 65504, 65519.996, 65520, 65536, 3.4e38, np.inf, np.nan, 2.0**-24, 2.0**-25, 2.0**-26, 1e-45]
    values = np.concatenate(
        [
            halfway,
            np.nextafter(halfway, np.float32(np.inf)),
            np.nextafter(halfway, np.float32(0)),
            np.array(edges, np.float32),
            rng.integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32),
        ]
    )
    values = np.concatenate([values, -values])
    out = np.zeros((2, len(values)), np.uint32)
    run(
        f"""
        for (int i = lane; i < {len(values)}; i += 32) {{
            params.out[i] = pack<fp16>(params.values[i], 1.0f);
            params.out[{len(values)} + i] = pack<bf16>(1.0f, params.values[i]);
        }}
        """,
        {"values": values},
        {"out": out},
    )
    with np.errstate(over="ignore", invalid="ignore"):
        half = values.astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(out[0] & 0xFFFF, np.where(nan, 0x7FFF, half))
    np.testing.assert_array_equal(out[1] >> 16, np.where(nan, 0x7FFF, bfloat16_bits(values)))
    assert (out[0] >> 16 == 0x3C00).all()
    assert (out[1] & 0xFFFF == 0x3F80).all()


def test_exp2_and_log2(rng):
    x = np.concatenate(
        [rng.uniform(-125, 127, 4096), [0, -0.0, -np.inf, np.inf, np.nan, -127, -140, 1e-40, 200]]
    )
    y = np.concatenate(
        [2 ** rng.uniform(-149, 127, 4096), [0, -0.0, 1, 2, 1e-45, np.inf, np.nan, -1, -np.inf]]
    )
    x, y = x.astype(np.float32), y.astype(np.float32)
    out = np.zeros((2, len(x)), np.float32)
    report = run(
        f"""
        for (int i = lane; i < {len(x)}; i += 32) {{
            params.out[i] = exp2_approx(params.x[i]);
            params.out[{len(x)} + i] = log2_approx(params.y[i]);
        }}
        """,
        {"x": x, "y": y},
        {"out": out},
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exp2, log2 = np.exp2(x.astype(np.float64)), np.log2(y.astype(np.float64))
    exp2[exp2 < 2.0**-126] = 0  # .ftz
    exp2[exp2 >= 2.0**128] = np.inf
    np.testing.assert_allclose(out[0], exp2, rtol=2.0**-22, atol=0)
    np.testing.assert_allclose(out[1], log2, rtol=2.0**-22, atol=2.0**-22)
    assert report.counters["exp2"] == report.counters["log2"] == len(x)


def test_intrinsics_on_bits():
    words = np.array([0x01020304, 0xFFFFFFFF, 0x80000001, 0], np.uint32)
    out = np.zeros((4, 6), np.uint32)
    run(
        """
        if (lane < 4) {
            const uint32_t word = params.words[lane];
            const uint32_t results[6] = {__dp4a(word, 0x10203040u, 5u),
                                         (uint32_t)__dp4a((int)word, 0x01010101, 0),
                                         (uint32_t)__popc(word),
                                         (uint32_t)__ffs((int)word),
                                         (uint32_t)__clz((int)word),
                                         __brev(word)};
            for (int i = 0; i < 6; ++i) params.out[6 * lane + i] = results[i];
        }
        """,
        {"words": words},
        {"out": out},
    )
    # The byte products by hand.
    unsigned = [5 + 4 * 0x40 + 3 * 0x30 + 2 * 0x20 + 0x10, 5 + 255 * 0xA0, 5 + 0x40 + 0x80 * 0x10, 5]
    signed = [10, -4, 1 - 128, 0]
    assert out[:, 0].tolist() == unsigned
    assert out[:, 1].view(np.int32).tolist() == signed
    assert out[:, 2].tolist() == [5, 32, 2, 0]
    assert out[:, 3].tolist() == [3, 1, 1, 0]
    assert out[:, 4].tolist() == [7, 0, 0, 32]
    assert out[:, 5].tolist() == [int(f"{int(word):032b}"[::-1], 2) for word in words]


def test_bytes_and_bits_across_two_words(rng):
    words = rng.integers(0, 1 << 32, (32, 4), np.uint32)
    out = np.zeros((32, 4), np.uint32)
    run(
        """
        const uint32_t* in = params.words + 4 * lane;
        params.out[4 * lane] = __byte_perm(in[0], in[1], in[2]);
        params.out[4 * lane + 1] = __funnelshift_r(in[0], in[1], in[3]);
        params.out[4 * lane + 2] = __funnelshift_l(in[0], in[1], in[3]);
        params.out[4 * lane + 3] = __funnelshift_rc(in[0], in[1], in[3] % 40);
        """,
        {"words": words},
        {"out": out},
    )
    for (low, high, selector, shift), found in zip(words.tolist(), out.tolist(), strict=True):
        both = high << 32 | low
        given = both.to_bytes(8, "little")
        nibbles = [selector >> 4 * i & 15 for i in range(4)]
        signed = [255 * (given[n & 7] >> 7) if n & 8 else given[n] for n in nibbles]
        by, clamped = shift % 32, min(shift % 40, 32)
        expected = [int.from_bytes(bytes(signed), "little"), both >> by, both << by >> 32, both >> clamped]
        assert found == [value & 0xFFFFFFFF for value in expected]
