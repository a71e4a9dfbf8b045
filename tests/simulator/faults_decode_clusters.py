"""Faults to plant into the kernels that decode in clusters: in parts of a tile, in what thread blocks send
each other, in what they combine, in what they know ahead of griddepcontrol.wait.
"""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, BOUNDS, NUMBERS, RACE, WRONG, fault

# A cluster of eight, of two warps each; one of four under a window; sequences of several lengths, in rows and
# in pages.
DECODE = "flash_decode_hdim160_bf16_packgqa_sm90"
WINDOW = "flash_decode_hdim160_fp16_local_c4_sm90"
ROWS = "flash_varlen_decode_hdim32_bf16_packgqa_sm90"
PAGED = "flash_varlen_decode_hdim32_fp16_paged_packgqa_sm90"
PAGED_2 = "flash_varlen_decode_hdim32_fp16_paged_c2_packgqa_sm90"  # parts of more KV blocks

# 22 KV blocks: six parts of three, two of two. Two rows for four of the thread blocks, one for the others.
SPLIT = Shape(seqlen_q=3, seqlen_kv=700, heads=8, kv_heads=2)
# More KV blocks of a part than stages.
STEPS = Shape(seqlen_q=1, seqlen_kv=1300, heads=4, kv_heads=1)
# Scores of a standard deviation of 8, so that row_max differs from part to part.
WIDE = Shape(seqlen_q=3, seqlen_kv=700, heads=8, kv_heads=2, spread=8.0)
WINDOWED = Shape(seqlen_q=3, seqlen_kv=900, heads=2, window=(400, 0))
LONG = Shape(3, 2100, heads=1, batch=6)

# What is sent and not received as it should be: too late, to where nobody expects it, or never.
LOST = (*ASYNC, "deadlock", "mbarrier", WRONG)
STALE = (*LOST, *BOUNDS, "divergence")

FAULTS = (
    # Parts.
    fault("all parts begin as if those before were as long", DECODE, SPLIT, NUMBERS,
          " * rank + min(rank, blocks % kCluster);", " * rank;"),
    fault("a part ends a KV block early", DECODE, SPLIT, NUMBERS,
          "(rank < blocks % kCluster ? 1 : 0);", "(rank < blocks % kCluster - 1 ? 1 : 0);"),
    fault("a window that begins with the first KV block", WINDOW, WINDOWED, NUMBERS,
          "const int begin = first_block + ", "const int begin = "),
    # Stages.
    fault("the kernel does not wait for the one before it", DECODE, SPLIT, ("dependency",),
          "    griddepcontrol_wait();\n", ""),
    fault("Q is not waited for", DECODE, SPLIT, ASYNC,
          "cp_async_wait<kStages - 1>();", "cp_async_wait<kStages>();"),
    fault("a wait that is one KV block short", DECODE, STEPS, ASYNC,
          "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();"),
    fault("fetched into the stage that is computed", DECODE, STEPS, (*ASYNC, WRONG),
          "stage_address(stage == 0 ? kStages - 1 : stage - 1), group);", "stage_address(stage), group);"),
    # Groups.
    fault("O of a group over keys that another one reads", DECODE, SPLIT, ASYNC,
          "barrier_sync(kThreads); store_group_rows(rows,", "store_group_rows(rows,"),
    fault("groups are added up before all have stored their rows", DECODE, SPLIT, ASYNC,
          "    store_group_rows(rows, smem, group, lane);\n    barrier_sync(kThreads);\n",
          "    store_group_rows(rows, smem, group, lane);\n"),
    fault("O of a group is not brought to the larger row_max", DECODE, WIDE, NUMBERS,
          "output[0] += __uint_as_float(values.x) * factor;", "output[0] += __uint_as_float(values.x);"),
    fault("row_sum of a group is not brought to the larger row_max", DECODE, WIDE, NUMBERS,
          "row_sum += sums[group].y * factor;", "row_sum += sums[group].y;"),
    # Sending.
    fault("the barriers of other thread blocks are not waited for", DECODE, SPLIT, ("race", "mbarrier"),
          "    cluster_wait();  // the barriers", "    // the barriers"),
    fault("barriers that are initialised for their own block alone", DECODE, SPLIT, ("race", "proxy"),
          "        fence_mbarrier_init();\n", ""),
    fault("a row sent to the next thread block", DECODE, SPLIT, LOST,
          "const int to = row % kCluster;", "const int to = (row + 1) % kCluster;"),
    fault("a row sent to one thread block and counted by another", DECODE, SPLIT, ("operand",),
          "map_shared(smem + kBarrierOffset, to);", "map_shared(smem + kBarrierOffset, rank);"),
    fault("parts of a row in one place", DECODE, SPLIT, (*RACE, *LOST),
          "(received * kCluster + rank) * kHeadDimV * 4", "received * kCluster * kHeadDimV * 4"),
    fault("row_max and row_sum are not sent", DECODE, SPLIT, LOST,
          "if (column == 0) store_async_64(", "if (column < 0) store_async_64("),
    # Receiving.
    fault("bytes of one part less are waited for", DECODE, SPLIT, LOST,
          "count * kCluster * (kHeadDimV * 4 + 8)", "count * (kCluster - 1) * (kHeadDimV * 4 + 8)"),
    fault("a thread block counts rows of those ahead of it", DECODE, SPLIT, LOST,
          "(num_rows_of_tile - rank + kCluster - 1)", "(num_rows_of_tile + kCluster - 1)"),
    fault("every thread announces the bytes", DECODE, SPLIT, ("mbarrier", "deadlock"),
          "if (threadIdx.x == 0) mbarrier_arrive_expect_tx(", "mbarrier_arrive_expect_tx("),
    fault("parts are not waited for", DECODE, SPLIT, ASYNC,
          "    mbarrier_wait_cluster(smem + kBarrierOffset, 0);\n", ""),
    fault("parts are waited for at the scope of the block", DECODE, SPLIT, ("race",),
          "    mbarrier_wait_cluster(smem", "    mbarrier_wait(smem"),
    fault("O of a part is not brought to the larger row_max", DECODE, WIDE, NUMBERS,
          "output[0] += values.x * factor;", "output[0] += values.x;"),
    fault("row_sum of a part is not brought to the larger row_max", DECODE, WIDE, NUMBERS,
          "row_sum += sums[part].y * factor;", "row_sum += sums[part].y;"),
    fault("a row stored as the one of the rank", DECODE, SPLIT, (WRONG, *RACE, *BOUNDS),
          "tile.first_row + received * kCluster + rank;", "tile.first_row + rank;"),
)  # fmt: skip

