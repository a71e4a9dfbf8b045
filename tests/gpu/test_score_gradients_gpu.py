"""Gradients of arrays of a score modification on a GPU: within the bound of float64, bitwise repeatable,
in 16 bits, through autograd, torch.compile and CUDA graphs.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="arrays are on the GPU by PyTorch")

import flashgen  # noqa: E402
from flashgen.call.record import GradientCall, call_of  # noqa: E402
from flashgen.call.request import score_gradient_of  # noqa: E402
from flashgen.operators.masks import Band  # noqa: E402
from flashgen.operators.modification import modification_of  # noqa: E402
from flashgen.operators.reference import largest  # noqa: E402
from flashgen.operators.score_gradient_reference import score_gradient  # noqa: E402
from flashgen.runtime.adopted import viewed  # noqa: E402
from gpu.cases import new_seed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
BATCH, ROWS, KEYS, HEADS, KV_HEADS = 2, 300, 340, 4, 2
BIAS = "score + a[b, h, q, kv]"
CASES = {
    "full": (BIAS, (BATCH, HEADS, ROWS, KEYS), {}),
    "of heads": (BIAS, (HEADS, ROWS, KEYS), {"causal": True}),
    "of entries": (BIAS, (BATCH, 1, ROWS, KEYS), {"window_size": (60, 20)}),
    "of pairs": (BIAS, (ROWS, KEYS), {"mask": True}),
    "of keys": ("5 * tanh((score + a[b, h, q, kv]) / 5)", (BATCH, 1, 1, KEYS), {}),
    "rows": ("score * a[h, q]", (HEADS, ROWS), {"causal": True}),
    "turned": ("score + a[kv, h, q]", (KEYS, HEADS, ROWS), {}),
    "slope": ("score + a[b, h] * (kv - q) / 64", (BATCH, HEADS), {"causal": True}),
    "table": ("score + a[h, min(abs(kv - q), 31)]", (HEADS, 32), {}),
    "distances": ("score + a[kv - q + 339]", (700,), {"causal": True}),
    "one": ("score * a[0]", (1,), {}),
}


def drawn(dtype, widths=(72, 40)):
    random = torch.Generator("cuda").manual_seed(new_seed())
    rows, keys = (BATCH, ROWS, HEADS), (BATCH, KEYS, KV_HEADS)
    sizes = (*rows, widths[0]), (*keys, widths[0]), (*keys, widths[1]), (*rows, widths[1])
    return [torch.randn(size, generator=random, device="cuda").to(DTYPES[dtype]) for size in sizes]


def verdict_of(call, name, gradient):
    """The worst element of a gradient, of a call on the GPU."""
    request = score_gradient_of(call, name)
    _, views = viewed(request.operator, request.by_name())
    problem = request.operator.normalise(tuple(views.values()), request.options, request.scalars)
    named = {of: x for of, x in request.by_name().items() if x is not None}
    mask = named.get("mask")
    right = score_gradient(
        *(named[of].double() for of in ("dout", "q", "k", "v")),
        problem.dtype,
        problem.softmax_scale,
        problem.extents,
        Band.of(problem),
        None if mask is None else mask.bool(),
        named["dlse"].double() if "dlse" in named else None,
        modification_of(problem, named, torch),
        array_dtype=next(x.dtype for x in problem.score.arrays if x.name == problem.score.wrt),
    )
    return largest(gradient.double().reshape(problem.extents), *right)


def check(case, dtype, array_dtype="fp32", widths=(72, 40)):
    formula, shape, options = CASES[case]
    q, k, v, dout = drawn(dtype, widths)
    array = torch.randn(shape, device="cuda").to(DTYPES[array_dtype])
    options = options | {"score": formula, "params": {"a": array}}
    if options.get("mask"):
        options["mask"] = torch.rand(ROWS, KEYS, device="cuda") < 0.3
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    dlse = torch.randn_like(lse)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    *others, gradient = flashgen.attention_backward(**arrays, dparams=("a",), **options)
    assert gradient.dtype == array.dtype
    assert gradient.shape == array.shape
    worst = verdict_of(call_of(GradientCall, **arrays, **options), "a", gradient)
    assert worst.share <= 1, worst
    again = flashgen.attention_backward(**arrays, dparams=("a",), **options)
    assert torch.equal(again[-1], gradient)
    assert len(others) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_within_the_bound(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("array_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", ["full", "of heads", "of keys", "rows", "slope", "table"])
def test_arrays_of_16_bits(case, array_dtype):
    check(case, "bf16", array_dtype)


@pytest.mark.parametrize("widths", [(8, 8), (64, 64), (128, 128), (192, 128), (256, 256)])
def test_head_dims(widths):
    check("of heads", "bf16", widths=widths)


@pytest.mark.parametrize("array_dtype", ["fp32", "bf16"])
def test_a_bias_of_many_batch_entries(array_dtype):
    """Few tiles, so Hopper's kernels split the batch entries into parts."""
    random = torch.Generator("cuda").manual_seed(new_seed())
    q, k, v, dout = (
        torch.randn(120, rows, 2, 32, generator=random, device="cuda").to(torch.bfloat16)
        for rows in (150, 200, 200, 150)
    )
    bias = torch.randn(2, 150, 200, generator=random, device="cuda").to(DTYPES[array_dtype])
    options = {"score": "bias", "params": {"bias": bias}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    *_, gradient = flashgen.attention_backward(**arrays, dparams=("bias",), **options)
    worst = verdict_of(call_of(GradientCall, **arrays, **options), "bias", gradient)
    assert worst.share <= 1, worst
    *_, again = flashgen.attention_backward(**arrays, dparams=("bias",), **options)
    assert torch.equal(again, gradient)


def test_many_scores_and_large_offsets():
    """More than 2^31 bytes of a bias and of its gradient, so that an offset needs 64 bits."""
    q, k, v = (torch.randn(1, 12288, 4, 32, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    bias = torch.zeros(4, 12288, 12288, device="cuda", requires_grad=True)
    out = flashgen.attention(q, k, v, causal=True, score="bias", params={"bias": bias})
    out.float().square().sum().backward()
    # Of each row the gradient of a softmax sums to 0, but for what rounding `out` moves delta by.
    size = 2 * out.detach().float().square().sum(-1)[0].T
    assert (bias.grad.sum(-1).abs() <= 2.0**-6 * size + 1e-4).all()
    assert not bias.grad[:, 0, 1:].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_autograd(compiled):
    q, k, v, dout = drawn("bf16", (64, 64))
    bias = torch.randn(HEADS, ROWS, KEYS, device="cuda", requires_grad=True)

    def call(q, k, v, bias):
        return flashgen.attention(q, k, v, score="bias", params={"bias": bias})

    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = (torch.compile(call, fullgraph=True) if compiled else call)(*tensors, bias)
    *_, gradient = torch.autograd.grad(out, (*tensors, bias), dout)
    heads = torch.arange(HEADS, device="cuda") // (HEADS // KV_HEADS)
    plain = [x.detach().float().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", plain[0], plain[1][:, :, heads]) / 8 + bias
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), plain[2][:, :, heads])
    (right,) = torch.autograd.grad(expected, bias, dout.float())
    torch.testing.assert_close(gradient, right, rtol=2e-2, atol=2e-2)


def test_in_a_graph():
    q, k, v, dout = drawn("bf16", (64, 64))
    table = torch.randn(HEADS, 16, device="cuda")
    options = {"score": "score + t[h, min(abs(kv - q), 15)]", "params": {"t": table}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)

    def backward():
        return flashgen.attention_backward(dout, q, k, v, out, lse, dparams=("t",), **options)

    expected = backward()[-1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = backward()[-1]
    result.zero_()
    graph.replay()
    assert torch.equal(result, expected)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    q, k, v, dout = (cupy.asarray(x.float().cpu().numpy(), np.float16) for x in drawn("fp16", (64, 64)))
    bias = cupy.zeros((HEADS, ROWS, KEYS), np.float16)
    options = {"score": "bias", "params": {"bias": bias}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    *_, gradient = flashgen.attention_backward(dout, q, k, v, out, lse, dparams=("bias",), **options)
    assert isinstance(gradient, cupy.ndarray)
    assert gradient.dtype == np.float16
    assert float(abs(gradient.astype(np.float32).sum(-1)).max()) < 0.05
