"""flash-attn's signatures: what is expected is flash-attn's definition, written down in NumPy."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from flashgen import errors
from flashgen.compat import flash_attn as compat
from flashgen.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

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
LENGTHS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), inspect.Parameter.empty
)
SIGNATURES = {
    "flash_attn_func": dict.fromkeys("qkv", inspect.Parameter.empty) | COMMON,
    "flash_attn_qkvpacked_func": {"qkv": inspect.Parameter.empty} | COMMON,
    "flash_attn_kvpacked_func": dict.fromkeys(("q", "kv"), inspect.Parameter.empty) | COMMON,
    "flash_attn_varlen_func": dict.fromkeys("qkv", inspect.Parameter.empty)
    | LENGTHS
    | COMMON
    | {"block_table": None},
    "flash_attn_with_kvcache": dict.fromkeys(("q", "k_cache", "v_cache"), inspect.Parameter.empty)
    | dict.fromkeys(
        ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad")
    )
    | {"block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    | {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_stand_in_flash_attns_order_with_its_defaults(name):
    found = inspect.signature(getattr(compat, name)).parameters.values()
    assert [(each.name, each.default) for each in found] == list(SIGNATURES[name].items())


@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)], ids=lambda shape: f"slopes{shape}")
@pytest.mark.parametrize("softcap", [0.0, -1.0, 2.5])
@pytest.mark.parametrize("window", [(-1, -1), (9, -1), (-1, 3), (9, 3), [-7, -1]], ids=str)
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


def test_arrays_whose_last_dimension_is_not_contiguous_are_served():
    q, k, v = qkv(np.random.default_rng())
    turned = [np.ascontiguousarray(x.swapaxes(1, 3)).swapaxes(1, 3) for x in (q, k, v)]
    assert all(x.strides[-1] != x.itemsize for x in turned)
    assert np.array_equal(flash_attn_func(*turned, causal=True), flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("width", [32, 20])
def test_packed_forms_are_the_plain_one(width):
    rng = np.random.default_rng()
    x = rng.standard_normal((2, 33, 3, 4, width), np.float32).astype(np.float16)
    options = {
        "softmax_scale": 0.2,
        "causal": True,
        "window_size": (11, 0),
        "softcap": 3.0,
        "return_attn_probs": True,
    }
    plain = flash_attn_func(x[:, :, 0], x[:, :, 1], x[:, :, 2], **options)
    for found in (
        flash_attn_qkvpacked_func(x, **options),
        flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], **options),
    ):
        assert found[2] is None
        assert all(np.array_equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))
    with pytest.raises(errors.BadTensorShape, match=r"kv has shape .*expected \(batch, seqlen, 2, nheads_k"):
        flash_attn_kvpacked_func(x[:, :, 0], x)
    with pytest.raises(errors.BadTensorShape, match=r"qkv has shape .*expected \(batch, seqlen, 3, nheads"):
        flash_attn_qkvpacked_func(x[:, :, 0])


@pytest.mark.parametrize("length", [None, 0, 1, 29, 41, np.int64(17)], ids=str)
@pytest.mark.parametrize("width", [32, 20])
def test_a_cache_is_read_up_to_its_length_in_the_entries_of_q(width, length):
    rng = np.random.default_rng()
    q, k, v = qkv(rng, width, seqlen_q=3)
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


def test_a_cache_of_fewer_entries_than_q_is_refused():
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.BadTensorShape, match="v_cache has 1 entries; q has 2"):
        flash_attn_with_kvcache(q, k, v[:1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", np.zeros((2, 1, 2, 32), np.float16)),
        ("v", np.zeros((2, 1, 2, 32), np.float16)),
        ("rotary_cos", np.zeros((41, 16), np.float16)),
        ("rotary_sin", np.zeros((41, 16), np.float16)),
        ("cache_seqlens", np.array([3, 4], np.int32)),
        ("cache_batch_idx", np.array([1, 0], np.int32)),
        ("cache_leftpad", np.array([1, 0], np.int32)),
        ("block_table", np.zeros((2, 1), np.int32)),
        ("num_splits", 1),
    ],
)
def test_what_a_cache_cannot_do_is_named(name, value):
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(NotImplementedError, match=f"^{name} "):
        flash_attn_with_kvcache(q, k, v, **{name: value})


@pytest.mark.parametrize("dropout_p", [0.1, 1])
def test_dropout_is_named(dropout_p):
    q, k, v = qkv(np.random.default_rng())
    x = np.zeros((2, 9, 3, 4, 32), np.float16)
    calls = [
        lambda: flash_attn_func(q, k, v, dropout_p),
        lambda: flash_attn_qkvpacked_func(x, dropout_p),
        lambda: flash_attn_kvpacked_func(q, x[:, :, 1:], dropout_p),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=f"dropout_p is {dropout_p}"):
            call()


def test_variable_lengths_are_named():
    q, k, v = (x[0] for x in qkv(np.random.default_rng(), seqlen_q=41))
    cu = np.array([0, 20, 41], np.int32)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q and cu_seqlens_k"):
        flash_attn_varlen_func(q, k, v, cu, cu, 21, 21)


def test_neutral_values_change_nothing():
    q, k, v = qkv(np.random.default_rng())
    plain = flash_attn_func(q, k, v)
    neutral = {"dropout_p": 0, "softcap": 0, "alibi_slopes": None, "window_size": (-1, -1)}
    for deterministic in (False, True):
        assert np.array_equal(flash_attn_func(q, k, v, deterministic=deterministic, **neutral), plain)


def test_what_is_wrong_is_named_by_attention():
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.BadParam, match="window_size is 5"):
        flash_attn_func(q, k, v, window_size=5)
    with pytest.raises(errors.BadParam, match="softcap is nan"):
        flash_attn_func(q, k, v, softcap=float("nan"))
    with pytest.raises(errors.BadTensorShape, match=r"q has shape \(23, 4, 32\); expected \(batch, seqlen"):
        flash_attn_func(q[0], k[0], v[0])
    with pytest.raises(errors.BadTensorShape, match="k has"):
        flash_attn_func(q, None, v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_is_refused_by_name(name):
    torch = pytest.importorskip("torch")
    given = dict(zip("qkv", map(torch.from_numpy, qkv(np.random.default_rng())), strict=True))
    plain = flash_attn_func(**given)
    given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name} requires a gradient"):
        flash_attn_func(**given)
    cached = "q" if name == "q" else f"{name}_cache"
    with pytest.raises(NotImplementedError, match=f"^{cached} requires a gradient"):
        flash_attn_with_kvcache(given["q"], given["k"], given["v"])
    with torch.no_grad():
        assert torch.equal(flash_attn_func(**given), plain)


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
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*turned), flash_attn_func(q, k, v))


@pytest.mark.parametrize("width", [32, 36])
def test_arrays_of_jax(width):
    jax = pytest.importorskip("jax")
    q, k, v = qkv(np.random.default_rng(), width)
    out = flash_attn_func(*map(jax.numpy.asarray, (q, k, v)), causal=True)
    assert isinstance(out, jax.Array)
    close([np.asarray(out)], expected(q, k, v, causal=True)[:1])
