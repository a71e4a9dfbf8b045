"""Compiling many variants before their first call: which of them for which architectures, and all at once.

What is compiled lands in the disk cache, under the keys that a call looks for.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, InternalError, SpecError
from flashgen.families.arch import arch_parts, range_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flashgen.families.variant import Variant
    from flashgen.toolchain.compile import Compiled


@dataclass(frozen=True, slots=True)
class Built:
    """One variant compiled for one architecture, or the error that came instead.

    `seconds` is the time it took here: to compile, or to read it from the cache when `cached`.
    """

    variant: Variant
    arch: str
    seconds: float
    cached: bool = False
    compiled: Compiled | None = None
    error: str = ""

    @property
    def spilled(self) -> int:
        """Bytes of registers that the kernel stores to and loads from local memory."""
        kernel = self.compiled
        return (kernel.spill_stores or 0) + (kernel.spill_loads or 0) if kernel else 0

    @property
    def serialized(self) -> str:
        """Why no two wgmmas of the kernel are in flight together, in words of ptxas; else an empty string."""
        log = (self.compiled and self.compiled.log) or ""
        pattern = r"wgmma\S* instructions are serialized (due to .*?)(?: in| for) (?:the )?function"
        found = re.search(pattern, log)
        return found[1] if found else ""

    @property
    def failure(self) -> str:
        """Why this is not acceptable, or an empty string."""
        if self.error:
            return self.error
        if not self.variant.must_not_spill(self.arch):
            return ""
        if self.spilled:
            return f"spills {self.spilled} bytes of registers, and {self.variant.spec} says no_spills"
        if self.serialized:
            return f"ptxas makes each wgmma wait for the one before, {self.serialized}"
        return ""

    @property
    def kept(self) -> bool:
        """Whether the disk cache has it now; a small one may have evicted it for what was built later."""
        from flashgen.toolchain import cache as caches
        from flashgen.toolchain.obtain import cache_key

        return self.compiled is not None and caches.default().keeps(cache_key(self.variant, self.arch))

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON; sizes in bytes."""
        kernel = self.compiled
        return {
            "variant": self.variant.name,
            "arch": self.arch,
            "registers": kernel.registers if kernel else None,
            "spill_stores": kernel.spill_stores if kernel else None,
            "spill_loads": kernel.spill_loads if kernel else None,
            "stack": kernel.stack if kernel else None,
            "smem_dynamic": self.variant.smem_bytes,
            "smem_static": kernel.smem_static if kernel else None,
            "threads": self.variant.threads,
            "seconds": round(self.seconds, 4),
            "cached": self.cached,
            "kept": self.kept,
            "failure": self.failure or None,
        }


def arch_number(arch: str) -> int:
    """90 for sm_90 and sm_90a."""
    return arch_parts(arch)[0]


def pairs(variants: Sequence[Variant], archs: Sequence[str] = ()) -> list[tuple[Variant, str]]:
    """What to compile: each variant for the architectures that its spec lists, with `archs` only for the
    listed ones among them.

    An architecture that none of the variants lists gets every one whose lowest architecture it reaches.
    Either way a variant is compiled as for a call (`Variant.code_for`): sm_90 and sm_90a ask for the same.
    Raises BadParam where that leaves nothing for one of `archs`.
    """
    if not archs:
        return [(variant, arch) for variant in variants for arch in variant.archs]
    targets = []
    for arch in archs:
        reached = [(variant, code) for variant in variants if (code := variant.code_for(arch))]
        if not reached:
            lowest = min((variant.min_arch for variant in variants), key=arch_number)
            raise BadParam(f"nothing to compile for {arch}: the chosen variants need {range_of(lowest)}")
        listed = [pair for pair in reached if arch_number(arch) in map(arch_number, pair[0].archs)]
        targets += listed or reached
    order = {variant: index for index, variant in enumerate(variants)}
    return sorted(dict.fromkeys(targets), key=lambda pair: (order[pair[0]], arch_number(pair[1])))


def build(
    targets: Iterable[tuple[Variant, str]],
    jobs: int | None = None,
    on_done: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Compile every pair, or find it in the disk cache, on `jobs` threads; by default one for each processor.

    The results are in the order of `targets`; `on_done` hears of each as it ends. A kernel that does not
    render or compile is a Built with an error and stops nothing. Raises NoCompilerError where there is no
    compiler.
    """
    from flashgen.toolchain.compile import nvrtc
    from flashgen.toolchain.parallel import in_parallel

    nvrtc()  # a missing compiler is one error, not one for each kernel

    def report(_: tuple[Variant, str], built: Built) -> None:
        if on_done is not None:
            on_done(built)

    return in_parallel(_build_one, targets, jobs, report)


def _build_one(pair: tuple[Variant, str]) -> Built:
    from flashgen.toolchain.obtain import obtain

    variant, arch = pair
    start = time.perf_counter()
    try:
        compiled, cached = obtain(variant, arch)
    except (InternalError, SpecError) as error:
        return Built(variant, arch, time.perf_counter() - start, error=str(error))
    return Built(variant, arch, time.perf_counter() - start, cached, compiled)
