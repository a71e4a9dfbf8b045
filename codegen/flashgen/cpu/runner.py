"""The part of a plan that computes an operator on the CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.operators.operator import Problem
    from flashgen.runtime.plans import Arrays, Pointers, Work


class Runner:
    """Computes a problem at once, in the calling thread and its helpers, by ``run(problem, arrays, stream)``;
    see ``plans.Runner``.
    """

    variant = None
    steps = ()
    workspace_bytes = 0

    def __init__(self, run: Callable[[Problem, Arrays, int], None]) -> None:
        self._run = run

    def at(self, pointers: Pointers, problem: Problem) -> Work:
        return partial(self._run, problem)
