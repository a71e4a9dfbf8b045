"""What attention must give, in float64, and how far a kernel may be from it; on any device of PyTorch.

The contract's masks are written out here per element, apart from the package's own arithmetic on them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Half a step between neighbours of 1: what rounding once to the dtype costs at most, relatively.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
# Scores at once: 2**26 of them are 512 MiB in float64.
SCORES = 1 << 26


class Result(NamedTuple):
    """``out`` of shape (batch, seqlen_q, heads, head_dim_v), ``lse`` of shape (batch, heads, seqlen_q)."""

    out: Tensor
    lse: Tensor


def hidden_keys(
    seqlen_q: int,
    seqlen_kv: int,
    *,
    causal: bool = False,
    mask_type: str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | None = None,
    device: str = "cpu",
) -> Tensor | None:
    """True where a query does not see a key, broadcastable to (batch, heads, seqlen_q, seqlen_kv)."""
    i = torch.arange(seqlen_q, device=device)[:, None]
    j = torch.arange(seqlen_kv, device=device)[None]
    diagonal = i + (seqlen_kv - seqlen_q)
    left, right = window_size
    hidden = torch.zeros((seqlen_q, seqlen_kv), dtype=torch.bool, device=device)
    if causal or mask_type in (3, "causal_bottom_right"):
        hidden |= j > diagonal
    if mask_type in (2, "causal_top_left"):
        hidden |= j > i
    if left >= 0:
        hidden |= j < diagonal - left
    if right >= 0:
        hidden |= j > diagonal + right
    if mask is not None:
        return hidden | (mask != 0)
    return hidden if bool(hidden.any()) else None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    scale: float,
    precision: torch.dtype = torch.float64,
) -> Result:
    """softmax(q k^T * scale) v, plainly: the whole matrix of scores, each step rounded to ``precision``.

    Products are summed in float64 for float64, else in float32, as the matrix products of PyTorch on a GPU
    are for every dtype. A row that sees nothing has out 0 and lse -inf.
    """
    batch, seqlen_q, heads, width = q.shape
    seqlen_kv, width_v = k.shape[1], v.shape[-1]
    wide = torch.float64 if precision is torch.float64 else torch.float32
    if wide is torch.float32:
        assert torch.get_float32_matmul_precision() == "highest", "TF32 would blur the yardstick"
    out = torch.zeros((batch * heads, seqlen_q, width_v), dtype=precision, device=q.device)
    lse = torch.full((batch * heads, seqlen_q), -math.inf, dtype=wide, device=q.device)
    if seqlen_kv and seqlen_q:
        group = heads // k.shape[2]
        rows = q.transpose(1, 2).reshape(batch * heads, seqlen_q, width)
        keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1).flatten(0, 1) for x in (k, v))
        if hidden is not None:
            hidden = hidden.expand(batch, heads, seqlen_q, seqlen_kv)
        pairs = torch.arange(batch * heads, device=q.device)
        for part in pairs.split(max(1, SCORES // (seqlen_q * seqlen_kv))):
            scores = (rows[part].to(wide) @ keys[part].to(wide).transpose(1, 2)).to(precision) * scale
            if hidden is not None:
                scores.masked_fill_(hidden[part // heads, part % heads], -math.inf)
            lse[part] = torch.logsumexp(scores.to(wide), dim=-1)
            weights = torch.softmax(scores.to(wide), dim=-1).to(precision)
            weights.masked_fill_(torch.isneginf(lse[part])[..., None], 0)
            out[part] = (weights.to(wide) @ values[part].to(wide)).to(precision)
    return Result(out.view(batch, heads, seqlen_q, width_v).transpose(1, 2), lse.view(batch, heads, seqlen_q))


def allowed_error(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, expected: Result, usual: bool
) -> float:
    """How far ``out`` may be from ``expected.out``, in its largest element.

    For fp16 and bf16 twice the error of the plain formula in that dtype, plus 1e-5; for fp32 1e-5 of the
    largest result or of 1. Inputs that are not ``usual`` (large scores, say) make the plain formula useless
    in fp16 and inexact in fp32: then 8 times its error in fp32, plus the rounding of weights and result to
    the dtype. Where scores are far apart, that error is a matter of luck: it takes two that nearly tie. So at
    least as much is allowed as comes of scores that are off by half a unit in the last place of the sum of
    their terms' magnitudes: as much of the weights, and at most twice that of the largest value.
    """
    if usual and q.dtype is torch.float32:
        return 1e-5 * max(1.0, largest(expected.out))
    precision = q.dtype if usual else torch.float32
    plain = largest(attention(q, k, v, hidden, scale, precision).out.double() - expected.out)
    if usual:
        return 2 * plain + 1e-5
    unsharp = 2 * 2**-24 * abs(scale) * largest_sum_of_magnitudes(q, k) * largest(v.double())
    return max(8 * plain, unsharp) + 3 * ROUNDING[q.dtype] * largest(v.double()) + 1e-5


def largest_sum_of_magnitudes(q: Tensor, k: Tensor) -> float:
    """The largest sum of |q_i k_i| over the head dim, of any query and key of a head; 0 without any."""
    if not q.numel() or not k.numel():
        return 0.0
    keys = k.abs().float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return max(
        float((rows @ columns.T).max())
        for rows, columns in zip(
            q.abs().float().transpose(1, 2).flatten(0, 1), keys.transpose(1, 2).flatten(0, 1), strict=True
        )
    )


def allowed_lse_error(expected: Result) -> Tensor:
    """How far each element of ``lse`` may be from ``expected.lse``: it is fp32 whatever the dtype."""
    return 1e-5 * expected.lse.abs().clamp(min=1)


def largest(x: Tensor) -> float:
    """The largest magnitude; 0 for no elements, NaN if there is one."""
    return float(x.abs().max()) if x.numel() else 0.0
