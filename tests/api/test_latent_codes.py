"""Attention over latent caches of e4m3 codes, on the CPU: as over their numbers; what is refused, by name."""

import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape
from flashgen.operators.latentrows import LAYOUT, unpacked

SCALE = 0.07
LENGTHS = np.array([50, 7, 0, 33], np.int32)


def codes_of(rng, shape, scale):
    return (rng.standard_normal(shape) / scale).astype(ml_dtypes.float8_e4m3fn)


def packed_rows(rng, shape):
    """Random rows of the layout, and their elements."""
    rows = np.empty((*shape, 656), np.uint8)
    scales = rng.uniform(0.01, 0.1, (*shape, 4)).astype(np.float32)
    rows[..., :512] = codes_of(rng, (*shape, 512), 0.03).view(np.uint8)
    rows[..., 512:528] = scales.view(np.uint8)
    rotary = rng.standard_normal((*shape, 64)).astype(ml_dtypes.bfloat16)
    rows[..., 528:] = rotary.view(np.uint8)
    latent = rows[..., :512].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales.repeat(128, -1)
    return rows, np.concatenate([latent.astype(ml_dtypes.bfloat16), rotary], -1)


@pytest.mark.parametrize("scale", [None, (), (1,), (4, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_codes_are_read_as_codes_times_their_scale(scale, causal, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q = rng.standard_normal((4, 2, 12, 576)).astype(np.float16)
    k = codes_of(rng, (4, 60, 1, 576), 1.0)
    for b, length in enumerate(LENGTHS):
        k[b, length:] = np.nan
    options = {"causal": causal, "softmax_scale": SCALE, "return_lse": True}
    of_k = None if scale is None else rng.choice([0.25, 0.5, 2.0], scale).astype(np.float32)
    numbers = k.astype(np.float32)
    if of_k is not None:
        numbers *= np.broadcast_to(of_k, (4, 1))[..., None, None]
    right = flashgen.attention(
        q, flashgen.KVCache(numbers.astype(np.float16), None, LENGTHS, head_dim_v=512), **options
    )
    for cache in (
        flashgen.KVCache(k, None, LENGTHS, head_dim_v=512, k_scale=of_k),
        flashgen.KVCache(k.view(np.uint8), None, LENGTHS, head_dim_v=512, k_scale=of_k, kv_dtype="e4m3"),
    ):
        for x, y in zip(flashgen.attention(q, cache, **options), right, strict=True):
            np.testing.assert_array_equal(x, y)


def test_rows_that_carry_their_scales(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    rows, elements = packed_rows(rng, (9, 16, 1))
    np.testing.assert_array_equal(unpacked(rows), elements.view(np.uint16))
    table = rng.permutation(9).astype(np.int32)[:8].reshape(2, 4)
    lengths = np.array([50, 17], np.int32)
    q = rng.standard_normal((2, 2, 16, 576)).astype(ml_dtypes.bfloat16)
    options = {"softmax_scale": SCALE, "causal": True}
    right = flashgen.attention(q, flashgen.KVCache(elements, None, lengths, table, head_dim_v=512), **options)
    for k in (rows, rows.view(ml_dtypes.float8_e4m3fn)):
        cache = flashgen.KVCache(k, None, lengths, table, head_dim_v=512, kv_dtype=LAYOUT)
        np.testing.assert_array_equal(flashgen.attention(q, cache, **options), right)
        plan = flashgen.plan(q, cache, **options)
        np.testing.assert_array_equal(plan(q, k, kv_lengths=lengths, pages=table), right)


@pytest.mark.parametrize("layout", ["e4m3", LAYOUT])
def test_libraries_that_trace_see_the_same_call(layout, fresh_seed):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(fresh_seed)
    q = rng.standard_normal((4, 1, 8, 576)).astype(np.float32)
    k, scale = codes_of(rng, (4, 60, 1, 576), 1.0).view(np.uint8), np.asarray(0.3, np.float32)
    if layout == LAYOUT:
        (k, _), scale = packed_rows(rng, (4, 60, 1)), None

    def call(q, k, lengths, scale):
        cache = flashgen.KVCache(k, None, lengths, head_dim_v=512, k_scale=scale, kv_dtype=layout)
        return flashgen.attention(q, cache, softmax_scale=SCALE)

    def numbers(x):
        return np.asarray(x.float() if isinstance(x, torch.Tensor) else x, np.float32)

    right = numbers(call(q.astype(ml_dtypes.bfloat16), k, LENGTHS, scale))
    tensors = [x if x is None else torch.from_numpy(x) for x in (q, k, LENGTHS, scale)]
    tensors[0] = tensors[0].bfloat16()
    for found in (call, torch.compile(call, fullgraph=True, backend="eager")):
        np.testing.assert_array_equal(numbers(found(*tensors)), right)
    arrays = [x if x is None else jax.numpy.asarray(x) for x in (q, k, LENGTHS, scale)]
    arrays[0] = arrays[0].astype(jax.numpy.bfloat16)
    for found in (jax.jit(call), call):
        np.testing.assert_array_equal(numbers(found(*arrays)), right)


CODES = np.zeros((1, 8, 1, 576), ml_dtypes.float8_e4m3fn)
ROWS = np.zeros((1, 8, 1, 656), np.uint8)
ONE = np.array([8], np.int32)
Q = np.zeros((1, 1, 4, 576), ml_dtypes.bfloat16)
LIST = np.zeros((1, 1, 4), np.int32)
UNIT = np.ones((), np.float32)


@pytest.mark.parametrize(
    ("k", "options", "error", "words"),
    [
        (CODES, {"v_scale": UNIT}, BadParam, "v_scale was given and k is a latent cache"),
        (CODES, {"k_scale": np.ones(2, np.float32)}, BadTensorShape, "k_scale has shape"),
        (CODES, {"k_scale": np.ones((1, 8, 1), np.float32)}, BadTensorShape, "a latent cache takes"),
        (CODES, {"k_scale": np.zeros((), np.float32)}, BadParam, "k_scale has an element"),
        (CODES, {"k_scale": np.ones((), np.float16)}, BadTensorDtype, "k_scale has dtype fp16"),
        (CODES[..., :568], {}, BadTensorShape, "head_dim is 568"),
        (CODES, {"head_dim_v": 504}, BadTensorShape, "head_dim_v is 504"),
        (CODES.view(np.uint8), {}, BadTensorDtype, "k has dtype uint8"),
        (CODES, {"kv_dtype": "e5m2"}, BadParam, "kv_dtype is 'e5m2'"),
        (CODES.repeat(4, 2), {"k_scale": UNIT}, BadTensorShape, "k has 4 heads"),
        (ROWS, {"k_scale": UNIT, "kv_dtype": LAYOUT}, BadParam, "rows of fp8_ds_mla have their scales"),
        (CODES, {"kv_dtype": LAYOUT}, BadTensorShape, "have 656 bytes"),
        (ROWS, {"kv_dtype": LAYOUT, "head_dim_v": 256}, BadTensorShape, "head_dim_v is 256"),
        (ROWS.astype(np.float16), {"kv_dtype": LAYOUT}, BadTensorDtype, "k has dtype fp16"),
        (ROWS, {"kv_dtype": LAYOUT, "q": Q.astype(np.float16)}, BadTensorDtype, "q has dtype fp16"),
        (ROWS, {"kv_dtype": LAYOUT, "q": Q[..., :512]}, BadTensorShape, "q is of shape"),
        (CODES.view(np.uint8), {"indices": LIST, "k_scale": UNIT}, BadTensorDtype, "k has dtype uint8"),
        (CODES, {"indices": LIST, "k_scale": np.zeros((), np.float32)}, BadParam, "k_scale has an element"),
        (CODES, {"indices": LIST, "k_scale": np.ones(2, np.float32)}, BadTensorShape, "k_scale has shape"),
        (
            ROWS,
            {"indices": LIST, "kv_dtype": LAYOUT, "k_scale": UNIT},
            BadParam,
            "rows of fp8_ds_mla have their scales",
        ),
        (CODES, {"append": (CODES, CODES)}, flashgen.errors.FlashgenError, "v"),
        (ROWS, {"append": (ROWS, None), "kv_dtype": LAYOUT}, BadTensorDtype, "has dtype uint8"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_and_by_which_name(k, options, error, words):
    of_call = {"softmax_scale": SCALE}
    of_call |= {name: options[name] for name in ("append", "indices") if name in options}
    of_cache = {name: x for name, x in options.items() if name not in ("q", *of_call)}
    with pytest.raises(error, match=words):
        flashgen.attention(
            options.get("q", Q), flashgen.KVCache(k, None, ONE, **{"head_dim_v": 512} | of_cache), **of_call
        )
