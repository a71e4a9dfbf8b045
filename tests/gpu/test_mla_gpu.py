"""Latent caches on a GPU: within the bound, beside rows of NaN; splits, replayed graphs, host memory."""

import dataclasses

import numpy as np
import pytest

import flashgen
from flashgen.operators import reference
from flashgen.operators.masks import Band

torch = pytest.importorskip("torch")
from flashgen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = 192**-0.5
# Queries, query heads, lengths.
SHAPES = (
    (1, 128, (1000, 1, 0, 64, 333)),
    (2, 16, (4097, 63, 2, 700)),
    (8, 8, (129, 5000, 8)),
    (1, 16, (30000,)),
    (3, 5, (200,) * 40),
    (4, 64, (700, 65)),
    (1, 1, (513, 64)),
)


def cache_of(lengths, dtype, page, width=576, value=512):
    """A latent cache whose unused rows are NaN, and the rows of each sequence. Unused entries of the page
    table are garbage.
    """
    generator = torch.Generator("cuda").manual_seed(int(np.random.SeedSequence().entropy % 2**32))
    rows = [torch.randn(n, width, device="cuda", generator=generator).to(DTYPES[dtype]) for n in lengths]
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if not page:
        shape = len(lengths), max(lengths) + 3, 1, width
        k = torch.full(shape, torch.nan, device="cuda", dtype=DTYPES[dtype])
        for b, x in enumerate(rows):
            k[b, : len(x), 0] = x
        return flashgen.KVCache(k, None, counts, head_dim_v=value), rows
    pages = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(1)).tolist()
    k = torch.full((len(order), page, 1, width), torch.nan, device="cuda", dtype=DTYPES[dtype])
    table = torch.full((len(lengths), max(1, *pages) + 1), 1 << 30, dtype=torch.int32, device="cuda")
    for b, x in enumerate(rows):
        mine = [order.pop() for _ in range(pages[b])]
        table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for i, number in enumerate(mine):
            part = x[i * page : (i + 1) * page]
            k[number, : len(part), 0] = part
    return flashgen.KVCache(k, None, counts, table, head_dim_v=value), rows


def check(out, lse, q, rows, dtype, causal, value=512, scaled=False):
    for b, x in enumerate(rows):
        k = x.double()[None, :, None]
        band = Band(len(x) - q.shape[1], right=0) if causal else Band()
        right = reference.attention(
            q[b : b + 1].double(), k, k[..., :value], dtype, SCALE, band, scaled=scaled
        )
        of_out = reference.largest(out[b : b + 1].double(), right.out, right.out_bound)
        of_lse = reference.largest(lse[b : b + 1].double(), right.lse, right.lse_bound)
        assert of_out.share <= 1, (b, of_out)
        assert of_lse.share <= 1, (b, of_lse)


def check_family(latent_family, q, cache, **options):
    """With "sm80" no call takes a kernel for Hopper. With "sm90" few small pages do not either."""
    name = flashgen.plan(q, cache, **options).variant.name
    assert latent_family == "sm90" or name.endswith("sm80"), name


