"""flash-attn's signatures: what is expected is flash-attn's definition, written down in NumPy."""

from __future__ import annotations

import inspect
import itertools
import re
from functools import partial

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.compat import flash_attn as compat
from flashgen.compat import flash_attn_kvcache
from flashgen.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.once

TOLERANCE = {np.float16: 4e-3, np.float32: 3e-5}


def qkv(rng, width=32, seqlen_q=23, seqlen_k=41, heads=4, kv_heads=2, batch=2, dtype=np.float16):
    shapes = ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads))
    return [rng.standard_normal((batch, *shape, width), np.float32).astype(dtype) for shape in shapes]


def expected(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """flash-attn's definition in float64: (out, lse)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * np.tanh(s / softcap)
    seqlen_q, seqlen_k = s.shape[2:]
    position, keys = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)
    if slopes is not None:
        s = s - slopes.reshape(-1, q.shape[2], 1, 1) * np.abs(position - keys)
    left, right = window[0], 0 if causal else window[1]
    hidden = (left >= 0) & (keys < position - left) | (right >= 0) & (keys > position + right)
    s = np.where(hidden, -np.inf, s)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.nan_to_num(s.max(axis=-1, keepdims=True), neginf=0)
        p = np.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        lse = (top + np.log(total))[..., 0]
    return np.einsum("bhij,bjhd->bihd", p / np.where(total == 0, 1, total), v), lse


def close(found, right, dtype=np.float16):
    for x, y in zip(found, right, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture(params=["numpy", "torch"])
def array(request):
    """Makes an array of a library, over the memory of one of NumPy."""
    if request.param == "numpy":
        return lambda x: x
    torch = pytest.importorskip("torch")
    return lambda x: None if x is None else torch.from_numpy(x)


# flash-attn's parameters, in its order, with its defaults.
COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
SINKS = {"s_aux": None}  # of flash-attn 3, after all of flash-attn 2
LENGTHS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), inspect.Parameter.empty
)
SIGNATURES = {
    "flash_attn_func": dict.fromkeys("qkv", inspect.Parameter.empty) | COMMON | SINKS,
    "flash_attn_qkvpacked_func": {"qkv": inspect.Parameter.empty} | COMMON,
    "flash_attn_kvpacked_func": dict.fromkeys(("q", "kv"), inspect.Parameter.empty) | COMMON,
    "flash_attn_varlen_func": dict.fromkeys("qkv", inspect.Parameter.empty)
    | LENGTHS
    | COMMON
    | {"block_table": None}
    | SINKS,
    "flash_attn_varlen_qkvpacked_func": dict.fromkeys(
        ("qkv", "cu_seqlens", "max_seqlen"), inspect.Parameter.empty
    )
    | COMMON,
    "flash_attn_varlen_kvpacked_func": dict.fromkeys(("q", "kv"), inspect.Parameter.empty) | LENGTHS | COMMON,
    "flash_attn_with_kvcache": dict.fromkeys(("q", "k_cache", "v_cache"), inspect.Parameter.empty)
    | dict.fromkeys(
        ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad")
    )
    | {"block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    | {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False}
    | SINKS
    | {"sm_margin": 0, "k_descale": None, "v_descale": None},  # of flash-attn 3 too
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_stand_in_flash_attns_order_with_its_defaults(name):
    found = inspect.signature(getattr(compat, name)).parameters.values()
    assert [(each.name, each.default) for each in found] == list(SIGNATURES[name].items())


@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)], ids=lambda shape: f"slopes{shape}")
@pytest.mark.parametrize("softcap", [0.0, -1.0, 2.5])
@pytest.mark.parametrize(
    "window", [(-1, -1), (9, -1), (-1, 3), (9, 3), [-7, -1], (np.int64(9), np.int64(-3))], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(23, 41), (41, 23)], ids=str)
def test_masks_caps_and_slopes_are_flash_attns(lengths, causal, window, softcap, slopes):
    """With causal a window's right side is 0, whatever was given; more queries than keys leave rows of 0."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng, seqlen_q=lengths[0], seqlen_k=lengths[1])
    if slopes is not None:
        slopes = rng.uniform(0, 0.5, slopes).astype(np.float32)
    out, lse, probabilities = flash_attn_func(
        q, k, v, 0.0, None, causal, window, softcap, slopes, return_attn_probs=True
    )
    assert probabilities is None
    close((out, lse), expected(q, k, v, None, causal, window, softcap, slopes))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("width", [1, 36, 61, 64])
def test_any_head_dim_is_served_with_its_own_scale(width, scale, dtype):
    rng = np.random.default_rng()
    q, k, v = qkv(rng, width, dtype=dtype)
    before = [x.copy() for x in (q, k, v)]
    out = flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    assert out.dtype == dtype
    close([out], expected(q, k, v, scale, causal=True)[:1], dtype)
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=True)
    close((out, lse), expected(q, k, v, scale), dtype)
    assert all(np.array_equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_head_dims_that_padding_would_make_equal_are_refused():
    q, k, v = qkv(np.random.default_rng(), 36)
    with pytest.raises(errors.BadTensorShape, match="k has head_dim 35 but q has 36"):
        flash_attn_func(q, k[..., :35], v)
    assert flash_attn_func(q, k, v[..., :21]).shape == (2, 23, 4, 21)  # v may have its own
    with pytest.raises(errors.BadTensorShape, match="head_dim is 0"):
        flash_attn_func(q[..., :0], k[..., :0], v)


@pytest.mark.parametrize("width", [32, 20, 31])
def test_arrays_whose_rows_no_kernel_could_read_are_served(width):
    q, k, v = qkv(np.random.default_rng(), width)
    right = flash_attn_func(q, k, v, causal=True)
    for order in itertools.permutations(range(4)):
        if order[-1] != 3:
            turned = [np.ascontiguousarray(x.transpose(order)) for x in (q, k, v)]
            turned = [x.transpose(np.argsort(order)) for x in turned]
            assert np.array_equal(flash_attn_func(*turned, causal=True), right)
    apart = [np.concatenate([x, x[..., :3]], axis=-1)[..., :width] for x in (q, k, v)]
    assert np.array_equal(flash_attn_func(*apart, causal=True), right)


@pytest.mark.parametrize("width", [32, 20])
def test_packed_forms_are_the_plain_one(array, width):
    rng = np.random.default_rng()
    x = rng.standard_normal((2, 33, 3, 4, width), np.float32).astype(np.float16)
    options = {
        "softmax_scale": 0.2,
        "causal": True,
        "window_size": (11, 0),
        "softcap": 3.0,
        "return_attn_probs": True,
    }
    q, kv = array(x[:, :, 0]), array(x[:, :, 1:])
    rows = array(x.reshape(66, 3, 4, width))
    cu_q, cu_k = array(ends([20, 46])), array(ends([31, 35]))
    plain = flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **options)
    varlen = flash_attn_varlen_func(*(rows[:, i] for i in range(3)), cu_q, cu_q, 46, 46, **options)
    lengths = cu_q, cu_k, 46, 35
    for found, right in (
        (flash_attn_qkvpacked_func(array(x), **options), plain),
        (flash_attn_kvpacked_func(q, kv, **options), plain),
        (flash_attn_varlen_qkvpacked_func(rows, cu_q, 46, **options), varlen),
        (
            flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], *lengths, **options),
            flash_attn_varlen_func(*(rows[:, i] for i in range(3)), *lengths, **options),
        ),
    ):
        assert found[2] is None
        assert all(np.array_equal(a, b) for a, b in zip(found[:2], right[:2], strict=True))


