"""Latent caches of FP8 on a GPU: within the bound, beside rows of NaN; replayed graphs."""

import numpy as np
import pytest

import flashgen
from flashgen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from flashgen.operators.latentrows import LAYOUT, unpacked

torch = pytest.importorskip("torch")
from gpu.test_mla_gpu import DTYPES, SCALE, SHAPES, cache_of, check, check_family, halves_of  # noqa: E402

pytestmark = pytest.mark.gpu


def codes_of(cache, rows, of_scale):
    """A cache of codes of the numbers of another, and the numbers of the codes of each sequence."""
    scale = torch.tensor(of_scale, device="cuda")
    codes = (cache.k.float() / scale).to(torch.float8_e4m3fn)
    numbers = [(x.float() / scale).to(torch.float8_e4m3fn).double() * of_scale for x in rows]
    return flashgen.KVCache(codes, None, cache.lengths, cache.pages, head_dim_v=512, k_scale=scale), numbers


def packed_rows(x):
    """Rows of the layout that carry their scales, of numbers (..., 576)."""
    latent = x[..., :512].float().unflatten(-1, (4, 128))
    scales = latent.abs().amax(-1, keepdim=True) / 448
    parts = (
        (latent / scales).to(torch.float8_e4m3fn).flatten(-2),
        scales[..., 0].contiguous(),
        x[..., 512:].bfloat16(),
    )
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def numbers_of(rows):
    bits = unpacked(rows.cpu().numpy()).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).double().cuda()


@pytest.mark.parametrize("page", [0, 64, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", [*DTYPES, LAYOUT])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("latent_family", ["sm90", "sm80"], indirect=True)
def test_results_are_within_the_bound(latent_family, shape, layout, causal, page):
    queries, heads, lengths = shape
    dtype = "bf16" if layout == LAYOUT else layout
    whole, rows = cache_of(lengths, dtype, page)
    if layout == LAYOUT:
        cache = flashgen.KVCache(
            packed_rows(whole.k), None, whole.lengths, whole.pages, head_dim_v=512, kv_dtype=LAYOUT
        )
        rows = [numbers_of(packed_rows(x)) for x in rows]
    else:
        cache, rows = codes_of(whole, rows, 0.02)
    q = torch.randn(len(lengths), queries, heads, 576, device="cuda").to(DTYPES[dtype])
    options = {"causal": causal, "softmax_scale": SCALE, "return_lse": True}
    out, lse = flashgen.attention(q, cache, **options)
    check_family(latent_family, q, cache, **options)
    check(out, lse, q, rows, dtype, causal, scaled=layout != LAYOUT)
    for _ in range(3):
        assert torch.equal(out, flashgen.attention(q, cache, **options)[0])
    q_nope, q_rope = halves_of(q)
    assert torch.equal(out, flashgen.attention(q_nope, cache, q_rope=q_rope, **options)[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_flash_mla_reads_rows_that_carry_their_scales(dtype):
    whole, rows = cache_of((700, 3), "bf16", 64)
    q = torch.randn(2, 2, 16, 576, device="cuda", dtype=torch.bfloat16)
    out, lse = flash_mla_with_kvcache(
        q,
        packed_rows(whole.k).view(dtype),
        whole.pages,
        whole.lengths,
        512,
        *get_mla_metadata(),
        SCALE,
        causal=True,
        is_fp8_kvcache=True,
    )
    check(out, lse, q, [numbers_of(packed_rows(x)) for x in rows], "bf16", True)


@pytest.mark.parametrize("page", [0, 48])
def test_a_graph_takes_other_lengths(page):
    whole, rows = cache_of((3000, 1000, 2048), "bf16", page)
    cache, _ = codes_of(whole, rows, 0.02)
    q = torch.randn(3, 1, 32, 576, device="cuda", dtype=torch.bfloat16)
    flashgen.attention(q, cache, softmax_scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, cache, softmax_scale=SCALE)
    cache.lengths.sub_(torch.tensor([2999, 17, 0], dtype=torch.int32, device="cuda"))
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, cache, softmax_scale=SCALE))
