"""append() in host memory against loops over tokens in float64: pairs, tables, strides, pages, rows, packed
tokens, and every other slot of the cache as it was."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen.call.compute import make_plan
from flashgen.call.request import Request
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides, NullPointer
from flashgen.operators.append import APPEND

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
BATCH, COUNT, HEADS, QUERIES = 3, 5, 2, 6
LENGTHS = np.array([0, 11, 35], np.int32)
CAPACITY = 48


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def poisoned(shape, dtype):
    """NaN of one pattern, which no copy would make."""
    x = np.empty(shape, dtype)
    x.view(np.uint8)[...] = 0xFF
    return x


def bits(x):
    return x.view(f"u{x.itemsize}")


def heads_first(x):
    """The same elements, in memory heads ahead of tokens."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def rotated(x, cos, sin, interleaved):
    """One row in float64, pair by pair, and how far a rotation in fp32 may be from it, but for the last
    rounding."""
    x, out, bound = np.asarray(x, float), np.asarray(x, float), np.zeros(len(x))
    out = out.copy()
    for i, (c, s) in enumerate(zip(np.asarray(cos, float), np.asarray(sin, float), strict=True)):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + len(cos))
        out[a], out[b] = c * x[a] - s * x[b], c * x[b] + s * x[a]
        bound[a], bound[b] = abs(c * x[a]) + abs(s * x[b]), abs(c * x[b]) + abs(s * x[a])
    return out, 1.01 * 2.0**-23 * bound


def assert_row(found, x, angles, dtype):
    """That a row is x, rotated by the row of the tables in ``angles``, or copied to the bit."""
    if angles is None:
        np.testing.assert_array_equal(bits(found), bits(x))
        return
    cos, sin, interleaved = angles
    value, bound = rotated(x, cos, sin, interleaved)
    error = np.abs(np.asarray(found, float) - value)
    assert (error <= bound + 1.01 * ROUNDOFF[dtype] * np.abs(value) + 2.0**-25).all(), error.max()
    np.testing.assert_array_equal(bits(found[2 * len(cos) :]), bits(x[2 * len(cos) :]))


