"""FlashMLA's functions: beside a formula in float64, beside flashgen.attention for caches in FP8 and lists of
tokens, under the names and errors of its signature.
"""

import ml_dtypes
import numpy as np
import pytest

import flashgen
from api.test_latent_codes import packed_rows
from flashgen.compat import flash_mla
from flashgen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer

LENGTHS = np.array([150, 3, 0], np.int32)
HEADS, WIDTH, VALUE = 6, 576, 512


def arrays(seed):
    """q, a cache in blocks of 64 whose unused rows are NaN, its block table, the rows of each sequence."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((3, 2, HEADS, WIDTH)).astype(np.float16)
    rows = [rng.standard_normal((length, WIDTH)).astype(np.float16) for length in LENGTHS]
    cache, table = np.full((5, 64, 1, WIDTH), np.nan, np.float16), np.full((3, 4), 1 << 30, np.int32)
    table[0, :3], table[1, 0] = (4, 0, 2), 1
    for x, blocks in zip(rows, table, strict=True):
        for place in range(0, len(x), 64):
            part = x[place : place + 64]
            cache[blocks[place // 64], : len(part), 0] = part
    return q, cache, table, rows


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_results_are_of_the_formula(library, causal, scale, fresh_seed):
    q, cache, table, rows = arrays(fresh_seed)
    call = [q, cache, table, LENGTHS]
    if library == "torch":
        call = [*map(pytest.importorskip("torch").from_numpy, call)]
    metadata, num_splits = get_mla_metadata(call[3], 2 * HEADS, 1)
    out, lse = flash_mla_with_kvcache(*call, VALUE, metadata, num_splits, scale, causal)
    assert out.shape == (3, 2, HEADS, VALUE)
    assert lse.shape == (3, HEADS, 2)
    for b, x in enumerate(rows):
        keys = x.astype(np.float64)
        scores = np.einsum("qhd,kd->hqk", q[b].astype(np.float64), keys) * (scale or WIDTH**-0.5)
        if causal:
            scores[:, np.tri(2, len(x), len(x) - 2) == 0] = -np.inf
        weights = np.exp(scores)
        total = weights.sum(-1)
        right = np.einsum("hqk,kd->qhd", weights / np.where(total, total, 1)[..., None], keys[:, :VALUE])
        np.testing.assert_allclose(np.asarray(out[b]), right, atol=4e-3)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(np.asarray(lse[b]), np.log(total), atol=1e-4)


def test_tables_and_q_of_any_strides(fresh_seed):
    torch = pytest.importorskip("torch")
    q, cache, table, lengths = (*map(torch.from_numpy, arrays(fresh_seed)[:3]), torch.from_numpy(LENGTHS))
    right = flash_mla_with_kvcache(q, cache, table, lengths, VALUE, *get_mla_metadata())
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    strided = table.T.contiguous().T, torch.stack((lengths, lengths), 1)[:, 0]
    found = flash_mla_with_kvcache(shifted, cache, *strided, VALUE, *get_mla_metadata())
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_fp8_in_all_their_dtypes(causal, fresh_seed):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(fresh_seed)
    rows, _ = packed_rows(rng, (5, 64, 1))
    table = arrays(fresh_seed)[2]
    q = rng.standard_normal((3, 2, HEADS, WIDTH)).astype(ml_dtypes.bfloat16)
    cache = flashgen.KVCache(rows, None, LENGTHS, table, head_dim_v=VALUE, kv_dtype="fp8_ds_mla")
    right = flashgen.attention(q, cache, causal=causal, softmax_scale=0.05, return_lse=True)
    options = {"softmax_scale": 0.05, "causal": causal, "is_fp8_kvcache": True}
    for dtype in (np.uint8, np.int8, ml_dtypes.float8_e4m3fn):
        results = flash_mla_with_kvcache(
            q, rows.view(dtype), table, LENGTHS, VALUE, *get_mla_metadata(), **options
        )
        assert all(map(np.array_equal, results, right))
    of_call = [torch.from_numpy(x) for x in (q.view(np.int16), rows, table, LENGTHS)]
    of_call[0] = of_call[0].view(torch.bfloat16)
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        of_call[1] = of_call[1].view(dtype)
        results = flash_mla_with_kvcache(*of_call, VALUE, *get_mla_metadata(), **options)
        assert all(
            np.array_equal(x.float(), y.astype(np.float32)) for x, y in zip(results, right, strict=True)
        )


def lists_of_slots(seed):
    """q, a cache whose unnamed slots are NaN, a table, lists of tokens, and the same lists by slot."""
    q, cache, table, _ = arrays(seed)
    rng = np.random.default_rng(seed + 1)
    indices = np.full((3, 2, 40), -1, np.int32)
    for b, i in np.ndindex(3, 2):
        count = rng.integers(min(40, LENGTHS[b]) + 1)
        indices[b, i, rng.permutation(40)[:count]] = rng.permutation(LENGTHS[b])[:count]
    block = np.take_along_axis(table[:, None], np.maximum(indices, 0) // 64, -1)
    slots = np.where(indices < 0, -1, block * 64 + indices % 64).astype(np.int32)
    unnamed = np.ones(5 * 64, bool)
    unnamed[slots[slots >= 0]] = False
    cache[unnamed.reshape(5, 64)] = np.nan
    return q, cache, table, indices, slots


@pytest.mark.parametrize("layout", ["blocks side by side", "gaps between blocks", "blocks of 1"])
def test_lists_name_slots_of_the_whole_cache(layout, fresh_seed, monkeypatch):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    q, cache, table, indices, slots = lists_of_slots(fresh_seed)
    right = flashgen.attention(
        q,
        flashgen.KVCache(cache, None, LENGTHS, table, head_dim_v=VALUE),
        indices=indices,
        softmax_scale=0.05,
        return_lse=True,
    )
    if layout == "gaps between blocks":
        cache = np.stack((cache, cache * np.nan), 1)[:, 0]
    if layout == "blocks of 1":
        cache = np.stack([cache.reshape(320, 1, 1, WIDTH)] * 2, 1)[:, 0]
    caches = []
    monkeypatch.setattr(
        flash_mla, "attention", lambda q, k, **of: caches.append(k.k) or flashgen.attention(q, k, **of)
    )

    def call(q, cache, slots):
        return flash_mla_with_kvcache(q, cache, None, None, VALUE, *get_mla_metadata(), 0.05, indices=slots)

    tensors = [torch.from_numpy(x) for x in (q, cache, slots)]
    strided = torch.stack((tensors[2], tensors[2]), -1)[..., 0]
    for results in (
        call(q, cache, slots),
        call(*tensors),
        call(*tensors[:2], strided),
        torch.compile(call, fullgraph=True, backend="eager")(*tensors),
        call(*map(jax.numpy.asarray, (q, cache, slots))),
        jax.jit(call)(q, cache, slots),
    ):
        for x, y in zip(results, right, strict=True):
            np.testing.assert_array_equal(np.asarray(x), y)
    assert np.shares_memory(caches[0], cache)
    assert all(x.data_ptr() == tensors[1].data_ptr() for x in caches[1:3])


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ml_dtypes.float8_e4m3fn])
def test_lists_name_slots_of_rows_of_fp8(dtype, gaps, fresh_seed):
    q, _, table, indices, slots = lists_of_slots(fresh_seed)
    rows, _ = packed_rows(np.random.default_rng(fresh_seed), (5, 64, 1))
    q = q.astype(ml_dtypes.bfloat16)
    right = flashgen.attention(
        q,
        flashgen.KVCache(rows, None, LENGTHS, table, head_dim_v=VALUE, kv_dtype="fp8_ds_mla"),
        indices=indices,
        softmax_scale=0.05,
        return_lse=True,
    )
    if gaps:
        rows = np.stack((rows, np.full_like(rows, 0xFF)), 1)[:, 0]
    options = {"is_fp8_kvcache": True, "indices": slots}
    results = flash_mla_with_kvcache(
        q, rows.view(dtype), None, None, VALUE, *get_mla_metadata(), 0.05, **options
    )
    for x, y in zip(results, right, strict=True):
        np.testing.assert_array_equal(x, y)


ARRAYS = dict(zip(("q", "k_cache", "block_table"), arrays(0), strict=False))
LISTS = np.zeros((3, 2, 64), np.int32)
BYTES = {
    "q": ARRAYS["q"].astype(ml_dtypes.bfloat16),
    "k_cache": np.zeros((5, 64, 1, 656), np.uint8),
    "is_fp8_kvcache": True,
}


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        ({"is_fp8_kvcache": True}, BadTensorDtype, "k_cache has dtype fp16; rows of fp8_ds_mla are uint8"),
        (BYTES | {"q": ARRAYS["q"]}, BadTensorDtype, "q has dtype fp16; for rows of fp8_ds_mla it is bf16"),
        (BYTES | {"k_cache": BYTES["k_cache"][..., :576]}, BadTensorShape, "fp8_ds_mla have 656 bytes"),
        (BYTES | {"is_fp8_kvcache": False}, BadTensorDtype, "uint8, and is_fp8_kvcache is False"),
        ({"indices": LISTS, "causal": True}, BadParam, "causal is True, and indices was given"),
        ({"indices": LISTS + 320}, BadParam, r"indices\[0, 0, 0\] is 320; sequence 0 has 320 tokens"),
        ({"indices": LISTS[0]}, BadTensorShape, "indices has shape"),
        ({"indices": LISTS[:2]}, BadTensorShape, "indices has shape"),
        ({"indices": LISTS.astype(np.int64)}, BadTensorDtype, "indices has dtype int64; expected int32"),
        ({"attn_sink": np.zeros(HEADS, np.float32)}, NotImplementedError, "attn_sink was given"),
        ({"extra_k_cache": ARRAYS["k_cache"]}, NotImplementedError, "extra_k_cache was given"),
        ({"extra_indices_in_kvcache": LISTS}, NotImplementedError, "extra_indices_in_kvcache was given"),
        ({"indices": LISTS, "topk_length": LENGTHS}, NotImplementedError, "topk_length was given"),
        ({"extra_topk_length": LENGTHS}, NotImplementedError, "extra_topk_length was given"),
        ({"tile_scheduler_metadata": LENGTHS}, BadParam, "tile_scheduler_metadata has type ndarray"),
        ({"num_splits": LENGTHS}, BadParam, "num_splits has type ndarray"),
        ({"block_table": None}, NullPointer, "block_table is None"),
        ({"cache_seqlens": None}, NullPointer, "cache_seqlens is None"),
        ({"q": ARRAYS["q"][0]}, BadTensorShape, "q has shape"),
        ({"k_cache": ARRAYS["k_cache"][..., 0, :]}, BadTensorShape, "k_cache has shape"),
        ({"k_cache": ARRAYS["k_cache"].repeat(2, 2)}, BadTensorShape, "k_cache has 2 heads"),
        ({"k_cache": ARRAYS["k_cache"].view(np.uint16)}, BadTensorDtype, "k_cache has dtype"),
        ({"cache_seqlens": LENGTHS.astype(np.int64)}, BadTensorDtype, "cache_seqlens has dtype"),
        ({"block_table": ARRAYS["block_table"][:2]}, BadTensorShape, "block_table is for a batch of 2"),
        ({"head_dim_v": 576}, BadTensorShape, "head_dim_v is 576"),
        ({"head_dim_v": None}, BadParam, "head_dim_v is None"),
        ({"causal": 2}, BadParam, "causal"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_have_the_names_of_flash_mla(other, error, words):
    call = ARRAYS | {"cache_seqlens": LENGTHS, "head_dim_v": VALUE}
    call |= {"tile_scheduler_metadata": get_mla_metadata()[0]} | other
    with pytest.raises(error, match=words):
        flash_mla_with_kvcache(**call)


def test_gradients_are_refused_by_name():
    torch = pytest.importorskip("torch")
    q, cache, table = (torch.from_numpy(x) for x in ARRAYS.values())
    lengths = torch.from_numpy(LENGTHS)
    with pytest.raises(NotImplementedError, match="q requires a gradient"):
        flash_mla_with_kvcache(q.requires_grad_(), cache, table, lengths, VALUE, *get_mla_metadata())
