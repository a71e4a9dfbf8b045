"""Which keys a block of query rows goes through on the CPU, a span at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashgen.operators import blocklists

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from flashgen.operators.attention_problem import AttentionProblem

# Of a batch entry, a kv head and a first row: the spans [first, last) of [begin, end), in order.
KeySpans = Callable[[int, int, int, int, int], Iterator[tuple[int, int]]]


def block_rows(problem: AttentionProblem, most: int) -> int:
    """The rows of a block: about ``most`` over the heads of a group, or the rows of a list of key blocks."""
    if problem.block_lists is not None:
        return problem.block_lists.rows
    return max(1, most // problem.group_size)


def key_spans(problem: AttentionProblem, arrays: Mapping[str, Any], width: int) -> KeySpans:
    """Spans of up to ``width`` keys; of a call with lists of key blocks only the keys of listed blocks.
    ``arrays`` are by name. Raises BadParam for lists that are none.
    """
    lists = problem.block_lists
    if lists is None:
        return lambda batch, kv_head, first_row, begin, end: _spans(begin, end, width)
    blocklists.check(lists, problem.seqlen_kv, arrays)
    indptr, indices = (arrays[name] for name in blocklists.NAMES)

    def listed(batch: int, kv_head: int, first_row: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        ends: np.ndarray = indptr[batch % lists.batch, kv_head % lists.heads]
        row = first_row // lists.rows
        for block in indices[ends[row] : ends[row + 1]].tolist():
            first, last = block * lists.keys, (block + 1) * lists.keys
            yield from _spans(max(begin, first), min(end, last), width)

    return listed


def _spans(begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, width):
        yield first, min(first + width, end)
