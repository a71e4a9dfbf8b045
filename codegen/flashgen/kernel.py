"""From a Variant to a kernel that is loaded on a GPU, through the caches in memory and on disk.

Everything that a launch could trip over happens here: compiling, loading, and raising the limit of shared
memory. A kernel that is loaded is found with one look-up, without a call that allocates or waits, so it may
be used while a CUDA graph is captured.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen import cache as caches
from flashgen import compile as compiler
from flashgen import render
from flashgen.compile import Compiled
from flashgen.device import activated, arch_parts, range_of
from flashgen.errors import DeviceTypeNotSupported, InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.cache import CubinCache
    from flashgen.device import Device
    from flashgen.variant import Variant


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


_kernels: dict[tuple[Variant, int, int], Kernel] = {}
_loading: dict[tuple[Variant, int, int], threading.Lock] = {}
_guard = threading.Lock()


def load(variant: Variant, device: Device) -> Kernel:
    """The kernel of ``variant`` in the primary context of ``device``; made for the first caller.

    Threads that ask for one kernel wait for each other; different kernels are made side by side. Raises
    DeviceTypeNotSupported where the device lacks the architecture or the shared memory, and what `obtain`
    raises.
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
                kernel = _kernels[key] = _load(variant, device)
    return kernel


def obtain(variant: Variant, arch: str, cache: CubinCache | None = None) -> tuple[Compiled, bool]:
    """The machine code of ``variant`` for ``arch``, and whether the disk cache had it. Needs no GPU.

    Raises CompileError, NoCompilerError, and InternalError or SpecError where the template does not render.
    """
    made: list[Compiled] = []

    def build() -> bytes:
        source = render.render(variant)
        headers = render.headers(source, render.include_dirs(variant))
        made.append(compiler.compile_cubin(source, variant.name, arch, variant.options, headers))
        return made[0].to_bytes()

    payload = (cache or caches.default()).get_or_build(cache_key(variant, arch), build)
    return (made[0], False) if made else (Compiled.from_bytes(payload), True)


def recall(variant: Variant, arch: str, cache: CubinCache | None = None) -> Compiled | None:
    """What the disk cache has of ``variant`` for ``arch`` from the compiler that is installed as a wheel.

    Neither NVRTC nor Jinja is loaded to find it, so this is the quick way to what `obtain` gives.
    """
    version = compiler.installed_version()
    if version is None:
        return None
    payload = (cache or caches.default()).get(cache_key(variant, arch, version))
    return None if payload is None else Compiled.from_bytes(payload)


def cache_key(variant: Variant, arch: str, version: str | None = None) -> str:
    """The key of ``variant`` for ``arch`` in the disk cache; ``version`` is by default that of the compiler
    that is loaded.
    """
    layout = ",".join(field.name for field in dataclasses.fields(Compiled))
    options = (*compiler.BASE_OPTIONS, *variant.options, layout)
    version = version or compiler.compiler_version()
    return caches.key_for(render.source_digest(variant), arch, options, version)


def arch_for(variant: Variant, device: Device, known: Sequence[int] | None = None) -> str:
    """What to compile ``variant`` for, to run on ``device``: "sm_90", "sm_90a" or "compute_90".

    The device's own architecture, as `Variant.code_for` has it ("sm_90a": features of that one alone). A
    device that is too new for this NVRTC gets PTX for the highest virtual architecture below its own, which
    the driver translates when it loads it. ``known`` is by default what this NVRTC supports. Raises
    DeviceTypeNotSupported for a device older than the variant or than NVRTC.
    """
    own = _own_arch(variant, device)
    number, lowest = arch_parts(device.arch)[0], arch_parts(variant.min_arch)[0]
    known = compiler.supported_archs() if known is None else known
    if number in known:
        return own
    virtual = [arch for arch in known if lowest <= arch < number]
    if not virtual:
        raise DeviceTypeNotSupported(
            f"{compiler.compiler_version()} cannot compile {variant.name} for {device}"
        )
    return f"compute_{max(virtual)}"


def _own_arch(variant: Variant, device: Device) -> str:
    """`arch_for` where the compiler knows the device."""
    own = variant.code_for(device.arch)
    if own is None:
        raise DeviceTypeNotSupported(f"{variant.name} needs {range_of(variant.min_arch)}, not {device}")
    return own


def _load(variant: Variant, device: Device) -> Kernel:
    from cupy.cuda.function import Module
    from cupy_backends.cuda.api import driver

    arch = _own_arch(variant, device)
    _check_smem(variant, device, variant.smem_bytes)
    compiled, cached = recall(variant, arch), True
    if compiled is None:
        arch = arch_for(variant, device)
        compiled, cached = obtain(variant, arch)
    _check_smem(variant, device, variant.smem_bytes + (compiled.smem_static or 0))
    module = Module()
    try:
        module.load(compiled.cubin)
        function = module.get_function(variant.name)
        # Under lazy loading this is also what brings the code onto the device, ahead of the first launch.
        limit = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, limit, variant.smem_bytes)
        if compiled.is_ptx:
            compiled = dataclasses.replace(compiled, **_resources(driver, function.ptr))
    except driver.CUDADriverError as error:
        raise InternalError(_why_not_loaded(variant, device, arch, error)) from error
    return Kernel(variant, device, function, function.ptr, compiled, cached)


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
