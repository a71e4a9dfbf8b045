"""Which keys a block of query rows goes through on the CPU, a span at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashgen.operators import blocklists

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from flashgen.operators.attention_problem import AttentionProblem

BLOCK_ROWS = 512
BLOCK_KEYS = 256

# Of a batch entry, a kv head and a first row: the spans [first, last) of [begin, end), in order.
KeySpans = Callable[[int, int, int, int, int], Iterator[tuple[int, int]]]


def block_rows(problem: AttentionProblem) -> int:
    """The rows of a block: as many as lists of key blocks have, else about `BLOCK_ROWS` over all heads."""
    if problem.block_lists is not None:
        return problem.block_lists.rows
    return max(1, BLOCK_ROWS // problem.group_size)


def key_spans(problem: AttentionProblem, arrays: Mapping[str, Any]) -> KeySpans:
    """Spans of up to `BLOCK_KEYS` keys; of a call with lists of key blocks only the keys of listed blocks.
    ``arrays`` are by name. Raises BadParam for lists that are none.
    """
    lists = problem.block_lists
    if lists is None:
        return lambda batch, kv_head, first_row, begin, end: _spans(begin, end)
    blocklists.check(lists, problem.seqlen_kv, arrays)
    indptr, indices = (arrays[name] for name in blocklists.NAMES)

    def listed(batch: int, kv_head: int, first_row: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        ends: np.ndarray = indptr[batch % lists.batch, kv_head % lists.heads]
        row = first_row // lists.rows
        for block in indices[ends[row] : ends[row + 1]].tolist():
            first, last = block * lists.keys, (block + 1) * lists.keys
            yield from _spans(max(begin, first), min(end, last))

    return listed


def _spans(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, BLOCK_KEYS):
        yield first, min(first + BLOCK_KEYS, end)
