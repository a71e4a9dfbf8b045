"""Layouts: which tokens of a sequence, or of packed documents, each rank has.

A rank has runs of tokens, in ascending order. ``contiguous`` gives it one run. ``zigzag`` cuts the tokens
into twice as many chunks as there are ranks: rank r has chunk r from the begin and chunk r from the end, so
all ranks do the same work under a causal mask. No length has to be a multiple of anything: the shards of two
ranks differ by one token at most. ``documents`` does so within each document, for packed documents whose
lengths differ; it cuts documents at whole tiles, so shards differ by about a tile. ``whole_documents`` cuts
only the longest documents in this way. Each of the others is whole on one rank, so its keys do not move.

A kernel raises the maxima of a tile's rows together. So a row has the bits of one GPU where all rows of its
tile are on one rank: where cuts are at multiples of ``TILE_ROWS`` in their document.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LAYOUTS = ("zigzag", "contiguous", "documents", "whole_documents")
# Layouts that place tokens by the bounds of documents.
LAYOUTS_OF_DOCUMENTS = ("documents", "whole_documents")
# A multiple of the rows that a warp has in any forward kernel, and of a tile or its parts.
TILE_ROWS = 128
# The cost of a row in addition to its visible keys, in keys: half of its tile is past the diagonal, and a
# tile takes time to begin.
_KEYS_OF_A_ROW = 192
# A rank has at most this share of the mean work and of the mean tokens, if cutting more documents can do it.
_EVEN = 1.01
_POWER = 8
# Documents with more than such a share of a rank's mean work are cut: the first share that leaves even ranks.
_SHARES_CUT = (1.0, 0.5, 0.25, 0.125, 0.0625)


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


class Shard(NamedTuple):
    """The runs of a rank. Its rows are the tokens of ``cut``, whose documents other ranks may have parts of,
    and then the tokens of ``whole``, whose documents are on this rank alone; ascending in each.
    """

    cut: Runs
    whole: Runs

    @property
    def runs(self) -> Runs:
        return self.cut + self.whole


def runs_of(layout: str, cu_seqlens: tuple[int, ...], world: int) -> tuple[Runs, ...]:
    """The runs of each of ``world`` ranks, in the order of their rows; see `shards_of`."""
    return tuple(shard.runs for shard in shards_of(layout, cu_seqlens, world))


@lru_cache(maxsize=64)
def shards_of(layout: str, cu_seqlens: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """The shard of each of ``world`` ranks. ``cu_seqlens`` are the bounds of the documents: (0, N) for one
    sequence of N tokens.
    """
    check_layout(layout)
    total = cu_seqlens[-1]
    if layout == "whole_documents":
        return _whole_documents(cu_seqlens, world)
    shards: list[list[Run]] = [[] for _ in range(world)]
    if layout == "contiguous":
        shards = [[Run(rank * total // world, (rank + 1) * total // world)] for rank in range(world)]
    elif layout == "documents":
        shards = _within_documents(_longest_first(cu_seqlens), world).runs
    else:
        size, extras = divmod(total, 2 * world)
        sizes = [size] * (2 * world)
        for extra in range(extras):
            rank = extra % world
            sizes[2 * world - 1 - rank if extra < world else rank] += 1
        first = 0
        for chunk, tokens in enumerate(sizes):
            shards[min(chunk, 2 * world - 1 - chunk)].append(Run(first, first + tokens))
            first += tokens
    return tuple(Shard(joined(runs), ()) for runs in shards)


def unit_of(shards: Sequence[Shard], alone: bool) -> Shard:
    """The shard of a unit of ranks. A unit that is ``alone`` has all tokens, and so all documents whole."""
    cut, whole = (joined(run for shard in shards for run in shard[part]) for part in range(2))
    return Shard((), joined(cut + whole)) if alone else Shard(cut, whole)


class _Loads(NamedTuple):
    """What ranks have so far; ``work`` as of `_work`."""

    runs: list[list[Run]]
    tokens: list[int]
    work: list[int]


def _longest_first(cu_seqlens: tuple[int, ...]) -> list[Run]:
    """The documents that have tokens, the longest first: the short ones even out what the long ones leave."""
    documents = [Run(begin, end) for begin, end in pairwise(cu_seqlens) if begin < end]
    return sorted(documents, key=lambda document: -document.tokens)


def _within_documents(documents: Iterable[Run], world: int) -> _Loads:
    """Zigzag within each document, in tiles. If a document has fewer tiles than chunks, they go to the ranks
    with the least work among those that have about the fewest tokens.
    """
    runs: list[list[Run]] = [[] for _ in range(world)]
    tokens, work = [0] * world, [0] * world
    for begin, end in documents:
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
            runs[rank].append(Run(first, after))
            tokens[rank] += after - first
            work[rank] += _work(first - begin, after - begin)
            first = after
    return _Loads(runs, tokens, work)


def _work(first: Any, after: Any) -> Any:
    """The work of the rows [first, after) of a document under a causal mask: twice the (query, key) pairs,
    with `_KEYS_OF_A_ROW` more for each row.
    """
    return (after - first) * (first + after + 2 * _KEYS_OF_A_ROW)


def _whole_documents(cu_seqlens: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """Shards with as few cut documents, the longest ones, as make work and tokens of ranks even; or the most
    even shards that any number of cut documents gives.
    """
    documents = _longest_first(cu_seqlens)
    total = sum(_work(0, document.tokens) for document in documents)
    best, least = ((Shard((), ()),) * world), math.inf
    counts = {sum(_work(0, x.tokens) * world > share * total for x in documents) for share in _SHARES_CUT}
    counts.add(len(documents) % world)  # of documents of one length
    for count in sorted(counts) if world > 1 else [0]:
        shards, uneven = _with_cut(documents, count, world)
        if uneven < least:
            best, least = shards, uneven
        if uneven <= _EVEN:
            break
    return best


def _with_cut(documents: list[Run], count: int, world: int) -> tuple[tuple[Shard, ...], float]:
    """The shards if the first ``count`` documents are cut, and the largest work or tokens of a rank over the
    mean. A whole document goes where it adds least to the sums of a high power of both, in which the largest
    counts most.
    """
    cut = _within_documents(documents[:count], world)
    lengths = np.array([document.tokens for document in documents], np.float64)
    parts = np.array([_work(0, lengths), lengths])
    parts *= world / parts.sum(1, keepdims=True).clip(1)
    have = np.array([cut.work, cut.tokens], np.float64)
    have *= (parts[:, :count].sum(1) / have.sum(1).clip(1))[:, None]
    whole: list[list[Run]] = [[] for _ in range(world)]
    for document, more in zip(documents[count:], parts[:, count:].T, strict=True):
        rank = int(((have + more[:, None]) ** _POWER - have**_POWER).sum(0).argmin())
        have[:, rank] += more
        whole[rank].append(document)
    shards = (Shard(joined(some), joined(others)) for some, others in zip(cut.runs, whole, strict=True))
    return tuple(shards), float(have.max())


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
