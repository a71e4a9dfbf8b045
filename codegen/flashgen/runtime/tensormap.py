"""Encoding tensor maps: the calls of NVIDIA's driver that write them."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from flashgen.errors import InternalError, NoBindingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.schedule.tensormap import TensorMap


# The driver's enumerations, as numbered in cuda.h.
_DATA_TYPES = {"e4m3": 0, "fp16": 6, "fp32": 7, "bf16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_NO_INTERLEAVE, _L2_PROMOTION_256B = 0, 3
_FILL_WITH_ZEROS = 0  # the driver calls it NONE; the alternative is a NaN
_ADDRESS, _INT, _UINT32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
# The arguments of the driver's functions; enumerations are ints.
_FUNCTIONS = {
    "cuTensorMapEncodeTiled": (
        *(_ADDRESS, _INT, _UINT32, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT, _INT, _INT, _INT),
    ),
    "cuTensorMapReplaceAddress": (_ADDRESS, _ADDRESS),
}


def encode(map: TensorMap, pointer: int, place: int) -> None:
    """Write ``map`` of an array at ``pointer``, a multiple of 16, to ``place``, a multiple of 64.

    Raises NoBindingError where the driver has no tensor maps, InternalError where it refuses this one.
    """
    rank = len(map.extents)
    status = binding()["cuTensorMapEncodeTiled"](
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
    """Point the encoded map at the address ``place`` to an array of the same kind at ``pointer``.

    Raises as ``encode``.
    """
    status = binding()["cuTensorMapReplaceAddress"](place, pointer)
    if status != 0:
        raise InternalError(f"cuTensorMapReplaceAddress gives CUDA error {status} for {pointer:#x}")


@functools.cache
def binding() -> dict[str, Callable[..., int]]:
    """The functions of the driver that make tensor maps, by name.

    Called with the GIL: neither waits for anything. Raises NoBindingError where there is no driver, or one
    without them.
    """
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        functions = {name: getattr(library, name) for name in _FUNCTIONS}
    except (OSError, AttributeError) as error:
        raise NoBindingError(
            f"the kernel for this call needs tensor maps, which this driver cannot encode "
            f"({error}); install a driver for CUDA 12 or later"
        ) from error
    for name, function in functions.items():
        function.argtypes = _FUNCTIONS[name]
    return functions
