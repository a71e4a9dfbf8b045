"""Instructions of compute capability 9.0 in the simulator against NumPy formulas of what the PTX ISA says,
and what the engine finds in kernels that use them wrongly.
"""

import functools

import numpy as np
import pytest

from flashgen.errors import SimulationError
from flashgen.schedule.tensormap import TensorMap
from flashgen.simulator.execute import SimulatedGrid
from flashgen.simulator.library import Region
from simulator.kernels import check_of, fault, run, run_all

pytestmark = pytest.mark.usefixtures("compiler")

SWIZZLES = {128: 1, 64: 2, 32: 3}  # in a matrix descriptor


@pytest.fixture
def rng(fresh_seed):
    return np.random.default_rng(fresh_seed)


def aligned(shape, dtype):
    """Zeros at a multiple of 128 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 128, np.uint8)
    first = -memory.ctypes.data % 128
    return memory[first : first + size].view(dtype).reshape(shape)


def swizzled(offsets, period):
    """Where chunks of 16 bytes lie: bits from 7 up change those from 4 up."""
    return offsets ^ ((offsets >> 7 & (period // 16 - 1)) << 4)


def map_of(array, box, swizzle):
    """Of a contiguous array (z, y, x, columns) of fp16, the box as (columns, x, y, z)."""
    strides = tuple(array.strides[::-1][1:])
    return TensorMap("fp16", array.shape[::-1], strides, box, swizzle)


# Tensor copies.

COPY = """
    const shared_address barrier = shared + 8192;
    if (threadIdx.x == 0) {{
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, {bytes});
        tma_load_4d(shared, params.map, barrier, {coordinates});  // HERE
    }}
    __syncthreads();
    {wait}
    for (int i = threadIdx.x; i < {bytes} / 4; i += blockDim.x) {{
        params.out[i] = load_shared_32(shared + 4 * i);  // THERE
    }}
"""


@pytest.mark.parametrize("swizzle", [128, 64, 32])
@pytest.mark.parametrize("corner", [(0, 0, 0, 0), (24, 5, 1, 1), (-8, -3, -1, 0), (0, 20, 0, 0)])
def test_a_tensor_load_swizzles_and_fills_with_zeros(swizzle, corner, rng, fresh_seed):
    source = aligned((2, 3, 11, 40), np.uint16)
    source[...] = rng.integers(1, 1 << 16, source.shape)
    columns, rows = swizzle // 2, (8, 2, 1)
    box = (columns, *rows)
    count = columns * 16
    out = np.zeros(count // 2, np.uint32)
    body = COPY.format(
        bytes=2 * count, coordinates=", ".join(map(str, corner)), wait="mbarrier_wait(barrier, 0);"
    )
    maps = {"map": (map_of(source, box, swizzle), source)}
    options = {"header": "sm90", "maps": maps, "block": 64, "shared_bytes": 8200, "seed": fresh_seed}
    report = run(body, {"source": source}, {"out": out}, **options)
    # Around the tensor lie zeros.
    places = [at + np.arange(size) for at, size in zip(corner[::-1], box[::-1], strict=True)]
    inside = [(at >= 0) & (at < extent) for at, extent in zip(places, source.shape, strict=True)]
    nearest = [np.clip(at, 0, extent - 1) for at, extent in zip(places, source.shape, strict=True)]
    cut = np.where(functools.reduce(np.multiply.outer, inside), source[np.ix_(*nearest)], 0)
    chunks = cut.reshape(-1, 8)
    places = swizzled(16 * np.arange(len(chunks)), swizzle) // 16
    np.testing.assert_array_equal(out.view(np.uint16).reshape(-1, 8)[places], chunks)
    assert report.counters["tensor_loads"] == 1
    assert report.counters["global_bytes_read"] == 2 * np.count_nonzero(cut)


@pytest.mark.parametrize("wait", ["", "if (threadIdx.x == 0) mbarrier_wait(barrier, 0);"])
def test_bytes_of_a_load_are_there_for_who_waits_for_their_phase(wait):
    source = aligned((1, 1, 16, 64), np.uint16)
    body = COPY.format(bytes=2048, coordinates="0, 0, 0, 0", wait=wait)
    maps = {"map": (map_of(source, (64, 16, 1, 1), 128), source)}
    for seed in range(8):
        out = {"out": np.zeros(512, np.uint32)}
        options = {"header": "sm90", "maps": maps, "block": 64, "shared_bytes": 8200, "seed": seed}
        assert fault(body, {"source": source}, out, **options).check in ("race", "copy in flight")


STORE = """
    for (int i = threadIdx.x; i < 512; i += 128) store_shared_32(shared + 4 * i, params.values[i]);
    {fence}
    {barrier}
    if (threadIdx.x == 0) {{
        tma_store_4d(params.map, shared, {coordinates});
        tma_store_commit();
        {wait}
        {after}
    }}
