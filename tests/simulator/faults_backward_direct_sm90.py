"""Faults to plant into the backward kernel of small problems on Hopper: in its stages, in delta, in masks, in
the tiles of both kinds, in the epilogue."""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, WRONG
from simulator.faults_backward import Fault

PLAIN = "flash_bwd_hdim64_fp16_direct_sm90"
CAUSAL = "flash_bwd_hdim64_bf16_causal_direct_sm90"
GROUPED = "flash_bwd_hdim64_bf16_causal_direct_gqa_sm90"
WINDOW = "flash_bwd_hdim64_bf16_local_direct_sm90"
# A tile of each kind.
BOTH = "flash_bwd_hdim64_bf16_direct_both_sm90"
# dV waits for dS.
WIDE = "flash_bwd_hdim128_fp16_direct_sm90"

# More steps than stages, in both kinds of tiles.
SHAPE = Shape(seqlen_q=400, seqlen_kv=330, heads=1)
DIAGONAL = Shape(seqlen_q=300, seqlen_kv=330, heads=1)
# Rows that see nothing.
BLIND = Shape(seqlen_q=150, seqlen_kv=90, heads=1)
# More tiles of keys than of queries.
SHORT = Shape(seqlen_q=70, seqlen_kv=330, heads=1)
# … of queries than of keys.
LONG = Shape(seqlen_q=330, seqlen_kv=70, heads=1)
GROUPS = Shape(seqlen_q=150, seqlen_kv=140, heads=2, kv_heads=1)
WINDOWED = Shape(seqlen_q=300, seqlen_kv=300, heads=1, window=(70, 10))
# Scores so far below 0 that a key past the end, with score 0, would have an infinite P.
FAR = Shape(seqlen_q=70, seqlen_kv=1, heads=4, spread=300.0)

# With phases out of step anything may come first.
PHASES = (*ASYNC, "deadlock", "mbarrier", WRONG)


def fault(name: str, variant: str, shape: Shape, caught: tuple[str, ...], old: str, new: str) -> Fault:
    return Fault(name, variant, "", shape, caught, old, new)


KEYS_FULL = (
    "        mbarrier_wait(barriers.full(next.stage), next.parity);\n        mma_scores<kHeadDim>(p, k_own"
)
DV_WAIT = "        pin_registers(dv);\n        pin_registers(dk);\n"
RELEASE = "        if (lane == 0) mbarrier_arrive(barriers.empty(ring.stage));\n"
KEYS_RELEASE = f"        __syncwarp();  // all lanes have read LSE and delta of the stage\n{RELEASE}"
QUERIES_READ = "    barrier_sync(barrier, 128);\n    store_gradient<kHeadDim>(params.dq, dq,"
LAST_STORE = "params.softmax_scale, k_own, first_row, tile.head, tile.batch, barrier, lane);\n"

