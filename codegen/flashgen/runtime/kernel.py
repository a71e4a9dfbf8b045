"""From a Variant to a kernel that is loaded on a GPU, through the caches in memory and on disk.

Everything that a launch could trip over happens here: compiling, loading, and raising the limit of shared
memory. A kernel that is loaded is found with one look-up, without a call that allocates or waits, so it may
be used while a CUDA graph is captured.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import DeviceTypeNotSupported, InternalError, NoCompilerError
from flashgen.host import forks
from flashgen.runtime import clusters
from flashgen.runtime.device import activated
from flashgen.toolchain import cache as caches
from flashgen.toolchain import compile as compiler
from flashgen.toolchain.obtain import arch_for, obtain, own_arch, recall
from flashgen.toolchain.parallel import in_parallel
from flashgen.toolchain.policy import before_compiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.toolchain.compile import Compiled


class Kernel(NamedTuple):
    """A variant on a device. ``function_ptr`` is the CUfunction; CuPy's ``function`` keeps the module loaded.

    ``cached`` tells whether the disk cache had it.
    """

    variant: Variant
    device: Device
    function: Any
    function_ptr: int
    compiled: Compiled
    cached: bool


# Machine code, and whether the disk cache had it.
Found = tuple["Compiled", bool]
# Clusters up to this size are portable. A kernel with a larger one needs an attribute that CuPy has no name
# for: CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED.
_PORTABLE_CLUSTER, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
_kernels: dict[tuple[Variant, int, int], Kernel] = {}
_loading: dict[tuple[Variant, int, int], threading.Lock] = {}
_guard = forks.guard()
forks.in_child(_loading.clear)  # a thread of the parent may hold one for as long as it compiles


def load_all(variants: Sequence[Variant], device: Device) -> list[Kernel]:
    """`load` of the kernels of a call. Those that the disk cache does not have are compiled side by side."""
    if len(variants) == 1:
        return [load(variants[0], device)]
    with activated(device.ordinal) as context:
        new = [variant for variant in variants if (variant, device.ordinal, context) not in _kernels]
    codes = {variant: _recalled(variant, device) for variant in new}
    missing = [variant for variant in new if codes[variant] is None]
    if len(missing) > 1:
        obtained = in_parallel(lambda variant: _obtained(variant, device), missing)
        codes |= zip(missing, obtained, strict=True)
    return [load(variant, device, codes.get(variant)) for variant in variants]


def load(variant: Variant, device: Device, code: Found | None = None) -> Kernel:
    """The kernel of ``variant`` in the primary context of ``device``; made for the first caller. ``code`` is
    its machine code where the caller has it already.

    Threads that ask for one kernel wait for each other; different kernels are made side by side. Raises
    DeviceTypeNotSupported where the device lacks the architecture, the shared memory, or room for its
    clusters, and what `obtain` raises.
    """
    with activated(device.ordinal) as context:
        key = (variant, device.ordinal, context)
        kernel = _kernels.get(key)
        if kernel is not None:
            return kernel
        with _guard:
            lock = _loading.setdefault(key, threading.Lock())
        with lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _load(variant, device, code)
    return kernel


def _load(variant: Variant, device: Device, code: Found | None) -> Kernel:
    from cupy.cuda.function import Module
    from cupy_backends.cuda.api import driver

    own_arch(variant, device)  # before the memory: raises if the device has another architecture
    _check_smem(variant, device, variant.smem_bytes)
    compiled, cached = code or _recalled(variant, device) or _obtained(variant, device)
    _check_smem(variant, device, variant.smem_bytes + (compiled.smem_static or 0))
    module = Module()
    try:
        module.load(compiled.cubin)
        function = module.get_function(variant.name)
        # Under lazy loading this also brings the code onto the device, before the first launch.
        limit = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, limit, variant.smem_bytes)
        if variant.grid.cluster > _PORTABLE_CLUSTER:
            driver.funcSetAttribute(function.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        if variant.grid.cluster > 1:
            clusters.check(variant, function.ptr, device)
        if compiled.is_ptx:
            compiled = compiled._replace(**_resources(driver, function.ptr))
    except driver.CUDADriverError as error:
        raise InternalError(_why_not_loaded(variant, device, compiled.arch, error)) from error
    return Kernel(variant, device, function, function.ptr, compiled, cached)


def _recalled(variant: Variant, device: Device) -> Found | None:
    compiled = recall(variant, own_arch(variant, device))
    return None if compiled is None else (compiled, True)


def _obtained(variant: Variant, device: Device) -> Found:
    """`obtain` for a device. Raises what it does, and says which bundles lack the kernel."""
    try:
        return obtain(variant, arch_for(variant, device), before_compiling)
    except NoCompilerError as error:
        held = ", ".join(str(bundle.path) for bundle in caches.default().bundles)
        if not held:
            raise
        arch = own_arch(variant, device)
        raise NoCompilerError(f"{held} has no {variant} for {arch}, and {error}") from error


def _check_smem(variant: Variant, device: Device, needed: int) -> None:
    if needed > device.smem_per_block:
        raise DeviceTypeNotSupported(
            f"{variant.name} needs {needed} bytes of shared memory a block and {device} has "
            f"{device.smem_per_block}; a tile row with smaller blocks or fewer stages would fit"
        )


def _resources(driver: Any, function: int) -> dict[str, int]:
    """What only the driver knows of a kernel that it translated itself."""
    return {
        "registers": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function),
        "stack": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function),
        "smem_static": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function),
    }


def _why_not_loaded(variant: Variant, device: Device, arch: str, error: Exception) -> str:
    message = f"{variant.name} for {arch} cannot be loaded on {device}: {error}"
    if "STREAM_CAPTURE" in message:
        return f"{message}. Call it once, or make a flashgen.plan, before the capture begins"
    if any(word in message for word in ("PTX_VERSION", "NO_BINARY", "INVALID_IMAGE", "INVALID_SOURCE")):
        return (
            f"{message}. The driver may be older than {compiler.compiler_version()}: update it, or install "
            "the flashgen extra of the driver's CUDA version"
        )
    return message
