"""Tensor maps: which arrays TMA can read and write, and how a map describes one.

A map tells an array's extents and strides, and how much of it one TMA operation brings or writes: a box,
whose rows are swizzled in shared memory. Elements outside the array arrive as zeros, and are not written.
``cuTensorMapEncodeTiled`` in NVIDIA's driver API decides which arrays a map can describe, and the limits
below.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import SpecError
from flashgen.families.params import TENSOR_MAP

if TYPE_CHECKING:
    from flashgen.families.params import Param
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem

BYTES = 128  # of an encoded map
ALIGNMENT = 16
_MAX_EXTENT = 1 << 32
_MAX_STRIDE = 1 << 40
REQUIREMENTS = (
    "at least one element in each array, strides that are positive multiples of 16 bytes and less than 2^40, "
    "in a packed variant a group size that divides the rows of a box, and with pages a page size that is a "
    "multiple of them; of v whose tokens are contiguous a first seen key whose number is a multiple of 16"
)


class TensorMap(NamedTuple):
    """A map but for its address. All tuples begin with the dimension whose elements are contiguous.

    ``extents`` and ``box`` are in elements, ``strides`` (of all dimensions but the first) in bytes.
    ``swizzle`` is the period of the swizzle in bytes, which is also the size of a box's rows. The map begins
    ``distance`` bytes into the array.
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    distance: int = 0


def describe(problem: Problem, variant: Variant, param: Param) -> TensorMap | None:
    """The map of the array that ``param`` names, or None for an array that no map can describe.

    The dimensions are (head_dim, seqlen, heads, batch), the box is (columns, rows, 1, 1). In packed GQA a row
    of a tile is a query and a head of its group: there an array of query heads is (head_dim, group, seqlen_q,
    num_heads_kv, batch), its box (columns, group, rows / group, 1, 1). If keys are in pages, these are the
    batch, and each box is in one of them. Of k and v of a call without lengths the map has only the keys
    that some query sees, so that all others arrive as zeros.

    Raises SpecError for an array that there is no map of.
    """
    paged = dict(variant.axes).get("pages") == "paged"
    return _described(problem, variant.spec, paged, variant.gqa == "packed", param)


@lru_cache(maxsize=256)  # the variants among which dispatch chooses have few different maps
def _described(problem: Problem, spec: str, paged: bool, packed: bool, param: Param) -> TensorMap | None:
    array = None
    if param.name in problem.operator.positions:
        array = problem.array(param.name)
    if array is None or len(array.extents) != 4 or array.argument.layout != "rows" or param.box is None:
        mapped = [a.name for a in problem.operator.arguments if len(a.symbols) == 4 and a.layout == "rows"]
        raise SpecError(
            f"{spec}: params has a {TENSOR_MAP} of {param.name}; only these arrays have one: "
            f"{', '.join(mapped)}"
        )
    batch, seqlen, heads, columns = array.extents
    batch_stride, row_stride, head_stride = array.strides
    rows, size = param.box.rows, array.element_bytes
    distance = 0
    if not array.argument.is_output and "seqlen_kv" in array.argument.symbols:
        begin, end = problem.seen_keys
        if array.argument.symbols[-1] == "seqlen_kv":  # rows are columns of v
            columns, distance = end - begin, begin * size
            if distance % ALIGNMENT:
                return None
        else:
            seqlen, distance = end - begin, begin * row_stride * size
    if paged and "rows_kv" in array.argument.symbols and seqlen % rows:
        return None
    if packed and "num_heads_q" in array.argument.symbols:
        group = heads // problem.sizes["num_heads_kv"]
        if rows % group:
            return None
        extents = (group, seqlen, heads // group, batch)
        strides = (head_stride, row_stride, group * head_stride, batch_stride)
        box = (param.box.columns, group, rows // group, 1, 1)
    else:
        extents = (seqlen, heads, batch)
        strides = (row_stride, head_stride, batch_stride)
        box = (param.box.columns, rows, 1, 1)
    extents = (columns, *extents)
    if not all(1 <= extent < _MAX_EXTENT for extent in extents):
        return None
    in_bytes = stride_bytes(extents, strides, size)
    if in_bytes is None:
        return None
    return TensorMap(array.dtype, extents, in_bytes, box, param.box.columns * size, distance)


def expressible(problem: Problem, variant: Variant) -> bool:
    """Whether there is a map of each array of which the variant wants one."""
    return all(
        describe(problem, variant, param) is not None for param in variant.params if param.ctype == TENSOR_MAP
    )


def stride_bytes(extents: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """Strides in elements of ``size`` bytes as strides in bytes, with those that are never multiplied made to
    look contiguous; None where one will not do.

    NVIDIA's limits do not rule out 0, but in its formula each stride spans the bytes within the dimension, so
    an array that is broadcast has no map here.
    """
    map_strides: list[int] = []
    span = math.ceil(extents[0] * size / ALIGNMENT) * ALIGNMENT  # bytes within a dimension
    for extent, step in zip(extents[1:], strides, strict=True):
        stride = step * size
        if extent <= 1:
            stride = min(span, _MAX_STRIDE - ALIGNMENT)
        elif not 0 < stride < _MAX_STRIDE or stride % ALIGNMENT:
            return None
        map_strides.append(stride)
        span = max(span, extent * stride)
    return tuple(map_strides)
