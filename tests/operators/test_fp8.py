"""Attention of e4m3 codes: its contract, the CPU path against float64, its bound, PyTorch's graphs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

import flashgen
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import request_of
from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    DeviceTypeNotSupported,
    FlashgenError,
    NullPointer,
)
from flashgen.operators import fp8_reference
from flashgen.operators.fp8 import SCALES, normalise
from flashgen.runtime.arrays import view
from flashgen.runtime.hostarrays import host_array

SCALE = np.float32(2.0).reshape(1)


def codes(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(float8_e4m3fn)


def inputs(batch=2, queries=70, keys=90, heads=4, kv_heads=2, width=32, width_v=16):
    rng = np.random.default_rng(0)
    return (
        codes(rng, batch, queries, heads, width),
        codes(rng, batch, keys, kv_heads, width),
        codes(rng, batch, keys, kv_heads, width_v),
    )


def numbers(x, scale=None):
    of_heads = (
        1 if scale is None else np.repeat(scale, x.shape[-2] // scale.shape[-1], -1)[..., None, :, None]
    )
    return x.astype(np.float32) * of_heads


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 3)}], ids=str)
@pytest.mark.parametrize("of_q", [(4,), (2,), (1,), (), (2, 2), (1, 4)], ids=str)
def test_the_cpu_path_is_attention_of_the_numbers(of_q, options):
    q, k, v = inputs()
    rng = np.random.default_rng(1)
    of_q, of_k, of_v = (rng.uniform(0.5, 2, size).astype(np.float32) for size in (of_q, (2, 2), (2,)))
    out, lse = flashgen.attention(
        q, k, v, q_scale=of_q, k_scale=of_k, v_scale=of_v, **options, out_dtype="fp16", return_lse=True
    )
    whole = of_q.reshape(1, 1) if not of_q.ndim else np.broadcast_to(of_q, (2, of_q.shape[-1]))
    arrays = numbers(q, whole), numbers(k, of_k), numbers(v, np.broadcast_to(of_v, (2, 2)))
    expected, expected_lse = flashgen.attention(*arrays, **options, return_lse=True)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def by_columns(v):
    """The same array with contiguous tokens."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(v, -3, -1)), -1, -3)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 3)}], ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_tokens_of_v_may_be_contiguous(options, batched):
    q, k, v = (x if batched else x[0] for x in inputs(keys=96))
    columns = by_columns(v)
    assert columns.strides[-3] == 1
    assert np.array_equal(columns, v)
    results = [flashgen.attention(q, k, x, v_scale=SCALE, **options) for x in (v, columns)]
    assert np.array_equal(*results)


@pytest.mark.parametrize(
    ("keys", "change", "error", "words"),
    [
        (
            90,
            lambda v: by_columns(v),
            BadTensorShape,
            ["tokens are contiguous", "90 tokens", "multiple of 16"],
        ),
        (
            96,
            lambda v: np.moveaxis(np.zeros((2, 2, 16, 104), np.uint8).view(v.dtype)[..., :96], -1, 1),
            BadTensorStrides,
            ["tokens are contiguous", "multiples of 16"],
        ),
    ],
)
def test_a_v_of_contiguous_tokens_that_no_kernel_reads(keys, change, error, words):
    q, k, v = inputs(keys=keys)
    with pytest.raises(error) as raised:
        flashgen.attention(q, k, change(v), v_scale=SCALE)
    assert all(word in str(raised.value) for word in ["v ", *words])


def test_with_lengths_the_last_dimension_of_v_is_contiguous():
    q, k, v = inputs(keys=96)
    lengths = np.array([96, 50], np.int32)
    with pytest.raises(BadTensorStrides, match="with lengths or a KVCache"):
        flashgen.attention(q, k, by_columns(v), v_scale=SCALE, kv_lengths=lengths)


