"""The sequences of a call with lengths, from lengths that can be read on the host."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from flashgen.errors import BadParam, arg
from flashgen.operators import latentrows
from flashgen.operators.dropout import seed_of_sequence
from flashgen.operators.kvcodes import TOKEN, check_elements, whole_scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.arguments import Argument
    from flashgen.operators.lengths import Lengths
    from flashgen.operators.operator import Operator, Problem


class WithLengths(Protocol):
    """A problem with lengths; see `AttentionProblem`."""

    batch: int
    seqlen_q: int
    lengths: Lengths
    operator: Operator
    sizes: dict[str, int]

    def missing(self, argument: Argument) -> int:
        """How many dimensions of an argument the caller leaves out."""

    def of_sequence(self, q_length: int, kv_length: int) -> Problem:
        """The problem of one sequence of these lengths."""


class Sequence(NamedTuple):
    """One sequence of a batch: queries [q_begin, q_begin + q_length) of entry ``q_entry`` of q and out, and
    its keys: [kv_begin, kv_begin + kv_length) of entry ``kv_entry`` of k and v, or of the rows of its
    ``pages``. ``kv_start`` is the column of a dense mask that its first key has.
    If no query sees a key of a page, its entry of the page table may hold anything; ``pages`` has 0 there.
    """

    number: int
    q_entry: int
    q_begin: int
    q_length: int
    kv_entry: int
    kv_begin: int
    kv_length: int
    pages: np.ndarray | None
    kv_start: int = 0

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
        return rows.reshape(-1, *array.shape[2:])[self.kv_begin : self.kv_begin + self.kv_length]


def sequences(problem: WithLengths, arrays: Mapping[str, np.ndarray | None]) -> list[Sequence]:
    """The sequences of a call; ``arrays`` has the arrays of lengths in host memory, by name.

    Raises BadParam where they contradict the arrays, each other, or the bounds of the problem, and names the
    sequence.
    """
    lengths = problem.lengths
    capacity = lengths.capacity(problem.batch)
    q_begins, q_lengths = _rows(arrays.get("cu_seqlens_q"), "cu_seqlens_q", problem, lengths.rows_q)
    kv_begins, kv_lengths = _rows(arrays.get("cu_seqlens_kv"), "cu_seqlens_kv", problem, lengths.rows_kv)
    if arrays.get("kv_lengths") is not None:
        kv_lengths = arrays["kv_lengths"].tolist()
    starts = None if arrays.get("kv_starts") is None else arrays["kv_starts"].tolist()
    index = range(problem.batch) if arrays.get("index") is None else arrays["index"].tolist()
    sequences = []
    for b in range(problem.batch):
        q_length, kv_length = q_lengths[b], kv_lengths[b]
        if not 0 <= kv_length <= capacity:
            raise BadParam(
                f"{arg('kv_lengths')}[{b}] is {kv_length}; expected 0 to {capacity}, the capacity of "
                f"{arg('k')}"
            )
        for name, length, bound in (
            ("max_seqlen_q", q_length, problem.seqlen_q),
            ("max_seqlen_kv", kv_length, lengths.most_keys),
        ):
            if length > bound:
                raise BadParam(f"sequence {b} has length {length}; the bound {arg(name)} is {bound}")
        start = starts[b] if starts else 0
        if not 0 <= start <= kv_length:
            raise BadParam(
                f"{arg('kv_starts')}[{b}] is {start}; expected 0 to {kv_length}, the length of the sequence"
            )
        kv_length -= start
        in_row = kv_length > 0 and not lengths.packed_kv and not lengths.paged
        if in_row and not 0 <= index[b] < lengths.batch_kv:
            raise BadParam(
                f"{arg('index')}[{b}] is {index[b]}; {arg('k')} has {lengths.batch_kv} rows of a cache"
            )
        sequences.append(
            Sequence(
                b,
                0 if lengths.packed_q else b,
                q_begins[b],
                q_length,
                index[b] if in_row else 0,
                kv_begins[b] + start,
                kv_length,
                _pages(problem, arrays.get("pages"), b, q_length, kv_length, start),
                start,
            )
        )
    return sequences


def _rows(
    cu_seqlens: np.ndarray | None, name: str, problem: WithLengths, rows: int
) -> tuple[list[int], list[int]]:
    """The first row of each sequence, and how many it has."""
    if cu_seqlens is None:
        return [0] * problem.batch, [rows] * problem.batch
    check_boundaries(cu_seqlens, name, rows, "tokens")
    ends = cu_seqlens.tolist()
    return ends[:-1], [end - begin for begin, end in itertools.pairwise(ends)]


def arrays_of(
    problem: WithLengths, sequence: Sequence, arrays: Mapping[str, np.ndarray | None]
) -> dict[str, np.ndarray | None]:
    """A sequence's part of each array, by name, as a call with a batch of one has it: a view, or where keys
    are in pages a copy. ``arrays`` has arguments of the operator, none of them lengths.
    """
    cut = {
        "batch": slice(sequence.number, sequence.number + 1),
        "seqlen_q": slice(sequence.q_length),
        "seqlen_kv": slice(sequence.kv_start, sequence.kv_start + sequence.kv_length),
    }
    entry, rows = sequence.queries()
    parts = dict(arrays)
    for name, x in arrays.items():
        if x is None:
            continue
        argument = problem.operator.arguments[problem.operator.position(name)]
        symbols = argument.symbols
        if name == "dropout_seed":
            parts[name] = seed_of_sequence(x, sequence.number, problem.sizes["num_heads_q"])
            continue
        x = x[None] if problem.missing(argument) else x
        if symbols[0] == "kv_scale_batch":
            of_tokens = problem.kv_scales == TOKEN
            parts[name] = (sequence.keys(x) if of_tokens else x[sequence.number])[None]
        elif symbols[0] == "batch_kv":
            parts[name] = sequence.keys(x)[None]
        elif symbols[0] == "batch_q":
            parts[name] = (x[entry, rows] if symbols[1] == "rows_q" else x[entry, :, rows])[None]
        else:
            extents = argument.extents(problem.sizes)
            whole = np.broadcast_to(x, extents) if argument.layout == "broadcast" else x
            parts[name] = whole[tuple(cut.get(symbol, slice(None)) for symbol in symbols)]
    if "v" not in parts:  # a latent cache
        parts["q"] = whole_q(parts["q"], parts.pop("q_rope", None))
        if problem.kv_dtype == latentrows.LAYOUT:
            parts["k"] = latentrows.unpacked(parts["k"])
        parts["v_scale"] = parts.get("k_scale")
        parts["v"] = parts["k"][..., : problem.sizes["head_dim_v"]]
    return parts


def whole_q(q: np.ndarray, q_rope: np.ndarray | None) -> np.ndarray:
    """The queries of a call of a latent cache, whose last elements may be in an array of their own."""
    return q if q_rope is None else np.concatenate([q, q_rope], -1)


def check_boundaries(cu_seqlens: np.ndarray, name: str, rows: int, of_what: str) -> None:
    """That packed sequences begin at 0, follow one another, and end within ``rows``. Raises BadParam."""
    if cu_seqlens[0] != 0:
        raise BadParam(f"{arg(name)}[0] is {cu_seqlens[0]}; expected 0")
    for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if not begin <= end <= rows:
            raise BadParam(
                f"{arg(name)} goes from {begin} to {end} in sequence {b}; it must not decrease, or exceed "
                f"the {rows} {of_what}"
            )


def _pages(
    problem: WithLengths, table: np.ndarray | None, b: int, q_length: int, kv_length: int, start: int
) -> np.ndarray | None:
    if table is None:
        return None
    page_size = max(1, problem.lengths.rows_kv)
    begin, end = problem.of_sequence(q_length, kv_length).seen_keys
    read = slice((start + begin) // page_size, -(-(start + end) // page_size) if begin < end else 0)
    pages = np.zeros(-(-(start + kv_length) // page_size), np.int64)
    pages[read] = table[b, read]
    wrong = np.flatnonzero((pages < 0) | (pages >= problem.lengths.batch_kv))
    if wrong.size:
        raise BadParam(
            f"{arg('pages')}[{b}, {wrong[0]}] is {pages[wrong[0]]}; there are {problem.lengths.batch_kv} "
            "pages"
        )
    return pages


def check_scales(
    problem: WithLengths, of_call: list[Sequence], arrays: Mapping[str, np.ndarray | None]
) -> None:
    """Raise BadParam for a scale of codes that is not a finite number above 0. Of scales of tokens only the
    scales of keys that some query sees count: slots of a cache that no sequence uses may hold anything.
    """
    if problem.kv_scales != TOKEN:
        check_elements(arrays)
        return
    whole = whole_scales(problem.sizes, arrays)
    for sequence in of_call:
        seen = slice(*problem.of_sequence(sequence.q_length, sequence.kv_length).seen_keys)
        check_elements({name: sequence.keys(scale)[seen] for name, scale in whole.items()})
