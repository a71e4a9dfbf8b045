"""Faults to plant into the kernels that decode from latent caches of FP8: in scales, in what is converted and
what is not, in the hand-over of what is converted.
"""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, BOUNDS, NUMBERS, RACE, WRONG, fault

CODES = "flash_mla_decode_hdim576_512_bf16_causal_e4m3_packgqa_sm90"
PAGED = "flash_mla_decode_hdim576_512_fp16_paged_e4m3_packgqa_sm90"
ROWS = "flash_mla_decode_hdim576_512_bf16_paged_fp8dsmla_packgqa_sm90"
PAIR = "flash_mla_decode_hdim576_512_bf16_paged_fp8dsmla_pair_packgqa_sm90"
PAIR_CODES = "flash_mla_decode_hdim576_512_bf16_causal_e4m3_pair_packgqa_sm90"
MMA = "flash_mla_decode_hdim576_512_bf16_e4m3_packgqa_sm80"
MMA_ROWS = "flash_mla_decode_hdim576_512_bf16_causal_paged_fp8dsmla_packgqa_sm86"

MANY = Shape(2, 300, heads=24, batch=3)
WHOLE = Shape(1, 200, heads=24, batch=3)
NARROW = Shape(1, 200, heads=16, batch=2, head_dim=336, head_dim_v=272)
PAIRS = Shape(2, 300, heads=128, batch=2)
LOST = (*ASYNC, *RACE, "deadlock", "mbarrier", "proxy", WRONG)

