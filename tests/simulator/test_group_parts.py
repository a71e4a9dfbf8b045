"""Groups of query heads in parts, in the simulator: any number of them is right, sums are in order and repeat
to the bit, planted faults."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest

from backward_variants import MAIN
from flashgen.errors import SimulationError
from flashgen.schedule.plan import plan_steps
from flashgen.simulator.example import Shape, make
from flashgen.simulator.execute import simulate
from flashgen.simulator.hardware import pretend_for
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.faults import WRONG
from simulator.faults_group_parts import AMPERE, FAULTS, HOPPER, PARTS, SHAPE


def simulated(name, shape, seed, parts, *, threads=1, order=0, source_of=render):
    """The example after the call ran with groups in so many parts, and the arrays of its workspace."""
    variant = MAIN[name]
    example = make(variant, shape, seed)
    device = dataclasses.replace(pretend_for(variant), num_sms=1)
    with mock.patch("flashgen.schedule.plan.group_parts", return_value=parts):
        planned = plan_steps(example.problem, variant, device)
    assert [step.variant.step for step in planned.steps][3:] == ["sum"] * (parts > 1)
    libraries = [load(source_of(step.variant), step.variant.name) for step in planned.steps]
    memory = np.full(planned.workspace.nbytes + 256, 0xFF, np.uint8)
    memory = memory[-memory.ctypes.data % 256 :]
    pointers = (*(0 if x is None else x.ctypes.data for x in example.arrays), memory.ctypes.data)
    simulate(libraries, planned, example.problem, pointers, seed=order, threads=threads)
    arrays = {each.name: memory[each.offset :][: each.nbytes] for each in planned.workspace.slices}
    return example, arrays


# All families; one kv head; both orders of dQ; fp32.
CASES = [
    ("flash_bwd_hdim32_fp16_causal_gqa_sm80", Shape(70, 150, 6, 1, head_dim=24), (1, 2, 3, 6)),
    ("flash_bwd_hdim32_fp16_dense_ordered_gqa_sm80", Shape(70, 150, 4, 2, mask="k"), (1, 2)),
    ("flash_bwd_hdim32_fp32_causal_gqa_sm80", Shape(40, 70, 3, 1, head_dim_v=20), (3,)),
    ("flash_bwd_hdim64_fp16_causal_gqa_sm90", Shape(150, 140, 4, 1, head_dim_v=40), (1, 2, 4)),
    ("flash_bwd_hdim64_fp16_local_ordered_gqa_sm90", Shape(70, 300, 4, 2, window=(30, 0)), (1, 2)),
    ("flash_bwd_hdim192_128_bf16_causal_ordered_gqa_sm90", Shape(70, 100, 2, 1, batch=2), (1, 2)),
]


@pytest.mark.parametrize(("name", "shape", "counts"), CASES, ids=[name for name, *_ in CASES])
def test_within_the_bound(name, shape, counts, compiler, fresh_seed):
    for parts in counts:
        example, _ = simulated(name, shape, fresh_seed, parts)
        verdict = example.judge()
        assert verdict.ok, f"{name}, {shape}, {parts} parts: {verdict}"


@pytest.mark.parametrize("name", [AMPERE, HOPPER])
def test_parts_are_added_in_their_order(name, compiler, fresh_seed):
    """Also with several thread blocks at a time, so that dk and dv repeat to the bit."""
    parts, variant = 4, MAIN[name]
    shape = dataclasses.replace(SHAPE, head_dim=variant.head_dim, head_dim_v=variant.head_dim)
    example, arrays = simulated(name, shape, fresh_seed, parts, threads=3, order=1)
    scale = np.float32(example.problem.softmax_scale)
    for gradient, factor in (("dk", scale), ("dv", np.float32(1))):
        # Tiles of 16 rows by 8 columns: row g + 8 i, column 2 t + j is element (g, t, i, j).
        block_n = variant.tile_value("block_n")
        rows = -(-shape.seqlen_kv // block_n) * block_n
        left = arrays[f"{gradient}_parts"].view(np.float32)
        left = left.reshape(shape.batch, shape.kv_heads, parts, rows // 16, -1, 8, 4, 2, 2)
        left = left.transpose(2, 0, 3, 7, 5, 1, 4, 6, 8).reshape(parts, shape.batch, rows, shape.kv_heads, -1)
        total = np.zeros_like(left[0])
        for each in left:
            total += each
        expected = (total * factor)[:, : shape.seqlen_kv].astype(np.float16)
        assert np.array_equal(example.array(gradient), expected)


def test_dq_in_turns_repeats_to_the_bit(compiler, fresh_seed):
    """Also between numbers of parts: a query head's turns do not depend on them."""
    name = "flash_bwd_hdim64_fp16_local_ordered_gqa_sm90"
    shape = Shape(200, 330, 4, 1, window=(150, 20))
    sums = [
        simulated(name, shape, fresh_seed, parts, threads=threads, order=threads)[1]["dq_accum"].tobytes()
        for parts, threads in ((1, 1), (2, 3), (4, 2))
    ]
    assert sums[0] == sums[1] == sums[2]


def check_of(fault, source_of, seed):
    """The check that found something, thread blocks running one after the other, or None."""
    try:
        example, _ = simulated(fault.variant, SHAPE, seed, PARTS, order=seed, source_of=source_of)
    except SimulationError as error:
        return error.check
    return None if example.judge().ok else WRONG


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(fault, fault.sources, fixed_seed) in fault.caught


@pytest.mark.parametrize("fault", [FAULTS[0], FAULTS[2]], ids=["AMPERE", "HOPPER"])
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    for seed in range(fresh_seed, fresh_seed + 5):
        assert check_of(fault, render, seed) is None