MASKS = {
    "array": lambda: np.random.default_rng(2).random((2, 1, 70, 90)) < 0.5,
    "line": lambda: flashgen.Mask("kv <= q + far[h]", far=np.array([3, -50, 9, 80], np.int32)),
    "blocks": lambda: flashgen.BlockMask(
        np.array([[[0, 1, 3]], [[3, 3, 4]]], np.int32), np.array([1, 0, 1, 1], np.int32), (64, 64)
    ),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_hide_keys_of_the_numbers_and_are_in_the_reference(mask):
    q, k, v = inputs()
    mask = MASKS[mask]()
    out, lse = flashgen.attention(q, k, v, q_scale=SCALE, mask=mask, out_dtype="fp16", return_lse=True)
    arrays = numbers(q) * SCALE, numbers(k), numbers(v)
    expected, expected_lse = flashgen.attention(*arrays, mask=mask, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    request = request_of(call_of(AttentionCall, q=q, k=k, v=v, q_scale=SCALE, mask=mask, return_lse=True))
    views = [None if x is None else view(x, "x") for x in request.arrays]
    problem = request.operator.contract(request.operator, views, request.options, request.scalars)
    named = {name: None if x is None else host_array(x) for name, x in request.by_name().items()}
    assert fp8_reference.judge(problem, named | {"out": out.astype(bfloat16), "lse": lse}).ok
    without = flashgen.attention(q, k, v, q_scale=SCALE)
    assert not fp8_reference.judge(problem, named | {"out": without, "lse": lse}).ok


OF_SCORES = (
    {"softcap": 0.7, "causal": True},
    {"sinks": np.float32([0.5, -1, 3, -np.inf])},
    {"alibi_slopes": np.float32([0.5, 0.25, 0.125, 1]), "window_size": (9, 2)},
)


@pytest.mark.parametrize("options", OF_SCORES, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("packed", [False, True])
def test_scores_sinks_and_lengths_are_of_the_numbers(options, packed):
    q, k, v = inputs()
    rng = np.random.default_rng(5)
    of_q, of_k, of_v = (rng.uniform(0.5, 2, size).astype(np.float32) for size in ((2, 4), (2, 2), (2, 2)))
    scales = dict(zip(SCALES, (of_q, of_k, of_v), strict=True))
    arrays = numbers(q, of_q), numbers(k, of_k), numbers(v, of_v)
    if packed:
        lengths = {
            "cu_seqlens_q": np.array([0, 33, 70], np.int32),
            "cu_seqlens_kv": np.array([0, 51, 90], np.int32),
        }

        def cut(x, ends):
            return np.concatenate([x[0, : ends[1]], x[1, ends[1] : ends[2]]])

        q, *codes_of_kv = cut(q, (0, 33, 70)), cut(k, (0, 51, 90)), cut(v, (0, 51, 90))
        k, v = codes_of_kv
        arrays = cut(arrays[0], (0, 33, 70)), *(cut(x, (0, 51, 90)) for x in arrays[1:])
    else:
        lengths = {"kv_lengths": np.array([90, 17], np.int32)}
        for x in (k, v):
            x.view(np.uint8)[1, 17:] = 0x7F
    out, lse = flashgen.attention(q, k, v, **scales, **lengths, **options, out_dtype="fp16", return_lse=True)
    expected, expected_lse = flashgen.attention(*arrays, **lengths, **options, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (4,), (2, 4)], ids=str)
def test_a_result_of_codes_is_the_result_quantised(shape):
    q, k, v = inputs()
    scale = np.random.default_rng(6).uniform(0.002, 0.01, shape).astype(np.float32)
    right = flashgen.attention(q, k, v, q_scale=SCALE, out_dtype="fp16").astype(np.float32)
    out = flashgen.attention(q, k, v, q_scale=SCALE, out_dtype="e4m3", out_scale=scale)
    assert out.dtype == float8_e4m3fn
    of_heads = np.broadcast_to(scale, (2, 4))[:, None, :, None]
    expected = np.clip(right, -448 * of_heads, 448 * of_heads)
    bound = np.maximum(0.07 * np.abs(expected), 0.002 * of_heads)
    assert (np.abs(out.astype(np.float32) * of_heads - expected) <= bound).all()
    codes = np.empty(out.shape, np.uint8)
    flashgen.attention(q, k, v, q_scale=SCALE, out_dtype="e4m3", out_scale=scale, out=codes)
    np.testing.assert_array_equal(codes, out.view(np.uint8))
    problem = normalise(
        **{name: view(x, name) for name, x in (("q", q), ("k", k), ("v", v), ("q_scale", SCALE))},
        out=view(out, "out"),
        out_scale=view(scale, "out_scale"),
    )
    arrays = {"q": q.view(np.uint8), "k": k.view(np.uint8), "v": v.view(np.uint8), "q_scale": SCALE}
    arrays |= {"out_scale": scale, "out": codes}
    assert fp8_reference.judge(problem, arrays).ok
    arrays["out"] = codes ^ 0x08  # the next binade, or half of it
    assert not fp8_reference.judge(problem, arrays).ok


def test_scales_of_quantize_fit_and_the_result_is_bfloat16():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, 100, 4, 32), np.float32) for _ in range(3))
    pairs = [flashgen.quantize(x, per=per) for x, per in ((q, "head"), (k, "head"), (v, "tensor"))]
    named = dict(zip(SCALES, (scale for _, scale in pairs), strict=True))
    out = flashgen.attention(*(x for x, _ in pairs), **named)
    assert out.dtype == bfloat16
    error = np.abs(out.astype(np.float32) - flashgen.attention(q, k, v))
    assert error.max() < 0.2
    of_bytes = flashgen.attention(*(x.view(np.uint8) for x, _ in pairs), **named, dtype="e4m3")
    np.testing.assert_array_equal(of_bytes.view(np.uint16), out.view(np.uint16))
    alone = flashgen.attention(*(x[0] for x, _ in pairs), **named)
    np.testing.assert_array_equal(alone.view(np.uint16), out[0].view(np.uint16))


