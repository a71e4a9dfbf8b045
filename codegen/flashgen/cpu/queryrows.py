"""A block of query rows on the CPU: some rows of all query heads that share a kv head.

Matrices of such a block have a row for each (head, row), heads first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.cpu.keyspans import block_rows
from flashgen.operators.masks import Band, hidden_keys
from flashgen.operators.numbers import bfloat16_bits, widened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flashgen.cpu.keyspans import KeySpans
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.dropout import Dropout
    from flashgen.operators.modification import FormulaAt, ScoreOfCall
    from flashgen.operators.visibility import Visibility


class Call(NamedTuple):
    """What the blocks of a call share.

    ``arrays`` are by name, each with a batch; bfloat16 elements are their bits. ``first_batch`` is the number
    that a score modification knows the first entry by. ``rule`` is a mask by a line, and ``spans`` are the
    keys that rows go through.
    """

    arrays: Mapping[str, np.ndarray | None]
    spans: KeySpans
    score: ScoreOfCall | None = None
    first_batch: int = 0
    rule: Visibility | None = None
    dropout: Dropout | None = None


class KeyBlock(NamedTuple):
    """Keys [first, last) that some rows see any of. ``hidden`` is true where a row does not see a key,
    broadcastable to (heads, rows, keys); None where all are seen.
    """

    first: int
    last: int
    hidden: np.ndarray | None

    @property
    def slice(self) -> slice:
        return slice(self.first, self.last)

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.first, self.last)


class QueryRows(NamedTuple):
    """Where a block of rows lies; ``group`` query heads share the kv head."""

    batch: int
    kv_head: int
    group: int
    rows: range

    @property
    def heads(self) -> slice:
        return slice(self.kv_head * self.group, (self.kv_head + 1) * self.group)

    @property
    def slice(self) -> slice:
        return slice(self.rows.start, self.rows.stop)

    @property
    def shape(self) -> tuple[int, int]:
        return self.group, len(self.rows)

    @property
    def count(self) -> int:
        """The rows of a matrix."""
        return self.group * len(self.rows)

    def matrix(self, x: np.ndarray, dtype: str, number: type[np.floating]) -> np.ndarray:
        """The rows of an array, (batch, seqlen_q, num_heads_q, width), as a matrix."""
        some = widened(x[self.batch, self.slice, self.heads], dtype, number)
        return some.transpose(1, 0, 2).reshape(self.count, x.shape[-1])

    def as_stored(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix as (rows, heads, width), which is what an array has there."""
        return matrix.reshape(*self.shape, -1).transpose(1, 0, 2)

    def formula(self, call: Call, keys: KeyBlock) -> FormulaAt | None:
        """The score modification for the scores of these keys."""
        if call.score is None:
            return None
        heads, rows = self._positions()
        return call.score.at(
            call.first_batch + self.batch, heads[:, None, None], rows[:, None], keys.positions
        )

    def dropout_factors(self, call: Call, keys: KeyBlock) -> np.ndarray | None:
        """What P of these keys is multiplied by, a matrix."""
        if call.dropout is None:
            return None
        return call.dropout.factors(self.batch, *self._positions(), keys.positions).reshape(self.count, -1)

    def seen_keys(self, problem: AttentionProblem, call: Call) -> Iterator[KeyBlock]:
        """The keys that the rows see any of, in order, a block at a time."""
        band, rows, mask = Band.of(problem), self.rows, call.arrays.get("mask")
        positions = np.arange(rows.start, rows.stop)[:, None]
        begin, end = band.keys_of_some(rows.start, rows.stop, problem.seqlen_kv)
        begin_every, end_every = band.keys_of_every(rows.start, rows.stop, problem.seqlen_kv)
        line = None if call.rule is None else _LineOfRows(call.rule, self)
        for first, last in call.spans(self.batch, self.kv_head, rows.start, begin, end):
            by_line = hidden = None
            if line is not None:
                seen = line.hides(range(first, last))
                if seen.is_empty:
                    continue
                by_line = seen.hidden
            if mask is not None or by_line is not None or first < begin_every or last > end_every:
                dense = None if mask is None else mask[self.batch, self.heads, self.slice, first:last]
                hidden = hidden_keys(band, dense, positions, np.arange(first, last), by_line)
                if hidden.all():
                    continue
            yield KeyBlock(first, last, hidden)

    def _positions(self) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(self.heads.start, self.heads.stop), np.arange(self.rows.start, self.rows.stop)


def rows_of_kv_head(problem: AttentionProblem, batch: int, kv_head: int) -> list[QueryRows]:
    """The rows of the query heads that share a kv head, in blocks."""
    block, group, end = block_rows(problem), problem.group_size, problem.seqlen_q
    return [
        QueryRows(batch, kv_head, group, range(start, min(start + block, end)))
        for start in range(0, end, block)
    ]


def all_rows(problem: AttentionProblem) -> list[QueryRows]:
    """The rows of all query heads, in blocks."""
    return [
        block
        for batch in range(problem.batch)
        for kv_head in range(problem.num_heads_kv)
        for block in rows_of_kv_head(problem, batch, kv_head)
    ]


def store(target: np.ndarray, values: np.ndarray, problem: AttentionProblem) -> None:
    """Round ``values`` to the dtype of ``target``, or to bfloat16 where it has the bits of these."""
    if problem.dtype == "bf16" and target.dtype == np.uint16:
        values = bfloat16_bits(values)
    target[...] = values


class _Seen(NamedTuple):
    """Whether a mask by a line hides all of a block of scores, and where it hides keys, (heads or 1, rows,
    keys); None where it hides none.
    """

    is_empty: bool
    hidden: np.ndarray | None


class _LineOfRows:
    """A mask by a line for a block of rows."""

    def __init__(self, rule: Visibility, block: QueryRows) -> None:
        self._rule, self._batch, self._rows = rule, block.batch, block.rows
        heads = block.heads
        self._heads = range(heads.start, heads.stop if rule.reads_head else heads.start + 1)
        self._spans = [rule.spans(self._batch, head, "q", [self._rows]) for head in self._heads]

    def hides(self, keys: range) -> _Seen:
        """What it hides of these keys. Only where some may be hidden and some visible is it evaluated element
        by element.
        """
        rule, batch = self._rule, self._batch
        truths = [
            rule.at(batch, head).truth(
                *(of_rows, rule.spans(batch, head, "kv", [keys])),
                rule.spans_of_scores(batch, head, [self._rows], [keys]),
            )
            for head, of_rows in zip(self._heads, self._spans, strict=True)
        ]
        if not any(bool(truth.can_be_true) for truth in truths):
            return _Seen(is_empty=True, hidden=None)
        if not any(bool(truth.can_be_false) for truth in truths):
            return _Seen(is_empty=False, hidden=None)
        heads, rows = (np.arange(x.start, x.stop) for x in (self._heads, self._rows))
        positions = np.arange(keys.start, keys.stop)
        hidden = rule.hides(batch, heads[:, None, None], rows[:, None], positions)
        return _Seen(False, np.broadcast_to(hidden, (len(self._heads), len(self._rows), len(keys))))
