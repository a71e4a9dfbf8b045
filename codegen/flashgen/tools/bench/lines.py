"""The masks by a line that are timed: what their parameters are in a case, and which keys each query sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.tools.bench.zipf import zipf_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# The mean length of documents, which are as long as the sequences of a case of Zipf lengths.
DOCUMENT = 1024
_WIDTH, _FIRST, _CHUNK, _BLOCK = 1024, 64, 2048, 512

Bounds = tuple[np.ndarray, np.ndarray]


class Line(NamedTuple):
    """``params`` of the mask. A query sees the keys [begin, end) of one or two intervals, in order; ``begin``
    and ``end`` are arrays over the queries, and an interval may be empty. ``keys`` is the number of keys,
    None for as many as queries. ``is_array`` is whether flashgen takes the mask as an array, from which
    kernels list the blocks.
    """

    params: Mapping[str, np.ndarray | int]
    intervals: tuple[Bounds, ...]
    keys: int | None = None
    is_array: bool = False

    def of_last(self, queries: int) -> Line:
        """The mask for the last queries alone, on all keys."""
        keys = len(self.intervals[0][0])
        cut = tuple((begin[keys - queries :], end[keys - queries :]) for begin, end in self.intervals)
        return self._replace(intervals=cut, keys=keys)

    def of_mask(self, name: str) -> tuple[str, Mapping[str, np.ndarray | int]]:
        """The line of the Mask with this name in LINES, and its parameters."""
        return ("not hidden[q, kv]", {"hidden": self.hidden()}) if self.is_array else (name, self.params)

    @property
    def pairs(self) -> int:
        """Visible pairs of query and key."""
        return sum(int(np.maximum(end - begin, 0).sum()) for begin, end in self.intervals)

    def hidden(self) -> np.ndarray:
        """Bool (queries, keys), True where a key is hidden."""
        keys = np.arange(self.keys or len(self.intervals[0][0]))
        seen = [(begin[:, None] <= keys) & (keys < end[:, None]) for begin, end in self.intervals]
        return ~np.any(seen, axis=0)

    def endpoints(self) -> np.ndarray:
        """The keys as cuDNN has them, int32 (2 · intervals + 1, queries): [0, F0), [F1, F2), [F3, F4)."""
        sides = [np.zeros_like(self.intervals[0][0])]
        for begin, end in self.intervals:
            sides += [begin, np.maximum(begin, end)]
        return np.stack(sides).astype(np.int32)


def line_of(name: str, seqlen: int) -> Line:
    """A mask of LINES for as many queries as keys."""
    return LINES[name](np.arange(seqlen))


def _starts_and_ends(rows: np.ndarray) -> tuple[np.ndarray, Bounds]:
    """The number of each row's document, and where this begins and ends."""
    lengths = zipf_lengths(max(1, len(rows) // DOCUMENT), min(DOCUMENT, len(rows)))
    doc, ends = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths)
    return doc.astype(np.int32), ((ends - lengths)[doc], ends[doc])


def _documents(rows: np.ndarray) -> Line:
    doc, (start, _) = _starts_and_ends(rows)
    return Line({"doc": doc}, ((start, rows + 1),))


def _documents_full(rows: np.ndarray) -> Line:
    doc, of_row = _starts_and_ends(rows)
    return Line({"doc": doc}, (of_row,))


def _document_starts(rows: np.ndarray) -> Line:
    _, (start, _) = _starts_and_ends(rows)
    return Line({"start": start.astype(np.int32)}, ((start, rows + 1),))


def _documents_array(rows: np.ndarray) -> Line:
    return _documents(rows)._replace(params={}, is_array=True)


def _prefix_lm(rows: np.ndarray) -> Line:
    prefix = len(rows) // 4
    return Line({"prefix": np.array([prefix], np.int32)}, ((0 * rows, np.maximum(rows + 1, prefix)),))


def _window_first(rows: np.ndarray) -> Line:
    begin = np.maximum(rows - _WIDTH + 1, 0)
    return Line(
        {"width": _WIDTH, "first": _FIRST}, ((0 * rows, np.minimum(begin, _FIRST)), (begin, rows + 1))
    )


def _chunks(rows: np.ndarray) -> Line:
    return Line({"size": _CHUNK}, ((rows // _CHUNK * _CHUNK, rows + 1),))


def _block_causal(rows: np.ndarray) -> Line:
    end = np.minimum((rows // _BLOCK + 1) * _BLOCK, len(rows))
    return Line({"size": _BLOCK}, ((0 * rows, end),))


LINES: dict[str, Callable[[np.ndarray], Line]] = {
    "documents": _documents,
    "documents_full": _documents_full,
    "document_starts": _document_starts,
    "documents_array": _documents_array,
    "prefix_lm": _prefix_lm,
    "window_first": _window_first,
    "chunks": _chunks,
    "block_causal": _block_causal,
}
