"""Masks by a line in the simulator: kernels of both families, forward and backward, with the steps that make
their lists, and planted faults.
"""

import dataclasses

import numpy as np
import pytest

from flashgen.call.mask import rule_of
from flashgen.families.load import load_specs
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import check_on, first_check, simulated
from simulator.edits import replace
from simulator.faults import WRONG

SPECS = load_specs()
MAIN = {
    variant.name: variant
    for spec in SPECS
    if "blocks" in spec.axes.get("mask_type", ())
    for variant in spec.variants()
    if variant.is_main and variant.line_seam
}
(LISTING,) = (spec.variants() for spec in SPECS if spec.name == "mask_lists_sm80")
# Ragged blocks of queries and keys; ranges beside the line.
WHOLE = Shape(200, 300, 4, 4, batch=2)
GROUPS = dataclasses.replace(WHOLE, kv_heads=2)
CAUSAL = dataclasses.replace(GROUPS, window=(-1, 0))
WINDOW = dataclasses.replace(GROUPS, window=(90, 20))
FEW = dataclasses.replace(WHOLE, batch=1, heads=2, kv_heads=2)
SHORT = Shape(70, 90, 4, 2, window=(-1, 0))
ARRAY, OF_ALL = "not hidden[b, h, q, kv]", "not hidden[q, kv]"
PADDED = "not hidden[b, kv]"
BY_HEAD = "kv <= q + far[h] and doc[b, kv] <= q"
RESULTS = (
    ("flash_fwd_hdim32_fp16_blocks_sm80", "documents", WHOLE),
    ("flash_fwd_hdim32_bf16_blocks_m64_gqa_sm80", BY_HEAD, CAUSAL),
    ("flash_fwd_hdim32_fp32_blocks_sink_m64_gqa_sm80", "window_global", WINDOW),
    ("flash_fwd_hdim32_fp16_blocks_gqa_sm80", ARRAY, WINDOW),
    ("flash_fwd_hdim64_fp16_blocks_sm90", "chunks", WHOLE),
    ("flash_fwd_hdim64_fp16_blocks_gqa_sm90", ARRAY, CAUSAL),
    ("flash_fwd_hdim128_bf16_blocks_sm90", OF_ALL, FEW),
    ("flash_fwd_hdim128_bf16_blocks_m192_sm90", "documents", WHOLE),
    ("flash_fwd_hdim64_bf16_blocks_n64_gqa_sm90", BY_HEAD, GROUPS),
    ("flash_fwd_hdim32_fp16_blocks_sink_m64_gqa_sm90", "prefix_lm", WINDOW),
    ("flash_fwd_hdim256_bf16_blocks_gqa_sm90", "neighbourhood", SHORT),
    ("flash_fwd_fp8_hdim128_e4m3_promoted_blocks_gqa_sm90", BY_HEAD, CAUSAL),
    ("flash_fwd_fp8_hdim256_e4m3_promoted_blocks_sm90", "documents", FEW),
    ("flash_fwd_fp8_hdim64_e4m3_promoted_blocks_m64_gqa_sm90", "prefix_lm", WINDOW),
    ("flash_bwd_hdim32_fp16_blocks_sm80", "documents", WHOLE),
    ("flash_bwd_hdim32_bf16_blocks_ordered_n64_gqa_sm80", BY_HEAD, CAUSAL),
    ("flash_bwd_hdim192_128_bf16_blocks_gqa_sm80", "image_spans", SHORT),
    ("flash_bwd_hdim32_fp16_blocks_n64_gqa_sm80", ARRAY, WHOLE),
    ("flash_bwd_hdim32_fp16_blocks_gqa_sm90", BY_HEAD, CAUSAL),
    ("flash_bwd_hdim64_fp16_blocks_gqa_sm90", ARRAY, CAUSAL),
    ("flash_bwd_hdim128_bf16_blocks_sm90", PADDED, FEW),
    ("flash_bwd_hdim64_bf16_blocks_ordered_sm90", "chunks", WHOLE),
    ("flash_bwd_hdim128_fp16_blocks_sm90", "documents_full", FEW),
    ("flash_fwd_hdim32_bf16_blocks_dropout_m64_gqa_sm80", BY_HEAD, CAUSAL),
    ("flash_fwd_hdim32_fp32_blocks_sink_dropout_gqa_sm80", "window_first", WINDOW),
    ("flash_fwd_hdim64_fp16_blocks_dropout_sm90", "documents", WHOLE),
    ("flash_fwd_hdim128_bf16_blocks_dropout_n64_gqa_sm90", ARRAY, CAUSAL),
    ("flash_bwd_hdim32_fp16_blocks_dropout_gqa_sm80", "documents", GROUPS),
    ("flash_bwd_hdim32_bf16_blocks_dropout_ordered_n64_gqa_sm80", BY_HEAD, CAUSAL),
    ("flash_bwd_hdim64_bf16_blocks_dropout_gqa_sm90", BY_HEAD, CAUSAL),
    ("flash_bwd_hdim96_fp16_blocks_dropout_ordered_sm90", "chunks", FEW),
    ("flash_bwd_hdim128_fp16_blocks_dropout_sm90", PADDED, FEW),
)


