"""The workspace of a call: one allocation, cut into the slices that a family's steps share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import SpecError
from flashgen.families.grid import GROUP_PARTS, NUM_PARTS
from flashgen.operators.arguments import DTYPE_BYTES, WORKSPACE_ALIGNMENT
from flashgen.schedule.grid import extents

if TYPE_CHECKING:
    from collections.abc import Container

    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.schedule.shares import Shares


# The buffers that kernels read instead of arguments, where a step makes the lists of a mask by a line.
_LISTS_OF_LINES = {"block_indptr": "line_indptr", "block_indices": "line_indices"}


class Slice(NamedTuple):
    """A buffer within the workspace: where it begins, and its size, in bytes."""

    name: str
    offset: int
    nbytes: int


class Workspace(NamedTuple):
    """The memory that the steps of a call share: one allocation, cut into slices."""

    slices: tuple[Slice, ...]
    nbytes: int

    @property
    def offsets(self) -> dict[str, int]:
        return {buffer.name: buffer.offset for buffer in self.slices}


def buffer_of(param: str, buffers: Container[str]) -> str:
    """The buffer, or the argument, that a parameter points to: ``param``, or the lists that a step makes."""
    buffer = _LISTS_OF_LINES.get(param, param)
    return buffer if buffer in buffers else param


def workspace_of(problem: Problem, main: Variant, shares: Shares | None = None, parts: int = 1) -> Workspace:
    """The slices that the family of ``main`` needs, one after the other; ``shares`` are the shares of its
    grid, and ``parts`` the parts of each group of query heads.
    """
    if not main.workspace:
        return Workspace((), 0)
    from flashgen.families.expression import Expression

    values = {**problem.sizes, **extents(problem, main), **dict(main.axes), **dict(main.tile)}
    values[NUM_PARTS] = shares.parts if shares else 0
    values[GROUP_PARTS] = parts
    slices, end = [], 0
    for buffer in main.workspace:
        shape = [Expression(extent, frozenset(values))(values) for extent in buffer.shape]
        if min(shape) < 0:
            raise SpecError(f"{main.spec}: workspace.{buffer.name} has shape {shape} for {main.name}")
        size = DTYPE_BYTES[problem.dtype if buffer.dtype == "element" else buffer.dtype]
        slices.append(Slice(buffer.name, end, math.prod(shape) * size))
        end += -(-slices[-1].nbytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return Workspace(tuple(slices), end)
