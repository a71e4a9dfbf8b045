"""attention_weights in the simulator: every variant, ragged tiles, rows that see nothing, planted faults."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.call.fields import PLAN_KEYWORDS
from flashgen.families.load import load_specs
from flashgen.families.scores import load_scores
from flashgen.simulator.example import Shape
from simulator.calls import check_of, with_fault
from simulator.faults import ASYNC, NUMBERS, WRONG, fault

VARIANTS = {
    variant.name: variant
    for spec in load_specs()
    if spec.operator == "attention_weights"
    for variant in spec.variants()
}
RAGGED = Shape(100, 150, heads=2, head_dim=72)
GROUPED = Shape(70, 131, heads=4, kv_heads=2, batch=2, head_dim=40)
LONG = Shape(40, 330, heads=1, head_dim=256, mask="k", mask_alignment=1)
FEW_KEYS = Shape(130, 45, heads=2, head_dim=8)  # under a diagonal the first rows see nothing
WIDE = Shape(64, 128, heads=2, head_dim=64, spread=8.0)
PLAIN = "attention_weights_hdim256_fp16_sm80"
CAUSAL = "attention_weights_hdim256_fp16_causal_sm80"
LOCAL = "attention_weights_hdim256_fp16_local_sm80"
DENSE = "attention_weights_hdim256_fp16_dense_sm80"
GQA = "attention_weights_hdim256_bf16_gqa_sm80"
FP32 = "attention_weights_hdim256_fp32_sm80"
STORE = "(step < end) store_global_32(row_weights + step, weight_of(params, score, lse_log2));"
FAULTS = (
    fault("the kv head of another group", GQA, GROUPED, NUMBERS,
          "tile.kv_head = tile.head / params.group_size;",
          "tile.kv_head = tile.head % (params.num_heads_q / params.group_size);"),
    fault("the query head as kv head", GQA, GROUPED, (WRONG, "global bounds", "uninitialised global memory"),
          "tile.kv_head = tile.head / params.group_size;", "tile.kv_head = tile.head;"),
    fault("keys past the last one stored", PLAIN, RAGGED, (WRONG, "race", "global bounds"),
          f"if {STORE}", STORE.replace("(step < end)", "if (row_weights != nullptr)")),
    fault("the diagonal one key late", CAUSAL, RAGGED, NUMBERS,
          "query + params.diagonal_offset + 1)", "query + params.diagonal_offset + 2)"),
    fault("a tail of keys not masked", LOCAL, RAGGED, NUMBERS,
          "if (step >= end) score = -INFINITY;", ""),
    fault("a window that begins late", LOCAL, RAGGED, NUMBERS,
          "max(0, diagonal - params.window_left)", "max(0, diagonal - params.window_left + 1)"),
    fault("the dense mask of the next row", DENSE, Shape(100, 150, heads=2, head_dim=72, mask="qk"),
          (WRONG, "global bounds", "uninitialised global memory"),
          "row_offset(params, tile, row, params.mask_row_stride, params.mask_head_stride)",
          "row_offset(params, tile, max(row, 1) - 1, params.mask_row_stride, params.mask_head_stride)"),
    fault("a row that sees nothing weighs", CAUSAL, FEW_KEYS, NUMBERS,
          "return score == -INFINITY ? 0.0f : weight > 1.0f ? 1.0f : weight;",
          "return lse_log2 == INFINITY ? 1.0f : weight > 1.0f ? 1.0f : weight;"),
    fault("the LSE of another row", PLAIN, RAGGED, NUMBERS,
          "head_of_batch * params.seqlen_q + row)", "head_of_batch * params.seqlen_q + max(row, 1) - 1)"),
    fault("the LSE of another head", PLAIN, RAGGED, (WRONG, "global bounds"),
          "int64_t(tile.batch) * params.num_heads_q + tile.head;",
          "int64_t(tile.batch) * params.num_heads_q;"),
    fault("the LSE in natural units", PLAIN, RAGGED, NUMBERS, "lse * kLog2e;", "lse;"),
    fault("blocks that no row sees not written", CAUSAL, RAGGED, NUMBERS,
          "store_weights(params, tile, scores, first_key, warp, lane);\n    }\n}",
          "if (is_seen) store_weights(params, tile, scores, first_key, warp, lane);\n    }\n}"),
    fault("dimensions past the head dim", PLAIN, Shape(70, 100, heads=2, head_dim=24),
          (WRONG, "global bounds", "uninitialised global memory"),
          "row < rows && chunk * kChunkDims < dims;", "row < rows;"),
    fault("the first slice alone", PLAIN, RAGGED, NUMBERS,
          "first_dim < params.head_dim;", "first_dim < kSliceDims;"),
    fault("a slice read before it is there", PLAIN, RAGGED, ASYNC, "cp_async_wait<0>();", ""),
    fault("the next slice over one that other warps read", PLAIN, RAGGED, ASYNC,
          "warp, lane);\n                barrier_sync(kThreads);", "warp, lane);"),
    fault("TF32 without the low part of k", FP32, WIDE, NUMBERS,
          "mma_m16n8k8_tf32(accumulator, a.high, b_low[0], b_low[1]);", ""),
)  # fmt: skip


def fitting(variant, shape):
    heads = {"heads": 4, "kv_heads": 2} if variant.gqa == "gqa" else {"kv_heads": None}
    return dataclasses.replace(shape, **heads)


@pytest.mark.parametrize("name", VARIANTS)
def test_within_the_bound(name, compiler, fresh_seed):
    variant = VARIANTS[name]
    for shape in (RAGGED, LONG, FEW_KEYS, WIDE):
        fits = fitting(variant, shape)
        assert check_of(variant, fits, fresh_seed) is None, fits


@pytest.mark.parametrize("score", ["softcap", "alibi", "alibi_symmetric", "bias"])
def test_score_modifications(score, compiler, fresh_seed):
    modification = load_scores(keywords=PLAN_KEYWORDS).by_name[score]
    for name in (GQA, CAUSAL, DENSE, FP32):
        variant = VARIANTS[name].modified(modification)
        assert check_of(variant, fitting(variant, RAGGED), fresh_seed) is None, name


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted, compiler, fixed_seed):
    variant = VARIANTS[planted.variant]
    found = check_of(variant, planted.shape, fixed_seed, with_fault(planted.plant))
    assert found in planted.caught


def test_without_them_nothing_is_found(compiler, fresh_seed):
    for name, shape in sorted({(x.variant, x.shape) for x in FAULTS}, key=str):
        assert check_of(VARIANTS[name], shape, fresh_seed) is None
