"""Gradients through PyTorch on a GPU, and through CuPy: judged on the GPU in float64."""

import numpy as np
import pytest

import flashgen
from flashgen.operators import gradients
from flashgen.operators.contract import DTYPES
from flashgen.operators.masks import Band

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")

from flashgen.call import codec  # noqa: E402
from flashgen.call.record import AttentionCall, call_of  # noqa: E402

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def tensors(dtype="bf16", seqlen_q=300, seqlen_kv=400, heads=4, kv_heads=2, width=64, width_v=64):
    """q, k and v that require gradients, and the gradient of a result."""
    shapes = (seqlen_q, heads, width), (seqlen_kv, kv_heads, width), (seqlen_kv, kv_heads, width_v)
    made = [torch.randn(2, *shape, device="cuda").to(TORCH[dtype]).requires_grad_() for shape in shapes]
    return (*made, torch.randn(2, seqlen_q, heads, width_v, device="cuda").to(TORCH[dtype]))


def check(found, q, k, v, dout, dtype, scale=None, band=None, dlse=None):
    """That dq, dk and dv are within their bounds of float64."""
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    right = gradients.gradients(
        dout,
        q,
        k,
        v,
        dtype,
        q.shape[-1] ** -0.5 if scale is None else scale,
        band or Band(),
        dlse=None if dlse is None else dlse.double(),
    )
    for (name, gradient), x in zip(right.items(), found, strict=True):
        worst = gradients.largest(x.double(), *gradient)
        assert worst.share <= 1, f"{name}: {worst.describe()} at {worst.index}"


def causal(q, k):
    return Band(k.shape[1] - q.shape[1], right=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_of_a_causal_call(dtype, width):
    q, k, v, dout = tensors(dtype, width=width, width_v=width)
    out = flashgen.attention(q, k, v, causal=True)
    check(torch.autograd.grad(out, (q, k, v), dout), q, k, v, dout, dtype, band=causal(q, k))


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 500), (500, 3), (0, 64), (64, 0)], ids=str)
def test_lengths_at_the_edge(seqlens):
    q, k, v, dout = tensors("fp16", *seqlens)
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    dlse = torch.where(lse.isinf(), torch.nan, torch.randn_like(lse))  # NaN has no effect
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    check(found, q, k, v, dout, "fp16", band=causal(q, k), dlse=dlse)


def test_compiled_into_one_graph():
    q, k, v, dout = tensors()

    def loss(q, k, v):
        return (flashgen.attention(q * 0.5, k, v, causal=True).float().sin() * dout).sum()

    compiled = torch.compile(loss, fullgraph=True)
    found, expected = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (compiled, loss))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_the_operators_pass_torchs_own_checks():
    q, k, v, dout = tensors(seqlen_q=40, seqlen_kv=50)
    score_arrays, entries = codec.encode(call_of(AttentionCall, q=q, causal=True))
    absent = [None] * (len(codec.INPUTS) - 3)
    # Tensors that require gradients are what has the operators registered.
    out, lse = (x.detach() for x in flashgen.attention(q, k, v, causal=True, return_lse=True))
    torch.library.opcheck(torch.ops.flashgen.attention.default, (q, k, v, *absent, score_arrays, *entries))
    inputs = [x.detach() for x in (dout, q, k, v)]
    torch.library.opcheck(
        torch.ops.flashgen.attention_backward.default,
        (*inputs, *absent, out, lse, None, score_arrays, *entries),
        # Two runs of dq may differ in its last bits.
        rtol=2e-2,
        atol=2e-2,
    )


def test_on_another_stream(busy):
    """Inputs are only there once the stream has come to them, and gradients follow on it."""
    q, k, v, dout = tensors()
    leaves = [torch.zeros_like(x, requires_grad=True) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy(cupy.cuda.ExternalStream(stream.cuda_stream))
        with torch.no_grad():
            for leaf, x in zip(leaves, (q, k, v), strict=True):
                leaf.copy_(x)
        out = flashgen.attention(*leaves, causal=True)
    # Autograd queues the backward pass on the stream of the forward pass, whatever the current one is.
    found = torch.autograd.grad(out, leaves, dout)
    stream.synchronize()
    check(found, q, k, v, dout, "bf16", band=causal(q, k))


def test_in_a_cuda_graph():
    """Both passes, replayed with other elements; what the first replay left in the workspace does no harm."""
    q, k, v, dout = tensors("fp16")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(flashgen.attention(q, k, v), (q, k, v), dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = torch.autograd.grad(flashgen.attention(q, k, v), (q, k, v), dout)
    for _ in range(2):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        check(found, q, k, v, dout, "fp16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_gradients_are_the_same_bits(dtype, busy):
    q, k, v, dout = tensors(dtype, 1000, 1100, width=128)
    out = flashgen.attention(q, k, v, causal=True, deterministic=True)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    check(first, q, k, v, dout, dtype, band=causal(q, k))
    other = cupy.cuda.Stream(non_blocking=True)
    for i in range(100):
        if i % 10 == 0:
            busy(other)
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_arrays_of_cupy_and_a_poisoned_workspace():
    q, k, v, dout = (cupy.asarray(x.detach()) for x in tensors("fp32"))
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    plan = flashgen.plan_backward(dout, q, k, v, out, lse, causal=True)
    workspace = cupy.full(plan.workspace_bytes + 256, 0xFF, np.uint8)
    workspace = workspace[-workspace.data.ptr % 256 :]
    results = [cupy.full_like(x, np.nan) for x in (q, k, v)]
    into = dict(zip(("dq", "dk", "dv"), results, strict=True))
    plan(dout, q, k, v, None, out, lse, workspace=workspace, **into)
    found, q, k, v, dout = ([torch.as_tensor(x) for x in results], *map(torch.as_tensor, (q, k, v, dout)))
    check(found, q, k, v, dout, "fp32", band=causal(q, k))
    if plan.workspace_bytes:
        given = (cupy.asarray(x) for x in (dout, q, k, v))
        with pytest.raises(flashgen.InsufficientWorkspace, match="workspace has 16 bytes"):
            flashgen.attention_backward(*given, out, lse, causal=True, workspace=workspace[:16])


def test_a_score_modification_has_gradients():
    """Not those of plain scores."""
    q, k, v, dout = tensors("fp16")
    out = flashgen.attention(q, k, v, softcap=1.0)
    found = torch.autograd.grad(out, (q, k, v), dout)
    host = [x.detach().float().cpu().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(flashgen.attention(*host, softcap=1.0), host, dout.float().cpu())
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float().cpu(), y, rtol=2e-2, atol=2e-2)
