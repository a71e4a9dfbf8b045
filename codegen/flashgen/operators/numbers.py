"""Elements of the kernels' dtypes as NumPy holds them: bfloat16 as its bits in uint16."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Numbers of any shape, rounded to nearest bfloat16, ties to even, as bits in uint16. NaN stays NaN, and
    keeps its sign.

    They pass through float32: a float64 may be rounded twice.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return np.ascontiguousarray(x, bfloat16).view(np.uint16)


def widened(x: np.ndarray, dtype: str, to: type[np.floating] = np.float64) -> np.ndarray:
    """Elements of a kernel's dtype as contiguous numbers of ``to``. bfloat16 may be bits in uint16, the
    elements of ml_dtypes, or numbers already.
    """
    if dtype == "bf16" and x.dtype == np.uint16:
        x = x.view(bfloat16)
    return np.ascontiguousarray(x, to)
