"""Faults to plant into the kernels that attend to the tokens of lists in latent caches of FP8: in scales, in
the rows that are converted, in the flags of tokens, in the hand-over of what is converted.
"""

from __future__ import annotations

from simulator import faults_latent_codes
from simulator.faults import ASYNC, BOUNDS, NUMBERS, RACE, WRONG, fault, same_fault
from simulator.faults_sparse_latent import LONG, MANY, SPLIT, WHOLE

CODES = "flash_mla_sparse_hdim576_512_bf16_e4m3_packgqa_sm90"
PAGED = "flash_mla_sparse_hdim576_512_fp16_paged_e4m3_packgqa_sm90"
ROWS = "flash_mla_sparse_hdim576_512_bf16_paged_fp8dsmla_packgqa_sm90"
MMA = "flash_mla_sparse_hdim576_512_bf16_e4m3_packgqa_sm80"
MMA_ROWS = "flash_mla_sparse_hdim576_512_bf16_paged_fp8dsmla_packgqa_sm86"

ANYTHING = (*NUMBERS, *BOUNDS)
LOST = (*ASYNC, *RACE, "deadlock", "mbarrier", "proxy", WRONG)

FAULTS = (
    fault("scores are not scaled", CODES, LONG, NUMBERS,
          "with_scale(of_query(all, tile.batch), code_scale);", "of_query(all, tile.batch);"),
    same_fault(faults_latent_codes.FAULTS, "the other columns are not scaled", CODES, WHOLE),
    same_fault(faults_latent_codes.FAULTS, "parts are not scaled", CODES, SPLIT),
    same_fault(faults_latent_codes.FAULTS, "the scale of sequence 0", CODES, LONG),
    fault("NaN codes of rows without a token", CODES, LONG, ANYTHING, "is_key ? 0xffffffff : 0",
          "0xffffffff"),
    fault("-1 is read as a token", CODES, LONG, ANYTHING,
          "return uint32_t(token[i]) < uint32_t(params.seqlen_kv);", "return token[i] < params.seqlen_kv;"),
    fault("past the end of a list", CODES, LONG, (*ANYTHING, "uninitialised global memory"),
          "kv_block >= 0 && entry < params.topk ?", "kv_block >= 0 && entry <= params.topk ?"),
    fault("the later rows as the first ones", CODES, LONG, ANYTHING,
          "const { return present >> i & 1; }", "const { return present & 1; }"),
    same_fault(faults_latent_codes.FAULTS, "the rows of the KV block before", CODES, SPLIT),
    fault("no flags", CODES, LONG, (*NUMBERS, "uninitialised shared memory", "uninitialised"),
          "if (batch == kBatches - 1) rows.store_flags(shared.flags(ring.stage), converter, lane);", ""),
    fault("flags while the scores before are hidden", CODES, SPLIT, LOST,
          "batches[batch].load(params, rows, batch, lane);",
          "batches[batch].load(params, rows, batch, lane);\n"
          "    rows.store_flags(shared.flags(ring.stage), converter, lane);"),
    same_fault(faults_latent_codes.FAULTS, "elements that wgmma does not see", CODES, LONG),
    fault("a row of another page", PAGED, LONG, ANYTHING,
          "(token - page_of_sequence * params.page_size) * params.k_row_stride", "0"),
    same_fault(faults_latent_codes.FAULTS, "a scale of the wrong quarter", ROWS, LONG),
    same_fault(faults_latent_codes.FAULTS, "rotary elements are not waited for", ROWS, LONG),
    fault("mma.sync: the flags of the codes", MMA, MANY, LOST,
          "hide_no_tokens(scores, flags_address(kStages) +", "hide_no_tokens(scores, flags_address(stage) +"),
    fault("mma.sync: the flags are not moved", MMA, MANY,
          (*NUMBERS, "uninitialised shared memory", "uninitialised"),
          "move_flags(flags_address(stage), flags_address(kStages));", ""),
    same_fault(faults_latent_codes.FAULTS,
               "mma.sync: converted while other warps read the KV block", MMA, MANY),
    fault("mma.sync: read before all warps have converted", MMA, MANY, LOST,
          "gather.next(params, codes_address(stage), flags_address(stage));\n barrier_sync(kThreads);",
          "gather.next(params, codes_address(stage), flags_address(stage));"),
    same_fault(faults_latent_codes.FAULTS, "mma.sync: codes are not waited for", MMA, MANY),
    same_fault(faults_latent_codes.FAULTS, "mma.sync: O is not scaled", MMA, MANY),
    fault("mma.sync: the scale of the query of that number", MMA, MANY, ANYTHING,
          "load_scale(all, divide(tile.batch, all.rows_q_divisor))", "load_scale(all, tile.batch)"),
    same_fault(faults_latent_codes.FAULTS, "mma.sync: rotary elements as codes", MMA_ROWS, MANY),
    fault("mma.sync: NaN of rows without a token", MMA_ROWS, MANY, ANYTHING,
          "valid = is_token;", "valid = true;"),
)  # fmt: skip
