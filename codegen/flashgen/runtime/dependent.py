"""Dependent launches: a kernel that may begin while the one before it in its stream is still at work.

The driver calls it programmatic stream serialization: it brings the grid onto multiprocessors as they become
free, and the kernel itself waits (``griddepcontrol.wait``) for the end of what came before. Structs and
numbers are from ``cuLaunchKernelEx`` in NVIDIA's cuda.h. CuPy has no function that launches this way.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from flashgen.families.arch import arch_parts, reaches
from flashgen.host.envflags import switched

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant

SWITCH = "FLASHGEN_DEPENDENT_LAUNCH"
# The first architecture whose kernels can wait for the one before them.
MIN_ARCH = "sm_90"
# The first CUDA version whose graphs have edges of this kind. A launch that an older driver could not capture
# would make a plan fail inside a graph that works outside of it.
MIN_DRIVER = 12030
# Streams of which a launcher remembers the configuration.
MAX_CONFIGS = 64
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` with a value that is a number."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 60),
    )


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    )


def applies_to(variant: Variant, device: Device) -> bool:
    """Whether to launch ``variant`` dependently: its spec says that it waits, ``device`` knows how to, the
    driver can capture such a launch, and FLASHGEN_DEPENDENT_LAUNCH is not 0. Raises what `forbidden` does.
    """
    off = forbidden()
    able = reaches(arch_parts(device.arch)[0], MIN_ARCH)
    return variant.dependent_launch and able and not off and driver_version() >= MIN_DRIVER


def forbidden() -> bool:
    """Whether FLASHGEN_DEPENDENT_LAUNCH is 0. Raises BadParam where it is neither 0, 1 nor empty."""
    return switched(SWITCH) is False


@functools.cache
def driver_version() -> int:
    """The CUDA version of the driver, 12030 for 12.3."""
    from cupy.cuda import runtime

    return runtime.driverGetVersion()


@functools.cache
def driver_function() -> Callable[..., int]:
    """``cuLaunchKernelEx``, of the driver that CuPy uses.

    It is called with pointers only, each a ctypes object, so that nothing has to be converted, and without
    the GIL.
    """
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


def config(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, stream: int
) -> ctypes.Array[LaunchConfig]:
    """The configuration of dependent launches on ``stream``, as an array of one, which ctypes hands over as a
    pointer.
    """
    attribute = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    launch_config = LaunchConfig(grid, block, shared_bytes, stream, ctypes.pointer(attribute), 1)
    return (LaunchConfig * 1)(launch_config)


def bind(
    function: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
) -> Callable[[int, ctypes.Array, Any], None]:
    """What launches a kernel dependently: called as ``launch(stream, arguments, extra)``, with an array whose
    first word is the address of the kernel's argument. ``extra`` is there for the likeness to
    ``driver.launchKernel`` of CuPy and goes unused.

    May be called from many threads at once. Raises CuPy's CUDADriverError where the driver refuses.
    """
    from cupy_backends.cuda.api.driver import check_status

    launch, kernel = driver_function(), ctypes.c_void_p(function)
    # By stream. Neither a configuration nor what it points to changes once it is in here.
    configs: dict[int, ctypes.Array[LaunchConfig]] = {}

    def queue(stream: int, arguments: ctypes.Array, extra: Any) -> None:
        stream_config = configs.get(stream)
        if stream_config is None:
            if len(configs) >= MAX_CONFIGS:
                configs.clear()
            stream_config = configs[stream] = config(grid, block, shared_bytes, stream)
        status = launch(stream_config, kernel, arguments, None)
        if status != 0:
            check_status(status)

    return queue
