"""Which keys a query sees: a band around a diagonal, a dense mask, or both.

Rows and keys are integers, or integer arrays of any library, so that NumPy, CuPy and PyTorch share one text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

# The sum of a position, also one in the last tile's unused rows, and a window stays below 2**31.
UNBOUNDED = 1 << 30


class Masked(Protocol):
    """A problem with a band; see `AttentionProblem`."""

    seqlen_q: int
    seqlen_kv: int
    diagonal_offset: int
    window_left: int
    window_right: int


class Band(NamedTuple):
    """Row i sees key j iff ``p - left <= j <= p + right``, where ``p = i + diagonal_offset``. A side that is
    ``UNBOUNDED`` hides nothing.
    """

    diagonal_offset: int = 0
    left: int = UNBOUNDED
    right: int = UNBOUNDED

    @classmethod
    def of(cls, problem: Masked) -> Band:
        """The band of a problem; a dense mask may hide more."""
        return cls(problem.diagonal_offset, problem.window_left, problem.window_right)

    @property
    def bounded(self) -> bool:
        """Whether a side hides keys."""
        return min(self.left, self.right) < UNBOUNDED

    def keys_of_some(self, first_row: int, end_row: int, seqlen_kv: int) -> tuple[int, int]:
        """The keys [begin, end) that at least one row of [first_row, end_row) sees; begin = end if none."""
        begin, end = self._limits(first_row, end_row - 1, seqlen_kv)
        return begin, max(begin, end)

    def keys_of_every(self, first_row: int, end_row: int, seqlen_kv: int) -> tuple[int, int]:
        """The keys [begin, end) that all rows of [first_row, end_row) see; begin = end if none."""
        begin, end = self._limits(end_row - 1, first_row, seqlen_kv)
        return begin, max(begin, end)

    def hides(self, rows: Any, keys: Any) -> Any:
        """True where a row does not see a key, element by element; None where no side is bounded."""
        position = rows + self.diagonal_offset
        early = keys < position - self.left if self.left < UNBOUNDED else None
        late = keys > position + self.right if self.right < UNBOUNDED else None
        return _either(early, late)

    def _limits(self, row_of_begin: int, row_of_end: int, seqlen_kv: int) -> tuple[int, int]:
        begin, end = 0, seqlen_kv
        if self.left < UNBOUNDED:
            begin = min(seqlen_kv, max(0, row_of_begin + self.diagonal_offset - self.left))
        if self.right < UNBOUNDED:
            end = min(seqlen_kv, row_of_end + self.diagonal_offset + self.right + 1)
        return begin, end


def hidden_keys(band: Band, dense: Any, rows: Any, keys: Any, by_line: Any = None) -> Any:
    """True where a row does not see a key: the band hides it, ``dense`` is nonzero, or ``by_line``, where a
    mask by a line hides keys, is true. None if all are seen.

    ``rows`` and ``keys`` are positions, of shapes (rows, 1) and (keys,); ``dense`` and ``by_line`` are None,
    or the mask at these positions, (..., rows, keys). The result broadcasts to that shape.
    """
    return _either(_either(band.hides(rows, keys), None if dense is None else dense != 0), by_line)


def visible_keys(problem: Masked, mask: np.ndarray | None = None) -> np.ndarray:
    """Which keys each query sees, bool, broadcastable to (batch, num_heads_q, seqlen_q, seqlen_kv).

    ``mask`` is the dense one in host memory, of a shape that the contract takes.
    """
    import numpy as np

    rows, keys = np.arange(problem.seqlen_q)[:, None], np.arange(problem.seqlen_kv)
    hidden = hidden_keys(Band.of(problem), mask, rows, keys)
    return np.ones((problem.seqlen_q, problem.seqlen_kv), bool) if hidden is None else ~hidden


def _either(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first | second