"""
STORE_PARTS = {
    "coordinates": "8, 3, 0, 0",
    "fence": "fence_proxy_async();",
    "barrier": "__syncthreads();",
    "wait": "tma_store_wait_read<0>();",
    "after": "store_shared_32(shared, 0);",
}


def stored(seed=0, **parts):
    """A box of 64 x 16 written to columns 8 and rows 3 up of 40 x 11: its values, and the whole."""
    out, values = aligned((1, 1, 11, 40), np.uint16), np.arange(1024, dtype=np.uint16) + 1
    maps = {"map": (map_of(out, (64, 16, 1, 1), 128), out)}
    body = STORE.format(**STORE_PARTS | parts)
    options = {"header": "sm90", "maps": maps, "block": 128, "seed": seed}
    run(body, {"values": values.view(np.uint32)}, {"out": out}, **options)
    return values, out


def test_a_tensor_store_writes_what_lies_in_the_tensor(fresh_seed):
    values, out = stored(fresh_seed)
    places = swizzled(16 * np.arange(128), 128) // 16
    box = values.reshape(-1, 8)[places].reshape(16, 64)
    expected = np.zeros((11, 40), np.uint16)
    expected[3:, 8:] = box[:8, :32]
    np.testing.assert_array_equal(out[0, 0], expected)


@pytest.mark.parametrize(
    ("parts", "checks"),
    [
        ({"fence": ""}, ("proxy",)),
        ({"barrier": ""}, ("race", "uninitialised shared memory")),
        ({"fence": "", "barrier": "__syncthreads();"}, ("proxy",)),
        ({"wait": ""}, ("copy in flight",)),
        ({"wait": "tma_store_wait_read<1>();"}, ("copy in flight",)),
        ({"wait": "", "after": ""}, ("copy in flight",)),
    ],
    ids=str,
)
def test_a_tensor_store_reads_in_the_async_proxy_until_it_is_waited_for(parts, checks):
    for seed in range(4):
        assert check_of(stored, seed, **parts) in checks


@pytest.mark.parametrize("coordinates", ["-8, 3, 0, 0", "8, -1, 0, 0", "8, -16, 0, 0", "0, 0, 0, -1"])
def test_a_tensor_store_that_begins_ahead_of_the_tensor_is_illegal(coordinates):
    assert check_of(stored, coordinates=coordinates) == "operand"


# Matrices that a warp stores.


def test_stmatrix(rng, fresh_seed):
    """Lane l gives the place of row l % 8 of matrix l // 8, and holds two columns of row l // 4 of each."""
    fragment = rng.integers(0, 1 << 16, (32, 4, 2), np.uint16)
    rows = rng.permutation(64)[:32].astype(np.int32)
    out = np.zeros((64, 4), np.uint32)
    body = """
        for (int i = lane; i < 256; i += 32) store_shared_32(shared + 4 * i, 0);
        __syncwarp();
        uint32_t matrices[4];
        for (int i = 0; i < 4; ++i) matrices[i] = params.fragment[4 * lane + i];
        stmatrix_x4(shared + 16 * params.rows[lane], matrices);
        __syncwarp();
        for (int i = lane; i < 256; i += 32) params.out[i] = load_shared_32(shared + 4 * i);
    """
    inputs = {"fragment": fragment.view(np.uint32).reshape(32, 4), "rows": rows}
    report = run(body, inputs, {"out": out}, header="sm90", seed=fresh_seed)
    expected = np.zeros((64, 8), np.uint16)
    expected[rows] = fragment.reshape(8, 4, 4, 2).transpose(2, 0, 1, 3).reshape(32, 8)
    np.testing.assert_array_equal(out.view(np.uint16), expected)
    assert report.counters["stmatrix"] == 1
    assert report.counters["shared_bytes_written"] == 1024 + 512


@pytest.mark.parametrize(
    ("row", "wavefronts"),
    [("16 * lane", 4), ("64 * lane", 16), ("128 * lane", 32), ("128 * lane + 16 * (lane % 8)", 4)],
)
def test_bank_conflicts_of_stmatrix(row, wavefronts):
    body = f"uint32_t m[4] = {{1, 2, 3, 4}}; stmatrix_x4(shared + {row}, m);"
    report = run(body, header="sm90")
    (access,) = report.accesses
    assert (access.instructions, access.bytes, access.ideal, access.actual) == (1, 512, 4, wavefronts)


# Words in rows and swizzled chunks of the box that lie in the tensor.
WITHIN = "i / 32 < 8 && (i / 4 % 8 ^ i / 32 % 8) < 4"


@pytest.mark.parametrize(
    ("written", "check"), [(WITHIN, None), (f"{WITHIN} && i != 255", "uninitialised shared memory")]
)
def test_a_tensor_store_reads_what_lies_in_the_tensor(written, check, fresh_seed, monkeypatch):
    monkeypatch.setitem(globals(), "STORE", STORE.replace("store_", f"if ({written}) store_", 1))
    assert check_of(stored, fresh_seed) == check


STAGED = """
    uint32_t matrices[4] = {{1, 2, 3, 4}};
    const shared_address row = shared + 512 * warp + 16 * lane;
    stmatrix_x4(row, matrices);
    {fence}
    {barrier}
    if (threadIdx.x == 0) {{
        tma_store_4d(params.map, shared, 0, 0, 0, 0);
        tma_store_commit();
        {wait}
    }}
    {after}
"""
STAGED_PARTS = {
    "fence": "fence_proxy_async();",
    "barrier": "__syncthreads();",
    "wait": "tma_store_wait_read<0>();",
    "after": "__syncthreads(); stmatrix_x4(row, matrices);",
}


