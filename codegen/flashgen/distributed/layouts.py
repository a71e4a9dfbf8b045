"""Layouts: which tokens of a sequence, or of packed documents, each rank has.

A rank has runs of tokens, in ascending order. ``contiguous`` gives it one run. ``zigzag`` cuts the tokens
into twice as many chunks as there are ranks: rank r has chunk r from the begin and chunk r from the end, so
all ranks do the same work under a causal mask. No length has to be a multiple of anything: the shards of two
ranks differ by one token at most. ``documents`` does so within each document, for packed documents whose
lengths differ; it cuts documents at whole tiles, so shards differ by about a tile.

A kernel raises the maxima of a tile's rows together. So a row has the bits of one GPU where all rows of its
tile are on one rank: where cuts are at multiples of ``TILE_ROWS`` in their document.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

LAYOUTS = ("zigzag", "contiguous", "documents")
# A multiple of the rows that a warp has in any forward kernel, and of a tile or its parts.
TILE_ROWS = 128


class Run(NamedTuple):
    """The tokens [begin, end) of all that there are."""

    begin: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


Runs = tuple[Run, ...]


def check_layout(layout: Any) -> None:
    """Raise BadParam for a layout that does not exist."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise BadParam(f"{arg('layout')} is {shown(layout)}; allowed are {', '.join(map(repr, LAYOUTS))}")


@lru_cache(maxsize=64)
def runs_of(layout: str, cu_seqlens: tuple[int, ...], world: int) -> tuple[Runs, ...]:
    """The runs of each of ``world`` ranks. ``cu_seqlens`` are the bounds of the documents: (0, N) for one
    sequence of N tokens.
    """
    check_layout(layout)
    total = cu_seqlens[-1]
    if layout == "contiguous":
        return tuple(
            joined([Run(rank * total // world, (rank + 1) * total // world)]) for rank in range(world)
        )
    if layout == "documents":
        return _within_documents(cu_seqlens, world)
    size, extras = divmod(total, 2 * world)
    sizes = [size] * (2 * world)
    for extra in range(extras):
        rank = extra % world
        sizes[2 * world - 1 - rank if extra < world else rank] += 1
    shards: list[list[Run]] = [[] for _ in range(world)]
    first = 0
    for chunk, tokens in enumerate(sizes):
        shards[min(chunk, 2 * world - 1 - chunk)].append(Run(first, first + tokens))
        first += tokens
    return tuple(map(joined, shards))


def _within_documents(cu_seqlens: tuple[int, ...], world: int) -> tuple[Runs, ...]:
    """Zigzag within each document, in tiles. Where there is no tile for every chunk, the ranks with the least
    work get one, of those that have about the fewest tokens.
    """
    shards: list[list[Run]] = [[] for _ in range(world)]
    tokens, work = [0] * world, [0] * world
    # The longest first, so the short ones even out what these leave.
    for begin, end in sorted(pairwise(cu_seqlens), key=lambda bounds: bounds[0] - bounds[1]):
        size, extras = divmod(-(-(end - begin) // TILE_ROWS), 2 * world)
        tiles = [size] * (2 * world)
        fewest = min(tokens)
        order = sorted(range(world), key=lambda x: ((tokens[x] - fewest) // (4 * TILE_ROWS), work[x], x))
        for extra in range(extras):
            rank = order[extra % world]
            tiles[2 * world - 1 - rank if extra < world else rank] += 1
        first = begin
        for chunk, count in enumerate(tiles):
            rank, after = min(chunk, 2 * world - 1 - chunk), min(end, first + count * TILE_ROWS)
            shards[rank].append(Run(first, after))
            tokens[rank] += after - first
            work[rank] += (after - first) * (first + after - 2 * begin)
            first = after
    return tuple(map(joined, shards))


def cuts_whole_tiles(shards: Iterable[Runs], cu_seqlens: tuple[int, ...]) -> bool:
    """Whether each run begins at a document's first row, or a multiple of TILE_ROWS after it."""
    return all(
        (run.begin - cu_seqlens[bisect_right(cu_seqlens, run.begin) - 1]) % TILE_ROWS == 0
        for runs in shards
        for run in runs
    )


def joined(runs: Iterable[Run]) -> Runs:
    """The runs in ascending order, without empty ones; adjacent runs are one."""
    result: list[Run] = []
    for run in sorted(runs):
        if run.tokens and result and result[-1].end == run.begin:
            result[-1] = Run(result[-1].begin, run.end)
        elif run.tokens:
            result.append(run)
    return tuple(result)


def tokens_of(runs: Runs) -> int:
    """How many tokens there are in these runs."""
    return sum(run.tokens for run in runs)
