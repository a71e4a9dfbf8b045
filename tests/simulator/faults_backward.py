"""Faults to plant into the kernels of the backward pass: in what comes before the main one, in its stages, in
what warps hand to each other, in dQ, in the step that rounds it."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.simulator.example import Shape
from flashgen.source.render import render
from simulator.edits import replace
from simulator.faults import ASYNC, NUMBERS, RACE, WRONG

# Two warps share keys and have halves of the queries and of the columns; two stages.
PLAIN = "flash_bwd_hdim32_fp16_sm80"
CAUSAL = "flash_bwd_hdim32_fp16_causal_gqa_sm80"
WINDOW = "flash_bwd_hdim32_fp16_local_sm80"
DENSE = "flash_bwd_hdim32_fp16_dense_sm80"
FP32 = "flash_bwd_hdim32_fp32_sm80"
# Warps whose columns of dQ lie side by side.
BESIDE = "flash_bwd_hdim192_fp16_sm80"
# One stage.
SINGLE = "flash_bwd_hdim192_fp16_sm86"

SHAPE = Shape(seqlen_q=150, seqlen_kv=200, heads=2)
GROUPS = Shape(seqlen_q=150, seqlen_kv=200, heads=4, kv_heads=2)
# More queries than keys: some see nothing.
BLIND = Shape(seqlen_q=150, seqlen_kv=90, heads=2, kv_heads=1)
# Scores so far below 0 that a key past the end, with score 0, would have an infinite P.
FAR = Shape(seqlen_q=70, seqlen_kv=1, heads=4, spread=300.0)
SHORT = Shape(seqlen_q=70, seqlen_kv=100, heads=2, head_dim=24, head_dim_v=16)
WIDE = Shape(seqlen_q=100, seqlen_kv=70, heads=1)
WINDOWED = Shape(seqlen_q=300, seqlen_kv=330, heads=1, window=(100, 15))


@dataclass(frozen=True)
class Fault:
    """``step`` is the kernel of the call that has it; the rest as in ``faults.Fault``."""

    name: str
    variant: str
    step: str
    shape: Shape
    caught: tuple[str, ...]
    old: str
    new: str

    def plant(self, source: str) -> str:
        """The source with the fault; AssertionError where the kernel is no longer written that way."""
        return replace(source, self.old, self.new, self.name)

    def sources(self, step):
        """The source of a step of the call, which may be the one with the fault."""
        return self.plant(render(step)) if step.step == self.step else render(step)


FAULTS = (
    # Rows.
    Fault("the gradient of LSE with the wrong sign", PLAIN, "preprocess", SHAPE, (WRONG,),
          "sum - dlse", "sum + dlse"),
    Fault("LSE in natural units", PLAIN, "preprocess", SHAPE, (WRONG,), "lse * kLog2e", "lse"),
    Fault("rows that see nothing", CAUSAL, "preprocess", BLIND, (WRONG,), "return INFINITY;",
          "return -INFINITY;"),
    Fault("the gradient of LSE of rows that see nothing", CAUSAL, "preprocess", BLIND, (WRONG,),
          "lse == -INFINITY ? 0.0f : sum - dlse", "sum - dlse"),
    Fault("half of a row", PLAIN, "preprocess", SHAPE, (WRONG,),
          "distance < kLanes;", "distance < kLanes / 4;"),
    Fault("dQ is not cleared", PLAIN, "preprocess", SHAPE, (WRONG,),
          "store_global_128(cleared + i, {});", "if (i > 1024) store_global_128(cleared + i, {});"),
    Fault("rows past the last one are not written", PLAIN, "preprocess", SHAPE, (WRONG,),
          "if (lane != 0) continue;",
          "if (lane != 0 || first_row + row_of_unit >= params.seqlen_q) continue;"),
    # Stages.
    Fault("Q and dO are not awaited", PLAIN, "main", SHAPE, ASYNC, "        cp_async_wait<0>();\n", ""),
    Fault("warps do not wait for each other's copies", PLAIN, "main", SHAPE, ASYNC,
          "        cp_async_wait<0>();\n        barrier_sync(kThreads);\n", "        cp_async_wait<0>();\n"),
    Fault("the next step's copies into this one's stage", PLAIN, "main", SHAPE, ASYNC,
          "(left - 1) % kStages", "left % kStages"),
    Fault("one stage, and no wait for its readers", SINGLE, "main", WIDE, ASYNC,
          "barrier_sync(kThreads); copy_queries(params, block, next,", "copy_queries(params, block, next,"),
    Fault("the step before the one it should be", PLAIN, "main", SHAPE, (WRONG,),
          "copy_queries(params, block, next,", "copy_queries(params, block, step,"),
    Fault("rows past the last query", PLAIN, "main", SHAPE, ("global bounds", WRONG),
          "const int valid_rows = params.seqlen_q - first_query;", "const int valid_rows = kBlockM;"),
    # Scores.
    Fault("keys past the end", PLAIN, "main", FAR, (WRONG,),
          "        apply_mask(params, p, first_query + warp_query, block.first_key + warp_key, lane);\n", ""),
    Fault("a diagonal that is a key off", CAUSAL, "main", GROUPS, (WRONG,),
          "min(params.seqlen_kv, query + params.diagonal_offset + 1)",
          "min(params.seqlen_kv, query + params.diagonal_offset + 2)"),
    Fault("the first block of queries under a diagonal", CAUSAL, "main", GROUPS, (WRONG,),
          "max(0, first_key - params.diagonal_offset)", "max(0, first_key - params.diagonal_offset + 64)"),
    Fault("the last queries of a window", WINDOW, "main", WINDOWED, (WRONG,),
          "int64_t(last_key) - params.diagonal_offset + params.window_left;",
          "int64_t(last_key) - params.diagonal_offset;"),
    Fault("the mask of the warps beside", DENSE, "main", SHAPE, NUMBERS,
          "(warp_query + query - first_query) * kMaskRowBytes", "(query - first_query) * kMaskRowBytes"),
    # Products.
    Fault("dS of all warps is not awaited", PLAIN, "main", SHAPE, (*RACE, "uninitialised shared memory"),
          "barrier_sync(kThreads); add_dq(params, block,", "add_dq(params, block,"),
    Fault("own queries once more", PLAIN, "main", SHAPE, (WRONG,), "(part + other) % kQueryWarps", "part"),
    Fault("P in place of dS", PLAIN, "main", SHAPE, (WRONG,),
          "mma_dq(dq, smem + kDsOffset,", "mma_dq(dq, smem + kPOffset,"),
    Fault("even and odd keys of an fp32 operand", FP32, "main", WIDE, (WRONG,),
          "odd(block, row + lane % 4 * 2 + 1, chunk", "odd(block, row + lane % 4 * 2, chunk"),
    # dQ.
    Fault("dQ of one block of keys alone", PLAIN, "main", SHAPE, (WRONG,),
          "red_add_128(tile, dq[i][n]);",
          "for (int e = 0; e < 4; ++e) store_global_32(tile + e, dq[i][n][e]);"),
    Fault("dQ of the rows of the warp beside", PLAIN, "main", SHAPE, (WRONG,),
          "const int first_query = step.block * kBlockM + first_row;",
          "const int first_query = step.block * kBlockM;"),
    Fault("dQ of the columns of the warp beside", BESIDE, "main", WIDE, (WRONG,),
          "column_warp * kDqWarpStride) / 8", "column_warp) / 8"),
    # Results.
    Fault("dK and dV while K and V are read", PLAIN, "main", SHAPE, RACE,
          "barrier_sync(kThreads); store_gradients(params,", "store_gradients(params,"),
    Fault("keys past the end are written", PLAIN, "main", SHAPE, ("global bounds", "global access"),
          "if (first + row >= valid_rows) break;", ""),
    Fault("columns past the head dim are written", PLAIN, "main", SHORT, ("global bounds", "global access"),
          "if (first_column + chunk * kChunkElements >= columns) break;", ""),
    Fault("dQ without the scale", PLAIN, "convert", SHAPE, (WRONG,),
          "rows[pass][row8], params.softmax_scale,", "rows[pass][row8], 1.0f,"),
    Fault("elements of a tile in another order", PLAIN, "convert", SHAPE, (WRONG,),
          "rows[e / 2][2 * t + e % 2]", "rows[e % 2][2 * t + e / 2]"),
    Fault("does not wait for the grid ahead", PLAIN, "main", SHAPE, ("dependency",),
          "    griddepcontrol_wait();\n", ""),
)  # fmt: skip
