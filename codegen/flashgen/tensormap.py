"""Tensor maps: what the copy engine (TMA) of compute capability 9.0 has to know of an array.

A map tells an array's address, extents and strides, and how much of it one copy brings: a box, whose rows
the engine swizzles on their way into shared memory. Elements outside the array arrive as zeros. Which arrays
a map can describe, and the limits below, are those of ``cuTensorMapEncodeTiled`` in NVIDIA's driver API.
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


def encode(map: TensorMap, pointer: int) -> bytes:
    """The 128 bytes of ``map`` for an array at ``pointer``, a multiple of 16. Raises as ``encoder``."""
    return encoder(map)(pointer)


def encoder(map: TensorMap) -> Callable[[int], bytes]:
    """``encode`` for one map and one address after another.

    Raises NoBindingError without cuda-bindings; what it returns raises InternalError where the driver
    refuses.
    """
    driver = binding()
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    long, short = driver.cuuint64_t, driver.cuuint32_t
    kind = {
        "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[map.dtype]
    # All but the address stays the same, and making these is most of what an encoding costs.
    arguments = (
        [long(extent) for extent in map.extents],
        [long(stride) for stride in map.strides],
        [short(extent) for extent in map.box],
        [short(1) for _ in map.box],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        {
            32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
            64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        }[map.swizzle],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        # "None" is zeros; the alternative is a NaN.
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    call, rank, memory = driver.cuTensorMapEncodeTiled, len(map.extents), ctypes.c_char * BYTES

    def encode_at(pointer: int) -> bytes:
        try:
            status, encoded = call(kind, rank, pointer, *arguments)
        except RuntimeError as error:
            raise InternalError(
                f"the driver cannot encode tensor maps ({error}); it may be older than CUDA 12"
            ) from error
        if status != 0:
            raise InternalError(f"cuTensorMapEncodeTiled gives {status!r} for {map} at {pointer:#x}")
        return memory.from_address(encoded.getPtr()).raw

    return encode_at


@functools.cache
def binding() -> Any:
    """``cuda.bindings.driver``. Raises NoBindingError where it cannot be imported."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoBindingError(
            f"cuda-bindings cannot be imported ({error}), and the kernel for this call needs it to encode "
            'tensor maps; pip install "flashgen[cuda13]" (or "flashgen[cuda12]" for a driver older than 580)'
        ) from error
    return driver


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
