"""Names of GPU architectures: ``sm_90``, ``sm_90a``, and which of them run what."""

from __future__ import annotations


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
