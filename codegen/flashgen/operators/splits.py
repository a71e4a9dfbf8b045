"""Split-KV as a call may ask for it: what ``splits`` of ``attention`` means."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class SplitEvery:
    """Splits of ``keys`` keys each, of every sequence: ``attention(..., splits=SplitEvery(1024))``.

    Long sequences have many splits and short ones few, and the bits of a sequence do not depend on its batch.
    The first split begins with the first KV block that the sequence sees. ``keys`` is a multiple of the KV
    block of the kernel; a multiple of 256 works for all kernels. Raises BadParam for anything but a positive
    integer.
    """

    keys: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _count("keys of SplitEvery", self.keys))


Splits = str | int | SplitEvery


def splits_of(splits: Any) -> Splits:
    """``AUTO``, a number of splits, or a SplitEvery. Raises BadParam for anything else."""
    if isinstance(splits, SplitEvery) or (isinstance(splits, str) and splits == AUTO):
        return splits
    return _count("splits", splits, ", 'auto', or flashgen.SplitEvery(keys)")


def _count(name: str, count: Any, others: str = "") -> int:
    # Only what cannot change: a plan is kept for it.
    if not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 1:
        raise BadParam(f"{arg(name)} is {shown(count)}; expected an integer of 1 or more{others}")
    return int(count)
