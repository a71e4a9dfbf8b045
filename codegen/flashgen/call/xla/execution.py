"""Runs a call inside a program of XLA: the plan of its text, on memory that XLA passes.

A program has a call as its text with the dtype and the shape of each array. Arrays are contiguous. XLA passes
a pointer for each array and for each result, and where kernels need a workspace one more.
"""

from __future__ import annotations

import ctypes
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.call.backends import runner_for
from flashgen.call.text import decode, shapes_of
from flashgen.errors import InsufficientWorkspace, InternalError, naming
from flashgen.host import forks
from flashgen.operators.arguments import WORKSPACE_ALIGNMENT, view_of_shape
from flashgen.operators.overlaps import check_memory
from flashgen.runtime import check
from flashgen.runtime.numpykind import NUMPY_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.call.text import Described, Shapes
    from flashgen.operators.operator import Problem
    from flashgen.runtime.arrays import Pointers, Work
    from flashgen.runtime.plans import Runner

# Works that an execution keeps, by the pointers of the call.
MAX_WORKS = 256
# Bytes to add to a workspace, so that an aligned address is in it.
PADDING = WORKSPACE_ALIGNMENT
_NUMPY = {"fp16": np.float16, "bool": np.bool_, "int64": np.int64} | {
    name: np.dtype(numpy_name).type for name, numpy_name in NUMPY_NAMES.items()
}


class Execution:
    """A call with arrays of certain shapes on one device: a CUDA ordinal, or None for host memory."""

    def __init__(self, described: Described, shapes: Shapes, device: int | None) -> None:
        self._described, self._device = described, device
        views = [view_of_shape(shape, dtype, device) for dtype, shape in shapes]
        self.problem: Problem = described.problem(views)
        operator = self.problem.operator
        self._inputs = tuple(operator.position(name) for name in described.names)
        self._results = self.problem.results
        self.result_count = len(self._results)
        self._shapes = [shape for _, shape in shapes]
        self._count = len(operator.arguments)
        self._works: dict[Pointers, Work] = {}

    @cached_property
    def runner(self) -> Runner:
        """The runner of the call; making it compiles and loads kernels. Raises as `backends.runner_for`."""
        request = self._described.request
        return runner_for(self.problem, request.backend, request.algorithm)

    def load(self) -> None:
        """Make the `runner`, if there is anything to compute."""
        if not self.problem.empty:
            _ = self.runner

    @property
    def workspace_bytes(self) -> int:
        """The size of the result that serves as workspace, 0 if the kernels need none."""
        needed = 0 if self.problem.empty else self.runner.workspace_bytes
        return needed + PADDING if needed else 0

    def run(
        self, inputs: Sequence[int], outputs: Sequence[int], stream: int, workspace: tuple[int, int] = (0, 0)
    ) -> None:
        """Compute, or on a GPU queue, for arrays at these addresses; ``workspace`` is an address and a number
        of bytes. Raises the errors of the contract that depend on memory.
        """
        addresses = [0] * self._count
        for place, pointer in zip(self._inputs, inputs, strict=True):
            addresses[place] = pointer
        for place, pointer in zip(self._results, outputs, strict=True):
            if addresses[place] and addresses[place] != pointer:
                name = self.problem.operator.arguments[place].name
                raise InternalError(f"XLA moved {name}, which a call writes to in its place")
            addresses[place] = pointer
        pointers = tuple(addresses)
        key = (*pointers, *workspace)
        with naming(self._described.renamed):
            self._compute(pointers, key, stream, workspace)

    def _compute(self, pointers: Pointers, key: Pointers, stream: int, workspace: tuple[int, int]) -> None:
        work = self._works.get(key)
        if work is None:
            work = self._work(pointers, workspace)
            if len(self._works) >= MAX_WORKS:
                self._works = {}
            self._works[key] = work
        work(() if self._device is not None else self._arrays(pointers), stream)

    def _work(self, pointers: Pointers, workspace: tuple[int, int]) -> Work:
        problem, operator = self.problem, self.problem.operator
        check_memory(operator.arguments, problem.spans(), pointers, ())
        if problem.empty:
            work: Work = _no_work
            checks = self._device is None and operator.check_elements is not None
        else:
            work = self.runner.at((*pointers, *self._aligned(workspace)), problem)
            # The CPU path checks the elements of what it computes.
            checks = self.runner.variant is not None and check.applies_to(operator)
        return check.checked(work, problem, pointers) if checks else work

    def _aligned(self, workspace: tuple[int, int]) -> tuple[int, ...]:
        """The address of the workspace that kernels get, if they need one."""
        needed = self.runner.workspace_bytes
        if not needed:
            return ()
        begin, size = workspace
        address = -(-begin // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        if address + needed > begin + size:
            raise InsufficientWorkspace(
                f"the program has a workspace of {size} bytes, and on this GPU the call needs "
                f"{needed + PADDING}; compile the program anew on this GPU"
            )
        return (address,)

    def _arrays(self, pointers: Pointers) -> tuple[np.ndarray | None, ...]:
        """The arrays of the call in host memory."""
        return tuple(
            None if kind is None else _array(pointer, *kind)
            for pointer, kind in zip(pointers, self._kinds, strict=True)
        )

    @cached_property
    def _kinds(self) -> list[tuple[Any, Any, tuple[int, ...]] | None]:
        """Of each argument a type for its memory, the dtype of NumPy and the shape."""
        from ml_dtypes import bfloat16, float8_e4m3fn

        dtypes = _NUMPY | {"bf16": bfloat16, "e4m3": float8_e4m3fn}
        shapes = dict(zip(self._described.names, self._shapes, strict=True))
        kinds: list[Any] = []
        for place, layout in enumerate(self.problem.array_layouts()):
            if layout is None:
                kinds.append(None)
                continue
            shape = shapes.get(layout.argument.name)
            shape = self.problem.shape(place) if shape is None else shape
            dtype = np.dtype(dtypes[layout.dtype])
            kinds.append((ctypes.c_char * (math.prod(shape) * dtype.itemsize), dtype, shape))
        return kinds


def _array(pointer: int, memory: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.frombuffer(memory.from_address(pointer), dtype).reshape(shape)


def _no_work(arrays: Any, stream: int) -> None:
    """The work of a call without elements: nothing."""


_executions: dict[tuple[bytes, int | None], Execution] = {}
_guard = forks.guard()


def execution(text: bytes, device: int | None) -> Execution:
    """The execution of a text with shapes, made for the first caller. Raises the errors of the contract."""
    kept = _executions.get((text, device))
    if kept is None:
        new = Execution(decode(text), shapes_of(text), device)
        with _guard:
            kept = _executions.setdefault((text, device), new)
    return kept
