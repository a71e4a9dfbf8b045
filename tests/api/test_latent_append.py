"""append and attention(append=) over latent caches: one row a token, whose last elements are rotated; rows of
FP8.
"""

import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer
from flashgen.operators.latentrows import LAYOUT, unpacked
from flashgen.simulator import hostcompiler

pytestmark = pytest.mark.once

simulated = pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
LENGTHS = np.array([5, 0, 19], np.int32)
WIDTH, VALUE, ROTARY, HEADS, NEW, SCALE = 96, 64, 32, 4, 2, 0.1


def numbers(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def cache_of(rng, paged):
    """A latent cache with room for 24 tokens a sequence, of rows or of pages of 8; unused slots are NaN."""
    k = np.full((3, 24, 1, WIDTH), np.nan, np.float16)
    for row, length in enumerate(LENGTHS):
        k[row, :length] = numbers(rng, length, 1, WIDTH)
    if not paged:
        return flashgen.KVCache(k, None, LENGTHS, head_dim_v=VALUE)
    table = rng.permutation(9).astype(np.int32).reshape(3, 3)
    k = k.reshape(9, 8, 1, WIDTH)[np.argsort(table.reshape(-1))]
    return flashgen.KVCache(k, None, LENGTHS, table, head_dim_v=VALUE)


def rotary_of(rng, interleaved):
    angles = rng.uniform(-3, 3, (24, ROTARY // 2))
    return flashgen.Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), interleaved)


def rotated(x, rotary):
    """x, (3, NEW, heads, WIDTH), at the positions after LENGTHS, by complex numbers."""
    x, cut = x.astype(np.float64), WIDTH - ROTARY
    part, half = x[..., cut:], ROTARY // 2
    pairs = (part[..., ::2], part[..., 1::2]) if rotary.interleaved else (part[..., :half], part[..., half:])
    rows = LENGTHS[:, None] + np.arange(NEW)
    turned = (pairs[0] + 1j * pairs[1]) * (rotary.cos + 1j * rotary.sin)[rows][:, :, None]
    if rotary.interleaved:
        last = np.stack((turned.real, turned.imag), -1).reshape(part.shape)
    else:
        last = np.concatenate((turned.real, turned.imag), -1)
    return np.concatenate((x[..., :cut], last), -1)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("simulator", marks=simulated)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_rows_are_written_rotated_and_read(interleaved, paged, backend, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    cache, new, q = cache_of(rng, paged), numbers(rng, 3, NEW, 1, WIDTH), numbers(rng, 3, NEW, HEADS, WIDTH)
    rotary = None if interleaved is None else rotary_of(rng, interleaved)
    before = cache.k.copy()
    total, q_rotated = flashgen.append(
        cache, new, rotary=rotary, q=None if rotary is None else q, backend=backend
    )
    np.testing.assert_array_equal(total, LENGTHS + NEW)
    rows = new if rotary is None else rotated(new, rotary)
    if rotary is not None:
        np.testing.assert_allclose(q_rotated, rotated(q, rotary), rtol=1e-3, atol=1e-5)
    right = before.copy()
    for b, length in enumerate(LENGTHS):
        for i in range(NEW):
            at = (cache.pages[b, (length + i) // 8], (length + i) % 8) if paged else (b, length + i)
            right[at] = rows[b, i]
    np.testing.assert_allclose(cache.k, right, rtol=1e-3, atol=1e-5)

    after = flashgen.KVCache(cache.k, None, total, cache.pages, head_dim_v=VALUE)
    options = {"softmax_scale": SCALE, "causal": True, "backend": backend}
    expected = flashgen.attention(q if rotary is None else q_rotated, after, **options)
    copies = [flashgen.KVCache(before.copy(), None, LENGTHS, cache.pages, head_dim_v=VALUE) for _ in range(2)]
    out = flashgen.attention(q, copies[0], append=(new, None), rotary=rotary, **options)
    plan = flashgen.plan(q, copies[1], append=(new, None), rotary=rotary, **options)
    for result, written in zip((out, plan(q, copies[1], (new, None), rotary=rotary)), copies, strict=True):
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(written.k.view(np.uint16), cache.k.view(np.uint16))


def rows_of_fp8(layout, rng):
    """An empty latent cache of FP8 with room for 24 tokens, and the numbers of its rows."""
    if layout == LAYOUT:
        k = np.full((3, 24, 1, 656), 0xFF, np.uint8)
        cache = flashgen.KVCache(k, None, LENGTHS, head_dim_v=512, kv_dtype=LAYOUT)
        return cache, lambda: unpacked(cache.k).view(ml_dtypes.bfloat16).astype(np.float64)
    scale = rng.uniform(0.01, 0.1, (3, 1)).astype(np.float32)
    k = np.full((3, 24, 1, 576), np.nan, ml_dtypes.float8_e4m3fn)
    cache = flashgen.KVCache(k, None, LENGTHS, head_dim_v=512, k_scale=scale)
    return cache, lambda: cache.k.astype(np.float64) * scale[..., None, None]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("simulator", marks=simulated)])
@pytest.mark.parametrize("layout", ["e4m3", LAYOUT])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_rows_of_fp8_are_written_and_read(interleaved, layout, backend, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    cache, numbers_of = rows_of_fp8(layout, rng)
    q, new = (rng.standard_normal((3, NEW, heads, 576)).astype(ml_dtypes.bfloat16) for heads in (HEADS, 1))
    angles = rng.uniform(-3, 3, (24, 32))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rotary = None if interleaved is None else flashgen.Rotary(*tables, interleaved)
    # In float64, of which `append` of 16 bits is the reference.
    exact = flashgen.KVCache(np.zeros((3, 24, 1, 576), ml_dtypes.bfloat16), None, LENGTHS, head_dim_v=512)
    _, of_q = flashgen.append(exact, new, rotary=rotary, q=None if rotary is None else q, backend="cpu")
    total, q_rotated = flashgen.append(
        cache, new, rotary=rotary, q=None if rotary is None else q, backend=backend
    )
    if rotary is not None:
        np.testing.assert_allclose(q_rotated.astype(float), of_q.astype(float), rtol=1e-2, atol=1e-3)
    written = np.zeros((3, 24), bool)
    for b, length in enumerate(LENGTHS):
        written[b, length : length + NEW] = True
    found, right = numbers_of()[written], exact.k.astype(np.float64)[written]
    # A code has 4 bits of fraction, and the smallest ones steps of 2^-9 of a scale of at most 0.1.
    np.testing.assert_allclose(found, right, rtol=0.07, atol=2e-3)
    if layout == LAYOUT:
        np.testing.assert_allclose(found[..., 512:], right[..., 512:], rtol=1e-2, atol=1e-6)
    assert (cache.k.view(np.uint8)[~written] == (0xFF if layout == LAYOUT else 0x7F)).all()
    fields = {"head_dim_v": 512, "k_scale": cache.k_scale, "kv_dtype": cache.kv_dtype}
    first = np.where(written[..., None, None], cache.k.view(np.uint8), 0).view(cache.k.dtype)
    after = flashgen.KVCache(first, None, total, **fields)
    options = {"softmax_scale": SCALE, "causal": True, "backend": backend}
    expected = flashgen.attention(q if rotary is None else q_rotated, after, **options)
    again = flashgen.KVCache(np.zeros_like(first), None, LENGTHS, **fields)
    out = flashgen.attention(q, again, append=(new, None), rotary=rotary, **options)
    np.testing.assert_array_equal(again.k.view(np.uint8), first.view(np.uint8))
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_rows_of_fp8_in_libraries_that_trace(fresh_seed):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(fresh_seed)
    q, new = (rng.standard_normal((3, NEW, heads, 576)).astype(np.float32) for heads in (HEADS, 1))
    angles = rng.uniform(-3, 3, (24, 32)).astype(np.float32)
    k = np.zeros((3, 24, 1, 656), np.uint8)

    def call(q, new, k, lengths, cos, sin):
        cache = flashgen.KVCache(k, None, lengths, head_dim_v=512, kv_dtype=LAYOUT)
        rotary = flashgen.Rotary(cos, sin)
        return flashgen.attention(
            q, cache, append=(new, None), rotary=rotary, causal=True, softmax_scale=SCALE
        )

    arrays = q, new, k, LENGTHS, np.cos(angles), np.sin(angles)
    written = k.copy()
    right = call(*(x.astype(ml_dtypes.bfloat16) for x in (q, new)), written, *arrays[3:])
    for function in (call, torch.compile(call, fullgraph=True, backend="eager")):
        tensors = [torch.from_numpy(x.copy()) for x in arrays]
        tensors[:2] = [x.bfloat16() for x in tensors[:2]]
        np.testing.assert_array_equal(function(*tensors).float().numpy(), right.astype(np.float32))
        np.testing.assert_array_equal(tensors[2].numpy(), written)
    on_jax = [jax.numpy.asarray(x) for x in arrays]
    on_jax[:2] = [x.astype(jax.numpy.bfloat16) for x in on_jax[:2]]
    out, of_jax = jax.jit(call)(*on_jax)
    np.testing.assert_array_equal(np.asarray(out, np.float32), right.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(of_jax.k), written)


def test_packed_tokens_and_libraries_that_trace(fresh_seed):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(fresh_seed)
    cache, q, new = cache_of(rng, True), numbers(rng, 6, HEADS, WIDTH), numbers(rng, 6, 1, WIDTH)
    rotary, ends = rotary_of(rng, False), np.array([0, 3, 3, 6], np.int32)
    arrays = q, new, cache.k, LENGTHS, cache.pages, ends, rotary.cos, rotary.sin

    def call(q, new, k, lengths, pages, ends, cos, sin):
        cache = flashgen.KVCache(k, None, lengths, pages, head_dim_v=VALUE)
        return flashgen.attention(
            q,
            cache,
            append=(new, None),
            rotary=flashgen.Rotary(cos, sin),
            cu_seqlens_q=ends,
            causal=True,
            softmax_scale=SCALE,
        )

    written = cache.k.copy()
    right = call(*arrays[:2], written, *arrays[3:])
    assert np.isfinite(right).all()
    for function in (call, torch.compile(call, fullgraph=True, backend="eager")):
        tensors = [torch.from_numpy(x.copy()) for x in arrays]
        np.testing.assert_array_equal(function(*tensors).numpy(), right)
        np.testing.assert_array_equal(tensors[2].numpy().view(np.uint16), written.view(np.uint16))
    out, of_jax = jax.jit(call)(*map(jax.numpy.asarray, arrays))
    np.testing.assert_array_equal(np.asarray(out), right)
    np.testing.assert_array_equal(np.asarray(of_jax.k).view(np.uint16), written.view(np.uint16))
    assert of_jax.v is None


ROW = np.zeros((3, 1, 1, WIDTH), np.float16)
TABLE = np.zeros((24, 24), np.float16)
CODES = np.zeros((3, 24, 1, WIDTH), ml_dtypes.float8_e4m3fn)
OF_ROWS = {"k": np.zeros((3, 24, 1, 656), np.uint8), "head_dim_v": 512, "kv_dtype": "fp8_ds_mla"}
LONG_ROW = np.zeros((3, 1, 1, 576), ml_dtypes.bfloat16)
NO_VALUES = np.zeros((3, 24, 1, 0), np.float16)


@pytest.mark.parametrize(
    ("changes", "options", "error", "words"),
    [
        ({}, {"v_new": ROW}, BadParam, "v_new was given, and the cache is latent"),
        ({"v": ROW}, {}, BadParam, "it has v"),
        ({"head_dim_v": None}, {}, NullPointer, "v_new is None"),
        ({"head_dim_v": None, "v": NO_VALUES}, {"v_new": NO_VALUES[:, :1]}, BadTensorShape, "head_dim_v"),
        ({"head_dim_v": 0}, {}, BadTensorShape, "head_dim_v is 0"),
        ({"head_dim_v": 104}, {}, BadTensorShape, "head_dim_v is 104"),
        ({"head_dim_v": "wide"}, {}, BadParam, "head_dim_v of the KVCache is 'wide'"),
        ({}, {"k_new": ROW[..., :88]}, BadTensorShape, "k_new has 1 heads of 88 elements"),
        ({"k": ROW.repeat(2, 2)}, {"k_new": ROW.repeat(2, 2)}, BadTensorShape, "k_new has 2 heads"),
        ({}, {"k_new": ROW.astype(np.float32)}, BadTensorDtype, "k_new has dtype fp32"),
        ({"k": CODES, "kv_dtype": "e5m2"}, {}, BadParam, "kv_dtype is 'e5m2'"),
        ({"k": CODES}, {"k_new": ROW[..., :88]}, BadTensorShape, "k_new has 1 heads of 88 elements"),
        ({"k": CODES[..., :88]}, {"k_new": ROW[..., :88]}, BadTensorShape, "head_dim is 88"),
        ({"k": CODES}, {"k_new": ROW.astype(np.float32)}, BadTensorDtype, "k_new has dtype fp32"),
        ({"k": CODES, "v_scale": np.ones((), np.float32)}, {}, BadParam, "v_scale was given, and the cache"),
        ({"k": CODES, "k_scale": np.ones((3, 24, 1), np.float32)}, {}, BadTensorShape,
         "a latent cache takes"),
        ({"k": CODES, "k_scale": np.zeros((), np.float32)}, {}, BadParam, "k_scale has an element"),
        (OF_ROWS, {}, BadTensorDtype, "k_new has dtype fp16; for rows of fp8_ds_mla it is bf16"),
        (OF_ROWS, {"k_new": LONG_ROW[..., :512]}, BadTensorShape, "k_new is of shape"),
        (OF_ROWS | {"head_dim_v": 256}, {"k_new": LONG_ROW}, BadTensorShape, "head_dim_v is 256"),
        (OF_ROWS | {"k": CODES}, {"k_new": LONG_ROW}, BadTensorShape, "have 656 bytes"),
        (OF_ROWS | {"k_scale": np.ones((), np.float32)}, {"k_new": LONG_ROW}, BadParam,
         "rows of fp8_ds_mla have their scales"),
        (OF_ROWS | {"head_dim_v": None, "v": np.zeros((3, 24, 1, 656), np.uint8)},
         {"k_new": LONG_ROW, "v_new": LONG_ROW}, BadParam,
         "kv_dtype is 'fp8_ds_mla', of rows of a latent cache"),
        (OF_ROWS, {"k_new": LONG_ROW, "rotary": flashgen.Rotary(*[np.zeros((24, 40), np.float32)] * 2)},
         BadTensorShape, "64 elements of a row"),
        ({"k_scale": np.ones(1, np.float32)}, {}, BadParam, "k_scale was given"),
        ({}, {"rotary": flashgen.Rotary(TABLE, TABLE)}, BadTensorShape, "32 elements of a row"),
        ({"starts": LENGTHS}, {"rotary": flashgen.Rotary(TABLE, TABLE)}, BadParam, "has starts"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_is_refused_and_by_which_name(changes, options, error, words):
    fields = {
        "k": np.zeros((3, 24, 1, WIDTH), np.float16),
        "v": None,
        "lengths": LENGTHS,
        "head_dim_v": VALUE,
    }
    call = {"k_new": ROW} | options
    with pytest.raises(error, match=words):
        flashgen.append(flashgen.KVCache(**fields | changes), **call)


def test_a_plan_refuses_a_cache_of_other_values(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    cache, q, new = cache_of(rng, False), numbers(rng, 3, 1, HEADS, WIDTH), numbers(rng, 3, 1, 1, WIDTH)
    plan = flashgen.plan(q, cache, append=(new, None), softmax_scale=SCALE)
    other = flashgen.KVCache(cache.k, None, LENGTHS, head_dim_v=32)
    with pytest.raises(BadParam, match="head_dim_v of the KVCache is 32; the plan was made with 64"):
        plan(q, other, (new, None))
