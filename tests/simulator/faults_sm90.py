"""Faults to plant into rendered Hopper kernels; see ``faults``."""

from __future__ import annotations

import dataclasses

from flashgen.simulator.example import Shape
from simulator.faults import BOUNDS, NUMBERS, WRONG, Fault, fault

# Two consumers that take turns, two stages, two Q buffers; a head in one panel, and in two.
TURNS = "flash_fwd_hdim64_fp16_m128_sm90"
PANELS = "flash_fwd_hdim128_bf16_causal_sm90"
# One consumer and one Q buffer; a swizzle of 64 bytes.
SINGLE = "flash_fwd_hdim96_fp16_causal_m64_sm90"
LOCAL = "flash_fwd_hdim64_fp16_local_m64_sm90"
# Warpgroups that skip KV blocks at both ends of a window.
WINDOW = "flash_fwd_hdim96_fp16_local_sm90"
DENSE = "flash_fwd_hdim64_fp16_dense_sm90"
PACKED = "flash_fwd_hdim64_bf16_causal_m64_packgqa_sm90"

# Several tiles to a thread block, and more KV blocks than stages.
LONG = Shape(seqlen_q=200, seqlen_kv=600, heads=2)
CAUSAL = Shape(seqlen_q=300, seqlen_kv=500, heads=1)
SLIDING = Shape(seqlen_q=300, seqlen_kv=500, heads=1, window=(150, 20))
GROUPED = Shape(seqlen_q=50, seqlen_kv=400, heads=4, kv_heads=1)
# A mask and a range together, in two heads: the random mask of one may hide the keys of a fault. The range of
# the last tile of NOTHING_LEFT lies behind every key.
MASKED_CAUSAL = Shape(seqlen_q=200, seqlen_kv=400, heads=2, window=(-1, 0))
MASKED_WINDOW = Shape(seqlen_q=200, seqlen_kv=400, heads=2, window=(150, 20))
NOTHING_LEFT = Shape(seqlen_q=700, seqlen_kv=100, heads=1, window=(30, 30), top_left=True)
# Scores of a standard deviation of 8, so that the running maximum moves.
WIDE = Shape(seqlen_q=130, seqlen_kv=600, heads=1, spread=8.0)
STEEP = Shape(seqlen_q=130, seqlen_kv=600, heads=4, spread=40.0)

ASYNC = ("race", "copy in flight", "uninitialised shared memory")
STUCK = ("deadlock",)
REGISTERS = ("register in flight",)
DEPENDENT = ("dependency",)
# With phases out of step anything may come first.
PHASES = (*ASYNC, "deadlock", "mbarrier", WRONG)

WAIT = "    griddepcontrol_wait();\n"
STORE = (
    "store_tile(params, finished, output, rows, finished.first_row + warp_row, lane, staging, consumer);\n"
)
LAST_STORE = "store_tile(params, tile, output, rows, tile.first_row + warp_row, lane, q_smem, consumer);\n"
# What a thread does to a word of Q's buffer once it is full; the MMA reads it afterwards.
REWRITE = """            const shared_address word = q_smem + threadIdx.x % 128 * 4;
            store_shared_32(word, load_shared_32(word));
            FENCEbarrier_sync(8 + consumer, 128);
"""
EXPECTED = "mbarrier_arrive_expect_tx(full, kPanelCount * kBlockN * row_bytes);"
FIRST_MMA = """        begin_turn();
        mma_qk(scores, q_smem, shared.k(k_ring.stage));
        end_turn();
"""
K_WAIT = "mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);\n"
FIRST_WAIT = f"            float scores[kBlockN / 2];\n            {K_WAIT}"
FIRST_TURN = f"        {K_WAIT}{FIRST_MMA}"
RELEASE = "            mbarrier_arrive(shared.q_empty(q_ring.stage ^ 1));\n"
READ = "            tma_store_wait_read<0>();\n" + RELEASE
SKIPPED = "        release(shared.v_empty(v_ring.stage));\n        v_ring.advance();\n    };\n"
LOOP_WAIT = "            wgmma_wait<1>();\n            pin_registers(scores);\n"
OUTPUT_WAIT = "            wgmma_wait<0>();\n            pin_registers(output);\n"
V_RELEASE = "            release(shared.v_empty(v_ring.stage));\n"
# After these comes what only the loop has.
LOOP_RELEASE = V_RELEASE + "            v_ring.advance();\n            p.set(scores);\n"
LOOP_OUTPUT = OUTPUT_WAIT + LOOP_RELEASE
LOOP_PV = "mma_pv(output, p, shared.v(v_ring.stage)); end_turn();"
LAST_RELEASE = V_RELEASE + "        v_ring.advance();\n        tiles.advance();\n"


