"""attention(..., append=, rotary=): the same as append() and then attention over the lengths it gives."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.simulator import hostcompiler

simulated = pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
ON = ("cpu", pytest.param("simulator", marks=simulated))
LENGTHS = np.array([5, 0, 19], np.int32)


def numbers(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def cache_of(rng, pages):
    """A cache with room for 24 tokens a sequence, of rows or of pages of 8; unused slots are NaN."""
    k, v = (np.full((3, 24, 2, 32), np.nan, np.float16) for _ in "kv")
    for row, length in enumerate(LENGTHS):
        k[row, :length], v[row, :length] = numbers(rng, length, 2, 32), numbers(rng, length, 2, 32)
    if not pages:
        return flashgen.KVCache(k, v, LENGTHS)
    table = rng.permutation(9).astype(np.int32).reshape(3, 3)
    order = np.argsort(table.reshape(-1))
    k, v = (x.reshape(9, 8, 2, 32)[order] for x in (k, v))
    return flashgen.KVCache(k, v, LENGTHS, pages=table)


def copied(cache):
    return flashgen.KVCache(cache.k.copy(), cache.v.copy(), cache.lengths, cache.pages)


def tables(rng):
    angles = rng.uniform(-3, 3, (32, 8))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (6, 0)}], ids=str)
@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_it_is_append_and_then_attention(pages, rotates, options, backend):
    rng = np.random.default_rng()
    cache, q, k_new, v_new = cache_of(rng, pages), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    rotary = flashgen.Rotary(*tables(rng)) if rotates else None
    other = copied(cache)
    out = flashgen.attention(q, cache, append=(k_new, v_new), rotary=rotary, backend=backend, **options)

    positions = "each" if options else "first"
    total, rotated = flashgen.append(
        other, k_new, v_new, rotary=rotary, q=q if rotates else None, q_positions=positions, backend=backend
    )
    after = flashgen.KVCache(other.k, other.v, total, other.pages)
    np.testing.assert_array_equal(total, LENGTHS + 3)
    np.testing.assert_array_equal(LENGTHS, [5, 0, 19])
    expected = flashgen.attention(rotated if rotates else q, after, backend=backend, **options)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(cache.k.view(np.uint16), other.k.view(np.uint16))
    np.testing.assert_array_equal(cache.v.view(np.uint16), other.v.view(np.uint16))


def test_packed_tokens_are_appended_to_their_sequences():
    rng = np.random.default_rng()
    cache, cu = cache_of(rng, pages=True), np.array([0, 2, 2, 5], np.int32)
    q, k_new, v_new = (numbers(rng, 5, heads, 32) for heads in (4, 2, 2))
    out = flashgen.attention(q, cache, causal=True, append=(k_new, v_new), cu_seqlens_q=cu)
    total = np.array([7, 0, 22], np.int32)
    after = flashgen.KVCache(cache.k, cache.v, total, cache.pages)
    np.testing.assert_array_equal(out, flashgen.attention(q, after, causal=True, cu_seqlens_q=cu))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"append": None, "rotary": "tables"}, errors.BadParam, "rotary was given without append"),
        ({"append": np.zeros(3)}, errors.BadParam, r"append has type ndarray; expected \(k_new, v_new\)"),
        ({"softmax_scale": -1.0}, errors.BadParam, "softmax_scale is -1"),
        ({"causal": "yes"}, errors.BadParam, "causal is 'yes'"),
        ({"q": np.zeros((3, 3, 3, 32), np.float16)}, errors.BadTensorShape, "q has 3 heads"),
        ({"out": np.zeros((3, 3, 4, 8), np.float16)}, errors.BadTensorShape, "out has shape"),
    ],
)
def test_a_wrong_call_leaves_the_cache_as_it_was(changes, error, message):
    rng = np.random.default_rng()
    cache = cache_of(rng, pages=False)
    before = copied(cache)
    given = {"q": numbers(rng, 3, 3, 4, 32), "append": (numbers(rng, 3, 3, 2, 32),) * 2} | changes
    if changes.get("rotary"):
        given["rotary"] = flashgen.Rotary(*tables(rng))
    with pytest.raises(error, match=message):
        flashgen.attention(given.pop("q"), cache, **given)
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))
    np.testing.assert_array_equal(cache.v.view(np.uint16), before.v.view(np.uint16))


def test_append_needs_a_cache():
    q = np.zeros((1, 1, 2, 32), np.float16)
    with pytest.raises(errors.BadParam, match=r"cache has type ndarray; expected a flashgen\.KVCache"):
        flashgen.attention(q, q, q, append=(q, q))


def test_a_cache_and_angles_are_printed_as_shapes():
    cache = flashgen.KVCache(np.zeros((2, 8, 1, 8)), np.zeros((2, 8, 1, 8)), LENGTHS)
    assert repr(cache) == "KVCache(k=(2, 8, 1, 8), v=(2, 8, 1, 8), lengths=(3,))"
    assert repr(flashgen.Rotary(np.zeros((4, 8)), None)) == "Rotary(cos=(4, 8), interleaved=False)"
