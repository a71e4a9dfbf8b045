"""Keys that begin after the first row, on a GPU: within the bound, beside padding of NaN; replayed graphs."""

import numpy as np
import pytest

import flashgen
from flashgen.operators import gradients, reference
from flashgen.operators.masks import Band

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Queries, room for keys, heads, kv heads, head_dim: prefill; decoding; a chunk of a prompt; a wide head.
SHAPES = (
    (300, 700, 8, 2, 128),
    (1, 5000, 8, 2, 128),
    (130, 3000, 8, 2, 64),
    (200, 300, 4, 2, 256),
)
RANGES = ((17, 1.0), (0, 0.7), (250, 0.9), (200, 0.0), (64, 1.0))


def inputs(shape, dtype):
    """q, k and v, which are NaN outside of a range, starts and lengths."""
    queries, room, heads, kv_heads, width = shape
    generator = torch.Generator("cuda").manual_seed(int(np.random.SeedSequence().entropy % 2**32))
    q, k, v = (
        torch.randn(len(RANGES), rows, count, width, device="cuda", generator=generator).to(DTYPES[dtype])
        for rows, count in ((queries, heads), (room, kv_heads), (room, kv_heads))
    )
    lengths = [max(start, int(room * share)) for start, share in RANGES]
    for b, ((start, _), length) in enumerate(zip(RANGES, lengths, strict=True)):
        for x in (k, v):
            x[b, :start], x[b, length:] = torch.nan, torch.nan
    starts = torch.tensor([start for start, _ in RANGES], dtype=torch.int32, device="cuda")
    return q, k, v, starts, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def parts(starts, lengths):
    return enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["rows", "pages", "splits"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_within_the_bound(shape, dtype, causal, kind):
    q, k, v, starts, lengths = inputs(shape, dtype)
    cache, options = flashgen.KVCache(k, v, lengths, starts=starts), {"causal": causal, "return_lse": True}
    if kind == "pages":
        pools = (x[:, : x.shape[1] // 4 * 4].reshape(-1, 4, *x.shape[2:]) for x in (k, v))
        pages = torch.arange(len(q) * (k.shape[1] // 4), dtype=torch.int32, device="cuda").reshape(len(q), -1)
        for b, (start, _) in parts(starts, lengths):
            pages[b, : start // 4] = 1 << 30
        lengths = torch.minimum(lengths, torch.tensor(pages.shape[1] * 4, device="cuda", dtype=torch.int32))
        cache = flashgen.KVCache(*pools, lengths, pages, starts=starts)
    elif kind == "splits":
        if shape[0] > 1:
            pytest.skip("splits are of few rows")
        options["splits"] = flashgen.SplitEvery(512)
    out, lse = flashgen.attention(q, cache, **options)
    for b, (start, end) in parts(starts, lengths):
        band = Band(end - start - shape[0], right=0) if causal else Band()
        rows = (x.double() for x in (q[b : b + 1], k[b : b + 1, start:end], v[b : b + 1, start:end]))
        right = reference.attention(*rows, dtype, shape[-1] ** -0.5, band)
        assert reference.largest(out[b : b + 1].double(), right.out, right.out_bound).share <= 1
        assert reference.largest(lse[b : b + 1].double(), right.lse, right.lse_bound).share <= 1
    assert torch.equal(out, flashgen.attention(q, cache, **options)[0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], (200, 300, 4, 2, 192)], ids=str)
def test_gradients_are_within_the_bound_and_0_in_the_padding(shape, dtype, deterministic):
    q, k, v, starts, lengths = inputs(shape, dtype)
    options = {"causal": True, "kv_starts": starts, "kv_lengths": lengths}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    dout = torch.randn_like(out)
    found = flashgen.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    for b, (start, end) in parts(starts, lengths):
        rows = (dout[b : b + 1], q[b : b + 1], k[b : b + 1, start:end], v[b : b + 1, start:end])
        band = Band(end - start - shape[0], right=0)
        right = gradients.gradients(*(x.double() for x in rows), dtype, shape[-1] ** -0.5, band, None)
        one = (found[0][b : b + 1], *(x[b : b + 1, start:end] for x in found[1:]))
        for x, (name, gradient) in zip(one, right.items(), strict=True):
            assert gradients.largest(x.double(), *gradient).share <= 1, name
        for x in found[1:]:
            assert not x[b, :start].any()
            assert not x[b, end:].any()


def test_a_graph_takes_other_starts():
    q, k, v, starts, lengths = inputs(SHAPES[1], "bf16")
    k, v = k.nan_to_num(), v.nan_to_num()
    options = {"kv_starts": starts, "kv_lengths": lengths}
    flashgen.attention(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v, **options)
    starts += 9
    lengths.clamp_(min=300)
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, k, v, **options))
