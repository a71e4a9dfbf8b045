"""merge and cascade on a GPU: within the bound of float64, in place of nothing that a part has not seen,
bitwise repeatable, in a graph with other inputs."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="arrays lie on the GPU by PyTorch")

import flashgen  # noqa: E402
from flashgen.operators import reference  # noqa: E402
from flashgen.operators.masks import Band  # noqa: E402
from flashgen.operators.merge import normalise  # noqa: E402
from flashgen.operators.merge_reference import judge  # noqa: E402
from flashgen.runtime.arrays import view  # noqa: E402
from gpu.cases import new_seed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Batch, queries, heads, head dim: one row, decode, ragged thread blocks, long rows, many rows.
SHAPES = ((1, 1, 1, 8), (64, 1, 32, 128), (3, 37, 5, 104), (2, 130, 3, 256), (2, 4096, 16, 64))


def generator():
    return torch.Generator("cuda").manual_seed(new_seed())


def normal(random, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=random, device="cuda").to(dtype)


def part(random, shape, dtype, spread):
    """Random o and lse; a tenth of the rows saw no key: -inf or, as in flash-attn, +inf, and NaN in o."""
    batch, seqlen, heads, _ = shape
    lse = spread * normal(random, batch, heads, seqlen)
    drawn = torch.rand(lse.shape, generator=random, device="cuda")
    lse[drawn < 0.1] = -torch.inf
    lse[drawn < 0.05] = torch.inf
    o = normal(random, *shape, dtype=dtype)
    o[torch.isinf(lse).swapaxes(1, 2)] = torch.nan
    return o, lse


def on_host(x):
    return x.float().cpu().numpy()


@pytest.mark.parametrize("spread", [1.0, 60.0, 3000.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_the_bound(dtype, shape, spread):
    random = generator()
    parts = [part(random, shape, DTYPES[dtype], spread) for _ in range(2)]
    flat = [x for pair in parts for x in pair]
    out = torch.full(shape, torch.nan, dtype=DTYPES[dtype], device="cuda")
    lse = torch.full_like(flat[1], torch.nan)
    assert flashgen.merge(parts, out=out, lse_out=lse)[0] is out
    problem = normalise(*(view(x, "x") for x in flat))
    verdict = judge(problem, *map(on_host, (*flat, out, lse)))
    assert verdict.ok, verdict
    again = flashgen.merge(parts)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_strides():
    random = generator()
    parts = [part(random, (2, 50, 6, 72), torch.float16, 1.0) for _ in range(2)]
    right = flashgen.merge(parts)
    strided = [(o.transpose(1, 2).contiguous().transpose(1, 2), lse) for o, lse in parts]
    memory = torch.full((2, 50, 8, 80), torch.nan, dtype=torch.float16, device="cuda")
    out, lse = flashgen.merge(strided, out=memory[:, :, :6, :72])
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])
    assert memory[:, :, 6:].isnan().all()
    assert memory[..., 72:].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "shared", "own"), [(16, 1, 4000, 300), (3, 70, 1000, 129), (2, 512, 8192, 512)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cascade_is_attention_over_all_keys(dtype, batch, seqlen_q, shared, own, causal):
    random, element = generator(), DTYPES[dtype]
    q = normal(random, batch, seqlen_q, 8, 64, dtype=element)
    given = [
        (normal(random, size, count, 2, 64, dtype=element), normal(random, size, count, 2, 64, dtype=element))
        for size, count in ((1, shared), (batch, own))
    ]
    k, v = (
        torch.cat([x.expand(batch, -1, -1, -1) for x in which], dim=1) for which in zip(*given, strict=True)
    )
    out, lse = flashgen.cascade(q, given, causal=causal, return_lse=True)
    band = Band(shared + own - seqlen_q, right=0) if causal else Band()
    expected = reference.attention(q.double(), k.double(), v.double(), dtype, 64**-0.5, band)
    # A result of each part and one of the merge, each as far off as one of all keys may be.
    assert reference.largest(out.double(), expected.out, 4 * expected.out_bound).share <= 1
    assert reference.largest(lse.double(), expected.lse, 4 * expected.lse_bound).share <= 1


def test_a_stream_of_its_own_and_queries_that_have_to_be_copied():
    random = generator()
    q = normal(random, 50, 4, 8, 64, dtype=torch.bfloat16).swapaxes(0, 1)
    given = [tuple(normal(random, size, 700, 2, 64, dtype=torch.bfloat16) for _ in "kv") for size in (1, 4)]
    right = flashgen.cascade(q.contiguous(), given, return_lse=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    found = flashgen.cascade(q, given, return_lse=True, stream=stream)
    stream.synchronize()
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


def test_a_graph_replays_with_other_inputs():
    random = generator()
    q = normal(random, 8, 1, 16, 128, dtype=torch.bfloat16)
    given = [
        tuple(normal(random, size, count, 4, 128, dtype=torch.bfloat16) for _ in "kv")
        for size, count in ((1, 3000), (8, 90))
    ]
    out = torch.full_like(q, torch.nan)
    flashgen.cascade(q, given, causal=True, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashgen.cascade(q, given, causal=True, out=out)
    q.copy_(normal(random, *q.shape, dtype=q.dtype))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, flashgen.cascade(q, given, causal=True))


@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_caches_are_parts(seqlen_q):
    """Beside the pages of the prefix in the table of each sequence."""
    random, batch, prefix_pages = generator(), 4, 10
    q = normal(random, batch, seqlen_q, 16, 128, dtype=torch.bfloat16)
    k, v = (normal(random, prefix_pages + 8 * batch, 16, 2, 128, dtype=torch.bfloat16) for _ in "kv")
    order = torch.randperm(len(k), generator=random, device="cuda").int()
    shared, tables = order[:prefix_pages][None], order[prefix_pages:].view(batch, 8)
    shared_length = torch.tensor([16 * prefix_pages], dtype=torch.int32, device="cuda")
    lengths = torch.randint(seqlen_q, 129, (batch,), generator=random, device="cuda").int()
    prefix, own = flashgen.KVCache(k, v, shared_length, shared), flashgen.KVCache(k, v, lengths, tables)
    whole = torch.cat([shared.expand(batch, -1), tables], 1)
    found = flashgen.cascade(q, [prefix, own], causal=True, return_lse=True)
    cache = flashgen.KVCache(k, v, lengths + shared_length, whole)
    right = flashgen.attention(q, cache, causal=True, return_lse=True)
    torch.testing.assert_close(found[0], right[0], rtol=2e-2, atol=5e-3)
    torch.testing.assert_close(found[1], right[1], rtol=1e-3, atol=1e-3)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(new_seed())
    q = rng.standard_normal((20, 3, 4, 32), np.float32).swapaxes(0, 1)
    given = [tuple(rng.standard_normal((size, 40, 2, 32), np.float32) for _ in "kv") for size in (1, 3)]
    right = flashgen.cascade(q, given, causal=True)
    there = [tuple(map(cupy.asarray, pair)) for pair in given]
    # As NumPy's strides: q of all entries is no one sequence, so it is copied.
    strided = cupy.asarray(np.ascontiguousarray(q.swapaxes(0, 1))).swapaxes(0, 1)
    found = flashgen.cascade(strided, there, causal=True, stream=cupy.cuda.Stream(null=True))
    assert isinstance(found, cupy.ndarray)
    np.testing.assert_allclose(cupy.asnumpy(found), right, rtol=1e-4, atol=1e-5)
