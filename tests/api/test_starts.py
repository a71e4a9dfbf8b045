"""Sequences whose keys begin after the first row: results, gradients, caches, errors."""

import dataclasses

import numpy as np
import pytest

import flashgen
from flashgen import KVCache, Rotary, errors

RNG = np.random.default_rng()
STARTS, LENGTHS = np.array([5, 0, 17, 9], np.int32), np.array([20, 17, 17, 23], np.int32)
MASKS = ({}, {"causal": True}, {"window_size": (4, 1)})


def padded(dtype=np.float32):
    """q, k and v of which all that is outside of a range is NaN."""
    q, k, v = (
        RNG.standard_normal((4, rows, heads, 32), np.float32) for rows, heads in ((6, 4), (23, 2), (23, 2))
    )
    for b, (start, end) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        for x in (k, v):
            x[b, :start] = x[b, end:] = np.nan
    return [x.astype(dtype) for x in (q, k, v)]


def each_alone(q, k, v, **options):
    """The results of each sequence by a call of its own, without padding."""
    ranges = zip(q, k, v, STARTS, LENGTHS, strict=True)
    return [flashgen.attention(x, y[s:e], z[s:e], return_lse=True, **options) for x, y, z, s, e in ranges]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_results_are_those_without_padding_to_the_bit(dtype, options):
    q, k, v = padded(dtype)
    out, lse = flashgen.attention(q, k, v, kv_starts=STARTS, kv_lengths=LENGTHS, return_lse=True, **options)
    for b, (right, right_lse) in enumerate(each_alone(q, k, v, **options)):
        assert np.array_equal(out[b], right)
        assert np.array_equal(lse[b], right_lse)
    assert not out[2].any()  # no keys are left
    assert np.isneginf(lse[2]).all()


def test_without_lengths_the_keys_go_to_the_last_row():
    q, k, v = padded()
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    out = flashgen.attention(q, k, v, kv_starts=STARTS, causal=True)
    for b, start in enumerate(STARTS):
        assert np.array_equal(out[b], flashgen.attention(q[b], k[b, start:], v[b, start:], causal=True))


def test_column_j_of_a_mask_is_row_j_and_scores_count_from_the_start():
    q, k, v = padded()
    mask = RNG.random((4, 1, 6, 23)) < 0.3
    out = flashgen.attention(q, k, v, kv_starts=STARTS, kv_lengths=LENGTHS, mask=mask)
    options = {"score": "score + slope * kv", "params": {"slope": 0.01}}
    scored = flashgen.attention(q, k, v, kv_starts=STARTS, kv_lengths=LENGTHS, **options)
    for b, (start, end) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        rows = q[b], k[b, start:end], v[b, start:end]
        assert np.array_equal(out[b], flashgen.attention(*rows, mask=mask[b, :, :, start:end]))
        assert np.array_equal(scored[b], flashgen.attention(*rows, **options))


def test_packed_queries_and_sinks_go_with_starts():
    q, k, v = padded()
    ends, sinks = np.array([0, 1, 4, 4, 6], np.int32), RNG.standard_normal(4, np.float32)
    options = {"kv_starts": STARTS, "kv_lengths": LENGTHS, "causal": True, "sinks": sinks}
    out = flashgen.attention(q[0], k, v, cu_seqlens_q=ends, **options)
    for b, (start, end) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        rows = slice(ends[b], ends[b + 1])
        right = flashgen.attention(q[0, rows], k[b, start:end], v[b, start:end], causal=True, sinks=sinks)
        assert np.array_equal(out[rows], right)


