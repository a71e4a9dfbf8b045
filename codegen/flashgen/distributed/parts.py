"""Parts of a unit's rows, by where their keys are: on all units, which gather them, or on this unit alone.

A part is a call of its own: of some documents, whose tokens it counts from 0. So what computes a call
computes a part, and no part knows of the other's tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from flashgen.distributed.layouts import Run, Runs, joined, tokens_of
from flashgen.distributed.segments import pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.distributed.layouts import Shard


class Part(NamedTuple):
    """``rows`` of a unit, which has the tokens ``runs[place]`` of the documents with the bounds
    ``cu_seqlens``; each unit that has tokens of them has an entry in ``runs``. ``documents`` has the first
    token of each document in the whole call.
    """

    rows: slice
    cu_seqlens: tuple[int, ...]
    runs: tuple[Runs, ...]
    place: int
    documents: tuple[int, ...]

    # Caches look it up by identity: a hash of all members would take long.
    __hash__ = object.__hash__

    @property
    def gathers(self) -> bool:
        return len(self.runs) > 1

    @property
    def own(self) -> Runs:
        return self.runs[self.place]


@lru_cache(maxsize=64)
def parts_of(units: tuple[Shard, ...], place: int, cu_seqlens: tuple[int, ...]) -> tuple[Part, ...]:
    """The parts of the unit ``place``: first what gathers, if any unit has parts of documents."""
    parts = []
    cut = [unit.cut for unit in units]
    if any(cut):
        parts.append(_part(0, cut, place, cu_seqlens))
    whole = units[place].whole
    if whole:
        parts.append(_part(tokens_of(cut[place]), [whole], 0, cu_seqlens))
    return tuple(parts)


@lru_cache(maxsize=64)
def numbers_of(part: Part, cu_seqlens: tuple[int, ...]) -> dict[int, int]:
    """The number, in the call with these bounds, of the document that begins at each token of a part."""
    numbers = (bisect_right(cu_seqlens, token) - 1 for token in part.documents)
    return dict(zip(part.cu_seqlens, numbers, strict=False))


def _part(first_row: int, runs: Sequence[Runs], place: int, cu_seqlens: tuple[int, ...]) -> Part:
    rows = slice(first_row, first_row + tokens_of(runs[place]))
    if sum(map(tokens_of, runs)) == cu_seqlens[-1]:
        return Part(rows, cu_seqlens, tuple(runs), place, cu_seqlens[:-1])
    pieces = [pieces_of(of_unit, cu_seqlens) for of_unit in runs]
    lengths = dict(sorted((piece.first, piece.length) for of_unit in pieces for piece in of_unit))
    bounds = (0, *accumulate(lengths.values()))
    begins = dict(zip(lengths, bounds, strict=False))
    moved = (
        joined(Run(begins[x.first] + x.begin, begins[x.first] + x.end) for x in of_unit) for of_unit in pieces
    )
    return Part(rows, bounds, tuple(moved), place, tuple(lengths))
