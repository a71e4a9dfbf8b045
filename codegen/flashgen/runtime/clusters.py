"""Whether a device has room for the clusters of a kernel, which the driver alone knows: a cluster is within
one GPC, and how many multiprocessors a GPC has differs from GPU to GPU and between the slices of one.

``cuOccupancyMaxActiveClusters`` of NVIDIA's cuda.h; CuPy has no function for it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from flashgen.errors import DeviceTypeNotSupported
from flashgen.runtime.dependent import LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant


class NoRoomForClusters(DeviceTypeNotSupported):
    """No GPC of the device has enough multiprocessors for one cluster of a kernel."""


@functools.cache
def driver_function() -> Callable[..., int]:
    """``cuOccupancyMaxActiveClusters``, of the driver that CuPy uses."""
    return ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters


def check(variant: Variant, function: int, device: Device) -> None:
    """Raise NoRoomForClusters where the device cannot run one cluster of ``function``, the loaded kernel of
    ``variant``, which says itself how many thread blocks a cluster has. Raises CuPy's CUDADriverError where
    the driver refuses to say.
    """
    from cupy_backends.cuda.api.driver import check_status

    size = variant.grid.cluster
    config = LaunchConfig((size, 1, 1), (variant.threads, 1, 1), variant.smem_bytes, 0, None, 0)
    count = ctypes.c_int()
    status = driver_function()(ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config))
    if status != 0:
        check_status(status)
    if count.value == 0:
        raise NoRoomForClusters(
            f"{variant.name} runs in clusters of {size} thread blocks with {variant.smem_bytes} bytes of "
            f"shared memory each, and {device} has no room for one"
        )