def judged(accumulate="promoted", change=lambda out: out, **sizes):
    q, k, v = inputs(**sizes)
    out, lse = flashgen.attention(q, k, v, q_scale=SCALE, accumulate=accumulate, return_lse=True)
    views = {name: view(x, name) for name, x in (("q", q), ("k", k), ("v", v), ("q_scale", SCALE))}
    problem = normalise(**views, return_lse=True, accumulate=accumulate)
    arrays = {"q": q.view(np.uint8), "k": k.view(np.uint8), "v": v.view(np.uint8), "q_scale": SCALE}
    arrays |= {"out": change(out), "lse": lse}
    return problem, arrays, fp8_reference.judge(problem, arrays)


def test_the_reference_accepts_the_cpu_path_and_no_other_result():
    problem, arrays, verdict = judged()
    assert verdict.ok, verdict
    assert fp8_reference.error_over_noise(problem, arrays) < 0.03
    for change in (np.zeros_like, lambda out: np.roll(out, 1, axis=1)):
        assert not judged(change=change)[2].ok


def test_the_bound_ends_where_sums_are_never_promoted():
    sizes = {"batch": 1, "queries": 1, "keys": 8192, "heads": 1, "kv_heads": 1}
    bounds = {x: judged(x, **sizes)[2].out.bound for x in ("promoted", "fast")}
    assert np.isfinite(bounds["promoted"])
    assert np.isinf(bounds["fast"])


