"""The table of a list of blocks that a step makes of a mask by a line, int32: where kernels find the list of
a block of queries, in which order tiles come, and which keys a query sees.

    ends          one more than there are blocks of queries: where the list of each begins, and the last ends
    by element    1: the ranges of queries say nothing, as equal elements do not follow one another
    tiles         from a multiple of 4 on, for each block of queries, the longest lists first, by classes:
                  its number, where its list begins and ends, the last entry
    ranges        for each query the first key of a range that it sees and the key after the range, for each
                  of the ranges of the line (`keyranges.row_keys`); whole pairs of queries

The size is a multiple of 4, so that kernels load four numbers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


# Tiles come by classes of how long their lists are, as parts of the longest one; in a class later rows first,
# so that tiles that run together share keys in L2.
LENGTH_CLASSES = 8


class RangesOfRows(NamedTuple):
    """The keys that rows see: ``ranges`` (rows, ranges, 2) has the first key of each and the key after it.
    With ``by_element`` they say nothing, as equal elements do not follow one another.
    """

    ranges: np.ndarray
    by_element: bool


class LineTable(NamedTuple):
    """Where the parts of a table begin: ``row_blocks`` blocks of queries, ``queries`` queries with ``ranges``
    ranges each.
    """

    row_blocks: int
    queries: int
    ranges: int

    @property
    def by_element(self) -> int:
        return self.row_blocks + 1

    @property
    def tiles(self) -> int:
        return _whole(self.row_blocks + 2)

    @property
    def first_range(self) -> int:
        return self.tiles + 4 * self.row_blocks

    @property
    def size(self) -> int:
        return _whole(self.first_range + 2 * self.ranges * self.listed_queries)

    @property
    def listed_queries(self) -> int:
        """Queries that have ranges: whole pairs. One past the last sees no key."""
        return -(-self.queries // 2) * 2

    def of_queries(self, table: np.ndarray) -> np.ndarray:
        """What a table says of queries: whether it has no ranges, or the ranges."""
        ranges = table[self.first_range : self.first_range + 2 * self.ranges * self.listed_queries]
        return table[self.by_element : self.by_element + 1] if table[self.by_element] else ranges

    def fill(
        self,
        table: np.ndarray,
        ends: np.ndarray,
        counts: Sequence[int],
        entries: np.ndarray,
        of_rows: RangesOfRows | None,
    ) -> None:
        """Write a table. ``ends`` are its ends, ``counts`` how many blocks each block of queries sees, for
        which there may be no room, and ``entries`` the entries of all lists.
        """
        by_element = of_rows is None or of_rows.by_element
        table[: self.row_blocks + 1] = ends
        table[self.by_element] = by_element
        most = max(counts, default=0)
        classes = [int(count) * LENGTH_CLASSES // (int(most) + 1) for count in counts]
        order = sorted(range(self.row_blocks), key=lambda block: (-classes[block], -block))
        for place, block in enumerate(order):
            begin, end = ends[block : block + 2]
            at = self.tiles + 4 * place
            table[at : at + 4] = block, begin, end, entries[end - 1] if end > begin else 0
        if of_rows is not None and not of_rows.by_element:
            ranges = of_rows.ranges.ravel()
            end = self.first_range + 2 * self.ranges * self.listed_queries
            table[self.first_range : end] = 0
            table[self.first_range : self.first_range + len(ranges)] = ranges


def _whole(count: int) -> int:
    return -(-count // 4) * 4
