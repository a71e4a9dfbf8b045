"""Attention over latent caches, on the CPU: as of keys and values apart; what is refused, by name."""

import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides, NullPointer

SCALE = 0.07
HEADS = 12


def arrays(seed, page=0, width=576, dtype=np.float16):
    """q, a latent cache whose unused rows are NaN, and the rows of each sequence."""
    rng = np.random.default_rng(seed)
    lengths = np.array([50, 7, 0, 33], np.int32)
    rows = [rng.standard_normal((n, 1, width)).astype(dtype) for n in lengths]
    q = rng.standard_normal((4, 2, HEADS, width)).astype(dtype)
    if not page:
        k = np.full((4, 60, 1, width), np.nan, dtype)
        for b, x in enumerate(rows):
            k[b, : len(x)] = x
        return q, (k, lengths, None), rows
    counts = -(-lengths // page)
    order = iter(rng.permutation(counts.sum()))
    k, table = np.full((counts.sum(), page, 1, width), np.nan, dtype), np.full((4, 60), 1 << 30, np.int32)
    for b, x in enumerate(rows):
        for i in range(counts[b]):
            table[b, i] = next(order)
            k[table[b, i], : len(x) - i * page] = x[i * page : (i + 1) * page]
    return q, (k, lengths, table), rows


@pytest.mark.parametrize("page", [0, 1, 16, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_the_values_are_the_first_elements_of_the_keys(page, causal, fresh_seed):
    q, (k, lengths, pages), rows = arrays(fresh_seed, page)
    cache = flashgen.KVCache(k, None, lengths, pages, head_dim_v=512)
    out, lse = flashgen.attention(q, cache, causal=causal, softmax_scale=SCALE, return_lse=True)
    assert out.shape == (4, 2, HEADS, 512)
    for b, x in enumerate(rows):
        score = np.einsum("qhd,kd->hqk", q[b].astype(np.float64), x[:, 0].astype(np.float64)) * SCALE
        if causal:
            score[:, np.tri(2, len(x), len(x) - 2) == 0] = -np.inf
        weights = np.exp(score)
        total = weights.sum(-1, keepdims=True)
        right = np.einsum("hqk,kd->qhd", weights / np.where(total, total, 1), x[:, 0, :512])
        np.testing.assert_allclose(out[b], right, atol=4e-3)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[b], np.log(total[..., 0]), atol=1e-4)
    plan = flashgen.plan(q, cache, causal=causal, softmax_scale=SCALE)
    named = {} if pages is None else {"pages": pages}
    np.testing.assert_array_equal(plan(q, k, kv_lengths=lengths, **named), out)


def test_packed_queries_and_fixed_splits(fresh_seed):
    q, (k, lengths, _), _ = arrays(fresh_seed)
    cache = flashgen.KVCache(k, None, lengths, head_dim_v=512)
    whole = flashgen.attention(q, cache, causal=True, softmax_scale=SCALE)
    cu = np.arange(0, 9, 2, dtype=np.int32)
    packed = flashgen.attention(
        q.reshape(8, HEADS, 576), cache, causal=True, softmax_scale=SCALE, cu_seqlens_q=cu
    )
    np.testing.assert_array_equal(packed.reshape(whole.shape), whole)
    assert flashgen.attention(q, cache, causal=True, softmax_scale=SCALE, splits=3).shape == whole.shape


def test_libraries_that_trace_see_the_same_call(fresh_seed):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    q, (k, lengths, _), _ = arrays(fresh_seed, width=320)

    def call(q, k, lengths):
        cache = flashgen.KVCache(k, None, lengths, head_dim_v=256)
        return flashgen.attention(q, cache, softmax_scale=SCALE, return_lse=True)

    right = call(q, k, lengths)
    tensors = [torch.from_numpy(x) for x in (q, k, lengths)]
    for found in (call(*tensors), torch.compile(call, fullgraph=True, backend="eager")(*tensors)):
        for x, y in zip(found, right, strict=True):
            np.testing.assert_array_equal(x.numpy(), y)
    for found in (jax.jit(call), call):
        for x, y in zip(found(*map(jax.numpy.asarray, (q, k, lengths))), right, strict=True):
            np.testing.assert_array_equal(np.asarray(x), y)


def halves_of(q, width=512):
    """q in two arrays, whose layouts differ."""
    wide = np.full((*q.shape[:-1], width + 32), np.nan, q.dtype)
    wide[..., :width] = q[..., :width]
    rope = np.ascontiguousarray(q[..., width:].swapaxes(0, -2)).swapaxes(0, -2)
    return wide[..., :width], rope


@pytest.mark.parametrize("page", [0, 5])
def test_q_may_be_in_two_arrays(page, fresh_seed):
    q, (k, lengths, pages), _ = arrays(fresh_seed, page)
    cache = flashgen.KVCache(k, None, lengths, pages, head_dim_v=512)
    options = {"causal": True, "softmax_scale": SCALE, "return_lse": True}
    right = flashgen.attention(q, cache, **options)
    q_nope, q_rope = halves_of(q)
    for x, y in zip(flashgen.attention(q_nope, cache, q_rope=q_rope, **options), right, strict=True):
        np.testing.assert_array_equal(x, y)
    plan = flashgen.plan(q_nope, cache, q_rope=q_rope, **options)
    named = {} if pages is None else {"pages": pages}
    for x, y in zip(plan(q_nope, k, kv_lengths=lengths, q_rope=q_rope, **named), right, strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(NullPointer, match="q_rope is None, but the plan was made with one"):
        plan(q_nope, k, kv_lengths=lengths, **named)


def test_packed_queries_may_be_in_two_arrays(fresh_seed):
    q, (k, lengths, _), _ = arrays(fresh_seed)
    cache = flashgen.KVCache(k, None, lengths, head_dim_v=512)
    cu = np.array([0, 2, 2, 7, 8], np.int32)
    options = {"causal": True, "softmax_scale": SCALE, "cu_seqlens_q": cu}
    q = q.reshape(8, HEADS, 576)
    q_nope, q_rope = halves_of(q)
    right = flashgen.attention(q, cache, **options)
    np.testing.assert_array_equal(flashgen.attention(q_nope, cache, q_rope=q_rope, **options), right)


def test_rows_are_appended_before_queries_in_two_arrays(fresh_seed):
    q, (k, lengths, _), _ = arrays(fresh_seed)
    row = np.random.default_rng(fresh_seed).standard_normal((4, 2, 1, 576)).astype(np.float16)
    options = {"causal": True, "softmax_scale": SCALE, "append": (row, None)}
    right = flashgen.attention(q, flashgen.KVCache(k.copy(), None, lengths, head_dim_v=512), **options)
    cache = flashgen.KVCache(k, None, lengths, head_dim_v=512)
    q_nope, q_rope = halves_of(q)
    np.testing.assert_array_equal(flashgen.attention(q_nope, cache, q_rope=q_rope, **options), right)
    plan = flashgen.plan(q_nope, cache, q_rope=q_rope, **options)
    np.testing.assert_array_equal(plan(q_nope, cache, (row, None), q_rope=q_rope), right)


def test_libraries_that_trace_see_both_arrays(fresh_seed):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    q, (k, lengths, _), _ = arrays(fresh_seed, width=320)
    q_nope, q_rope = halves_of(q, 256)

    def call(q, q_rope, k, lengths):
        cache = flashgen.KVCache(k, None, lengths, head_dim_v=256)
        return flashgen.attention(q, cache, q_rope=q_rope, softmax_scale=SCALE)

    right = call(q, None, k, lengths)
    tensors = [torch.from_numpy(x) for x in (q_nope, q_rope, k, lengths)]
    for function in (call, torch.compile(call, fullgraph=True, backend="eager")):
        np.testing.assert_array_equal(function(*tensors).numpy(), right)
    tensors[1].requires_grad_()
    with pytest.raises(BadParam, match="q_rope: a tensor requires a gradient"):
        call(*tensors)
    for function in (jax.jit(call), call):
        found = function(*map(jax.numpy.asarray, (q_nope, q_rope, k, lengths)))
        np.testing.assert_array_equal(np.asarray(found), right)


@pytest.mark.parametrize("name", ["q_rope", "indices"])
@pytest.mark.parametrize("compiled", [False, True])
def test_arrays_of_latent_caches_need_one(name, compiled):
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 8, 4, 64, dtype=torch.float16)

    def call(x):
        return flashgen.attention(x, x, x, **{name: x})

    with pytest.raises(BadParam, match=f"{name} was given without a latent cache"):
        (torch.compile(call, backend="eager") if compiled else call)(x)


LATENT = np.zeros((1, 8, 1, 576), np.float16)
LENGTHS = np.array([8], np.int32)
Q = np.zeros((1, 1, 4, 576), np.float16)
NOPE, ROPE = Q[..., :512], Q[..., 512:]
ROTARY = flashgen.Rotary(*np.zeros((2, 16, 32), np.float32))


def cache_of(k=LATENT, v=None, width=512, **others):
    return flashgen.KVCache(k, v, LENGTHS, head_dim_v=width, **others)


@pytest.mark.parametrize(
    ("cache", "options", "error", "words"),
    [
        (cache_of(v=LATENT), {}, BadParam, "it has v"),
        (cache_of(width="wide"), {}, BadParam, "head_dim_v of the KVCache is 'wide'"),
        (cache_of(width=0), {}, BadTensorShape, "head_dim_v is 0"),
        (cache_of(width=516), {}, BadTensorShape, "head_dim_v is 516"),
        (cache_of(width=576), {}, BadTensorShape, "head_dim_v is 576"),
        (cache_of(np.zeros((1, 8, 2, 576), np.float16)), {}, BadTensorShape, "k has 2 heads"),
        (cache_of(np.zeros((1, 8, 1, 640), np.float16)), {}, BadTensorShape, "head_dim is 640"),
        (cache_of(np.zeros((1, 8, 1, 568), np.float16)), {}, BadTensorShape, "k has head_dim 568"),
        (cache_of(LATENT.astype(np.float32)), {}, BadTensorDtype, "k has dtype fp32"),
        (cache_of(LATENT[0]), {}, BadTensorShape, "k has shape"),
        (cache_of(pages=np.zeros((2, 1), np.int32)), {}, BadTensorShape, "pages is for a batch of 2"),
        (cache_of(pages=np.zeros(1, np.int32)), {}, BadTensorShape, "pages has shape"),
        (cache_of(starts=LENGTHS), {}, BadParam, "starts"),
        (cache_of(k_scale=np.ones(1, np.float32)), {}, BadParam,
         "k_scale was given, and k and v are not e4m3"),
        (cache_of(width=None), {}, NullPointer, "v is None"),
        (cache_of(), {"softmax_scale": None}, BadParam, "softmax_scale is None"),
        (cache_of(), {"window_size": (3, 0)}, BadParam, "window_size"),
        (cache_of(), {"softcap": 3.0}, BadParam, "softcap"),
        (cache_of(), {"sinks": np.zeros(4, np.float32)}, BadParam, "sinks"),
        (cache_of(), {"mask": np.zeros((1, 8), bool)}, BadParam, "mask"),
        (cache_of(), {"mask_type": "causal_top_left"}, BadParam, "causal_top_left"),
        (cache_of(), {"dropout_p": 0.5, "dropout_seed": (1, 2)}, BadParam, "dropout_p"),
        (cache_of(), {"return_weights": True}, BadParam, "KVCache"),
        (cache_of(), {"q_rope": ROPE}, BadTensorShape, "q has shape .1, 1, 4, 576., and q_rope was given"),
        (cache_of(), {"q": NOPE, "q_rope": ROPE[..., :32]}, BadTensorShape, "q_rope has shape .1, 1, 4, 32."),
        (cache_of(), {"q": NOPE, "q_rope": ROPE[:, :, :2]}, BadTensorShape, "q_rope has shape .1, 1, 2, 64."),
        (cache_of(), {"q": NOPE, "q_rope": ROPE[0]}, BadTensorShape, "q_rope has shape .1, 4, 64."),
        (cache_of(), {"q": NOPE, "q_rope": ROPE.astype(np.float32)}, BadTensorDtype, "q_rope has dtype fp32"),
        (cache_of(), {"q": NOPE, "q_rope": ROPE[..., ::-1]}, BadTensorStrides, "q_rope has strides"),
        (cache_of(width=240), {"q": NOPE[..., :240], "q_rope": Q[..., 240:]}, BadTensorShape, "as the value"),
        (cache_of(), {"q": NOPE, "q_rope": ROPE, "append": (LATENT[:, :1], None), "rotary": ROTARY}, BadParam,
         "q_rope and rotary were given"),
        (cache_of(), {"append": (LATENT, LATENT)}, BadParam, "v_new was given, and the cache is latent"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_is_refused_and_by_which_name(cache, options, error, words):
    with pytest.raises(error, match=words):
        flashgen.attention(**{"q": Q, "k": cache, "softmax_scale": SCALE} | options)


def test_gradients_are_refused_by_name():
    torch = pytest.importorskip("torch")
    q = torch.zeros(Q.shape, dtype=torch.float16, requires_grad=True)
    cache = flashgen.KVCache(
        torch.zeros(LATENT.shape, dtype=torch.float16), None, torch.from_numpy(LENGTHS), head_dim_v=512
    )
    with pytest.raises(BadParam, match="gradients of calls with a KVCache"):
        flashgen.attention(q, cache, softmax_scale=SCALE)
    with pytest.raises(BadParam, match="KVCache, which has no gradients"):
        flashgen.attention_backward(Q, Q, cache_of(), None, Q, Q)
