"""Split-KV as a call may ask for it: what ``splits`` of ``attention`` means."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from flashgen.errors import BadParam

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class SplitEvery:
    """Splits the keys of each sequence every ``keys`` keys, so that its bits do not depend on its batch.

    ``flashgen.attention(..., splits=flashgen.SplitEvery(1024))``: the first split begins with the first key
    that the call sees, or with the KV block of it. Where splits begin, and which kernel runs, depends neither
    on the batch and its lengths nor on the multiprocessors of the GPU. ``keys`` is a multiple of the KV block
    of the kernel: 256 always is. Raises BadParam for no positive integer.
    """

    keys: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _count("keys of SplitEvery", self.keys))


Splits = str | int | SplitEvery


def splits_of(given: Any) -> Splits:
    """``AUTO``, a number of splits, or a SplitEvery. Raises BadParam for anything else."""
    if isinstance(given, SplitEvery) or (isinstance(given, str) and given == AUTO):
        return given
    return _count("splits", given, ", 'auto', or flashgen.SplitEvery(keys)")


def _count(name: str, given: Any, others: str = "") -> int:
    try:
        count = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise BadParam(f"{name} is {given!r}; expected an integer of 1 or more{others}")
    return count
