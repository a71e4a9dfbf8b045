"""Faults at the score seam: what the kernel's own text gets wrong about rows, heads, keys and order."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.simulator.example import Shape
from simulator.faults import BOUNDS, NUMBERS, Fault

# Beside the shipped ones: loads for each key, a formula that hides keys, one that would bring hidden keys
# back with a weight that shows; and one that gives later keys, and rows past the last, inf and NaN, in its
# derivative as well.
LINES = """\
scores:
  by_key:
    score: "score * gain[h] + bias[b, q, kv] + t[h, min(abs(q - kv), 9)] + s[kv]"
    params: {gain: [h, f32], bias: [b, q, kv, f32], t: [h, distance, f32], s: [kv, i32]}
  bounded: {score: "tanh(score)"}
  falls: {score: "score / max(q - kv + 1, 0) - log(abs(score)) / 100000"}
  hides: {score: "where(abs(kv - q) < n * 8 and score < gain, score, -inf)", params: {n: i32, gain: f32}}
"""

STAGES = "flash_fwd_hdim32_bf16_causal_m64_sm80"
PACKED = "flash_fwd_hdim32_fp16_m64_packgqa_sm80"
DENSE = "flash_fwd_hdim32_fp16_dense_m64_sm80"
TILES = "flash_fwd_hdim64_bf16_causal_m64_sm90"
TILES_PACKED = "flash_fwd_hdim64_fp16_causal_m64_packgqa_sm90"
TILES_DENSE = "flash_fwd_hdim64_bf16_dense_sm90"
OVERLAPPED = "flash_fwd_hdim64_fp16_sm90"

SHAPE = Shape(seqlen_q=70, seqlen_kv=150, heads=2, spread=2.0)
GROUPED = Shape(seqlen_q=50, seqlen_kv=150, heads=4, kv_heads=1, spread=2.0)


@dataclass(frozen=True)
class ScoreFault(Fault):
    """A fault of a kernel with a modification."""

    score: str = ""


def fault(name, variant, score, *texts, caught=NUMBERS, shape=None):
    shape = shape or (GROUPED if "gqa" in variant else SHAPE)
    edits = tuple(zip(texts[::2], texts[1::2], strict=True))
    return ScoreFault(name, variant, shape, caught, edits, 2, score)


MODIFY_SM80 = "    modify_scores(params, tile, scores, tile.first_row + row_in_tile, first_key, lane);\n"
MASK_SM80 = "    apply_mask(params, tile, scores, tile.first_row + row_in_tile, first_key, lane);\n"
MASK_DENSE = "    apply_mask(mask, scores, tile.first_row + row_in_tile, first_key, lane);\n"
ROWS_SM90 = "rows[1] = score_row_of(params, head, row + 8);"
POSITION = "row.q = query + params.seqlen_kv - params.seqlen_q;"
OFFSET_SM80 = "const ScoreOffset offset = offset_of_row(params, of_row, lane_key);"

FAULTS = (
    fault("modification left out", STAGES, "softcap", MODIFY_SM80, ""),
    fault("modification applied twice", STAGES, "softcap", MODIFY_SM80, MODIFY_SM80 * 2),
    fault("modification behind the mask", STAGES, "bounded", MODIFY_SM80 + MASK_SM80,
          MASK_SM80 + MODIFY_SM80),
    fault("modification behind a dense mask", DENSE, "bounded",
          MODIFY_SM80 + MASK_DENSE, MASK_DENSE + MODIFY_SM80),
    fault("scores scaled twice", STAGES, "alibi",
          "fmaf(product, params.softmax_scale,",
          "fmaf(product * params.softmax_scale, params.softmax_scale,"),
    fault("scores not scaled", STAGES, "alibi", "fmaf(product, params.softmax_scale,", "fmaf(product, 1.0f,"),
    fault("position of the query not aligned", STAGES, "alibi", POSITION, "row.q = query;"),
    fault("position a row late", STAGES, "alibi", POSITION, POSITION.replace("query +", "query + 1 +")),
    fault("offset left out", STAGES, "alibi", "return score + value;", "return score;"),
    fault("offset of the wrong row", STAGES, "alibi", OFFSET_SM80,
          "const ScoreOffset offset = offset_of_row(params, score_row_of(params, head, row ^ 8), lane_key);"),
    fault("offset of the block's first key", STAGES, "alibi", OFFSET_SM80,
          OFFSET_SM80.replace("lane_key", "first_key")),
    fault("step from key to key of the wrong sign", STAGES, "alibi", "* float(step)", "* -float(step)"),
    fault("head of packed rows wrong", PACKED, "alibi",
          "tile.head + row - query * params.group_size)", "tile.head)"),
    fault("row of packed rows taken for the query", PACKED, "alibi", ", query);\n}", ", row);\n}"),
    fault("slopes of another batch entry", STAGES, "alibi",
          "params.slope + b *", "params.slope + 0 *",
          shape=Shape(seqlen_q=40, seqlen_kv=90, heads=2, batch=2, spread=2.0)),
    fault("key behind the last one not clamped", STAGES, "by_key",
          "row.s + min(first_key + step, params.seqlen_kv - 1)", "row.s + first_key + step", caught=BOUNDS),
    fault("index of a table not clamped", STAGES, "by_key",
          "min(max(min(abs(row.q - (first_key + step)), 9), 0), params.t_distance - 1)", "10",
          caught=(*BOUNDS, *NUMBERS)),
    # Hopper.
    fault("modification left out on Hopper", TILES, "softcap", "            modify(scores, kv_block);\n", ""),
    fault("modification behind a dense mask on Hopper", TILES_DENSE, "bounded",
          "            modify(scores, masked.index);\n            masked.apply_mask(scores);\n",
          "            masked.apply_mask(scores);\n            modify(scores, masked.index);\n"),
    fault("second row takes what the first reads", TILES, "alibi", ROWS_SM90, "rows[1] = rows[0];"),
    fault("offsets of the two rows exchanged", TILES, "alibi",
          "score_rows.rows[i], lane_key)", "score_rows.rows[1 - i], lane_key)"),
    # In fp16, where a maximum that is too high takes P below its exponents; in bf16 it may do no harm.
    fault("offset of the block not added to the maximum", TILES_PACKED, "alibi",
          "__fmaf_ru(value, scale_log2, rows.offset[half])", "__fmul_ru(value, scale_log2)"),
    fault("offset of the block not subtracted", TILES, "alibi",
          "__fsub_ru(rows.row_max[0], rows.offset[0])", "rows.row_max[0]"),
    fault("head of packed rows wrong on Hopper", TILES_PACKED, "alibi",
          "tile.head + row - query * params.group_size)", "tile.head)"),
    fault("rows of the tile before", OVERLAPPED, "alibi_symmetric",
          "        score_rows = LaneScoreRows(params, tile, tile.first_row + warp_row + lane / 4);\n", "",
          shape=Shape(seqlen_q=500, seqlen_kv=150, heads=2, spread=2.0)),
)  # fmt: skip