def test_what_is_not_packed_is_refused():
    with pytest.raises(
        errors.BadTensorShape, match=r"kv has shape .*expected \(batch, seqlen_k, 2, nheads_k"
    ):
        flash_attn_kvpacked_func(Q, X)
    with pytest.raises(errors.BadTensorShape, match=r"qkv has shape .*expected \(batch, seqlen, 3, nheads"):
        flash_attn_qkvpacked_func(Q)
    with pytest.raises(errors.BadTensorShape, match=r"qkv has shape .*expected \(total, 3, nheads, headdim"):
        flash_attn_varlen_qkvpacked_func(X, ENDS, 9)
    with pytest.raises(
        errors.BadTensorShape, match=r"kv has shape .*expected \(total_k, 2, nheads_k, headdim"
    ):
        flash_attn_varlen_kvpacked_func(Q[0], X[0], ENDS, ENDS, 9, 9)


@pytest.mark.parametrize("length", [None, 0, 1, 29, 41, np.int64(17)], ids=str)
def test_a_cache_is_read_up_to_its_length_in_the_entries_of_q(length):
    rng = np.random.default_rng()
    q, k, v = qkv(rng, seqlen_q=3)
    k_cache, v_cache = (np.full((5, *x.shape[1:]), np.nan, x.dtype) for x in (k, v))
    end = 41 if length is None else length
    k_cache[:2, :end], v_cache[:2, :end] = k[:, :end], v[:, :end]
    found = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=length,
        causal=True,
        rotary_interleaved=False,
        return_softmax_lse=True,
    )
    if end:
        close(found, expected(q, k[:, :end], v[:, :end], causal=True))
    else:
        assert not found[0].any()
        assert np.isneginf(found[1]).all()
    again = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True)
    assert np.array_equal(again, found[0])


@pytest.mark.parametrize("length", [-1, 42])
def test_a_length_beyond_the_cache_is_refused(length):
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.BadParam, match=f"cache_seqlens is {length}; k_cache has room for 41 keys"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=length)


def test_a_length_that_is_a_truth_value_is_refused():
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.BadParam, match="cache_seqlens is True; expected an integer"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=True)


def test_a_cache_of_fewer_entries_than_q_is_refused():
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.BadTensorShape, match="v_cache has 1 entries; q has 2"):
        flash_attn_with_kvcache(q, k, v[:1])


def test_a_cache_may_begin_late(array):
    """Of the sequence before its leftpad nothing is read; zeros are the same as none."""
    q, k, v = qkv(np.random.default_rng())
    right = [
        flash_attn_with_kvcache(q[b : b + 1], k[b : b + 1, pad:], v[b : b + 1, pad:], causal=True)
        for b, pad in enumerate((7, 0))
    ]
    k[0, :7], v[0, :7] = np.nan, np.nan
    given = [array(x) for x in (q, k, v)]
    pad = array(np.array([7, 0], np.int32))
    found = flash_attn_with_kvcache(*given, cache_leftpad=pad, causal=True)
    assert np.array_equal(found, np.concatenate(right))
    lengths = array(np.array([30, 41], np.int32))
    out = flash_attn_with_kvcache(*given, cache_seqlens=lengths, cache_leftpad=pad, causal=True)
    assert np.array_equal(out[1:], right[1])
    with pytest.raises(errors.BadTensorDtype, match=r"^cache_leftpad has dtype fp32; expected int32"):
        flash_attn_with_kvcache(*given, cache_leftpad=array(np.zeros(2, np.float32)))
    with pytest.raises(errors.BadParam, match=r"^cache_leftpad\[0\] is 42; expected 0 to 41"):
        flash_attn_with_kvcache(*given, cache_leftpad=array(np.array([42, 0], np.int32)))


def test_positions_count_from_the_leftpad(array):
    """New tokens are rotated as in a cache without padding."""
    q, k, v = qkv(np.random.default_rng(), seqlen_q=3, dtype=np.float32)
    new = [x[:, :3] for x in qkv(np.random.default_rng(), dtype=np.float32)[1:]]
    angles = np.random.default_rng().uniform(0, 6, (41, 8)).astype(np.float32)
    tables = np.cos(angles), np.sin(angles)
    pads, lengths = np.array([7, 0], np.int32), np.array([20, 30], np.int32)
    rights = []
    for b, (pad, length) in enumerate(zip(pads, lengths, strict=True)):
        caches = [x[b : b + 1, pad:].copy() for x in (k, v)]
        one = [x[b : b + 1] for x in new]
        options = {"cache_seqlens": np.array([length - pad], np.int32), "causal": True}
        rights.append(flash_attn_with_kvcache(q[b : b + 1], *caches, *one, *tables, **options))
    k[0, :7], v[0, :7] = np.nan, np.nan
    given = [array(x) for x in (q, k, v, *new, *tables)]
    options = {"cache_seqlens": array(lengths), "cache_leftpad": array(pads)}
    found = flash_attn_with_kvcache(*given, **options, causal=True)
    np.testing.assert_allclose(found, np.concatenate(rights), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"^cache_leftpad and rotary_cos .* 3 queries"):
        flash_attn_with_kvcache(*given, **options)
    with pytest.raises(NotImplementedError, match=r"^cache_leftpad and rotary_cos .* seqlen_q 2"):
        flash_attn_with_kvcache(given[0][:, :2], *given[1:], **options)


def test_a_leftpad_may_be_of_jax():
    jax = pytest.importorskip("jax")
    q, k, v = map(jax.numpy.asarray, qkv(np.random.default_rng()))
    given, lengths = (q[:, :1], k, v), jax.numpy.full(len(k), 5, dtype=jax.numpy.int32)
    found = flash_attn_with_kvcache(*given, cache_seqlens=lengths, cache_leftpad=lengths - 2)
    assert (found == flash_attn_with_kvcache(q[:, :1], k[:, 3:5], v[:, 3:5])).all()


def test_a_leftpad_may_be_traced():
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    given = [torch.from_numpy(x) for x in qkv(np.random.default_rng())]
    pad = torch.tensor([3, 0], dtype=torch.int32)
    traced = make_fx(lambda pad: flash_attn_with_kvcache(*given, cache_leftpad=pad))(torch.zeros_like(pad))
    assert torch.equal(traced(pad), flash_attn_with_kvcache(*given, cache_leftpad=pad))


