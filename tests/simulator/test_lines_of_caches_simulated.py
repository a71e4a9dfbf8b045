"""Masks by a line beside lengths and caches in the simulator: every family that takes these, and planted
faults.
"""

import dataclasses

import pytest

from flashgen.call.mask import rule_of
from flashgen.families.load import load_specs
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import check_on, first_check
from simulator.edits import replace
from simulator.faults import BOUNDS, WRONG

MAIN = {
    variant.name: variant
    for spec in load_specs()
    if spec.operator == "attention" and spec.has_lengths
    for variant in spec.select(mask_type="local", kv_starts="none", head_dim=(32, 64))
    if variant.is_main and variant.line_seam
}

# Keys of several blocks; a group of heads that does not divide a tile.
CHUNKS = Shape(70, 300, 6, 2, batch=4)
FEW = Shape(5, 1100, 6, 2, batch=3)
WINDOW = dataclasses.replace(FEW, window=(700, 2))
CAUSAL = dataclasses.replace(CHUNKS, window=(-1, 0))
# By elements: of heads, of queries, of keys of a head, and by the number of the sequence.
BY_ALL = "(doc[b, q] == doc[b, kv] or kv < limit[b] + far[h] or of_head[h, kv % 7] > 1) and kv // 3 <= q + b"
BY_TOKEN = "doc[b, q] == doc[b, kv] and kv <= q"
BY_POSITION = "kv <= start[q] + 20 or last[b, kv] > q"
CASES = (
    ("flash_fwd_varlen_hdim32_fp16_local_m64_gqa_sm80", BY_ALL, CHUNKS),
    ("flash_fwd_varlen_hdim32_bf16_local_paged_sink_packgqa_sm80", BY_ALL, CAUSAL),
    ("flash_fwd_varlen_hdim32_fp32_local_sm80", "window_first", Shape(64, 90, 2, 2, batch=3)),
    ("flash_fwd_varlen_hdim32_fp16_local_packgqa_sm90", BY_ALL, CHUNKS),
    ("flash_fwd_varlen_hdim64_bf16_local_paged_gqa_sm90", "prefix_lm", CHUNKS),
    ("flash_fwd_varlen_hdim64_fp16_local_gqa_sm90", BY_POSITION, CAUSAL),
    ("flash_varlen_split_hdim64_bf16_local_packgqa_sm90", BY_TOKEN, Shape(64, 700, 4, 2, batch=3)),
    ("flash_varlen_decode_hdim32_fp16_local_packgqa_sm80", BY_ALL, FEW),
    ("flash_varlen_decode_hdim64_bf16_local_paged_fixed_m32_packgqa_sm80", BY_TOKEN, WINDOW),
    ("flash_varlen_decode_hdim32_bf16_local_paged_packgqa_sm90", BY_ALL, FEW),
    ("flash_varlen_decode_hdim64_fp16_local_paged_e4m3_packgqa_sm80", "padding", FEW),
    ("flash_fwd_varlen_hdim32_bf16_local_paged_e4m3_m64_packgqa_sm80", BY_TOKEN, CHUNKS),
)


def variant_of(name, line):
    return MAIN[name].lined(rule_of(line))


def device_of(variant):
    """A GPU so small that few rows on many keys are split."""
    gpu = hardware.pretend_for(variant)
    if not variant.grid.shares:
        return gpu
    return dataclasses.replace(gpu, num_sms=3, smem_per_sm=variant.smem_bytes + 1024)


@pytest.mark.parametrize(("name", "line", "shape"), CASES, ids=[name for name, _, _ in CASES])
def test_results_are_within_the_bound(name, line, shape, compiler, fresh_seed):
    variant = variant_of(name, line)
    for seed in (fresh_seed, fresh_seed + 1):
        assert check_on(variant, make(variant, shape, seed), seed, device=device_of(variant)) is None


ROWS, HOPPER, PACKED, SPLIT, DECODE, CLUSTER = (CASES[i] for i in (0, 5, 3, 6, 7, 9))
HEAD = "const int head = tile.head + row - query * params.group_size; const LineHead of_head"
HALF, LANE_KEY = "8 * (i % 2) + lane / 4);", "first_key + lane % 4 * 2"
END = "line_range(params, rows[i].head, rows[i].row); hidden[i] = bits_from(keys.end"
FAULTS = {
    "the row before": (*ROWS, "params, of_head, query)}", "params, of_head, max(0, query - 1))}"),
    "the first head of a group": (*PACKED, HEAD, "const int head = tile.head; const LineHead of_head"),
    "only even keys": (*ROWS, f"{LANE_KEY} + key / 2 * 8 + key % 2", f"{LANE_KEY} + key / 2 * 8"),
    "the first of two rows": (
        *DECODE,
        f"kRowTileStep * (i / 2) + {HALF}",
        "kRowTileStep * (i / 2) + lane / 4);",
    ),
    "the line of sequence 0": (*CLUSTER, "line_head(params, tile.batch, head,", "line_head(params, 0, head,"),
    "the first of two rows on Hopper": (
        *HOPPER,
        "rows[1].row, of_key)) hidden[1]",
        "rows[0].row, of_key)) hidden[1]",
    ),
    "keys of the first lane": (*SPLIT, f"{LANE_KEY} + key);", "first_key + key);"),
    "positions from the first key": (*DECODE, "params.seqlen_kv, 0, 0);", "params.seqlen_q, 0, 0);"),
    "tokens of the first sequence": (*DECODE, "own.mask_doc += lengths.keys.begin;", ""),
    "tokens of the first sequence on Hopper": (*SPLIT, "sequence_params.mask_doc += found.first_key;", ""),
    "the first KV block alone": (
        *CASES[11],
        "hide_by_line(params, tile, scores,",
        "if (first_key < 64) hide_by_line(params, tile, scores,",
    ),
    "a range that ends a key late": (*CASES[4], END, f"{END} + 1"),
    "a range from the first key": (*CASES[10], "step < begin || step >= end", "step >= end"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, line, shape, old, new = FAULTS[fault]
    variant = variant_of(name, line)

    def planted(step):
        return replace(render(step), old, new, fault) if step.is_main else render(step)

    seeds = range(fixed_seed, fixed_seed + 10)
    check = first_check(variant, shape, seeds, planted, device=device_of(variant))
    assert check in {WRONG, *BOUNDS}