def of_cache(name, **fields):
    """A cache of three sequences, and what its keys and values are of each."""
    rng = np.random.default_rng(5)
    q, k, v = (codes(rng, *size) for size in ((3, 5, 4, 64), (4, 40, 2, 64), (4, 40, 2, 64)))
    lengths = np.array([7, 0, 40], np.int32)
    if name == "pages":
        k, v = (x.reshape(8, 20, 2, 64) for x in (k, v))
        pages = np.array([[3, 1], [0, 0], [2, 0]], np.int32)
        named, rows = {"pages": pages}, [[x[list(row)].reshape(40, 2, 64) for row in pages] for x in (k, v)]
    else:
        named, rows = {"index": np.array([2, 0, 3], np.int32)}, [x[[2, 0, 3]] for x in (k, v)]
    keys, values = ([x[b][:count] for b, count in enumerate(lengths)] for x in rows)
    return q, flashgen.KVCache(k, v, lengths, **named, **fields), keys, values


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 0)}], ids=len)
@pytest.mark.parametrize("name", ["rows", "pages"])
def test_a_cache_of_codes_is_a_call_of_each_sequence(name, options):
    rng = np.random.default_rng(6)
    of_q, of_k, of_v = ((rng.random(size) + 0.5).astype(np.float32) for size in ((3, 4), (3, 2), (2,)))
    q, cache, keys, values = of_cache(name, k_scale=of_k, v_scale=of_v)
    options = options | {"out_dtype": "fp16", "return_lse": True}
    out, lse = flashgen.attention(q, cache, q_scale=of_q, **options)
    assert not out[1].any()
    assert (lse[1] == -np.inf).all()
    for b in (0, 2):
        own = {"q_scale": of_q[b : b + 1], "k_scale": of_k[b : b + 1], "v_scale": of_v}
        right = flashgen.attention(q[b : b + 1], keys[b][None], values[b][None], **own, **options)
        np.testing.assert_array_equal(out[b], right[0][0])
        np.testing.assert_array_equal(lse[b], right[1][0])
    plan = flashgen.plan(q, cache, q_scale=of_q, **options)
    arrays = {"q": q, "k": cache.k, "v": cache.v, "kv_lengths": cache.lengths, "q_scale": of_q}
    arrays |= {x: getattr(cache, x) for x in ("pages", "index", "k_scale", "v_scale")}
    again, _ = plan(**{x: array for x, array in arrays.items() if array is not None})
    np.testing.assert_array_equal(again, out)


