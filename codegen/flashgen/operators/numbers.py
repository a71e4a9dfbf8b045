"""Elements of the kernels' dtypes as NumPy holds them: bfloat16 as its bits in uint16."""

from __future__ import annotations

import numpy as np


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Numbers of any shape, rounded to nearest bfloat16, ties to even, as bits in uint16. NaN stays NaN.

    They pass through float32: a float64 may be rounded twice.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    upper = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), upper).astype(np.uint16)


def widened(x: np.ndarray, dtype: str, to: type[np.floating] = np.float64) -> np.ndarray:
    """Elements of a kernel's dtype as contiguous numbers of ``to``. bfloat16 may be bits in uint16, the
    elements of ml_dtypes, or numbers already.
    """
    if dtype == "bf16" and x.dtype == np.uint16:
        x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(x, to)
