"""From a Variant to machine code, through the disk cache. Needs no GPU."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from flashgen.errors import CacheWarning, DeviceTypeNotSupported
from flashgen.families.arch import arch_parts, range_of
from flashgen.host import logs
from flashgen.source import render
from flashgen.toolchain import cache as caches
from flashgen.toolchain import compile as compiler
from flashgen.toolchain.compile import Compiled
from flashgen.toolchain.origins import template_lines_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant

_log = logs.logger("toolchain")


def obtain(
    variant: Variant, arch: str, before: Callable[[Variant, str], None] | None = None
) -> tuple[Compiled, bool]:
    """The machine code of ``variant`` for ``arch``, and whether the disk cache had it. Needs no GPU.

    ``before`` is called before it is compiled. Raises what that raises, CompileError, NoCompilerError, and
    InternalError or SpecError where the template does not render.
    """
    while True:
        try:
            return _obtained(variant, arch, cache_key(variant, arch), before)
        except _Edited:
            continue


class _Edited(Exception):
    """A template was written between the key and the source."""


def _obtained(
    variant: Variant, arch: str, key: str, before: Callable[[Variant, str], None] | None
) -> tuple[Compiled, bool]:
    compiled: list[Compiled] = []
    cache = caches.default()

    def build() -> bytes:
        if before is not None:
            before(variant, arch)
        source = render.render(variant)
        headers = render.headers(source, render.include_dirs(variant))
        if cache_key(variant, arch) != key:
            raise _Edited
        with template_lines_named(variant, source):
            compiled.append(compiler.compile_cubin(source, variant.name, arch, variant.options, headers))
        _log.info(
            "compiled %s for %s in %.2f s; it was not in %s",
            variant.name,
            arch,
            compiled[0].seconds,
            cache.root,
        )
        return compiled[0].to_bytes()

    kept = _unpacked(cache.get_or_build(key, build), variant, key)
    if not compiled and kept is None:
        cache.put(key, build())
    if not compiled:
        _log.debug("%s for %s came from %s", variant.name, arch, cache.root)
    return (compiled[0], False) if compiled else (kept, True)


def _unpacked(payload: bytes, variant: Variant, key: str) -> Compiled | None:
    """The kernel of an entry; None, with a warning, where it holds something else."""
    try:
        kernel = Compiled.from_bytes(payload)
        if kernel.name == variant.name:
            return kernel
        why = f"it is {kernel.name}"
    except ValueError as error:
        why = str(error)
    warnings.warn(f"{key} is not {variant.name} ({why}); it is built again", CacheWarning, stacklevel=2)
    return None


def recall(variant: Variant, arch: str) -> Compiled | None:
    """What the disk cache has of ``variant`` for ``arch`` from the compiler that is installed as a wheel, or
    a bundle from the one that made it.

    Neither NVRTC nor Jinja is loaded to find it, so this is the quick way to what `obtain` gives, and the
    only one where there is no NVRTC.
    """
    cache = caches.default()
    versions = [compiler.installed_version(), *(bundle.compiler for bundle in cache.bundles)]
    for version in dict.fromkeys(versions):
        payload = None if version is None else cache.get(cache_key(variant, arch, version))
        if payload is not None:
            kernel = _unpacked(payload, variant, cache_key(variant, arch, version))
            if kernel is not None:
                _log.debug("%s for %s came from %s", variant.name, arch, cache.root)
                return kernel
    return None


def cache_key(variant: Variant, arch: str, version: str | None = None) -> str:
    """The key of ``variant`` for ``arch`` in the disk cache; ``version`` is by default the loaded compiler's
    version.
    """
    layout = ",".join(Compiled._fields)
    options = (*compiler.BASE_OPTIONS, *variant.options, layout)
    version = version or compiler.compiler_version()
    return caches.key_for(render.source_digest(variant), arch, options, version)


def arch_for(variant: Variant, device: Device, supported: Sequence[int] | None = None) -> str:
    """What to compile ``variant`` for, to run on ``device``: "sm_90", "sm_90a" or "compute_90".

    The device's own architecture, as `Variant.code_for` has it ("sm_90a": features of that one alone). A
    device that is too new for this NVRTC gets PTX for the highest virtual architecture below its own, which
    the driver translates when it loads it. ``supported`` is by default what this NVRTC supports. Raises
    DeviceTypeNotSupported for a device older than the variant or than NVRTC.
    """
    native = own_arch(variant, device)
    number, lowest = arch_parts(device.arch)[0], arch_parts(variant.min_arch)[0]
    supported = compiler.supported_archs() if supported is None else supported
    if number in supported:
        return native
    virtual = [arch for arch in supported if lowest <= arch < number]
    if not virtual:
        raise DeviceTypeNotSupported(
            f"{compiler.compiler_version()} cannot compile {variant.name} for {device}"
        )
    return f"compute_{max(virtual)}"


def own_arch(variant: Variant, device: Device) -> str:
    """`arch_for` where the compiler knows the device."""
    code = variant.code_for(device.arch)
    if code is None:
        raise DeviceTypeNotSupported(f"{variant.name} needs {range_of(variant.min_arch)}, not {device}")
    return code