@pytest.mark.parametrize("num_splits", [0, 1, np.int32(4)])
@pytest.mark.parametrize("filled", [None, 29])
def test_splits_are_those_of_attention(num_splits, filled, monkeypatch):
    """Given on; on the CPU they change no result."""
    given = []

    def attention(*arrays, splits, **options):
        given.append(splits)
        return flashgen.attention(*arrays, splits=splits, **options)

    monkeypatch.setattr(flash_attn_kvcache, "attention", attention)
    q, k, v = qkv(np.random.default_rng())
    found = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=filled, num_splits=num_splits, return_softmax_lse=True
    )
    close(found, expected(q, k[:, :filled], v[:, :filled]))
    assert given == [num_splits or "auto"]


def test_splits_that_no_kernel_can_make_are_refused_in_flash_attns_words():
    q, k, v = qkv(np.random.default_rng(), seqlen_q=70)
    with pytest.raises(errors.BadParam, match=r"^num_splits is 4, .*; pass 1, or 0 to let flashgen choose$"):
        flash_attn_with_kvcache(q, k, v, num_splits=4)


@pytest.mark.parametrize("wrong", [-1, None, "auto", 1.0, True])
def test_a_number_of_splits_that_is_none(wrong):
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.BadParam, match=r"^num_splits is "):
        flash_attn_with_kvcache(q, k, v, num_splits=wrong)


def test_neutral_values_change_nothing():
    q, k, v = qkv(np.random.default_rng())
    plain = flash_attn_func(q, k, v)
    neutral = {"dropout_p": 0, "softcap": 0, "alibi_slopes": None, "window_size": (-1, -1)}
    for deterministic in (False, True):
        assert np.array_equal(flash_attn_func(q, k, v, deterministic=deterministic, **neutral), plain)


X = np.zeros((2, 9, 3, 4, 32), np.float16)
Q, KV, ENDS = X[:, :, 0], X[:, :, 1:], np.array([0, 9, 18], np.int32)
# Calls of the functions, but for options.
CALLS = {
    "func": lambda **options: flash_attn_func(Q, Q, Q, **options),
    "qkvpacked": lambda **options: flash_attn_qkvpacked_func(X, **options),
    "kvpacked": lambda **options: flash_attn_kvpacked_func(Q, KV, **options),
    "varlen": lambda **options: flash_attn_varlen_func(
        *(x.reshape(18, 4, 32) for x in (Q, Q, Q)), ENDS, ENDS, 9, 9, **options
    ),
    "varlen_qkvpacked": lambda **options: flash_attn_varlen_qkvpacked_func(
        X.reshape(18, 3, 4, 32), ENDS, 9, **options
    ),
    "varlen_kvpacked": lambda **options: flash_attn_varlen_kvpacked_func(
        Q.reshape(18, 4, 32), KV.reshape(18, 2, 4, 32), ENDS, ENDS, 9, 9, **options
    ),
    "blocks": lambda **options: flash_attn_varlen_func(
        Q.reshape(18, 4, 32), Q, Q, ENDS, ENDS, 9, 9, block_table=np.array([[0], [1]], np.int32), **options
    ),
    "cache": lambda **options: flash_attn_with_kvcache(Q, Q, Q, **options),
    "new": lambda **options: flash_attn_with_kvcache(
        Q, *(np.zeros((2, 18, 4, 32), np.float16) for _ in "kv"), Q, Q, cache_seqlens=9, **options
    ),
}


@pytest.mark.parametrize("call", [name for name in CALLS if name not in ("cache", "new")])
def test_wrong_dropout_is_named(call):
    for dropout_p in (1, -0.1, np.zeros((9, 9), bool)):
        with pytest.raises(errors.BadParam, match=r"^dropout_p is (1|-0.1|array)"):
            CALLS[call](dropout_p=dropout_p)
    with pytest.raises(NotImplementedError, match=r"^return_attn_probs is True and dropout_p is 0.1"):
        CALLS[call](dropout_p=0.1, return_attn_probs=True)
    if call != "blocks":  # NumPy has no generator on the device
        with pytest.raises(errors.NullPointer, match=r"^dropout_seed is None and dropout_p is 0.1"):
            CALLS[call](dropout_p=0.1)


def test_dropout_is_of_torchs_generator():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 9, 4, 32, requires_grad=True) for _ in "qkv")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = flash_attn_func(q, k, v, 0.5)
        torch.manual_seed(5)
        second = flash_attn_func(q, k, v, 0.5, causal=False)
        other = flash_attn_func(q, k, v, 0.5)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    first.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("call", CALLS)
def test_options_are_named_as_flash_attn_does(call):
    """With advice that a caller of flash-attn can follow."""
    lse = "return_softmax_lse" if call in ("cache", "new") else "return_attn_probs"
    for option, message in (
        ({lse: None}, f"^{lse} is None; expected True or False"),
        ({"softcap": float("nan")}, r"^softcap is nan; .* or 0 for no cap$"),
        ({"softcap": True}, "^softcap is True"),
        ({"causal": np.zeros((9, 9), bool)}, "^causal is array"),
        ({"softmax_scale": -1.0}, r"^softmax_scale is -1\.0; .*\(negate q instead\)$"),
        ({"alibi_slopes": np.ones(3, np.float32)}, "^alibi_slopes has shape"),
    ):
        with pytest.raises(errors.FlashgenError, match=message):
            CALLS[call](**option)


class Capsules:
    """An array of DLPack, and nothing else."""

    __dlpack__, __dlpack_device__ = np.ones(3).__dlpack__, np.ones(3).__dlpack_device__


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_array_is_named(name):
    for wrong, error, message in (
        (Capsules(), errors.BadTensorDtype, f"^{name} has type Capsules, which has no shape; pass"),
        (None, errors.NullPointer, f"^{name} is None; expected an array"),
        ([1.0], errors.BadTensorDtype, f"^{name} has type list; expected an array"),
    ):
        with pytest.raises(error, match=message):
            flash_attn_func(**dict.fromkeys("qkv", Q) | {name: wrong})
    with pytest.raises(errors.BadTensorDtype, match=r"^cu_seqlens has type list"):
        flash_attn_varlen_qkvpacked_func(X[0], [0, 9], 9)


@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_nested_tensor_is_named(layout):
    torch = pytest.importorskip("torch")
    x = torch.nested.nested_tensor([torch.randn(n, 4, 32) for n in (3, 5)], layout=getattr(torch, layout))
    dense = torch.randn(2, 5, 4, 32)
    with pytest.raises(errors.BadParam, match=r"^k: a nested tensor was given; expected a dense one"):
        flash_attn_func(dense, x, x)
    with pytest.raises(errors.BadParam, match=r"^k_cache: a nested tensor was given"):
        flash_attn_with_kvcache(dense, x, x)