@pytest.mark.parametrize(
    ("parts", "checks"),
    [
        ({}, (None,)),
        ({"fence": ""}, ("proxy",)),
        ({"fence": "if (warp == 0) fence_proxy_async();"}, ("proxy",)),
        ({"fence": "", "barrier": "__syncthreads(); fence_proxy_async();"}, (None,)),
        ({"barrier": ""}, ("race", "uninitialised shared memory")),
        ({"wait": ""}, ("copy in flight",)),
        ({"wait": "", "after": ""}, ("copy in flight",)),
        ({"after": "stmatrix_x4(row, matrices);"}, ("race", "copy in flight", "uninitialised shared memory")),
    ],
    ids=str,
)
def test_stmatrix_writes_in_the_generic_proxy(parts, checks):
    """Ahead of a tensor store of what it wrote, and over its source."""
    for seed in range(4):
        out = aligned((1, 1, 16, 64), np.uint16)
        maps = {"map": (map_of(out, (64, 16, 1, 1), 128), out)}
        body = STAGED.format(**STAGED_PARTS | parts)
        options = {"header": "sm90", "maps": maps, "block": 128, "seed": seed}
        assert check_of(run, body, {}, {"out": out}, **options) in checks


def test_two_lanes_that_store_a_row_at_one_place_race():
    body = "uint32_t m[4] = {1, 2, 3, 4}; stmatrix_x4(shared + 16 * (lane % 31), m);  // HERE"
    assert fault(body, header="sm90").check == "race"


def test_stmatrix_wants_registers_that_are_set_and_the_whole_warp():
    body = "uint32_t m[4]; stmatrix_x4(shared + 16 * lane, m);  // HERE"
    assert fault(body, header="sm90").check == "uninitialised register"
    body = "uint32_t m[4] = {1, 2, 3, 4}; if (lane > 0) stmatrix_x4(shared + 16 * lane, m);"
    assert fault(body, header="sm90").check == "divergence"


# Matrix products of a warpgroup.

PRODUCT = """
    for (int i = threadIdx.x; i < {words}; i += 128) store_shared_32(shared + 4 * i, params.memory[i]);
    fence_proxy_async();
    __syncthreads();
    float d[{columns} / 2];
    for (int i = 0; i < {columns} / 2; ++i) d[i] = params.c[{columns} / 2 * threadIdx.x + i];
    const uint64_t strides = uint64_t({stride} >> 4) << 32 | uint64_t({leading} >> 4) << 16;
    const uint64_t fields = strides | uint64_t({swizzle}) << 62;
    const uint64_t a_at = shared >> 4 | fields, b_at = (shared + {b_offset}) >> 4 | fields;
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) a[i] = params.a[4 * threadIdx.x + i];
    wgmma_fence();
    {call};
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(d);
    for (int i = 0; i < {columns} / 2; ++i) params.out[{columns} / 2 * threadIdx.x + i] = d[i];
"""
THREADS = np.arange(128)


