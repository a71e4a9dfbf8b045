"""Faults to plant into the kernels that attend to the tokens of lists: in the lists, in the gathered rows,
and in what the combining kernel writes.
"""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator import faults_latent
from simulator.faults import ASYNC, BOUNDS, NUMBERS, RACE, WRONG, fault, same_fault

ROWS = "flash_mla_sparse_hdim576_512_bf16_packgqa_sm80"
PAGED = "flash_mla_sparse_hdim576_512_fp16_paged_packgqa_sm86"
HOPPER = "flash_mla_sparse_hdim576_512_bf16_packgqa_sm90"
HOPPER_PAGED = "flash_mla_sparse_hdim576_512_fp16_paged_packgqa_sm90"
ROPE = "flash_mla_sparse_hdim576_512_bf16_rope_packgqa_sm90"

MANY = Shape(3, 150, heads=24, batch=2)
# Some tiles are split.
SPLIT = Shape(2, 600, heads=24, batch=2)
# Of three queries each thread block has one whole list.
WHOLE = Shape(3, 70, heads=16, spread=8.0)
# KV blocks of 64 entries.
LONG = Shape(2, 300, heads=24, batch=2, spread=8.0)
ANYTHING = (*NUMBERS, *BOUNDS)
LOST = (*ASYNC, "deadlock", "mbarrier", "proxy", WRONG)