def test_a_cache_of_bytes_has_codes_by_its_kv_dtype():
    q, cache, *_ = of_cache("rows")
    in_bytes = dataclasses.replace(cache, k=cache.k.view(np.uint8), v=cache.v.view(np.uint8), kv_dtype="e4m3")
    out = flashgen.attention(q.view(np.uint8), in_bytes, q_scale=SCALE, out_dtype="fp16")
    right = flashgen.attention(q, cache, dtype="e4m3", q_scale=SCALE, out_dtype="fp16")
    np.testing.assert_array_equal(out, right)


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({}, {}, BadTensorDtype, "q has dtype e4m3, .* or e4m3 with q_scale or dtype='e4m3'"),
        ({"k_scale": np.ones((4, 40, 2), np.float32)}, {"q_scale": SCALE}, BadTensorShape,
         r"k_scale has shape \(4, 40, 2\), with scales of rows or tokens"),
        ({}, {"k_scale": SCALE}, BadParam, "k_scale was given with a KVCache, which has its own scales"),
        ({"starts": np.zeros(3, np.int32)}, {"dtype": "e4m3"}, BadParam, "starts and dtype were given"),
        ({"v": None, "head_dim_v": 32, "index": None}, {"dtype": "e4m3"}, BadParam,
         "k is a latent cache and"),
        ({}, {"dtype": "e4m3", "splits": 3}, BadParam, "splits is 3 and dtype was given"),
        ({}, {"q_scale": SCALE, "append": (None, None)}, BadParam, "append and q_scale were given; .* first"),
        ({"lengths": None}, {"dtype": "e4m3"}, NullPointer, "lengths of the KVCache is None"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_a_cache_of_codes_may_not_have_is_refused_by_name(fields, options, error, message):
    q, cache, *_ = of_cache("rows")
    with pytest.raises(error, match=message):
        flashgen.attention(q, dataclasses.replace(cache, **fields), **options)


def test_kernels_of_caches_and_packed_heads():
    lengths = {"lengths": (64,)}
    few = (64, 16, 32, 128)

    def taken(k, arch, **options):
        return flashgen.explain(few, k, dtype="e4m3", q_scale=(64, 32), arch=arch, **options).variant.name

    rows, pages, small = (64, 608, 2, 128), (640, 32, 2, 128), (640, 24, 2, 128)
    assert taken(rows, "sm_90") == "flash_fwd_fp8_hdim128_e4m3_promoted_packgqa_sm90"
    assert taken(rows, "sm_89") == "flash_fwd_fp8_hdim128_e4m3_promoted_packgqa_sm89"
    family = "flash_fwd_varlen_fp8_hdim128_e4m3_promoted"
    assert taken(flashgen.KVCache(rows, rows, **lengths), "sm_90") == f"{family}_packgqa_sm90"
    for size, arch in ((pages, "sm_90"), (small, "sm_89"), (pages, "sm_89")):
        cache = flashgen.KVCache(size, size, **lengths, pages=(64, 20))
        assert taken(cache, arch) == f"{family}_paged_packgqa_{arch.replace('_', '')}"
    cache = flashgen.KVCache(small, small, **lengths, pages=(64, 20))
    assert taken(cache, "sm_90") == f"{family}_paged_packgqa_sm89"


BAD = (
    ({}, BadTensorDtype, "q has dtype e4m3; attention of codes takes q_scale"),
    ({"q_scale": SCALE, "v": np.zeros((2, 90, 2, 16), np.float32)}, BadTensorDtype, "v has dtype fp32"),
    ({"q_scale": SCALE, "dtype": "e5m2"}, BadParam, "dtype is 'e5m2'"),
    ({"q_scale": SCALE.astype(np.float64)}, BadTensorDtype, "q_scale has dtype float64; expected fp32"),
    ({"q_scale": np.ones(3, np.float32)}, BadTensorShape, r"q_scale has shape \(3,\)"),
    ({"k_scale": np.ones(4, np.float32)}, BadTensorShape, r"k_scale has shape \(4,\)"),
    ({"v_scale": np.ones((3, 2), np.float32)}, BadTensorShape, r"v_scale has shape \(3, 2\)"),
    ({"k_scale": np.ones((2, 4), np.float32)[:, ::2]}, BadTensorStrides, "k_scale has strides"),
    ({"q_scale": -SCALE}, BadParam, "q_scale has an element that is not a finite number above 0"),
    ({"v_scale": SCALE * np.inf}, BadParam, "v_scale has an element"),
    ({"q_scale": SCALE, "accumulate": "slow"}, BadParam, "accumulate is 'slow'"),
    ({"q_scale": SCALE, "out_dtype": "fp32"}, BadParam, "out_dtype is 'fp32'"),
    ({"q_scale": SCALE, "out": np.empty((2, 70, 4, 16), np.float32)}, BadTensorDtype, "out has dtype fp32"),
    ({"dtype": "e4m3", "kv_lengths": np.array([3, 4], np.int32), "kv_starts": np.zeros(2, np.int32)},
     BadParam, "kv_starts and dtype were given"),
    ({"dtype": "e4m3", "kv_lengths": np.array([3, 91], np.int32)}, BadParam, r"kv_lengths\[1\] is 91"),
    ({"q_scale": SCALE, "sinks": np.zeros(3, np.float32)}, BadTensorShape, "sinks has shape"),
    ({"out_scale": SCALE}, BadParam, "out_scale was given, and the result has dtype bf16"),
    ({"out_scale": np.ones(2, np.float32), "out_dtype": "e4m3"}, BadTensorShape,
     r"out_scale has shape \(2,\)"),
    ({"q_scale": SCALE, "splits": 2}, BadParam, "splits is 2 and q_scale was given"),
    ({"dtype": "e4m3", "kv_lengths": np.array([3, 4], np.int32), "mask": flashgen.Mask("kv <= q")}, BadParam,
     "mask is a Mask and kv_lengths was given; no kernel has both"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_a_call_of_codes_may_not_have_is_refused_by_name(options, error, message):
    arrays = dict(zip("qkv", inputs(), strict=True)) | options
    with pytest.raises(error, match=message):
        flashgen.attention(**arrays)


def test_scales_are_for_codes_and_rows_for_whole_16_bytes():
    q, k, v = (x.astype(np.float16) for x in inputs())
    with pytest.raises(BadTensorDtype, match="q has dtype fp16; q_scale"):
        flashgen.attention(q, k, v, k_scale=SCALE)
    arrays = (x.view(np.uint8) for x in inputs())
    with pytest.raises(BadTensorDtype, match="pass dtype='e4m3' if it has e4m3 codes"):
        flashgen.attention(*arrays, q_scale=SCALE)
    with pytest.raises(BadTensorShape, match="e4m3 needs a multiple of 16"):
        flashgen.attention(*inputs(width=24), q_scale=SCALE)


def test_a_plan_keeps_the_dtype_of_its_result():
    q, k, v = inputs()
    plan = flashgen.plan(q, k, v, q_scale=SCALE)
    assert plan(q, k, v, q_scale=SCALE).dtype == bfloat16
    with pytest.raises(BadTensorDtype, match="out has dtype fp16; the plan was made for bf16"):
        plan(q, k, v, q_scale=SCALE, out=np.empty((2, 70, 4, 16), np.float16))


def test_gradients_are_refused_with_the_reason():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in inputs(width_v=32))
    scale = torch.from_numpy(SCALE)
    with pytest.raises(BadParam, match="rounding to a code has the derivative 0"):
        flashgen.attention(q.requires_grad_(), k, v, q_scale=scale)
    q = q.detach()
    out = flashgen.attention(q, k, v, q_scale=scale)
    with pytest.raises(FlashgenError, match="no gradients"):
        flashgen.attention_backward(out, q, k, v, out, torch.zeros(2, 4, 70))
    with pytest.raises(BadParam, match="rounding to a code has the derivative 0"):
        flashgen.attention_backward(out, q, k, v, out, torch.zeros(2, 4, 70), v_scale=scale)


def test_a_graph_of_torch_has_the_scales_and_the_dtype():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in inputs())
    scale = torch.from_numpy(SCALE)

    def call(*arrays, **options):
        return flashgen.attention(*arrays, q_scale=scale, v_scale=scale, **options)

    for options, dtype in (
        ({}, torch.bfloat16),
        ({"out_dtype": "float16"}, torch.float16),
        ({"out_dtype": "e4m3"}, torch.float8_e4m3fn),
    ):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        out = compiled(q, k, v, **options)
        assert out.dtype == dtype
        right = call(q, k, v, **options)
        assert torch.equal(out.view(torch.uint8), right.view(torch.uint8))


def test_kernels_are_refused_by_what_they_lack():
    from flashgen.errors import SpecError
    from flashgen.families.arch import typical
    from flashgen.families.load import load_specs
    from flashgen.schedule.dispatch import offers, select

    problem = normalise(*(view(x, "q") for x in inputs(width=64, width_v=64)))
    hopper, specs = typical("sm_90"), load_specs()
    assert select(problem, hopper, offers(problem, hopper, specs)).spec == "flash_fwd_fp8_sm90"
    ada, ampere = typical("sm_89"), typical("sm_86")
    assert select(problem, ada, offers(problem, ada, specs)).spec == "flash_fwd_fp8_sm89"
    with pytest.raises(DeviceTypeNotSupported, match=r"sm_86.* runs none of the variants .*need sm_89"):
        select(problem, ampere, offers(problem, ampere, specs))
    problem = dataclasses.replace(problem, mask_type="tree")
    with pytest.raises(SpecError, match=r"attention_fp8 for head_dim 64.* mask_type tree"):
        select(problem, hopper, offers(problem, hopper, specs))


@pytest.mark.parametrize(
    ("queries", "kv_heads", "options", "family"),
    [
        (4096, 16, {}, "flash_fwd_fp8_tiles"),
        (128, 16, {}, "flash_fwd_fp8"),
        (1024, 2, {"causal": True}, "flash_fwd_fp8_tiles"),
        (4096, 16, {"window_size": (100, 20)}, "flash_fwd_fp8"),
    ],
    ids=str,
)
def test_many_queries_of_a_head_of_keys_pay_for_a_transposition_of_v(queries, kv_heads, options, family):
    q, k = (4, queries, 16, 128), (4, 4096, kv_heads, 128)
    assert flashgen.explain(q, k, dtype="e4m3", arch="sm_90", **options).variant.family == family


def test_explain_takes_codes_by_their_dtype():
    explained = flashgen.explain((1, 1024, 16, 112), dtype="e4m3", causal=True, arch="sm_90")
    assert explained.variant.name == "flash_fwd_fp8_hdim128_e4m3_promoted_causal_sm90"
