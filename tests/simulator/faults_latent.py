"""Faults to plant into the kernels that decode in latent space: in the exchange between the two consumers, in
the groups of columns, in what is masked and cleared; in the gathering of small pages; in q of two arrays;
and, with mma.sync, between the warps.
"""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, BOUNDS, NUMBERS, RACE, WRONG, fault

ROWS = "flash_mla_decode_hdim576_512_bf16_packgqa_sm90"
CAUSAL = "flash_mla_decode_hdim576_512_fp16_causal_packgqa_sm90"
PAGED = "flash_mla_decode_hdim576_512_bf16_paged_packgqa_sm90"
BLOCKS = "flash_mla_wide_hdim576_512_fp16_causal_paged_packgqa_sm90"
GATHER = "flash_mla_gather_hdim576_512_bf16_causal_paged_packgqa_sm90"
ROPE = "flash_mla_decode_hdim576_512_bf16_paged_rope_packgqa_sm90"
MMA_ROPE = "flash_mla_decode_hdim576_512_fp16_causal_rope_packgqa_sm80"
MMA = "flash_mla_decode_hdim576_512_bf16_packgqa_sm80"
MMA_PAGED = "flash_mla_decode_hdim576_512_fp16_causal_paged_packgqa_sm86"

# Of three multiprocessors each has several KV blocks of several tiles, and some tiles are split.
MANY = Shape(2, 700, heads=40, batch=3)
# Scores of a standard deviation of 8, so that row_max moves.
WIDE = Shape(2, 700, heads=40, batch=3, spread=8.0)
# A sequence for each thread block: no tile is split.
WHOLE = Shape(1, 200, heads=24, batch=3, spread=8.0)
DRAFTS = Shape(5, 300, heads=16, batch=3)
# Empty sequences of two tiles between others.
SHORT = Shape(1, 130, heads=80, batch=8)
NARROW = Shape(1, 300, heads=16, batch=2, head_dim=328, head_dim_v=264)
# Two sets of heads read the same keys, so memory does not limit.
SETS = Shape(2, 700, heads=128, batch=2)
# A tile of two rows that eleven thread blocks combine.
ROWS_OF_MANY = Shape(1, 1500, heads=2)

LOST = (*ASYNC, "deadlock", "mbarrier", "proxy", WRONG)

