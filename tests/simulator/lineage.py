"""The families that a call gets only by `algorithm`: naive, whose calls take three kernels, and v1."""

from __future__ import annotations

from flashgen.families.load import load_specs
from flashgen.simulator.example import make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render

# Every kernel of both families by name, and the one that dispatch chooses for its call.
KERNELS = {v.name: v for spec in load_specs() if spec.algorithm in ("naive", "v1") for v in spec.variants()}
MAINS = tuple(variant for variant in KERNELS.values() if variant.is_main)
MAIN_OF = {step.name: main for main in MAINS for step in main.steps}


def simulated(main, shape, seed, order=None, source_of=render):
    """The example after a call of ``main`` ran on it, its threads in another ``order`` than the seed's if
    that is given. ``source_of`` renders a kernel."""
    example = make(main, shape, seed)
    libraries = [load(source_of(step), step.name) for step in main.steps]
    run_steps(libraries, main, example, seed=seed if order is None else order)
    return example
