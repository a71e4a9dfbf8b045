"""Sequences whose keys begin after the first row, in the simulator: every family, and planted faults."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.schedule.plan import plan_steps
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from simulator.calls import check_on, first_check, main_kernels, with_fault
from simulator.edits import replace
from simulator.faults import BOUNDS, WRONG

MAIN = main_kernels(
    lambda spec: spec.operator.startswith("attention") and spec.has_lengths and "kv_starts" in spec.axes,
    kv_starts="starts",
)
MULTIPROCESSORS = 3

# Keys of several blocks; a group of heads that does not divide a tile.
PREFILL = Shape(40, 300, 6, 2, batch=4)
TOKENS = Shape(2, 2100, 6, 2, batch=3)
GRADIENTS = Shape(70, 200, 2, 1, batch=4)
CASES = (
    ("flash_fwd_varlen_hdim32_fp16_causal_starts_m64_packgqa_sm80", PREFILL),
    ("flash_fwd_varlen_hdim32_bf16_local_paged_starts_m64_gqa_sm80", PREFILL),
    ("flash_fwd_varlen_hdim32_fp16_dense_starts_sink_m64_gqa_sm80", PREFILL),
    ("flash_fwd_varlen_hdim32_fp32_paged_starts_packgqa_sm80", Shape(40, 90, 6, 2, batch=3)),
    ("flash_fwd_varlen_hdim32_fp16_causal_starts_gqa_sm90", PREFILL),
    ("flash_fwd_varlen_hdim64_bf16_local_starts_packgqa_sm90", PREFILL),
    ("flash_varlen_split_hdim64_bf16_causal_starts_gqa_sm90", Shape(40, 700, 4, 2, batch=3)),
    ("flash_varlen_decode_hdim32_fp16_paged_starts_packgqa_sm80", TOKENS),
    ("flash_varlen_decode_hdim32_bf16_local_fixed_starts_sink_packgqa_sm80", TOKENS),
    ("flash_varlen_decode_hdim32_fp16_dense_starts_packgqa_sm80", TOKENS),
    ("flash_varlen_decode_hdim32_fp16_starts_packgqa_sm90", TOKENS),
    ("flash_varlen_decode_hdim32_bf16_causal_paged_starts_packgqa_sm90", TOKENS),
    ("flash_bwd_varlen_hdim32_fp16_causal_starts_gqa_sm80", GRADIENTS),
    ("flash_bwd_varlen_hdim32_fp32_local_ordered_starts_gqa_sm80", GRADIENTS),
    ("flash_bwd_varlen_hdim32_bf16_causal_starts_gqa_sm90", GRADIENTS),
    ("flash_bwd_varlen_hdim64_fp16_local_ordered_starts_gqa_sm90", GRADIENTS),
    ("flash_bwd_varlen_hdim192_128_bf16_causal_starts_gqa_sm90", GRADIENTS),
    ("flash_bwd_varlen_hdim192_128_fp16_starts_pair_gqa_sm90", GRADIENTS),
)


def device_of(variant):
    """A GPU so small that few rows on many keys are split, and that thread blocks take several tiles."""
    gpu = hardware.pretend_for(variant)
    if not (variant.grid.shares or "tiles_by_keys" in variant.features):
        return gpu
    return dataclasses.replace(gpu, num_sms=MULTIPROCESSORS, smem_per_sm=variant.smem_bytes + 1024)


def step_names(variant, example):
    """The names of the steps of the call."""
    return [step.variant.step for step in plan_steps(example.problem, variant, device_of(variant)).steps]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    """Rows before a start are NaN, and entries of a page table for them are garbage."""
    variant = MAIN[name]
    for seed in (fresh_seed, fresh_seed + 1):
        example = make(variant, shape, seed)
        if variant.grid.shares:
            assert "combine" in step_names(variant, example)
        assert check_on(variant, example, seed, device=device_of(variant)) is None


ROWS, PAGES, SPLIT, PAGED_SPLIT = CASES[0], CASES[1], CASES[8], CASES[7]
HOPPER, CLUSTER, BACKWARD, HOPPER_BACKWARD = CASES[4], CASES[11], CASES[12], CASES[14]
START, BEGIN = "load_clamped(params.kv_starts, sequence, end)", "lengths.keys.begin"
FAULTS = {
    "the start of the first sequence": (*ROWS, "", START, "load_clamped(params.kv_starts, 0, end)"),
    "a start rounded down to a block": (*ROWS, "", START, f"{START} / kBlockN * kBlockN"),
    "a start that shortens nothing": (*ROWS, "", "return {begin, end - begin};", "return {begin, end};"),
    "a length without the start": (
        *HOPPER, "main", "return {begin, end - begin};", "return {0, end - begin};"),
    "pages from row 0": (*PAGES, "", f"own.kv_start = {BEGIN};", "own.kv_start = 0;"),
    "the mask from column 0": (*CASES[2], "", f"own.mask += {BEGIN};", ""),
    "a mask read in words": (*CASES[2], "", "own.mask_vector_width = 1;", ""),
    "a tile that is taken before the first one": (
        *HOPPER, "count", "store_global_32(params.tiles_taken, 0u);",
        "store_global_32(params.tiles_taken, 1u);"),
    "row blocks from the first key": (
        *HOPPER, "main", "row_block - __shfl_sync(0xffffffff, of_lane.begin, found)", "row_block"),
    "the first sequence of a row block alone": (*HOPPER, "main", "== of_number", "== 0"),
    "a start of a row that no sequence has": (
        *HOPPER, "main", "tile.first_key = keys.begin;", "tile.first_key = 0;"),
    "a split that begins below the start": (
        *SPLIT, "decode", "lengths.keys.begin * params.k_row_stride", "0 * params.k_row_stride"),
    "parts of other lengths are combined": (
        *SPLIT, "combine", "return {begin, end - begin};", "return {begin, end};"),
    "pages of a split from row 0": (
        *PAGED_SPLIT, "decode", "return fetch.place.lengths.keys.begin + fetch.first_key;",
        "return fetch.first_key;"),
    "pages of a cluster from row 0": (*CLUSTER, "", "return params.kv_start + key;", "return key;"),
    "gradients before the start stay": (
        *BACKWARD, "main", "return row < stored_rows ? row : row - stored_rows;",
        "return row < stored_rows ? row : row - 1;"),
    "gradients one start too early": (*BACKWARD, "main", "row += first_row_kv;", ""),
    "the keys of a gradient from row 0": (
        *BACKWARD, "main", "own.v += block.first_row_kv * params.v_row_stride;", ""),
    "a block of the table without its start": (
        *HOPPER_BACKWARD, "preprocess", "block.first_row_kv = keys_of(params, block.batch).begin;",
        "block.first_row_kv = 0;"),
    "gradients past the end on Hopper": (
        *HOPPER_BACKWARD, "main", "return row < stored_rows ? row : row - stored_rows;", "return row;"),
}  # fmt: skip
FOUND_BY = {WRONG, "race", "alignment", *BOUNDS}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, step, old, new = FAULTS[fault]
    variant = MAIN[name]
    planted = with_fault(
        lambda source: replace(source, old, new, fault), lambda of_step: of_step.step == step or not step
    )
    seeds = range(fixed_seed, fixed_seed + 6)
    check = first_check(variant, shape, seeds, planted, device=device_of(variant))
    assert check in FOUND_BY
