"""What attention must give, in float64, and how far a kernel may be from it; in NumPy, for small problems.

The criterion: the largest error of ``out`` is at most twice that of the plain formula computed in the same
precision, plus 1e-5; for fp32 it is 1e-5 of the largest result or of 1. The log-sum-exp is fp32 in every
dtype and may be off by 1e-5 of itself or of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.attention import UNBOUNDED

if TYPE_CHECKING:
    from flashgen.operators.attention import Problem


@dataclass(frozen=True, slots=True)
class Verdict:
    """Largest errors of ``out`` and of the log-sum-exp (None if it was not asked for), and the allowed ones.

    An element that is NaN, or -inf where it should not be or the reverse, makes the error infinite.
    """

    error: float
    allowed: float
    lse_error: float | None
    lse_allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and (self.lse_error is None or self.lse_error <= self.lse_allowed)

    def __str__(self) -> str:
        text = f"error {self.error:.3g}, allowed {self.allowed:.3g}"
        if self.lse_error is not None:
            text += f"; error of the log-sum-exp {self.lse_error:.3g}, allowed {self.lse_allowed:.3g}"
        return text


def judge(
    problem: Problem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray | None = None,
) -> Verdict:
    """Compare the results of a call with float64. Arrays have the shapes of the contract; bfloat16 elements
    may be of ml_dtypes or their bits in uint16.
    """
    q, k, v, out = (_batched(widened(x, problem.dtype)) for x in (q, k, v, out))
    visible = visible_keys(problem, mask)
    expected, expected_lse = formula(q, k, v, visible, problem.softmax_scale, "fp64")
    if problem.dtype == "fp32":
        allowed = 1e-5 * max(1.0, _largest(expected))
    else:
        plain, _ = formula(q, k, v, visible, problem.softmax_scale, problem.dtype)
        allowed = 2 * _largest(plain - expected) + 1e-5
    lse_error, lse_allowed = None, 1e-5
    if lse is not None:
        lse = lse.astype(np.float64).reshape(expected_lse.shape)
        finite = np.isfinite(expected_lse)
        wrong = not np.array_equal(np.isneginf(lse), ~finite)
        # Relative to its size where that is above 1, so that one bound holds for all elements.
        size = np.maximum(1.0, np.abs(expected_lse[finite]))
        lse_error = np.inf if wrong else _largest((lse[finite] - expected_lse[finite]) / size)
    return Verdict(_largest(out - expected), allowed, lse_error, lse_allowed)


def visible_keys(problem: Problem, mask: np.ndarray | None = None) -> np.ndarray:
    """Which keys each query sees, bool, broadcastable to (batch, num_heads_q, seqlen_q, seqlen_kv)."""
    away = np.arange(problem.seqlen_kv) - np.arange(problem.seqlen_q)[:, None] - problem.diagonal_offset
    visible = np.ones(away.shape, bool)
    if problem.window_left < UNBOUNDED:
        visible &= away >= -problem.window_left
    if problem.window_right < UNBOUNDED:
        visible &= away <= problem.window_right
    return visible if mask is None else visible & (mask == 0)


def formula(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, scale: float, precision: str
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(q k^T scale) v with the whole matrix of scores, each step rounded to ``precision``; float64 in
    and out. Returns (out, lse) of shapes (batch, seqlen_q, heads, head_dim_v) and (batch, heads, seqlen_q).
    """
    group = q.shape[2] // k.shape[2]
    rows = q.transpose(0, 2, 1, 3)
    keys, values = (np.repeat(x.transpose(0, 2, 1, 3), group, axis=1) for x in (k, v))
    scores = rounded(rounded(rows @ keys.swapaxes(2, 3), precision) * scale, precision)
    scores = np.where(visible, scores, -np.inf)
    highest = np.max(scores, axis=-1, initial=-np.inf, keepdims=True)
    highest = np.where(np.isneginf(highest), 0.0, highest)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    weights = rounded(weights / np.where(total == 0, 1.0, total), precision)
    return rounded(weights @ values, precision).transpose(0, 2, 1, 3), lse


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    """float64 numbers rounded to nearest in fp16, bf16 or fp32; as they are for fp64."""
    if precision == "fp64":
        return x
    if precision == "bf16":
        return widened(bfloat16_bits(x), "bf16")
    with np.errstate(over="ignore"):
        return x.astype(np.float16 if precision == "fp16" else np.float32).astype(np.float64)


def widened(x: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of a kernel's dtype as float64; bfloat16 ones may be of ml_dtypes or bits in uint16."""
    if dtype == "bf16":
        bits = x if x.dtype == np.uint16 else x.view(np.uint16)
        x = (bits.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Numbers rounded to nearest bfloat16, ties to even, as bits in uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    upper = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), upper).astype(np.uint16)


def _batched(x: np.ndarray) -> np.ndarray:
    return x if x.ndim == 4 else x[None]


def _largest(x: np.ndarray) -> float:
    if not x.size:
        return 0.0
    largest = float(np.abs(x).max())
    return np.inf if np.isnan(largest) else largest