def test_parts_of_a_packed_array_are_named_by_it():
    with pytest.raises(errors.BadTensorShape, match=r"^kv has batch 2 but q has 1;"):
        flash_attn_kvpacked_func(Q[:1], KV)
    with pytest.raises(
        errors.BadTensorShape, match=r"^q has 4 heads, kv has 3; .* a positive multiple of the heads of kv$"
    ):
        flash_attn_kvpacked_func(Q, KV[..., :3, :])
    with pytest.raises(errors.BadTensorDtype, match=r"^qkv has dtype int64; supported"):
        flash_attn_qkvpacked_func(X.astype(np.int64))
    with pytest.raises(errors.BadTensorDtype, match=r"^kv has dtype fp32 but q has fp16"):
        flash_attn_varlen_kvpacked_func(
            Q.reshape(18, 4, 32), KV.reshape(18, 2, 4, 32).astype(np.float32), ENDS, ENDS, 9, 9
        )
    packed = X.reshape(18, 3, 4, 32)
    with pytest.raises(errors.BadTensorDtype, match=r"^cu_seqlens has dtype int64"):
        flash_attn_varlen_qkvpacked_func(packed, ENDS.astype(np.int64), 9)
    with pytest.raises(errors.BadParam, match=r"^sequence 1 has length 12; the bound max_seqlen is "):
        flash_attn_varlen_qkvpacked_func(packed, np.array([0, 6, 18], np.int32), 9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-7, -7), (3, 2)])
def test_a_window_may_be_an_array(window, causal):
    q, k, v = qkv(np.random.default_rng())
    expected = flash_attn_func(q, k, v, window_size=window, causal=causal)
    found = flash_attn_func(q, k, v, window_size=np.array(window), causal=causal)
    np.testing.assert_array_equal(found, expected)


def test_what_is_wrong_is_named_by_attention():
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.BadParam, match="window_size is 5"):
        flash_attn_func(q, k, v, window_size=5)
    with pytest.raises(errors.BadParam, match="softcap is nan"):
        flash_attn_func(q, k, v, softcap=float("nan"))
    with pytest.raises(errors.BadTensorShape, match=r"q has shape \(23, 4, 32\); expected \(batch, seqlen"):
        flash_attn_func(q[0], k[0], v[0])
    with pytest.raises(errors.BadTensorShape, match="k has"):
        flash_attn_func(q, k[0], v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_is_refused_by_name(name):
    torch = pytest.importorskip("torch")
    given = dict(zip("qkv", map(torch.from_numpy, qkv(np.random.default_rng())), strict=True))
    given[name].requires_grad_()
    packed, cu = [given[each][0] for each in "qkv"], torch.tensor([0, 5], dtype=torch.int32)
    blocks = packed[0], given["k"], given["v"]
    with pytest.raises(NotImplementedError, match=f"^{name} requires a gradient"):
        flash_attn_varlen_func(*blocks, cu, cu, 5, 5, block_table=torch.zeros(1, 1, dtype=torch.int32))
    cached = "q" if name == "q" else f"{name}_cache"
    with pytest.raises(NotImplementedError, match=f"^{cached} requires a gradient"):
        flash_attn_with_kvcache(given["q"], given["k"], given["v"])
    if name != "q":
        caches = [given[each].detach().clone() for each in "kv"]
        with pytest.raises(NotImplementedError, match=f"^{name} requires a gradient"):
            flash_attn_with_kvcache(given["q"], *caches, given["k"], given["v"], cache_seqlens=0)
    slopes = torch.ones(4, requires_grad=True)
    flash_attn_func(*given.values(), alibi_slopes=slopes).sum().backward()
    assert slopes.grad.shape == (4,)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes requires a gradient"):
        flash_attn_varlen_func(*packed, cu, cu, 5, 5, alibi_slopes=slopes)
    with torch.no_grad():
        flash_attn_varlen_func(*packed, cu, cu, 5, 5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_gradients(deterministic, monkeypatch):
    torch = pytest.importorskip("torch")
    from flashgen.call import autograd

    calls, compute = [], autograd.compute

    def watched(request, kind):
        options = dict(zip(request.operator.options, request.options, strict=True))
        if request.operator.name == "attention_backward":
            calls.append(options["deterministic"])
        return compute(request, kind)

    monkeypatch.setattr(autograd, "compute", watched)
    q, cu = torch.randn(2, 9, 4, 16, requires_grad=True), torch.tensor([0, 9, 18], dtype=torch.int32)
    flash_attn_func(q, q, q, deterministic=deterministic).sum().backward()
    rows = (q.flatten(0, 1),) * 3
    flash_attn_varlen_func(*rows, cu, cu, 9, 9, deterministic=deterministic).sum().backward()
    assert calls == [deterministic] * 2


def test_gradients_are_those_of_attention():
    """Also of arrays that are packed, and where rows are padded."""
    torch = pytest.importorskip("torch")
    qkv = torch.randn(2, 9, 3, 4, 18, requires_grad=True)
    q, k, v = (torch.nn.functional.pad(qkv[:, :, place], (0, 2)) for place in range(3))
    out = flashgen.attention(q, k, v, causal=True, softmax_scale=18**-0.5, softcap=2.0)[..., :18]
    weights = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, qkv, weights)
    options = {"causal": True, "softcap": 2.0, "deterministic": True}
    for out in (
        flash_attn_func(*qkv.unbind(2), **options),
        flash_attn_qkvpacked_func(qkv, **options),
        flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options),
    ):
        (found,) = torch.autograd.grad(out, qkv, weights, retain_graph=True)
        torch.testing.assert_close(found, expected)
    # The same rows as two packed sequences.
    cu, rows = torch.tensor([0, 9, 18], dtype=torch.int32), qkv.flatten(0, 1).unbind(1)
    packed = qkv.flatten(0, 1)
    for out in (
        flash_attn_varlen_func(*rows, cu, cu, 9, 9, **options),
        flash_attn_varlen_qkvpacked_func(packed, cu, 9, **options),
        flash_attn_varlen_kvpacked_func(packed[:, 0], packed[:, 1:], cu, cu, 9, 9, **options),
    ):
        (found,) = torch.autograd.grad(out, qkv, weights.flatten(0, 1), retain_graph=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("width", [32, 36])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensors_of_pytorch(dtype, width):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng()
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in qkv(rng, width, dtype=np.float32))
    slopes = rng.uniform(0, 0.5, 4).astype(np.float32)
    out, lse, _ = flash_attn_func(
        q, k, v, causal=True, alibi_slopes=torch.from_numpy(slopes), return_attn_probs=True
    )
    assert (type(out), out.dtype, lse.dtype) == (torch.Tensor, q.dtype, torch.float32)
    right = expected(*(x.float().numpy() for x in (q, k, v)), causal=True, slopes=slopes)
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 3e-5}[dtype]
    for x, y in zip((out.float(), lse), right, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=tolerance, atol=tolerance)
    right = flash_attn_func(q, k, v)
    for order in itertools.permutations(range(4)):
        turned = [x.permute(order).contiguous().permute(*np.argsort(order)) for x in (q, k, v)]
        assert torch.equal(flash_attn_func(*turned), right)


