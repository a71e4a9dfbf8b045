"""Caches of e4m3 codes on a GPU: within the bound beside NaN codes in unused slots, and to the bit what the
16-bit kernel of the same tile makes of the numbers that the codes stand for."""

import numpy as np
import pytest

import flashgen
from codetiles import write_specs
from flashgen import KVCache
from flashgen.operators import reference
from flashgen.operators.masks import Band

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Queries, room for keys, heads, kv heads, head_dim.
SHAPES = ((1, 5000, 8, 2, 128), (2, 3000, 32, 2, 64), (4, 700, 8, 8, 256), (1, 1300, 4, 1, 96))
LENGTHS = (1.0, 0.3, 0.0, 0.77)
PAGE = 16


def inputs(shape, dtype, power_of_two=False):
    """q, codes of k and v with NaN after each length, their scales of each sequence and head, and lengths."""
    queries, room, heads, kv_heads, width = shape
    generator = torch.Generator("cuda").manual_seed(int(np.random.SeedSequence().entropy % 2**32))
    options = {"device": "cuda", "generator": generator}
    batch = len(LENGTHS)
    q = torch.randn(batch, queries, heads, width, **options).to(DTYPES[dtype])
    lengths = torch.tensor([int(room * share) for share in LENGTHS], dtype=torch.int32, device="cuda")
    codes = []
    for _ in range(2):
        x = (40 * torch.randn(batch, room, kv_heads, width, **options)).clamp(-448, 448)
        x = x.to(torch.float8_e4m3fn).view(torch.uint8)
        for b, length in enumerate(lengths.tolist()):
            x[b, length:] = 0x7F
        codes.append(x.view(torch.float8_e4m3fn))
    scales = [torch.randn(batch, kv_heads, **options).exp2() / 40 for _ in range(2)]
    if power_of_two:
        scales = [x.log2().round().exp2() for x in scales]
    return q, *codes, *scales, lengths


def paged(k, v):
    """The codes in pages of PAGE, in another order, and the table of pages."""
    batch, room = k.shape[:2]
    count = room // PAGE
    order = torch.randperm(batch * count, device="cuda")
    pools = []
    for x in (k, v):
        pages = x[:, : count * PAGE].reshape(-1, PAGE, *x.shape[2:]).view(torch.uint8)
        pool = torch.empty_like(pages)
        pool[order] = pages
        pools.append(pool.view(torch.float8_e4m3fn))
    return *pools, order.reshape(batch, count).to(torch.int32)


