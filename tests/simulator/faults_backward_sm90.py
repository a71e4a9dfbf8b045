"""Faults to plant into the main kernel of the backward pass for Hopper: in its stages, in what its warpgroups
hand to each other, in masks, in dQ on its way, in the epilogue."""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, WRONG
from simulator.faults_backward import Fault

# 128 queries a step; and 64, where a consumer has half of the columns of dQ and dV is under way while dS is
# computed.
ROWS = "flash_bwd_hdim64_fp16_sm90"
COLUMNS = "flash_bwd_hdim128_bf16_causal_sm90"
GROUPED = "flash_bwd_hdim64_fp16_causal_gqa_sm90"
HELD = "flash_bwd_hdim96_bf16_causal_sm90"  # with rows of K and V in registers
WINDOW = "flash_bwd_hdim32_bf16_local_sm90"
SKIPS = "flash_bwd_hdim128_bf16_local_sm90"  # steps of which a consumer sees nothing
DENSE = "flash_bwd_hdim128_fp16_dense_sm90"

SHAPE = Shape(seqlen_q=400, seqlen_kv=150, heads=1)
CAUSAL = Shape(seqlen_q=300, seqlen_kv=200, heads=1)
GROUPS = Shape(seqlen_q=150, seqlen_kv=140, heads=2, kv_heads=1)
WINDOWED = Shape(seqlen_q=300, seqlen_kv=300, heads=1, window=(150, 20))
SKIPPED = Shape(seqlen_q=320, seqlen_kv=256, heads=1, window=(64, 0), top_left=True)
# The last copy of a row of the mask is not whole. Heads enough that the random mask shows the keys of faults.
MASKED = Shape(seqlen_q=200, seqlen_kv=141, heads=4, window=(20, 30))
# Scores so far below 0 that a key past the end, with score 0, would have an infinite P.
FAR = Shape(seqlen_q=70, seqlen_kv=1, heads=4, spread=300.0)

PROXY = ("proxy",)
# With phases out of step anything may come first.
PHASES = (*ASYNC, "deadlock", "mbarrier", WRONG)


def fault(name: str, variant: str, shape: Shape, caught: tuple[str, ...], old: str, new: str) -> Fault:
    return Fault(name, variant, "main", shape, caught, old, new)


DS_WAIT = "        mbarrier_wait(barriers.ds_ready(), (i + 1) % 2);\n"
DS_FENCE = "        fence_proxy_async();\n        wgmma_wait<1>();\n"
DS_RELEASE = (
    "        __syncwarp();  // all lanes have written their dS, and read LSE and delta of the stage\n"
    "        release(barriers.ds_ready());\n"
)
LAST_WAIT = "        wgmma_wait<0>();\n        pin_registers(dv);\n        pin_registers(dk);\n"
RELEASE = "        release(barriers.empty(ring.stage));\n"