def variant_of(name, line, listing=LISTING):
    return MAIN[name].lined(rule_of(line), listing)


def device_of(variant):
    """A GPU so small that a thread block of a persistent grid takes several tiles."""
    gpu = hardware.pretend_for(variant)
    return dataclasses.replace(gpu, num_sms=3) if variant.grid.persistent else gpu


@pytest.mark.parametrize(("name", "line", "shape"), RESULTS, ids=lambda x: x if type(x) is str else "")
def test_results_are_within_the_bound(name, line, shape, compiler, fresh_seed):
    variant = variant_of(name, line)
    example = make(variant, shape, fresh_seed)
    simulated(variant, example, fresh_seed, device=device_of(variant))
    assert example.judge().ok, f"{variant}: {example.judge()}"


@pytest.mark.parametrize(
    "name", ["flash_fwd_hdim32_fp16_blocks_sm80", "flash_bwd_hdim64_bf16_blocks_ordered_sm90"]
)
def test_lists_of_the_host_give_the_same_bits(name, compiler, fresh_seed):
    results = []
    for listing in (LISTING, ()):
        variant = variant_of(name, "window_global", listing)
        example = make(variant, WHOLE, fresh_seed)
        simulated(variant, example, fresh_seed, device=device_of(variant))
        positions = example.problem.operator.arguments
        arrays = zip(positions, example.arrays, strict=True)
        results.append([x.tobytes() for argument, x in arrays if argument.is_output and x is not None])
    assert results[0] == results[1]


@pytest.mark.parametrize("fault", [None, ("params.num_tiles - 1)", "params.num_tiles)")])
def test_tiles_are_handed_out_in_each_call(fault, compiler, fresh_seed):
    variant = variant_of("flash_fwd_hdim64_fp16_blocks_sm90", "documents", ())
    example = make(variant, WHOLE, fresh_seed)
    arrays = dict(zip(example.problem.operator.positions, example.arrays, strict=True))
    table, text = arrays["block_indptr"].copy(), fault or ("\0", "")
    results = []
    for _ in range(2):  # as in replays of a graph, nothing writes to the table in between
        simulated(variant, example, fresh_seed, lambda x: render(x).replace(*text), device=device_of(variant))
        assert np.array_equal(arrays["block_indptr"], table) is (fault is None)
        results.append(arrays["out"].tobytes())
        if fault:
            return
    assert results[0] == results[1]


@pytest.mark.parametrize("fault", [None, ("index -= section * (next_long + left) * size;", "index = 0;")])
@pytest.mark.parametrize(
    "name", ["flash_bwd_hdim32_fp16_blocks_gqa_sm90", "flash_bwd_hdim64_bf16_blocks_sm90"]
)
def test_short_blocks_of_keys_go_a_few_heads_at_a_time(name, fault, compiler, fresh_seed):
    variant = variant_of(name, "documents")
    example = make(variant, dataclasses.replace(WHOLE, kv_heads=2 if "gqa" in name else 4), fresh_seed)
    few = "kMultiprocessors = 132;", "kMultiprocessors = 2;"  # so few that not all blocks are long

    def source(step):
        text = render(step).replace(*few)
        return replace(text, *fault, "places") if fault and step.is_main else text

    assert (check_on(variant, example, fresh_seed, source) is None) is (fault is None)


