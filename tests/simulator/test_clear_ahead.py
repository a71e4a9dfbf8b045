"""Thread blocks that clear dQ of later heads, in the simulator: on GPUs so small that most heads are cleared
so, in memory that is full of NaN; planted faults."""

from __future__ import annotations

import dataclasses

import pytest

from backward_variants import MAIN
from flashgen.schedule.grid import all_heads
from flashgen.schedule.groups import group_parts
from flashgen.schedule.sections import clear_distance
from flashgen.simulator.example import Shape, make
from flashgen.simulator.hardware import pretend_for
from flashgen.source.render import render
from simulator.calls import ORDERS, calls_of, check_on
from simulator.faults_clear_ahead import FAULTS, SHAPE

CASES = [
    ("32_bf16", Shape(300, 150, 5, head_dim=24)),
    ("64_fp16_causal", Shape(150, 300, 3, batch=2)),
    ("64_bf16_causal_ordered", Shape(130, 260, 4)),
    ("96_bf16_local_gqa", Shape(130, 140, 8, 4, window=(70, 10))),
    ("128_fp16_gqa", Shape(70, 300, 8, 4, head_dim=104)),
    ("128_bf16_local_ordered", Shape(100, 130, 4, window=(30, 0), top_left=True)),
    # Each consumer skips one of two steps.
    ("128_bf16_local", Shape(128, 128, 4, window=(0, 0), top_left=True)),
    ("192_fp16_causal_gqa", Shape(70, 100, 6, 3)),
    ("192_bf16_local_pair", Shape(100, 200, 4, window=(60, 0))),
    ("256_fp16_causal_ordered_pair", Shape(70, 140, 4)),
]


def check_of(variant, shape, seed, source_of=render, sms=1, threads=1, overlap=False):
    """The check that found something on a GPU of ``sms`` multiprocessors, or None."""
    example = make(variant, shape, seed)
    device = dataclasses.replace(pretend_for(variant), num_sms=sms)
    assert group_parts(example.problem, variant, device) == 1
    assert clear_distance(example.problem, variant, device) < all_heads(example.problem, variant)
    return check_on(variant, example, seed, source_of, device=device, threads=threads, overlap=overlap)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_within_the_bound(name, shape, compiler, fresh_seed):
    """With one thread block at a time, with several, and with those of the step behind between them."""
    for threads, overlap in ((1, False), (4, False), (1, True)):
        variant = MAIN[f"flash_bwd_hdim{name}_sm90"]
        assert check_of(variant, shape, fresh_seed, threads=threads, overlap=overlap) is None


def test_heads_that_are_cleared_ahead_of_the_main_kernel(compiler, fresh_seed):
    """Half of them, and all but the last."""
    variant = MAIN["flash_bwd_hdim64_bf16_sm90"]
    for sms, distance in ((1, 2), (6, 3)):
        device = dataclasses.replace(pretend_for(variant), num_sms=sms)
        assert clear_distance(make(variant, SHAPE, 0).problem, variant, device) == distance
        assert check_of(variant, SHAPE, fresh_seed, sms=sms) is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(MAIN[fault.variant], fault.shape, fixed_seed, fault.sources) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(MAIN[fault.variant], fault.shape, seed) is None
