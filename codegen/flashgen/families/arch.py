"""GPU architectures: their names, ``sm_90``, ``sm_90a``, which run what, and what is known of a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown

__all__ = ["Device"]

_KB, _MB = 1 << 10, 1 << 20
# From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and data sheets:
# architecture -> (GPU, multiprocessors, shared memory of a block, of a multiprocessor, L2, GB/s of memory).
_GPUS = {
    "sm_80": ("A100", 108, 163 * _KB, 164 * _KB, 40 * _MB, 1555),
    "sm_86": ("GeForce RTX 3090", 82, 99 * _KB, 100 * _KB, 6 * _MB, 936),
    "sm_87": ("Jetson AGX Orin", 16, 163 * _KB, 164 * _KB, 4 * _MB, 205),
    "sm_89": ("GeForce RTX 4090", 128, 99 * _KB, 100 * _KB, 72 * _MB, 1008),
    "sm_90": ("H100", 132, 227 * _KB, 228 * _KB, 50 * _MB, 3352),
    "sm_100": ("B200", 148, 227 * _KB, 228 * _KB, 126 * _MB, 8000),
    "sm_103": ("B300", 148, 227 * _KB, 228 * _KB, 126 * _MB, 8000),
    "sm_110": ("Jetson AGX Thor", 20, 227 * _KB, 228 * _KB, 32 * _MB, 273),
    "sm_120": ("GeForce RTX 5090", 170, 99 * _KB, 100 * _KB, 96 * _MB, 1792),
    "sm_121": ("GB10", 48, 99 * _KB, 100 * _KB, 24 * _MB, 273),
}
# Architectures of which `typical` knows a GPU.
KNOWN_ARCHS = tuple(_GPUS)


def arch_parts(name: str) -> tuple[int, str]:
    """``sm_90a`` as (90, "a"). Code with the suffix ``a`` is for that architecture alone, with ``f`` for its
    family."""
    digits = name.removeprefix("sm_")
    number = digits.rstrip("af")
    return int(number), digits[len(number) :]


def reaches(number: int, min_arch: str) -> bool:
    """Whether an architecture, 90 for sm_90, runs what needs ``min_arch``."""
    lowest, suffix = arch_parts(min_arch)
    if suffix == "a":
        return number == lowest
    return number >= lowest and (suffix != "f" or number // 10 == lowest // 10)


def range_of(min_arch: str) -> str:
    """The architectures that run what needs ``min_arch``, in words."""
    suffix = arch_parts(min_arch)[1]
    return min_arch + {"a": " alone", "f": " or later of its family"}.get(suffix, " or later")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU: its place among the visible ones, what it can run, and the sizes that dispatch counts with.

    ``arch`` is "sm_90" for ``compute_capability`` (9, 0). ``smem_per_block`` is the most shared memory in
    bytes that a block may ask for, ``smem_per_sm`` what a multiprocessor has, ``l2_bytes`` the size of the
    L2 cache, ``memory_gbps`` the peak rate of its memory in GB/s.
    """

    ordinal: int
    arch: str
    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    memory_gbps: float
    name: str

    def __str__(self) -> str:
        return f"GPU {self.ordinal} ({self.name}, {self.arch})"

    def without(self, sm_margin: int) -> Device:
        """The device for a call that leaves ``sm_margin`` multiprocessors to other kernels. Raises BadParam
        if none is left.
        """
        if sm_margin == 0:
            return self
        if sm_margin >= self.num_sms:
            raise BadParam(
                f"{arg('sm_margin')} is {sm_margin}; {self} has {self.num_sms} multiprocessors, and the call "
                "needs one at least"
            )
        return dataclasses.replace(self, num_sms=self.num_sms - sm_margin)


def typical(arch: str) -> Device:
    """A well-known GPU of an architecture, which need not be in this machine: an H100 for sm_90.

    Raises BadParam unless ``arch`` is in `KNOWN_ARCHS`.
    """
    if not isinstance(arch, str) or arch not in _GPUS:
        raise BadParam(f"no GPU of architecture {shown(arch)} is known; known are {', '.join(KNOWN_ARCHS)}")
    gpu, num_sms, smem_per_block, smem_per_sm, l2_bytes, gbps = _GPUS[arch]
    number = arch_parts(arch)[0]
    return Device(0, arch, divmod(number, 10), num_sms, smem_per_block, smem_per_sm, l2_bytes, gbps, gpu)