def planted(
    name: str, caught: tuple[str, ...], *texts: str, variant: str = TURNS, shape: Shape = LONG
) -> Fault:
    """A fault of a kernel whose blocks take several tiles."""
    return fault(name, variant, shape, caught, *texts, multiprocessors=1)


FAULTS = (
    # Barriers of the pipeline.
    planted("consumer waits for the wrong phase of K", PHASES, FIRST_TURN,
            FIRST_TURN.replace("k_ring.parity", "k_ring.parity ^ 1")),
    planted("consumer does not wait for V", ASYNC,
            "            mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);\n" + LOOP_PV, LOOP_PV),
    planted("consumer does not wait for Q", ASYNC,
            "        mbarrier_wait(shared.q_full(q_ring.stage), q_ring.parity);\n", ""),
    planted("one lane of a warp waits for K", ("race", "copy in flight"), FIRST_WAIT,
            FIRST_WAIT.replace("mbarrier_wait", "if (lane == 0) mbarrier_wait"),
            variant=SINGLE, shape=CAUSAL),
    planted("producer waits for the wrong phase of K", STUCK,
            "mbarrier_wait(shared.k_empty(ring.stage), ring.parity ^ 1);",
            "mbarrier_wait(shared.k_empty(ring.stage), ring.parity);"),
    planted("producer does not wait for a stage of V", (*ASYNC, "mbarrier"),
            "            mbarrier_wait(shared.v_empty(ring.stage), ring.parity ^ 1);\n", ""),
    planted("phase of Q never changes for the producer", PHASES,
            "q_ring.parity ^ 1);\n        load_q", "1);\n        load_q"),
    planted("phase of a ring never changes", PHASES, "        parity ^= stage == 0;\n", ""),
    planted("stages of K never released in the loop", STUCK,
            LOOP_WAIT + "            release(shared.k_empty(k_ring.stage));\n", LOOP_WAIT),
    planted("Q never released", STUCK, RELEASE, ""),
    planted("Q released before the loop that reads it", ASYNC,
            "            }\n            release(shared.q_empty(q_ring.stage));\n", "            }\n",
            "p.set(scores); for (--kv_block;",
            "p.set(scores); release(shared.q_empty(q_ring.stage)); for (--kv_block;",
            variant=SINGLE, shape=CAUSAL),
    planted("Q of a tile without keys not released", STUCK,
            "        if (!visible) release", "        if (false) release",
            variant=SINGLE, shape=Shape(seqlen_q=300, seqlen_kv=50, heads=1)),
    # O's way through the Q buffer.
    planted("output not made visible to TMA", ("proxy",), "    fence_proxy_async();", "    "),
    planted("output copied before all warps have staged it", ("race", "proxy", "uninitialised shared memory"),
            "    barrier_sync(kStoreBarrier + consumer, 128);\n", ""),
    planted("Q loaded into an output that has not left", ("copy in flight",), READ, RELEASE),
    planted("the other Q buffer released", (*PHASES,),
            "shared.q_empty(q_ring.stage ^ 1)", "shared.q_empty(q_ring.stage)"),
    planted("output copied out of another panel", NUMBERS,
            "tma_store_4d(params.out, staging + panel * kBlockM * kPanelRowBytes",
            "tma_store_4d(params.out, staging", variant=PANELS, shape=CAUSAL),
    planted("output of each warpgroup to the rows of the first", ("race", WRONG),
            "tile.first_row + 64 * consumer, tile.head", "tile.first_row, tile.head"),
    planted("output staged without a swizzle", NUMBERS, "chunk ^ row % 8;", "chunk;"),
    planted("output of 64 bytes a row staged under another swizzle", NUMBERS,
            "chunk ^ row / 2 % 4;", "chunk ^ row % 4;", variant=WINDOW, shape=SLIDING),
    planted("every panel of the output to the first columns", NUMBERS,
            "kPanelRowBytes, panel * kPanelColumns,\n                         tile.first_row + 64 * consumer",
            "kPanelRowBytes, 0,\n                         tile.first_row + 64 * consumer",
            variant=PANELS, shape=CAUSAL),
    planted("output staged where the next queries lie", (*PHASES,), STORE,
            STORE.replace("staging", "q_smem")),
    planted("output stored as that of the next tile", ("race", WRONG), STORE,
            STORE.replace("finished", "tile")),
    planted("output of rows ahead of the first copied", ("operand",),
            " && tile.first_row + 64 * consumer >= 0;", ";", variant=PANELS, shape=CAUSAL),
    planted("log-sum-exp of rows ahead of the first written", (*BOUNDS, "race"),
            "return row >= 0 && row < num_rows(params);", "return row < num_rows(params);",
            variant=PANELS, shape=CAUSAL),
    planted("tiles shifted by a warpgroup too many", NUMBERS,
            " - params.rows_ahead;", " - params.rows_ahead - 64;", variant=PANELS, shape=CAUSAL),
    planted("nobody waits until the last output has left", ("copy in flight",),
            "    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();", "    "),
    # KV blocks that a warpgroup skips.
    planted("K of a block that is skipped not released", STUCK,
            "        end_turn();\n        release(shared.k_empty(k_ring.stage));\n", "        end_turn();\n",
            variant=PANELS, shape=CAUSAL),
    planted("the block of the diagonal skipped", NUMBERS,
            "(keys.end + kBlockN - 1) / kBlockN - 1}",
            "(keys.end + kBlockN - 1) / kBlockN - 1 - (count == 64)}", variant=PANELS, shape=CAUSAL),
    planted("V of a block that is skipped not released", STUCK, SKIPPED,
            SKIPPED.replace("        release(shared.v_empty(v_ring.stage));\n", ""),
            variant=WINDOW, shape=SLIDING),
    planted("no turn taken for a block that is skipped", (*PHASES, "barrier"),
            "        begin_turn();\n        end_turn();\n", "", variant=WINDOW, shape=SLIDING),
    planted("a block with keys skipped", NUMBERS,
            "{keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1}",
            "{keys.begin / kBlockN + (count == 64), (keys.end + kBlockN - 1) / kBlockN - 1}",
            variant=WINDOW, shape=SLIDING),
    planted("stage of K released before its MMAs are done", ASYNC,
            "        wgmma_wait<0>();\n        pin_registers(scores);\n"
            "        release(shared.k_empty(k_ring.stage));\n",
            "        release(shared.k_empty(k_ring.stage));\n"
            "        wgmma_wait<0>();\n        pin_registers(scores);\n"),
    planted("stage of V released before its MMAs are done", ASYNC, LOOP_OUTPUT,
            LOOP_OUTPUT.replace(OUTPUT_WAIT + V_RELEASE, V_RELEASE + OUTPUT_WAIT)),
    planted("every lane releases", (*PHASES, "divergence"),
            "if (lane == 0) mbarrier_arrive(empty);", "mbarrier_arrive(empty);"),
    planted("too few arrivals make a stage empty", PHASES,
            "mbarrier_init(shared.k_empty(stage), 4 * kConsumers);",
            "mbarrier_init(shared.k_empty(stage), 4);"),
    planted("more arrivals than warps make a stage empty", STUCK,
            "mbarrier_init(shared.v_empty(stage), 4 * kConsumers);",
            "mbarrier_init(shared.v_empty(stage), 4 * kConsumers + 1);"),
    planted("more bytes announced than come", STUCK, EXPECTED, EXPECTED.replace(");", " + 16);")),
    planted("fewer bytes announced than come", STUCK,
            "mbarrier_arrive_expect_tx(full, kQBytes);", "mbarrier_arrive_expect_tx(full, kQBytes - 16);"),
    planted("bytes of one panel announced, two come", (*ASYNC, "mbarrier", "deadlock"), EXPECTED,
            EXPECTED.replace(");", " / 2);"), variant=PANELS, shape=CAUSAL),
    planted("initialised barriers not made visible to TMA", ("proxy",),
            "        fence_mbarrier_init();\n", ""),
    planted("no barrier after the initialisation", ("race", "mbarrier"), "    __syncthreads();\n", ""),
    planted("barriers within the last stage", ("mbarrier",),
            "barriers(begin + offsetof(SharedStorage, q_full))",
            "barriers(begin + offsetof(SharedStorage, q_full) - 64)"),
    # Copies.
    planted("two threads produce", (*PHASES,),
            "if (threadIdx.x == 0) produce", "if (threadIdx.x < 2) produce"),
    planted("V loaded to where K lies", (*ASYNC, WRONG),
            "(shared.v(ring.stage), params.v", "(shared.k(ring.stage), params.v"),
    planted("always the first stage loaded", ASYNC,
            "(shared.k(ring.stage), params.k", "(shared.k(0), params.k"),
    planted("one KV block too many loaded", (*PHASES,),
            "for (int kv_block = blocks.last; kv_block >= blocks.first; --kv_block) produce_kv",
            "for (int kv_block = blocks.last; kv_block >= blocks.first - 1; --kv_block) produce_kv"),
    planted("keys from one row too late", NUMBERS,
            "kv_block * kBlockN), tile.kv_head, tile.batch);\n            mbarrier_wait",
            "kv_block * kBlockN + 1), tile.kv_head, tile.batch);\n            mbarrier_wait"),
    planted("panels of Q side by side", (*ASYNC, "mbarrier", WRONG),
            "tma_load_4d(destination + panel * kBlockM * kPanelRowBytes",
            "tma_load_4d(destination + panel * 64 * kPanelRowBytes", variant=PANELS, shape=CAUSAL),
    planted("query of a packed tile", NUMBERS,
            "tile.first_row / params.group_size, tile.kv_head", "tile.first_row, tile.kv_head",
            variant=PACKED, shape=GROUPED),
    planted("shared memory begins where the swizzle does not", ("operand",),
            "(to_shared(shared_memory) + 1023) / 1024 * 1024",
            "(to_shared(shared_memory) + 1023) / 1024 * 1024 + 128"),
    planted("shared memory not aligned for TMA", ("alignment",),
            "(to_shared(shared_memory) + 1023) / 1024 * 1024",
            "(to_shared(shared_memory) + 1023) / 1024 * 1024 + 16"),
    # MMAs.
    planted("stride of K's descriptor", (*ASYNC, WRONG),
            "descriptor(k_smem, 8 * kPanelRowBytes)", "descriptor(k_smem, 4 * kPanelRowBytes)"),
    planted("strides of V's descriptor swapped", (*ASYNC, WRONG),
            "descriptor(v_smem, 8 * kPanelRowBytes, kBlockN * kPanelRowBytes)",
            "descriptor(v_smem, kBlockN * kPanelRowBytes, 8 * kPanelRowBytes)", variant=PANELS, shape=CAUSAL),
    planted("swizzle of 64 bytes for 128", (*ASYNC, WRONG, "operand"), "kSwizzle = 1;", "kSwizzle = 2;"),
    planted("swizzle of 128 bytes for 64", (*ASYNC, WRONG, "operand"),
            "kSwizzle = 2;", "kSwizzle = 1;", variant=SINGLE, shape=CAUSAL),
    planted("step along K of half its bytes", NUMBERS,
            "k + ((panel * kBlockN * kPanelRowBytes + byte) >> 4)",
            "k + ((panel * kBlockN * kPanelRowBytes + byte / 2) >> 4)"),
    planted("scores added to those of the block before", (*REGISTERS, "uninitialised register", WRONG),
            "column > 0);", "1);"),
    planted("no wait for the scores", REGISTERS, LOOP_WAIT, "            pin_registers(scores);\n"),
    planted("wait for the scores one group short", REGISTERS, LOOP_WAIT, LOOP_WAIT.replace("<1>", "<2>")),
    planted("wait for the output one group short", (*REGISTERS, *ASYNC), LOOP_OUTPUT,
            LOOP_OUTPUT.replace("<0>", "<1>")),
    planted("scores not pinned after the wait", REGISTERS, LOOP_WAIT, "            wgmma_wait<1>();\n"),
    planted("output not pinned after the wait", REGISTERS,
            "wgmma_wait<0>(); pin_registers(output);" + LAST_RELEASE, "wgmma_wait<0>();" + LAST_RELEASE),
    planted("MMAs not committed", REGISTERS,
            "column > 0);\n    }\n    wgmma_commit();\n", "column > 0);\n    }\n"),
    planted("no fence before the MMAs of S", REGISTERS,
            "    pin_registers(scores);\n    wgmma_fence();\n", "    pin_registers(scores);\n"),
    planted("P replaced while it is multiplied", REGISTERS, LOOP_OUTPUT,
            "            p.set(scores);\n" + LOOP_OUTPUT),
    planted("output rescaled while it is added to", REGISTERS, LOOP_OUTPUT,
            "            if (moved) rescale(output, rows);\n" + LOOP_OUTPUT, shape=WIDE),
    planted("output of a warpgroup not rescaled", NUMBERS,
            "            if (moved) rescale(output, rows);\n", "", shape=WIDE),
    planted("P past the largest number of fp16", NUMBERS,
            "__fadd_rd(rows.row_max[half], kSlack + kPBias)",
            "__fadd_rd(rows.row_max[half], kSlack + 2 * kPBias)", shape=STEEP),
    planted("a word of Q written without a proxy fence", ("proxy",), FIRST_MMA,
            REWRITE.replace("FENCE", "") + FIRST_MMA),
    planted("a word of Q written without a barrier before the MMAs", ("race",), FIRST_WAIT,
            f"{FIRST_WAIT}\n{REWRITE[: REWRITE.index('FENCE')]}fence_proxy_async();",
            variant=SINGLE, shape=CAUSAL),
    # Masks.
    planted("a key behind the last one not hidden", NUMBERS,
            "(distance + 1) / 8 + distance / 8", "(distance + 2) / 8 + distance / 8"),
    planted("keys before the window not hidden", NUMBERS,
            "kv_block * kBlockN >= seen_by_all.begin && ", "", variant=LOCAL, shape=CAUSAL),
    planted("one lane releases an entry for its warp", ("race",),
            "warp_row, lane);\n        mbarrier_arrive(shared.mask_empty(mask_ring.stage));\n",
            "warp_row, lane);\n        if (lane == 0) mbarrier_arrive(shared.mask_empty(mask_ring.stage));\n",
            "mbarrier_init(shared.mask_empty(stage), 128 * kConsumers + 1);",
            "mbarrier_init(shared.mask_empty(stage), 4 * kConsumers + 1);", variant=DENSE),
    planted("bits packed into an entry that is still read", (*PHASES,),
            "            mbarrier_wait(shared.mask_empty(ring.stage), ring.parity ^ 1);\n", "",
            variant=DENSE),
    planted("entry released before it is read", (*PHASES,),
            "        MaskedBlock kv_block;\n",
            "        mbarrier_arrive(shared.mask_empty(mask_ring.stage));\n        MaskedBlock kv_block;\n",
            "warp_row, lane);\n        mbarrier_arrive(shared.mask_empty(mask_ring.stage));\n",
            "warp_row, lane);\n", variant=DENSE),
    planted("the producer thread does not release an entry", STUCK,
            "offsetof(MaskEntry, kv_block));\n        mbarrier_arrive(shared.mask_empty(mask_ring.stage));\n",
            "offsetof(MaskEntry, kv_block));\n", variant=DENSE),
    # A range of keys beside the mask.
    planted("range beside a mask ends one key late on Hopper", NUMBERS,
            "params.window_right + 1)", "params.window_right + 2)", variant=DENSE, shape=MASKED_WINDOW),
    planted("range beside a mask begins one key early on Hopper", NUMBERS,
            "max(0, diagonal - params.window_left)", "max(0, diagonal - params.window_left - 1)",
            variant=DENSE, shape=MASKED_WINDOW),
    planted("range beside a mask ignored within a block", NUMBERS,
            "if (!kWhole && !inside) {", "if (false) {", variant=DENSE, shape=MASKED_CAUSAL),
    planted("bytes of the mask hidden as if the words began at the lane's first key", NUMBERS,
            "64 * piece + 4 * i - shift;", "64 * piece + 4 * i;",
            variant=DENSE, shape=dataclasses.replace(MASKED_CAUSAL, mask_alignment=1)),
    planted("block at the begin of the range taken for one inside", NUMBERS,
            "first_key >= every.begin && ", "", variant=DENSE, shape=MASKED_WINDOW),
    planted("a tile without a range is not ended", STUCK,
            "min(blocks.first, blocks.last + 1) - 1;", "blocks.first - 1;",
            variant=DENSE, shape=NOTHING_LEFT),
    # Turns and registers.
    planted("turn for too few threads", ("barrier", "deadlock"),
            "{ barrier_sync(kTurnBarrier + consumer, 256); }",
            "{ barrier_sync(kTurnBarrier + consumer, 128); }"),
    planted("turn passed to oneself", STUCK,
            "barrier_arrive(kTurnBarrier + (consumer + 1) % kConsumers, 256);",
            "barrier_arrive(kTurnBarrier + consumer, 256);"),
    planted("nobody has the first turn", STUCK, "    if (consumer == kConsumers - 1) end_turn();\n", ""),
    planted("no barrier of that number", ("barrier",), FIRST_MMA,
            FIRST_MMA.replace("begin_turn()", "barrier_sync(16 + consumer, 256)")),
    planted("more registers wanted than the block has", STUCK,
            "setmaxnreg_inc<kConsumerRegisters>();", "setmaxnreg_inc<kConsumerRegisters + 8>();"),
    planted("too few registers given back", STUCK,
            "setmaxnreg_dec<kProducerRegisters>();", "setmaxnreg_dec<kProducerRegisters + 16>();"),
    planted("registers given back by one warp", ("deadlock", "register pool"),
            "setmaxnreg_dec<kProducerRegisters>();",
            "if (threadIdx.x < 32) setmaxnreg_dec<kProducerRegisters>();"),
    planted("a number of registers that there is not", ("register pool",),
            "setmaxnreg_inc<kConsumerRegisters>();", "setmaxnreg_inc<kConsumerRegisters - 4>();"),
    # Grids ahead of this one in the stream.
    planted("nobody waits for the grids ahead", DEPENDENT, WAIT, ""),
    planted("only the producer waits for the grids ahead", DEPENDENT, WAIT,
            "    if (warpgroup == 0) griddepcontrol_wait();\n"),
    planted("only the consumers wait for the grids ahead", DEPENDENT, WAIT,
            "    if (warpgroup != 0) griddepcontrol_wait();\n"),
    planted("warps that read the mask do not wait for the grids ahead", DEPENDENT, WAIT,
            "    if (warpgroup != 0 || threadIdx.x < 32) griddepcontrol_wait();\n", variant=DENSE),
    planted("output stored before the wait for the grids ahead", DEPENDENT, WAIT,
            "    if (warpgroup == 0) griddepcontrol_wait();\n", LAST_STORE,
            LAST_STORE + "    griddepcontrol_wait();\n"),
)  # fmt: skip

# What is planted beside a fault, without it.
HARMLESS = (
    planted("a word of Q written with a proxy fence", (), FIRST_MMA,
            REWRITE.replace("FENCE", "fence_proxy_async();\n            ") + FIRST_MMA),
    # Before that stage of K the producer asks for one of V, which is released after a wait for both.
    planted("stage of K released before its MMAs in the loop are done", (),
            LOOP_WAIT + "            release(shared.k_empty(k_ring.stage));\n",
            "            release(shared.k_empty(k_ring.stage));\n" + LOOP_WAIT),
)  # fmt: skip
