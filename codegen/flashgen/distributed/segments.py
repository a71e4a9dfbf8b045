"""Segments: what a rank computes, as pieces of ordinary attention.

A run of tokens is cut at the bounds of documents. Each segment is the attention of its rows on the keys of
their document, from the document's first key to the last key that a row of the segment sees. So masks align
as in a call of ``attention``: the last row with the last key. A window that looks ahead reaches past the
rows, so its keys end later; ``shift`` is by how much, and the window of the segment makes up for it.

Keys start where the document starts, also where a window hides the first ones: kernels walk keys in blocks
from the first key, so a rank has the same blocks as one GPU, and the same bits.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from flashgen.distributed.layouts import Run, Runs

# The most segments whose gradients are added one by one: each takes the host some microseconds.
_FEW = 32


class Visibility(NamedTuple):
    """Query p sees the keys from p - left to p + right of its document; None is no bound."""

    left: int | None
    right: int | None

    def shift(self, end: int, length: int) -> int:
        """How far the last visible key is after the last row, for rows that end before row ``end`` of a
        document.
        """
        return length - end if self.right is None else min(length - end, self.right)

    def pairs(self, begin: int, end: int, length: int) -> int:
        """How many (query, key) pairs the rows [begin, end) of a document see."""
        last = (end - begin) * length
        if self.right is not None:
            last = _clipped_sum(begin + self.right + 1, end + self.right + 1, length)
        first = 0
        if self.left is not None:
            first = _sum_of(begin - self.left, end - self.left)
        return last - first


def visibility(causal: bool, window_size: tuple[int, int]) -> Visibility:
    """What the options of a call let a query see."""
    left, right = window_size
    return Visibility(None if left < 0 else left, 0 if causal else None if right < 0 else right)


class Segment(NamedTuple):
    """Rows [q_begin, q_end) of the rank's shard on the tokens [k_begin, k_end) as keys. ``layer`` counts the
    segments of one launch in one document: keys of segments of one layer are disjoint. ``position`` is the
    place of the first row in its document.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    layer: int = 0
    position: int = 0


class Launch(NamedTuple):
    """Segments that one call computes, with the same shift."""

    segments: tuple[Segment, ...]
    shift: int

    # Caches look it up by identity: a hash of all members would take long.
    __hash__ = object.__hash__

    @property
    def rows(self) -> slice:
        return slice(self.segments[0].q_begin, self.segments[-1].q_end)

    @property
    def layers(self) -> int:
        return 1 + max(x.layer for x in self.segments)


@lru_cache(maxsize=256)
def longest_of(launch: Launch) -> tuple[int, int]:
    """The most rows and the most keys of a segment."""
    rows = max(x.q_end - x.q_begin for x in launch.segments)
    return rows, max(x.k_end - x.k_begin for x in launch.segments)


@lru_cache(maxsize=64)
def launches_of_documents(launch: Launch) -> tuple[Launch, ...]:
    """A launch for each segment."""
    return tuple(Launch((x._replace(layer=0),), launch.shift) for x in launch.segments)


@lru_cache(maxsize=256)
def with_rows_before(launch: Launch, rows: int) -> Launch:
    """A launch of one segment, with this many rows of padding before its own."""
    (segment,) = launch.segments
    begin, position = segment.q_begin - rows, segment.position - rows
    return Launch((segment._replace(q_begin=begin, position=position),), launch.shift)


class Piece(NamedTuple):
    """Rows [begin, end) of a document of ``length`` tokens that starts at the token ``first``."""

    begin: int
    end: int
    first: int
    length: int


def pieces_of(runs: Runs, cu_seqlens: tuple[int, ...]) -> tuple[Piece, ...]:
    """The runs, cut at the bounds of documents."""
    pieces = []
    for run in runs:
        begin = run.begin
        while begin < run.end:
            document = bisect_right(cu_seqlens, begin) - 1
            first, after = cu_seqlens[document], cu_seqlens[document + 1]
            end = min(run.end, after)
            pieces.append(Piece(begin - first, end - first, first, after - first))
            begin = end
    return tuple(pieces)


@lru_cache(maxsize=256)
def launches_of(
    runs: Runs, cu_seqlens: tuple[int, ...], visible: Visibility, packed: bool
) -> tuple[Launch, ...]:
    """The launches of a rank that has these runs. Where documents are ``packed``, one launch takes the
    segments of many, as long as they have one shift; else each segment is a launch.
    """
    launches: list[tuple[int, list[Segment]]] = []
    layers: dict[int, int] = {}
    row = 0
    for piece in pieces_of(runs, cu_seqlens):
        shift = visible.shift(piece.end, piece.length)
        after = piece.end + shift
        if visible.left is None and visible.right is None:
            shift = 0  # nothing is hidden, so nothing has to align
        if not packed or not launches or launches[-1][0] != shift:
            launches.append((shift, []))
            layers = {}
        layer = layers.get(piece.first, 0)
        layers[piece.first] = layer + 1
        rows = piece.end - piece.begin
        launches[-1][1].append(Segment(row, row + rows, piece.first, piece.first + after, layer, piece.begin))
        row += rows
    return tuple(Launch(tuple(segments), shift) for shift, segments in launches)


def by_rows(packed: bool, launches: tuple[Launch, ...]) -> bool:
    """Whether the gradients of keys are added by rows of a gathered buffer, and not segment by segment:
    where launches have many segments.
    """
    return packed and sum(len(launch.segments) for launch in launches) > _FEW


def pairs_of(runs: Runs, cu_seqlens: tuple[int, ...], visible: Visibility) -> int:
    """How many (query, key) pairs a rank with these runs computes, for one head."""
    return sum(visible.pairs(x.begin, x.end, x.length) for x in pieces_of(runs, cu_seqlens))


def whole_run(cu_seqlens: tuple[int, ...]) -> Runs:
    """All tokens, as the runs of one rank."""
    return (Run(0, cu_seqlens[-1]),) if cu_seqlens[-1] else ()


def _sum_of(begin: int, end: int) -> int:
    """The sum of max(0, x) over begin <= x < end."""
    begin, end = max(0, begin), max(0, end)
    return (end - 1) * end // 2 - (begin - 1) * begin // 2


def _clipped_sum(begin: int, end: int, most: int) -> int:
    """The sum of min(most, x) over begin <= x < end, of positive numbers."""
    inside = min(max(begin, most), end)
    return _sum_of(begin, inside) + (end - inside) * most
