"""Examples of the simulator on a GPU: their arrays with all that lies between rows, there and back."""

from __future__ import annotations

import numpy as np

from flashgen.runtime.device import device
from flashgen.runtime.launch import bind
from flashgen.schedule.plan import plan_steps


def computed(example, variant, names):
    """What the GPU computes for the example: the array of each of ``names``, by name. Workspace and outputs
    are poisoned ahead, the example's own arrays stay as they are.
    """
    import cupy

    copies = [None if x is None else _copy(x) for x in example.arrays]
    launcher = bind(plan_steps(example.problem, variant, device(0)), device(0))
    workspace = cupy.full(max(1, launcher.workspace_bytes), 0xFF, cupy.uint8)
    pointers = (*(copy[1] if copy else 0 for copy in copies), workspace.data.ptr)
    launcher.at(pointers, example.problem)((None,) * len(copies), cupy.cuda.get_current_stream().ptr)
    places = {name: example.problem.operator.position(name) for name in names}
    return {name: _back(example.arrays[place], copies[place]) for name, place in places.items()}


def _copy(x):
    """A copy of the memory that ``x`` is a view of, the address of ``x`` in it, and that memory."""
    import cupy

    memory = x
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    copy = cupy.asarray(memory)
    return copy, copy.data.ptr + x.ctypes.data - memory.ctypes.data, memory


def _back(x, copied):
    """``x`` as the copy has it now; None where there is none."""
    if x is None:
        return None
    copy, _, memory = copied
    start = x.ctypes.data - memory.ctypes.data
    got = copy.get().view(np.uint8)[start:]
    count = got.size // x.itemsize
    return np.lib.stride_tricks.as_strided(got[: count * x.itemsize].view(x.dtype), x.shape, x.strides)