FWD80, FWD90, BWD80, BWD90 = (
    "flash_fwd_hdim32_bf16_blocks_m64_gqa_sm80",
    "flash_fwd_hdim64_bf16_blocks_n64_gqa_sm90",
    "flash_bwd_hdim32_bf16_blocks_n64_gqa_sm80",
    "flash_bwd_hdim32_fp16_blocks_gqa_sm90",
)
DROP_FWD80, DROP_FWD90, DROP_BWD80, DROP_BWD90 = (
    "flash_fwd_hdim32_bf16_blocks_dropout_m64_gqa_sm80",
    "flash_fwd_hdim64_bf16_blocks_dropout_n64_gqa_sm90",
    "flash_bwd_hdim32_bf16_blocks_dropout_n64_gqa_sm80",
    "flash_bwd_hdim32_fp16_blocks_dropout_gqa_sm90",
)
FAULTS = {
    "a partial block shown as a whole": (
        *(FWD80, "documents", "main"), "partial = next < 0;", "partial = false;"),
    "the line of the row before": (
        *(FWD80, "frames", "main"), "const LineRow of_row = line_row(params, head, row);",
        "const LineRow of_row = line_row(params, head, max(row - 1, 0));"),
    "one key for all of a lane": (
        *(FWD80, "frames", "main"), "line_key(params, head, lane_key + step)",
        "line_key(params, head, lane_key)"),
    "the line of the kv head": (
        *(FWD80, BY_HEAD, "main"), "line_head_of(params, tile.batch, tile.head)",
        "line_head_of(params, tile.batch, tile.kv_head)"),
    "the list of the kv head": (
        *(FWD80, BY_HEAD, "main"), "visits_of(params, tile.batch, tile.head,",
        "visits_of(params, tile.batch, tile.kv_head,"),
    "a range that ends a key early": (
        *(FWD80, "chunks", "main"), "ranges + 2 * i + 1)) - lane_key;",
        "ranges + 2 * i + 1)) - 1 - lane_key;"),
    "a first block shown as a whole": (
        *(FWD90, "documents", "main"),
        "kv_block = block_of_entry_at(params, entry, visits.last); by_line = entry < 0;",
        "kv_block = block_of_entry_at(params, entry, visits.last);"),
    "full and partial in the place of each other": (
        *(FWD90, "documents", "main"),
        "kv_block = block_of_entry_at(params, entry, visit); by_line = entry < 0;",
        "kv_block = block_of_entry_at(params, entry, visit); by_line = entry >= 0;"),
    "a range without its begin": (
        *(FWD90, "chunks", "main"), "ranges[i][range] = {int(load_global_32(of_row + 2 * range)),",
        "ranges[i][range] = {0,"),
    "the second of two ranges alone": (
        *(FWD90, "window_first", "main"), "hidden &= bits_from(", "hidden = bits_from("),
    "the ranges of the row before": (
        *(FWD90, "chunks", "main"), "min(first_row + lane / 4 + 8 * i, params.seqlen_q - 1)",
        "min(max(first_row + lane / 4 + 8 * i - 1, 0), params.seqlen_q - 1)"),
    "ranges where equal elements are apart": (
        *(FWD90, "documents", "main"), "ranges.ranges[0][0].begin == kByElement", "false"),
    "a list without its last block": (
        *(FWD90, "documents", "main"), "{{int(low.z), int(low.w) - 1},", "{{int(low.z), int(low.w) - 2},"),
    "blocks that the first rows see for all": (
        *(FWD90, "documents", "main"), "of_consumer[consumer] = of_group[consumer];",
        "of_consumer[consumer] = of_group[0];"),
    "a tile passed on without its batch entry": (
        *(FWD90, "documents", "main"), "tile.batch = int(of_tile.z);", "tile.batch = 0;"),
    # Without gridDim.x some tiles would be handed out again and again, and the kernel would not end.
    "a tile handed to nobody": (
        *(FWD90, "documents", "main"), "index = int(gridDim.x) + int(increment_and_wrap(",
        "index = int(gridDim.x) + 1 + int(increment_and_wrap("),
    "both rows of a lane in one": (
        *(FWD90, "frames", "main"), "if (!visible(params, head, rows[1], of_key)) of_some[1]",
        "if (!visible(params, head, rows[1], of_key)) of_some[0]"),
    "keys of the first 16 for all": (
        *(FWD90, "frames", "main"), "line_key_inside(params, head, lane_key + first, key)",
        "line_key_inside(params, head, lane_key, key)"),
    "a partial step shown as a whole": (
        *(BWD80, "documents", "main"), "step.partial = entry < 0;", "step.partial = false;"),
    "lists by keys without kinds": (
        *(BWD80, "documents", "lists"), "uint32_t(has_rule ? ~row_block : row_block)", "uint32_t(row_block)"),
    "ranges of keys without an end": (
        *(BWD80, "documents", "main"), "begin[i] <= step && step < end[i]", "begin[i] <= step"),
    "the line of the first head of a group": (
        *(BWD80, BY_HEAD, "main"), "line_head_of(params, block.batch, head_of(params, block, step))",
        "line_head_of(params, block.batch, kv_head_of(params, block))"),
    "the list by keys of the kv head": (
        *(BWD90, BY_HEAD, "main"), "block.group_part * params.heads_per_part; const int list",
        "kv_head_of(params, block); const int list"),
    "the line of the next query": (
        *(BWD90, "frames", "main"), "const int query = i / 2 * 8 + i % 2;",
        "const int query = i / 2 * 8 + 1 - i % 2;"),
    "a range for the other query of a pair": (
        *(BWD90, "window_first", "main"), "of_pair[(i * kRanges + range) / 2]",
        "of_pair[((1 - i) * kRanges + range) / 2]"),
    "the ranges of another step": (
        *(BWD90, "window_first", "main"), "kRangesOffset + ring.stage * kRangesBytes",
        "kRangesOffset + (ring.stage ^ 1) * kRangesBytes"),
    "ends of ranges exchanged": (
        *(BWD90, "window_first", "main"), "% 2 ? some.w : some.y);", "% 2 ? some.y : some.w);"),
    "the ranges of the first head": (
        *(BWD90, "kv <= q + far[h]", "main"), "head * params.block_indptr_head_stride",
        "0 * params.block_indptr_head_stride"),
    "the second key of a lane as the first": (
        *(BWD90, "frames", "main"), "if (!visible(params, head, row, keys[1]))",
        "if (!visible(params, head, row, keys[0]))"),
    "the bytes of the first head": (
        *(FWD80, ARRAY, "main"), "head.h * params.mask_hidden_head_stride",
        "0 * params.mask_hidden_head_stride"),
    "shown where the array hides": (*(FWD90, OF_ALL, "main"), "!(load_global_8(", "(load_global_8("),
    "the array of the row after": (
        *(BWD80, OF_ALL, "main"), "min(row.query, head.seqlen_q - 1)",
        "min(row.query + 1, head.seqlen_q - 1)"),
    "the array of the first batch entry": (
        *(BWD90, ARRAY, "main"), "head.b * params.mask_hidden_batch_stride",
        "0 * params.mask_hidden_batch_stride"),
    "scores dropped by the place in the list": (
        *(DROP_FWD80, "documents", "main"), "first_row_of(warp), block * kBlockN); };",
        "first_row_of(warp), (visits.last - block) * kBlockN); };"),
    "scores dropped as of the first KV block": (
        *(DROP_FWD90, "documents", "main"), "params.dropout_row + first_row, kv_block * kBlockN); if (moved)",
        "params.dropout_row + first_row, 0); if (moved)"),
    "scores dropped by the number of the step": (
        *(DROP_BWD80, "documents", "main"), "params.dropout_row + first_query + warp_query,",
        "params.dropout_row + left * kBlockM + warp_query,"),
    "scores dropped as of the first queries": (
        *(DROP_BWD90, BY_HEAD, "main"), "params.dropout_row + step.block * kBlockM,", "params.dropout_row,"),
    "the lists of an earlier call": (*(FWD80, "documents", "main"), "griddepcontrol_wait();", ""),
}  # fmt: skip
FOUND_BY = {WRONG, "race", "deadlock", "global bounds", "uninitialised global memory", "dependency"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, line, step, old, new = FAULTS[fault]
    variant = variant_of(name, line)

    def planted(of_step):
        is_it = of_step.is_main if step == "main" else of_step.step == step
        return replace(render(of_step), old, new, fault) if is_it else render(of_step)

    seeds = range(fixed_seed, fixed_seed + 30)
    check = first_check(variant, GROUPS, seeds, planted, device=device_of(variant))
    assert check in FOUND_BY
