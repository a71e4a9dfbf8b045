"""The passes below autograd, FlashAttention-3's partly used rows, and xformers' blocks, on a GPU."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import flashgen  # noqa: E402
from flashgen.compat import flash_attn as fa2  # noqa: E402
from flashgen.compat import flash_attn_interface as fa3  # noqa: E402
from flashgen.compat import xformers  # noqa: E402

ENDS = (0, 100, 100, 350)


def packed(dtype=torch.bfloat16, heads=(8, 2, 2)):
    return [torch.randn(350, count, 64, device="cuda", dtype=dtype) for count in heads]


def exact(q, k, v):
    """Causal attention of each sequence, in float64."""
    parts = []
    for begin, end in itertools.pairwise(ENDS):
        rows = [x[begin:end].double().transpose(0, 1) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def near(found, right):
    assert (found.double() - right.double()).norm() < 0.02 * right.double().norm()


def ends():
    return torch.tensor(ENDS, device="cuda", dtype=torch.int32)


def test_both_passes_of_packed_sequences():
    inputs = packed()
    into = [torch.full_like(x, torch.nan) for x in inputs]
    options = (ends(), ends(), 250, 250, 0.0, None, True)
    out, lse, *_ = fa2._flash_attn_varlen_forward(*inputs, *options)
    dout = torch.randn_like(out)
    fa2._flash_attn_varlen_backward(dout, *inputs, out, lse, *into, *options)
    leaves = [x.double().requires_grad_() for x in inputs]
    right = exact(*leaves)
    near(out, right)
    (right * dout.double()).sum().backward()
    for found, leaf in zip(into, leaves, strict=True):
        near(found, leaf.grad)


def test_rows_that_are_used_in_part():
    """The first 60 rows of each sequence, which has as many queries and keys."""
    q, k, v = packed()
    used = torch.tensor([60, 0, 60], device="cuda", dtype=torch.int32)
    out = fa3.flash_attn_varlen_func(
        q, k, v, ends(), ends(), 250, 250, seqused_q=used, seqused_k=used, causal=True
    )
    right = exact(q, k, v)  # causal: later keys make no difference
    row = torch.arange(350, device="cuda")
    counts = (row < 60) | ((row >= 100) & (row < 160))
    near(out[counts], right[counts])
    assert not out[~counts].any()


def test_blocks_of_xformers():
    q, k, v = packed(heads=(8, 8, 8))
    mask = xformers.BlockDiagonalMask.from_seqlens([100, 0, 250], device="cuda").make_causal()
    near(xformers.memory_efficient_attention(*(x[None] for x in (q, k, v)), mask)[0], exact(q, k, v))


def test_float64_is_refused_by_name():
    x = torch.randn(1, 8, 2, 32, device="cuda", dtype=torch.float64)
    with pytest.raises(flashgen.BadTensorDtype, match=r"^q has dtype float64; supported are fp16"):
        flashgen.attention(x, x, x)


def test_after_a_warmup_by_recorded_calls_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("flashgen.runtime.kernel._kernels", {})
    x = torch.randn(2, 77, 4, 72, device="cuda", dtype=torch.float16)
    with flashgen.record(tmp_path / "calls.json"):
        flashgen.attention(*(t.cpu() for t in (x, x, x)), causal=True)
    with flashgen.compiling("error"), pytest.raises(flashgen.UnexpectedCompile, match="a call compiles"):
        flashgen.attention(x, x, x, causal=True)
    flashgen.warmup(tmp_path / "calls.json")
    with flashgen.compiling("error"):
        flashgen.attention(x, x, x, causal=True)
