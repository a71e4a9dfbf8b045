"""Encoding tensor maps: the calls of NVIDIA's driver that write them."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from flashgen.errors import InternalError, NoBindingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.schedule.tensormap import TensorMap


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
    from flashgen.runtime.arrays import capsule_pointer

    address = capsule_pointer(module.__pyx_capi__[name], signature)
    return ctypes.PYFUNCTYPE(ctypes.c_int, *types)(address)