@pytest.mark.parametrize("latent_family", ["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize("page", [0, 64, 48, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_results_are_within_the_bound(latent_family, shape, dtype, causal, page):
    queries, heads, lengths = shape
    cache, rows = cache_of(lengths, dtype, page)
    q = torch.randn(len(lengths), queries, heads, 576, device="cuda").to(DTYPES[dtype])
    options = {"causal": causal, "softmax_scale": SCALE, "return_lse": True}
    out, lse = flashgen.attention(q, cache, **options)
    check_family(latent_family, q, cache, **options)
    check(out, lse, q, rows, dtype, causal)
    for _ in range(3):
        assert torch.equal(out, flashgen.attention(q, cache, **options)[0])


@pytest.mark.parametrize("latent_family", ["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize(("page", "family"), [(1, "gather"), (4, "gather"), (16, "decode"), (64, "wide")])
def test_the_size_of_pages_decides_how_they_are_loaded(latent_family, page, family):
    # Of few keys the other family is as fast.
    cache, _ = cache_of((4096,) * 64, "bf16", page)
    q = torch.randn(64, 1, 128, 576, device="cuda", dtype=torch.bfloat16)
    name = flashgen.plan(q, cache, softmax_scale=SCALE).variant.name
    assert name.startswith(f"flash_mla_{family}" if latent_family == "sm90" else "flash_mla_decode")
    assert name.endswith(latent_family)


def halves_of(q):
    """q in two arrays, whose layouts differ."""
    wide = torch.full((*q.shape[:-1], 544), torch.nan, device="cuda", dtype=q.dtype)
    wide[..., :512] = q[..., :512]
    rope = q[..., 512:].transpose(0, 2).contiguous().transpose(0, 2)
    return wide[..., :512], rope


@pytest.mark.parametrize("latent_family", ["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize("page", [0, 64, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_q_in_two_arrays_has_the_same_bits(latent_family, shape, dtype, page):
    queries, heads, lengths = shape
    cache, _ = cache_of(lengths, dtype, page)
    q = torch.randn(len(lengths), queries, heads, 576, device="cuda").to(DTYPES[dtype])
    q_nope, q_rope = halves_of(q)
    options = {"causal": True, "softmax_scale": SCALE, "return_lse": True}
    check_family(latent_family, q_nope, cache, q_rope=q_rope, **options)
    right = flashgen.attention(q, cache, **options)
    found = flashgen.attention(q_nope, cache, q_rope=q_rope, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


def test_a_graph_takes_another_q_in_two_arrays():
    cache, _ = cache_of((3000, 1000, 2048), "bf16", 64)
    q_nope, q_rope = halves_of(torch.randn(3, 1, 32, 576, device="cuda", dtype=torch.bfloat16))
    flashgen.attention(q_nope, cache, q_rope=q_rope, softmax_scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q_nope, cache, q_rope=q_rope, softmax_scale=SCALE)
    q_rope.copy_(torch.randn_like(q_rope))
    graph.replay()
    q = torch.cat([q_nope, q_rope], -1)
    assert torch.equal(out, flashgen.attention(q, cache, softmax_scale=SCALE))


@pytest.mark.parametrize(("width", "value"), [(320, 256), (576, 256), (40, 24)])
def test_narrower_rows(width, value):
    cache, rows = cache_of((700, 3), "bf16", 64, width, value)
    q = torch.randn(2, 2, 16, width, device="cuda", dtype=torch.bfloat16)
    out, lse = flashgen.attention(q, cache, softmax_scale=SCALE, return_lse=True)
    check(out, lse, q, rows, "bf16", False, value)


@pytest.mark.parametrize("page", [0, 64])
def test_a_graph_takes_other_lengths(page):
    cache, _ = cache_of((3000, 1000, 2048), "bf16", page)
    q = torch.randn(3, 1, 32, 576, device="cuda", dtype=torch.bfloat16)
    flashgen.attention(q, cache, softmax_scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, cache, softmax_scale=SCALE)
    cache.lengths.sub_(torch.tensor([2999, 17, 0], dtype=torch.int32, device="cuda"))
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, cache, softmax_scale=SCALE))


def test_flash_mla_is_attention():
    cache, _ = cache_of((700, 3), "bf16", 64)
    q = torch.randn(2, 2, 16, 576, device="cuda", dtype=torch.bfloat16)
    metadata = get_mla_metadata(cache.lengths, 2 * 16, 1)
    found = flash_mla_with_kvcache(q, cache.k, cache.pages, cache.lengths, 512, *metadata, SCALE, causal=True)
    right = flashgen.attention(q, cache, causal=True, softmax_scale=SCALE, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("page", [0, 64])
def test_rows_are_appended_rotated_in_a_graph(page):
    cache, _ = cache_of((3000, 1000, 64), "bf16", page)
    cache.lengths.sub_(3)
    q, row = (torch.randn(3, 2, heads, 576, device="cuda", dtype=torch.bfloat16) for heads in (32, 1))
    angles = torch.rand(4096, 32, device="cuda")
    rotary = flashgen.Rotary(angles.cos(), angles.sin(), interleaved=True)
    options = {"append": (row, None), "rotary": rotary, "causal": True, "softmax_scale": SCALE}
    flashgen.attention(q, cache, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, cache, **options)
    cache.lengths.sub_(torch.tensor([2900, 0, 17], dtype=torch.int32, device="cuda"))
    other = dataclasses.replace(cache, k=cache.k.clone())
    graph.replay()
    total, rotated = flashgen.append(other, row, rotary=rotary, q=q)
    assert torch.equal(cache.k.view(torch.int16), other.k.view(torch.int16))
    after = dataclasses.replace(other, lengths=total)
    assert torch.equal(out, flashgen.attention(rotated, after, causal=True, softmax_scale=SCALE))
