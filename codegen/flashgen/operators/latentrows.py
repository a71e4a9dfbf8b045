"""Rows of a latent cache of FP8 that carry their scales, as FlashMLA and vLLM have them: 656 bytes for a
token of 576 elements.

    bytes        content
    0 to 511     512 e4m3 codes: the latent
    512 to 527   4 scales, fp32, of 128 codes each
    528 to 655   64 elements in bfloat16, with a rotary embedding

An element of the latent is its code times the scale of its quarter, rounded to bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from ml_dtypes import float8_e4m3fn

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, arg
from flashgen.operators.arguments import shown
from flashgen.operators.kvcodes import E4M3
from flashgen.operators.numbers import bfloat16_bits

if TYPE_CHECKING:
    from flashgen.operators.arguments import ArrayLayout, ArrayView

# The layout's name in vLLM.
LAYOUT = "fp8_ds_mla"
ROW_BYTES, HEAD_DIM, HEAD_DIM_V = 656, 576, 512
SCALES = slice(HEAD_DIM_V, HEAD_DIM_V + 16)
ROTARY = slice(HEAD_DIM_V + 16, ROW_BYTES)


def unpacked_view(q: ArrayView, k: ArrayView, head_dim_v: int, has_scale: bool) -> ArrayView:
    """The view of a cache of such rows, as if a row had a byte for each element. Raises BadTensorDtype,
    BadTensorShape and BadParam.
    """
    layout = f"rows of {LAYOUT}"
    if has_scale:
        raise BadParam(f"{arg('k_scale')} was given, and {layout} have their scales; leave it out")
    if k.dtype not in ("uint8", E4M3):
        raise BadTensorDtype(f"{arg('k')} has dtype {k.dtype}; {layout} are uint8, or {E4M3}")
    if not k.shape or k.shape[-1] != ROW_BYTES:
        raise BadTensorShape(f"{arg('k')} has shape {k.shape}; {layout} have {ROW_BYTES} bytes")
    if q.dtype != "bf16":
        raise BadTensorDtype(f"{arg('q')} has dtype {q.dtype}; for {layout} it is bf16")
    if not q.shape or q.shape[-1] != HEAD_DIM or head_dim_v != HEAD_DIM_V:
        name, size = (
            ("head_dim_v", shown(head_dim_v)) if head_dim_v != HEAD_DIM_V else ("q", f"of shape {q.shape}")
        )
        raise BadTensorShape(
            f"{arg(name)} is {size}; {layout} have a head_dim of {HEAD_DIM} and a head_dim_v of {HEAD_DIM_V}"
        )
    return dataclasses.replace(k, shape=(*k.shape[:-1], HEAD_DIM), dtype=E4M3)


def with_packed_rows(layout: ArrayLayout | None, kv_dtype: str | None, name: str) -> ArrayLayout | None:
    """The layout of an array of a call where rows of its argument ``name`` are as ``kv_dtype`` says."""
    if layout is None or kv_dtype != LAYOUT or layout.argument.name != name:
        return layout
    return layout._replace(extents=(*layout.extents[:-1], ROW_BYTES))


def unpacked(rows: np.ndarray) -> np.ndarray:
    """The 576 elements of each row, bfloat16 as its bits; ``rows`` are (..., 656) bytes."""
    of_rows = parts(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = of_rows["codes"].view(float8_e4m3fn).astype(np.float32)
        latent = bfloat16_bits(codes * of_rows["scales"].repeat(HEAD_DIM_V // 4, -1))
    return np.concatenate([latent, of_rows["rotary"]], -1)


def parts(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Copies of the codes, the scales and the rotary elements of rows, (..., 656) bytes: uint8 (..., 512),
    float32 (..., 4), and bfloat16 as its bits, (..., 64).
    """
    codes, scales, rotary = (np.ascontiguousarray(rows[..., x]) for x in (slice(HEAD_DIM_V), SCALES, ROTARY))
    return {
        "codes": codes.view(np.uint8),
        "scales": scales.view(np.float32),
        "rotary": rotary.view(np.uint16),
    }
