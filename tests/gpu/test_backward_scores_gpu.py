"""Score modifications of the backward kernels on a GPU: each family, mask type and head dim within the bound
of float64; the gradients that PyTorch and the drop-ins get."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the float64 reference is computed with PyTorch on the GPU")

import flashgen  # noqa: E402
from gpu.cases import new_seed  # noqa: E402
from gpu.test_backward_gpu import MASKS, TARGETS, Call, check  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

LINES = """\
scores:
  by_key:
    score: "score * gain + bias[h, q, kv] + table[h, min(abs(q - kv), 15)] + shift[b, kv]"
    params: {gain: f32, bias: [h, q, kv, f32], table: [h, distance, f32], shift: [b, kv, i32]}
  hides: {score: "where(abs(kv - q) <= n, score, -inf)", params: {n: i32}}
  falls: {score: "score / max(q - kv + 1, 0) - log(abs(score) + 1) / 8"}
"""
# Queries, keys, query heads, kv heads: the last block of queries is mostly empty.
SHAPE = (2, 260, 429, 4, 2)


@pytest.fixture(autouse=True)
def own_lines(tmp_path, forget_plans, monkeypatch):
    (tmp_path / "scores.yaml").write_text(LINES)
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))


def scored(name, shape):
    """Keywords of ``attention`` with random parameters."""
    batch, seqlen_q, seqlen_kv, heads, _ = shape
    random = torch.Generator("cuda").manual_seed(new_seed())

    def numbers(*extents):
        return torch.randn(extents, generator=random, device="cuda")

    slopes = numbers(batch, heads).abs() / 4
    if name == "by_key":
        shift = torch.randint(-2, 3, (batch, seqlen_kv), generator=random, device="cuda", dtype=torch.int32)
        arrays = {"bias": numbers(heads, seqlen_q, seqlen_kv), "table": numbers(heads, 7), "shift": shift}
        return {"score": name, "params": {"gain": 0.7} | arrays}
    return {
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": slopes},
        "both": {"softcap": 4.0, "alibi_slopes": slopes[0]},
        "hides": {"score": "hides", "params": {"n": 40}},
        "falls": {"score": "falls"},
    }[name]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["softcap", "alibi", "both", "by_key", "hides"])
def test_within_the_bound(name, mask, target):
    check(SHAPE, (64, 64), "fp16", target=target, scored=scored(name, SHAPE), **MASKS[mask])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dims", [(32, 32), (96, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(head_dims, target):
    for name, dtype in (("both", "bf16"), ("falls", "fp16")):
        check(SHAPE, head_dims, dtype, target=target, scored=scored(name, SHAPE), causal=True)


def test_fp32():
    check(SHAPE, (64, 64), "fp32", scored=scored("both", SHAPE), causal=True)


@pytest.mark.parametrize("target", TARGETS[::2])
def test_long_sequences(target):
    shape = (1, 2048, 4096, 2, 1)
    for head_dim in (128, 192):
        check(shape, (head_dim, head_dim), "bf16", target=target, scored=scored("both", shape), causal=True)


@pytest.mark.parametrize(("target", "head_dim"), [("sm80", 64), ("sm90", 256)])
def test_deterministic_runs_repeat_to_the_bit(target, head_dim, busy):
    import cupy

    shape = (2, 1000, 1000, 4, 2)
    call = Call(shape, (head_dim, head_dim), "bf16", scored=scored("both", shape), causal=True)
    plan = call.plan(target, deterministic=True)
    first = [x.clone() for x in call.run(plan)]
    other = cupy.cuda.Stream(non_blocking=True)
    for repeat in range(100):
        if repeat % 10 == 0:
            busy(other)
        assert all(torch.equal(*pair) for pair in zip(call.run(plan), first, strict=True))


@pytest.mark.parametrize("name", ["softcap", "both", "by_key"])
def test_pytorch_gets_the_gradients(name):
    """Those of the kernels that dispatch chooses, beside those of the CPU path."""
    shape = (2, 200, 300, 4, 2)
    call = Call(shape, (64, 64), "fp16", scored=scored(name, shape))
    inputs = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
    out = flashgen.attention(*inputs, causal=True, **call.scored)
    found = torch.autograd.grad(out, inputs, call.dout)
    host = [x.detach().float().cpu().requires_grad_() for x in inputs]
    params = {key: x.cpu() if torch.is_tensor(x) else x for key, x in call.scored.get("params", {}).items()}
    given = {key: x.cpu() if torch.is_tensor(x) else x for key, x in call.scored.items()}
    out = flashgen.attention(*host, causal=True, **(given | ({"params": params} if params else {})))
    expected = torch.autograd.grad(out, host, call.dout.float().cpu())
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float().cpu(), y, rtol=2e-2, atol=2e-2)


def test_the_drop_in_of_flash_attn_gets_them():
    from flashgen.compat.flash_attn import flash_attn_func

    shape = (2, 200, 300, 4, 2)
    call = Call(shape, (64, 64), "bf16")
    slopes = scored("alibi", shape)["alibi_slopes"]
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": slopes}
    inputs = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
    found = torch.autograd.grad(flash_attn_func(*inputs, **options), inputs, call.dout)
    expected = torch.autograd.grad(flashgen.attention(*inputs, **options), inputs, call.dout)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
