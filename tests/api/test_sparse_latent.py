"""Latent attention to the tokens of lists, on the CPU: as of the rows that they name, also in FP8; FlashMLA's
slots; what is refused, by name.
"""

import ml_dtypes
import numpy as np
import pytest

import flashgen
from api.test_latent_codes import codes_of, packed_rows
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, FlashgenError

SCALE = 0.07
HEADS, QUERIES, TOPK = 6, 3, 40
LENGTHS = np.array([50, 7, 0, 33], np.int32)


def arrays(rng, page=0, dtype=np.float16):
    """q, a cache, the lists and the rows of each sequence. Rows that no list names are NaN."""
    rows = [rng.standard_normal((n, 576)).astype(dtype) for n in LENGTHS]
    q = rng.standard_normal((4, QUERIES, HEADS, 576)).astype(dtype)
    indices = np.full((4, QUERIES, TOPK), -1, np.int32)
    for b, i in np.ndindex(4, QUERIES):
        count = rng.integers(min(TOPK, LENGTHS[b]) + 1)
        indices[b, i, rng.permutation(TOPK)[:count]] = rng.permutation(LENGTHS[b])[:count]
    if page:
        counts = -(-LENGTHS // page)
        order, table = iter(rng.permutation(counts.sum())), np.full((4, 60), 1 << 30, np.int32)
        for b, count in enumerate(counts):
            table[b, :count] = [next(order) for _ in range(count)]
        k = np.full((counts.sum(), page, 1, 576), np.nan, dtype)
    else:
        table, k = None, np.full((4, 60, 1, 576), np.nan, dtype)
    for b, x in enumerate(rows):
        for t in np.unique(indices[b][indices[b] >= 0]):
            at = (b, t) if table is None else (table[b, t // page], t % page)
            k[(*at, 0)] = x[t]
    return q, flashgen.KVCache(k, None, LENGTHS, table, head_dim_v=512), indices, rows


@pytest.mark.parametrize("page", [0, 1, 16])
def test_a_query_attends_to_the_rows_that_its_list_names(page, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q, cache, indices, rows = arrays(rng, page)
    out, lse = flashgen.attention(q, cache, indices=indices, softmax_scale=SCALE, return_lse=True)
    for b, i in np.ndindex(4, QUERIES):
        x = rows[b][indices[b, i][indices[b, i] >= 0]].astype(np.float64)
        weights = np.exp(q[b, i].astype(np.float64) @ x.T * SCALE)
        total = weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[b, i], weights @ x[:, :512] / np.where(total, total, 1), atol=4e-3)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[b, :, i], np.log(total[:, 0]), atol=1e-4)
    plan = flashgen.plan(q, cache, indices=indices, softmax_scale=SCALE)
    named = {} if cache.pages is None else {"pages": cache.pages}
    np.testing.assert_array_equal(plan(q, cache.k, kv_lengths=LENGTHS, indices=indices, **named), out)


def rows_in(cache, indices, k):
    """The cache with other rows ``k``, whose rows that no list names are NaN."""
    named = ~np.isnan(cache.k[..., 0].astype(np.float32))
    k = k.copy()
    k.view(np.uint8)[~named] = 0xFF
    return k


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("scale", [None, (), (4, 1)], ids=str)
def test_codes_are_read_as_codes_times_their_scale(scale, page, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q, cache, indices, _ = arrays(rng, page)
    k = rows_in(cache, indices, codes_of(rng, cache.k.shape, 1.0))
    of_k = None if scale is None else rng.choice([0.25, 0.5, 2.0], scale).astype(np.float32)
    options = {"indices": indices, "softmax_scale": SCALE, "return_lse": True}
    fields = {"pages": cache.pages, "head_dim_v": 512}
    results = flashgen.attention(q, flashgen.KVCache(k, None, LENGTHS, k_scale=of_k, **fields), **options)
    for b in range(4):
        # Of a sequence all codes have one scale, which is a power of two.
        one = 1.0 if of_k is None else np.broadcast_to(of_k, (4, 1))[b, 0]
        numbers = (k.astype(np.float32) * one).astype(np.float16)
        of_numbers = flashgen.KVCache(numbers, None, LENGTHS, **fields)
        right = flashgen.attention(q, of_numbers, **options)
        for x, y in zip(results, right, strict=True):
            np.testing.assert_array_equal(x[b], y[b])
    of_bytes = flashgen.KVCache(k.view(np.uint8), None, LENGTHS, k_scale=of_k, kv_dtype="e4m3", **fields)
    plan = flashgen.plan(q, of_bytes, indices=indices, softmax_scale=SCALE)
    named = {name: x for name, x in (("pages", cache.pages), ("k_scale", of_k)) if x is not None}
    again = plan(q, of_bytes.k, kv_lengths=LENGTHS, indices=indices, **named)
    np.testing.assert_array_equal(again, results[0])


@pytest.mark.parametrize("page", [0, 16])
def test_rows_that_carry_their_scales(page, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q, cache, indices, _ = arrays(rng, page, ml_dtypes.bfloat16)
    rows, elements = packed_rows(rng, cache.k.shape[:3])
    options = {"indices": indices, "softmax_scale": SCALE, "return_lse": True}
    fields = {"pages": cache.pages, "head_dim_v": 512}
    right = flashgen.attention(q, flashgen.KVCache(elements, None, LENGTHS, **fields), **options)
    of_rows = flashgen.KVCache(rows_in(cache, indices, rows), None, LENGTHS, kv_dtype="fp8_ds_mla", **fields)
    for x, y in zip(flashgen.attention(q, of_rows, **options), right, strict=True):
        np.testing.assert_array_equal(x, y)


def test_slots_of_all_pages_are_positions_in_one_sequence(fresh_seed):
    """What FlashMLA and vLLM pass: page * page_size + row."""
    q, cache, indices, _ = arrays(np.random.default_rng(fresh_seed), 16)
    out = flashgen.attention(q, cache, indices=indices, softmax_scale=SCALE)
    page = np.take_along_axis(cache.pages[:, None], np.maximum(indices, 0) // 16, -1)
    slots = np.where(indices < 0, -1, page * 16 + indices % 16).astype(np.int32)
    whole = flashgen.KVCache(
        cache.k.reshape(1, -1, 1, 576), None, np.array([len(cache.k) * 16], np.int32), head_dim_v=512
    )
    same = flashgen.attention(
        q.reshape(1, -1, HEADS, 576), whole, indices=slots.reshape(1, -1, TOPK), softmax_scale=SCALE
    )
    np.testing.assert_array_equal(same.reshape(out.shape), out)


@pytest.mark.parametrize("kv_dtype", [None, "e4m3"])
def test_libraries_that_trace_see_the_same_call(kv_dtype, fresh_seed):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(fresh_seed)
    q, cache, indices, _ = arrays(rng)
    k, scale = cache.k, np.asarray(0.5, np.float32)
    if kv_dtype is not None:
        k = rows_in(cache, indices, codes_of(rng, k.shape, 1.0)).view(np.uint8)

    def call(q, k, lengths, indices, scale):
        of_codes = {} if kv_dtype is None else {"k_scale": scale, "kv_dtype": kv_dtype}
        latent = flashgen.KVCache(k, None, lengths, head_dim_v=512, **of_codes)
        return flashgen.attention(q, latent, indices=indices, softmax_scale=SCALE, return_lse=True)

    of_call = q, k, LENGTHS, indices, scale
    right = call(*of_call)
    tensors = [torch.from_numpy(x) for x in of_call]
    for results in (call(*tensors), torch.compile(call, fullgraph=True, backend="eager")(*tensors)):
        for x, y in zip(results, right, strict=True):
            np.testing.assert_array_equal(x.numpy(), y)
    for x, y in zip(jax.jit(call)(*map(jax.numpy.asarray, of_call)), right, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)


LATENT = np.zeros((1, 8, 1, 576), np.float16)
Q = np.zeros((1, 2, 4, 576), np.float16)
INDICES = np.zeros((1, 2, 5), np.int32)
CACHE = flashgen.KVCache(LATENT, None, np.array([8], np.int32), head_dim_v=512)
KEYS = np.zeros((1, 8, 1, 64), np.float16)


def with_index(value):
    indices = INDICES.copy()
    indices[0, 1, 3] = value
    return indices


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"indices": with_index(8)}, BadParam, r"indices\[0, 1, 3\] is 8; sequence 0 has 8 tokens"),
        ({"indices": with_index(-2)}, BadParam, r"indices\[0, 1, 3\] is -2"),
        ({"indices": INDICES[0]}, BadTensorShape, r"\(batch, seqlen_q, topk\) = \(1, 2, 5\)"),
        ({"indices": INDICES[:, :1]}, BadTensorShape, "indices has shape"),
        ({"indices": INDICES.astype(np.int64)}, BadTensorDtype, "indices has dtype int64; expected int32"),
        ({"causal": True}, BadParam, "causal is True, and indices was given"),
        ({"mask_type": "causal_bottom_right"}, BadParam, "mask_type is .*, and indices was given"),
        ({"max_seqlen_kv": 8}, BadParam, "indices and max_seqlen_kv"),
        ({"q": Q[0], "cu_seqlens_q": np.array([0, 2], np.int32)}, BadParam, "indices and cu_seqlens_q"),
        ({"softcap": 3.0}, BadParam, "softcap"),
        ({"k": KEYS, "v": KEYS, "q": KEYS[:, :2]}, BadParam, "indices was given without a latent cache"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_and_by_which_name(options, error, words):
    call = {"q": Q, "k": CACHE, "indices": INDICES, "softmax_scale": SCALE} | options
    with pytest.raises(error, match=words):
        flashgen.attention(**call)


def test_nothing_is_written_where_an_index_is_refused():
    out = np.full((1, 2, 4, 512), np.nan, np.float16)
    with pytest.raises(FlashgenError):
        flashgen.attention(Q, CACHE, indices=with_index(99), softmax_scale=SCALE, out=out)
    assert np.isnan(out).all()
