"""What quantising must give, and how far a kernel may be from it.

A scale is the quotient that the operator states, rounded once: |error| <= 2^-24 scale. With y = x / scale in
float64, limited to 448, and n the e4m3 number that is nearest to y,

    |code - y| <= |n - y| + 2^-22 |y|

The second term are the reciprocal of the scale and the product with it, each rounded to fp32: where y is near
the middle of two codes they may give the other one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from ml_dtypes import float8_e4m3fn

from flashgen.operators.numbers import widened
from flashgen.operators.quantize import LARGEST, LEAST_SCALE
from flashgen.operators.reference import Verdict, largest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.quantize import QuantizeProblem


def scales(problem: QuantizeProblem, x: np.ndarray) -> np.ndarray:
    """The scales of x, (batch, seqlen, num_heads, head_dim) in float64, with the extents of the problem."""
    finite = np.where(np.isfinite(x), np.abs(x), 0)
    axes = {"token": (3,), "head": (0, 1, 3), "tensor": (0, 1, 2, 3)}[problem.per]
    most = finite.max(axis=axes, keepdims=True, initial=0)[..., 0]
    return np.where(most == 0, 1, np.maximum(most / LARGEST, LEAST_SCALE))


def scales_of_rows(x: np.ndarray) -> np.ndarray:
    """The scale of each row of x, with a last dimension of one, in the dtype of x."""
    number = x.dtype.type
    most = np.where(np.isfinite(x), np.abs(x), number(0)).max(axis=-1, keepdims=True, initial=0)
    return np.where(most == 0, number(1), np.maximum(most / number(LARGEST), number(LEAST_SCALE)))


def judge(problem: QuantizeProblem, arrays: Mapping[str, np.ndarray | None]) -> Verdict:
    """Compare the results of a call with float64, on the host. ``arrays`` has all arguments by name; bfloat16
    elements and codes are their bits. ``lse`` of the verdict is about the scales.
    """

    def batched(x: np.ndarray, rank: int) -> np.ndarray:
        return x.reshape((1,) * (rank - x.ndim) + x.shape)

    x = batched(widened(arrays["x"], problem.dtype), 4)
    codes = batched(arrays["codes"].view(float8_e4m3fn).astype(np.float64), 4)
    worst = None
    if problem.per == "given":
        scale = batched(arrays["scale"], 3).astype(np.float64)
    else:
        right = scales(problem, x)
        scale = batched(arrays["scale_out"], 3).astype(np.float64)
        worst = largest(scale, right, 2.0**-24 * right)
    with np.errstate(all="ignore"):  # a wrong scale may be 0
        y = np.clip(x / scale[..., None], -LARGEST, LARGEST)
        nearest = y.astype(np.float32).astype(float8_e4m3fn).astype(np.float64)
    bound = np.abs(nearest - y) + 2.0**-22 * np.abs(y)
    is_nan = np.isnan(x)
    wrong = is_nan & ~np.isnan(codes)
    codes = np.where(wrong, np.inf, np.where(is_nan, 0, codes))
    return Verdict(largest(codes, np.where(is_nan, 0, y), np.where(is_nan, 0, bound)), worst)
