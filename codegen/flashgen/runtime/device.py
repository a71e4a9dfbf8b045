"""The GPUs of this machine, as far as choosing and launching kernels needs them."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from flashgen.errors import DeviceTypeNotSupported
from flashgen.families.arch import KNOWN_ARCHS, Device, typical
from flashgen.host import pipcommand

if TYPE_CHECKING:
    from collections.abc import Iterator


@functools.cache
def device(ordinal: int) -> Device:
    """The GPU with this CUDA ordinal. Raises DeviceTypeNotSupported where there is none, which says why."""
    reason = why_unavailable()
    if reason:
        raise DeviceTypeNotSupported(reason)
    from cupy.cuda import runtime

    count = runtime.getDeviceCount()
    if not 0 <= ordinal < count:
        raise DeviceTypeNotSupported(f"there is no GPU {ordinal}; the visible ones are 0 to {count - 1}")
    properties = runtime.getDeviceProperties(ordinal)
    major, minor = properties["major"], properties["minor"]
    arch = f"sm_{major}{minor}"
    return Device(
        ordinal=ordinal,
        arch=arch,
        compute_capability=(major, minor),
        num_sms=properties["multiProcessorCount"],
        smem_per_block=properties["sharedMemPerBlockOptin"],
        smem_per_sm=properties["sharedMemPerMultiprocessor"],
        l2_bytes=properties["l2CacheSize"],
        memory_gbps=_memory_gbps(ordinal, arch),
        name=properties["name"].decode(),
    )


def _memory_gbps(ordinal: int, arch: str) -> float:
    """The peak rate of a GPU's memory. If the driver does not say, as on some virtual machines: the rate of a
    well-known GPU of the architecture, or 0 for an architecture without one.
    """
    from cupy.cuda import runtime

    khz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, ordinal)
    bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, ordinal)
    if khz and bits:
        return 2 * khz * bits / 8 / 1e6  # two bits for each pin and clock
    return typical(arch).memory_gbps if arch in KNOWN_ARCHS else 0.0


def available() -> bool:
    """Whether CuPy and the driver work and at least one GPU is visible, of whatever architecture."""
    return not why_unavailable()


@functools.cache
def why_unavailable() -> str:
    """Why this process cannot use a GPU, and what to do about it; "" if it can."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); {pipcommand.compiler()}"
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        return _why_no_count(error)
    return "" if count else "no GPU is visible; look at CUDA_VISIBLE_DEVICES and nvidia-smi"


def _why_no_count(error: RuntimeError) -> str:
    from cupy.cuda import runtime

    try:
        driver, toolkit = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except RuntimeError:
        return f"CUDA does not start ({error})"
    if driver == 0:
        return "there is no NVIDIA driver on this machine"
    if driver < toolkit:
        return (
            f"the driver is for CUDA {_dotted(driver)} and CuPy for CUDA {_dotted(toolkit)}; "
            "update the driver or install the flashgen extra of its CUDA version"
        )
    if "NoDevice" in str(error):
        return "no GPU is visible; look at CUDA_VISIBLE_DEVICES and nvidia-smi"
    return f"CUDA does not start ({error})"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@contextlib.contextmanager
def activated(ordinal: int) -> Iterator[int]:
    """Make a GPU the current one of this thread, for a while; gives the handle of its primary context."""
    from cupy.cuda import runtime
    from cupy_backends.cuda.api import driver

    previous = runtime.getDevice()
    runtime.setDevice(ordinal)
    try:
        yield driver.ctxGetCurrent()
    finally:
        if previous != ordinal:
            runtime.setDevice(previous)
