"""Masks by a line beside lengths and caches in the simulator: every family that takes these, and planted
faults.
"""

import dataclasses

import numpy as np
import pytest

from flashgen.call.mask import rule_of
from flashgen.operators.rules import RuleOfCall
from flashgen.operators.sequences import sequences
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import check_on, first_check, main_kernels, simulated
from simulator.edits import replace
from simulator.faults import BOUNDS, WRONG

MAIN = main_kernels(
    lambda spec: spec.operator == "attention" and spec.has_lengths,
    lambda variant: variant.line_seam and dict(variant.axes).get("kv_starts", "none") == "none",
    mask_type="local",
    head_dim=(32, 64),
)

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
    ("flash_varlen_decode_hdim32_bf16_local_paged_packgqa_sm90", BY_TOKEN, FEW),
    ("flash_fwd_varlen_hdim32_fp16_local_m64_gqa_sm80", BY_TOKEN, CHUNKS),
    ("flash_fwd_varlen_hdim64_bf16_local_paged_gqa_sm90", BY_TOKEN, CHUNKS),
    ("flash_fwd_varlen_hdim64_bf16_local_paged_e4m3_gqa_sm90", BY_TOKEN, CHUNKS),
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


# Keys that no query sees, said by numbers and by an array, and those in KV blocks of which no query sees any.
HOLE, WHOLE_BLOCKS = (200, 900), slice(328, 768)
BY_NUMBERS, BY_ARRAY = "(kv < first or kv >= last) and kv <= q", "far[kv] <= q and kv <= q"
SKIPPING = (
    ("flash_fwd_varlen_hdim32_fp16_local_m64_gqa_sm80", CHUNKS),
    ("flash_fwd_varlen_hdim64_fp16_local_e4m3_m64_packgqa_sm80", CHUNKS),
    ("flash_fwd_varlen_hdim32_fp16_local_packgqa_sm90", CHUNKS),
    ("flash_fwd_varlen_hdim64_fp16_local_m64_gqa_sm90", CHUNKS),
    ("flash_varlen_split_hdim64_fp16_local_packgqa_sm90", CHUNKS),
    ("flash_varlen_decode_hdim32_fp16_local_packgqa_sm80", FEW),
    ("flash_varlen_decode_hdim32_fp16_local_packgqa_sm90", FEW),
)


def with_hole(variant, line, shape, seed):
    """An example whose mask hides `HOLE`, and the keys and values of `WHOLE_BLOCKS`."""
    shape = dataclasses.replace(shape, seqlen_kv=1100)
    example = make(variant, shape, seed)
    if line == BY_ARRAY:
        far = example.others["mask_far"]
        far[...] = 0
        far[slice(*HOLE)] = 10**6
    else:
        rule = RuleOfCall(example.problem.rule.rule, HOLE)
        example = dataclasses.replace(example, problem=dataclasses.replace(example.problem, rule=rule))
    parts = sequences(example.problem, example.lengths)
    return example, [part.keys(x)[WHOLE_BLOCKS] for part in parts for x in (example.k, example.v)]


@pytest.mark.parametrize("line", [BY_NUMBERS, BY_ARRAY])
@pytest.mark.parametrize(("name", "shape"), SKIPPING, ids=[name for name, _ in SKIPPING])
def test_hidden_blocks_are_not_read(name, shape, line, compiler, fresh_seed):
    variant = variant_of(name, line)
    example, hidden = with_hole(variant, line, shape, fresh_seed)
    for x in hidden:
        x.view(np.uint8)[...] = 0xFF  # NaN
    simulated(variant, example, fresh_seed, device=device_of(variant))
    for x in hidden:
        x.view(np.uint8)[...] = 0
    assert example.judge().ok, f"{variant}: {example.judge()}"