@pytest.mark.parametrize("width", [32, 36])
def test_arrays_of_jax(width):
    jax = pytest.importorskip("jax")
    q, k, v = qkv(np.random.default_rng(), width)
    out = flash_attn_func(*map(jax.numpy.asarray, (q, k, v)), causal=True)
    assert isinstance(out, jax.Array)
    close([np.asarray(out)], expected(q, k, v, causal=True)[:1])


def ends(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def some_lengths(rng, batch, most):
    """Of each sequence, one of them 0."""
    lengths = rng.integers(1, most + 1, batch)
    lengths[rng.integers(batch)] = 0
    return lengths


def paged(rng, sequences, page_size, capacity=None):
    """The rows of each sequence in pages among others, and the block table, garbage behind the last row."""
    needed = [-(-len(x) // page_size) for x in sequences]
    columns = max(needed) + 2 if capacity is None else capacity // page_size
    table = rng.choice([-7, 10**6], (len(sequences), columns)).astype(np.int32)
    pages = np.full((sum(needed) + columns * len(sequences), page_size, *sequences[0].shape[1:]), np.nan)
    pages = pages.astype(sequences[0].dtype)
    free = list(rng.permutation(len(pages)))
    for b, x in enumerate(sequences):
        for j in range(needed[b] if capacity is None else columns):
            table[b, j] = free.pop()
            part = x[j * page_size : (j + 1) * page_size]
            pages[table[b, j], : len(part)] = part
    return pages, table


VISIBLE = [
    {},
    {"causal": True},
    {"window_size": (6, 3)},
    {"causal": True, "window_size": (9, 5), "softcap": 2.0},
    {"softcap": 3.0, "softmax_scale": 0.3},
]


def oracle(q, k, v, options, slopes=None):
    """`expected` of one sequence without batch."""
    named = {"softmax_scale": "scale", "window_size": "window"}
    options = {named.get(name, name): value for name, value in options.items()}
    if not len(k):
        return np.zeros((*q.shape[:-1], v.shape[-1])), np.full((q.shape[1], len(q)), -np.inf)
    out, lse = expected(q[None], k[None], v[None], slopes=slopes, **options)
    return out[0], lse[0]


def slopes_of(kind, b):
    return kind if kind is None or kind.ndim == 1 else kind[b]


@pytest.mark.parametrize("slopes", [None, (4,), (5, 4)], ids=lambda shape: f"slopes{shape}")
@pytest.mark.parametrize("options", VISIBLE, ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 7, 16], ids=lambda size: f"pages{size}")
def test_sequences_of_several_lengths(array, page_size, options, slopes):
    """Packed, or with keys in pages; either side may be empty."""
    rng = np.random.default_rng()
    q_lengths, k_lengths = some_lengths(rng, 5, 20), some_lengths(rng, 5, 45)
    q, k, v = (x[0] for x in qkv(rng, seqlen_q=sum(q_lengths), seqlen_k=sum(k_lengths), batch=1))
    if slopes is not None:
        slopes = rng.uniform(0, 0.5, slopes).astype(np.float32)
    cu_q, cu_k = ends(q_lengths), ends(k_lengths)
    keys, values, table = k, v, None
    if page_size:
        seed = rng.integers(2**32)
        keys, table = paged(np.random.default_rng(seed), np.split(k, cu_k[1:-1]), page_size)
        values, _ = paged(np.random.default_rng(seed), np.split(v, cu_k[1:-1]), page_size)
    out, lse, probabilities = flash_attn_varlen_func(
        *map(array, (q, keys, values, cu_q, cu_k)),
        int(max(q_lengths)),
        array(np.array(max(k_lengths))),
        alibi_slopes=array(slopes) if slopes is not None else None,
        return_attn_probs=True,
        block_table=array(table) if page_size else None,
        **options,
    )
    assert probabilities is None
    assert (type(out), out.shape, lse.shape) == (type(array(q)), q.shape, (4, len(q)))
    for b in range(5):
        of_q, of_k = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        right = oracle(q[of_q], k[of_k], v[of_k], options, slopes_of(slopes, b))
        close((np.asarray(out)[of_q], np.asarray(lse)[:, of_q]), right)


@pytest.mark.parametrize("options", VISIBLE, ids=str)
@pytest.mark.parametrize("page_size", [None, 7], ids=lambda size: f"pages{size}")
def test_a_bound_that_is_too_small_cuts_no_key(array, page_size, options):
    rng = np.random.default_rng()
    k_lengths = [57, 3, 0, 20]
    q, k, v = (x[0] for x in qkv(rng, seqlen_q=20, seqlen_k=80, batch=1))
    cu_q, cu_k = ends([5] * 4), ends(k_lengths)
    paged_options = {}
    if page_size:
        seed = rng.integers(2**32)
        parts = [np.split(x, cu_k[1:-1]) for x in (k, v)]
        (k, table), (v, _) = (paged(np.random.default_rng(seed), part, page_size) for part in parts)
        paged_options = {"block_table": array(table)}
    given = [array(x) for x in (q, k, v, cu_q, cu_k)]
    call = partial(flash_attn_varlen_func, return_attn_probs=True, **paged_options, **options)
    right = call(*given, 5, 57)[:2]
    for bound in (0, 1, 7, 16, 56):
        for found, x in zip(call(*given, 5, bound)[:2], right, strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(x))


def test_more_queries_than_the_bound_allows_are_all_computed(array):
    rng = np.random.default_rng()
    q, k, v = (x[0] for x in qkv(rng, seqlen_q=57, seqlen_k=57, batch=1))
    cu = ends([50, 7])
    given = [array(x) for x in (q, k, v, cu, cu)]
    right = flash_attn_varlen_func(*given, 50, 50, causal=True)
    for bound in (0, 16, 28):
        found = flash_attn_varlen_func(*given, bound, 1, causal=True)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(right))
    with pytest.raises(errors.BadParam, match=r"^sequence 0 has length 50; the bound max_seqlen_q is "):
        flash_attn_varlen_func(*given, 29, 50, causal=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_reach_keys_past_a_bound(compiled):
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    q, k, v = (torch.randn(40, heads, 16) for heads in (4, 2, 2))
    cu = torch.tensor([0, 30, 40], dtype=torch.int32)

    def gradients(max_q, max_k):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        call = partial(flash_attn_varlen_func, causal=True, window_size=(25, 0))
        if compiled:
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        out = call(*leaves, cu, cu, max_q, max_k)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    right = gradients(30, 30)
    for bounds in ((30, 16), (16, 16), (1, 0)):
        for found, x in zip(gradients(*bounds), right, strict=True):
            torch.testing.assert_close(found, x, rtol=0, atol=0)


@pytest.mark.parametrize("width", [1, 20, 36])
def test_packed_sequences_of_any_head_dim(array, width):
    rng = np.random.default_rng()
    q, k, v = (x[0] for x in qkv(rng, width, seqlen_q=20, seqlen_k=30, batch=1))
    v = v[..., : width - width // 4]
    cu_q, cu_k = ends([12, 8]), ends([9, 21])
    given = [array(x) for x in (q, k, v, cu_q, cu_k)]
    out = flash_attn_varlen_func(*given, 12, 21, causal=True)
    assert out.shape == (20, 4, v.shape[-1])
    for b in range(2):
        of_q, of_k = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        close([np.asarray(out)[of_q]], expected(q[None, of_q], k[None, of_k], v[None, of_k], causal=True)[0])


def test_a_packed_batch_of_none():
    q, k, v = (x[0] for x in qkv(np.random.default_rng(), seqlen_q=0, seqlen_k=0, batch=1))
    assert flash_attn_varlen_func(q, k, v, ends([]), ends([]), 0, 0).shape == (0, 4, 32)


def test_what_is_wrong_with_packed_sequences_is_named():
    q, k, v = (x[0] for x in qkv(np.random.default_rng(), seqlen_q=41))
    cu = ends([20, 21])
    with pytest.raises(errors.NullPointer, match="cu_seqlens_k is None"):
        flash_attn_varlen_func(q, k, v, cu, None, 21, 21)
    with pytest.raises(errors.BadTensorShape, match=r"k has shape .*expected \(total_k, nheads_k"):
        flash_attn_varlen_func(q, k[None], v, cu, cu, 21, 21)
    with pytest.raises(errors.BadTensorShape, match=r"^cu_seqlens_k is for a batch of"):
        flash_attn_varlen_func(q, k, v, cu, cu[:2], 21, 21)
    with pytest.raises(errors.BadTensorShape, match=r"^cu_seqlens_k has shape .*expected \(batch \+ 1,\)$"):
        flash_attn_varlen_func(q, k, v, cu, cu[None], 21, 21)
    with pytest.raises(errors.BadParam, match=r"^max_seqlen_k is -1"):
        flash_attn_varlen_func(q, k, v, cu, cu, 21, -1)
    paged = {"block_table": np.zeros((2, 1), np.int64)}
    with pytest.raises(errors.BadTensorDtype, match=r"^block_table has dtype int64"):
        flash_attn_varlen_func(q, k[None], k[None], cu, cu, 21, 21, **paged)
    for dtype in (bool, np.int64):
        with pytest.raises(
            errors.BadTensorDtype, match=f"^cu_seqlens_k has dtype {np.dtype(dtype)}; expected"
        ):
            flash_attn_varlen_func(q, k[None], k[None], cu, cu.astype(dtype), 21, 21, **paged)
    with pytest.raises(
        errors.BadParam, match=r"^diff\(cu_seqlens_k\)\[1\] is 21; expected 0 to 20, the capacity of k"
    ):
        flash_attn_varlen_func(
            q, k[None, :20], k[None, :20], cu, cu, 21, 21, block_table=np.zeros((2, 1), np.int32)
        )
    with pytest.raises(errors.BadTensorDtype, match="cu_seqlens_q has dtype int64"):
        flash_attn_varlen_func(q, k, v, cu.astype(np.int64), cu, 21, 21)
    with pytest.raises(errors.BadParam, match=r"max_seqlen_q is 2\.5"):
        flash_attn_varlen_func(q, k, v, cu, cu, 2.5, 21)
    with pytest.raises(errors.BadTensorShape, match=r"v has shape .*expected \(num_blocks, page_block_size"):
        flash_attn_varlen_func(q, k[None], v, cu, cu, 21, 21, block_table=np.zeros((2, 1), np.int32))


def rotated(x, positions, cos, sin, interleaved):
    """x, (tokens, heads, width), in float64, each token by its row of the tables."""
    out, half = x.astype(np.float64), cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = out[..., first].copy(), out[..., second].copy()
    c, s = (table[positions][:, None].astype(np.float64) for table in (cos, sin))
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def tables(rng, rows, rotary_dim, dtype):
    if not rotary_dim:
        return None, None
    angles = rng.uniform(0, 6, (rows, rotary_dim // 2))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


@pytest.mark.parametrize("options", VISIBLE, ids=str)
@pytest.mark.parametrize("rotary", [(0, True), (16, True), (16, False), (32, False)], ids=str)
@pytest.mark.parametrize("cached", ["rows", "index", "pages1", "pages16"])
@pytest.mark.parametrize("seqlen_new", [1, 5])
def test_new_keys_go_into_the_cache_and_are_seen(array, seqlen_new, cached, rotary, options):
    """Rotated in the cache and for the queries; nothing but their places in the cache changes."""
    rng = np.random.default_rng()
    batch, capacity = 3, 48
    lengths = some_lengths(rng, batch, capacity - seqlen_new)
    q, k_new, v_new = qkv(rng, seqlen_q=seqlen_new, seqlen_k=seqlen_new, batch=batch)
    _, k_old, v_old = qkv(rng, seqlen_k=capacity, batch=batch)
    rotary_dim, interleaved = rotary
    cos, sin = tables(rng, capacity, rotary_dim, rng.choice([np.float16, np.float32]))
    slopes = rng.uniform(0, 0.5, (batch, 4)).astype(np.float32)
    index = table = None
    if cached.startswith("pages"):
        page_size, seed = int(cached[5:]), rng.integers(2**32)
        k_cache, table = paged(np.random.default_rng(seed), k_old, page_size, capacity)
        v_cache, _ = paged(np.random.default_rng(seed), v_old, page_size, capacity)
        places = [
            [(table[b, p // page_size], p % page_size) for p in range(lengths[b], lengths[b] + seqlen_new)]
            for b in range(batch)
        ]
        # What stands behind the last page is never read.
        for b in range(batch):
            table[b, -(-(lengths[b] + seqlen_new) // page_size) :] = rng.choice([-7, 10**6])
    else:
        index = rng.permutation(7)[:batch].astype(np.int32) if cached == "index" else None
        entry = np.arange(batch) if index is None else index
        k_cache, v_cache = (np.full((7, capacity, 2, 32), np.nan, np.float16) for _ in "kv")
        k_cache[entry], v_cache[entry] = k_old, v_old
        places = [[(entry[b], lengths[b] + i) for i in range(seqlen_new)] for b in range(batch)]
    before = [x.copy() for x in (q, k_new, v_new, k_cache, v_cache)]
    k_lengths = lengths.astype(np.int32)
    out, lse = flash_attn_with_kvcache(
        *map(array, (q, k_cache, v_cache, k_new, v_new)),
        rotary_cos=array(cos) if rotary_dim else None,
        rotary_sin=array(sin) if rotary_dim else None,
        cache_seqlens=array(k_lengths),
        cache_batch_idx=None if index is None else array(index),
        block_table=None if table is None else array(table),
        rotary_interleaved=interleaved,
        alibi_slopes=array(slopes),
        return_softmax_lse=True,
        **options,
    )
    assert np.array_equal(k_lengths, lengths)
    for x, y in zip((q, k_new, v_new), before[:3], strict=True):
        assert np.array_equal(x, y)
    moves = options.get("causal") or "window_size" in options
    for b in range(batch):
        where = tuple(np.array(places[b]).T)
        positions = lengths[b] + np.arange(seqlen_new)
        of_q, of_k = q[b], k_new[b]
        if rotary_dim:
            of_k = rotated(of_k, positions, cos, sin, interleaved)
            of_q = rotated(of_q, positions if moves else positions * 0 + lengths[b], cos, sin, interleaved)
        np.testing.assert_allclose(k_cache[where], of_k, atol=4e-3)
        assert np.array_equal(v_cache[where], v_new[b])
        k = np.concatenate([k_old[b, : lengths[b]], of_k])
        v = np.concatenate([v_old[b, : lengths[b]], v_new[b]])
        right = oracle(of_q, k, v, options, slopes[b])
        close((np.asarray(out)[b], np.asarray(lse)[b]), right)
        k_cache[where], v_cache[where] = before[3][where], before[4][where]
    assert np.array_equal(k_cache, before[3], equal_nan=True)
    assert np.array_equal(v_cache, before[4], equal_nan=True)


@pytest.mark.parametrize("cached", ["rows", "index", "pages"])
@pytest.mark.parametrize("given", ["array", "int", "none"])
def test_a_cache_without_new_keys(array, given, cached):
    rng = np.random.default_rng()
    batch, capacity, page_size = 3, 40, 8
    q, k, v = qkv(rng, seqlen_q=4, seqlen_k=capacity, batch=batch)
    lengths = {"array": some_lengths(rng, batch, capacity), "int": [17] * batch, "none": [capacity] * batch}
    lengths = np.array(lengths[given], np.int32)
    index = table = None
    k_cache, v_cache = np.concatenate([k, k]), np.concatenate([v, v])
    if cached == "index":
        index = np.array([5, 1, 1], np.int32)
        k, v = k_cache[index], v_cache[index]
    elif cached == "pages":
        seed = rng.integers(2**32)
        k_cache, table = paged(np.random.default_rng(seed), k, page_size, capacity)
        v_cache, _ = paged(np.random.default_rng(seed), v, page_size, capacity)
    before = [x.copy() for x in (k_cache, v_cache)]
    found = flash_attn_with_kvcache(
        *map(array, (q, k_cache, v_cache)),
        cache_seqlens={"array": array(lengths), "int": 17, "none": None}[given],
        cache_batch_idx=None if index is None else array(index),
        block_table=None if table is None else array(table),
        causal=True,
        return_softmax_lse=True,
    )
    for b in range(batch):
        right = oracle(q[b], k[b, : lengths[b]], v[b, : lengths[b]], {"causal": True})
        close([np.asarray(x)[b] for x in found], right)
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip((k_cache, v_cache), before, strict=True))


def test_an_int_says_where_new_keys_go(array):
    rng = np.random.default_rng()
    q, k, v = qkv(rng, seqlen_q=2)
    cut = [x[:, :29].copy() for x in (k, v)]
    caches = [np.pad(x[:, :27], ((0, 2), (0, 14), (0, 0), (0, 0))) for x in (k, v)]
    new = [x[:, 27:29].copy() for x in (k, v)]
    out = flash_attn_with_kvcache(*map(array, (q, *caches, *new)), cache_seqlens=27, causal=True)
    close([np.asarray(out)], expected(q, *cut, causal=True)[:1])
    for cache, x in zip(caches, cut, strict=True):
        assert np.array_equal(cache[:2, :29], x)
        assert not cache[2:].any()
        assert not cache[:, 29:].any()


def test_new_keys_and_queries_by_strides(array):
    """An array whose last dimension is not contiguous is copied, as in flash-attn; but never a cache."""
    q, k, v = qkv(np.random.default_rng(), seqlen_q=3, seqlen_k=3)
    turned = [np.ascontiguousarray(x.swapaxes(1, 3)).swapaxes(1, 3) for x in (q, k, v)]
    found = []
    for x, y, z in ((q, k, v), turned):
        caches = [np.zeros((2, 9, 2, 32), np.float16) for _ in "kv"]
        out = flash_attn_with_kvcache(*map(array, (x, *caches, y, z)), cache_seqlens=2)
        found.append([np.asarray(out), *caches])
    assert all(np.array_equal(x, y) for x, y in zip(*found, strict=True))
    with pytest.raises(errors.BadTensorStrides, match=r"^k_cache has strides"):
        flash_attn_with_kvcache(*map(array, (q, *turned[1:])), cache_seqlens=2)


def within_a_row(*given):
    """The same elements, 2 bytes behind a multiple of 16, in rows a multiple of 16 bytes apart."""
    return [np.pad(x, ((0, 0),) * (x.ndim - 1) + ((1, 7),))[..., 1:-7] for x in given]


def test_arrays_that_start_within_16_bytes_are_copied_but_no_cache(array):
    q, k, v = qkv(np.random.default_rng(), seqlen_q=3, seqlen_k=3)
    cu, found = array(ends([3, 3])), []
    for shifted in (lambda *given: given, within_a_row):
        given = list(map(array, shifted(q, k, v)))
        packed = list(map(array, shifted(*(x.reshape(6, *x.shape[2:]) for x in (q, k, v)))))
        caches = [np.zeros((2, 9, 2, 32), np.float16) for _ in "kv"]
        results = [
            flash_attn_func(*given),
            flash_attn_varlen_func(*packed, cu, cu, 3, 3),
            flash_attn_with_kvcache(given[0], *map(array, caches), *given[1:], cache_seqlens=2),
        ]
        found.append([*map(np.asarray, results), *caches])
    assert all(np.array_equal(x, y) for x, y in zip(*found, strict=True))
    with pytest.raises(errors.BadTensorStrides, match=r"^k_cache starts at address"):
        flash_attn_with_kvcache(*map(array, (q, *within_a_row(k, v))), cache_seqlens=2)


def test_a_table_of_blocks_may_have_any_strides():
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(2, 3, 4, 32), *torch.randn(2, 6, 8, 2, 32).unbind(0)
    table = torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32)[:2]
    found, expected = (
        flash_attn_with_kvcache(q, k, v, cache_seqlens=11, block_table=x)
        for x in (table.T.contiguous().T, table)
    )
    assert torch.equal(found, expected)
    cu_q, cu_k = (torch.tensor([0, one, 2 * one], dtype=torch.int32) for one in (3, 11))
    of_sequences = (
        flash_attn_varlen_func(q.flatten(0, 1), k, v, cu_q, cu_k, 3, 11, block_table=x)
        for x in (table.T.contiguous().T, table)
    )
    assert torch.equal(*of_sequences)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_cache_that_padding_would_copy_is_refused(name, dtype):
    q, k, v = qkv(np.random.default_rng(), 40, dtype=dtype)
    caches = {"k": k, "v": v}
    caches[name] = caches[name][..., :38]
    table, cu = np.zeros((2, 1), np.int32), ends([9, 9])
    with pytest.raises(errors.BadTensorShape, match=f"^{name}_cache has head_dim 38.*allocate it with 40"):
        flash_attn_with_kvcache(q, *caches.values())
    with pytest.raises(errors.BadTensorShape, match=f"^{name}_cache has head_dim 38"):
        flash_attn_with_kvcache(q, *caches.values(), cache_seqlens=3, block_table=table)
    with pytest.raises(errors.BadTensorShape, match=f"^{name} has head_dim 38"):
        flash_attn_varlen_func(q[0, :18], *caches.values(), cu, cu, 9, 9, block_table=table)


def test_the_way_out_of_a_narrow_cache_works():
    q, k, v = qkv(np.random.default_rng(), 36)
    padded = [np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 4))) for x in (q, k, v)]
    out = flash_attn_with_kvcache(*padded, cache_seqlens=30, softmax_scale=36**-0.5)[..., :36]
    close([out], expected(q, k[:, :30], v[:, :30])[:1])


NEW = {"k": np.ones((2, 3, 2, 32), np.float16), "v": np.ones((2, 3, 2, 32), np.float16)}
COS = {"rotary_cos": np.ones((41, 8), np.float16), "rotary_sin": np.ones((41, 8), np.float16)}


def test_parts_of_a_cache_that_differ_are_named_with_all_their_entries():
    q, k, v = qkv(np.random.default_rng())
    k_cache, v_cache = (np.concatenate([x, x]) for x in (k, v))
    for wrong in (v_cache[:3], v_cache[:, :9], v_cache[:, :, :1]):
        said = rf"v_cache has shape {wrong.shape} but k_cache has {k_cache.shape}; all but the last"
        with pytest.raises(errors.BadTensorShape, match=re.escape(said)):
            flash_attn_with_kvcache(q, k_cache, wrong, cache_seqlens=5)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"k": NEW["k"]}, errors.NullPointer, "v is None but k was given"),
        ({"v": NEW["v"]}, errors.NullPointer, "k is None but v was given"),
        (NEW, errors.NullPointer, "cache_seqlens is None but k was given"),
        (COS, errors.BadParam, "rotary_cos was given without k and v"),
        (NEW | {"rotary_sin": COS["rotary_sin"]}, errors.NullPointer, "rotary_cos is None but rotary_sin"),
        (NEW | {"cache_seqlens": 39}, errors.BadParam, "is 39; k_cache has room for 41 keys, and k has 3"),
        (NEW | {"cache_seqlens": 1, "window_size": 5}, errors.BadParam, "window_size is 5"),
        (NEW | {"cache_seqlens": 1, "softcap": float("inf")}, errors.BadParam, "softcap is inf"),
        (NEW | {"cache_seqlens": 1, "softmax_scale": float("nan")}, errors.BadParam, "softmax_scale is nan"),
        (NEW | {"cache_seqlens": 1, "alibi_slopes": np.ones(3, np.float32)}, errors.BadTensorShape,
         "^alibi_slopes has shape"),
        (NEW | {"cache_seqlens": np.array([1, 40], np.int32)}, errors.BadTensorShape,
         "sequence 1 has 40 tokens and gets 3"),
        (NEW | {"cache_seqlens": np.ones(2, np.int64)}, errors.BadTensorDtype, "^cache_seqlens has dtype"),
        (NEW | {"cache_seqlens": 1, "v": NEW["v"][..., :24]}, errors.BadTensorShape,
         "^v has .* but v_cache has"),
        (NEW | COS | {"cache_seqlens": 1, "rotary_sin": COS["rotary_sin"][:, :4]}, errors.BadTensorShape,
         "^rotary_sin has shape"),
        (NEW | COS | {"cache_seqlens": 1, "rotary_interleaved": None}, errors.BadParam,
         "^rotary_interleaved is None; expected True or False"),
        ({"cache_batch_idx": np.array([0, 1], np.int32), "block_table": np.zeros((2, 1), np.int32)},
         errors.BadParam, "^block_table and cache_batch_idx were given"),
        ({"block_table": np.zeros(2, np.int32)}, errors.BadTensorShape, "block_table has shape"),
        (NEW | COS | {"cache_seqlens": 1, "rotary_cos": COS["rotary_cos"][0]}, errors.BadTensorShape,
         r"^rotary_cos has shape \(8,\); expected \(seqlen_ro, rotary_dim / 2\)"),
        *(
            (
                COS | {name: NEW[name][:, :2] for name in "kv"} | {"cache_seqlens": 1} | moving,
                NotImplementedError,
                "^q has seqlen_q 3 but k has 2 new tokens",
            )
            for moving in ({"causal": True}, {"window_size": (4, 4)}, {"window_size": np.array([4, 4])})
        ),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_cache_is_written_to(given, error, message):
    q, k, v = qkv(np.random.default_rng(), seqlen_q=3)
    before = [x.copy() for x in (k, v)]
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(q, k, v, **given)
    assert all(np.array_equal(x, y) for x, y in zip((k, v), before, strict=True))


def test_a_cache_that_starts_within_16_bytes_is_refused_before_the_other_is_written_to():
    q, k, v = qkv(np.random.default_rng(), seqlen_q=3)
    before = k.copy()
    with pytest.raises(errors.BadTensorStrides, match="v_cache starts at address"):
        flash_attn_with_kvcache(q, k, *within_a_row(v), **NEW, cache_seqlens=2)
    assert np.array_equal(k, before)


def test_tables_whose_entries_lie_apart_are_copied(array):
    q, k, v = qkv(np.random.default_rng(), seqlen_k=48)
    index, table = np.array([[1, 9], [0, 9]], np.int32), np.array([[0, 9, 1, 9], [2, 9, 3, 9]], np.int32)
    k_pages, v_pages = (x.reshape(4, 24, *x.shape[2:]) for x in (k, v))
    for tables, (keys, values) in (
        ({"cache_batch_idx": array(index)[:, 0]}, (k[::-1], v[::-1])),
        ({"block_table": array(table)[:, ::2], "k_cache": array(k_pages), "v_cache": array(v_pages)}, (k, v)),
    ):
        caches = {"k_cache": array(k), "v_cache": array(v)} | tables
        out = flash_attn_with_kvcache(array(q), cache_seqlens=48, **caches)
        close([np.asarray(out)], expected(q, keys, values)[:1])


def test_a_cache_of_jax_is_read_but_not_written_to():
    jax = pytest.importorskip("jax")
    q, k, v = map(jax.numpy.asarray, qkv(np.random.default_rng()))
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=30)
    assert isinstance(out, jax.Array)
    close([np.asarray(out)], expected(*(np.asarray(x) for x in (q, k[:, :30], v[:, :30])))[:1])
    with pytest.raises(errors.BadParam, match="cannot be written to"):
        flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=2)