def accumulator_places(columns):
    """(row, column) of each register of each thread."""
    group, pair = THREADS % 32 // 4, THREADS % 4
    register = np.arange(columns // 2)
    rows = 16 * (THREADS // 32)[:, None] + group[:, None] + 8 * (register % 4 // 2)
    return rows, 8 * (register // 4) + 2 * pair[:, None] + register % 2


def multiplied(a, b, c, call, memory, element="fp16", **layout):
    columns = b.shape[1]
    rows, places = accumulator_places(columns)
    group, pair = THREADS % 32 // 4 + 16 * (THREADS // 32), 2 * (THREADS % 4)
    fragment = np.stack(
        [a[group + 8 * (i % 2), pair + 8 * (i // 2) + e] for i in range(4) for e in (0, 1)], 1
    )
    out = np.zeros((128, columns // 2), np.float32)
    body = PRODUCT.format(columns=columns, call=call, words=memory.size // 2, **layout)
    inputs = {
        "memory": memory.view(np.uint32),
        "a": np.ascontiguousarray(fragment).view(np.uint32),
        "c": np.ascontiguousarray(c[rows, places]),
    }
    report = run(body, inputs, {"out": out}, header="sm90", block=128, shared_bytes=2 * memory.size)
    assert report.mma == 1
    d = np.zeros((64, columns), np.float32)
    d[rows, places] = out
    return d


def integers(rng, *shape):
    """Small ones, whose products and sums are exact in every format."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def bits(values, element):
    return (
        values.astype(np.float16).view(np.uint16)
        if element == "fp16"
        else (values.view(np.uint32) >> 16).astype(np.uint16)
    )


@pytest.mark.parametrize("element", ["fp16", "bf16"])
@pytest.mark.parametrize("columns", [64, 80, 256])
@pytest.mark.parametrize("swizzle", [128, 64, 32, 0])
@pytest.mark.parametrize("accumulate", [0, 1])
def test_products_of_operands_in_rows(element, columns, swizzle, accumulate, rng):
    """Both operands with the summed dimension contiguous: a row of 16 within rows as wide as the swizzle."""
    a, b, c = integers(rng, 64, 16), integers(rng, 16, columns), integers(rng, 64, columns)
    a_bits, b_bits = bits(a, element), bits(np.ascontiguousarray(b.T), element)
    b_offset = 64 * max(swizzle, 32)
    memory = np.zeros((b_offset + columns * max(swizzle, 32)) // 2, np.uint16)
    for operand, start in ((a_bits, 0), (b_bits, b_offset)):
        row, half = np.divmod(np.arange(2 * len(operand)), 2)
        if swizzle:
            at = swizzled(start + row * swizzle + 16 * half, swizzle)
        else:  # core matrices of 8 rows and 16 bytes: the halves 128 bytes apart, groups of rows 256
            at = start + row % 8 * 16 + row // 8 * 256 + half * 128
        memory.reshape(-1, 8)[at // 16] = operand.reshape(-1, 8)
    call = f"wgmma_m64n{columns}k16_{element}_ss(d, a_at, b_at, {accumulate})"
    layout = {
        "stride": 8 * swizzle or 256,
        "leading": 128,
        "swizzle": SWIZZLES.get(swizzle, 0),
        "b_offset": b_offset,
    }
    d = multiplied(a_bits, b, c, call, memory, **layout)
    np.testing.assert_array_equal(d, a @ b + accumulate * c)


@pytest.mark.parametrize("element", ["fp16", "bf16"])
@pytest.mark.parametrize(("columns", "swizzle"), [(64, 128), (256, 128), (192, 64), (96, 64), (64, 32)])
def test_products_of_registers_with_an_operand_in_columns(element, columns, swizzle, rng):
    """B with its columns contiguous: panels as wide as the swizzle one after another, 16 rows each. The last
    may be wider than what is left of B.
    """
    a, b, c = integers(rng, 64, 16), integers(rng, 16, columns), integers(rng, 64, columns)
    b_bits = bits(b, element)
    memory = np.zeros(16 * -(-columns // (swizzle // 2)) * (swizzle // 2), np.uint16)
    k, chunk = np.divmod(np.arange(16 * columns // 8), columns // 8)
    panel, within = np.divmod(chunk, swizzle // 16)
    at = swizzled(panel * 16 * swizzle + k * swizzle + 16 * within, swizzle)
    memory.reshape(-1, 8)[at // 16] = b_bits.reshape(-1, 8)
    layout = {"stride": 8 * swizzle, "leading": 16 * swizzle, "swizzle": SWIZZLES[swizzle], "b_offset": 0}
    call = f"wgmma_m64n{columns}k16_{element}_rs(d, a, b_at, 1)"
    d = multiplied(bits(a, element), b, c, call, memory, **layout)
    np.testing.assert_array_equal(d, a @ b + c)


@pytest.mark.parametrize("element", ["fp16", "bf16"])
@pytest.mark.parametrize(("columns", "swizzle"), [(64, 128), (32, 64), (128, 128), (96, 32)])
def test_products_of_two_operands_in_columns(element, columns, swizzle, rng):
    """A with its rows contiguous, B with its columns, each in panels as in the test above."""
    a, b, c = integers(rng, 64, 16), integers(rng, 16, columns), integers(rng, 64, columns)
    a_bits = bits(np.ascontiguousarray(a.T), element)
    panels = 64 // (swizzle // 2), -(-columns // (swizzle // 2))
    b_offset = panels[0] * 16 * swizzle
    memory = np.zeros(sum(panels) * 16 * swizzle // 2, np.uint16)
    for operand, start in ((a_bits, 0), (bits(b, element), b_offset)):
        chunks = operand.shape[1] // 8
        k, chunk = np.divmod(np.arange(16 * chunks), chunks)
        panel, within = np.divmod(chunk, swizzle // 16)
        at = swizzled(start + panel * 16 * swizzle + k * swizzle + 16 * within, swizzle)
        memory.reshape(-1, 8)[at // 16] = operand.reshape(-1, 8)
    layout = {"stride": 8 * swizzle, "leading": 16 * swizzle, "swizzle": SWIZZLES[swizzle]}
    call = f"wgmma_m64n{columns}k16_{element}_ss_mn(d, a_at, b_at, 1)"
    d = multiplied(bits(a, element), b, c, call, memory, b_offset=b_offset, **layout)
    np.testing.assert_array_equal(d, a @ b + c)


BULK = """
    const shared_address barrier = shared + 1024;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 128);
        bulk_load(shared + 16, params.source, barrier, 128);
    }
    __syncwarp();
    mbarrier_wait(barrier, 0);
    params.out[lane] = load_shared_32(shared + 16 + 4 * lane);
"""


def test_bulk_copies_bring_bytes(rng, fresh_seed):
    source, out = aligned((32,), np.uint32), np.zeros(32, np.uint32)
    source[...] = rng.integers(0, 2**32, 32, np.uint32)
    options = {"header": "sm90", "block": 32, "shared_bytes": 1032, "seed": fresh_seed}
    run(BULK, {"source": source}, {"out": out}, **options)
    np.testing.assert_array_equal(out, source)


# mbarriers.

RING = """
    const shared_address full = shared + 1024, empty = full + 8;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 32);
        mbarrier_init(empty, 64);
    }
    __syncthreads();
    for (int turn = 0; turn < 5; ++turn) {
        if (warp == 0) {
            mbarrier_wait(empty, turn % 2 ^ 1);
            store_shared_32(shared + 4 * lane, 100 * turn + lane);
            mbarrier_arrive(full);
        } else {
            mbarrier_wait(full, turn % 2);
            params.out[160 * (warp - 1) + 32 * turn + lane] = load_shared_32(shared + 4 * (31 - lane));
            mbarrier_arrive(empty);
        }
    }
"""


def test_an_mbarrier_hands_memory_over_and_back(fresh_seed):
    for seed in range(fresh_seed, fresh_seed + 5):
        out = np.zeros((2, 5, 32), np.uint32)
        run(RING, {}, {"out": out}, header="sm90", block=96, seed=seed)
        expected = 100 * np.arange(5)[:, None] + np.arange(32)[::-1]
        np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


@pytest.mark.parametrize(
    ("old", "new", "checks"),
    [
        ("            mbarrier_wait(empty, turn % 2 ^ 1);\n", "",
         ("race", "mbarrier", "deadlock", "uninitialised shared memory")),
        ("mbarrier_init(full, 32)", "mbarrier_init(full, 31)",
         ("race", "deadlock", "uninitialised shared memory")),
        ("mbarrier_init(empty, 64)", "mbarrier_init(empty, 65)", ("deadlock",)),
        ("mbarrier_init(full, 32)", "mbarrier_init(full, 0)", ("mbarrier",)),
        ("mbarrier_wait(full, turn % 2)", "mbarrier_wait(full, turn)", ("operand",)),
        ("        mbarrier_init(empty, 64);\n", "", ("mbarrier",)),
        ("        mbarrier_init(empty, 64);\n", "        mbarrier_init(full, 64);\n", ("mbarrier",)),
        ("full + 8;", "full + 4;", ("alignment",)),
        ("store_shared_32(shared + 4 * lane", "store_shared_32(shared + 900 + 4 * lane", ("mbarrier",)),
    ],
)  # fmt: skip
def test_mbarriers_used_wrongly(old, new, checks, fresh_seed):
    assert RING.count(old) == 1
    options = {"header": "sm90", "block": 96, "seed": fresh_seed}
    outputs = {"out": np.zeros(320, np.uint32)}
    assert check_of(run, RING.replace(old, new), {}, outputs, **options) in checks


def test_a_deadlock_names_barriers_phases_counts_and_who_waits():
    body = """
        if (threadIdx.x == 0) mbarrier_init(shared, 3);
        __syncthreads();
        if (threadIdx.x < 2) mbarrier_arrive(shared);
        if (warp == 1) mbarrier_wait(shared, 0);  // HERE
    """
    error = fault(body, header="sm90", block=64)
    assert error.check == "deadlock"
    assert "phase 0 with 2 of 3 arrivals" in str(error)
    assert "32 of the threads 32 to 63 wait for parity 0" in str(error)


# Clusters. Each block of one sends two words a thread, and four of its first warp, to the next block.

SEND = """
    const shared_address barrier = shared + 4088;
    const int rank = block_index() % {cluster};
    const int next = (rank + 1) % {cluster};
    const float word = 1000 * block_index() + threadIdx.x;
    if (threadIdx.x == 0) {{
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }}
    cluster_arrive_relaxed();
    cluster_wait();
    store_async_64(map_shared(shared + 8 * threadIdx.x, next), word, -word, map_shared(barrier, next));
    if (warp == 0) {{
        const float words[4] = {{word, word + 0.25f, word + 0.5f, word + 0.75f}};
        store_async_128(map_shared(shared + 2048 + 16 * lane, next), words, map_shared(barrier, next));
    }}
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, 8 * blockDim.x + 512);
    mbarrier_wait_cluster(barrier, 0);
    const float2 two = load_shared_64(shared + 8 * threadIdx.x);
    const uint4 four = load_shared_128(shared + 2048 + 16 * lane);
    params.out[block_index() * blockDim.x + threadIdx.x] = two.x - two.y + __uint_as_float(four.w);
"""


@pytest.mark.parametrize(("cluster", "block"), [(2, 32), (2, 1024), (4, 96), (8, 64), (16, 128)])
def test_blocks_of_a_cluster_send_each_other_registers(cluster, block, fresh_seed):
    """Their bytes may come before they are announced."""
    out = np.zeros((2, cluster, block), np.float32)
    body = SEND.format(cluster=cluster).replace("2048", "8192").replace("4088", "8704")
    options = {"header": "sm90_mma", "block": block, "grid": (2 * cluster, 1, 1), "cluster": cluster}
    run(body, {}, {"out": out}, shared_bytes=8712, seed=fresh_seed, **options)
    sender = np.roll(np.arange(2 * cluster).reshape(2, cluster), 1, axis=1)[..., None] * 1000
    threads = np.arange(block)
    np.testing.assert_array_equal(out, 2 * (sender + threads) + sender + threads % 32 + 0.75)


@pytest.mark.parametrize(
    ("old", "new", "checks"),
    [
        ("    cluster_wait();\n", "", ("race", "mbarrier")),
        ("        fence_mbarrier_init();\n", "", ("race", "proxy")),
        ("8 * threadIdx.x, next), word", "8 * threadIdx.x + 4, next), word", ("alignment",)),
        ("16 * lane, next), words", "16 * lane + 8, next), words", ("alignment",)),
        ("8 * threadIdx.x, next), word", "4096 + 8 * threadIdx.x, next), word", ("shared bounds",)),
        ("8 * threadIdx.x, next), word", "8 * lane, next), word", ("copy in flight", "race")),
        ("word, -word, map_shared(barrier, next)", "word, -word, map_shared(barrier, rank)", ("operand",)),
        ("word, -word, map_shared(barrier, next)", "word, -word, map_shared(shared + 64, next)",
         ("mbarrier",)),
        ("map_shared(barrier, next));\n    if", "map_shared(barrier, {cluster}));\n    if", ("operand",)),
        # The phase ends before the last word: it is on its way, or has come; or 16 bytes step over the end.
        ("blockDim.x + 512", "blockDim.x + 504", ("copy in flight", "race", "deadlock")),
        ("blockDim.x + 512", "blockDim.x + 520", ("deadlock",)),
        ("wait_cluster(barrier", "wait(barrier", ("race",)),
        ("    mbarrier_wait_cluster(barrier, 0);\n", "",
         ("copy in flight", "uninitialised shared memory", "race")),
        ("    mbarrier_wait_cluster(barrier, 0);\n", "    if (rank == 0) return;\n",
         ("copy in flight", "uninitialised shared memory")),
    ],
)  # fmt: skip
def test_sending_registers_wrongly(old, new, checks, fresh_seed):
    assert SEND.count(old) == 1
    body = SEND.replace(old, new).format(cluster=4)
    options = {"header": "sm90_mma", "block": 64, "grid": (4, 1, 1), "cluster": 4, "seed": fresh_seed}
    assert check_of(run, body, {}, {"out": np.zeros(256, np.float32)}, **options) in checks


@pytest.mark.parametrize(
    ("cluster", "block", "text"),
    [(17, 32, "17 blocks; they have at most 16"), (2, 48, "whole warps"), (4, 544, "at most 64 warps")],
)
def test_clusters_that_cannot_be_launched(cluster, block, text):
    with pytest.raises(SimulationError, match=text) as caught:
        run("", header="sm90", block=block, grid=(cluster, 1, 1), cluster=cluster)
    assert caught.value.check == "launch"


def test_a_warpgroup_is_within_a_block(fresh_seed):
    """Warps of two blocks are none, though four of them follow each other."""
    options = {"header": "sm90", "block": 64, "grid": (2, 1, 1), "cluster": 2, "seed": fresh_seed}
    assert "block of 64 threads" in str(fault("wgmma_fence();  // HERE", **options))
    run("if (block_index() == 1) setmaxnreg_dec<24>();", **options)
    options["block"] = 160
    run("if (warp < 4) wgmma_commit();", **options)
    assert "last 32" in str(fault("wgmma_commit();  // HERE", **options))


# Barriers of the block, and registers.


def test_a_barrier_that_is_announced_and_one_that_asks(fresh_seed):
    body = """
        if (warp == 0) {
            store_shared_32(shared + 4 * lane, lane);
            barrier_arrive(3, 64);
        } else if (warp == 1) {
            barrier_sync(3, 64);
            params.out[lane] = load_shared_32(shared + 4 * (31 - lane));
        }
        const bool any = barrier_red_or(5, 96, threadIdx.x == 70);
        const bool none = barrier_red_or(6, 96, false);
        params.found[threadIdx.x] = 2 * none + any;
    """
    out, found = np.zeros(32, np.uint32), np.zeros(96, np.uint32)
    run(body, {}, {"out": out, "found": found}, header="sm90", block=96, seed=fresh_seed)
    np.testing.assert_array_equal(out, np.arange(32)[::-1])
    assert (found == 1).all()


def test_one_lane_of_a_whole_warp_is_elected(fresh_seed):
    found = np.zeros(64, np.uint32)
    run(
        "params.found[threadIdx.x] = elect_one();",
        {},
        {"found": found},
        header="sm90",
        block=64,
        seed=fresh_seed,
    )
    assert (found.reshape(2, 32).sum(axis=1) == 1).all()
    body = "lane < 9 ? (void)__any_sync(0xffffffff, lane) : (void)elect_one();  // HERE"
    assert fault(body, header="sm90", seed=fresh_seed).check == "divergence"


def test_an_election_does_not_order_the_lanes(fresh_seed):
    body = """
        store_shared_32(shared + 4 * threadIdx.x, lane);  // HERE
        {between}
        if (elect_one()) load_shared_32(shared + 4 * (32 * warp + (lane + 20) % 32));  // THERE
    """
    run(body.format(between="__syncwarp();"), {}, {}, header="sm90", block=64, seed=fresh_seed)
    assert fault(body.format(between=""), header="sm90", block=64, seed=fresh_seed).check == "race"


@pytest.mark.parametrize(
    ("body", "check"),
    [
        ("if (warp < 4) setmaxnreg_dec<24>(); else setmaxnreg_inc<240>();", None),
        ("if (warp < 4) setmaxnreg_dec<24>(); else setmaxnreg_inc<248>();", "deadlock"),
        ("if (warp < 4) setmaxnreg_inc<240>();", "deadlock"),
        ("if (warp < 3) setmaxnreg_dec<24>();", "register pool"),
        ("if (warp < 2) setmaxnreg_dec<24>(); else if (warp < 4) setmaxnreg_dec<32>();", "register pool"),
        ("setmaxnreg_dec<176>();", "register pool"),
        ("setmaxnreg_inc<30>();", "register pool"),
        ("if (lane > 0) setmaxnreg_dec<24>();", "divergence"),
    ],
)
def test_registers_are_handed_over_within_the_block(body, check, fresh_seed):
    options = {"header": "sm90", "block": 384, "bounds": 384, "seed": fresh_seed}
    assert check_of(run, body, **options) == check


@pytest.mark.parametrize(("count", "check"), [(216, None), (224, "deadlock")])
def test_blocks_of_a_multiprocessor_share_its_registers(count, check, fresh_seed):
    """Two of them have 128 a thread of 256 threads at the launch."""
    body = f"if (warp < 4) setmaxnreg_dec<40>(); else setmaxnreg_inc<{count}>();"
    options = {"header": "sm90", "block": 256, "bounds": "256, 2", "seed": fresh_seed}
    assert check_of(run, body, **options) == check


# Dependent launches.

WAIT = "griddepcontrol_wait();"
ACCESSES = {
    "load": "store_shared_32(shared, load_global_32(params.values));",
    "store": "store_global_32(params.out, 1.0f);",
    "tensor load": "tma_load_4d(shared, params.source, barrier, 0, 0, 0, 0); mbarrier_wait(barrier, 0);",
    "tensor store": "tma_store_4d(params.target, shared, 0, 0, 0, 0); TMA_DONE",
}
DEPENDENT = """
    const shared_address barrier = shared + 8192;
    if (threadIdx.x == 0) {{
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 2048);
    }}
    for (int i = threadIdx.x; i < 512; i += 64) store_shared_32(shared + 4 * i, 0);
    fence_proxy_async();
    __syncthreads();
    {body}
"""


def dependently(body, dependent=True, followed=False, seed=0, blocks=1, launch=run_all):
    """Launch ``body`` in two warps a block; ``source`` and ``target`` are boxes of ``values`` and ``out``."""
    values, out = aligned((1, 1, 16, 64), np.uint16), aligned((1, 1, 16, 64), np.float32)
    whole = (64, 16, 1, 1)
    maps = {"source": (map_of(values, whole, 128), values)}
    maps["target"] = (map_of(out.view(np.uint16), whole, 128), out)
    body = DEPENDENT.format(body=body.replace("TMA_DONE", "tma_store_commit(); tma_store_wait_read<0>();"))
    options = {"header": "sm90", "maps": maps, "block": 64, "shared_bytes": 8200, "seed": seed}
    options |= {"dependent": dependent, "followed": followed, "grid": (blocks, 1, 1), "launch": launch}
    run(body, {"values": values}, {"out": out}, **options)
    return out.reshape(-1)


@pytest.mark.parametrize("access", ACCESSES)
def test_a_dependent_launch_touches_global_memory_after_its_wait(access, fresh_seed):
    touch = f"if (threadIdx.x == 0) {{ {ACCESSES[access]} }}"
    dependently(WAIT + touch, seed=fresh_seed)
    dependently(touch, dependent=False, seed=fresh_seed)
    # The wait of another thread is none, barrier or not.
    for body in (touch, touch + WAIT, f"if (warp == 1) {WAIT} __syncthreads(); {touch}"):
        with pytest.raises(SimulationError, match=r"before griddepcontrol\.wait") as caught:
            dependently(body, seed=fresh_seed)
        assert (caught.value.check, caught.value.thread) == ("dependency", 0)


def test_a_dependent_launch_does_not_end_before_those_ahead_of_it(fresh_seed):
    """Even where it touches nothing. One thread of a block is enough."""
    idle = "prefetch_tensormap(params.source);"
    dependently(idle, dependent=False, seed=fresh_seed)
    dependently(f"{idle} if (threadIdx.x == 40) {WAIT}", seed=fresh_seed)
    with pytest.raises(SimulationError, match="none of its threads has waited") as caught:
        dependently(idle, seed=fresh_seed)
    assert caught.value.check == "dependency"


def test_the_next_step_begins_behind_the_wait(fresh_seed):
    """It counts on all those ahead of this one to have ended. The first step of the next call does not."""
    begin = "griddepcontrol_launch_dependents();"
    dependently(begin, dependent=False, followed=True, seed=fresh_seed)
    dependently(WAIT + begin, followed=True, seed=fresh_seed)
    dependently(begin + WAIT, seed=fresh_seed)
    with pytest.raises(SimulationError, match=r"launch_dependents before griddepcontrol\.wait") as caught:
        dependently(begin + WAIT, followed=True, seed=fresh_seed)
    assert caught.value.check == "dependency"


ACQUIRE = "load_acquire_32(params.values + 2);"
LAST_WAITS = f"if (blockIdx.x == 1) {WAIT}"


@pytest.mark.parametrize("access", ACCESSES)
def test_an_acquire_is_a_wait_for_who_comes_behind_it(access, fresh_seed):
    """Of another thread, too, if a barrier is between."""
    touch = f"if (threadIdx.x == 0) {{ {ACCESSES[access]} }}"
    others = f"if (threadIdx.x == 40) {ACQUIRE}"
    for body in (f"{ACQUIRE} {touch}", f"{others} __syncthreads(); {touch}"):
        dependently(LAST_WAITS + body, seed=fresh_seed, blocks=2)
    late = f"{touch} {ACQUIRE}"
    unordered = f"{others} {touch}"
    behind = f"__syncthreads(); {others} {touch}"
    shuffled = f"if (threadIdx.x == 1) {ACQUIRE} __shfl_sync(0xffffffff, lane, 1); {touch}"
    # Where threads wait, each does.
    waited = f"if (threadIdx.x == 40) {{ {WAIT} {ACQUIRE} }} __syncthreads(); {touch}"
    for body in (late, unordered, behind, shuffled, waited):
        with pytest.raises(SimulationError, match=r"before griddepcontrol\.wait") as caught:
            dependently(LAST_WAITS + body, seed=fresh_seed, blocks=2)
        assert (caught.value.check, caught.value.block, caught.value.thread) == ("dependency", 0, 0)


@pytest.mark.parametrize("access", ACCESSES)
def test_where_threads_of_a_block_wait_each_has_to(access, fresh_seed):
    """Be it behind what it does, or none if it does nothing."""
    touch, some_wait = f"if (threadIdx.x == 0) {{ {ACCESSES[access]} }}", f"if (threadIdx.x == 40) {WAIT}"
    others = f"if (threadIdx.x == 40) {ACQUIRE} __syncthreads();"
    for body in (f"{ACQUIRE} {touch} {WAIT}", f"{others} {touch} if (threadIdx.x % 40 == 0) {WAIT}"):
        dependently(body, seed=fresh_seed)
    acquires = f"if (threadIdx.x == 0) {{ {ACQUIRE} }}"
    for body in (acquires + some_wait, some_wait + acquires + touch, others + touch + some_wait):
        with pytest.raises(SimulationError, match=r"ends without griddepcontrol\.wait") as caught:
            dependently(body, seed=fresh_seed)
        assert (caught.value.check, caught.value.thread) == ("dependency", 0)
        assert caught.value.line


def test_a_relaxed_load_behind_an_acquire_finds_what_there_is(fresh_seed):
    acquired = f"{ACQUIRE} const uint32_t loaded = load_relaxed_32(params.values);"
    body = f"{acquired} store_global_32(params.out + threadIdx.x, float(loaded)); {WAIT}"
    assert not any(dependently(body, seed=seed).any() for seed in range(fresh_seed, fresh_seed + 16))


def test_one_block_of_a_dependent_launch_waits(fresh_seed):
    """Where a step follows, it lets that begin behind its wait. All others may begin it behind an acquire."""
    begin = "griddepcontrol_launch_dependents();"
    dependently(f"{ACQUIRE} {begin} {LAST_WAITS}", seed=fresh_seed, blocks=2)
    dependently(f"{ACQUIRE} {LAST_WAITS} {begin}", followed=True, seed=fresh_seed, blocks=2)
    one_ahead = f"if (threadIdx.x == 40) {begin} {LAST_WAITS} if (threadIdx.x != 40) {begin}"
    for body, followed in (("", False), (begin, True), (f"{begin} {LAST_WAITS}", True), (one_ahead, True)):
        with pytest.raises(SimulationError, match="no block of a dependent launch has waited") as caught:
            dependently(ACQUIRE + body, followed=followed, seed=fresh_seed, blocks=2)
        assert caught.value.check == "dependency"
    with pytest.raises(SimulationError, match=r"launch_dependents before griddepcontrol\.wait") as caught:
        dependently(f"{LAST_WAITS} {begin} {ACQUIRE}", followed=True, seed=fresh_seed, blocks=2)
    assert caught.value.check == "dependency"


def runs_early(body, seed):
    """Whether a block runs to its end, and is not given up, while grids ahead of it have not ended."""
    found = []

    def launch(*args, threads, **options):
        for region in args[-1]:
            region.access |= Region.INITIALISED
        found.append(SimulatedGrid(*args, **options).runs_early(0))

    dependently(body, seed=seed, launch=launch)
    return found[0]


def test_a_block_that_waits_is_given_up_where_grids_overlap(fresh_seed):
    """So is one that finds the same in a word again and again."""
    assert runs_early(ACQUIRE + ACCESSES["store"], fresh_seed)
    for load in ("load_acquire_32", "load_relaxed_32"):
        loads = f"if (threadIdx.x == 40) for (int i = 0; i < COUNT; ++i) {load}(params.values + 4);"
        assert runs_early(ACQUIRE + loads.replace("COUNT", "8"), fresh_seed)
        assert not runs_early(ACQUIRE + loads.replace("COUNT", "9"), fresh_seed)
    for body in (WAIT, f"if (threadIdx.x == 40) {WAIT}", ACQUIRE + ACCESSES["load"] + WAIT):
        assert not runs_early(body, fresh_seed)


WRITES = {
    "store": ACCESSES["store"],
    "tensor store": ACCESSES["tensor store"],
    "red": "red_add(params.out, 1.0f);",
    "store that releases": "store_release_32(params.out, 1);",
    "red that releases": "add_release_32(params.out, 1);",
}


@pytest.mark.parametrize("write", WRITES)
def test_a_block_that_has_written_cannot_be_given_up(write, fresh_seed):
    written = f"{ACQUIRE} if (threadIdx.x == 0) {{ {WRITES[write]} }}"
    assert runs_early(written, fresh_seed)
    for wait in (WAIT, "while (load_acquire_32(params.values + 2) == 0) {}"):
        with pytest.raises(SimulationError, match="cannot be run again") as caught:
            runs_early(f"{written} __syncthreads();\n{wait}", fresh_seed)
        assert (caught.value.check, caught.value.other_thread) == ("dependency", 0)
        assert caught.value.line == caught.value.other_line + 1


def test_a_relaxed_load_may_find_old_values_ahead_of_the_wait(fresh_seed):
    """In some warps. Behind it, and in a launch that is not dependent, it finds what there is: zeros."""
    load = "store_global_32(params.out + threadIdx.x, float(loaded));"
    early = f"const uint32_t loaded = load_relaxed_32(params.values); {WAIT} {load}"
    late = f"{WAIT} const uint32_t loaded = load_relaxed_32(params.values); {load}"
    seeds = range(fresh_seed, fresh_seed + 16)
    warps = np.array([dependently(early, seed=seed)[:64].reshape(2, 32).any(axis=1) for seed in seeds])
    assert 0 < warps.sum() < warps.size
    for body, dependent in ((late, True), (early, False)):
        assert not any(dependently(body, dependent, seed=seed).any() for seed in seeds)
