"""Lists of the key blocks that each block of query rows attends to: what a call says of them, and their part
of its contract.

Rows and keys are cut into blocks of ``rows`` queries and ``keys`` keys. Block r of the queries attends to the
key blocks ``indices[indptr[r]:indptr[r + 1]]``, in ascending order, each once. All batch entries and kv heads
share these lists, or each has its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer, arg
from flashgen.operators.arguments import INT32, Argument, check_strides, shown
from flashgen.operators.linetable import LineTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from flashgen.operators.arguments import ArrayView

# The sizes that a side of a block may have.
SIDES = (64, 128)
# And of a block of queries in lists of a mask by a line, which are for the tile of a kernel.
LINE_SIDES = (*SIDES, 192)
# Kernels count the visits of all entries, up to eight each, in 32 bits.
MAX_ENTRIES = 1 << 27
_INDPTR_SHAPE = "block_indptr_batch block_indptr_num_heads block_indptr_size"
ARGUMENTS = (
    Argument("block_indptr", "input", _INDPTR_SHAPE, optional=True, **INT32),
    Argument("block_indices", "input", "block_entries", optional=True, **INT32),
)
NAMES = tuple(argument.name for argument in ARGUMENTS)


class BlockLists(NamedTuple):
    """``rows`` and ``keys`` of a block; for how many batch entries and kv heads (of a mask by a line: query
    heads) there are lists, 1 if all share them; and how many entries ``indices`` has room for. Lists of a
    mask by a line have a `LineTable` each, with ``ranges`` ranges of each query; None for other lists.
    """

    rows: int
    keys: int
    batch: int
    heads: int
    entries: int
    ranges: int | None = None

    def __str__(self) -> str:
        return f"blocks of {self.rows} queries and {self.keys} keys"

    def sizes_of(self, seqlen_q: int) -> dict[str, int]:
        """The sizes of the symbols in the shapes of both arrays."""
        return {
            "block_indptr_batch": self.batch,
            "block_indptr_num_heads": self.heads,
            "block_indptr_ends": self.row_blocks(seqlen_q) + 1,
            "block_indptr_size": self._size(seqlen_q),
            "block_entries": self.entries,
        }

    def _size(self, seqlen_q: int) -> int:
        """Elements that ``indptr`` has for each list."""
        return self.row_blocks(seqlen_q) + 1 if self.ranges is None else self.table(seqlen_q).size

    def table(self, seqlen_q: int) -> LineTable:
        """The table of a list of a mask by a line."""
        assert self.ranges is not None
        return LineTable(self.row_blocks(seqlen_q), seqlen_q, self.ranges)

    def row_blocks(self, seqlen_q: int) -> int:
        """Blocks of queries, of which the last may be ragged."""
        return -(-seqlen_q // self.rows)

    def strides(self, seqlen_q: int) -> dict[str, int]:
        """The strides of a contiguous ``indptr``, 0 where batch entries or heads share lists."""
        size = self._size(seqlen_q)
        return {
            "block_indptr_batch_stride": self.heads * size if self.batch > 1 else 0,
            "block_indptr_head_stride": size if self.heads > 1 else 0,
        }

    def key_blocks(self, seqlen_kv: int) -> int:
        """Blocks of keys, of which the last may be ragged."""
        return -(-seqlen_kv // self.keys)

    def values(self, seqlen_kv: int) -> dict[str, int]:
        """The numbers that parameters of kernels name."""
        return {
            "block_rows": self.rows,
            "block_rows_log2": self.rows.bit_length() - 1,
            "block_keys_log2": self.keys.bit_length() - 1,
            "num_listed_keys": max(1, self.key_blocks(seqlen_kv)),
        }


def block_size_of(block: Any, row_sides: tuple[int, ...] = SIDES) -> tuple[int, int]:
    """(rows, keys) of a block, of which rows is one of ``row_sides``. Raises BadParam."""
    try:
        rows, keys = block
    except (TypeError, ValueError):
        rows, keys = None, None
    if not all(type(x) is int and x in sides for x, sides in ((rows, row_sides), (keys, SIDES))):
        raise BadParam(
            f"{arg('block_size')} is {shown(block)}; expected (rows, keys), each of them 64 or 128: lists of "
            "other blocks can be written as lists of these"
        )
    return rows, keys


def read(
    views: Mapping[str, ArrayView],
    block_size: tuple[int, int] | None,
    mask_type: int | str | None,
    sizes: Mapping[str, int],
    heads: int,
    ranges: int | None = None,
) -> BlockLists | None:
    """The lists of a call, None if it has none. ``views`` has the arrays of NAMES that the call has. Each of
    ``heads`` heads may have lists: kv heads, and with a mask by a line query heads. ``ranges`` is as in
    `BlockLists`.

    Raises BadParam, NullPointer, BadTensorDtype, BadTensorShape or BadTensorStrides.
    """
    if block_size is None and not views:
        return None
    for name in NAMES:
        if name not in views:
            raise NullPointer(f"{arg(name)} is None; expected an int32 array")
    if mask_type in (0, 1, "none", "dense"):
        raise BadParam(
            f"{arg('mask_type')} is {shown(mask_type)}, but {arg('mask')} is a BlockMask; leave "
            f"{arg('mask_type')} out, or pass a causal one"
        )
    rows, keys = block_size_of(block_size, SIDES if ranges is None else LINE_SIDES)
    indptr, indices = (views[name] for name in NAMES)
    for argument in ARGUMENTS:
        if views[argument.name].dtype != "int32":
            raise BadTensorDtype(
                f"{arg(argument.name)} has dtype {views[argument.name].dtype}; expected int32"
            )
    batch = sizes["batch"]
    shape = tuple(indptr.shape)
    lists = BlockLists(rows, keys, *(*shape, 1, 1)[:2], indices.shape[0] if indices.shape else 0, ranges)
    size = lists.sizes_of(sizes["seqlen_q"])["block_indptr_size"]
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != size:
        raise BadTensorShape(
            f"{arg('block_indptr')} has shape {shape}; expected (1 or {batch}, 1 or {heads}, {size}): batch "
            f"entries, kv heads, and one end more than there are blocks of {rows} queries"
        )
    if len(indices.shape) != 1:
        raise BadTensorShape(
            f"{arg('block_indices')} has shape {tuple(indices.shape)}; expected one dimension, for the "
            "entries of all lists"
        )
    if indices.shape[0] > MAX_ENTRIES:
        raise BadTensorShape(
            f"{arg('block_indices')} has {indices.shape[0]} elements; kernels count at most {MAX_ENTRIES}"
        )
    for argument in ARGUMENTS:
        check_strides(argument, views[argument.name], 4)
    return lists


def check(lists: BlockLists, seqlen_kv: int, arrays: Mapping[str, np.ndarray | None]) -> None:
    """Raise BadParam for elements that are no lists; ``arrays`` has both arrays by name, in host memory."""
    import numpy as np

    indptr, indices = (arrays[name] for name in NAMES)
    assert indptr is not None
    assert indices is not None
    blocks = lists.key_blocks(seqlen_kv)
    wrong = np.argwhere((indptr < 0) | (indptr > lists.entries))
    if len(wrong):
        place = tuple(map(int, wrong[0]))
        raise BadParam(
            f"{arg('block_indptr')}{list(place)} is {indptr[place]}; expected 0 to {lists.entries}, the "
            f"length of {arg('block_indices')}"
        )
    falling = np.argwhere(np.diff(indptr, axis=-1) < 0)
    if len(falling):
        batch, head, row = map(int, falling[0])
        raise BadParam(
            f"{arg('block_indptr')}[{batch}, {head}] falls from {indptr[batch, head, row]} to "
            f"{indptr[batch, head, row + 1]} after block {row} of the queries; it must not decrease"
        )
    for batch, head in np.ndindex(*indptr.shape[:2]):
        ends = indptr[batch, head]
        some = indices[ends[0] : ends[-1]]
        outside = np.flatnonzero((some < 0) | (some >= blocks))
        if len(outside):
            place = int(ends[0] + outside[0])
            raise BadParam(
                f"{arg('block_indices')}[{place}] is {indices[place]}; expected a block of keys, 0 to "
                f"{blocks - 1}"
            )
        begins = np.zeros(len(some) + 1, bool)
        begins[ends[:-1] - ends[0]] = True
        unsorted = np.flatnonzero((np.diff(some) <= 0) & ~begins[1 : max(1, len(some))])
        if len(unsorted):
            place = int(ends[0] + unsorted[0])
            raise BadParam(
                f"{arg('block_indices')}[{place}] is {indices[place]} and the next entry of its list is "
                f"{indices[place + 1]}; a list is in ascending order and has a block once"
            )


def hidden_blocks(lists: BlockLists, seqlen_kv: int, arrays: Mapping[str, Any]) -> np.ndarray:
    """Which blocks of keys are not listed: bool, (batch or 1, kv heads or 1, blocks of queries, blocks of
    keys).
    """
    import numpy as np

    indptr, indices = (np.asarray(arrays[name]) for name in NAMES)
    hidden = np.ones((*indptr.shape[:2], indptr.shape[2] - 1, lists.key_blocks(seqlen_kv)), bool)
    for batch, head, row in np.ndindex(*hidden.shape[:3]):
        begin, end = indptr[batch, head, row : row + 2]
        hidden[batch, head, row, indices[begin:end]] = False
    return hidden


def hidden_by_lists(problem: Any, arrays: Mapping[str, Any]) -> np.ndarray:
    """The lists of a call as a dense mask, bool: true where a key is hidden. Of the shape (batch or 1, query
    heads or 1, seqlen_q, seqlen_kv), so for short sequences.
    """
    lists = problem.block_lists
    hidden = hidden_blocks(lists, problem.seqlen_kv, arrays)
    if hidden.shape[1] > 1:
        hidden = hidden.repeat(problem.group_size, 1)
    rows = hidden.repeat(lists.rows, 2)[:, :, : problem.seqlen_q]
    return rows.repeat(lists.keys, 3)[..., : problem.seqlen_kv]