def in_pages(k, v, size=4):
    """A cache in pages of k and v, with garbage in the entries of pages before the starts."""
    count = -(-k.shape[1] // size)
    more = ((0, 0), (0, count * size - k.shape[1]), (0, 0), (0, 0))
    pools = (np.pad(x, more).reshape(-1, size, *x.shape[2:]) for x in (k, v))
    table = np.arange(4 * count, dtype=np.int32).reshape(4, count)
    table[np.arange(count) < STARTS[:, None] // size] = 1 << 30
    return KVCache(*pools, LENGTHS, table, starts=STARTS)


def test_caches_have_starts():
    q, k, v = padded()
    right = flashgen.attention(q, k, v, kv_starts=STARTS, kv_lengths=LENGTHS, causal=True)
    cache = KVCache(k, v, LENGTHS, starts=STARTS)
    assert np.array_equal(flashgen.attention(q, cache, causal=True), right)
    assert np.array_equal(flashgen.attention(q, in_pages(k, v), causal=True), right)
    moved = KVCache(k[::-1], v[::-1], LENGTHS, index=np.arange(3, -1, -1, dtype=np.int32), starts=STARTS)
    assert np.array_equal(flashgen.attention(q, moved, causal=True), right)
    plan = flashgen.plan(q, cache, causal=True)
    assert np.array_equal(plan(q, cache.k, cache.v, kv_lengths=cache.lengths, kv_starts=cache.starts), right)
    with pytest.raises(errors.FlashgenError, match=r"kv_starts=cache\.starts"):
        plan(q, cache)


def test_append_writes_after_the_last_token_and_rotates_to_given_positions():
    q, k, v = padded()
    k, v = (np.concatenate([x, np.full((4, 6, 2, 32), np.nan, np.float32)], axis=1) for x in (k, v))
    new = RNG.standard_normal((2, 4, 6, 2, 32), np.float32)
    cache = KVCache(k.copy(), v.copy(), LENGTHS, starts=STARTS)
    out = flashgen.attention(q, cache, append=tuple(new), causal=True)
    for b, (start, end) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        rows = (np.concatenate([x[b, start:end], y[b]]) for x, y in zip((k, v), new, strict=True))
        assert np.array_equal(out[b], flashgen.attention(q[b], *rows, causal=True))
    again = KVCache(k.copy(), v.copy(), LENGTHS, starts=STARTS)
    plan = flashgen.plan(q, again, append=tuple(new), causal=True)
    assert np.array_equal(plan(q, again, tuple(new)), out)
    with pytest.raises(errors.FlashgenError, match="a KVCache with lengths and starts"):
        plan(q, dataclasses.replace(again, starts=None), tuple(new))
    tables = np.ones((2, 32, 8), np.float32)
    with pytest.raises(errors.BadParam, match="rotary has no positions, and the KVCache has starts"):
        flashgen.attention(q, again, append=tuple(new), rotary=Rotary(*tables), causal=True)
    positions = (LENGTHS - STARTS)[:, None] + np.arange(6, dtype=np.int32)
    rotary = Rotary(*tables, positions=positions)
    rotated = flashgen.attention(q, again, append=tuple(new), rotary=rotary, causal=True)
    assert np.isfinite(rotated).all()


def test_a_cascade_takes_caches_with_starts():
    q, k, v = padded()
    cache = KVCache(k, v, LENGTHS, starts=STARTS)
    shared = RNG.standard_normal((2, 1, 7, 2, 32), np.float32)
    out, lse = flashgen.cascade(q, [tuple(shared), cache], causal=True, return_lse=True)
    for b, (start, end) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        rows = (np.concatenate([x[0], y[b, start:end]]) for x, y in zip(shared, (k, v), strict=True))
        if end - start >= 6:
            right, right_lse = flashgen.attention(q[b], *rows, causal=True, return_lse=True)
            np.testing.assert_allclose(out[b], right, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(lse[b], right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_gradients_are_those_without_padding(options):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in padded())
    dout = torch.randn(q.shape)
    starts, lengths = torch.from_numpy(STARTS), torch.from_numpy(LENGTHS)
    out = flashgen.attention(q, k, v, kv_starts=starts, kv_lengths=lengths, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    for b, (start, end) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        rows = [x[b, start:end] if x is not q else x[b] for x in (q, k, v)]
        leaves = [x.detach().requires_grad_() for x in rows]
        right = torch.autograd.grad(flashgen.attention(*leaves, **options), leaves, dout[b])
        for x, y in zip((dq[b], dk[b, start:end], dv[b, start:end]), right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        for x in (dk[b], dv[b]):
            assert not x[:start].any()
            assert not x[end:].any()


def test_calls_are_compiled():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in padded())
    starts, lengths = torch.from_numpy(STARTS), torch.from_numpy(LENGTHS)

    def call(q, k, v, starts):
        return flashgen.attention(q, k, v, kv_starts=starts, kv_lengths=lengths, causal=True)

    def cached(q, k, v, starts):
        return flashgen.attention(q, KVCache(k, v, lengths, starts=starts), causal=True)

    right = call(q, k, v, starts)
    for function in (call, cached):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, k, v, starts), right)
    leaf = q.clone().requires_grad_()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(leaf, k, v, starts).sum(), leaf)
    (eager,) = torch.autograd.grad(call(leaf, k, v, starts).sum(), leaf)
    assert torch.equal(gradient, eager)


def test_errors_name_the_argument():
    q, k, v = padded()
    late = STARTS + np.array([0, 18, 0, 0], np.int32)
    for starts, error, message in (
        (late, errors.BadParam, r"^kv_starts\[1\] is 18; expected 0 to 17, the length of the sequence"),
        (STARTS - 1, errors.BadParam, r"^kv_starts\[1\] is -1; expected 0 to 17"),
        (
            STARTS[:3],
            errors.BadTensorShape,
            "^kv_lengths is for a batch of 4 but|^kv_starts is for a batch of 3",
        ),
        (STARTS.astype(np.int64), errors.BadTensorDtype, "^kv_starts has dtype int64; expected int32"),
    ):
        with pytest.raises(error, match=message):
            flashgen.attention(q, k, v, kv_starts=starts, kv_lengths=LENGTHS)
    with pytest.raises(errors.BadParam, match=r"^starts\[1\] is 18; expected 0 to 17"):
        flashgen.attention(q, KVCache(k, v, LENGTHS, starts=late))
    ends = np.array([0, 23, 46, 69, 92], np.int32)
    packed = k.reshape(92, 2, 32), v.reshape(92, 2, 32)
    with pytest.raises(errors.BadParam, match=r"^cu_seqlens_kv and kv_starts were given"):
        flashgen.attention(q, *packed, cu_seqlens_kv=ends, kv_starts=STARTS)
    with pytest.raises(
        errors.BadParam, match=r"kv_starts was given with a KVCache; pass KVCache\(..., starts="
    ):
        flashgen.attention(q, KVCache(k, v, LENGTHS), kv_starts=STARTS)
    bias = np.zeros((6, 23), np.float32)
    with pytest.raises(errors.BadParam, match=r"kv_starts was given and score has the parameter bias"):
        flashgen.attention(q, k, v, kv_starts=STARTS, score="score + bias[q, kv]", params={"bias": bias})
    with pytest.raises(TypeError, match="did you mean kv_starts"):
        flashgen.attention(q, k, v, cache_leftpad=STARTS)
    with pytest.raises(errors.BadParam, match="kv_starts"):
        flashgen.attention(q, k, v, kv_starts=STARTS, return_weights=True)