def cache_of(k, v, k_scale, v_scale, lengths, pages):
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if not pages:
        return KVCache(k, v, lengths, **scales)
    *pools, table = paged(k, v)
    return KVCache(*pools, lengths.clamp(max=table.shape[1] * PAGE), table, **scales)


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        (SHAPES[0], "bf16", {}),
        (SHAPES[0], "fp16", {"causal": True, "splits": 3}),
        (SHAPES[1], "fp16", {"window_size": (300, 0)}),
        (SHAPES[2], "bf16", {"causal": True}),
        (SHAPES[3], "bf16", {}),
        ((300, 900, 8, 2, 128), "bf16", {"causal": True}),
        ((90, 700, 4, 4, 192), "fp16", {"window_size": (200, 0)}),
    ],
    ids=str,
)
def test_results_are_within_the_bound(shape, dtype, options, pages):
    q, k, v, k_scale, v_scale, lengths = inputs(shape, dtype)
    cache = cache_of(k, v, k_scale, v_scale, lengths, pages)
    out, lse = flashgen.attention(q, cache, return_lse=True, **options)
    for b, length in enumerate(cache.lengths.tolist()):
        diagonal = length - q.shape[1]
        left, _ = options.get("window_size", (1 << 30, 0))
        band = Band(diagonal, left, 0 if options else 1 << 30)
        numbers = (
            x[b : b + 1, :length].double() * scale[b, :, None].double()
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        expected = reference.attention(
            q[b : b + 1].double(), *numbers, dtype, q.shape[-1] ** -0.5, band, scaled=True
        )
        worst = reference.largest(out[b : b + 1].double(), expected.out, expected.out_bound)
        assert worst.share <= 1, worst
        assert reference.largest(lse[b : b + 1].double(), expected.lse, expected.lse_bound).share <= 1


@pytest.mark.parametrize("splits", ["auto", 3])
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(("width", "dtype"), [(64, "fp16"), (128, "bf16")])
def test_bits_are_those_of_the_numbers_that_codes_stand_for(
    width, dtype, pages, splits, tmp_path, monkeypatch
):
    write_specs(tmp_path)
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
    q, k, v, k_scale, v_scale, lengths = inputs((2, 3000, 8, 2, width), dtype, power_of_two=True)
    codes = cache_of(k, v, k_scale, v_scale, lengths, False)
    numbers = [
        (x.float() * scale[:, None, :, None]).to(DTYPES[dtype]) for x, scale in ((k, k_scale), (v, v_scale))
    ]
    whole = KVCache(*numbers, lengths)
    if pages:
        table = torch.arange(len(q) * (3000 // 8), dtype=torch.int32, device="cuda").reshape(len(q), -1)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        codes = KVCache(*(x.reshape(-1, 8, *x.shape[2:]) for x in (k, v)), lengths, table, **scales)
        whole = KVCache(*(x.reshape(-1, 8, *x.shape[2:]) for x in numbers), lengths, table)
    options = {"causal": True, "splits": splits, "return_lse": True}
    names = [str(flashgen.plan(q, cache, **options).variant) for cache in (codes, whole)]
    assert names[0].replace("_e4m3", "") == names[1], names
    results = [flashgen.attention(q, cache, **options) for cache in (codes, whole)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((300, 3000, 8, 2, 128), {"causal": True, "softcap": 20.0}),
        ((150, 2000, 4, 4, 64), {"window_size": (700, 50)}),
        ((500, 1500, 4, 1, 256), {}),
        ((200, 9000, 2, 2, 192), {"causal": True}),
    ],
    ids=str,
)
def test_a_chunk_of_a_prompt_is_near_the_numbers_that_codes_stand_for(shape, options, dtype, pages):
    """Kernels of both may have other tiles, so not to the bit; twice codes are the same bits."""
    q, k, v, k_scale, v_scale, lengths = inputs(shape, dtype, power_of_two=True)
    codes = cache_of(k, v, k_scale, v_scale, lengths, pages)
    plan = flashgen.plan(q, codes, **options)
    if torch.cuda.get_device_capability() == (9, 0):
        assert "converts_codes" in plan.variant.features
    numbers = [
        (x.float() * scale[:, None, :, None]).to(DTYPES[dtype]) for x, scale in ((k, k_scale), (v, v_scale))
    ]
    out = flashgen.attention(q, codes, **options)
    expected = flashgen.attention(q, KVCache(*numbers, codes.lengths), **options)
    size = expected.float().abs().nanmean()
    assert (out.float() - expected.float()).abs().max() <= 40 * size * torch.finfo(DTYPES[dtype]).eps
    assert torch.equal(out, flashgen.attention(q, codes, **options))


def test_nan_codes_that_are_seen_are_nan():
    q, k, v, k_scale, v_scale, lengths = inputs((1, 500, 4, 2, 64), "bf16")
    v.view(torch.uint8)[0, 3, 1] = 0xFF
    out = flashgen.attention(q, KVCache(k, v, lengths, k_scale=k_scale, v_scale=v_scale))
    assert out[0, :, 2:].isnan().all()
    assert not out[0, :, :2].isnan().any()
    assert not out[1:].isnan().any()


@pytest.mark.parametrize("queries", [1, 100])
def test_a_graph_takes_other_codes_and_scales(queries):
    q, k, v, k_scale, v_scale, lengths = inputs((queries, 900, 8, 2, 128), "bf16")
    cache = KVCache(k, v, lengths, k_scale=k_scale, v_scale=v_scale)
    out = flashgen.attention(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, cache)
        twice = flashgen.attention(q, cache)
    k_scale *= 2
    v_scale *= 3
    k.view(torch.uint8).random_(0, 0x7F)
    graph.replay()
    expected = flashgen.attention(q, cache)
    assert torch.equal(out, expected)
    assert torch.equal(twice, expected)
