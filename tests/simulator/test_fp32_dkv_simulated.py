"""Gradients of keys and values in fp32, for sums over several calls, in the simulator, and planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.families.load import load_specs
from flashgen.simulator.example import Shape, make
from simulator.calls import check_of, simulated, with_fault
from simulator.edits import replace
from simulator.faults import BOUNDS, WRONG

MAIN = {
    variant.name.removeprefix("flash_bwd_varlen_hdim"): variant
    for spec in load_specs()
    if "dkv_dtype" in spec.axes
    for variant in spec.select(dkv_dtype="fp32dkv")
    if variant.is_main
}
# Each kernel that writes the gradients, head dims that fill no tile, sequences that fill no block of keys.
CASES = {
    "32_fp16_causal_fp32dkv_gqa_sm80": Shape(100, 150, 2, 1, batch=4),
    "64_bf16_ordered_fp32dkv_sm86": Shape(70, 140, 1, batch=3, head_dim=56, head_dim_v=40),
    "32_bf16_causal_fp32dkv_gqa_sm90": Shape(100, 150, 2, 1, batch=4, head_dim=24),
    "128_fp16_local_ordered_fp32dkv_gqa_sm90": Shape(100, 200, 2, 1, batch=3, window=(70, 20)),
    "128_bf16_causal_fp32dkv_gqa_sm90": Shape(100, 150, 2, 1, batch=3),
    "192_128_bf16_fp32dkv_gqa_sm90": Shape(100, 150, 2, 1, batch=3, head_dim=176, head_dim_v=120),
    "192_fp16_causal_fp32dkv_pair_gqa_sm90": Shape(100, 200, 2, 1, batch=3),
}
AMPERE, HOPPER = "32_fp16_causal_fp32dkv_gqa_sm80", "32_bf16_causal_fp32dkv_gqa_sm90"
FAULTS = {
    "rows of the next sequence": (AMPERE, "if (row >= valid_rows) break;", ""),
    "columns past the head": ("64_bf16_ordered_fp32dkv_sm86", "if (column >= columns) break;", ""),
    "dK without the scale": (AMPERE, "gradients.dk, params.softmax_scale,", "gradients.dk, 1.0f,"),
    "all warps write the columns of the first": (
        "64_bf16_ordered_fp32dkv_sm86",
        "column_of(n, kQueryWarps, part)",
        "column_of(n, kQueryWarps, 0)",
    ),
    "all blocks of keys in one place": (AMPERE, "+ block.first_key * params.dv_row_stride", ""),
    "rows of the next sequence on Hopper": (HOPPER, "if (stored >= rows) break;", ""),
    "columns past the head on Hopper": (HOPPER, "if (column >= columns) break;", ""),
    "dK without the scale on Hopper": (HOPPER, "dk, params.softmax_scale,", "dk, 1.0f,"),
    "eight rows twice on Hopper": (HOPPER, "first + 8 * row8;", "first;"),
    "both consumers write the rows of the first": (
        HOPPER,
        "const int row = block.first_key + first;\n    float* rows = params.dv",
        "const int row = block.first_key;\n    float* rows = params.dv",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_within_the_bound_of_fp32(name, compiler, fresh_seed):
    for seed in (fresh_seed, fresh_seed + 1):
        example = make(MAIN[name], CASES[name], seed)
        assert example.array("dk").dtype == example.array("dv").dtype == np.float32
        simulated(MAIN[name], example, seed)
        assert example.judge().ok, example.judge()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, old, new = FAULTS[fault]
    planted = with_fault(lambda source: replace(source, old, new, fault))
    checks = {check_of(MAIN[name], CASES[name], seed, planted) for seed in range(fixed_seed, fixed_seed + 4)}
    assert checks & {WRONG, "race", *BOUNDS}
