"""Queue an append and the attention after it: neither writes to what only the other one reads."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.call.compute import MAX_PLANS
from flashgen.errors import BadTensorStrides, arg
from flashgen.operators.append import APPEND
from flashgen.operators.kvcodes import TOKEN
from flashgen.operators.overlaps import overlapping
from flashgen.runtime import check, hostarrays
from flashgen.runtime.plans import workspace_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from flashgen.operators.arguments import ArrayLayout
    from flashgen.runtime.plans import Plan, Ready

_ROTATED = APPEND.position("q_rotated")


def queue_both(
    append: Plan,
    first: Ready,
    attention: Plan,
    second: Ready,
    own: tuple[Any, ...],
    appended: tuple[Any, ...],
) -> None:
    """Queue both calls, in order. If lengths are checked, the lengths of both calls are checked first.
    ``own`` has the caller's arrays of the attention, then its workspace; ``appended`` the caller's arrays of
    the append.
    """
    work, given, pointers, stream, _ = first
    next_work, next_given, next_pointers, _, _ = second
    _check_apart(append, first, attention, next_pointers, own)
    if attention.problem.device is None:  # where the second call itself would look after the first
        hostarrays.check_writable(attention.problem, next_given)
    if attention.checks_elements:
        found = check.elements(append.problem, pointers, given, stream)
        if found is not None:  # else a captured graph, which may find others
            starts = None
            if attention.problem.has("kv_starts"):
                starts = check.elements(attention.problem, next_pointers, next_given, stream)["kv_starts"]
            _check_elements(append, found, attention, starts)
    work(given, stream)
    next_work(next_given, stream)
    append.tell_written(appended)
    attention.tell_written(own)


class _Memory(NamedTuple):
    """Where the memory of two calls could overlap, as positions of arguments.

    attention_inputs: inputs of the attention that the append does not take.
    written: arguments of the attention that the append writes to, by the name of the array.
    results: what the attention writes.
    append_inputs: inputs of the append that the attention does not take.
    spans, layouts: of the arguments of the attention, then of its workspace.
    append_spans, append_layouts: of ``append_inputs``.
    """

    attention_inputs: tuple[int, ...]
    written: dict[int, str]
    results: tuple[int, ...]
    append_inputs: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    layouts: tuple[ArrayLayout | None, ...]
    append_spans: tuple[tuple[int, int], ...]
    append_layouts: tuple[ArrayLayout, ...]


def _check_apart(
    append: Plan, first: Ready, attention: Plan, pointers: tuple[int, ...], own: tuple[Any, ...]
) -> None:
    """That neither call writes to an input of the other call alone. The plan of a call has checked the arrays
    of the call itself. Raises BadTensorStrides.
    """
    memory = _memory(append, attention, first[1][_ROTATED] is not None)
    arguments, count = attention.problem.operator.arguments, len(attention.problem.operator.arguments)
    for place in memory.attention_inputs:
        low, high = memory.spans[place]
        start, end = pointers[place] + low, pointers[place] + high
        # Most arrays are far from each other, which takes less time to see.
        if not any(
            start < pointers[x] + memory.spans[x][1] and pointers[x] + memory.spans[x][0] < end
            for x in memory.written
        ):
            continue
        for other in overlapping(place, memory.spans[:count], pointers[:count], memory.layouts):
            if other in memory.written:
                raise _overlap(memory.written[other], arguments[place].name)
    for place in memory.results:
        if own[place] is not None:
            its_pointers = pointers[place], *(first[2][other] for other in memory.append_inputs)
            its_spans = memory.spans[place], *memory.append_spans
            its_layouts = memory.layouts[place], *memory.append_layouts
            for other in overlapping(0, its_spans, its_pointers, its_layouts):
                name = "workspace" if place == count else arguments[place].name
                raise _overlap(name, APPEND.arguments[memory.append_inputs[other - 1]].name)


def _overlap(written: str, read: str) -> BadTensorStrides:
    return BadTensorStrides(f"{arg(written)} overlaps {arg(read)} in memory; pass separate memory")


@lru_cache(maxsize=MAX_PLANS)
def _memory(append: Plan, attention: Plan, rotates: bool) -> _Memory:
    """The memory of calls of two plans. A rotated q of the attention is not the caller's."""
    problem, positions = attention.problem, attention.problem.operator.positions
    written = {"k": "k", "v": "v", "kv_lengths": "total_lengths"} | ({"q": "q_rotated"} if rotates else {})
    if append.problem.kv_scales == TOKEN:
        written |= {"k_scale": "k_scale", "v_scale": "v_scale"}
    both = {"cu_seqlens_q", "cu_seqlens_new", "index", "pages", "k_scale", "v_scale"}
    attention_inputs = (positions[name] for name in attention.inputs() if name not in both | written.keys())
    append_inputs = [APPEND.position(name) for name in append.inputs() if name not in both]
    of_append = append.problem.array_layouts()
    append_layouts = tuple(of_append[place] for place in append_inputs)
    size = attention.workspace_bytes
    return _Memory(
        tuple(attention_inputs),
        {positions[name]: seen for name, seen in written.items() if name in positions},  # no v when latent
        (*problem.results, *([len(positions)] if size else [])),
        tuple(append_inputs),
        (*problem.spans(), (0, size)),
        (*problem.array_layouts(), workspace_layout(size)),
        tuple(layout.span() for layout in append_layouts),
        append_layouts,
    )


def _check_elements(
    append: Plan, found: Mapping[str, np.ndarray | None], attention: Plan, starts: np.ndarray | None
) -> None:
    """Raise what the lengths and tables of both calls contradict. ``found`` has the arrays of the append, by
    name.
    """
    from flashgen.operators.append_rows import total_lengths

    APPEND.check_elements(append.problem, found)
    after = {name: found.get(name) for name in attention.problem.operator.elements_checked}
    after["cu_seqlens_q"] = found["cu_seqlens_new"]
    after["kv_starts"] = starts
    after["kv_lengths"] = total_lengths(append.problem, found)
    attention.problem.operator.check_elements(attention.problem, after)
