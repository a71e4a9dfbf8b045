"""Latent attention to the tokens of lists on a GPU, of 16 bits and of FP8: within the bound, beside rows of
NaN; splits, replayed graphs, the slots of FlashMLA.
"""

import numpy as np
import pytest

import flashgen
from flashgen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from flashgen.operators import reference
from flashgen.operators.latentrows import LAYOUT

torch = pytest.importorskip("torch")
from gpu.test_mla_codes_gpu import codes_of, numbers_of, packed_rows  # noqa: E402
from gpu.test_mla_gpu import check_family, halves_of  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = 192**-0.5
# Queries, query heads, entries of a list, lengths.
SHAPES = (
    (1, 128, 2048, (6000, 1, 0, 64, 3333)),
    (2, 16, 512, (4097, 63, 2, 700)),
    (300, 64, 128, (1000,)),
    (1, 16, 2048, (30000,)),
    (3, 5, 33, (200,) * 40),
    (1, 128, 0, (5, 70)),
)


def arrays_of(shape, dtype, page, seed):
    """q, a cache whose rows that no list names are NaN, lists, and the rows of each sequence."""
    queries, heads, topk, lengths = shape
    rng = np.random.default_rng(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = [torch.randn(n, 576, device="cuda", generator=generator).to(DTYPES[dtype]) for n in lengths]
    q = torch.randn(len(lengths), queries, heads, 576, device="cuda", generator=generator).to(DTYPES[dtype])
    indices = np.full((len(lengths), queries, topk), -1, np.int32)
    for b, i in np.ndindex(indices.shape[:2]):
        count = min(topk, lengths[b]) if i % 2 == 0 else int(rng.integers(min(topk, lengths[b]) + 1))
        places = rng.permutation(topk)[:count] if i % 3 else np.arange(count)
        indices[b, i, places] = rng.permutation(lengths[b])[:count]
    size = page or max(lengths) + 3
    counts = [-(-n // size) for n in lengths] if page else [1] * len(lengths)
    order = rng.permutation(sum(counts) + 1) if page else np.arange(len(lengths))
    k = torch.full((len(order), size, 1, 576), torch.nan, device="cuda", dtype=DTYPES[dtype])
    table, first = np.full((len(lengths), max(1, *counts) + 1), 1 << 30, np.int32), 0
    for b, x in enumerate(rows):
        table[b, : counts[b]] = order[first : first + counts[b]]
        first += counts[b]
        tokens = np.unique(indices[b][indices[b] >= 0])
        at = torch.from_numpy(table[b, tokens // size].astype(np.int64)).cuda()
        named = torch.from_numpy(tokens.astype(np.int64)).cuda()
        k[at, named % size, 0] = x[named]
    on_device = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lengths, table, indices)]
    cache = flashgen.KVCache(k, None, on_device[0], on_device[1] if page else None, head_dim_v=512)
    return q, cache, on_device[2], rows


def in_layout(layout, cache, rows):
    """A cache in FP8 of the numbers of another, and the numbers of its rows."""
    if layout == LAYOUT:
        k = packed_rows(cache.k)
        k[cache.k[..., 0].isnan()] = 0xFF
        packed = flashgen.KVCache(k, None, cache.lengths, cache.pages, head_dim_v=512, kv_dtype=LAYOUT)
        return packed, [numbers_of(packed_rows(x)) for x in rows]
    return codes_of(cache, rows, 0.02)


def check(out, lse, q, indices, rows, dtype, scaled=False):
    lists = indices.cpu().numpy()
    for b, i in list(np.ndindex(lists.shape[:2]))[:: max(1, lists.shape[1] // 20)]:
        tokens = torch.from_numpy(lists[b, i][lists[b, i] >= 0].astype(np.int64)).cuda()
        k = rows[b][tokens].double()[None, :, None]
        one = q[b : b + 1, i : i + 1].double()
        right = reference.attention(one, k, k[..., :512], dtype, SCALE, scaled=scaled)
        of_out = reference.largest(out[b : b + 1, i : i + 1].double(), right.out, right.out_bound)
        of_lse = reference.largest(lse[b : b + 1, :, i : i + 1].double(), right.lse, right.lse_bound)
        assert of_out.share <= 1, (b, i, of_out)
        assert of_lse.share <= 1, (b, i, of_lse)


@pytest.mark.parametrize("latent_family", ["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize("page", [0, 64, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}x{shape[2]}")
def test_results_are_within_the_bound(latent_family, shape, dtype, page, fresh_seed):
    q, cache, indices, rows = arrays_of(shape, dtype, page, fresh_seed)
    options = {"indices": indices, "softmax_scale": SCALE, "return_lse": True}
    out, lse = flashgen.attention(q, cache, **options)
    check_family(latent_family, q, cache, **options)
    check(out, lse, q, indices, rows, dtype)
    for _ in range(3):
        assert torch.equal(out, flashgen.attention(q, cache, **options)[0])
    q_nope, q_rope = halves_of(q)
    assert torch.equal(out, flashgen.attention(q_nope, cache, q_rope=q_rope, **options)[0])


@pytest.mark.parametrize("latent_family", ["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize("page", [0, 64, 1])
@pytest.mark.parametrize("layout", [*DTYPES, LAYOUT])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}x{shape[2]}")
def test_results_of_fp8_are_within_the_bound(latent_family, shape, layout, page, fresh_seed):
    dtype = "bf16" if layout == LAYOUT else layout
    q, whole, indices, rows = arrays_of(shape, dtype, page, fresh_seed)
    cache, rows = in_layout(layout, whole, rows)
    options = {"indices": indices, "softmax_scale": SCALE, "return_lse": True}
    out, lse = flashgen.attention(q, cache, **options)
    check_family(latent_family, q, cache, **options)
    check(out, lse, q, indices, rows, dtype, scaled=layout != LAYOUT)
    for _ in range(3):
        assert torch.equal(out, flashgen.attention(q, cache, **options)[0])
    q_nope, q_rope = halves_of(q)
    assert torch.equal(out, flashgen.attention(q_nope, cache, q_rope=q_rope, **options)[0])


@pytest.mark.parametrize("splits", [1, 4])
def test_splits_of_lists(splits, fresh_seed):
    q, cache, indices, rows = arrays_of(SHAPES[1], "bf16", 64, fresh_seed)
    options = {"indices": indices, "softmax_scale": SCALE, "return_lse": True}
    out, lse = flashgen.attention(q, cache, splits=splits, **options)
    check(out, lse, q, indices, rows, "bf16")
    one = flashgen.attention(
        q[:1],
        flashgen.KVCache(cache.k, None, cache.lengths[:1], cache.pages[:1], head_dim_v=512),
        splits=splits,
        indices=indices[:1],
        softmax_scale=SCALE,
    )
    assert torch.equal(one, out[:1])


@pytest.mark.parametrize("side_by_side", [True, False])
def test_flash_mla_names_slots_of_all_blocks(side_by_side, fresh_seed):
    q, cache, indices, rows = arrays_of(SHAPES[1], "bf16", 64, fresh_seed)
    block = cache.pages.long().gather(1, indices.clamp(0).flatten(1).long() // 64).view(indices.shape)
    slots = torch.where(indices < 0, -1, block * 64 + indices % 64).int()
    k = cache.k if side_by_side else torch.stack((cache.k, cache.k * torch.nan), 1)[:, 0]
    options = {"softmax_scale": SCALE, "indices": slots}
    flash_mla_with_kvcache(q, k, None, None, 512, *get_mla_metadata(), **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_mla_with_kvcache(q, k, None, None, 512, *get_mla_metadata(), **options)
    graph.replay()
    check(out, lse, q, indices, rows, "bf16")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_flash_mla_names_slots_of_rows_of_fp8(dtype, fresh_seed):
    q, whole, indices, rows = arrays_of(SHAPES[1], "bf16", 64, fresh_seed)
    cache, rows = in_layout(LAYOUT, whole, rows)
    block = cache.pages.long().gather(1, indices.clamp(0).flatten(1).long() // 64).view(indices.shape)
    slots = torch.where(indices < 0, -1, block * 64 + indices % 64).int()
    of_call = q, cache.k.view(dtype), None, None, 512, *get_mla_metadata()
    out, lse = flash_mla_with_kvcache(*of_call, softmax_scale=SCALE, is_fp8_kvcache=True, indices=slots)
    check(out, lse, q, indices, rows, "bf16")


def test_a_graph_takes_other_lists(fresh_seed):
    q, cache, indices, rows = arrays_of(SHAPES[1], "bf16", 0, fresh_seed)
    options = {"indices": indices, "softmax_scale": SCALE, "return_lse": True}
    flashgen.attention(q, cache, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashgen.attention(q, cache, **options)
    indices[:, 0, ::3] = -1
    graph.replay()
    check(out, lse, q, indices, rows, "bf16")
