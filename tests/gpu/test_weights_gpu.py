"""Attention weights on a GPU: within the bound of float64, beside any forward kernel, bitwise
repeatable, in plans, graphs, autograd and torch.compile.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="arrays are on the GPU by PyTorch")

import flashgen  # noqa: E402
from flashgen.operators.masks import Band  # noqa: E402
from flashgen.operators.reference import largest  # noqa: E402
from flashgen.operators.weights_reference import judge, weights  # noqa: E402
from gpu.cases import new_seed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Batch, queries, keys, heads, kv heads, head dim.
SHAPES = (
    (1, 1, 1, 1, 1, 8),
    (2, 100, 150, 4, 2, 72),
    (1, 64, 64, 2, 2, 128),
    (3, 7, 1000, 6, 1, 40),
    (1, 300, 37, 2, 2, 256),
)
MASKS = ({}, {"causal": True}, {"window_size": (30, 5)}, {"mask": True}, {"mask": True, "causal": True})


def drawn(shape, dtype, spread=1.0):
    random = torch.Generator("cuda").manual_seed(new_seed())
    batch, rows, keys, heads, kv_heads, width = shape
    sizes = (batch, rows, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width)
    q, k, v = (torch.randn(size, generator=random, device="cuda") for size in sizes)
    return [(spread * q).to(DTYPES[dtype]), k.to(DTYPES[dtype]), v.to(DTYPES[dtype])]


def options_of(mask, shape):
    options = dict(mask)
    if options.get("mask"):
        options["mask"] = torch.rand(shape[1], shape[2], device="cuda") < 0.3
    return options


def on_host(x):
    return x.float().cpu().numpy()


def verdict_of(q, k, result, options):
    problem = flashgen.plan(q, k, k, return_weights=True, **options).weights.problem
    named = {"q": on_host(q), "k": on_host(k), "weights": result.cpu().numpy()}
    if "mask" in options:
        named["mask"] = options["mask"].cpu().numpy()
    for param in problem.score.arrays if problem.score else ():
        named[param.name] = on_host(options["alibi_slopes"])
    return judge(problem, named)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_the_bound(dtype, shape, mask):
    q, k, v = drawn(shape, dtype)
    options = options_of(mask, shape)
    out, lse, result = flashgen.attention(q, k, v, return_lse=True, return_weights=True, **options)
    verdict = verdict_of(q, k, result, options)
    assert verdict.ok, verdict
    alone = flashgen.attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out, alone[0])
    assert torch.equal(lse, alone[1])
    assert torch.equal(flashgen.attention(q, k, v, return_weights=True, **options)[1], result)


@pytest.mark.parametrize("algorithm", ["naive", "v1", "v2", "v3"])
def test_the_lse_of_any_algorithm(algorithm):
    q, k, v = drawn((2, 256, 256, 4, 4, 128), "bf16")
    _, result = flashgen.attention(q, k, v, causal=True, algorithm=algorithm, return_weights=True)
    verdict = verdict_of(q, k, result, {"causal": True})
    assert verdict.ok, verdict


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_score_modifications(score, dtype):
    q, k, v = drawn((2, 100, 150, 4, 2, 64), dtype)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], device="cuda")
    options = {"softcap": 5.0} if score == "softcap" else {"alibi_slopes": slopes, "causal": True}
    _, result = flashgen.attention(q, k, v, return_weights=True, **options)
    verdict = verdict_of(q, k, result, options)
    assert verdict.ok, verdict


def test_many_keys_and_large_offsets():
    """More than 2^31 bytes of weights, so that an offset needs 64 bits."""
    q, k, v = drawn((1, 16384, 16384, 3, 1, 64), "bf16")
    _, result = flashgen.attention(q, k, v, causal=True, return_weights=True)
    sums = result.sum(dim=-1, dtype=torch.float64)
    assert (sums - 1).abs().max() < 1e-4
    rows = torch.tensor([0, 1, 8191, 16383], device="cuda")
    for head in range(3):
        right = weights(
            q[:, rows, head : head + 1].double(),
            k.double(),
            "bf16",
            64**-0.5,
            Band(),
            torch.arange(16384, device="cuda") > rows[:, None],
        )
        worst = largest(result[:, head : head + 1, rows].double(), right.weights, right.bound)
        assert worst.share <= 1, worst


@pytest.mark.parametrize("spread", [30.0, 1000.0])
def test_large_scores(spread):
    q, k, v = drawn((1, 100, 150, 2, 2, 128), "bf16", spread)
    _, result = flashgen.attention(q, k, v, return_weights=True)
    assert result.max() <= 1
    verdict = verdict_of(q, k, result, {})
    assert verdict.ok, verdict


def test_rows_that_see_nothing():
    q, k, v = drawn((1, 130, 45, 2, 2, 64), "fp16")
    _, result = flashgen.attention(q, k, v, causal=True, return_weights=True)
    assert (result[:, :, :85] == 0).all()


def test_a_plan_in_a_graph():
    q, k, v = drawn((2, 100, 150, 4, 2, 64), "bf16")
    plan = flashgen.plan(q, k, v, causal=True, return_lse=True, return_weights=True)
    names = [step.variant.name for step in plan.steps]
    assert names[-1] == "attention_weights_hdim256_bf16_causal_gqa_sm80"
    plan(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, result = plan(q, k, v)
    for x, y in zip((q, k, v), drawn((2, 100, 150, 4, 2, 64), "bf16"), strict=True):
        x.copy_(y)
    graph.replay()
    right = flashgen.attention(q, k, v, causal=True, return_lse=True, return_weights=True)
    for x, y in zip((out, lse, result), right, strict=True):
        assert torch.equal(x, y)


def test_on_another_stream():
    q, k, v = drawn((2, 100, 150, 4, 2, 64), "bf16")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    results = flashgen.attention(q, k, v, stream=stream, return_weights=True)
    stream.synchronize()
    for x, y in zip(results, flashgen.attention(q, k, v, return_weights=True), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("compiled", [False, True])
def test_autograd(compiled):
    tensors = [x.requires_grad_() for x in drawn((2, 100, 150, 4, 2, 64), "bf16")]

    def call(q, k, v):
        return flashgen.attention(q, k, v, causal=True, return_weights=True)

    out, result = (torch.compile(call, fullgraph=True) if compiled else call)(*tensors)
    assert not result.requires_grad
    out.sum().backward()
    gradients = [x.grad.clone() for x in tensors]
    assert all(torch.isfinite(x).all() for x in gradients)
    verdict = verdict_of(*(x.detach() for x in tensors[:2]), result, {"causal": True})
    assert verdict.ok, verdict


def test_warmup_loads_the_kernel():
    calls = [{"q": (1, 64, 2, 64), "operator": "attention_weights", "dtype": x} for x in DTYPES]
    assert flashgen.warmup(calls) == tuple(f"attention_weights_hdim256_{x}_sm80" for x in DTYPES)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.asarray(on_host(x), np.float16) for x in drawn((2, 33, 50, 4, 2, 40), "fp16"))
    out, result = flashgen.attention(q, k, v, return_weights=True)
    assert isinstance(result, cupy.ndarray)
    products = cupy.einsum("bhij,bjhd->bihd", result, cupy.repeat(v.astype(np.float32), 2, axis=2))
    assert float(abs(products - out).max()) < 5e-3