def tables(rng, half, dtype, rows=CAPACITY):
    angles = rng.uniform(0, 2 * np.pi, (rows, half))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def garbled(rng, page_size, num_pages):
    """A page table whose entries behind the last token would be out of bounds."""
    table = np.full((BATCH, -(-CAPACITY // page_size)), -(1 << 30), np.int32)
    free = iter(rng.permutation(num_pages))
    for row, length in zip(table, LENGTHS, strict=True):
        needed = -(-(length + COUNT) // page_size)
        row[:needed] = [next(free) for _ in range(needed)]
    return table


@pytest.mark.parametrize("layout", ["tokens", "heads"])
@pytest.mark.parametrize("where", ["rows", "index", 1, 3, 16])
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_lie_where_they_should_and_nothing_else_is_touched(dtype, interleaved, where, layout):
    rng, element = np.random.default_rng(), DTYPES[dtype]
    width, width_v, half = 48, 24, 16
    as_laid = heads_first if layout == "heads" else np.asarray
    paged = isinstance(where, int)
    rows, size = (BATCH * CAPACITY // where + BATCH, where) if paged else (BATCH + 2, CAPACITY)
    k = as_laid(poisoned((rows, size, HEADS, width), element))
    v = as_laid(poisoned((rows, size, HEADS, width_v), element))
    k_new = as_laid(normal(rng, BATCH, COUNT, HEADS, width, dtype=element))
    v_new = as_laid(normal(rng, BATCH, COUNT, HEADS, width_v, dtype=element))
    pages = garbled(rng, where, rows) if paged else None
    index = rng.permutation(rows)[:BATCH].astype(np.int32) if where == "index" else None
    cache = flashgen.KVCache(k, v, LENGTHS.copy(), pages, index)
    rotary, q = None, None
    if interleaved is not None:
        cos, sin = tables(rng, half, element if where == "rows" else np.float32)
        rotary = flashgen.Rotary(cos, sin, interleaved=interleaved)
        q = as_laid(normal(rng, BATCH, QUERIES, 4, width, dtype=element))
    total, q_rotated = flashgen.append(cache, k_new, v_new, rotary=rotary, q=q)

    np.testing.assert_array_equal(total, LENGTHS + COUNT)
    np.testing.assert_array_equal(cache.lengths, LENGTHS)
    assert total.dtype == np.int32
    for b in range(BATCH):
        for i in range(COUNT):
            position = LENGTHS[b] + i
            if paged:
                place = pages[b, position // where], position % where
            else:
                place = b if index is None else index[b], position
            angles = None if rotary is None else (cos[position], sin[position], interleaved)
            for head in range(HEADS):
                assert_row(k[place][head], k_new[b, i, head], angles, dtype)
                assert_row(v[place][head], v_new[b, i, head], None, dtype)
            for x in (k, v):
                x[place] = poisoned(x[place].shape, element)
    assert (bits(k) == bits(poisoned(1, element))).all()
    assert (bits(v) == bits(poisoned(1, element))).all()
    assert (q is None) == (q_rotated is None)
    for b, i, head in np.ndindex(0 if q is None else BATCH, QUERIES, 4):
        position = LENGTHS[b] + i
        assert_row(q_rotated[b, i, head], q[b, i, head], (cos[position], sin[position], interleaved), dtype)


@pytest.mark.parametrize("rotary_dim", [16, 48, 64])
def test_part_of_a_head_or_all_of_it(rotary_dim):
    rng = np.random.default_rng()
    k, v = (poisoned((1, 9, 1, 64), np.float16) for _ in "kv")
    new = normal(rng, 1, 1, 1, 64, dtype=np.float16)
    cos, sin = tables(rng, rotary_dim // 2, np.float16)
    cache = flashgen.KVCache(k, v, np.array([7], np.int32))
    flashgen.append(cache, new, new, rotary=flashgen.Rotary(cos, sin))
    assert_row(k[0, 7, 0], new[0, 0, 0], (cos[7], sin[7], False), "fp16")


def test_queries_at_the_first_position():
    rng = np.random.default_rng()
    k, v = (poisoned((BATCH, CAPACITY, HEADS, 32), np.float32) for _ in "kv")
    new, q = normal(rng, BATCH, COUNT, HEADS, 32), normal(rng, BATCH, QUERIES, 4, 32)
    cos, sin = tables(rng, 8, np.float32)
    rotary = flashgen.Rotary(cos, sin)
    _, found = flashgen.append(
        flashgen.KVCache(k, v, LENGTHS), new, new, rotary=rotary, q=q, q_positions="first"
    )
    for b, i, head in np.ndindex(BATCH, QUERIES, 4):
        assert_row(found[b, i, head], q[b, i, head], (cos[LENGTHS[b]], sin[LENGTHS[b]], False), "fp32")


def test_positions_that_are_given():
    rng = np.random.default_rng()
    k, v = (poisoned((BATCH, CAPACITY, HEADS, 32), np.float32) for _ in "kv")
    new, q = normal(rng, BATCH, COUNT, HEADS, 32), normal(rng, BATCH, COUNT, 4, 32)
    cos, sin = tables(rng, 16, np.float32, rows=4)
    positions = rng.integers(0, 4, (BATCH, COUNT), np.int32)
    rotary = flashgen.Rotary(cos, sin, positions=positions)
    _, found = flashgen.append(flashgen.KVCache(k, v, LENGTHS), new, new, rotary=rotary, q=q)
    for b, i in np.ndindex(BATCH, COUNT):
        angles = cos[positions[b, i]], sin[positions[b, i]], False
        assert_row(k[b, LENGTHS[b] + i, 1], new[b, i, 1], angles, "fp32")
        assert_row(found[b, i, 3], q[b, i, 3], angles, "fp32")


def test_packed_tokens_are_those_of_a_batch():
    rng = np.random.default_rng()
    counts = np.array([3, 0, 4], np.int32)
    boundaries = np.r_[0, np.cumsum(counts)].astype(np.int32)
    k, v, k_alone, v_alone = (poisoned((BATCH, CAPACITY, HEADS, 32), np.float16) for _ in range(4))
    # Two more tokens than the sequences have.
    new, q = normal(rng, 9, HEADS, 32, dtype=np.float16), normal(rng, 9, 4, 32, dtype=np.float16)
    rotary = flashgen.Rotary(*tables(rng, 16, np.float32))
    cache = flashgen.KVCache(k, v, LENGTHS)
    total, found = flashgen.append(cache, new, new, rotary=rotary, q=q, cu_seqlens_new=boundaries)
    np.testing.assert_array_equal(total, LENGTHS + counts)
    assert found.shape == q.shape
    for b in range(BATCH):
        own = slice(boundaries[b], boundaries[b + 1])
        alone = flashgen.KVCache(k_alone[b : b + 1], v_alone[b : b + 1], LENGTHS[b : b + 1])
        _, expected = flashgen.append(alone, new[None, own], new[None, own], rotary=rotary, q=q[None, own])
        np.testing.assert_array_equal(found[own], expected[0])
    np.testing.assert_array_equal(bits(k), bits(k_alone))
    np.testing.assert_array_equal(bits(v), bits(v_alone))


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_keys_and_values_that_share_the_memory_of_pages(axis):
    """As caches of (num_pages, 2, page_size, heads, head_dim), and likewise."""
    rng = np.random.default_rng()
    shape = [6, 16, HEADS, 32]
    shape.insert(axis, 2)
    k, v = np.moveaxis(poisoned(tuple(shape), np.float16), axis, 0)
    pages = np.arange(6, dtype=np.int32).reshape(3, 2)
    new = [normal(rng, 3, COUNT, HEADS, 32, dtype=np.float16) for _ in "kv"]
    lengths = np.array([0, 3, 20], np.int32)
    flashgen.append(flashgen.KVCache(k, v, lengths, pages), *new)
    for x, written in zip((k, v), new, strict=True):
        np.testing.assert_array_equal(x[4:].reshape(32, HEADS, 32)[20 : 20 + COUNT], written[2])
        assert int(np.isnan(x).sum()) == (6 * 16 - 3 * COUNT) * HEADS * 32
    with pytest.raises(BadTensorStrides, match=r"^k overlaps v in memory"):
        flashgen.append(flashgen.KVCache(k, k, lengths, pages), *new)


def test_no_new_tokens():
    k = poisoned((BATCH, 40, HEADS, 16), np.float32)
    none = np.zeros((BATCH, 0, HEADS, 16), np.float32)
    total, q_rotated = flashgen.append(flashgen.KVCache(k, k.copy(), LENGTHS), none, none)
    np.testing.assert_array_equal(total, LENGTHS)
    assert q_rotated is None
    nobody = np.zeros((0, 5, HEADS, 16), np.float32)
    total, _ = flashgen.append(flashgen.KVCache(k, k.copy(), np.zeros(0, np.int32)), nobody, nobody)
    assert total.shape == (0,)


def fitting(**changes):
    """A call that fits, with other arguments in place of its own."""
    rng = np.random.default_rng(1)
    given = {
        "k": np.zeros((BATCH, CAPACITY, HEADS, 32), np.float32),
        "v": np.zeros((BATCH, CAPACITY, HEADS, 32), np.float32),
        "lengths": LENGTHS,
        "pages": None,
        "index": None,
        "new": normal(rng, BATCH, COUNT, HEADS, 32),
        "rows": CAPACITY,
        "positions": None,
    }
    given |= changes
    cache = flashgen.KVCache(*(given[name] for name in ("k", "v", "lengths", "pages", "index")))
    rotary = flashgen.Rotary(*tables(rng, 8, np.float32, given["rows"]), positions=given["positions"])
    return given, lambda: flashgen.append(cache, given["new"], given["new"], rotary=rotary)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lengths": np.array([0, 44, 35], np.int32)}, BadTensorShape, "sequence 1 has 44 tokens and gets 5"),
        ({"lengths": np.array([0, 4, -1], np.int32)}, BadParam, r"lengths\[2\] is -1"),
        (
            {"lengths": np.array([0, 49, 4], np.int32), "new": np.zeros((BATCH, 0, HEADS, 32), np.float32)},
            BadParam,
            r"lengths\[1\] is 49; the cache has room for 48",
        ),
        ({"rows": 38}, BadTensorShape, "sequence 2 has a token of k_new at position 38, and cos has 38 rows"),
        ({"index": np.array([0, 3, 2], np.int32)}, BadParam, r"index\[1\] is 3; expected 0 to 2"),
        (
            {"pages": np.array([[0, -1], [1, 7], [2, 1]], np.int32), "lengths": np.full(3, 46, np.int32)},
            BadParam,
            r"pages\[0, 1\] is -1; expected 0 to 2",
        ),
        (
            {"positions": np.array([[0, 1, 2, 3, 4], [5, 6, -7, 8, 9], [0] * 5], np.int32)},
            BadParam,
            r"positions\[1, 2\] is -7; expected 0 to 47",
        ),
        (
            {"index": np.array([0, 2, 2], np.int32), "lengths": np.array([0, 11, 15], np.int32)},
            BadParam,
            "slot 15 of row 2 of the cache would get a new token of sequence 1 and one of sequence 2; index",
        ),
        (
            {
                "pages": np.array([[0, 1], [2, 0], [1, 0]], np.int32),
                "lengths": np.array([2, 3, 50], np.int32),
            },
            BadParam,
            "slot 2 of page 0 of the cache would get a new token of sequence 0 and one of sequence 2; pages",
        ),
        (
            {
                "pages": np.array([[0, 1], [0, 1], [2, -1]], np.int32),
                "lengths": np.array([20, 30, 3], np.int32),
            },
            BadParam,
            "slot 20 of page 0 of the cache would get a new token of sequence 0, and has a key of sequence 1"
            "; copy a page that two share",
        ),
        (
            {"index": np.array([1, 2, 1], np.int32), "lengths": np.array([30, 0, 20], np.int32)},
            BadParam,
            "slot 20 of row 1 of the cache would get a new token of sequence 2, and has a key of sequence 0",
        ),
        (
            {"pages": np.array([[0, 1], [2, 2], [3, 4]], np.int32), "lengths": np.full(3, 7, np.int32)}
            | {"new": np.zeros((BATCH, 49, HEADS, 32), np.float32), "rows": 2 * CAPACITY}
            | {name: np.zeros((5, CAPACITY, HEADS, 32), np.float32) for name in "kv"},
            BadParam,
            "slot 7 of page 2 of the cache would get a new token of sequence 1 and one of sequence 1; pages",
        ),
        ({"k": None}, NullPointer, "^k is None"),
        ({"new": None}, NullPointer, "k_new is None"),
        ({"lengths": None}, NullPointer, "lengths is None"),
    ],
)
def test_what_has_no_place_is_an_error_and_nothing_is_written(changes, error, words):
    given, call = fitting(**changes)
    with pytest.raises(error, match=words):
        call()
    assert given["k"] is None or not given["k"].any()
    assert not given["v"].any()


def test_boundaries_must_be_boundaries():
    given, _ = fitting()
    cache, packed = flashgen.KVCache(given["k"], given["v"], LENGTHS), given["new"].reshape(-1, HEADS, 32)
    for wrong in ([1, 5, 10, 15], [0, 6, 5, 15], [0, 5, 10, 16]):
        with pytest.raises(BadParam, match="cu_seqlens_new"):
            flashgen.append(cache, packed, packed, cu_seqlens_new=np.array(wrong, np.int32))


def test_rotation_does_not_follow_the_callers_error_state():
    cache = flashgen.KVCache(*(np.zeros((1, 8, 1, 16), np.float16) for _ in range(2)), np.zeros(1, np.int32))
    new, table = np.full((1, 1, 1, 16), 1e-3, np.float16), np.full((8, 8), 1e-3, np.float32)
    with np.errstate(all="raise"):  # products below the least fp16 number
        flashgen.append(cache, new, new, rotary=flashgen.Rotary(table, table))
    assert np.isfinite(cache.k).all()


def test_what_is_no_cache_and_no_rotary():
    given, _ = fitting()
    cache, new = flashgen.KVCache(given["k"], given["v"], LENGTHS), given["new"]
    with pytest.raises(BadParam, match="cache has type tuple"):
        flashgen.append((given["k"], given["v"]), new, new)
    with pytest.raises(BadParam, match="rotary has type tuple"):
        flashgen.append(cache, new, new, rotary=(new, new))
    with pytest.raises(BadParam, match="q was given without rotary"):
        flashgen.append(cache, new, new, q=new)
    given["k"].flags.writeable = False
    with pytest.raises(BadParam, match=r"^k is read-only"):
        flashgen.append(cache, new, new)


def test_a_plan_for_tables_of_one_dtype_takes_no_others():
    given, _ = fitting()
    rng = np.random.default_rng()
    arrays = {"k_new": given["new"], "v_new": given["new"], "lengths": LENGTHS}
    arrays |= {"k_cache": given["k"], "v_cache": given["v"]}
    arrays = {name: x if x.dtype == np.int32 else x.astype(np.float16) for name, x in arrays.items()}
    narrow, wide = ({"cos": c, "sin": s} for c, s in (tables(rng, 8, d) for d in (np.float16, np.float32)))
    plan = make_plan(Request(APPEND, APPEND.in_order(**arrays, **wide), (False, "each", None, None)))
    total = plan(**arrays, **wide)[-1]
    np.testing.assert_array_equal(total, LENGTHS + COUNT)
    with pytest.raises(BadTensorDtype, match="cos has dtype fp16; the plan was made for fp32"):
        plan(**arrays, **narrow)


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    k, v = (torch.full((2, 8, 1, 16), torch.nan, dtype=torch.bfloat16) for _ in "kv")
    new = torch.randn(2, 3, 1, 16).bfloat16()
    total, _ = flashgen.append(flashgen.KVCache(k, v, torch.tensor([1, 4], dtype=torch.int32)), new, new)
    assert (total.dtype, total.tolist()) == (torch.int32, [4, 7])
    assert torch.equal(k[1, 4:7], new[1])
    assert torch.equal(v[0, 1:4], new[0])
    assert int(k.isnan().sum()) == 10 * 16


def test_full_pages_may_be_shared():
    """A prefix of two sequences, whose new tokens go to pages of their own."""
    rng = np.random.default_rng()
    k, v = (normal(rng, 6, 16, HEADS, 32, dtype=np.float32) for _ in "kv")
    before = k.copy()
    pages = np.array([[4, 1, -1], [4, 2, 0]], np.int32)
    new = [normal(rng, 2, 3, HEADS, 32, dtype=np.float32) for _ in "kv"]
    flashgen.append(flashgen.KVCache(k, v, np.array([16, 30], np.int32), pages=pages), *new)
    np.testing.assert_array_equal(k[4], before[4])
    np.testing.assert_array_equal(k[1, :3], new[0][0])
    np.testing.assert_array_equal(np.concatenate([k[2, 14:], k[0, :1]]), new[0][1])


def test_the_pages_of_a_sequence_without_new_tokens_may_be_of_another_by_now():
    pool = np.zeros((2, 2, 16, 1, 32), np.float32)
    pages = np.array([[0], [0], [1]], np.int32)
    cache = flashgen.KVCache(*pool, lengths=np.array([3, 12, 0], np.int32), pages=pages)
    new = np.ones((4, 1, 32), np.float32)
    flashgen.append(cache, new, new, cu_seqlens_new=np.array([0, 3, 3, 4], np.int32))
    assert pool[0, 0, 3:6].all()
    assert not pool[0, 0, 6:].any()


def test_no_new_token_and_no_page():
    pool = np.zeros((2, 0, 16, 1, 32), np.float32)
    cache = flashgen.KVCache(*pool, lengths=np.zeros(2, np.int32), pages=np.zeros((2, 3), np.int32))
    new = np.ones((4, 1, 32), np.float32)
    flashgen.append(cache, new, new, cu_seqlens_new=np.zeros(3, np.int32))
