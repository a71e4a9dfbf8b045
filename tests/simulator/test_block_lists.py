"""Lists of key blocks in the simulator: kernels of both families, forward and backward, lists that are none,
and planted faults.
"""

import dataclasses

import numpy as np
import pytest

from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from simulator.calls import first_check, main_kernels, simulated, with_fault
from simulator.edits import replace
from simulator.faults import WRONG

MAIN = main_kernels(
    lambda spec: spec.operator.startswith("attention") and "blocks" in spec.axes.get("mask_type", ()),
    lambda variant: variant.mask_type == "blocks",
)
# Ragged blocks of queries and keys; ranges beside lists; the last 128 keys have one block of 64.
WHOLE = Shape(200, 300, 4, 4, batch=2)
GROUPS = dataclasses.replace(WHOLE, kv_heads=2)
CAUSAL = dataclasses.replace(GROUPS, window=(-1, 0))
WINDOW = dataclasses.replace(GROUPS, window=(90, 20))
SHORT = Shape(70, 90, 4, 2, window=(-1, 0))
FORWARD = (
    ("flash_fwd_hdim32_fp16_blocks_sm80", WHOLE),
    ("flash_fwd_hdim32_bf16_blocks_m64_gqa_sm80", CAUSAL),
    ("flash_fwd_hdim32_fp32_blocks_sink_m64_gqa_sm80", WINDOW),
    ("flash_fwd_hdim256_fp16_blocks_gqa_sm86", SHORT),
    ("flash_fwd_hdim64_fp16_blocks_sm90", WHOLE),
    ("flash_fwd_hdim64_bf16_blocks_n64_gqa_sm90", CAUSAL),
    ("flash_fwd_hdim32_fp16_blocks_sink_m64_gqa_sm90", WINDOW),
    ("flash_fwd_hdim256_bf16_blocks_gqa_sm90", SHORT),
)
BACKWARD = (
    ("flash_bwd_hdim32_fp16_blocks_sm80", WHOLE),
    ("flash_bwd_hdim32_bf16_blocks_n64_gqa_sm80", CAUSAL),
    ("flash_bwd_hdim32_fp16_blocks_ordered_n64_gqa_sm86", dataclasses.replace(WINDOW, sinks=True)),
    ("flash_bwd_hdim64_fp32_blocks_ordered_sm80", dataclasses.replace(WHOLE, batch=1, heads=2, kv_heads=2)),
    ("flash_bwd_hdim192_128_bf16_blocks_gqa_sm80", SHORT),
    ("flash_bwd_hdim32_fp16_blocks_gqa_sm90", CAUSAL),
    ("flash_bwd_hdim64_bf16_blocks_ordered_sm90", WHOLE),
    ("flash_bwd_hdim96_bf16_blocks_ordered_gqa_sm90", SHORT),
    ("flash_bwd_hdim128_fp16_blocks_sm90", dataclasses.replace(WHOLE, batch=1, heads=2, kv_heads=2)),
)


def device_of(variant):
    """A GPU so small that a thread block of a persistent grid takes several tiles."""
    gpu = hardware.pretend_for(variant)
    return dataclasses.replace(gpu, num_sms=3) if variant.grid.persistent else gpu


@pytest.mark.parametrize(("name", "shape"), [*FORWARD, *BACKWARD], ids=lambda x: x if type(x) is str else "")
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    example = make(MAIN[name], shape, fresh_seed)
    simulated(MAIN[name], example, fresh_seed, device=device_of(MAIN[name]))
    assert example.judge().ok, f"{name}, {example.problem.block_lists}: {example.judge()}"


def test_a_list_with_more_tiles_than_a_thread_block_of_order_has_threads(compiler, fresh_seed):
    main = MAIN["flash_fwd_hdim32_fp16_blocks_m64_gqa_sm90"]
    (order,) = main.before
    covers = tuple((name, 32 * 64 if name == "query_rows" else extent) for name, extent in order.grid.covers)
    order = dataclasses.replace(order, threads=32, smem_bytes=128, grid=order.grid._replace(covers=covers))
    variant = dataclasses.replace(main, before=(order,))
    example = make(variant, Shape(64 * 70 + 5, 128, 2, 1, block=(64, 64)), fresh_seed)
    simulated(variant, example, fresh_seed, device=device_of(variant))
    assert example.judge().ok, example.judge()


@pytest.mark.parametrize("name", ["flash_bwd_hdim32_bf16_blocks_ordered_n64_gqa_sm80", BACKWARD[6][0]])
def test_gradients_in_order_repeat_to_the_bit(name, compiler, fresh_seed):
    results = []
    for order in (fresh_seed, fresh_seed + 1):
        example = make(MAIN[name], GROUPS if MAIN[name].gqa == "gqa" else WHOLE, fresh_seed)
        simulated(MAIN[name], example, order)
        results.append([example.array(gradient).copy() for gradient in example.gradients])
    for first, second in zip(*results, strict=True):
        assert first.tobytes() == second.tobytes()


# Kernels check no list, but whatever lists hold, they stay within the arrays, and end.
@pytest.mark.parametrize(
    "name",
    [
        "flash_fwd_hdim32_bf16_blocks_m64_gqa_sm80",
        "flash_fwd_hdim64_bf16_blocks_n64_gqa_sm90",
        "flash_bwd_hdim32_bf16_blocks_n64_gqa_sm80",
        "flash_bwd_hdim32_fp16_blocks_gqa_sm90",
    ],
)
@pytest.mark.parametrize("array", ["block_indptr", "block_indices"])
def test_lists_that_are_none_touch_no_other_memory(name, array, compiler, fresh_seed):
    example = make(MAIN[name], GROUPS, fresh_seed)
    arrays = dict(zip(example.problem.operator.positions, example.arrays, strict=True))
    lists = arrays[array]
    rng = np.random.default_rng(fresh_seed)
    lists[...] = rng.integers(-9, 40, lists.shape)
    extremes = np.array([1 << 30, -(1 << 31), (1 << 31) - 1], np.int32)
    lists[rng.random(lists.shape) < 0.3] = extremes[rng.integers(3)]
    simulated(MAIN[name], example, fresh_seed)


