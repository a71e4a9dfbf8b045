"""float64 on the CPU path: results and gradients by a formula and by differences; nowhere else."""

from __future__ import annotations

import math

import numpy as np
import pytest

import flashgen
from flashgen import errors


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


SHAPES = (2, 9, 4, 6), (2, 600, 2, 6), (2, 600, 2, 4)


def formula(q, k, v, hidden):
    """Attention of (batch, rows, heads, width), and the LSE."""
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(hidden, -np.inf, scores)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights / total, v), (peak + np.log(total))[..., 0]


def test_the_result_is_as_exact_as_float64():
    """Of more keys than one block has, in a window."""
    q, k, v = arrays(*SHAPES)
    out, lse = flashgen.attention(q, k, v, window_size=(300, 5), return_lse=True)
    i, j = np.arange(9)[:, None] + 591, np.arange(600)
    right, right_lse = formula(q, k, v, (j < i - 300) | (j > i + 5))
    assert (out.dtype, lse.dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(out, right, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (2, 1), "softcap": 2.0},
        {"mask": np.eye(5, 7, dtype=bool)},
        {
            "score": "score + slope[h] * (q - kv)",
            "params": {"slope": np.linspace(-1, 1, 4, dtype=np.float32)},
        },
    ],
    ids=["causal", "window and softcap", "mask", "formula"],
)
def test_gradients_are_those_of_differences(options):
    torch = pytest.importorskip("torch")

    def tensor(x):
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    options = {name: tensor(x) for name, x in options.items()}
    if "params" in options:
        options["params"] = {name: tensor(x) for name, x in options["params"].items()}
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays((2, 5, 4, 6), (2, 7, 2, 6), (2, 7, 2, 4))]
    assert torch.autograd.gradcheck(lambda *x: flashgen.attention(*x, **options), leaves)


def test_gradients_of_packed_sequences_are_those_of_differences():
    torch = pytest.importorskip("torch")
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays((8, 2, 4), (8, 1, 4), (8, 1, 4))]

    def attend(*x):
        return flashgen.attention(*x, causal=True, cu_seqlens_q=ends, cu_seqlens_kv=ends)

    assert torch.autograd.gradcheck(attend, leaves)


def test_drop_ins_take_it_as_well():
    torch = pytest.importorskip("torch")
    from flashgen.compat.torch import scaled_dot_product_attention

    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays(*[(1, 2, 5, 3)] * 3)]
    assert torch.autograd.gradcheck(lambda *x: scaled_dot_product_attention(*x, is_causal=True), leaves)


def test_what_does_not_compute_it_refuses_it_by_name():
    q, k, v = arrays(*SHAPES)
    supported = r"has dtype float64; supported are fp16, bf16, fp32"
    with pytest.raises(errors.BadTensorDtype, match=f"^q {supported}, and float64 in host memory$"):
        flashgen.explain(SHAPES[0], dtype="float64", arch="sm_90")
    with pytest.raises(errors.BadTensorDtype, match=r"^q has dtype float64.*backend 'simulator' takes fp16"):
        flashgen.attention(q, k, v, backend="simulator")
    with pytest.raises(errors.BadTensorDtype, match=supported):
        flashgen.cascade(q, [(k, v), (k, v)])
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    with pytest.raises(errors.BadTensorDtype, match="has dtype float64"):
        flashgen.merge([(out, lse), (out, lse)])
    cache = flashgen.KVCache(k, v, np.zeros(2, np.int32))
    with pytest.raises(errors.BadTensorDtype, match="has dtype float64"):
        flashgen.append(cache, k[:, :1], v[:, :1])
    with pytest.raises(errors.BadTensorDtype, match=r"^k has dtype fp32 but q has float64"):
        flashgen.attention(q, k.astype(np.float32), v)