ROWS, HOPPER, PACKED, SPLIT, DECODE, CLUSTER = (CASES[i] for i in (0, 5, 3, 6, 7, 9))
HEAD = "const int head = tile.head + row - query * params.group_size; const LineHead of_head"
HALF, LANE_KEY = "8 * (i % 2) + lane / 4);", "first_key + lane % 4 * 2"
END = "line_range(params, rows[i].head, rows[i].row); hidden[i] = bits_from(keys.end"
SEEK = "fetch = seek(of_sequence(params, place.sequence, place.lengths), place, fetch.index, group);"
FAULTS = {
    "the row before": (*ROWS, "params, of_head, query)}", "params, of_head, max(0, query - 1))}"),
    "the first head of a group": (*PACKED, HEAD, "const int head = tile.head; const LineHead of_head"),
    "only even keys": (*ROWS, f"{LANE_KEY} + key / 2 * 8 + key % 2", f"{LANE_KEY} + key / 2 * 8"),
    "the first of two rows": (
        *DECODE, f"kRowTileStep * (i / 2) + {HALF}", "kRowTileStep * (i / 2) + lane / 4);"),
    "the line of sequence 0": (*CLUSTER, "line_head(params, tile.batch, head,", "line_head(params, 0, head,"),
    "the first of two rows on Hopper": (
        *HOPPER, "rows[1].row, of_key)) of_some[1]", "rows[0].row, of_key)) of_some[1]"),
    "keys of the first lane": (*SPLIT, f"lane_key = {LANE_KEY};", "lane_key = first_key;"),
    "positions from the first key": (*DECODE, "params.seqlen_kv, 0, 0);", "params.seqlen_q, 0, 0);"),
    "tokens of the first sequence": (*DECODE, "own.mask_doc += lengths.keys.begin;", ""),
    "tokens of the first sequence on Hopper": (*SPLIT, "sequence_params.mask_doc += found.first_key;", ""),
    "the first KV block alone": (
        *CASES[11], "hide_by_line(params, tile, scores,",
        "if (first_key < 64) hide_by_line(params, tile, scores,"),
    "a block taken for the one after": (*CASES[8], "fetch.seen >> (kStages - 1) & 1", "fetch.seen & 1"),
    "the rows of the tile before": (
        *CASES[8], f"{SEEK} fetch.seen = before; note_rows(params, fetch);",
        f"const RowsOfLine of_rows = fetch.of_rows; {SEEK} fetch.seen = before; fetch.of_rows = of_rows;"),
    "blocks that the first row sees": (
        *CASES[12], "rows_of_line(params, start.tile, start.tile.first_row, kBlockM);",
        "rows_of_line(params, start.tile, start.tile.first_row, 1);"),
    "the least element of keys as the largest": (
        *SPLIT, "keys.doc_high = kLanes == 32 ? warp_largest(doc_high) : doc_high;",
        "keys.doc_high = keys.doc_low;"),
    "full blocks without their rows": (
        *CASES[13], "doc_high = max(doc_high, element); } of_rows.rows.doc_low", "} of_rows.rows.doc_low"),
    "a run without its other blocks": (*CASES[13], "run.first = next; } main_loop", "} main_loop"),
    "blocks of a full run in a partial one": (
        *CASES[13], "visited.by_line = next < blocks.first || seen_blocks.may_hide(next);",
        "visited.by_line = false;"),
    "a partial block shown as a whole": (
        *CASES[14], "full >> (newest - block) & 1", "seen >> (newest - block) & 1"),
    "runs without their last block": (
        *CASES[13], "if (next < blocks.first) run.last = next - 1;", "run.last = next - 1;"),
    "blocks that a producer takes and consumers do not": (
        *SPLIT, "kv_block = seen_blocks.before(of_tile, tile_of_sequence, kv_block)) {", "--kv_block) {"),
    "a range that ends a key late": (*CASES[4], END, f"{END} + 1"),
    "a range from the first key": (*CASES[10], "step < begin || step >= end", "step >= end"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, line, shape, old, new = FAULTS[fault]
    variant = variant_of(name, line)

    def planted(step):
        return replace(render(step), old, new, fault) if step.is_main else render(step)

    seeds = range(fixed_seed, fixed_seed + 10)
    check = first_check(variant, shape, seeds, planted, device=device_of(variant))
    assert check in {WRONG, "race", "deadlock", *BOUNDS}
