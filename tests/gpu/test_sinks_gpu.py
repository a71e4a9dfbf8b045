"""Sinks on the GPU: forward, few rows on many keys, sequences, gradients; the same bits each time."""

import numpy as np
import pytest

import flashgen
from flashgen.operators import gradients, reference
from flashgen.operators.masks import Band

torch = pytest.importorskip("torch")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Prefill; rows that see nothing; few rows on many keys, which are split; a group that does not divide a tile;
# many rows on many keys; a large head dim.
SHAPES = (
    (2, 1000, 1000, 8, 2, 128, True),
    (1, 300, 200, 4, 4, 64, True),
    (3, 1, 5000, 8, 2, 128, False),
    (2, 5, 9000, 6, 2, 64, True),
    (1, 256, 8192, 8, 1, 128, True),
    (1, 700, 700, 4, 2, 256, False),
)


def inputs(shape, dtype, sinks_dtype, seed=0):
    batch, queries, keys, heads, kv_heads, width, _ = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    q, k, v = (
        random(batch, rows, count, width).to(DTYPES[dtype])
        for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    sinks = (3 * random(heads)).to(DTYPES[sinks_dtype])
    sinks[0] = 40.0
    return q, k, v, sinks


def band_of(shape):
    _, queries, keys, *_, causal = shape
    return Band(keys - queries, right=0) if causal else Band()


@pytest.mark.parametrize("sinks_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_within_the_bound(shape, dtype, sinks_dtype):
    q, k, v, sinks = inputs(shape, dtype, sinks_dtype)
    out, lse = flashgen.attention(q, k, v, causal=shape[-1], sinks=sinks, return_lse=True)
    right = reference.attention(
        *(x.double() for x in (q, k, v)), dtype, shape[5] ** -0.5, band_of(shape), sinks=sinks.double()
    )
    assert reference.largest(out.double(), right.out, right.out_bound).share <= 1
    assert reference.largest(lse.double(), right.lse, right.lse_bound).share <= 1
    again = flashgen.attention(q, k, v, causal=shape[-1], sinks=sinks)
    assert torch.equal(out, again)


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[5]], ids=str)
def test_gradients_are_within_the_bound(shape, dtype, algorithm):
    if dtype == "fp32" and shape[5] > 192 and torch.cuda.get_device_capability()[1]:
        pytest.skip("no fp32 gradients at this head dim on such GPUs")
    q, k, v, sinks = inputs(shape, dtype, "fp32")
    options = {"causal": shape[-1], "sinks": sinks}
    out, lse = flashgen.attention(q, k, v, return_lse=True, algorithm=algorithm, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = flashgen.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    right = gradients.gradients(
        *(x.double() for x in (dout, q, k, v)),
        dtype,
        shape[5] ** -0.5,
        band_of(shape),
        None,
        dlse.double(),
        sinks=sinks.double(),
    )
    for x, (name, gradient) in zip(found, right.items(), strict=True):
        assert gradients.largest(x.double(), *gradient).share <= 1, name
    again = flashgen.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert torch.equal(found[3], again[3])


@pytest.mark.parametrize("paged", [False, True])
def test_windows_of_caches(paged):
    """As gpt-oss has them: a window and all keys in turn, with lengths, in pages."""
    q, k, v, sinks = inputs((4, 1, 4096, 8, 2, 64, True), "bf16", "bf16")
    lengths = torch.tensor([4096, 1, 77, 2000], dtype=torch.int32, device="cuda")
    pages = torch.arange(4 * 64, dtype=torch.int32, device="cuda").reshape(4, 64) if paged else None
    cache = flashgen.KVCache(*((x.reshape(256, 64, 2, 64) if paged else x) for x in (k, v)), lengths, pages)
    for window in ((127, 0), (-1, -1)):
        out, lse = flashgen.attention(q, cache, window_size=window, sinks=sinks, return_lse=True)
        for b, length in enumerate(lengths.tolist()):
            one = slice(b, b + 1)
            left = window[0] if window[0] >= 0 else length
            right = reference.attention(
                q[one].double(),
                k[one, :length].double(),
                v[one, :length].double(),
                "bf16",
                0.125,
                Band(length - 1, left, 0),
                sinks=sinks.double(),
            )
            assert reference.largest(out[one].double(), right.out, right.out_bound).share <= 1
            assert reference.largest(lse[one].double(), right.lse, right.lse_bound).share <= 1


def test_packed_sequences_have_the_gradients_of_each():
    ends = torch.tensor([0, 700, 700, 703, 2000], dtype=torch.int32, device="cuda")
    q, k, v, sinks = inputs((1, 2000, 2000, 8, 2, 128, True), "bf16", "fp32")
    q, k, v = (x[0].requires_grad_() for x in (q, k, v))
    sinks.requires_grad_()
    out = flashgen.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, causal=True, sinks=sinks)
    dout = torch.randn_like(out)
    (dsinks,) = torch.autograd.grad(out, sinks, dout)
    total = np.zeros(8)
    for first, last in ((0, 700), (700, 703), (703, 2000)):
        part = flashgen.attention(*(x[None, first:last] for x in (q, k, v)), causal=True, sinks=sinks)
        total += torch.autograd.grad(part, sinks, dout[None, first:last])[0].double().cpu().numpy()
    np.testing.assert_allclose(dsinks.double().cpu().numpy(), total, 1e-4, 1e-4)


def test_a_graph_takes_other_sinks():
    q, k, v, sinks = inputs(SHAPES[2], "bf16", "fp32")
    out = flashgen.attention(q, k, v, sinks=sinks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v, sinks=sinks)
    sinks += 1
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, k, v, sinks=sinks))
