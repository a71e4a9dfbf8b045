"""Faults to plant into the kernels of naive and v1; see ``faults``."""

from simulator.faults import ASYNC, BOUNDS, NUMBERS, RAGGED, SHORT_HEAD, WIDE, WRONG, fault

SCORES = "naive_scores_hdim64_fp16_sm80"
CAUSAL_SCORES = "naive_scores_hdim64_fp16_causal_sm80"
SOFTMAX = "naive_softmax_hdim64_fp16_sm80"
OUTPUT = "naive_output_hdim64_fp16_sm80"
V1 = "flash_v1_hdim64_fp16_sm80"
CAUSAL_V1 = "flash_v1_hdim64_fp16_causal_sm80"

UNWRITTEN = ("uninitialised global memory",)

FAULTS = (
    # naive: S.
    fault("naive: causal diagonal one key late", CAUSAL_SCORES, RAGGED, NUMBERS,
          "query + params.diagonal_offset + 1)", "query + params.diagonal_offset + 2)"),
    fault("naive: keys past the last one not masked", SCORES, RAGGED, NUMBERS,
          "if (step >= end) score = -INFINITY;", ""),
    fault("naive: scores of a block that no row sees not written", CAUSAL_SCORES, RAGGED, NUMBERS,
          "        store_scores(params, tile, scores, first_key, warp, lane);\n    }\n\n    if",
          "    }\n\n    if"),
    fault("naive: next K into the block that other warps still read", SCORES, RAGGED, ASYNC,
          "barrier_sync(kThreads); finish_scores(params, tile, scores, warp * kWarpRows, first_key, lane);",
          "finish_scores(params, tile, scores, warp * kWarpRows, first_key, lane);"),
    fault("naive: K read before it is there", SCORES, RAGGED, ASYNC, "cp_async_wait<0>();", ""),
    fault("naive: rows of S closer than their keys", SCORES, RAGGED, (WRONG, "alignment", *UNWRITTEN),
          "return (params.seqlen_kv + 7) / 8 * 8;", "return params.seqlen_kv / 8 * 8;"),
    fault("naive: columns past the call's head_dim read", SCORES, SHORT_HEAD, BOUNDS,
          "row < rows && 8 * chunk < columns ? 16 : 0", "row < rows ? 16 : 0"),
    # naive: P.
    fault("naive: sum of half a warp", SOFTMAX, RAGGED, NUMBERS,
          "for (int step = 16; step > 0; step /= 2) value += ",
          "for (int step = 8; step > 0; step /= 2) value += "),
    fault("naive: P over S that another lane has yet to read", SOFTMAX, RAGGED, NUMBERS,
          "__syncwarp();  // P of the first lanes lies where other lanes have just read S", ""),
    fault("naive: LSE without the maximum", SOFTMAX, RAGGED, NUMBERS,
          "(row_max + log2_approx(row_sum)) * kLn2", "log2_approx(row_sum) * kLn2"),
    # naive: O.
    fault("naive: O divided by the sum of another row", OUTPUT, RAGGED, NUMBERS,
          "params.seqlen_q + row;", "params.seqlen_q + tile.first_row;"),
    fault("naive: rows past the last one stored", OUTPUT, RAGGED, (*BOUNDS, WRONG),
          "if (row >= params.seqlen_q) continue;", ""),
    fault("naive: V past the last key read", OUTPUT, RAGGED, BOUNDS,
          "seen_rows(params, first_key).end, params.head_dim_v", "kBlockN, params.head_dim_v"),
    fault("naive: halves of V's fragment swapped", OUTPUT, RAGGED, NUMBERS,
          "(output[i][n], p_fragment[i], v_fragment[0], v_fragment[1])",
          "(output[i][n], p_fragment[i], v_fragment[1], v_fragment[0])"),
    # v1.
    fault("v1: O not multiplied by its old sum", V1, RAGGED, NUMBERS,
          "scale_output(rows, [](float row_sum) { return row_sum; });", ""),
    fault("v1: O not rescaled", V1, WIDE, NUMBERS, "rows[i].output[n][2 * row8] *= correction;", ""),
    fault("v1: sum not rescaled", V1, WIDE, NUMBERS, "rows[i].row_sum[row8] *= correction;", ""),
    fault("v1: correction of the wrong sign", V1, WIDE, NUMBERS,
          "rescale_factor(previous, rows[i].row_max[row8])", "exp2_approx(rows[i].row_max[row8] - previous)"),
    fault("v1: next Q into the block that other warps still read", V1, RAGGED, ASYNC,
          "barrier_sync(kThreads); }", "}"),
    fault("v1: K, V and Q read before they are there", V1, RAGGED, ASYNC, "cp_async_wait<0>();", ""),
    fault("v1: sums read before the lane that stores them has", V1, RAGGED, UNWRITTEN,
          "barrier_sync(kThreads); for (int block = kv_blocks_of(params, 0, num_rows(params)).last;",
          "for (int block = kv_blocks_of(params, 0, num_rows(params)).last;"),
    fault("v1: a KV block too few", CAUSAL_V1, RAGGED, (WRONG, *ASYNC),
          "if (block > kv_blocks_of(params, tile.first_row, kBlockM).last) continue;",
          "if (block >= kv_blocks_of(params, tile.first_row, kBlockM).last) continue;"),
    fault("v1: O, l and m not initialised", V1, RAGGED, UNWRITTEN,
          "        clear(rows);\n        store_rows(params, tile, rows, warp, lane);\n",
          "        clear(rows);\n"),
    fault("v1: rows past the last one stored", V1, RAGGED, (*BOUNDS, WRONG),
          "if (row < num_rows(params)) at_row(row, rows[i], row8);", "at_row(row, rows[i], row8);"),
)  # fmt: skip
