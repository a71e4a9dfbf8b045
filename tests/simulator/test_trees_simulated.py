"""Trees of drafts in the simulator: every family that takes caches, and planted faults."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.simulator.example import Shape, make
from simulator.calls import check_on, first_check, main_kernels, small_gpu_of_shares, with_fault
from simulator.edits import replace
from simulator.faults import BOUNDS, WRONG

MAIN = main_kernels(lambda spec: spec.operator == "attention" and spec.has_lengths, mask_type="tree")

# Words are random: drafts that do not see themselves, and bits of drafts that do not exist.
# Keys of several blocks, drafts in two of them; a group of heads that does not divide a tile.
DRAFTS = Shape(40, 300, 6, 2, batch=4)
FEW = Shape(11, 2100, 6, 2, batch=3)
WINDOW = dataclasses.replace(FEW, window=(25, 0))
CASES = (
    ("flash_fwd_varlen_hdim32_fp16_tree_m64_gqa_sm80", Shape(64, 300, 6, 2, batch=4)),
    ("flash_fwd_varlen_hdim32_bf16_tree_paged_starts_sink_packgqa_sm80", DRAFTS),
    ("flash_fwd_varlen_hdim32_fp32_tree_sm80", Shape(64, 90, 2, 2, batch=3)),
    ("flash_fwd_varlen_hdim32_fp16_tree_packgqa_sm90", DRAFTS),
    (
        "flash_fwd_varlen_hdim64_bf16_tree_paged_gqa_sm90",
        dataclasses.replace(DRAFTS, seqlen_q=64, window=(40, 0)),
    ),
    ("flash_varlen_split_hdim64_bf16_tree_packgqa_sm90", Shape(64, 700, 4, 2, batch=3)),
    ("flash_varlen_decode_hdim32_fp16_tree_packgqa_sm80", FEW),
    ("flash_varlen_decode_hdim64_bf16_tree_paged_fixed_starts_m32_packgqa_sm80", WINDOW),
    ("flash_varlen_decode_hdim32_bf16_tree_paged_packgqa_sm90", FEW),
    ("flash_varlen_decode_hdim64_fp16_tree_paged_e4m3_packgqa_sm80", FEW),
    ("flash_fwd_varlen_hdim32_bf16_tree_paged_e4m3_m64_packgqa_sm80", DRAFTS),
)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    variant = MAIN[name]
    for seed in (fresh_seed, fresh_seed + 1):
        assert (
            check_on(variant, make(variant, shape, seed), seed, device=small_gpu_of_shares(variant)) is None
        )


ROWS, HOPPER, SPLIT, DECODE, CLUSTER = CASES[0], CASES[4], CASES[5], CASES[6], CASES[8]
WORD, END = "min(query, params.seqlen_q - 1)", "8 * kKeyTiles <= params.seqlen_kv - params.seqlen_q"
FAULTS = {
    "the word of the first draft": (*ROWS, WORD, "0"),
    "words past the last draft": (*CASES[3], WORD, "query"),
    "the word of a row of packed heads": (*CASES[1], "query_of_row(params, row), lane_key", "row, lane_key"),
    "one key late": (*DECODE, "first_key + 64 * i - first_draft", "first_key + 64 * i - first_draft - 1"),
    "the upper half of a word is the lower": (*ROWS, "reinterpret_cast<const uint32_t*>(word) + 1", "word"),
    "drafts past a word are wrapped": (*SPLIT, "shift >= 64 || shift <= -64 ? 0 :", ""),
    "keys before the drafts are hidden": (*CLUSTER, "hidden << -shift", "~uint64_t(0)"),
    "bits are turned": (*HOPPER, ": hidden << -shift", ": hidden >> -shift"),
    "the block with the first draft is left out": (
        *ROWS, END, "params.seqlen_kv - params.seqlen_q - 1 + 0 * kKeyTiles"),
    "drafts begin where all sequences end": (
        *DECODE, "const int first_draft = params.seqlen_kv - params.seqlen_q;",
        "const int first_draft = params.seqlen_kv - 64;"),
    "the tree of sequence 0": (*DECODE, "own.tree += sequence * params.tree_batch_stride + first_query;", ""),
    "the tree of sequence 0 on Hopper": (
        *HOPPER, "sequence_params.tree += found.sequence * params.tree_batch_stride + found.first_query;",
        ""),
    "a half of the rows on Hopper": (
        *HOPPER, "half < 2; ++half) {\n        const int query",
        "half < 1; ++half) {\n        const int query"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, old, new = FAULTS[fault]
    variant = MAIN[name]
    planted = with_fault(lambda source: replace(source, old, new, fault))
    seeds = range(fixed_seed, fixed_seed + 6)
    check = first_check(variant, shape, seeds, planted, device=small_gpu_of_shares(variant))
    assert check in {WRONG, *BOUNDS}
