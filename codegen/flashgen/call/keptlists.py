"""Lists of the blocks of a mask by a line that calls share: the first call of a kind makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators import blocklists
from flashgen.operators.masklists import ARGUMENTS, MASK_LISTS, OPTIONS, lists_of_rule
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.operator import lined
from flashgen.runtime.arrays import kind_of, on_host, runs_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.operators.linetable import LineTable
    from flashgen.runtime.plans import Plan

# Kinds of calls whose lists a mask keeps at most.
_MAX_KINDS = 64


class Lists(NamedTuple):
    """Lists for blocks of ``block`` (queries, keys): ``plan`` writes them to ``outputs``. ``table`` has the
    parts of the table of each.
    """

    block: tuple[int, int]
    plan: Plan
    outputs: tuple[Any, ...]
    table: LineTable

    def entries(self, arrays: tuple[Any, ...]) -> list[np.ndarray]:
        """The lists and the ranges of queries in ``arrays``, which are like ``outputs``, on the host."""
        indptr, indices, _ = map(on_host, arrays)
        found = []
        for table in indptr.reshape(-1, indptr.shape[-1]):
            ends = table[: self.table.row_blocks + 1]
            found += [ends, indices[ends[0] : ends[-1]], self.table.of_queries(table)]
        return found


class KeptLists:
    """The lists that a mask keeps, for each kind of call and each stream, so that no stream waits for
    another.

    Lists are of the elements at the time of the call that made them. PyTorch counts writes to a tensor, so a
    write by PyTorch makes new lists. `Mask.check` compares the elements of any array.
    """

    def __init__(self) -> None:
        self._by_call: dict[Any, Lists | None] = {}
        self._by_block: dict[Any, Lists] = {}
        self._versions: tuple[int, ...] = ()

    def added(self, request: Any, make_plan: Callable[..., Plan]) -> Any:
        """The request with lists as arguments, which the first call of a kind writes. Unchanged if the call
        has to list the blocks itself: with packed sequences, on the host, in a graph that is captured, or on
        a stream that the caller passes.
        """
        rule, first = request.options[-1], request.arrays[0]
        kind = kind_of(first)
        if kind is None or request.stream is not None or rule.rule.pack is not None:
            return request
        if not runs_kernels(first, request.backend) or kind.is_capturing():
            return request  # at each replay a graph has to list the current elements
        try:
            layouts, _ = kind.read(request.arrays)
        except RuntimeError:  # an array without memory: the call raises the error, by name
            return request
        arrays = request.arrays[len(request.arrays) - len(rule.rule.arrays) :]
        versions = tuple([_version(x) for x in arrays])
        if versions != self._versions or len(self._by_call) >= _MAX_KINDS:
            self._by_call.clear()
            self._by_block.clear()
            self._versions = versions
        stream = kind.stream_of(first)
        key = request.operator.name, request.options, request.backend, request.algorithm, layouts, stream
        if key not in self._by_call:
            self._by_call[key] = self._of_new(request, arrays, stream, make_plan)
        lists = self._by_call[key]
        return request if lists is None else _with_lists(request, lists)

    def _of_new(
        self, request: Any, arrays: tuple[Any, ...], stream: int, make_plan: Callable[..., Plan]
    ) -> Lists | None:
        """Lists for the tile of the kernel that serves the request."""
        plan = make_plan(request, keeps_scalars=False)
        problem, main = plan.problem, plan.variant
        block = int(main.tile_value("block_m")), int(main.tile_value("block_n"))
        sides = problem.window_left, problem.window_right
        window = tuple([-1 if side == UNBOUNDED else side for side in sides])
        if window != (-1, -1) and problem.diagonal_offset != problem.seqlen_kv - problem.seqlen_q:
            return None  # lists of the operator are aligned with the last query
        if block[0] not in blocklists.LINE_SIDES or block[1] not in blocklists.SIDES:
            return None
        key = block, window, problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv, stream
        if key not in self._by_block:
            sizes = problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv
            lists = lists_of_rule(problem.rule, *sizes, block)
            extents = lists.sizes_of(problem.seqlen_q)
            like = request.arrays[0]
            outputs = tuple([plan.kind.empty(x.extents(extents), like, None, "int32") for x in ARGUMENTS])
            named = dict(zip(OPTIONS, (*sizes, block, window, None), strict=True))
            options = (*(named[name] for name in OPTIONS), problem.rule)
            operator = lined(MASK_LISTS, problem.rule.rule)
            listing = make_plan(request.another(operator, (*outputs, *arrays), options))
            listing(*outputs, *arrays)
            self._by_block[key] = Lists(block, listing, outputs, lists.table(problem.seqlen_q))
        return self._by_block[key]

    def are_stale(self, arrays: tuple[Any, ...]) -> bool:
        """Whether some lists differ from the lists of the current elements. Waits for the GPU."""
        for lists in self._by_block.values():
            kind = lists.plan.kind
            fresh = tuple([kind.empty(tuple(x.shape), x, None) for x in lists.outputs])
            lists.plan(*fresh, *arrays)
            pairs = zip(lists.entries(fresh), lists.entries(lists.outputs), strict=True)
            if not all(np.array_equal(*pair) for pair in pairs):
                return True
        return False


def _with_lists(request: Any, lists: Lists) -> Any:
    operator, arrays = request.operator, [*request.arrays]
    for name, x in zip(blocklists.NAMES, lists.outputs, strict=False):
        arrays[operator.position(name)] = x
    place = operator.options.index("block_size")
    request.arrays = tuple(arrays)
    request.options = *request.options[:place], lists.block, *request.options[place + 1 :]
    return request


def _version(x: Any) -> int:
    """How often PyTorch has written to an array; 0 where nothing counts it."""
    try:
        return getattr(x, "_version", 0)
    except RuntimeError:  # of a tensor made under inference_mode
        return 0
