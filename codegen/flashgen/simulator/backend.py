"""The simulator as a backend of ``attention()``: dispatch for a pretended GPU, then the generated CUDA on the
CPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flashgen.runtime.hostarrays import check_writable
from flashgen.schedule.dispatch import offers
from flashgen.schedule.plan import choices
from flashgen.simulator import hardware, hostcompiler
from flashgen.simulator.execute import Report, simulate
from flashgen.simulator.library import load, supports
from flashgen.toolchain.origins import template_lines_named

if TYPE_CHECKING:
    from flashgen.families.model import Spec
    from flashgen.operators.operator import Problem
    from flashgen.runtime.plans import Arrays, Pointers, Work
    from flashgen.schedule.plan import Step, Steps
    from flashgen.simulator.library import Library


def _load(step: Step) -> Library:
    with template_lines_named(step.variant, step.source):
        return load(step.source, step.variant.name)


class Runner:
    """Runs the steps of one problem, in order; see ``plans.Runner``. ``reports`` has what each step of the
    last call executed.
    """

    def __init__(self, planned: Steps) -> None:
        self.variant, self.steps = planned.main, planned.steps
        self.workspace_bytes = planned.workspace.nbytes
        self.reports: tuple[Report, ...] = ()
        self._planned = planned
        self._libraries = [_load(step) for step in planned.steps]

    def at(self, pointers: Pointers, problem: Problem) -> Work:
        return partial(self._run, pointers, problem)

    def _run(self, pointers: Pointers, problem: Problem, arrays: Arrays, stream: int) -> None:
        check_writable(problem, arrays)
        self.reports = simulate(self._libraries, self._planned, problem, pointers)


def prepare(problem: Problem, specs: tuple[Spec, ...], algorithm: str | None = None) -> Runner:
    """Choose a variant as on the pretended GPU, of the ``algorithm`` if one is named, and compile its steps
    for the host.

    Raises BadParam for an unknown FLASHGEN_SIMULATOR_ARCH, NoHostCompilerError, CompileError, and what
    ``dispatch.offers`` and ``select`` raise.
    """
    device = hardware.pretend()
    hostcompiler.find()  # before anything is rendered
    offered = offers(problem, device, specs, algorithm)
    return Runner(next(choices(problem, device, filter(supports, offered))))
