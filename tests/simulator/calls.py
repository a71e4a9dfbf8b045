"""All steps of a call of one variant in the simulator, and what finds a fault in them."""

from __future__ import annotations

import dataclasses
from operator import attrgetter

from flashgen.errors import SimulationError
from flashgen.families.load import load_specs
from flashgen.simulator import hardware
from flashgen.simulator.example import make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.faults import WRONG

# Orders of threads under which a kernel without a fault runs; seeds are fresh, so the next run has others.
ORDERS = 5


def main_kernels(of_spec, of_variant=lambda variant: True, **axes):
    """The shipped main variants of which both functions are true, by name, with these values of axes."""
    of_specs = (spec.select(**axes) if axes else spec.variants() for spec in load_specs() if of_spec(spec))
    mains = (variant for variants in of_specs for variant in variants if variant.is_main)
    return {variant.name: variant for variant in mains if of_variant(variant)}


def small_gpu(variant, count=3):
    """A GPU so small that thread blocks have several tiles, and some tiles are split."""
    gpu = hardware.pretend_for(variant)
    return dataclasses.replace(gpu, num_sms=count, smem_per_sm=variant.smem_bytes + 1024)


def small_gpu_of_shares(variant):
    """A GPU so small that few rows on many keys are split, of a kernel that splits."""
    return small_gpu(variant) if variant.grid.shares else hardware.pretend_for(variant)


def with_fault(plant, has_it=attrgetter("is_main")):
    """The ``source_of`` steps in which ``plant`` puts a fault into the source of those that have it."""
    return lambda step: plant(render(step)) if has_it(step) else render(step)


def simulated(variant, example, seed, source_of=render, **options):
    """The reports of the steps that the call takes, run on the example; ``source_of`` a step is the source to
    take.
    """
    libraries = [load(source_of(step), step.name) for step in variant.steps]
    reports = run_steps(libraries, variant, example, seed=seed, **options)
    return [report for report in reports if report is not None]


def result_bits(variant, shape, seed, order, device, **options):
    """The bits of a call's results in this order of threads; AssertionError if they are too far off."""
    example = make(variant, shape, seed)
    simulated(variant, example, order, device=device, **options)
    assert example.judge().ok, example.judge()
    return example.named["out"].tobytes() + example.named["lse"].tobytes()


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
