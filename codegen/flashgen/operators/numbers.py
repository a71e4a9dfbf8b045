"""Elements of the kernels' dtypes as NumPy holds them: bfloat16 as its bits in uint16."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn


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


def codes_of(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """e4m3 codes of numbers in float32, in uint8; ``scale`` broadcasts. Kernels give the same bits."""
    scaled = np.clip(numbers * (np.float32(1) / scale), np.float32(-448), np.float32(448))
    return np.where(np.isnan(scaled), np.uint8(0x7F), scaled.astype(float8_e4m3fn).view(np.uint8))


class Decoded(NamedTuple):
    """Codes (batch, rows, num_heads_kv, width) in uint8 with their ``scale``, which broadcasts to
    (batch, rows, num_heads_kv, 1) along the rows alone, read as numbers of ``to``.
    """

    codes: np.ndarray
    scale: np.ndarray | None
    to: type[np.floating]

    def __getitem__(self, index: tuple[int, slice, int]) -> np.ndarray:
        batch, rows, head = index
        numbers = self.codes[batch, rows, head].view(float8_e4m3fn).astype(self.to)
        return (
            numbers
            if self.scale is None
            else numbers
            * self.scale[batch, rows if self.scale.shape[1] > 1 else slice(None), head].astype(self.to)
        )

    def whole(self) -> np.ndarray:
        """All numbers."""
        numbers = self.codes.view(float8_e4m3fn).astype(self.to)
        return numbers if self.scale is None else numbers * self.scale.astype(self.to)
