"""Gradients of sequences of several lengths on a GPU: within the bound in poisoned memory, 0 in rows of no
sequence, the same bits each time where that was asked for, replay with other lengths."""

from __future__ import annotations

import dataclasses
import itertools
import secrets

import pytest

import flashgen
from flashgen.families.load import load_specs
from flashgen.runtime.device import device
from flashgen.schedule.dispatch import runs_on
from flashgen.simulator.example import Shape, make
from gpu.copies import computed

pytestmark = pytest.mark.gpu

# Of each family each mask type of the usual head dims, then other head dims, dtypes, orders of dQ and
# targets.
NAMES = (
    *(f"{d}_bf16{mask}_gqa_sm90" for d in (64, 128) for mask in ("", "_causal", "_local")),
    "32_fp16_causal_sm90",
    "96_bf16_local_sm90",
    "128_fp16_sm90",
    "192_fp16_local_sm90",
    "192_128_bf16_causal_gqa_sm90",
    "256_bf16_gqa_sm90",
    "256_fp16_causal_sm90",
    "64_fp16_ordered_sm90",
    "128_bf16_causal_ordered_gqa_sm90",
    "192_128_bf16_causal_ordered_sm90",
    "256_fp16_local_ordered_gqa_sm90",
    "192_128_bf16_causal_pair_gqa_sm90",
    "192_fp16_local_pair_sm90",
    "192_bf16_ordered_pair_gqa_sm90",
    "256_bf16_causal_pair_gqa_sm90",
    "256_fp16_ordered_pair_sm90",
    "128_bf16_causal_fp32dkv_gqa_sm90",
    "64_fp16_local_ordered_fp32dkv_sm90",
    "192_128_bf16_causal_fp32dkv_pair_gqa_sm90",
    "128_bf16_causal_fp32dkv_gqa_sm80",
    *(f"{d}_bf16{mask}_gqa_sm80" for d in (64, 128) for mask in ("", "_causal", "_local")),
    "32_fp16_causal_ordered_sm86",
    "64_fp16_local_ordered_gqa_sm80",
    "96_bf16_sm80",
    "128_fp32_causal_gqa_sm80",
    "128_fp16_causal_ordered_sm80",
    "192_128_bf16_causal_sm80",
    "256_fp16_causal_sm80",
    "256_bf16_sm86",
)
MAIN = {
    variant.name.removeprefix("flash_bwd_varlen_hdim"): variant
    for spec in load_specs()
    if spec.operator == "attention_backward" and spec.has_lengths
    for variant in spec.variants()
    if variant.is_main
}
# Small enough that the float64 takes seconds of the host.
SHAPES = (Shape(300, 500, batch=7), Shape(130, 70, batch=40))


@pytest.mark.parametrize("name", NAMES)
def test_within_the_bound_and_all_else_is_zero(name):
    variant = MAIN[name]
    if not runs_on(variant, device(0)):
        pytest.skip(f"{device(0)} does not run it")
    seed = secrets.randbits(32)
    for shape in SHAPES:
        if variant.gqa != "mha":
            shape = dataclasses.replace(shape, heads=4, kv_heads=2)
        for each in range(seed, seed + 2):
            example = make(variant, shape, each)
            found = computed(example, variant, ("dq", "dk", "dv"))
            arrays = zip(example.problem.operator.arguments, example.arrays, strict=True)
            whole = tuple(found.get(argument.name, x) for argument, x in arrays)
            verdict = dataclasses.replace(example, arrays=whole).judge()
            assert verdict.ok, f"{shape}, seed {each}: {verdict}"


def packed(torch, lengths, heads=8, kv_heads=2, width=128):
    """q, k, v, a gradient of the result and cu_seqlens of sequences of these lengths."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    made = (
        torch.randn(sum(lengths), of, width, device="cuda", dtype=torch.bfloat16)
        for of in (heads, kv_heads, kv_heads, heads)
    )
    return (*made, cu)


def expected_gradients(torch, q, k, v, dout, ends, **options):
    """Those of each sequence by a call of its own, one after another; 0 behind the last one."""
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for a, b in itertools.pairwise(ends):
        own = [x[a:b].detach().requires_grad_() for x in (q, k, v)]
        if b > a:
            out = flashgen.attention(*own, **options)
            for x, y in zip(found, torch.autograd.grad(out, own, dout[a:b]), strict=True):
                x[a:b] = y
    return found


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (200, 0)}], ids=str)
def test_autograd_of_packed_sequences(options):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch does not see a GPU")
    lengths = [*torch.randint(1, 900, (20,)).tolist(), 0, 3000, 1]
    q, k, v, dout, cu = packed(torch, lengths)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flashgen.attention(*leaves, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=3000, **options)
    found = torch.autograd.grad(out, leaves, dout)
    for x, y in zip(found, expected_gradients(torch, q, k, v, dout, cu.tolist(), **options), strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=0.02 * float(y.abs().max()))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_deterministic_gradients_of_packed_sequences_repeat_to_the_bit(width, busy):
    """Also while the GPU has other work, so that thread blocks come in other orders."""
    cupy, torch = (pytest.importorskip(name) for name in ("cupy", "torch"))
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch does not see a GPU")
    lengths = [*torch.randint(1, 900, (20,)).tolist(), 0, 3000, 1]
    q, k, v, dout, cu = packed(torch, lengths, width=width)
    given = {
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "max_seqlen_q": 3000,
        "max_seqlen_kv": 3000,
        "causal": True,
    }
    out, lse = flashgen.attention(q, k, v, return_lse=True, **given)
    other = cupy.cuda.Stream(non_blocking=True)
    first = None
    for repeat in range(100):
        if repeat % 10 == 0:
            busy(other)
        found = flashgen.attention_backward(dout, q, k, v, out, lse, deterministic=True, **given)
        first = first or found
        assert all(torch.equal(*pair) for pair in zip(found, first, strict=True))
    expected = expected_gradients(torch, q, k, v, dout, cu.tolist(), causal=True)
    for x, y in zip(first, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=0.02 * float(y.abs().max()))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_is_replayed_with_other_lengths(deterministic):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch does not see a GPU")
    tokens, batch = 4000, 12
    q, k, v, dout, cu = packed(torch, [tokens // batch] * batch + [tokens % batch], width=64)
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True, **given)
    plan = flashgen.plan_backward(dout, q, k, v, out, lse, causal=True, deterministic=deterministic, **given)
    results = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, **given, **results}
    plan(**arrays, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(**arrays, workspace=workspace)
    for _ in range(3):
        cu[1:] = torch.randint(0, tokens + 1, (len(cu) - 1,), device="cuda").sort().values
        new_out, new_lse = flashgen.attention(q, k, v, causal=True, return_lse=True, **given)
        out.copy_(new_out)
        lse.copy_(new_lse)
        for x in results.values():
            x.fill_(torch.nan)
        graph.replay()
        first = [x.clone() for x in results.values()]
        expected = expected_gradients(torch, q, k, v, dout, cu.tolist(), causal=True)
        for x, y in zip(first, expected, strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=0.02 * float(y.abs().max()))
        graph.replay()
        repeated = [torch.equal(x, y) for x, y in zip(first, results.values(), strict=True)]
        assert all(repeated if deterministic else repeated[1:])
