"""The operator ``mask_lists``: the visible blocks of a mask by a line, as lists of key blocks for each block
of queries.

Block r of the queries has the entries ``line_indices[line_indptr[r]:line_indptr[r + 1]]``, in ascending
order: n for key block n where all pairs of query and key are visible, ~n where the line decides. `linetable`
has what else is in ``line_indptr``. Blocks have the verdicts of `maskblocks.blocks_of`, joined with a range
of keys. Batch entries and query heads that the line does not tell apart share lists. Each list has room for
equally many entries; ``line_totals`` says how many it needs, which may be more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, BadTensorShape, arg
from flashgen.operators import blocklists, contract
from flashgen.operators.arguments import WHOLE_INT32, Argument, check_devices, shown, strides_of
from flashgen.operators.keyranges import num_ranges
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value, lined
from flashgen.operators.rules import NOT_PACKED, PREFIX, RuleOfCall, loads_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.blocklists import BlockLists
    from flashgen.operators.rules import Rule

_LISTS = "block_indptr_batch block_indptr_num_heads"
ARGUMENTS = (
    Argument("line_indptr", "output", f"{_LISTS} block_indptr_size", **WHOLE_INT32),
    Argument("line_indices", "output", "block_entries", **WHOLE_INT32),
    Argument("line_totals", "output", _LISTS, **WHOLE_INT32),
)
OPTIONS = ("batch", "num_heads", "seqlen_q", "seqlen_kv", "block", "window", "entries")

GRID_DIMENSIONS = ("list_rows", "bounded_columns", "packed_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskListsProblem(Problem):
    """The sizes of a call of attention, its line, and the band that is joined to the line. ``block_lists``
    has the size of blocks, and for how many batch entries and query heads there are lists.
    """

    batch: int
    num_heads_q: int
    seqlen_q: int
    seqlen_kv: int
    diagonal_offset: int
    window_left: int
    window_right: int
    rule: RuleOfCall
    rule_sizes: tuple[tuple[str, int], ...]
    block_lists: BlockLists

    @property
    def operator(self) -> Operator:
        return lined(MASK_LISTS, self.rule.rule)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in ("batch", "num_heads_q", "seqlen_q", "seqlen_kv")}
        return sizes | dict(self.rule_sizes) | self.block_lists.sizes_of(self.seqlen_q)

    @property
    def empty(self) -> bool:
        return self.batch * self.seqlen_q == 0

    def description(self) -> str:
        return f"{self.block_lists}, mask {self.rule.rule.title}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        return extents_of_lists(self.rule.rule, self.block_lists, self.seqlen_q, self.seqlen_kv)

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return {
            "diagonal_offset": self.diagonal_offset,
            "window_left": self.window_left,
            "window_right": self.window_right,
            **{PREFIX + name: number for name, number in self.rule.by_name().items()},
            **self.block_lists.values(self.seqlen_kv),
        }


def extents_of_lists(rule: Rule, lists: BlockLists, seqlen_q: int, seqlen_kv: int) -> dict[str, int]:
    """What the grids of the steps that make lists cover: ``list_rows`` are the blocks of queries of all
    lists, ``bounded_columns`` the blocks of keys, once for each array of which they have bounds, and then the
    blocks of scores.
    ``packed_rows`` are the queries of packed sequences: a warp finds the sequences of 32, after the columns.
    """
    count, row_blocks = lists.batch * lists.heads, -(-seqlen_q // lists.rows)
    spans_of_column = key_spans(rule) + row_blocks * block_spans(rule)
    rows = 0 if rule.pack is None else seqlen_q
    return {
        "list_rows": count * row_blocks,
        "bounded_columns": count * lists.key_blocks(seqlen_kv) * spans_of_column + -(-rows // 32),
        "packed_rows": rows,
    }


@lru_cache(maxsize=256)
def key_spans(rule: Rule) -> int:
    """How many arrays, or elements of them, a line reads by the positions of keys."""
    return len(loads_by(rule, "kv"))


@lru_cache(maxsize=256)
def block_spans(rule: Rule) -> int:
    """How many it reads by both positions."""
    return len(loads_by(rule, "block"))


def normalise(
    line_indptr: ArrayView | None = None,
    line_indices: ArrayView | None = None,
    line_totals: ArrayView | None = None,
    *,
    rule: RuleOfCall,
    rule_arrays: Sequence[ArrayView | None],
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    block: tuple[int, int],
    window: tuple[int, int] = (-1, -1),
    entries: int | None = None,
) -> MaskListsProblem:
    """The Problem of a call, or the error of the contract that it breaks. ``window`` is a range of keys
    around the diagonal, aligned bottom-right, -1 for no bound; ``entries`` the room of each list, by default
    for all blocks.

    Raises BadParam, BadTensorShape, BadTensorDtype, BadTensorStrides, NullPointer or DeviceTypeNotSupported.
    """
    lists = lists_of_rule(rule, batch, num_heads, seqlen_q, seqlen_kv, block, entries)
    sizes = {"batch": batch, "num_heads_q": num_heads, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
    tables = contract.rule_views(rule, rule_arrays)
    outputs = dict(zip((a.name for a in ARGUMENTS), (line_indptr, line_indices, line_totals), strict=True))
    present = tables | {name: view for name, view in outputs.items() if view is not None}
    if present:
        check_devices(present)
    rule_sizes = contract.check_rule_arrays(rule, tables, sizes, NOT_PACKED)
    symbols = sizes | dict(rule_sizes) | lists.sizes_of(seqlen_q)
    left, right = (UNBOUNDED if side < 0 else min(side, UNBOUNDED) for side in window)
    operator = lined(MASK_LISTS, rule.rule)
    return MaskListsProblem(
        **sizes,
        diagonal_offset=seqlen_kv - seqlen_q,
        window_left=left,
        window_right=right,
        rule=rule,
        rule_sizes=rule_sizes,
        block_lists=lists,
        dtype="int32",
        strides=strides_of(operator.arguments, present, symbols, "int32"),
        device=next((view.device for view in present.values()), None),
    )


def lists_of_rule(
    rule: RuleOfCall,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    block: tuple[int, int],
    entries: int | None = None,
) -> BlockLists:
    """The lists of a mask by a line: one for each batch entry and query head that the line tells apart, with
    room for ``entries`` each, by default for all blocks. Raises BadParam and BadTensorShape.
    """
    rows, keys = blocklists.block_size_of(block, blocklists.LINE_SIDES)
    return lists_of_tile(rule, batch, num_heads, seqlen_q, seqlen_kv, rows, keys, entries)


def lists_of_tile(
    rule: RuleOfCall,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    rows: int,
    keys: int,
    entries: int | None = None,
) -> BlockLists:
    """As `lists_of_rule`, for blocks of any size."""
    reads = rule.rule.tree.reads()
    batch, heads = batch if "b" in reads else 1, num_heads if "h" in reads else 1
    if entries is None:
        entries = -(-seqlen_q // rows) * -(-seqlen_kv // keys)
    elif entries < 0:
        raise BadParam(f"{arg('entries')} is {shown(entries)}; expected an integer, 0 or more")
    if entries * batch * heads > blocklists.MAX_ENTRIES:
        raise BadTensorShape(
            f"the mask {rule.rule.title} has {batch * heads} lists of {entries} blocks of {rows} queries "
            f"and {keys} keys; kernels count at most {blocklists.MAX_ENTRIES} in all: make several calls of "
            "fewer sequences or rows"
        )
    return blocklists.BlockLists(rows, keys, batch, heads, entries * batch * heads, num_ranges(rule.rule))


def _contract(
    operator: Operator, views: Sequence[ArrayView | None], options: Sequence[Any], scalars: Sequence[Any]
) -> Problem:
    named = dict(zip(operator.options, options, strict=True))
    return normalise(*views[: len(ARGUMENTS)], rule_arrays=views[len(ARGUMENTS) :], **named)


MASK_LISTS = Operator(
    name="mask_lists",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=(),
    axes={
        "dtype": Axis.equal(lambda problem: problem.dtype, ("int32",)),
        "mask_type": Axis(lambda problem, value: True, ("blocks",), default="blocks"),
    },
    grid_dimensions=GRID_DIMENSIONS,
    contract=_contract,
)
