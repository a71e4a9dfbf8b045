"""Which blocks of scores a mask by a line leaves empty, and which it shows whole: lists of runs of blocks.

Memory is proportional to the runs. Blocks are classified a few rows at a time, by `visibility`, never score
by score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.operators.formula import Node
from flashgen.operators.intervals import Interval
from flashgen.operators.linetable import GROUP_ROWS, GROUPS
from flashgen.operators.rules import ENDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.operators.visibility import Visibility

EMPTY, PARTIAL, FULL = 0, 1, 2
# Verdicts at once.
_VERDICTS = 1 << 20


class Run(NamedTuple):
    """Blocks of keys [begin, end) of one row of blocks, all partial or all full."""

    begin: int
    end: int
    is_full: bool


class Counts(NamedTuple):
    """How many blocks there are of each kind, and how many runs."""

    empty: int
    partial: int
    full: int
    runs: int


class Blocks(NamedTuple):
    """The visible blocks of a mask. A block is full if its valid pairs of query and key are all visible:
    rows past the last query and keys past the last key do not count.

    Blocks are ``rows`` queries by ``keys`` keys. The lists of a batch entry ``b``, a query head ``h`` and a
    row of blocks ``i`` are the runs ``starts[b, h, i]`` to ``starts[b, h, i + 1] - 1``: ``runs`` has
    (first block, one past the last) and ``is_full`` whether they are full. Dimensions of ``starts`` for b and
    h are 1 where the mask is the same for all.
    """

    rows: int
    keys: int
    seqlen_q: int
    seqlen_kv: int
    starts: np.ndarray
    runs: np.ndarray
    is_full: np.ndarray

    @property
    def num_row_blocks(self) -> int:
        return -(-self.seqlen_q // self.rows)

    @property
    def num_key_blocks(self) -> int:
        return -(-self.seqlen_kv // self.keys)

    def of_row(self, i: int, b: int = 0, h: int = 0) -> list[Run]:
        """The runs of a row of blocks."""
        begin, end = self._places(i, b, h)
        return [
            Run(int(first), int(last), bool(is_full))
            for (first, last), is_full in zip(self.runs[begin:end], self.is_full[begin:end], strict=True)
        ]

    def verdicts(self, b: int = 0, h: int = 0) -> np.ndarray:
        """EMPTY, PARTIAL or FULL of each block, uint8 (row blocks, key blocks)."""
        verdicts = np.zeros((self.num_row_blocks, self.num_key_blocks), np.uint8)
        for i in range(self.num_row_blocks):
            for run in self.of_row(i, b, h):
                verdicts[i, run.begin : run.end] = FULL if run.is_full else PARTIAL
        return verdicts

    @property
    def counts(self) -> Counts:
        """Over all batch entries and heads of the lists."""
        lengths = self.runs[:, 1] - self.runs[:, 0]
        full, partial = int(lengths[self.is_full].sum()), int(lengths[~self.is_full].sum())
        lists = self.starts.shape[0] * self.starts.shape[1]
        total = lists * self.num_row_blocks * self.num_key_blocks
        return Counts(total - full - partial, partial, full, len(self.runs))

    def __str__(self) -> str:
        empty, partial, full, runs = self.counts
        lists = self.starts.shape[0] * self.starts.shape[1]
        of_lists = "" if lists == 1 else f", {lists} lists"
        return (
            f"{empty + partial + full:,} blocks of {self.rows} x {self.keys}{of_lists}: {empty:,} empty, "
            f"{partial:,} partial, {full:,} full; {runs:,} runs"
        )

    def _places(self, i: int, b: int, h: int) -> tuple[int, int]:
        at = min(b, self.starts.shape[0] - 1), min(h, self.starts.shape[1] - 1)
        return int(self.starts[at][i]), int(self.starts[at][i + 1])


def blocks_of(
    visibility: Visibility, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, rows: int, keys: int
) -> Blocks:
    """The visible blocks of a mask with these sizes."""
    batch, heads = (batch if visibility.reads_batch else 1), (heads if visibility.reads_head else 1)
    row_blocks, key_blocks = _ranges(seqlen_q, rows), _ranges(seqlen_kv, keys)
    starts = np.zeros((batch, heads, len(row_blocks) + 1), np.int64)
    runs: list[np.ndarray] = []
    is_full: list[np.ndarray] = []
    total = 0
    for b in range(batch):
        for h in range(heads):
            starts[b, h, 0] = total
            rows_of_blocks = _verdicts(visibility, b, h, row_blocks, key_blocks) if key_blocks else ()
            for i, verdicts in enumerate(rows_of_blocks):
                begins = np.flatnonzero(np.diff(verdicts, prepend=-1))
                ends = np.append(begins[1:], len(verdicts))
                listed = verdicts[begins] != EMPTY
                runs.append(np.stack((begins, ends), 1)[listed])
                is_full.append(verdicts[begins][listed] == FULL)
                total += int(listed.sum())
                starts[b, h, i + 1] = total
            if not key_blocks:
                starts[b, h] = total
    return Blocks(
        rows,
        keys,
        seqlen_q,
        seqlen_kv,
        starts,
        np.concatenate([np.zeros((0, 2), np.int32), *runs]).astype(np.int32),
        np.concatenate([np.zeros(0, bool), *is_full]),
    )


def seen_by_groups(visibility: Visibility, blocks: Blocks, b: int, h: int) -> Iterator[np.ndarray]:
    """For each row of blocks which blocks of keys the groups of its rows may see (`linetable`): bool (groups,
    key blocks). Of a line that reads an element by query and key, all groups have the verdict of the block.
    """
    from flashgen.operators.rules import loads_by

    key_blocks = _ranges(blocks.seqlen_kv, blocks.keys)
    of_blocks = blocks.verdicts(b, h) != EMPTY
    is_whole = bool(loads_by(visibility.rule, "block"))
    for row_block, of_block in zip(_ranges(blocks.seqlen_q, blocks.rows), of_blocks, strict=True):
        seen = np.zeros((GROUPS, len(key_blocks)), bool)
        starts = range(row_block.start, row_block.stop, GROUP_ROWS)[:GROUPS]
        groups = [range(start, min(start + GROUP_ROWS, row_block.stop)) for start in starts]
        if is_whole:
            seen[: len(groups)] = of_block
        elif key_blocks:
            of_groups = list(_verdicts(visibility, b, h, groups, key_blocks))
            seen[: len(groups)] = (np.array(of_groups) != EMPTY) & of_block
        yield seen


def _verdicts(
    visibility: Visibility, b: int, h: int, row_blocks: list[range], key_blocks: list[range]
) -> Iterator[np.ndarray]:
    """The verdicts of each row of blocks."""
    if visibility.rule.pack is not None:
        yield from _verdicts_in_pack(visibility, h, row_blocks, key_blocks)
        return
    of_head, of_keys = visibility.at(b, h), visibility.spans(b, h, "kv", key_blocks)
    at_once = max(1, _VERDICTS // len(key_blocks))
    for first in range(0, len(row_blocks), at_once):
        some = row_blocks[first : first + at_once]
        of_scores = visibility.spans_of_scores(b, h, some, key_blocks)
        truth = of_head.truth(visibility.spans(b, h, "q", some), of_keys, of_scores)
        verdicts = np.where(truth.can_be_true, np.where(truth.can_be_false, PARTIAL, FULL), EMPTY)
        yield from np.broadcast_to(verdicts, (len(some), len(key_blocks))).astype(np.int8)


def _verdicts_in_pack(
    visibility: Visibility, h: int, row_blocks: list[range], key_blocks: list[range]
) -> Iterator[np.ndarray]:
    """The same of packed sequences. A block has the verdict of the first sequence with queries and keys in it
    that may see any; it is full only within one sequence.
    """
    q, kv = (Node("name", (), name, "int") for name in ("q", "kv"))
    q_ends, kv_ends = (visibility.arrays[name] for name in ENDS)
    first_key, end_key = (np.array([getattr(x, side) for x in key_blocks]) for side in ("start", "stop"))
    of_keys = visibility.elements_in_pack("kv", key_blocks)
    for rows in row_blocks:
        of_rows = visibility.elements_in_pack("q", [rows])
        verdicts = np.zeros(len(key_blocks), np.int8)
        for sequence in range(len(q_ends) - 1):
            first_row, end_row = max(rows.start, q_ends[sequence]), min(rows.stop, q_ends[sequence + 1])
            begin, end = np.maximum(first_key, kv_ends[sequence]), np.minimum(end_key, kv_ends[sequence + 1])
            if first_row >= end_row:
                continue
            # The last query is at the last key.
            shift = kv_ends[sequence + 1] - kv_ends[sequence] - q_ends[sequence + 1]
            truth = visibility.at(sequence, h).truth(
                {**of_rows, q: Interval(first_row + shift, end_row - 1 + shift)},
                {**of_keys, kv: Interval(begin - kv_ends[sequence], end - 1 - kv_ends[sequence])},
            )
            cut = (begin > first_key) | (end < end_key) | (end_row - first_row < len(rows))
            verdict = np.where(truth.can_be_true, np.where(truth.can_be_false | cut, PARTIAL, FULL), EMPTY)
            verdicts = np.where((verdicts == EMPTY) & (begin < end), verdict, verdicts)
        yield verdicts.astype(np.int8)


def _ranges(length: int, size: int) -> list[range]:
    return [range(begin, min(begin + size, length)) for begin in range(0, length, size)]
