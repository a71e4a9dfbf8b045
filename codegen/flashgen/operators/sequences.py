"""The sequences of a ``varlen`` call, from lengths that can be read on the host."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.errors import BadParam

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.varlen import VarlenProblem


class Sequence(NamedTuple):
    """One sequence of a batch: queries [q_begin, q_begin + q_length) of entry ``q_entry`` of q and out, and
    its keys: [kv_begin, kv_begin + kv_length) of entry ``kv_entry`` of k and v, or those of its ``pages``. An
    entry of the page table that has no key which some query sees may hold anything; ``pages`` has 0 there.
    """

    number: int
    q_entry: int
    q_begin: int
    q_length: int
    kv_entry: int
    kv_begin: int
    kv_length: int
    pages: np.ndarray | None

    def queries(self) -> tuple[int, slice]:
        """Where its rows are in q and out, as an index."""
        return self.q_entry, slice(self.q_begin, self.q_begin + self.q_length)

    def keys(self, array: np.ndarray) -> np.ndarray:
        """Its rows of k or v, (kv_length, num_heads_kv, width): a view, or with pages a copy."""
        if not self.kv_length:  # a cache may have no row at all
            return array[:0].reshape(0, *array.shape[2:])
        if self.pages is None:
            return array[self.kv_entry, self.kv_begin : self.kv_begin + self.kv_length]
        rows = array[self.pages]
        return rows.reshape(-1, *array.shape[2:])[: self.kv_length]


def sequences(problem: VarlenProblem, lengths: Mapping[str, np.ndarray | None]) -> list[Sequence]:
    """The sequences of a call; ``lengths`` has the arrays of `varlen.LENGTH_ARRAYS` in host memory.

    Raises BadParam where they contradict the arrays, each other, or the bounds of the problem, and names the
    sequence.
    """
    q_begins, q_lengths = _rows(lengths["cu_seqlens_q"], "cu_seqlens_q", problem, problem.rows_q)
    kv_begins, kv_lengths = _rows(lengths["cu_seqlens_kv"], "cu_seqlens_kv", problem, problem.rows_kv)
    if lengths["kv_lengths"] is not None:
        kv_lengths = lengths["kv_lengths"].tolist()
    index = range(problem.batch) if lengths["index"] is None else lengths["index"].tolist()
    found = []
    for b in range(problem.batch):
        q_length, kv_length = q_lengths[b], kv_lengths[b]
        if not 0 <= kv_length <= problem.capacity:
            raise BadParam(f"kv_lengths[{b}] is {kv_length}; expected 0 to {problem.capacity}, the room in k")
        for name, length, bound in (
            ("max_seqlen_q", q_length, problem.seqlen_q),
            ("max_seqlen_kv", kv_length, problem.most_keys),
        ):
            if length > bound:
                raise BadParam(f"sequence {b} has length {length}; {name} says that none is above {bound}")
        in_row = kv_length > 0 and not problem.packed_kv and not problem.paged
        if in_row and not 0 <= index[b] < problem.batch_kv:
            raise BadParam(f"index[{b}] is {index[b]}; k has {problem.batch_kv} rows of a cache")
        found.append(
            Sequence(
                b,
                0 if problem.packed_q else b,
                q_begins[b],
                q_length,
                index[b] if in_row else 0,
                kv_begins[b],
                kv_length,
                _pages(problem, lengths["pages"], b, q_length, kv_length),
            )
        )
    return found


def _rows(
    cu_seqlens: np.ndarray | None, name: str, problem: VarlenProblem, rows: int
) -> tuple[list[int], list[int]]:
    """The first row of each sequence, and how many it has."""
    if cu_seqlens is None:
        return [0] * problem.batch, [rows] * problem.batch
    check_boundaries(cu_seqlens, name, rows, "tokens")
    ends = cu_seqlens.tolist()
    return ends[:-1], [end - begin for begin, end in itertools.pairwise(ends)]


def check_boundaries(cu_seqlens: np.ndarray, name: str, rows: int, of_what: str) -> None:
    """That packed sequences begin at 0, follow one another, and end within ``rows``. Raises BadParam."""
    if cu_seqlens[0] != 0:
        raise BadParam(f"{name}[0] is {cu_seqlens[0]}; expected 0")
    for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if not begin <= end <= rows:
            raise BadParam(
                f"{name} goes from {begin} to {end} in sequence {b}; it must not fall, nor pass the {rows} "
                f"{of_what}"
            )


def _pages(
    problem: VarlenProblem, table: np.ndarray | None, b: int, q_length: int, kv_length: int
) -> np.ndarray | None:
    if table is None:
        return None
    page_size = max(1, problem.rows_kv)
    begin, end = problem.of_sequence(q_length, kv_length).seen_keys
    read = slice(begin // page_size, -(-end // page_size))
    pages = np.zeros(-(-kv_length // page_size), np.int64)
    pages[read] = table[b, read]
    wrong = np.flatnonzero((pages < 0) | (pages >= problem.batch_kv))
    if wrong.size:
        raise BadParam(f"pages[{b}, {wrong[0]}] is {pages[wrong[0]]}; there are {problem.batch_kv} pages")
    return pages