FAULTS = (
    # Stages.
    fault("Q of a step is not awaited", PLAIN, SHAPE, ASYNC, KEYS_FULL, KEYS_FULL.partition("\n")[2]),
    fault("Q is released ahead of dK", PLAIN, SHAPE, PHASES,
          f"        wgmma_wait<1>();\n{DV_WAIT}{KEYS_RELEASE}",
          f"{KEYS_RELEASE}        wgmma_wait<1>();\n{DV_WAIT}"),
    fault("LSE is not awaited", PLAIN, SHAPE, (*ASYNC, WRONG),
          "        mbarrier_wait(barriers.lse_full(next.stage), next.parity);\n", ""),
    fault("delta is not awaited", PLAIN, SHAPE, (*ASYNC, WRONG),
          "        mbarrier_wait(barriers.delta_full(ring.stage), ring.parity);", ""),
    fault("LSE is written over while it is read", PLAIN, SHAPE, PHASES,
          "        mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);\n        put_lse",
          "        put_lse"),
    fault("LSE of the next step", PLAIN, SHAPE, (WRONG,),
          "put_lse(values, value_thread, shared + kLseOffset + ring",
          "put_lse(next_values, value_thread, shared + kLseOffset + ring"),
    fault("O is not announced", PLAIN, SHAPE, PHASES, "(full_v, 2 * kStepBytesV)", "(full_v, kStepBytesV)"),
    # Delta.
    fault("delta without the gradient of LSE", PLAIN, SHAPE, (WRONG,), "0.0f : sum - dlse;", "0.0f : sum;"),
    fault("O under another swizzle", PLAIN, SHAPE, (WRONG,),
          "load_shared_128(out_smem + offset)", "load_shared_128(out_smem + (offset ^ 16))"),
    fault("rows that see nothing count", CAUSAL, BLIND, (WRONG,),
          "if (lse_log2 == -INFINITY) return INFINITY;", ""),
    fault("rows past the last are read", PLAIN, SHAPE, ("global bounds", WRONG),
          "const bool valid = row < params.seqlen_q;", "const bool valid = row >= 0;"),
    # Tiles and steps.
    fault("tiles of queries of too few heads", GROUPED, GROUPS, ("operand", "global bounds", WRONG),
          "of_keys ? params.num_heads_kv_divisor : params.num_heads_q_divisor",
          "params.num_heads_kv_divisor"),
    fault("the tiles of a thread block share rows", BOTH, SHAPE, PHASES,
          "/ 1024 * 1024 + kind * kTileSharedBytes;", "/ 1024 * 1024;"),
    fault("a tile behind the last of queries", BOTH, SHORT, ("operand", "global bounds", WRONG),
          "if (block_index() >= tiles_of_kind(params, tile.of_keys)) return;", ""),
    fault("a tile behind the last of keys", BOTH, LONG, ("operand", "global bounds", WRONG),
          "if (block_index() >= tiles_of_kind(params, tile.of_keys)) return;", ""),
    fault("the tiles of a thread block share a named barrier", BOTH, SHAPE, ("barrier",),
          f"    const int barrier = kStoreBarrier + threadIdx.x / 128;\n{QUERIES_READ}",
          f"    const int barrier = 2;\n{QUERIES_READ}"),
    fault("one query head of a group", GROUPED, GROUPS, (WRONG,),
          "(blocks.last - blocks.first + 1) * params.group_size;", "blocks.last - blocks.first + 1;"),
    fault("a tile of queries leaves its first keys out", CAUSAL, DIAGONAL, (WRONG,),
          "count = last - keys.begin / kBlockM + 1;", "count = last - keys.begin / kBlockM;"),
    # Masks.
    fault("dQ counts keys past the last", PLAIN, FAR, (WRONG,),
          "const bool has_hidden = first_key + kBlockM > every.end;", "const bool has_hidden = false;"),
    fault("dQ counts keys ahead of the window", WINDOW, WINDOWED, (WRONG,),
          "const bool has_hidden = first_key + kBlockM > every.end || first_key < every.begin;",
          "const bool has_hidden = first_key + kBlockM > every.end;"),
    fault("the second row of a lane has the first one's keys", CAUSAL, DIAGONAL, (WRONG,),
          "const KeyRange& range = ranges[query / 8];", "const KeyRange& range = ranges[query / 16];"),
    fault("the gradient of LSE of rows that see nothing", CAUSAL, BLIND, (WRONG,),
          "lse == -INFINITY ? 0.0f : sum - dlse", "sum - dlse"),
    fault("delta of the wrong row of a lane", PLAIN, SHAPE, (WRONG,),
          "(ds[j] - delta[j / 2 % 2])", "(ds[j] - delta[j % 2])"),
    # The epilogue.
    fault("a gradient is stored without a proxy fence", WIDE, SHAPE, ("proxy",),
          "    fence_proxy_async();  // TMA would not see the writes otherwise\n", ""),
    fault("a gradient is stored ahead of other warps' rows", WIDE, SHAPE, (*ASYNC, "proxy", WRONG),
          "barrier_sync(barrier, 128); if (threadIdx.x % 128 == 0) {", "if (threadIdx.x % 128 == 0) {"),
    fault("shared memory goes before TMA has read it", PLAIN, SHAPE, ASYNC,
          f"{LAST_STORE}    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();", f"{LAST_STORE}    //"),
)  # fmt: skip
