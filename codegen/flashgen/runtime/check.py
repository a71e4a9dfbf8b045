"""``FLASHGEN_CHECK=1``: copy lengths and tables from the device to the host and check them before every call
that takes them.

Without it nobody reads them there: a kernel cuts what is out of range, and says nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.host.envflags import switched
from flashgen.runtime.device import activated
from flashgen.runtime.hostarrays import host_array
from flashgen.runtime.numpykind import NUMPY_NAMES

if TYPE_CHECKING:
    import numpy as np

    from flashgen.operators.arguments import ArrayLayout
    from flashgen.operators.operator import Operator, Problem
    from flashgen.runtime.arrays import Arrays, Pointers, Work

SWITCH = "FLASHGEN_CHECK"


def applies_to(operator: Operator) -> bool:
    """Whether FLASHGEN_CHECK asks for it, and there are elements to check. Raises what `enabled` does."""
    return enabled() and operator.check_elements is not None


def enabled() -> bool:
    """Whether FLASHGEN_CHECK is 1. Raises BadParam where it is something else than 0, 1 or empty."""
    return switched(SWITCH) is True


def checked(work: Work, problem: Problem, pointers: Pointers) -> Work:
    """``work`` on arrays at ``pointers``, which begins with the check."""
    return partial(_check_and_queue, work, problem, pointers)


def _check_and_queue(work: Work, problem: Problem, pointers: Pointers, arrays: Arrays, stream: int) -> None:
    host_arrays = elements(problem, pointers, arrays, stream)
    if host_arrays is not None:
        problem.operator.check_elements(problem, host_arrays)
    work(arrays, stream)


def elements(
    problem: Problem, pointers: Pointers, arrays: Arrays, stream: int
) -> dict[str, np.ndarray | None] | None:
    """The arrays whose elements are checked, by name, in host memory: what the work of the stream so far has
    left in them, for which this waits. A stream that is captured cannot be waited for, and the graph may find
    other elements: None then.
    """
    operator = problem.operator
    positions = {name: operator.position(name) for name in operator.elements_checked}
    if problem.device is None:
        return {name: _on_host(arrays[position]) for name, position in positions.items()}
    from cupy.cuda import runtime

    with activated(problem.device):
        if runtime.streamIsCapturing(stream):
            return None
        layouts = problem.array_layouts()
        return {name: _copied(layouts[place], pointers[place], stream) for name, place in positions.items()}


def _on_host(array: Any) -> np.ndarray | None:
    return None if array is None else host_array(array)


def _copied(layout: ArrayLayout | None, pointer: int, stream: int) -> np.ndarray | None:
    """The array at an address of the GPU, in host memory."""
    import numpy as np
    from cupy.cuda import runtime

    if layout is None:
        return None
    begin, end = layout.span()
    memory = np.empty(end - begin, np.uint8)
    if end > begin:
        runtime.memcpyAsync(
            memory.ctypes.data, pointer + begin, end - begin, runtime.memcpyDeviceToHost, stream
        )
        runtime.streamSynchronize(stream)
    strides = [layout.element_bytes * stride for stride in (*layout.strides, 1)]
    dtype = NUMPY_NAMES[layout.dtype]
    return np.ndarray(layout.extents, dtype, memory, -begin, strides)
