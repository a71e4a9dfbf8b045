"""The GPU that a simulated launch pretends to run on: what dispatch and the launcher want to know of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flashgen.arch import Device
from flashgen.errors import BadParam

if TYPE_CHECKING:
    from flashgen.spec.variant import Variant

DEFAULT_ARCH = "sm_80"
ARCH_VARIABLE = "FLASHGEN_SIMULATOR_ARCH"

_KB, _MB = 1 << 10, 1 << 20
# From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and data sheets:
# architecture -> (GPU, multiprocessors, shared memory of a block, of a multiprocessor, L2).
_GPUS = {
    "sm_80": ("A100", 108, 163 * _KB, 164 * _KB, 40 * _MB),
    "sm_86": ("GeForce RTX 3090", 82, 99 * _KB, 100 * _KB, 6 * _MB),
    "sm_89": ("GeForce RTX 4090", 128, 99 * _KB, 100 * _KB, 72 * _MB),
    "sm_90": ("H100", 132, 227 * _KB, 228 * _KB, 50 * _MB),
    "sm_100": ("B200", 148, 227 * _KB, 228 * _KB, 126 * _MB),
    "sm_120": ("GeForce RTX 5090", 170, 99 * _KB, 100 * _KB, 96 * _MB),
}
ARCHS = tuple(_GPUS)


def pretend(arch: str | None = None) -> Device:
    """The device of ``arch``; None: FLASHGEN_SIMULATOR_ARCH, else sm_80. Raises BadParam unless in ARCHS."""
    arch = arch or os.environ.get(ARCH_VARIABLE) or DEFAULT_ARCH
    if arch not in _GPUS:
        raise BadParam(f"the simulator cannot pretend to be {arch!r}; it knows {', '.join(ARCHS)}")
    gpu, num_sms, smem_per_block, smem_per_sm, l2_bytes = _GPUS[arch]
    number = int(arch.removeprefix("sm_"))
    return Device(
        ordinal=0,
        arch=arch,
        compute_capability=divmod(number, 10),
        num_sms=num_sms,
        smem_per_block=smem_per_block,
        smem_per_sm=smem_per_sm,
        l2_bytes=l2_bytes,
        name=f"simulated {gpu}",
    )


def pretend_for(variant: Variant) -> Device:
    """The device of the variant's own architecture where the simulator knows it; else as ``pretend``."""
    arch = variant.min_arch.rstrip("af")
    return pretend(arch if arch in _GPUS else None)
