"""Tensor maps: what the copy engine (TMA) of compute capability 9.0 has to know of an array.

A map tells an array's address, extents and strides, and how much of it one copy brings or writes: a box,
whose rows lie swizzled in shared memory. Elements outside the array arrive as zeros, and are not written.
Which arrays a map can describe, and the limits below, are those of ``cuTensorMapEncodeTiled`` in NVIDIA's
driver API.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import InternalError, NoBindingError, SpecError
from flashgen.params import TENSOR_MAP

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.params import Param
    from flashgen.problem import Problem, Strides
    from flashgen.variant import Variant

BYTES = 128
DTYPES = ("fp16", "bf16", "fp32")
# Bytes of a box's rows for which there is a swizzle.
SWIZZLES = (32, 64, 128)
MAX_BOX = 256
ALIGNMENT = 16
_MAX_EXTENT = 1 << 32
_MAX_STRIDE = 1 << 40
# The driver's enumerations, as numbered in cuda.h.
_DATA_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_NO_INTERLEAVE, _L2_PROMOTION_256B = 0, 3
_FILL_WITH_ZEROS = 0  # the driver calls it NONE; the alternative is a NaN
_ADDRESS, _INT, _UINT32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
# The signature in C, and the types of its arguments: enumerations are ints.
_PROTOTYPES = {
    "cuTensorMapEncodeTiled": (
        b"CUresult (CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, cuuint64_t const *, "
        b"cuuint64_t const *, cuuint32_t const *, cuuint32_t const *, CUtensorMapInterleave, "
        b"CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)",
        *(_ADDRESS, _INT, _UINT32, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT, _INT, _INT, _INT),
    ),
    "cuTensorMapReplaceAddress": (b"CUresult (CUtensorMap *, void *)", _ADDRESS, _ADDRESS),
}
REQUIREMENTS = (
    "at least one element in each array, strides that are positive multiples of 16 bytes and less than 2^40, "
    "and in a packed variant a group size that divides the rows of a box"
)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A map but for its address. All tuples begin with the dimension whose elements are contiguous.

    ``extents`` and ``box`` are in elements, ``strides`` (of all dimensions but the first) in bytes.
    ``swizzle`` is the period of the swizzle in bytes, which is also the size of a box's rows.
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def describe(problem: Problem, variant: Variant, param: Param) -> TensorMap | None:
    """The map of the array that ``param`` names, or None for an array that no map can describe.

    The dimensions are (head_dim, seqlen, heads, batch), those of v and out begin with head_dim_v, and the box
    is (columns, rows, 1, 1). Where the variant is packed, so that the rows of its tiles are pairs of a query
    and a query head of the group, q and out are (head_dim, group, seqlen_q, num_heads_kv, batch), their box
    (columns, group, rows / group, 1, 1).

    Raises SpecError for an array that there is no map of.
    """
    arrays: dict[str, tuple[int, int, int, Strides]] = {
        "q": (problem.head_dim, problem.seqlen_q, problem.num_heads_q, problem.q_strides),
        "k": (problem.head_dim, problem.seqlen_kv, problem.num_heads_kv, problem.k_strides),
        "v": (problem.head_dim_v, problem.seqlen_kv, problem.num_heads_kv, problem.v_strides),
        "out": (problem.head_dim_v, problem.seqlen_q, problem.num_heads_q, problem.out_strides),
    }
    if param.name not in arrays or param.box is None:
        raise SpecError(
            f"{variant.spec}: params asks for a {TENSOR_MAP} of {param.name}; there are those of "
            f"{', '.join(arrays)}"
        )
    columns, seqlen, heads, (batch_stride, row_stride, head_stride) = arrays[param.name]
    group, rows, size = problem.group_size, param.box.rows, problem.element_bytes
    if variant.gqa == "packed" and param.name in ("q", "out"):
        if rows % group:
            return None
        extents = (group, seqlen, heads // group, problem.batch)
        strides = (head_stride, row_stride, group * head_stride, batch_stride)
        box = (param.box.columns, group, rows // group, 1, 1)
    else:
        extents = (seqlen, heads, problem.batch)
        strides = (row_stride, head_stride, batch_stride)
        box = (param.box.columns, rows, 1, 1)
    extents = (columns, *extents)
    if not all(1 <= extent < _MAX_EXTENT for extent in extents):
        return None
    in_bytes = _stride_bytes(extents, tuple(stride * size for stride in strides), size)
    if in_bytes is None:
        return None
    return TensorMap(problem.dtype, extents, in_bytes, box, param.box.columns * size)


def expressible(problem: Problem, variant: Variant) -> bool:
    """Whether there is a map of each array of which the variant wants one."""
    return all(
        describe(problem, variant, param) is not None for param in variant.params if param.ctype == TENSOR_MAP
    )


def encode(map: TensorMap, pointer: int, place: int) -> None:
    """Write ``map`` of an array at ``pointer``, a multiple of 16, to ``place``, a multiple of 64.

    Raises NoBindingError without cuda-bindings, InternalError where the driver refuses.
    """
    rank = len(map.extents)
    status = _call(
        "cuTensorMapEncodeTiled",
        place,
        _DATA_TYPES[map.dtype],
        rank,
        pointer,
        (ctypes.c_uint64 * rank)(*map.extents),
        (ctypes.c_uint64 * (rank - 1))(*map.strides),
        (ctypes.c_uint32 * rank)(*map.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE,
        _SWIZZLES[map.swizzle],
        _L2_PROMOTION_256B,
        _FILL_WITH_ZEROS,
    )
    if status != 0:
        raise InternalError(f"cuTensorMapEncodeTiled gives CUDA error {status} for {map} at {pointer:#x}")


def move(place: int, pointer: int) -> None:
    """Make the encoded map at the address ``place`` that of an array of the same kind at ``pointer``.

    Raises as ``encode``.
    """
    status = _call("cuTensorMapReplaceAddress", place, pointer)
    if status != 0:
        raise InternalError(f"cuTensorMapReplaceAddress gives CUDA error {status} for {pointer:#x}")


def _call(name: str, *arguments: Any) -> int:
    try:
        return binding()[name](*arguments)
    except RuntimeError as error:
        raise InternalError(f"the driver has no {name} ({error}); it may be older than CUDA 12") from error


@functools.cache
def binding() -> dict[str, Callable[..., int]]:
    """The functions of the driver that make tensor maps, by name.

    They come from ``cuda.bindings.cydriver``, the layer of cuda-bindings that is for Cython. It finds the
    driver's functions as ``cuda.bindings.driver`` does, and is imported and called in a fraction of the time.
    Raises NoBindingError where that cannot be had.
    """
    try:
        from cuda.bindings import cydriver

        return {name: _c_function(cydriver, name, *prototype) for name, prototype in _PROTOTYPES.items()}
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        raise NoBindingError(
            f"cuda-bindings cannot be used ({error}), and the kernel for this call needs it to encode "
            'tensor maps; pip install "flashgen[cuda13]" (or "flashgen[cuda12]" for a driver older than 580)'
        ) from error


def _c_function(module: Any, name: str, signature: bytes, *types: Any) -> Callable[..., int]:
    """A function that a Cython module exports in C, as its own ``cimport`` finds it: by name and signature.

    Called with the GIL, so that an exception which it sets is raised.
    """
    from flashgen.arrays import capsule_pointer

    address = capsule_pointer(module.__pyx_capi__[name], signature)
    return ctypes.PYFUNCTYPE(ctypes.c_int, *types)(address)


def _stride_bytes(extents: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The strides, with those that are never multiplied made to look contiguous; None where one will not do.

    NVIDIA's limits do not rule out 0, but in its formula each stride spans what lies within the dimension, so
    an array that is broadcast has no map here.
    """
    found: list[int] = []
    span = math.ceil(extents[0] * size / ALIGNMENT) * ALIGNMENT  # bytes of what lies within a dimension
    for extent, stride in zip(extents[1:], strides, strict=True):
        if extent <= 1:
            stride = min(span, _MAX_STRIDE - ALIGNMENT)
        elif not 0 < stride < _MAX_STRIDE or stride % ALIGNMENT:
            return None
        found.append(stride)
        span = max(span, extent * stride)
    return tuple(found)