FAULTS = (
    # Q.
    fault("Q is not waited for", ROWS, MANY, (*ASYNC, "proxy", WRONG),
          "cp_async_wait<0>();\n    fence_proxy_async();", "fence_proxy_async();"),
    fault("queries of packed sequences from the first one on", ROWS, MANY, (*NUMBERS, *BOUNDS),
          "+ found.first_query * params.q_row_stride, shared.q());", ", shared.q());"),
    fault("columns past a narrow row", ROWS, NARROW, (*BOUNDS, *NUMBERS),
          "row < rows_left && element_of_row < params.head_dim", "row < rows_left"),
    # The tail of a sequence.
    fault("NaN of the rows past a sequence reaches P V", ROWS, MANY, NUMBERS,
          "clear_rows(shared.k(ring.stage), params.seqlen_kv - kv_block * kBlockN);", ""),
    fault("zeros that wgmma does not see", ROWS, MANY, ("proxy",),
          "store_shared_128(rows + byte, 0.0f, 0.0f, 0.0f, 0.0f);\n        }\n    }\n"
          "    fence_proxy_async();",
          "store_shared_128(rows + byte, 0.0f, 0.0f, 0.0f, 0.0f);\n        }\n    }"),
    fault("keys past a sequence are not hidden", ROWS, MANY, NUMBERS,
          "finish_scores(scores, kv_block);\n            hide_past_sequence(scores, kv_block);",
          "finish_scores(scores, kv_block);"),
    fault("the diagonal one key late", CAUSAL, DRAFTS, NUMBERS,
          "query + params.diagonal_offset + 1)", "query + params.diagonal_offset + 2)"),
    # The groups of columns.
    fault("S without the columns that K alone has", ROWS, MANY, NUMBERS,
          "constexpr int kEnd = kFirst ? kHeadDim :", "constexpr int kEnd = kFirst ? kBegin + 32 :"),
    fault("S before its columns are here", ROWS, MANY, LOST,
          "await_full(shared.k_full(ring.stage, kGroup), ring.parity);\n    wgmma_fence();",
          "wgmma_fence();"),
    fault("columns of V that are loaded over before P V has read them", ROWS, MANY, LOST,
          "barrier_arrive(kScoresComplete, 256);\n wgmma_wait<0>();\n pin_registers(output);",
          "barrier_arrive(kScoresComplete, 256);"),
    fault("two sets of heads: columns of V that are loaded over before P V has read them", ROWS, SETS, LOST,
          "wgmma_wait<1>();\n pin_registers(output);\n release(shared.k_empty(stage, 0), lane);",
          "release(shared.k_empty(stage, 0), lane);", multiprocessors=4),
    fault("one set of heads: P V of the other consumer waits for S", ROWS, MANY, ("barrier", *LOST),
          "barrier_arrive(kScoresComplete, 256);\n wgmma_wait<0>();\n pin_registers(output);",
          "wgmma_wait<0>();\n pin_registers(output);"),
    fault("columns that are not released", ROWS, MANY, LOST,
          "release(shared.k_empty(ring.stage, 1), lane);", ""),
    fault("the values of the other consumer", ROWS, MANY, (*RACE, *NUMBERS, "copy in flight"),
          "shared.k(ring.stage) + kGroupPanels * kBlockN * kPanelRowBytes", "shared.k(ring.stage)"),
    # The exchange.
    fault("P over the one before, which is not read yet", ROWS, WIDE, (*RACE, "barrier", WRONG),
          "barrier_sync(kPEmpty, 256);\n#pragma unroll", "barrier_arrive(kPEmpty, 256);\n#pragma unroll"),
    fault("P is not waited for", ROWS, WIDE, (*LOST, "divergence"),
          "barrier_sync(kPFull, 256);\n            PackedScores<kBlockN> p;",
          "barrier_arrive(kPFull, 256);\n            PackedScores<kBlockN> p;"),
    fault("the other columns are not rescaled", ROWS, WIDE, NUMBERS,
          "if (__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) multiply(output, factor);",
          ""),
    fault("O is not rescaled", ROWS, WIDE, NUMBERS, "if (moved) multiply(output, factor);", ""),
    fault("the factor of the block before", ROWS, WIDE, (*ASYNC, WRONG),
          "__uint_as_float(words[3]));\n    }\n    store_factor(shared, factor);",
          "__uint_as_float(words[3]));\n    }"),
    fault("the other columns are not divided", ROWS, WHOLE, NUMBERS,
          "finish_rows(params, tile, rows, first_row, lane, factor);\n            send(shared, factor);",
          "send(shared, factor);\n            finish_rows(params, tile, rows, first_row, lane, factor);"),
    # Parts and pages.
    fault("the other columns of a part over the first ones", ROWS, MANY,
          (*RACE, *NUMBERS, "uninitialised global memory"),
          "store_part(params, tile, found.slot, output, first_row, kColumns, lane);",
          "store_part(params, tile, found.slot, output, first_row, 0, lane);"),
    fault("a part without row_sum", ROWS, MANY, (*NUMBERS, "uninitialised global memory"),
          "store_sums(params, tile, found.slot, rows, first_row, lane);", ""),
    fault("the boxes of the next KV block while these are read", PAGED, MANY, (*RACE, *NUMBERS),
          "__syncwarp();\n            ring.advance();\n        }\n        __syncwarp();",
          "ring.advance();\n        }\n        __syncwarp();"),
    fault("pages of whole KV blocks: a page after the one of the KV block", BLOCKS, MANY, (*NUMBERS, *BOUNDS),
          "const int key = max(last_block, 0) * kBlockN + lane * kBoxKeys;",
          "const int key = max(last_block, 0) * kBlockN + (lane + 1) * kBoxKeys;"),
    fault("P V before the tensor cores have the next S", ROWS, SETS, ("barrier", *LOST),
          "if (!memory_limits) barrier_arrive(kScoresComplete, 256);", "", multiprocessors=4),
    # Pages of any size.
    fault("gather: a row of the page before", GATHER, DRAFTS, (*NUMBERS, *BOUNDS),
          "const int row_of_page = key - divide(key, params.page_size_divisor) * params.page_size;",
          "const int row_of_page = 0;"),
    fault("gather: the pages of the KV block before", GATHER, MANY, (*NUMBERS, *BOUNDS),
          "kv_block > blocks.first ? kv_block - 1 : -1", "kv_block"),
    fault("gather: the pages of the first sequence", GATHER, MANY, (*NUMBERS, *BOUNDS),
          "params.pages + found.sequence * params.pages_batch_stride;", "params.pages;"),
    fault("gather: entries past the table are read", GATHER, MANY, (*BOUNDS, "uninitialised global memory"),
          "const bool exists = kv_block >= 0 && key < seqlen_kv;", "const bool exists = true;"),
    fault("gather: NaN of rows past a sequence", GATHER, MANY, (*NUMBERS, *BOUNDS),
          "kWhole || (row[i] != nullptr && panel", "kWhole || (panel",
          ": nullptr;", ": begin + threadIdx.x % 8 * 8;",
          "const bool exists = kv_block >= 0 && key < seqlen_kv;",
          "const bool exists = kv_block >= 0 && key / params.page_size <= "
          "(seqlen_kv - 1) / params.page_size;"),
    fault("gather: a KV block with rows past a sequence as a whole one", GATHER, MANY, (*NUMBERS, *BOUNDS),
          "(kv_block + 1) * kBlockN <= found.seqlen_kv && params.head_dim", "params.head_dim"),
    fault("gather: narrow rows as whole ones", GATHER, NARROW, (*NUMBERS, *BOUNDS),
          "<= found.seqlen_kv && params.head_dim == kHeadDim;", "<= found.seqlen_kv;"),
    fault("gather: the last rows of a KV block are left out", GATHER, MANY,
          (*NUMBERS, "uninitialised shared memory"),
          "if (row_of_block >= kBlockN) break;", "if (row_of_block >= kBlockN - 4) break;"),
    fault("gather: full before the copies are here", GATHER, MANY, LOST,
          "cp_async_mbarrier_arrive(shared.k_full(ring.stage, group));",
          "mbarrier_arrive(shared.k_full(ring.stage, group));"),
    fault("gather: full without the threads of a warp", GATHER, MANY, ("deadlock", *LOST),
          "mbarrier_init(shared.k_full(stage, group), kGatherers * 32);",
          "mbarrier_init(shared.k_full(stage, group), (kGatherers - 1) * 32);"),
    fault("gather: columns of V that are copied over before P V has read them", GATHER, MANY, LOST,
          "await_empty(shared.k_empty(ring.stage, group), ring.parity ^ 1);\n                rows.copy",
          "if (group != 1) await_empty(shared.k_empty(ring.stage, group), ring.parity ^ 1);\n"
          "                rows.copy"),
    # Q in two arrays.
    fault("q_rope: of the first head", ROPE, MANY, NUMBERS,
          "params.q_rope_row_stride, params.q_rope_head_stride) + element_of_row;",
          "params.q_rope_row_stride, 0) + element_of_row;"),
    fault("q_rope: by the strides of q", ROPE, MANY, (*NUMBERS, *BOUNDS),
          "params.q_rope_row_stride, params.q_rope_head_stride) + element_of_row;",
          "params.q_row_stride, params.q_head_stride) + element_of_row;"),
    fault("q_rope: of the first sequence", ROPE, MANY, (*NUMBERS, *BOUNDS),
          "params.q_rope + tile.batch * params.q_rope_batch_stride + "
          "found.first_query * params.q_rope_row_stride,",
          "params.q_rope,"),
    fault("q_rope: from one chunk on", ROPE, NARROW, (*NUMBERS, *BOUNDS),
          "q_rope + (of_rope - params.head_dim_v);", "q_rope + (of_rope - params.head_dim_v + 8);"),
    fault("q_rope: read from q", ROPE, MANY, (*NUMBERS, *BOUNDS),
          "element_of_row < params.head_dim_v ? q + of_q", "element_of_row < params.head_dim ? q + of_q"),
    fault("q_rope with mma.sync: of the first head", MMA_ROPE, MANY, NUMBERS,
          "params.q_rope_row_stride, params.q_rope_head_stride) + element_of_row;",
          "params.q_rope_row_stride, 0) + element_of_row;"),
    fault("q_rope with mma.sync: of the first sequence", MMA_ROPE, MANY, (*NUMBERS, *BOUNDS),
          "own.q_rope += sequence * params.q_rope_batch_stride + first_query * params.q_rope_row_stride;",
          ""),
    fault("q_rope with mma.sync: the batch stride twice", MMA_ROPE, MANY, (*NUMBERS, *BOUNDS),
          "own.q_rope_batch_stride = 0;", ""),
    # By mma.sync.
    fault("mma.sync: a KV block is not waited for", MMA, MANY, (*ASYNC, WRONG),
          "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();"),
    fault("mma.sync: copied into the stage that is computed", MMA, MANY, (*ASYNC, WRONG),
          "fetch.next(params, stage_address(stage == 0 ? kStages - 1 : stage - 1));",
          "fetch.next(params, stage_address(stage));"),
    fault("mma.sync: largest scores before all warps have them", MMA, WIDE, (*ASYNC, WRONG),
          "barrier_sync(kThreads);\n            raise_row_max(", "raise_row_max("),
    fault("mma.sync: P before all warps have stored it", MMA, MANY, (*ASYNC, WRONG),
          "barrier_sync(kThreads);\n            mma_pv(", "mma_pv("),
    fault("mma.sync: row_sum of one warp", MMA, WHOLE, NUMBERS,
          "rows.row_sum[row8] += __uint_as_float(", "rows.row_sum[row8] = __uint_as_float("),
    fault("mma.sync: NaN of rows past a sequence", MMA, MANY, (*NUMBERS, *BOUNDS),
          "const bool seen = key < params.seqlen_kv;", "const bool seen = true;"),
    fault("mma.sync: a row of the page before", MMA_PAGED, DRAFTS, NUMBERS,
          "const int row_of_page = key - divide(key, params.page_size_divisor) * params.page_size;",
          "const int row_of_page = 0;"),
)  # fmt: skip

