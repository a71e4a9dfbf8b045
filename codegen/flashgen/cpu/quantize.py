"""Quantising on the CPU, in float32: the same bits as the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.numbers import codes_of, widened
from flashgen.operators.quantize import LARGEST, LEAST_SCALE, QUANTIZE
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from flashgen.operators.quantize import QuantizeProblem
    from flashgen.runtime.plans import Arrays


def run(problem: QuantizeProblem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order."""
    check_writable(problem, arrays)
    quantize(problem, *(None if x is None else host_array(x) for x in arrays))


@np.errstate(all="ignore")
def quantize(
    problem: QuantizeProblem,
    x: np.ndarray,
    scale: np.ndarray | None,
    codes: np.ndarray,
    scale_out: np.ndarray | None,
) -> None:
    """Fill ``codes`` and ``scale_out``. Arrays have the shapes of the contract; bfloat16 elements and codes
    are their bits.
    """
    numbers = widened(x, problem.dtype, np.float32)
    if scale_out is not None:
        scale = _scales(problem, numbers)
        scale_out[...] = scale.reshape(scale_out.shape)
    else:
        QUANTIZE.check_elements(problem, {"scale": scale})
    codes[...] = codes_of(numbers, scale[..., None])


def _scales(problem: QuantizeProblem, numbers: np.ndarray) -> np.ndarray:
    finite = np.where(np.isfinite(numbers), np.abs(numbers), np.float32(0))
    axes = {"token": (-1,), "head": (*range(numbers.ndim - 2), -1), "tensor": None}[problem.per]
    most = finite.max(axis=axes, keepdims=True, initial=0)[..., 0]
    scale = np.maximum(most / np.float32(LARGEST), np.float32(LEAST_SCALE))
    return np.where(most == 0, np.float32(1), scale)
