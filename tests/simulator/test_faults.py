"""Each fault planted into a rendered kernel is found, and by the check that it should be found by."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.errors import SimulationError
from flashgen.simulator import hardware
from flashgen.simulator.example import make, run
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator import faults, faults_sm90
from simulator.calls import ORDERS
from simulator.covering import VARIANTS
from simulator.faults import WRONG

FAULTS = (*faults.FAULTS, *faults_sm90.FAULTS)


def named(cases):
    return pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in cases])


def verdict_of(source, variant, shape, seed, multiprocessors=None):
    """The check that found something, or None; and the SimulationError, if it was one."""
    example = make(variant, shape, seed)
    device = hardware.pretend_for(variant)
    device = dataclasses.replace(device, num_sms=multiprocessors or device.num_sms)
    try:
        run(load(source, variant.name), variant, example, seed=seed, device=device)
    except SimulationError as error:
        return error.check, error
    return (None if example.judge().ok else WRONG), None


def test_there_are_enough_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@named(FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant = VARIANTS[fault.variant]
    planted = fault.plant(render(variant))
    check, error = verdict_of(planted, variant, fault.shape, fixed_seed, fault.multiprocessors)
    assert check in fault.caught
    if error is not None:
        assert error.kernel == variant.name
        assert variant.name in str(error)
        assert error.line is None or 0 < error.line <= planted.count("\n")


CLEAN = sorted({(fault.variant, fault.shape, fault.multiprocessors) for fault in FAULTS}, key=str)


@pytest.mark.parametrize(("name", "shape", "multiprocessors"), CLEAN, ids=str)
def test_without_it_nothing_is_found(name, shape, multiprocessors, compiler, fresh_seed):
    """Under several orders of threads."""
    variant = VARIANTS[name]
    source = render(variant)
    seeds = range(fresh_seed, fresh_seed + ORDERS)
    assert [verdict_of(source, variant, shape, seed, multiprocessors) for seed in seeds] == [
        (None, None)
    ] * ORDERS


@named(faults_sm90.HARMLESS)
def test_what_is_unusual_but_allowed_is_not_found(fault, compiler, fresh_seed):
    variant = VARIANTS[fault.variant]
    source = fault.plant(render(variant))
    for seed in range(fresh_seed, fresh_seed + 5):
        assert verdict_of(source, variant, fault.shape, seed, fault.multiprocessors) == (None, None)
