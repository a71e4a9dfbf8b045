"""Sequences of several lengths on the CPU give what attention of each alone gives, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashgen
from flashgen import errors

OPTIONS = ({}, {"causal": True}, {"window_size": (3, 2)}, {"softcap": 2.0}, {"causal": True, "alibi": True})
HEADS, KV_HEADS, WIDTH, WIDTH_V = 4, 2, 8, 12


def batches():
    length = st.integers(0, 9)
    return st.lists(st.tuples(length, length), min_size=1, max_size=5)


def rows(rng, count, heads, width):
    return rng.standard_normal((count, heads, width), np.float32)


def alone(rng, lengths, options):
    """q, k and v of each sequence, and what attention makes of each."""
    sequences = [
        (rows(rng, n, HEADS, WIDTH), rows(rng, m, KV_HEADS, WIDTH), rows(rng, m, KV_HEADS, WIDTH_V))
        for n, m in lengths
    ]
    slopes = options.get("alibi_slopes", [None] * len(lengths))
    results = [
        flashgen.attention(
            *(x[None] for x in each),
            return_lse=True,
            **(options | ({} if slope is None else {"alibi_slopes": slope[None]})),
        )
        for each, slope in zip(sequences, slopes, strict=True)
    ]
    return sequences, [(out[0], lse[0]) for out, lse in results]


def options_of(rng, options, batch):
    if "alibi" not in options:
        return options
    return {"causal": True, "alibi_slopes": rng.random((batch, HEADS), np.float32)}


@given(st.integers(0, 2**32 - 1), batches(), st.sampled_from(OPTIONS))
def test_packed_sequences(seed, lengths, options):
    rng = np.random.default_rng(seed)
    options = options_of(rng, options, len(lengths))
    sequences, results = alone(rng, lengths, options)
    q, k, v = (np.concatenate(each) for each in zip(*sequences, strict=True))
    cu_q, cu_kv = (np.cumsum([0, *each]).astype(np.int32) for each in zip(*lengths, strict=True))
    out, lse = flashgen.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, return_lse=True, **options)
    assert lse.shape == (HEADS, len(q))
    for b, (own_out, own_lse) in enumerate(results):
        at = slice(cu_q[b], cu_q[b + 1])
        np.testing.assert_array_equal(out[at], own_out)
        np.testing.assert_array_equal(lse[:, at], own_lse)


def paged(rng, sequences, size):
    """k, v and a page table: pages in random order, and NaN in all that is no sequence's."""
    counts = [-(-len(k) // size) for _, k, _ in sequences]
    order = rng.permutation(sum(counts) + 1)
    table = np.full((len(sequences), max(1, *counts)), 2**31 - 1, np.int32)
    k_pages, v_pages = (
        np.full((len(order), size, KV_HEADS, width), np.nan, np.float32) for width in (WIDTH, WIDTH_V)
    )
    for b, (_, k, v) in enumerate(sequences):
        own, order = order[: counts[b]], order[counts[b] :]
        table[b, : counts[b]] = own
        for j in range(len(k)):
            k_pages[own[j // size], j % size], v_pages[own[j // size], j % size] = k[j], v[j]
    return k_pages, v_pages, table


@given(
    st.integers(0, 2**32 - 1),
    batches(),
    st.sampled_from(OPTIONS),
    st.sampled_from([0, 1, 3, 16]),
    st.booleans(),
)
def test_a_cache(seed, lengths, options, page_size, packed):
    """Of rows, which an index chooses, or of pages; queries are packed, or all sequences have as many."""
    rng = np.random.default_rng(seed)
    if not packed:
        lengths = [(lengths[0][0], m) for _, m in lengths]
    options = options_of(rng, options, len(lengths))
    sequences, results = alone(rng, lengths, options)
    batch, kv_lengths = len(lengths), np.array([m for _, m in lengths], np.int32)
    if page_size:
        k, v, table = paged(rng, sequences, page_size)
        cache = flashgen.KVCache(k, v, kv_lengths, pages=table)
    else:
        index = rng.permutation(batch + 2)[:batch].astype(np.int32)
        # Heads ahead of rows in memory.
        k, v = (
            np.full((batch + 2, KV_HEADS, 11, d), np.nan, np.float32).swapaxes(1, 2) for d in (WIDTH, WIDTH_V)
        )
        for row, (_, own_k, own_v) in zip(index, sequences, strict=True):
            k[row, : len(own_k)], v[row, : len(own_v)] = own_k, own_v
        cache = flashgen.KVCache(k, v, kv_lengths, index=index)
    if packed:
        cu = np.cumsum([0, *(n for n, _ in lengths)]).astype(np.int32)
        q, extra = np.concatenate([q for q, _, _ in sequences]), {"cu_seqlens_q": cu}
    else:
        q, extra = np.stack([q for q, _, _ in sequences]), {}
    out, lse = flashgen.attention(q, cache, return_lse=True, **extra, **options)
    for b, (own_out, own_lse) in enumerate(results):
        got_out, got_lse = (out[cu[b] : cu[b + 1]], lse[:, cu[b] : cu[b + 1]]) if packed else (out[b], lse[b])
        np.testing.assert_array_equal(got_out, own_out)
        np.testing.assert_array_equal(got_lse, own_lse)


@given(
    st.integers(0, 2**32 - 1), batches(), st.sampled_from(OPTIONS[:3]), st.sampled_from(["bhqk", "bqk", "qk"])
)
def test_a_dense_mask_beside_a_cache_in_pages(seed, lengths, options, axes):
    """Its columns are the keys of the sequence; those past a length are not read."""
    rng = np.random.default_rng(seed)
    lengths = [(lengths[0][0], m) for _, m in lengths]
    sequences, _ = alone(rng, lengths, {})
    k, v, table = paged(rng, sequences, 3)
    kv_lengths = np.array([m for _, m in lengths], np.int32)
    q = np.stack([q for q, _, _ in sequences])
    extents = {"b": len(lengths), "h": HEADS, "q": lengths[0][0], "k": 3 * table.shape[1]}
    mask = rng.random([extents[letter] for letter in axes]) < 0.4
    mask = mask[:, None] if axes == "bqk" else mask
    cache = flashgen.KVCache(k, v, kv_lengths, pages=table)
    out, lse = flashgen.attention(q, cache, mask=mask, return_lse=True, **options)
    full = np.broadcast_to(mask, (extents["b"], HEADS, extents["q"], extents["k"]))
    for b, (own_q, own_k, own_v) in enumerate(sequences):
        own = (x[None] for x in (own_q, own_k, own_v))
        own_mask = full[b, :, :, : len(own_k)]
        expected = flashgen.attention(*own, mask=own_mask[None], return_lse=True, **options)
        np.testing.assert_array_equal(out[b], expected[0][0])
        np.testing.assert_array_equal(lse[b], expected[1][0])


def test_a_length_that_contradicts_the_cache_is_named_before_anything_is_written():
    q, k = np.ones((2, 1, 2, 8), np.float32), np.ones((2, 4, 2, 8), np.float32)
    out = np.full_like(q, np.nan)
    with pytest.raises(errors.BadParam, match=r"kv_lengths\[0\] is 99; expected 0 to 4, the capacity of k"):
        flashgen.attention(
            q[:, :0], k, k, kv_lengths=np.array([99, -4], np.int32)
        )  # no query has a use for it
    with pytest.raises(errors.BadParam, match=r"kv_lengths\[1\] is 5; expected 0 to 4, the capacity of k"):
        flashgen.attention(q, k, k, kv_lengths=np.array([2, 5], np.int32), out=out)
    assert np.isnan(out).all()


def test_the_row_of_a_sequence_without_keys_is_not_looked_at():
    rng = np.random.default_rng()
    q, k = rows(rng, 3, HEADS, WIDTH)[:, None], rng.standard_normal((2, 6, KV_HEADS, WIDTH), np.float32)
    index, lengths = np.array([7, 1, -1], np.int32), np.array([0, 5, 0], np.int32)
    out, lse = flashgen.attention(q, flashgen.KVCache(k, k, lengths, index=index), return_lse=True)
    assert not out[[0, 2]].any()
    assert np.isneginf(lse[[0, 2]]).all()
    np.testing.assert_array_equal(out[1:2], flashgen.attention(q[1:2], k[1:, :5], k[1:, :5]))
    nothing = flashgen.KVCache(k[:0], k[:0], np.zeros(3, np.int32), index=index)
    assert not flashgen.attention(q, nothing).any()
    with pytest.raises(errors.BadParam, match=r"index\[0\] is 7; k has 2 rows of a cache"):
        flashgen.attention(q, flashgen.KVCache(k, k, np.ones(3, np.int32), index=index))


def test_a_plan_is_called_with_other_lengths():
    rng = np.random.default_rng()
    q, k = rows(rng, 2, HEADS, WIDTH)[:, None], rng.standard_normal((2, 6, KV_HEADS, WIDTH), np.float32)
    plan = flashgen.plan(q, k, k, kv_lengths=np.array([6, 6], np.int32))
    for lengths in ([6, 2], [0, 1]):
        lengths = np.array(lengths, np.int32)
        found = plan(q, k, k, kv_lengths=lengths)
        np.testing.assert_array_equal(found, flashgen.attention(q, k, k, kv_lengths=lengths))
        for b, length in enumerate(lengths):
            one = slice(b, b + 1)
            expected = flashgen.attention(q[one], k[one, :length], k[one, :length])
            np.testing.assert_array_equal(found[one], expected)
