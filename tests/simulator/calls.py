"""All steps of a call of one variant in the simulator, and what finds a fault in them."""

from __future__ import annotations

from operator import attrgetter

from flashgen.errors import SimulationError
from flashgen.simulator.example import make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.faults import WRONG

# Orders of threads under which a kernel without a fault runs; seeds are fresh, so the next run has others.
ORDERS = 5


def simulated(variant, example, seed, source_of=render, **options):
    """The reports of the steps that the call takes, run on the example; ``source_of`` a step is the source to
    take.
    """
    libraries = [load(source_of(step), step.name) for step in variant.steps]
    reports = run_steps(libraries, variant, example, seed=seed, **options)
    return [report for report in reports if report is not None]


def within_the_bound(variant, shape, seed):
    """The example after the call ran on it, and its reports; AssertionError if it is too far from float64."""
    example = make(variant, shape, seed)
    reports = simulated(variant, example, seed)
    verdict = example.judge()
    assert verdict.ok, f"{variant.name}, {shape}: {verdict}"
    return example, reports


def check_of(variant, shape, seed, source_of=render, **options):
    """The check that found something in a call of this shape, or None."""
    return check_on(variant, make(variant, shape, seed), seed, source_of, **options)


def check_on(variant, example, seed, source_of=render, **options):
    """The check that found something in the call on the example, or None."""
    try:
        simulated(variant, example, seed, source_of, **options)
    except SimulationError as error:
        return error.check
    return None if example.judge().ok else WRONG


def first_check(variant, shape, seeds, source_of, example_of=make, **options):
    """The check that finds something in the first of the calls on ``example_of(variant, shape, seed)`` in
    which one does, or None: of some arrays a fault makes nothing wrong.
    """
    examples = ((seed, example_of(variant, shape, seed)) for seed in seeds)
    checks = (check_on(variant, example, seed, source_of, **options) for seed, example in examples)
    return next(filter(None, checks), None)


def check_found(run, seeds):
    """AssertionError unless the simulator finds a fault with one of the seeds: of some arrays a fault makes
    nothing wrong. ``run(seed)`` gives examples after their calls.
    """
    for seed in seeds:
        try:
            examples = run(seed)
        except SimulationError:
            return
        if not all(example.judge().ok for example in examples):
            return
    raise AssertionError("no seed shows the fault")


def calls_of(faults, *further):
    """A fault of each variant and shape, and of each value of ``further`` attributes, that some fault has:
    calls that are right without it.
    """
    call_of = attrgetter("variant", "shape", *further)
    return list({call_of(fault): fault for fault in faults}.values())
