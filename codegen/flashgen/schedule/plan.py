"""The steps of a call: which kernels run, in order, on what grids, with what memory between them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashgen.operators.arguments import DTYPE_BYTES
from flashgen.schedule.grid import Launch, extents, launch_of
from flashgen.schedule.parameters import Struct, pack

if TYPE_CHECKING:
    from flashgen.operators.operator import Problem
    from flashgen.runtime.device import Device
    from flashgen.spec.variant import Variant

# Each slice of the workspace begins at a multiple of this many bytes, as fresh allocations of a GPU do.
SLICE_ALIGNMENT = 256


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
        return {each.name: each.offset for each in self.slices}


class Step(NamedTuple):
    """One kernel launch: the variant, its grid, and its parameter struct.

    ``bindings`` names, for each pointer and tensor map among its parameters, the argument or the slice of the
    workspace that it is of.
    """

    variant: Variant
    launch: Launch
    struct: Struct

    @property
    def source(self) -> str:
        """The CUDA that runs."""
        from flashgen.source.render import render

        return render(self.variant)


class Steps(NamedTuple):
    """All that a call does on a GPU, but for its pointers and scalars."""

    steps: tuple[Step, ...]
    workspace: Workspace


def plan_steps(problem: Problem, main: Variant, device: Device) -> Steps:
    """The steps of a call for which dispatch chose ``main``, and the workspace that they share.

    Raises BadTensorShape for a grid that is too large, and SpecError for parameters that nobody can give.
    """
    workspace = workspace_of(problem, main)
    steps = tuple(
        Step(variant, launch_of(problem, variant, device), pack(problem, variant, device, workspace))
        for variant in main.steps
    )
    return Steps(steps, workspace)


def workspace_of(problem: Problem, main: Variant) -> Workspace:
    """The slices that the family of ``main`` asks for, one after the other."""
    if not main.workspace:
        return Workspace((), 0)
    from flashgen.spec.expression import Expression

    values = {**problem.sizes, **extents(problem, main), **dict(main.axes), **dict(main.tile)}
    slices, end = [], 0
    for buffer in main.workspace:
        shape = [Expression(extent, frozenset(values))(values) for extent in buffer.shape]
        size = DTYPE_BYTES[problem.dtype if buffer.dtype == "element" else buffer.dtype]
        slices.append(Slice(buffer.name, end, math.prod(shape) * size))
        end += -(-slices[-1].nbytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
    return Workspace(tuple(slices), end)