FAULTS = (
    fault("scores are not scaled", CODES, MANY, NUMBERS,
          "with_scale(of_sequence(all, found), code_scale);", "of_sequence(all, found);"),
    fault("the other columns are not scaled", CODES, WHOLE, NUMBERS, "factor[0] *= code_scale;", ""),
    fault("parts are not scaled", CODES, MANY, NUMBERS,
          "multiply(output, {code_scale, code_scale});\n            store_sums(", "store_sums("),
    fault("the scale of sequence 0", CODES, MANY, NUMBERS,
          "params.k_scale + sequence * params.k_scale_batch_stride", "params.k_scale"),
    fault("NaN codes of rows past a sequence", CODES, MANY, (*NUMBERS, *BOUNDS),
          "key < found.seqlen_kv ? key : 0;", "key;"),
    fault("codes past a narrow row", PAGED, NARROW, (*NUMBERS, *BOUNDS),
          "min(column, params.head_dim - 16)", "column"),
    fault("elements that wgmma does not see", CODES, MANY, ("proxy",),
          "fence_proxy_async();\n    __syncwarp();\n    if (lane == 0) mbarrier_arrive(full);",
          "__syncwarp();\n    if (lane == 0) mbarrier_arrive(full);"),
    fault("columns passed on before all lanes have converted", CODES, MANY, LOST,
          "fence_proxy_async();\n    __syncwarp();\n    if (lane == 0) mbarrier_arrive(full);",
          "if (lane == 0) mbarrier_arrive(full);\n    fence_proxy_async();\n    __syncwarp();"),
    fault("converted over columns that are not empty", CODES, MANY, LOST,
          "if (begins_group(batch)) "
          "await_empty(shared.k_empty(ring.stage, group_of(batch)), ring.parity ^ 1);", ""),
    fault("the units of the batch before", CODES, MANY, (*NUMBERS, "uninitialised register", "uninitialised"),
          "batches[batch % (kAhead + 1)].store(", "batches[(batch + 1) % (kAhead + 1)].store("),
    fault("the rows of the KV block before", PAGED, MANY, (*NUMBERS, *BOUNDS), "rows = next;", ""),
    fault("a row of another page", PAGED, MANY, (*NUMBERS, *BOUNDS),
          "row_of_page = real_key - page_of_sequence * params.page_size;", "row_of_page = 0;"),
    fault("a scale of the wrong quarter", ROWS, MANY, NUMBERS, "unit < 2 ? scales.x : scales.y", "scales.x"),
    fault("codes without their scale", ROWS, MANY, NUMBERS,
          "return pack<element>(values.x * scale, values.y * scale);",
          "return pack<element>(values.x, values.y);"),
    fault("rotary elements from where the scales are", ROWS, MANY, NUMBERS,
          "constexpr int kRotaryByte = kScalesByte + 16;", "constexpr int kRotaryByte = kScalesByte;"),
    fault("rotary elements are not waited for", ROWS, MANY, LOST,
          "cp_async_wait<0>();\n    fence_proxy_async();\n    __syncwarp();",
          "fence_proxy_async();\n    __syncwarp();"),
    fault("clusters: elements for this thread block alone", PAIR, PAIRS, LOST,
          "if (row.for_both) store_async_128(", "if (row.for_both && row.full == 1) store_async_128("),
    fault("clusters: elements for the thread block itself", PAIR, PAIRS, LOST,
          "map_shared(shared.storage, cluster_rank() ^ 1) - shared.storage",
          "map_shared(shared.storage, cluster_rank()) - shared.storage"),
    fault("clusters: elements over columns that the peer reads", PAIR, PAIRS, LOST,
          "mbarrier_init(shared.k_empty(stage, group), 4 * kCluster);",
          "mbarrier_init(shared.k_empty(stage, group), 4);"),
    fault("clusters: the peer does not hear that columns are empty", PAIR, PAIRS, LOST,
          "if (lane < kCluster) mbarrier_arrive_cluster(map_shared(empty, lane));",
          "if (lane == 0) mbarrier_arrive(empty);"),
    fault("clusters: both arrivals on the barrier of the first thread block", PAIR_CODES, PAIRS, LOST,
          "map_shared(empty, lane)", "map_shared(empty, 0)"),
    fault("clusters: the bytes of the peer are not announced", PAIR_CODES, PAIRS, LOST,
          "if (lane == 0) mbarrier_arrive_expect_tx(", "if (lane < 0) mbarrier_arrive_expect_tx("),
    fault("clusters: the group of the peer", PAIR_CODES, PAIRS, LOST,
          "int own_group() { return cluster_rank(); }", "int own_group() { return cluster_rank() ^ 1; }"),
    fault("clusters: consumers wait at the scope of the block", PAIR_CODES, PAIRS, RACE,
          "{ mbarrier_wait_cluster(full, parity); }", "{ mbarrier_wait(full, parity); }"),
    fault("clusters: a thread block ends while the peer arrives on its barriers", PAIR, PAIRS, LOST,
          "await_all_empty(shared, ring);\n            return;", "return;"),
    fault("clusters: elements for a peer whose barriers are not initialised", PAIR, PAIRS, LOST,
          "cluster_arrive_relaxed();\n    cluster_wait();", "__syncthreads();"),
    fault("mma.sync: converted while other warps read the KV block", MMA, MANY, LOST,
          "cp_async_wait<kStages - 1>();\n            barrier_sync(kThreads);",
          "cp_async_wait<kStages - 1>();"),
    fault("mma.sync: read before all warps have converted", MMA, MANY, LOST,
          "fetch.next(params, codes_address(stage));\n            barrier_sync(kThreads);",
          "fetch.next(params, codes_address(stage));"),
    fault("mma.sync: codes are not waited for", MMA, MANY, LOST,
          "cp_async_wait<kStages - 1>();", "cp_async_wait<kStages>();"),
    fault("mma.sync: O is not scaled", MMA, MANY, NUMBERS, "[e] *= code_scale;", "[e] *= 1.0f;"),
    fault("mma.sync: rotary elements as codes", MMA_ROWS, MANY, NUMBERS,
          "load_shared_128(source + kRotaryByte + 16 * chunk)", "load_shared_128(source + 16 * chunk)"),
    fault("mma.sync: a scale of the wrong quarter", MMA_ROWS, MANY, NUMBERS,
          "source + kScalesByte + chunk / 8 * 4", "source + kScalesByte"),
    fault("mma.sync: a row copied over while its scales are read", MMA_ROWS, MANY, LOST,
          "__syncwarp();  // all threads of a row have read it", ""),
)  # fmt: skip
