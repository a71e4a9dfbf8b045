"""dQ in turns, in the simulator: the same bits whatever runs at a time, sections of heads, planted faults."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from backward_variants import MAIN
from flashgen.errors import SimulationError
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.sections import sections
from flashgen.simulator.example import Shape, make
from flashgen.simulator.execute import simulate
from flashgen.simulator.hardware import pretend_for
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.calls import ORDERS
from simulator.faults import WRONG
from simulator.faults_turns import AMPERE, FAULTS, HOPPER, PAIR, WIDE, watched


def simulated(variant, shape, seed, *, threads=1, order=0, sms=None, source_of=render):
    """The example after the call ran, with so many thread blocks at a time, and the bytes of dq_accum."""
    example = make(variant, shape, seed)
    device = pretend_for(variant)
    device = device if sms is None else dataclasses.replace(device, num_sms=sms)
    planned = plan_steps(example.problem, variant, device)
    libraries = [load(source_of(step.variant), step.variant.name) for step in planned.steps]
    memory = np.full(planned.workspace.nbytes + 256, 0xFF, np.uint8)
    memory = memory[-memory.ctypes.data % 256 :]
    pointers = (*(0 if x is None else x.ctypes.data for x in example.arrays), memory.ctypes.data)
    simulate(libraries, planned, example.problem, pointers, seed=order, threads=threads)
    (sums,) = (each for each in planned.workspace.slices if each.name == "dq_accum")
    return example, memory[sums.offset : sums.offset + sums.nbytes].tobytes()


CASES = [
    (AMPERE, Shape(300, 1100, 1)),
    ("flash_bwd_hdim32_fp16_dense_ordered_gqa_sm80", Shape(100, 600, 4, 2, mask="k", window=(150, 0))),
    (HOPPER, Shape(300, 600, 1)),
    ("flash_bwd_hdim128_fp16_local_ordered_gqa_sm90", Shape(200, 330, 2, 1, window=(150, 20))),
    (WIDE, Shape(150, 200, 1)),
    (PAIR, Shape(150, 260, 2)),
    ("flash_bwd_hdim192_128_fp16_local_ordered_pair_gqa_sm90", Shape(200, 330, 2, 1, window=(0, 3))),
    ("flash_bwd_hdim256_bf16_causal_ordered_pair_sm90", Shape(200, 260, 1)),
    ("flash_bwd_hdim256_fp16_causal_ordered_gqa_sm90", Shape(100, 140, 2, 1)),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_dq_repeats_to_the_bit(name, shape, compiler, fresh_seed):
    """With one thread block at a time, and with several, which do wait for each other."""
    variant = MAIN[name]
    example, first = simulated(variant, shape, fresh_seed)
    verdict = example.judge()
    assert verdict.ok, f"{name}, {shape}: {verdict}"
    for order, threads in ((1, 2), (2, 4)):
        _, again = simulated(variant, shape, fresh_seed, threads=threads, order=order)
        assert again == first


@pytest.mark.parametrize(
    ("name", "seqlen_q", "few", "some"), [(AMPERE, 516, 2, 4), (HOPPER, 300, 1, 2)], ids=[AMPERE, HOPPER]
)
def test_heads_in_sections_of_any_size(name, seqlen_q, few, some, compiler, fresh_seed):
    """Also the last one, with the heads that are left, and one of a head that is longer than the device."""
    variant = MAIN[name]
    shape = Shape(seqlen_q, 300, 5)  # three blocks of keys
    for sms, expected in ((few, (1, 5)), (some, (2, 3)), (132, (5, 1))):
        example, _ = simulated(variant, shape, fresh_seed, sms=sms)
        assert example.judge().ok
        device = dataclasses.replace(pretend_for(variant), num_sms=sms)
        assert sections(example.problem, variant, device) == expected


def check_of(name, shape, seed, source_of):
    """The check that found something, thread blocks running one after the other, or None."""
    try:
        example, _ = simulated(MAIN[name], shape, seed, order=seed, source_of=source_of)
    except SimulationError as error:
        return error.check
    return None if example.judge().ok else WRONG


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.variant[-4:]} {fault.name}")
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(fault.variant, fault.shape, fixed_seed, fault.sources) in fault.caught


@pytest.mark.parametrize("name", [AMPERE, HOPPER, WIDE, PAIR])
def test_without_it_nothing_is_found(name, compiler, fresh_seed):
    def source_of(step):
        return watched(render(step), name) if step.step == "main" else render(step)

    shape = next(fault.shape for fault in FAULTS if fault.variant == name)
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(name, shape, seed, source_of) is None
