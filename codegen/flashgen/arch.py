"""GPU architectures: their names, ``sm_90``, ``sm_90a``, which run what, and what is known of a GPU."""

from __future__ import annotations

from dataclasses import dataclass


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
    L2 cache.
    """

    ordinal: int
    arch: str
    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    name: str

    def __str__(self) -> str:
        return f"GPU {self.ordinal} ({self.name}, {self.arch})"