VARLEN_FAULTS = (
    (fault("lengths as they were ahead of the wait", ROWS, LONG, STALE,
           "    if (differ(lengths, earlier)) start = find_start(all, tile, lengths, group);\n", ""),
     {"packed_kv": True}),
    (fault("pages as they were ahead of the wait", PAGED, LONG, STALE,
           "    const Lengths lengths = lengths_of(all, tile.batch);\n"
           "    find_first_rows(start.params, start.fetch);\n",
           "    const Lengths lengths = lengths_of(all, tile.batch);\n"), {}),
    (fault("an index as it was ahead of the wait", ROWS, LONG, ("dependency",),
           "if (all.index != nullptr) {", "if (false) {"),
     {"packed_kv": False, "index": True}),
    (fault("lanes that have read different lengths shuffle on their own", PAGED, LONG, ("divergence",),
           "    find_rows(start.params, start.fetch, find_pages(",
           "    if (start.fetch.left > 0) find_rows(start.params, start.fetch, find_pages("), {}),
    (fault("a lane whose own length does not differ keeps its start", PAGED, LONG, ("divergence",),
           "if (__any_sync(0xffffffff, differ(lengths, earlier)))", "if (differ(lengths, earlier))"), {}),
    (fault("old lengths that stay in L1", ROWS, LONG, ("dependency",),
           "int(load_relaxed_32(values + index))", "int(load_global_32(values + index))"),
     {"packed_kv": True}),
    (fault("old pages that stay in L1", PAGED, LONG, ("dependency",),
           "early ? load_relaxed_32(entry)", "early ? load_global_32(entry)"), {}),
    (fault("pages of the KV block before", PAGED_2, LONG, (WRONG, *BOUNDS),
           "        find_rows(params, fetch, fetch.pages);\n"
           "        fetch.pages = find_pages(params, fetch, fetch.first_key + kBlockN, false);",
           "        find_rows(params, fetch, fetch.pages);"), {}),
    (fault("pages of the KV block behind the one that comes next", PAGED, LONG, (WRONG, *BOUNDS),
           "fetch.first_key, false);\n    fetch.pages = find_pages(params, fetch, fetch.first_key + kBlockN",
           "fetch.first_key, false);\n"
           "    fetch.pages = find_pages(params, fetch, fetch.first_key + 2 * kBlockN"), {}),
    (fault("rows of the KV block that has just been fetched", PAGED, LONG, (WRONG, *BOUNDS),
           "        find_rows(params, fetch, fetch.pages);\n", ""), {}),
)  # fmt: skip
