"""Whether arrays of a call share memory: the checks of outputs and inputs that overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.errors import (
    BadTensorStrides,
    NullPointer,
    arg,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashgen.operators.arguments import Argument, ArrayLayout


def check_memory(
    arguments: Sequence[Argument],
    spans: Sequence[tuple[int, int]],
    pointers: Sequence[int],
    written: Sequence[int],
    layouts: Sequence[ArrayLayout | None] = (),
) -> None:
    """Check the pointers of one call; ``spans`` and ``pointers`` are in the order of ``arguments``.

    ``written`` lists the positions of the outputs that the caller passed, whose overlap with another array
    must be ruled out, as `overlapping` finds it.

    Raises NullPointer for an array without memory, BadTensorStrides for a misaligned or overlapping one.
    """
    for argument, (low, high), pointer in zip(arguments, spans, pointers, strict=True):
        if high == low:
            continue
        if pointer == 0:
            raise NullPointer(f"{arg(argument.name)} has no memory")
        if pointer % argument.alignment:
            raise BadTensorStrides(
                f"{arg(argument.name)} starts at address {pointer:#x}, which is not a multiple of "
                f"{argument.alignment} bytes; pass a copy or a slice that starts at an aligned element"
            )
    for target in written:
        for other in overlapping(target, spans, pointers, layouts):
            raise BadTensorStrides(
                f"{arg(arguments[target].name)} overlaps {arg(arguments[other].name)} in memory; pass "
                "separate memory"
            )


def overlapping(
    target: int,
    spans: Sequence[tuple[int, int]],
    pointers: Sequence[int],
    layouts: Sequence[ArrayLayout | None],
) -> Iterator[int]:
    """The positions of other arrays whose address ranges overlap an array's; empty arrays overlap none. With
    ``layouts`` arrays may interleave, as Q, K and V of each token do in one array.
    """
    start, end = pointers[target] + spans[target][0], pointers[target] + spans[target][1]
    for other, ((low, high), pointer) in enumerate(zip(spans, pointers, strict=True)):
        if other == target or low == high or pointer + low >= end or start >= pointer + high:
            continue
        if not layouts or not interleave(layouts[target], layouts[other], pointer - pointers[target]):
            yield other


def interleave(first: ArrayLayout, second: ArrayLayout, distance: int) -> bool:
    """Whether two arrays of one stride, ``distance`` bytes from each other, share no byte: between two steps
    of the stride both have their place. False where no stride of both shows it.
    """
    pair = first, second
    steps = [{stride * layout.element_bytes for stride in layout.strides if stride > 0} for layout in pair]
    for period in steps[0] & steps[1]:
        (low, high), (other_low, other_high) = (_span_within(layout, period) for layout in pair)
        offset = (distance + other_low - low) % period
        if offset >= high - low and offset + other_high - other_low <= period:
            return True
    return False


def _span_within(layout: ArrayLayout, period: int) -> tuple[int, int]:
    """`ArrayLayout.span` of an array that does not move by whole periods."""
    strides = tuple(0 if stride * layout.element_bytes % period == 0 else stride for stride in layout.strides)
    return layout._replace(strides=strides).span()
