"""Queue an append and the attention after it: neither writes to what only the other one reads."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.call.compute import MAX_PLANS
from flashgen.errors import BadTensorStrides, arg
from flashgen.operators.append import APPEND
from flashgen.operators.arguments import overlapping
from flashgen.runtime import check, hostarrays
from flashgen.runtime.plans import workspace_layout

if TYPE_CHECKING:
    from flashgen.operators.arguments import ArrayLayout
    from flashgen.runtime.plans import Plan, Ready

_ROTATED = APPEND.position("q_rotated")


def queue_both(append: Plan, first: Ready, attention: Plan, second: Ready, own: tuple[Any, ...]) -> None:
    """Queue both calls, in order. Where lengths are checked, those of both are ahead of the first. ``own``:
    what the caller gave the second one, the workspace behind the arrays.
    """
    work, given, pointers, stream, _ = first
    next_work, next_given, next_pointers, _, _ = second
    _check_apart(append, first, attention, next_pointers, own)
    if attention.problem.device is None:  # where the second call itself would look after the first
        hostarrays.check_writable(attention.problem, next_given)
    if attention.checks_elements:
        _check_elements(append, pointers, given, attention, stream)
    work(given, stream)
    next_work(next_given, stream)
    append.tell_written(given)
    attention.tell_written(next_given)


class _Memory(NamedTuple):
    """Where two calls could meet, as positions of arguments. ``behind`` are inputs of the attention alone,
    ``written`` those of its arguments that the append writes to, ``results`` what it writes itself, and
    ``ahead`` inputs of the append alone. ``spans`` and ``placed`` are those of the attention, its workspace
    at the end.
    """

    behind: tuple[int, ...]
    written: dict[int, str]
    results: tuple[int, ...]
    ahead: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    placed: tuple[ArrayLayout | None, ...]
    spans_ahead: tuple[tuple[int, int], ...]
    placed_ahead: tuple[ArrayLayout, ...]


def _check_apart(
    append: Plan, first: Ready, attention: Plan, pointers: tuple[int, ...], own: tuple[Any, ...]
) -> None:
    """That neither call writes to what only the other one reads. What a call has itself its plan has looked
    at. Raises BadTensorStrides.
    """
    memory = _memory(append, attention, first[1][_ROTATED] is not None)
    arguments, count = attention.problem.operator.arguments, len(attention.problem.operator.arguments)
    for place in memory.behind:
        for other in overlapping(place, memory.spans[:count], pointers[:count], memory.placed):
            if other in memory.written:
                raise _overlap(memory.written[other], arguments[place].name)
    for place in memory.results:
        if own[place] is not None:
            pointers_ahead = pointers[place], *(first[2][other] for other in memory.ahead)
            spans_ahead = memory.spans[place], *memory.spans_ahead
            placed_ahead = memory.placed[place], *memory.placed_ahead
            for other in overlapping(0, spans_ahead, pointers_ahead, placed_ahead):
                name = "workspace" if place == count else arguments[place].name
                raise _overlap(name, APPEND.arguments[memory.ahead[other - 1]].name)


def _overlap(written: str, read: str) -> BadTensorStrides:
    return BadTensorStrides(f"{arg(written)} overlaps {arg(read)} in memory; pass memory of its own")


@lru_cache(maxsize=MAX_PLANS)
def _memory(append: Plan, attention: Plan, rotates: bool) -> _Memory:
    """That of the calls of two plans. A rotated q of the attention is not the caller's."""
    problem, positions = attention.problem, attention.problem.operator.positions
    written = {"k": "k", "v": "v", "kv_lengths": "total_lengths"} | ({"q": "q_rotated"} if rotates else {})
    both = {"cu_seqlens_q", "cu_seqlens_new", "index", "pages"}
    behind = (positions[name] for name in attention.inputs() if name not in both | written.keys())
    ahead = [APPEND.position(name) for name in append.inputs() if name not in both]
    placed = append.problem.array_layouts()
    placed_ahead = tuple(placed[place] for place in ahead)
    size = attention.workspace_bytes
    return _Memory(
        tuple(behind),
        {positions[name]: seen for name, seen in written.items()},
        (*problem.results, *([len(positions)] if size else [])),
        tuple(ahead),
        (*problem.spans(), (0, size)),
        (*problem.array_layouts(), workspace_layout(size)),
        tuple(each.span() for each in placed_ahead),
        placed_ahead,
    )


def _check_elements(
    append: Plan, pointers: tuple[int, ...], given: tuple[Any, ...], attention: Plan, stream: int
) -> None:
    """Raise what the lengths and tables of both calls contradict."""
    from flashgen.operators.append_rows import total_lengths

    found = check.elements(append.problem, pointers, given, stream)
    if found is None:  # a captured graph, which may find others
        return
    APPEND.check_elements(append.problem, found)
    after = {name: found.get(name) for name in attention.problem.operator.elements_checked}
    after["cu_seqlens_q"] = found["cu_seqlens_new"]
    after["kv_lengths"] = total_lengths(append.problem, found)
    attention.problem.operator.check_elements(attention.problem, after)