FAULTS = (
    # Stages.
    fault("Q is not awaited", ROWS, SHAPE, ASYNC,
          "        mbarrier_wait(barriers.q_full(ring.stage), ring.parity);\n", ""),
    fault("dO is not awaited", ROWS, SHAPE, ASYNC,
          "        mbarrier_wait(barriers.dout_full(ring.stage), ring.parity);\n", ""),
    fault("K is not awaited", ROWS, SHAPE, PHASES, "shared, barriers, 0, kKBytes);", "shared, barriers, 0);"),
    fault("LSE is not announced", ROWS, SHAPE, PHASES,
          "(full, kQBytes + kQueryValueBytes + more_bytes)", "(full, kQBytes + more_bytes)"),
    fault("LSE of another stage", ROWS, SHAPE, (*ASYNC, WRONG),
          "lse.load(shared + kLseOffset + ring.stage * kQueryValueBytes",
          "lse.load(shared + kLseOffset + (ring.stage ^ 1) * kQueryValueBytes"),
    fault("Q is released ahead of dK", ROWS, SHAPE, ASYNC, LAST_WAIT + RELEASE, RELEASE + LAST_WAIT),
    fault("a stage is loaded though it is not empty", COLUMNS, CAUSAL, PHASES,
          "    mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);\n", ""),
    # K and V in registers.
    fault("K in registers is not awaited", HELD, CAUSAL, ASYNC,
          "        mbarrier_wait(barriers.q_full(0), 0);\n", ""),
    fault("V in registers is not awaited", HELD, CAUSAL, ASYNC,
          "        mbarrier_wait(barriers.dout_full(0), 0);\n", ""),
    fault("K in place of V", HELD, CAUSAL, (WRONG,),
          "v_rows.load(v_smem, lane);", "v_rows.load(k_smem, lane);"),
    fault("columns exchanged in registers", HELD, CAUSAL, (WRONG,),
          "ldmatrix_x4(fragment[column / 16],", "ldmatrix_x4(fragment[column / 16 ^ 1],"),
    fault("other columns than those that registers lack", HELD, CAUSAL, (WRONG,),
          "(scores, a + ((panel * kBlockN * kPanelRowBytes + byte) >> 4)",
          "(scores, a + ((panel * kBlockN * kPanelRowBytes + (byte ^ 32)) >> 4)"),
    # dS, from consumer to consumer.
    fault("dS is written over while it is read", ROWS, SHAPE, ASYNC, DS_WAIT, ""),
    fault("dS is awaited a step late", ROWS, SHAPE, PHASES,
          "(barriers.ds_ready(), (i + 1) % 2)", "(barriers.ds_ready(), i % 2)"),
    fault("dS without a proxy fence", COLUMNS, CAUSAL, PROXY, DS_FENCE, "        wgmma_wait<1>();\n"),
    fault("dS of one lane", COLUMNS, CAUSAL, (*ASYNC, "proxy"), DS_RELEASE,
          "        release(barriers.ds_ready());\n"),
    fault("dS of this step in place of the last one", ROWS, SHAPE, (*ASYNC, *PROXY, WRONG),
          "shared + kDsOffset + (i + 1) % 2 * kDsBytes : shared",
          "shared + kDsOffset + i % 2 * kDsBytes : shared"),
    fault("dS in rows of the other consumer", ROWS, SHAPE, (*ASYNC, *PROXY, WRONG),
          "const int key = warp_key + lane % 16;", "const int key = (warp_key ^ 64) + lane % 16;"),
    # The start of a step, by turns.
    fault("nobody lets consumer 0 start", COLUMNS, CAUSAL, ("deadlock",),
          "    if (consumer == 1 && count > 0) barrier_arrive(kStartBarrier, 128 * kConsumers);\n", ""),
    fault("a start behind the last step", ROWS, SHAPE, ("barrier",),
          "if (consumer == 0 || i + 1 < count) barrier_arrive", "barrier_arrive"),
    # Matrix products.
    fault("the next panel of Q and dO where that of K is", COLUMNS, CAUSAL, (*ASYNC, WRONG),
          "descriptor(b_smem, 8 * kPanelRowBytes, kBlockM * kPanelRowBytes)",
          "descriptor(b_smem, 8 * kPanelRowBytes, kBlockN * kPanelRowBytes)"),
    fault("dP is used before it is there", COLUMNS, CAUSAL, ("register in flight",),
          "dout_smem);\n        wgmma_wait<1>();\n        pin_registers(ds);\n",
          "dout_smem);\n        wgmma_wait<2>();\n        pin_registers(ds);\n"),
    # Scores.
    fault("delta of the neighbouring query", ROWS, SHAPE, (WRONG,),
          "(i % 2 ? values.y : values.x)", "(i % 2 ? values.x : values.y)"),
    fault("a diagonal one query late", COLUMNS, CAUSAL, (WRONG,),
          "if (query < begin[key / 8])", "if (query <= begin[key / 8])"),
    fault("the last masked block is not masked", COLUMNS, CAUSAL, (WRONG,),
          "block.first_key + warp_key + 15)", "block.first_key + warp_key)"),
    fault("a window one query long", WINDOW, WINDOWED, (WRONG,),
          "int64_t(diagonal) + params.window_left + 1", "int64_t(diagonal) + params.window_left + 2"),
    fault("keys past the end", ROWS, FAR, (WRONG,), "key < params.seqlen_kv ? 0 : params.seqlen_q", "0"),
    fault("the first block that a window's end cuts is not masked", SKIPS, SKIPPED, (WRONG,),
          "block.first_key + warp_key).end - kBlockM;", "block.first_key + warp_key).end;"),
    # Steps that a consumer skips.
    fault("what is skipped is seen", SKIPS, SKIPPED, PHASES,
          "query_block * kBlockM < end_query &&", "query_block * kBlockM + 64 < end_query &&"),
    fault("dS of a first step that is skipped", SKIPS, SKIPPED, (*ASYNC, WRONG), "store_zero_ds(0);", ""),
    fault("dS of a last step that is skipped", SKIPS, SKIPPED, (*ASYNC, WRONG),
          "store_zero_ds(count - 1);", ""),
    fault("the next step where the first one is skipped", SKIPS, SKIPPED, PHASES,
          "        ring.advance();\n        step = next_step(step, queries);\n    }\n\n",
          "        step = next_step(step, queries);\n    }\n\n"),
    fault("the stage of a skipped step is not released", SKIPS, SKIPPED, ("deadlock",),
          "        release(barriers.empty(0));\n", ""),
    fault("a skipped step lets the other one not start", SKIPS, SKIPPED, ("deadlock", "barrier"),
          "if (consumer == 0 || count > 1) barrier_arrive", "if (false) barrier_arrive"),
    fault("dQ of the step ahead of a skipped one", SKIPS, SKIPPED, (WRONG,),
          "        add_dq_of_warp(dq_address_of(previous), dq);\n        previous = step;\n",
          "        previous = step;\n"),
    # A dense mask.
    fault("the mask of the neighbouring head", DENSE, MASKED, (WRONG,),
          "head_of(params, block, next.step) * params.mask_head_stride",
          "(head_of(params, block, next.step) ^ 1) * params.mask_head_stride"),
    fault("the mask a query late", DENSE, MASKED, (WRONG,),
          "const int query = next.step.block * kBlockM + next.first;",
          "const int query = next.step.block * kBlockM + next.first + 1;"),
    fault("the mask past its last row", DENSE, MASKED, ("global bounds",),
          "cp_async_16(destination, source, query < queries ? bytes : 0)",
          "cp_async_16(destination, source, bytes)"),
    fault("the mask past its last key", DENSE, MASKED, ("global bounds",),
          "min(max(keys - key, 0), kBytes)", "kBytes"),
    fault("the copy of the mask is not awaited", DENSE, MASKED, (*ASYNC, WRONG),
          "        cp_async_wait<1>();\n", ""),
    fault("the mask that one lane has copied", DENSE, MASKED, (*ASYNC, WRONG),
          "__syncwarp(); uint32_t hidden[4] = {", "uint32_t hidden[4] = {"),
    fault("a copy of the mask over what is still read", DENSE, MASKED, (*ASYNC, WRONG),
          "(2 * warp + i % 2) * kMaskBufferBytes", "2 * warp * kMaskBufferBytes"),
    fault("queries outside of the range", DENSE, MASKED, (WRONG,),
          "hidden[key] | bits_outside(range,", "hidden[key] | 0 * bits_outside(range,"),
    fault("a range one query long", DENSE, MASKED, (WRONG,),
          "~bits_before(range.end - first_query)", "~bits_before(range.end + 1 - first_query)"),
    fault("the mask of the lane's other key", DENSE, MASKED, (WRONG,),
          "if (hidden[key / 8][query / 32]", "if (hidden[1 - key / 8][query / 32]"),
    fault("the mask is not awaited", DENSE, MASKED, (*ASYNC, WRONG),
          "        mbarrier_wait(barriers.mask_full(ring.stage), ring.parity);\n", ""),
    fault("the mask is written though its buffer is not empty", DENSE, MASKED, PHASES,
          "mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);\n        const shared_address words",
          "const shared_address words"),
    # dQ.
    fault("what the first step computes of dQ is added", ROWS, SHAPE, (WRONG,),
          "if (i > 0) add_dq_of_warp(dq_sums, dq);", "add_dq_of_warp(dq_sums, dq);"),
    fault("dQ of the last step is not", ROWS, SHAPE, (WRONG,),
          "        add_dq_of_warp(dq_address_of(previous), dq);\n    }\n", "    }\n"),
    fault("dQ of this step's block", GROUPED, GROUPS, ("global bounds", "uninitialised global memory", WRONG),
          "        previous = step;\n        step = next_step(step, queries);\n",
          "        step = next_step(step, queries);\n        previous = step;\n"),
    # The epilogue.
    fault("dK over K that is still read", ROWS, SHAPE, ASYNC,
          "    mbarrier_wait(barriers.ds_ready(), count % 2);  // no warp reads K any longer",
          "    // no warp reads K any longer"),
    fault("dK without softmax_scale", COLUMNS, CAUSAL, (WRONG,),
          "params.dk, dk, params.softmax_scale,", "params.dk, dk, 1.0f,"),
    fault("gradients without a proxy fence", ROWS, SHAPE, PROXY,
          "fence_proxy_async(); barrier_sync(barrier, 128);", "barrier_sync(barrier, 128);"),
    fault("nobody waits until gradients have been read", ROWS, SHAPE, ("copy in flight",),
          "    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();",
          "    if (false) tma_store_wait_read<0>();"),
    fault("the grid ahead is not awaited", ROWS, SHAPE, ("dependency",), "    griddepcontrol_wait();\n", ""),
)  # fmt: skip
