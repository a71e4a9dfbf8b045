"""Sinks in the simulator: every family, forward and backward, and planted faults."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flashgen.schedule.plan import plan_steps
from flashgen.simulator.example import Shape, make
from simulator.calls import (
    check_on,
    main_kernels,
    simulated,
    small_gpu_of_shares,
    with_fault,
    within_the_bound,
)
from simulator.edits import replace
from simulator.faults import WRONG

MAIN = main_kernels(lambda spec: spec.operator.startswith("attention"))

# Rows that see nothing; ragged tiles, in groups that do not divide a tile; shares that end within tiles.
BLIND = Shape(100, 60, 6, 2)
FEW = Shape(3, 2500, 6, 2, batch=2)
SEQUENCES = Shape(40, 90, 6, 2, batch=5)
TOKENS = Shape(2, 2100, 6, 2, batch=3)
FORWARD = (
    ("flash_fwd_hdim32_fp16_causal_sink_m64_sm80", dataclasses.replace(BLIND, heads=2, kv_heads=2)),
    ("flash_fwd_hdim32_bf16_causal_sink_m64_packgqa_sm80", BLIND),
    ("flash_fwd_hdim32_fp16_dense_sink_m64_gqa_sm80", BLIND),
    ("flash_fwd_hdim32_fp32_local_sink_m64_packgqa_sm80", BLIND),
    ("flash_fwd_hdim256_fp16_causal_sink_gqa_sm80", Shape(70, 100, 2, 1)),
    ("flash_fwd_hdim64_fp16_causal_sink_m64_packgqa_sm90", Shape(50, 30, 8, 2)),
    ("flash_fwd_hdim64_bf16_sink_gqa_sm90", Shape(100, 130, 4, 2)),
    ("flash_fwd_varlen_hdim32_fp16_causal_sink_m64_packgqa_sm80", SEQUENCES),
    ("flash_fwd_varlen_hdim32_bf16_local_paged_sink_m64_gqa_sm80", SEQUENCES),
    ("flash_fwd_varlen_hdim32_fp16_causal_sink_gqa_sm90", SEQUENCES),
    ("flash_decode_hdim32_fp16_sink_packgqa_sm80", FEW),
    ("flash_decode_hdim64_bf16_local_sink_packgqa_sm80", dataclasses.replace(FEW, window=(2400, 0))),
    ("flash_varlen_decode_hdim32_fp16_paged_sink_packgqa_sm80", TOKENS),
    ("flash_varlen_decode_hdim32_bf16_fixed_sink_packgqa_sm80", TOKENS),
    ("flash_split_hdim64_fp16_causal_sink_gqa_sm90", Shape(70, 1700, 4, 2)),
    ("flash_varlen_split_hdim64_bf16_sink_gqa_sm90", Shape(40, 500, 4, 2, batch=3)),
)
# One sequence length, lengths; both targets; deterministic.
BACKWARD = (
    ("flash_bwd_hdim32_fp16_causal_gqa_sm80", dataclasses.replace(BLIND, sinks=True)),
    ("flash_bwd_hdim32_fp32_sm80", Shape(70, 90, 2, batch=3, sinks=True)),
    ("flash_bwd_hdim32_bf16_dense_ordered_gqa_sm80", dataclasses.replace(BLIND, sinks=True)),
    ("flash_bwd_hdim64_bf16_causal_gqa_sm90", dataclasses.replace(BLIND, sinks=True)),
    ("flash_bwd_hdim192_128_fp16_sm90", Shape(70, 90, 2, sinks=True)),
    ("flash_bwd_varlen_hdim32_fp16_causal_gqa_sm80", dataclasses.replace(SEQUENCES, sinks=True)),
    ("flash_bwd_varlen_hdim32_bf16_causal_gqa_sm90", dataclasses.replace(SEQUENCES, sinks=True)),
)


def steps_of(variant, example):
    """The names of the steps of the call."""
    return [
        step.variant.step for step in plan_steps(example.problem, variant, small_gpu_of_shares(variant)).steps
    ]


@pytest.mark.parametrize(("name", "shape"), FORWARD, ids=[name for name, _ in FORWARD])
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    example = make(MAIN[name], shape, fresh_seed)
    example.others["sinks"][0] = 0xFF80 if example.others["sinks"].dtype == np.uint16 else -np.inf
    simulated(MAIN[name], example, fresh_seed, device=small_gpu_of_shares(MAIN[name]))
    if MAIN[name].grid.shares:
        assert "combine" in steps_of(MAIN[name], example)
    assert example.judge().ok, f"{name}, {shape}: {example.judge()}"


@pytest.mark.parametrize("sink", [-200.0, 90.0])
def test_sinks_far_below_and_above_all_scores(sink, compiler, fresh_seed):
    name, shape = FORWARD[1]
    example = make(MAIN[name], shape, fresh_seed)
    sinks = example.others["sinks"]
    sinks[...] = (
        np.full(sinks.shape, sink, np.float32).view(np.uint32) >> 16 if sinks.dtype == np.uint16 else sink
    )
    simulated(MAIN[name], example, fresh_seed)
    assert example.judge().ok, example.judge()


@pytest.mark.parametrize(("name", "shape"), BACKWARD, ids=[name for name, _ in BACKWARD])
def test_gradients_are_within_the_bound(name, shape, compiler, fresh_seed):
    example, _ = within_the_bound(MAIN[name], shape, fresh_seed)
    assert example.gradients == ("dq", "dk", "dv", "dsinks")
    assert "sinks" in steps_of(MAIN[name], example)


def test_a_call_without_sinks_has_no_step_of_them(fresh_seed):
    name, shape = BACKWARD[0]
    example = make(MAIN[name], dataclasses.replace(shape, sinks=False), fresh_seed)
    assert example.gradients == ("dq", "dk", "dv")
    assert "sinks" not in steps_of(MAIN[name], example)


PACKED, SPLIT, VARLEN_BACKWARD = FORWARD[1], FORWARD[10], BACKWARD[5]
FAULTS = {
    "counted in each part, and again where they are combined": (
        *SPLIT, "decode", "const float row_sum = quad_sum(rows[i].row_sum[row8]);",
        "const float row_sum = quad_sum(rows[i].row_sum[row8]) + rescale_factor(sink_of_row(params, tile, "
        "tile.first_row + first_row_of(warp) + kRowTileStep * i + 8 * row8 + lane / 4), "
        "rows[i].row_max[row8]);"),
    "not where parts are combined": (
        *SPLIT, "combine", "row_sum * rescale + rescale_factor(sink, larger)", "row_sum * rescale"),
    "left out of the maximum": (
        *PACKED, "", "const float larger = fmaxf(row_max, sink);", "const float larger = row_max;"),
    "scaled as scores are": (
        *PACKED, "", "load_sink(params, head) * (1.0f / kLn2)",
        "load_sink(params, head) * params.scale_log2"),
    "the head of the group for all of its rows": (
        *PACKED, "", "tile.head + some_row - query_of_row(params, some_row) * params.group_size",
        "tile.head"),
    "bfloat16 read as fp32": (*PACKED, "", "params.sink_bytes == 2", "params.sink_bytes == 3"),
    "O not rescaled": (*PACKED, "", "__fdividef(rescale, row_sum)", "__fdividef(1.0f, row_sum)"),
    "the gradient with the wrong sign": (
        *BACKWARD[0], "sinks", "params.dsinks + head, -sum", "params.dsinks + head, sum"),
    "the gradient without that of the LSE": (*BACKWARD[1], "preprocess", "sum - dlse", "sum"),
    "a reduction that misses its last rows": (
        *BACKWARD[1], "sinks", "row >= params.seqlen_q; row -=", "row >= params.seqlen_q - 9; row -="),
    "a reduction over the first sequence alone": (
        *BACKWARD[1], "sinks", "return sequence < params.batch_size;\n    }\n\n    // Where",
        "return sequence < 1;\n    }\n\n    // Where"),
    "a warp whose sum is lost": (*BACKWARD[0], "sinks", "lane < kWarps ?", "lane < 2 ?"),
    "packed sequences without units of their own": (
        *VARLEN_BACKWARD, "sinks", "(rows_before / kUnit + sequence) * kUnit;",
        "rows_before / kUnit * kUnit;"),
    "sums that are not awaited": (*BACKWARD[0], "sinks", "__syncthreads();", ""),
}  # fmt: skip
FOUND_BY = {WRONG, "race", "alignment", "global bounds", "uninitialised shared memory"}
# Where the fault needs certain sinks.
ABOVE = (
    "left out of the maximum",
    "O not rescaled",
    "counted in each part, and again where they are combined",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, step, old, new = FAULTS[fault]
    variant, checks = MAIN[name], set()
    planted = with_fault(
        lambda source: replace(source, old, new, fault), lambda of_step: of_step.step == step or not step
    )
    for seed in range(fixed_seed, fixed_seed + 6):
        example = make(variant, shape, seed)
        if fault in ABOVE:
            sinks = example.others["sinks"]
            value = 300.0 if "maximum" in fault else 8.0
            sinks[...] = np.float32(value).view(np.uint32) >> 16 if sinks.dtype == np.uint16 else value
        checks.add(check_on(variant, example, seed, planted, device=small_gpu_of_shares(variant)))
        if checks - {None}:
            break
    assert checks - {None} <= FOUND_BY
    assert checks - {None}
