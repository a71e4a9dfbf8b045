"""The simulator as a backend of ``attention()``: dispatch for a pretended GPU, then the generated CUDA on the
CPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flashgen.errors import BadParam
from flashgen.runtime.arrays import host_array
from flashgen.runtime.launch import geometry
from flashgen.schedule.dispatch import offers, select
from flashgen.simulator import hardware, hostcompiler
from flashgen.simulator.execute import Report, simulate
from flashgen.simulator.library import load, supports
from flashgen.source.render import render

if TYPE_CHECKING:
    from flashgen.operators.attention import Problem
    from flashgen.runtime.arrays import Pointers
    from flashgen.runtime.device import Device
    from flashgen.runtime.plans import Arrays, Work
    from flashgen.spec.model import Spec
    from flashgen.spec.variant import Variant


class Runner:
    """Runs one kernel for one problem; see ``plans.Runner``. ``report`` is what the last call executed."""

    workspace_bytes = 0

    def __init__(self, problem: Problem, variant: Variant, device: Device) -> None:
        self.variant = variant
        self.source = render(variant)
        self.report: Report | None = None
        self._problem = problem
        self._device = device
        self._library = load(self.source, variant.name)

    def at(self, pointers: Pointers) -> Work:
        return partial(self._run, pointers)

    def _run(self, pointers: Pointers, arrays: Arrays, stream: int) -> None:
        for name, written in (("out", arrays[4]), ("lse", arrays[5])):
            if written is not None and not host_array(written).flags.writeable:
                raise BadParam(f"{name} is read-only; pass an array that can be written to")
        self.report = simulate(self._library, self.variant, self._problem, pointers, self._device)


def prepare(problem: Problem, specs: tuple[Spec, ...]) -> Runner:
    """Choose a variant as on the pretended GPU, and compile it for the host.

    Raises BadParam for an unknown FLASHGEN_SIMULATOR_ARCH, NoHostCompilerError, CompileError, and what
    ``dispatch.select`` raises.
    """
    device = hardware.pretend()
    hostcompiler.find()  # before anything is rendered
    offered = offers(problem, device, specs)
    variant = select(problem, device, [variant for variant in offered if supports(variant)])
    geometry(problem, variant, device)
    return Runner(problem, variant, device)
