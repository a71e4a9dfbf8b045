"""``FLASHGEN_CHECK=1``: lengths and tables that lie on the device are read on the host, and checked, ahead of
every call that takes them.

Without it nobody reads them there: a kernel cuts what is out of range, and says nothing.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam
from flashgen.runtime.arrays import host_array
from flashgen.runtime.device import activated

if TYPE_CHECKING:
    import numpy as np

    from flashgen.operators.arguments import Placed
    from flashgen.operators.operator import Operator, Problem
    from flashgen.runtime.plans import Arrays, Pointers, Work

SWITCH = "FLASHGEN_CHECK"


def wanted(operator: Operator) -> bool:
    """Whether FLASHGEN_CHECK asks for it, and the operator has elements to check. Raises BadParam where the
    variable is something else than 0, 1 or empty.
    """
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise BadParam(f"{SWITCH} is {switch!r}; expected 0 or 1")
    return switch == "1" and operator.check_elements is not None


def checked(work: Work, problem: Problem, pointers: Pointers) -> Work:
    """``work`` on arrays at ``pointers``, which begins with the check."""
    return partial(_check_and_queue, work, problem, pointers)


def _check_and_queue(work: Work, problem: Problem, pointers: Pointers, arrays: Arrays, stream: int) -> None:
    operator = problem.operator
    if problem.device is None:
        found = {name: _on_host(arrays[operator.position(name)]) for name in operator.elements_checked}
        operator.check_elements(problem, found)
    else:
        with activated(problem.device):
            _check_on_gpu(problem, pointers, stream)
    work(arrays, stream)


def _on_host(array: Any) -> np.ndarray | None:
    return None if array is None else host_array(array)


def _check_on_gpu(problem: Problem, pointers: Pointers, stream: int) -> None:
    """Wait for the stream, and check what its work so far has left in the arrays. A stream that is captured
    cannot be waited for, and the graph may find other elements, so nothing is checked there.
    """
    from cupy.cuda import runtime

    if runtime.streamIsCapturing(stream):
        return
    operator, placed = problem.operator, problem.placed()
    found = {}
    for name in operator.elements_checked:
        position = operator.position(name)
        found[name] = _copied(placed[position], pointers[position], stream)
    operator.check_elements(problem, found)


def _copied(placed: Placed | None, pointer: int, stream: int) -> np.ndarray | None:
    """The array at an address of the GPU, in host memory."""
    import numpy as np
    from cupy.cuda import runtime

    if placed is None:
        return None
    begin, end = placed.span()
    memory = np.empty(end - begin, np.uint8)
    if end > begin:
        runtime.memcpyAsync(
            memory.ctypes.data, pointer + begin, end - begin, runtime.memcpyDeviceToHost, stream
        )
        runtime.streamSynchronize(stream)
    strides = [placed.element_bytes * stride for stride in (*placed.strides, 1)]
    return np.ndarray(placed.extents, placed.dtype, memory, -begin, strides)