# In the kernel that combines parts, on twelve multiprocessors.
QUARTERS = (
    fault("combine: the first quarter of the columns alone", ROWS, ROWS_OF_MANY, (*RACE, *NUMBERS),
          "parts.quarter = parts.first_row % kQuarters;", "parts.quarter = 0;"),
    fault("combine: quarters of the first row alone", ROWS, ROWS_OF_MANY, (*RACE, *NUMBERS),
          "parts.first_row /= kQuarters;", "parts.first_row = 0;"),
    fault("combine: rows past the tile", ROWS, ROWS_OF_MANY,
          (*NUMBERS, *BOUNDS, "uninitialised global memory"),
          "parts.count = parts.first_row < tile_rows ? 1 : 0;", "parts.count = 1;"),
    fault("combine: a quarter of the parts of the first warp", ROWS, ROWS_OF_MANY, NUMBERS,
          "for (int first = parts.first + warp;", "for (int first = parts.first;"),
    fault("combine: a quarter before its warps have stored it", ROWS, ROWS_OF_MANY, (*ASYNC, WRONG),
          "__float_as_uint(row_max), __float_as_uint(row_sum));\n    barrier_sync(kThreads);",
          "__float_as_uint(row_max), __float_as_uint(row_sum));"),
)  # fmt: skip
