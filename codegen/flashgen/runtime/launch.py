"""From the steps of a call to queued kernels: parameter structs in memory, and the driver's launch calls."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.families.params import vector_width
from flashgen.runtime import dependent, kernel, tensormap
from flashgen.runtime.device import activated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.runtime.arrays import Arrays, Pointers, Work
    from flashgen.runtime.kernel import Kernel
    from flashgen.schedule.parameters import Struct
    from flashgen.schedule.plan import Step, Steps

# One step of a call, ready to be queued: called as ``launch(stream, argument, 0)``, where the device is
# current. The last member is the memory of the argument, which lives as long.
Prepared = tuple[Callable[[int, Any, int], None], Any, Any]


class Launcher:
    """Launches of one step of a call. Safe to use from many threads at once.

    They may be queued if ``current_context()`` is ``context``, the context of ``device``, a CUDA ordinal.
    """

    def __init__(self, step: Step, device: Device, loaded: Kernel) -> None:
        from cupy_backends.cuda.api import driver

        self._loaded = loaded  # keeps the module loaded while there are launches
        params = step.struct
        self._params, self._template = params, params.template
        self._encoded = False  # whether the template has these maps, of whatever address
        self._alignment, size = params.alignment, len(params.template)
        # A word for a pointer, and the struct at whatever aligned address comes next.
        self._memory = ctypes.c_uint64 * (1 + -(-(size + self._alignment) // 8))
        self._copy = struct.Struct(f"{size}s").pack_into
        self.device = device.ordinal
        with activated(device.ordinal) as context:
            self.context = context
        self.current_context = driver.ctxGetCurrent
        grid = step.launch
        blocks, threads = (grid.blocks, 1, 1), (grid.threads, 1, 1)
        self._dependent = dependent.applies_to(step.variant, device)
        if self._dependent:
            self._launch = dependent.bind(loaded.function_ptr, blocks, threads, grid.smem_bytes)
        else:
            shape = (*blocks, *threads, grid.smem_bytes)
            self._launch = partial(driver.launchKernel, loaded.function_ptr, *shape)

    def of(self, params: Struct) -> Launcher:
        """Launches of the same kernel on the same grid, with another parameter struct of its size."""
        other = copy.copy(self)
        other._params, other._template, other._encoded = params, params.template, False
        return other

    def at(self, pointers: Pointers, problem: Problem) -> Prepared:
        """The launch of the kernel with its parameter struct for arrays at ``pointers`` and the scalars of
        ``problem``.
        """
        # First the array of one pointer to the struct that the driver wants, then the struct. Both are only
        # read once they are filled in, so any number of calls may share them.
        memory = self._memory()
        argument = ctypes.addressof(memory)
        address = (argument + 8 + self._alignment - 1) & -self._alignment
        start = address - argument
        memory[0] = address
        encoded = self._encoded  # read before the template: another thread may just be changing both
        self._copy(memory, start, self._template)
        params = self._params
        for offset, source, distance in params.pointers:
            memory[(start + offset) // 8] = pointers[source] + distance
        for offset, source, strides in params.widths:
            ctypes.c_int32.from_address(address + offset).value = vector_width(pointers[source], *strides)
        if params.scalars:
            numbers = problem.scalar_values()
            for offset, code, name in params.scalars:
                struct.pack_into(code, memory, start + offset, numbers[name])
        if params.maps:
            self._map(address, pointers, encoded)
        # CuPy's function takes the array's address, a dependent launch takes the array.
        return self._launch, memory if self._dependent else argument, memory

    def _map(self, address: int, pointers: Pointers, encoded: bool) -> None:
        """Fill in the tensor maps of a struct: anew, or, where they are ``encoded``, for other addresses."""
        if self.current_context() != self.context:
            # The driver may refuse in a thread that has not used the device.
            with activated(self.device):
                self._map(address, pointers, encoded)
        elif encoded:
            for offset, source, map in self._params.maps:
                tensormap.move(address + offset, pointers[source] + map.distance)
        else:
            for offset, source, map in self._params.maps:
                tensormap.encode(map, pointers[source] + map.distance, address + offset)
            self._template = ctypes.string_at(address, len(self._template))
            self._encoded = True


class Runner:
    """Queues the steps of a call on a GPU, in order; see ``plans.Runner``."""

    def __init__(self, planned: Steps, device: Device, kernels: Sequence[Kernel]) -> None:
        self.planned, self.device = planned, device
        self.steps, self.variant = planned.steps, planned.main
        # What dispatch chose among; `call.growing` asks for how many keys it would choose the same.
        self.offered: Sequence[Variant] = ()
        self.workspace_bytes = planned.workspace.nbytes
        self._launchers = [
            Launcher(step, device, loaded) for step, loaded in zip(planned.steps, kernels, strict=True)
        ]

    def of(self, steps: Sequence[Step]) -> Runner:
        """What queues these steps, which differ from its own in their parameter structs alone."""
        other = copy.copy(self)
        other.steps = tuple(steps)
        pairs = zip(self._launchers, steps, strict=True)
        other._launchers = [launcher.of(step.struct) for launcher, step in pairs]
        return other

    def at(self, pointers: Pointers, problem: Problem) -> Work:
        launches = [launcher.at(pointers, problem) for launcher in self._launchers]
        first = self._launchers[0]
        context, current_context, device = first.context, first.current_context, first.device

        def queue(arrays: Arrays, stream: int) -> None:
            if current_context() != context:
                # The thread's current device is another one, or it has not used CUDA yet.
                with activated(device):
                    for launch, argument, _ in launches:
                        launch(stream, argument, 0)
                return
            for launch, argument, _ in launches:
                launch(stream, argument, 0)

        return queue


def bind(steps: Steps, device: Device) -> Runner:
    """The steps with their kernels loaded, compiling what no cache has. Raises NoCompilerError,
    NoBindingError, DeviceTypeNotSupported, NoRoomForClusters or CompileError.
    """
    if any(step.struct.maps for step in steps.steps):
        tensormap.binding()  # raises for a driver without tensor maps, before anything is compiled
    return Runner(steps, device, kernel.load_all([step.variant for step in steps.steps], device))
