"""A convert kernel that rounds dQ of a head as soon as that is complete, in the simulator: its thread blocks
are tried ahead of each one of the main kernel; planted faults."""

from __future__ import annotations

import dataclasses

import pytest

from backward_variants import MAIN
from flashgen.simulator.example import Shape, make
from flashgen.simulator.hardware import pretend_for
from flashgen.source.render import render
from simulator.calls import calls_of, check_on, simulated
from simulator.faults_count_added import FAULTS, GROUPED, GROUPS, PLAIN, SHAPE

# Beside those of test_clear_ahead.
CASES = [
    ("192_fp16_causal_gqa", Shape(70, 100, 6, 3, batch=2)),
    # Most blocks of keys see no query: their thread blocks have no steps, and count.
    ("64_fp16_causal", Shape(60, 400, 4, top_left=True)),
    ("128_bf16_local", Shape(60, 300, 4, window=(0, 0), top_left=True)),
    ("192_bf16_local_pair", Shape(60, 300, 4, window=(0, 0), top_left=True)),
]


def check_of(variant, shape, seed, source_of=render, sms=1):
    """The check that found something on a GPU of ``sms`` multiprocessors, or None."""
    device = dataclasses.replace(pretend_for(variant), num_sms=sms)
    return check_on(variant, make(variant, shape, seed), seed, source_of, device=device, overlap=True)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_within_the_bound(name, shape, compiler, fresh_seed):
    assert check_of(MAIN[f"flash_bwd_hdim{name}_sm90"], shape, fresh_seed) is None


def test_query_heads_of_a_group_in_parts(compiler, fresh_seed):
    """A head of the grid is a part, and a step that sums the parts follows."""
    assert check_of(MAIN[GROUPS], GROUPED, fresh_seed, sms=132) is None


def test_blocks_that_are_tried_count_once(compiler, fresh_seed):
    variant = MAIN[PLAIN]
    after, overlapped = (
        simulated(variant, make(variant, SHAPE, 0), fresh_seed, overlap=overlap, threads=1)
        for overlap in (False, True)
    )
    assert overlapped == after
    # Of the convert kernel the last one awaits the grid.
    assert [report.counters["grid_waits"] for report in overlapped] == [8, 12, 1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    found = check_of(MAIN[fault.variant], fault.shape, fixed_seed, fault.sources, fault.multiprocessors)
    assert found in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS, "multiprocessors"), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    # Two orders: a block of the convert kernel that waits runs again before each block of the main kernel.
    for seed in range(fresh_seed, fresh_seed + 2):
        assert check_of(MAIN[fault.variant], fault.shape, seed, sms=fault.multiprocessors) is None