FWD80, FWD90, FWD90_ONE, BWD80, BWD80_ORDERED = (
    "flash_fwd_hdim32_bf16_blocks_m64_gqa_sm80",
    "flash_fwd_hdim64_bf16_blocks_n64_gqa_sm90",
    "flash_fwd_hdim32_fp16_blocks_m64_gqa_sm90",
    "flash_bwd_hdim32_bf16_blocks_n64_gqa_sm80",
    "flash_bwd_hdim32_bf16_blocks_ordered_n64_gqa_sm80",
)
WIDE, SQUARE = dataclasses.replace(GROUPS, block=(64, 128)), dataclasses.replace(GROUPS, block=(64, 64))
TALL = dataclasses.replace(GROUPS, block=(128, 64))
FAULTS = {
    "the last entry left out": (
        FWD80, SQUARE, "", "(entries.end << visits_log2(params)) - 1",
        "((entries.end - 1) << visits_log2(params)) - 1"),
    "the first entry left out": (
        FWD80, SQUARE, "", "{entries.begin << visits_log2(params),",
        "{(entries.begin + 1) << visits_log2(params),"),
    "the list of the query head": (
        FWD80, SQUARE, "", "visits_of(params, tile.batch, tile.kv_head,",
        "visits_of(params, tile.batch, tile.head,"),
    "the list of the block of queries before": (
        FWD80, SQUARE, "", "const int row_block = first_row >> params.block_rows_log2;",
        "const int row_block = max(0, first_row - 64) >> params.block_rows_log2;"),
    "one KV block for an entry of two": (
        FWD80, WIDE, "", "<< visits_log2(params)) + within;", "<< visits_log2(params));"),
    "an empty list that skips a barrier": (FWD80, SQUARE, "", "} else { barrier_sync(kThreads);", "} else {"),
    "the block of the diagonal left out": (
        FWD80, dataclasses.replace(SQUARE, window=(-1, 0)), "",
        "(keys.end + block_keys - 1) >> params.block_keys_log2", "keys.end >> params.block_keys_log2"),
    "a tile that visits the blocks of fewer rows": (
        FWD90, dataclasses.replace(GROUPS, window=(20, 0), block=(128, 64)), "order",
        "min(tile, num_tiles - 1) * kBlockM, kBlockM);", "min(tile, num_tiles - 1) * kBlockM, 1);"),
    "a tile without its rows": (
        FWD90, TALL, "main", "tile.first_row = int(of_tile.w);", "tile.first_row = 0;"),
    "a tile for nobody": (
        FWD90, TALL, "main", "index = int(gridDim.x) +", "index = int(gridDim.x) + 1 +"),
    "a counter that is not 0 at first": (
        FWD90, TALL, "order", "store_global_32(params.tile_order, 0)",
        "store_global_32(params.tile_order, 1)"),
    "two tiles at one place": (
        FWD90, TALL, "order", "length + (first + i + j <= tile)", "length + 1"),
    "the table of the query head": (
        FWD90, TALL, "main", "list_of(params, tile.batch, tile.kv_head)",
        "list_of(params, tile.batch, tile.head)"),
    "the order of another head": (
        FWD90, TALL, "order", "list - batch * params.block_indptr_num_heads;", "0;"),
    "a table that is not written yet": (FWD90, TALL, "main", "griddepcontrol_wait();", ""),
    "an empty list that keeps Q": (
        FWD90_ONE, SQUARE, "main", "if (!visible) release(shared.q_empty(q_ring.stage));", ""),
    "an entry missing by keys": (
        BWD80, SQUARE, "lists", "place < entries.end && listed_block",
        "place < entries.end - 1 && listed_block"),
    "lists by keys that overlap": (
        BWD80, SQUARE, "lists", "column.kv_head, 0) + warp_sum(before)", "column.kv_head, 0) + before"),
    "the lists by keys of the query head": (
        BWD80, SQUARE, "main", "> 1 ? kv_head_of(params, block) : 0;",
        "> 1 ? first_head_of(params, block) : 0;"),
    "the lists of an earlier call": (BWD80, SQUARE, "main", "griddepcontrol_wait();", ""),
    "turns that count entries": (
        BWD80_ORDERED, WIDE, "lists", "return count * of_block - (has_last ? missing : 0);", "return count;"),
    "turns of thread blocks past the last key": (
        BWD80_ORDERED, WIDE, "lists", "return count * of_block - (has_last ? missing : 0);",
        "return count * of_block;"),
}  # fmt: skip
FOUND_BY = {
    WRONG,
    "race",
    "deadlock",
    "global bounds",
    "uninitialised shared memory",
    "uninitialised global memory",
    "dependency",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, step, old, new = FAULTS[fault]
    variant = MAIN[name]
    planted = with_fault(
        lambda source: replace(source, old, new, fault), lambda of_step: of_step.step == step or not step
    )
    seeds = range(fixed_seed, fixed_seed + 8)
    check = first_check(variant, shape, seeds, planted, device=device_of(variant))
    assert check in FOUND_BY
