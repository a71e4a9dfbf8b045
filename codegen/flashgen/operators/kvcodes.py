"""Keys and values as e4m3 codes, each times an fp32 scale: what a call of attention with lengths says of
them, and their part of its contract.

A scale is of a tensor, of each kv head, or of each sequence and kv head. A kernel multiplies the scores by
the scale of K before anything else changes them, and the result by the scale of V, both in fp32.

Or a scale is of each token and kv head, in an array with the rows or pages of the cache. Then a kernel
multiplies each column of the scores by the scale of its key, in fp32, and each element of V by the scale of
its key before the second product: the product in fp32 is rounded to the dtype of q.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer, arg
from flashgen.operators.arguments import FP32, Argument, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.lengths import Lengths

E4M3 = "e4m3"
# What kernels read K and V as; "none": as elements of the dtype of q.
KV_DTYPES = ("none", E4M3)
# The bytes of a row are whole chunks of 16.
HEAD_DIM_STEP = 16
# The last dimension is one element, so that all others may have any stride.
SCALE = {**FP32, "optional": True}
# Whether a scale is of each token and kv head, or of what a tile has one scale for.
PER_TILE, TOKEN = KV_SCALES = ("none", "token")
_SHAPE = "kv_scale_batch kv_scale_rows num_heads_kv 1"
ARGUMENTS = tuple(Argument(name, "input", _SHAPE, **SCALE) for name in ("k_scale", "v_scale"))
SCALES = tuple(argument.name for argument in ARGUMENTS)
# What `append` writes where each token has scales.
SCALES_OUT = ("k_scale_out", "v_scale_out")


def kv_dtype_word(problem: Any) -> str:
    """The value of the axis ``kv_dtype`` that serves a problem."""
    return (problem.kv_dtype or "none").replace("_", "")


def kv_dtype_of(views: Mapping[str, ArrayView], kv_dtype: str | None, has_lengths: bool) -> str | None:
    """E4M3 if k and v are codes, else None. ``kv_dtype`` is the option, which uint8 arrays need. Raises
    BadParam and BadTensorDtype.
    """
    if kv_dtype not in (None, E4M3):
        raise BadParam(f"{arg('kv_dtype')} is {shown(kv_dtype)}; expected {E4M3!r} or None")
    allowed = (E4M3,) if kv_dtype is None else (E4M3, "uint8")
    k, v, dtype = views["k"].dtype, views["v"].dtype, views["q"].dtype
    if k not in allowed and v not in allowed:
        if kv_dtype is not None:
            raise BadTensorDtype(
                f"{arg('k')} has dtype {k}, and {arg('kv_dtype')} is {E4M3!r}; expected "
                f"{' or '.join(allowed)}"
            )
        for name in ("k", "v"):
            if has_lengths and views[name].dtype == "uint8":
                raise BadTensorDtype(
                    f"{arg(name)} has dtype uint8; of e4m3 codes pass KVCache(..., kv_dtype={E4M3!r})"
                )
            if views[name].dtype.startswith("float8"):
                raise BadTensorDtype(
                    f"{arg(name)} has dtype {views[name].dtype}; of 8-bit floats a cache holds e4m3 "
                    "(float8_e4m3fn) alone: quantize() makes it"
                )
        return None
    for name in ("k", "v"):
        if views[name].dtype not in allowed:
            raise BadTensorDtype(
                f"{arg('v' if name == 'k' else 'k')} has e4m3 codes but {arg(name)} has dtype "
                f"{views[name].dtype}; both must be e4m3"
            )
    if dtype == E4M3 and not has_lengths:
        return None  # `contract.check_dtypes` names the scales that such a call needs
    if dtype not in ("fp16", "bf16"):
        raise BadTensorDtype(
            f"{arg('q')} has dtype {dtype}, and {arg('k')} and {arg('v')} are e4m3; expected fp16 or bf16, "
            f"or e4m3 with {arg('q_scale')} or {arg('dtype')}={E4M3!r}"
        )
    if not has_lengths:
        raise BadTensorDtype(
            f"{arg('k')} has dtype e4m3, which attention reads from a KVCache alone; pass KVCache(k, v, "
            "lengths, k_scale=..., v_scale=...)"
        )
    return E4M3


def check(views: Mapping[str, ArrayView], kv_dtype: str | None, sizes: Mapping[str, int]) -> None:
    """That there are scales only of codes, and head dims are multiples of HEAD_DIM_STEP. Raises BadParam and
    BadTensorShape.
    """
    if kv_dtype is None:
        for name in SCALES:
            if name in views:
                raise BadParam(
                    f"{arg(name)} was given, and {arg('k')} and {arg('v')} are not e4m3; leave it out"
                )
        return
    for name in ("head_dim", "head_dim_v"):
        if sizes[name] % HEAD_DIM_STEP:
            raise BadTensorShape(
                f"{arg(name)} is {sizes[name]}; keys and values of e4m3 need a multiple of {HEAD_DIM_STEP}"
            )


def sizes_of(kv_scales: str, batch: int, lengths: Lengths) -> dict[str, int]:
    """The sizes of the symbols of scales."""
    if kv_scales == TOKEN:
        return {"kv_scale_batch": lengths.batch_kv, "kv_scale_rows": lengths.rows_kv}
    return {"kv_scale_batch": batch, "kv_scale_rows": 1}


def kind_of(views: Mapping[str, ArrayView], lengths: Lengths | None) -> str:
    """What the scales of a call are of: TOKEN if one has a dimension of tokens. Raises BadTensorShape and
    NullPointer.
    """
    of_tokens = [name for name in SCALES if name in views and len(views[name].shape) == 3]
    if not of_tokens or lengths is None or lengths.packed_kv:  # only a cache has rows or pages of scales
        return PER_TILE
    for name in SCALES:
        if name not in views:
            raise NullPointer(
                f"{arg(name)} is None and {arg(of_tokens[0])} has a scale for each token; pass both, or 1 in "
                f"an array without dimensions as {arg(name)}"
            )
    return TOKEN


def whole_scales_of(
    views: Mapping[str, ArrayView], kv_scales: str, sizes: Mapping[str, int], lengths: Lengths | None
) -> dict[str, ArrayView]:
    """The views of the scales among the inputs of a call, as `_whole_scale` has them."""
    heads = sizes["num_heads_kv"]
    if kv_scales == TOKEN:
        whole = (lengths.batch_kv, lengths.rows_kv, heads)
        rows = ("pages", "page_size") if lengths.paged else ("rows", "capacity")
        dimensions = *rows, "num_heads_kv"
    else:
        whole, dimensions = (sizes["batch"], heads), ("batch", "num_heads_kv")
    views = {name: _whole_scale(name, views[name], whole, dimensions) for name in SCALES if name in views}
    if kv_scales == TOKEN:
        return views
    return {name: _with_row(view) for name, view in views.items()}


def _with_row(view: ArrayView) -> ArrayView:
    """A whole scale of sequences and heads with the one row that the argument of attention has."""
    (batch, heads, last), (step, head_step, one) = view.shape, view.strides
    return dataclasses.replace(view, shape=(batch, 1, heads, last), strides=(step, 0, head_step, one))


def _whole_scale(
    name: str, view: ArrayView, full: tuple[int, ...], dimensions: tuple[str, ...] = ("batch", "num_heads_kv")
) -> ArrayView:
    """The view of a scale with all ``dimensions``, whose extents are ``full``, and one of one element; the
    caller may leave the first ones out. Raises BadTensorShape.
    """
    shape = view.shape
    missing = len(full) - len(shape)
    fits = missing >= 0 and all(n in (1, size) for n, size in zip(shape, full[missing:], strict=True))
    # Tokens of a cache have no batch: a scale of each sequence and head fits none of them.
    if not fits or (len(full) == 3 and missing == 1):
        raise BadTensorShape(
            f"{arg(name)} has shape {shape}; expected (), (num_heads_kv,) or ({', '.join(dimensions)}) = "
            f"{full}, or 1 for {'either' if len(full) == 2 else 'any of them'}"
        )
    strides = (0,) * missing + tuple(view.strides or ())
    extents = (1,) * missing + shape
    steps = tuple(0 if n == 1 else step for n, step in zip(extents, strides, strict=True))
    return dataclasses.replace(view, shape=(*full, 1), strides=(*steps, 1))


def whole_scale_of_append(name: str, view: ArrayView, sequences: int, heads: int) -> ArrayView:
    """The view of a scale that `append` reads, with all dimensions of its argument. Raises BadTensorShape."""
    return _whole_scale(name, view, (sequences, heads))


def check_scales_out(views: Mapping[str, ArrayView], sizes: Mapping[str, int]) -> None:
    """That `append` writes scales of tokens of both k and v, or of neither, in the shape of the cache. Raises
    BadTensorShape and NullPointer.
    """
    there = [name for name in SCALES_OUT if name in views]
    shape = tuple(sizes[name] for name in ("num_pages", "page_size", "num_heads_kv"))
    for name in SCALES_OUT if there else ():
        if name not in views:
            raise NullPointer(
                f"{arg(name)} has no scale for each token and {arg(there[0])} has; append writes both, or "
                "neither"
            )
        if views[name].shape != shape:
            raise BadTensorShape(
                f"{arg(name)} has shape {views[name].shape}; the scales of tokens need the shape of the "
                f"cache without head_dim, {shape}"
            )


def check_elements(arrays: Mapping[str, np.ndarray | None]) -> None:
    """Raise BadParam for a scale that is not a finite number above 0."""
    for name in SCALES:
        scale = arrays.get(name)
        if scale is not None and not ((scale > 0) & (scale < np.inf)).all():
            raise BadParam(f"{arg(name)} has an element that is not a finite number above 0")


def whole_scales(sizes: Mapping[str, int], arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The scales among arrays in host memory of a call of attention, with all dimensions of their
    arguments.
    """
    batch, rows, heads = sizes["kv_scale_batch"], sizes["kv_scale_rows"], sizes["num_heads_kv"]
    whole = {}
    for name in SCALES:
        x = arrays.get(name)
        if x is None:
            continue
        if x.ndim == 2:  # (batch, num_heads_kv)
            x = x[:, None]
        whole[name] = x if x.ndim == 4 else np.broadcast_to(x, (batch, rows, heads))[..., None]
    return whole


def scales_of_sequences(arrays: Mapping[str, Any], sequences: int, heads: int) -> dict[str, np.ndarray]:
    """The scales among arrays in host memory of an append, (sequences, num_heads_kv, 1)."""
    scales = {name: arrays[name] for name in SCALES if arrays.get(name) is not None}
    return {
        name: x if x.ndim == 3 else np.broadcast_to(x, (sequences, heads))[..., None]
        for name, x in scales.items()
    }
