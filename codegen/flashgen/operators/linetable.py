"""The table of a list of blocks that a step makes of a mask by a line, int32: where kernels find the list of
a block of queries, in which order tiles come, and which keys a query sees.

    ends          one more than there are blocks of queries: where the list of each begins, and the last ends
    taken         0: how many tiles thread blocks have taken while attention runs, in the first table
    tiles         from a multiple of 4 on, for each block of queries, the longest lists first, by classes:
                  its number, the last entry that it visits, and for each GROUP_ROWS of its rows, at most
                  GROUPS times, where the entries that they see begin and end
    ranges        for each query the first key of a range that it sees and the key after the range, for each
                  of the ranges of the line (`keyranges.row_keys`); whole steps of backward kernels. The first
                  range begins with BY_ELEMENT if ranges say nothing, as equal elements are apart

The size is a multiple of 4, so that kernels load four numbers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


# Tiles come by classes of how long their lists are, as parts of the longest one; in a class later rows first,
# so that tiles that run together share keys in L2.
LENGTH_CLASSES = 4
# A consumer warpgroup of Hopper has this many rows of a tile, and skips entries of which they see nothing.
GROUP_ROWS, GROUPS = 64, 3
_TILE = 2 + 2 * GROUPS
BY_ELEMENT = -(1 << 31)
_STEP = 128  # queries of the longest step


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
    def taken(self) -> int:
        return self.row_blocks + 1

    @property
    def tiles(self) -> int:
        return _whole(self.taken + 1)

    @property
    def first_range(self) -> int:
        return self.tiles + _TILE * self.row_blocks

    @property
    def size(self) -> int:
        return _whole(self.first_range + 2 * self.ranges * self.listed_queries)

    @property
    def listed_queries(self) -> int:
        """Queries that have ranges: whole steps. One past the last sees no key."""
        return -(-self.queries // _STEP) * _STEP

    def of_queries(self, table: np.ndarray) -> np.ndarray:
        """The ranges of queries."""
        shape = self.listed_queries, self.ranges, 2
        return table[self.first_range :][: 2 * self.ranges * self.listed_queries].reshape(shape)

    def fill(
        self,
        table: np.ndarray,
        ends: np.ndarray,
        counts: Sequence[int],
        entries: np.ndarray,
        of_rows: RangesOfRows | None,
        seen: Sequence[np.ndarray],
    ) -> None:
        """Write a table. ``ends`` are its ends, ``counts`` how many blocks each block of queries sees, for
        which there may be no room, and ``entries`` the entries of all lists. ``seen`` has for each block of
        queries which of its entries some of its GROUPS groups of rows see: bool (GROUPS, entries).
        """
        import numpy as np  # other calls need no arrays of it

        table[: self.row_blocks + 1] = ends
        table[self.taken] = 0
        most = max(counts, default=0)
        classes = [int(count) * LENGTH_CLASSES // (int(most) + 1) for count in counts]
        order = sorted(range(self.row_blocks), key=lambda block: (-classes[block], -block))
        for place, block in enumerate(order):
            begin, end = ends[block : block + 2]
            places = [begin + np.flatnonzero(of_group[: end - begin]) for of_group in seen[block]]
            visited = np.concatenate(places)
            first, last = (visited.min(), visited.max()) if len(visited) else (begin, begin)
            at = self.tiles + _TILE * place
            table[at : at + 2] = block, entries[last] if len(visited) else 0
            for group, of_group in enumerate(places):
                sides = (of_group[0], of_group[-1] + 1) if len(of_group) else (first, first)
                table[at + 2 + 2 * group : at + 4 + 2 * group] = sides
        if of_rows is not None:
            of_queries = self.of_queries(table)
            of_queries[:] = 0
            if of_rows.by_element:
                of_queries[:, 0, 0] = BY_ELEMENT
            else:
                of_queries[: self.queries] = of_rows.ranges


def _whole(count: int) -> int:
    return -(-count // 4) * 4