FAULTS = (
    fault("q_rope of the query before", ROPE, MANY, (*NUMBERS, *BOUNDS),
          "own.q_rope += sequence * params.q_rope_batch_stride + row * params.q_rope_row_stride;",
          "own.q_rope += sequence * params.q_rope_batch_stride + "
          "max(0, row - 1) * params.q_rope_row_stride;"),
    same_fault(faults_latent.FAULTS, "q_rope: of the first head", ROPE, MANY),
    fault("the list of the query before", ROWS, MANY, ANYTHING,
          "+ row * params.indices_row_stride;", "+ max(0, row - 1) * params.indices_row_stride;"),
    fault("the list of the first sequence", ROWS, MANY, ANYTHING,
          "own.indices += sequence * params.indices_batch_stride +", "own.indices +="),
    fault("-1 is read as a token", ROWS, MANY, ANYTHING,
          "return uint32_t(token) < uint32_t(params.seqlen_kv);", "return token < params.seqlen_kv;"),
    fault("-1 is read as the first token", ROWS, MANY, ANYTHING,
          "entry < params.topk ? int(load_global_32(params.indices + entry)) : -1;",
          "entry < params.topk ? max(0, int(load_global_32(params.indices + entry))) : -1;"),
    fault("past the end of a list", ROWS, MANY, (*ANYTHING, "uninitialised global memory"),
          "return entry < params.topk ?", "return entry <= params.topk ?"),
    fault("the last entry is left out", ROWS, MANY, NUMBERS,
          "return entry < params.topk ?", "return entry < params.topk - 1 ?"),
    fault("entries without a token are not hidden", ROWS, MANY, NUMBERS,
          "if (!is_token[e % 2]) scores[j][e] = -INFINITY;", ""),
    fault("the entry beside is hidden", ROWS, MANY, NUMBERS,
          "if (!is_token[e % 2])", "if (!is_token[1 - e % 2])"),
    fault("the flags of another warp's keys", ROWS, MANY, NUMBERS,
          "flags_address(stage) + warp * kWarpKeys * sizeof(uint32_t)",
          "flags_address(stage) + (kWarps - 1 - warp) * kWarpKeys * sizeof(uint32_t)"),
    fault("the flags of another stage", ROWS, MANY, (*ASYNC, WRONG),
          "gather.next(params, stage_address(free_stage), flags_address(free_stage));",
          "gather.next(params, stage_address(free_stage), flags_address(stage));"),
    fault("the same token in the next block", ROWS, MANY, NUMBERS,
          "entry += kBlockN;\n --left;\n token = token_at(params, entry);", "entry += kBlockN;\n --left;"),
    same_fault(faults_latent.FAULTS, "mma.sync: a KV block is not waited for", ROWS, MANY),
    fault("copied into the stage that is computed", ROWS, MANY, (*ASYNC, WRONG),
          "const int free_stage = stage == 0 ? kStages - 1 : stage - 1;", "const int free_stage = stage;"),
    fault("the length of another sequence", ROWS, MANY, ANYTHING,
          "load_global_32(params.kv_lengths + sequence)", "load_global_32(params.kv_lengths + 1 - sequence)"),
    fault("q of the first query", ROWS, MANY, NUMBERS,
          "own.q += sequence * params.q_batch_stride + row * params.q_row_stride;",
          "own.q += sequence * params.q_batch_stride;"),
    fault("the LSE of the first query", ROWS, WHOLE, (*RACE, *NUMBERS),
          "own.lse += sequence * params.lse_batch_stride + row;",
          "own.lse += sequence * params.lse_batch_stride;"),
    fault("the page of the block before", PAGED, MANY, ANYTHING,
          "page = page_of(params, token);\n next_token = token_at(params, entry + kBlockN);\n }\n "
          "cp_async_commit();",
          "next_token = token_at(params, entry + kBlockN);\n }\n cp_async_commit();"),
    fault("the token two blocks later", PAGED, MANY, NUMBERS,
          "next_token = token_at(params, entry + kBlockN);\n }\n cp_async_commit();",
          "next_token = token_at(params, entry + 2 * kBlockN);\n }\n cp_async_commit();"),
    fault("the first row of each page", PAGED, MANY, ANYTHING,
          "const int row_of_page = token - divide(token, params.page_size_divisor) * params.page_size;",
          "const int row_of_page = 0;"),
    fault("the pages of the first sequence", PAGED, MANY, ANYTHING,
          "own.pages += sequence * params.pages_batch_stride;", ""),
    # For Hopper.
    fault("a KV block is published before it is here", HOPPER, LONG, LOST,
          "cp_async_wait<1>();\n publish(", "cp_async_wait<2>();\n publish("),
    fault("the last KV block is published before it is here", HOPPER, LONG, LOST,
          "cp_async_wait<0>();\n publish(", "cp_async_wait<1>();\n publish("),
    fault("a KV block is published too late", HOPPER, LONG, ("deadlock",),
          "if (unpublished >= 0) {\n cp_async_wait<1>();\n publish(shared, unpublished, lane);\n }\n "
          "await_empty(shared.k_empty(ring.stage, 0), ring.parity ^ 1);",
          "await_empty(shared.k_empty(ring.stage, 0), ring.parity ^ 1);\n"
          "if (unpublished >= 0) {\n cp_async_wait<1>();\n publish(shared, unpublished, lane);\n }\n "),
    fault("columns of V that are gathered over before P V has read them", HOPPER, LONG, LOST,
          "await_empty(shared.k_empty(ring.stage, 1), ring.parity ^ 1);\n", ""),
    fault("flags over others that are not read yet", HOPPER, LONG, LOST,
          "await_empty(shared.k_empty(ring.stage, 0), ring.parity ^ 1);\n"
          "gather.store_flags(params, shared.flags(ring.stage));",
          "gather.store_flags(params, shared.flags(ring.stage));\n"
          "await_empty(shared.k_empty(ring.stage, 0), ring.parity ^ 1);"),
    fault("Hopper: entries without a token are not hidden in the first KV block", HOPPER, LONG, NUMBERS,
          "hide_no_tokens(scores, shared.flags(ring.stage), lane);\n softmax_step(", "softmax_step("),
    fault("Hopper: the flags of the KV block before", HOPPER, LONG, (*ASYNC, WRONG),
          "hide_no_tokens(scores, shared.flags(ring.stage), lane);\n const bool moved",
          "hide_no_tokens(scores, shared.flags(stage), lane);\n const bool moved"),
    fault("Hopper: -1 is read as a token", HOPPER, LONG, ANYTHING,
          "return uint32_t(token) < uint32_t(params.seqlen_kv);", "return token < params.seqlen_kv;"),
    fault("Hopper: past the end of a list", HOPPER, LONG, (*ANYTHING, "uninitialised global memory"),
          "entry < params.topk ?", "entry <= params.topk ?"),
    fault("Hopper: rows that are swizzled as others are read", HOPPER, LONG, NUMBERS,
          "16 * swizzled(row, chunk);", "16 * chunk;"),
    fault("Hopper: the tokens of the KV block before", HOPPER, LONG, NUMBERS,
          "next.load_tokens(params, kv_block > part.first ? kv_block - 1 : -1);",
          "next.load_tokens(params, kv_block);"),
    fault("Hopper: the pages of the KV block before", HOPPER_PAGED, LONG, ANYTHING,
          "next.load_pages(params);", "for (int i = 0; i < kThreadRows; ++i) next.page[i] = gather.page[i];"),
    fault("Hopper: the first row of each page", HOPPER_PAGED, LONG, ANYTHING,
          "token[i] - divide(max(0, token[i]), params.page_size_divisor) * params.page_size;", "0;"),
    same_fault(faults_latent.FAULTS, "the other columns are not rescaled", HOPPER, LONG),
    same_fault(faults_latent.FAULTS, "P over the one before, which is not read yet", HOPPER, LONG),
)  # fmt: skip
# Into the kernel that combines the parts of split tiles.
COMBINE_FAULTS = (
    fault("combine: the first query of each sequence", ROWS, SPLIT, (*RACE, *NUMBERS),
          "own.out += sequence * params.out_batch_stride + row * params.out_row_stride;",
          "own.out += sequence * params.out_batch_stride;"),
    fault("combine: the LSE of the first sequence", ROWS, SPLIT, (*RACE, *NUMBERS),
          "own.lse += sequence * params.lse_batch_stride + row;", "own.lse += row;"),
)  # fmt: skip
