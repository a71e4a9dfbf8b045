"""Faults to plant into rendered kernels, and the check of the simulator that must find each."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as replace_fields

from flashgen.simulator.example import Shape
from simulator.edits import replace

# Ways of finding a fault that are no SimulationError.
WRONG = "wrong numbers"


@dataclass(frozen=True)
class Fault:
    """``caught`` names the checks any of which may find it first: which one does depends on the order of
    threads. ``edits`` are (old text, new text) pairs for ``edits.replace``.
    """

    name: str
    variant: str
    shape: Shape
    caught: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]
    multiprocessors: int | None = None  # of the pretended GPU; None: its own

    def plant(self, source: str) -> str:
        """The source with the fault; AssertionError where the kernel is no longer written that way."""
        for old, new in self.edits:
            source = replace(source, old, new, self.name)
        return source


# One stage of K and V, 64 rows, 64 keys, 4 warps.
STAGES = "flash_fwd_hdim32_fp16_causal_m64_sm80"
PLAIN = "flash_fwd_hdim32_fp16_m64_sm80"
LOCAL = "flash_fwd_hdim32_fp16_local_m64_sm80"
DENSE = "flash_fwd_hdim32_fp16_dense_m64_sm80"
GQA = "flash_fwd_hdim32_fp16_m64_gqa_sm80"
PACKED = "flash_fwd_hdim32_fp16_causal_m64_packgqa_sm80"
FP32 = "flash_fwd_hdim32_fp32_m64_sm80"
# Two stages of K, without and with rows of a warp in both halves of a tile.
AHEAD = "flash_fwd_hdim32_fp16_sm80"
HALVES = "flash_fwd_hdim32_fp16_causal_sm80"
WINDOW_HALVES = "flash_fwd_hdim32_fp16_local_sm80"
# Pairs of warps that share their rows.
PAIRS = "flash_fwd_hdim256_fp16_sm80"
WINDOW_PAIRS = "flash_fwd_hdim256_fp16_local_sm80"
SPLIT_PAIRS = "flash_fwd_hdim192_fp16_causal_sm80"
# Two groups of warps in turns.
TURNS = "flash_fwd_hdim64_fp16_sm80"
DENSE_TURNS = "flash_fwd_hdim96_fp16_dense_sm80"

RAGGED = Shape(seqlen_q=100, seqlen_kv=150, heads=2)
SHORT_HEAD = Shape(seqlen_q=70, seqlen_kv=100, heads=2, head_dim=24)
NARROW_V = Shape(seqlen_q=70, seqlen_kv=100, heads=2, head_dim=24, head_dim_v=8)
# Heads enough that the random mask shows the keys of a fault in one of them, whatever the seed.
MASKED = Shape(seqlen_q=100, seqlen_kv=150, heads=8)
MASKED_CAUSAL = Shape(seqlen_q=100, seqlen_kv=150, heads=4, window=(-1, 0))
MASKED_WINDOW = Shape(seqlen_q=100, seqlen_kv=150, heads=8, window=(40, 15))
LONG = Shape(seqlen_q=300, seqlen_kv=520, heads=1)
# Scores of a standard deviation of 8, so that the running maximum moves.
WIDE = Shape(seqlen_q=100, seqlen_kv=300, heads=2, spread=8.0)
GROUPED = Shape(seqlen_q=50, seqlen_kv=100, heads=4, kv_heads=2)

RACE = ("race",)
ASYNC = ("race", "copy in flight", "uninitialised shared memory")
NUMBERS = (WRONG,)
BOUNDS = ("global bounds",)


def fault(
    name: str,
    variant: str,
    shape: Shape,
    caught: tuple[str, ...],
    *texts: str,
    multiprocessors: int | None = None,
) -> Fault:
    """``texts`` are old and new text in turn."""
    edits = tuple(zip(texts[::2], texts[1::2], strict=True))
    return Fault(name, variant, shape, caught, edits, multiprocessors)


def same_fault(faults: tuple[Fault, ...], name: str, variant: str, shape: Shape) -> Fault:
    """The fault of that name in another kernel, which has the same code."""
    (found,) = (fault for fault in faults if fault.name == name)
    return replace_fields(found, variant=variant, shape=shape)


FAULTS = (
    # Masks.
    fault("causal diagonal one key late", STAGES, RAGGED, NUMBERS,
          "query + params.diagonal_offset + 1)", "query + params.diagonal_offset + 2)"),
    fault("causal diagonal one key early", STAGES, RAGGED, NUMBERS,
          "query + params.diagonal_offset + 1)", "query + params.diagonal_offset)"),
    fault("window begins one key late", LOCAL, RAGGED, NUMBERS,
          "max(0, diagonal - params.window_left)", "max(0, diagonal - params.window_left + 1)"),
    fault("last key of the tail not hidden", PLAIN, Shape(seqlen_q=64, seqlen_kv=72), NUMBERS,
          "if (step >= end) score", "if (step > end) score"),
    fault("hidden block of keys not skipped but not masked either", STAGES, RAGGED, NUMBERS,
          "if (first_key + 8 * kKeyTiles > every.end) {", "if (false) {"),
    fault("mask word of the wrong lane", DENSE, MASKED, NUMBERS,
          "const int owner = row * kLanesPerRow + i * kKeysPerWord / kLaneKeys;",
          "const int owner = row * kLanesPerRow + i * kKeysPerWord / kLaneKeys ^ 1;"),
    fault("range beside a mask ends one key late", DENSE, MASKED_WINDOW, NUMBERS,
          "params.window_right + 1)", "params.window_right + 2)"),
    fault("range beside a mask begins one key early", DENSE, MASKED_WINDOW, NUMBERS,
          "max(0, diagonal - params.window_left)", "max(0, diagonal - params.window_left - 1)"),
    fault("end of the range beside a mask ignored", DENSE_TURNS, MASKED_CAUSAL, NUMBERS,
          "? keys.end - first_key - lane_key", "? params.seqlen_kv - first_key - lane_key"),
    fault("begin of the range beside a mask ignored", DENSE, MASKED_WINDOW, NUMBERS,
          "if (word_keys_before > 0) words", "if (false) words"),
    fault("first block of the range beside a mask left out", DENSE, MASKED_WINDOW, NUMBERS,
          "return {keys.begin / kBlockN, (keys.end", "return {keys.begin / kBlockN + 1, (keys.end"),
    # Softmax.
    fault("output not rescaled", PLAIN, WIDE, NUMBERS, "rows.output[n][2 * row8] *= correction[row8];", ""),
    fault("sum not rescaled", PLAIN, WIDE, NUMBERS, "rows.row_sum[row8] *= correction[row8];", ""),
    fault("sum of half a quad", PLAIN, RAGGED, NUMBERS, "value += __shfl_xor_sync(0xffffffff, value, 1);",
          ""),
    fault("sign in the log-sum-exp", PLAIN, RAGGED, NUMBERS,
          "(row_max + log2_approx(row_sum)) * kLn2", "(row_max - log2_approx(row_sum)) * kLn2"),
    fault("lanes of a warp part before a shuffle", PLAIN, WIDE, ("divergence", "deadlock"),
          "return __any_sync(0xffffffff, exceeds);", "return exceeds;"),
    # Registers.
    fault("scores not zeroed", PLAIN, RAGGED, ("uninitialised register", WRONG),
          "for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;", ""),
    fault("short sums of fp32 not zeroed", FP32, RAGGED, ("uninitialised register", WRONG),
          "float sums[kTiles][kTilesPerSum][4] = {};", "float sums[kTiles][kTilesPerSum][4];"),
    fault("halves of K's fragment swapped", PLAIN, RAGGED, NUMBERS,
          "(scores[i][j], q_fragment[i], k_fragment[0], k_fragment[1])",
          "(scores[i][j], q_fragment[i], k_fragment[1], k_fragment[0])"),
    fault("registers of P's fragment swapped", PLAIN, RAGGED, NUMBERS,
          "fragment[i][j / 2][j % 2 * 2] = pack", "fragment[i][j / 2][j % 2 * 2 + 4] = pack",
          "fragment[i][j / 2][j % 2 * 2 + 1] = pack", "fragment[i][j / 2][j % 2 * 2] = pack",
          "fragment[i][j / 2][j % 2 * 2 + 4] = pack", "fragment[i][j / 2][j % 2 * 2 + 1] = pack"),
    fault("V not transposed", PLAIN, RAGGED, NUMBERS,
          "ldmatrix_x4_trans(v_fragment, ", "ldmatrix_x4(v_fragment, "),
    fault("low part of a split fp32 forgotten", FP32, RAGGED, NUMBERS,
          "    mma_m16n8k8_tf32(accumulator, a.low, b_high[0], b_high[1]);\n", ""),
    # Barriers and copies.
    fault("no barrier before K is read", STAGES, RAGGED, ASYNC,
          "        barrier_sync(kThreads);\n        copy_v(params, v, v_stage, block);",
          "        copy_v(params, v, v_stage, block);"),
    fault("no barrier before V is read", STAGES, RAGGED, ASYNC,
          "        barrier_sync(kThreads);\n        if (block > blocks.first) fetch_k(",
          "        if (block > blocks.first) fetch_k("),
    fault("wait for K one group short", STAGES, RAGGED, ("copy in flight",),
          "cp_async_wait<0>();\n        barrier_sync(kThreads);\n        copy_v",
          "cp_async_wait<1>();\n        barrier_sync(kThreads);\n        copy_v"),
    fault("wait for V one group short", STAGES, RAGGED, ("copy in flight",),
          "cp_async_wait<0>();\n        barrier_sync(kThreads);\n        if (block",
          "cp_async_wait<1>();\n        barrier_sync(kThreads);\n        if (block"),
    fault("stash of a tile without keys read before it is written, K a block ahead", HALVES,
          Shape(seqlen_q=70, seqlen_kv=0), ("race", "uninitialised shared memory"),
          "barrier_sync(kThreads); } const LaneAddress q_lane", "} const LaneAddress q_lane"),
    fault("stash of a tile without keys read before it is written", STAGES, Shape(seqlen_q=70, seqlen_kv=0),
          ("race", "uninitialised shared memory"), "barrier_sync(kThreads); }", "}"),
    fault("stash and sums of a tile without keys read before they are written, pairs", PAIRS,
          Shape(seqlen_q=70, seqlen_kv=0), ("race", "uninitialised shared memory"),
          "    });\n    barrier_sync(kThreads);\n", "    });\n"),
    fault("no barrier before V is read, with the next K under way", HALVES, LONG, ASYNC,
          "cp_async_wait<1>();\n        barrier_sync(kThreads);\n", "cp_async_wait<1>();\n"),
    fault("wait for V one group short, with the next K under way", HALVES, LONG, ("copy in flight",),
          "cp_async_wait<1>();", "cp_async_wait<2>();"),
    fault("no empty group behind the V of the last block that is visited", HALVES, LONG, ("copy in flight",),
          "k_stage(block - 1), block - 1); cp_async_commit();",
          "k_stage(block - 1), block - 1); if (block > blocks.first) cp_async_commit();"),
    fault("next K into the stage of this one", HALVES, LONG, (*ASYNC, WRONG),
          "copy_k_whole(params, k, k_stage(block - 1), block - 1);",
          "copy_k_whole(params, k, k_stage(block), block - 1);"),
    fault("first visit does not wait for Q and K", AHEAD, LONG, ASYNC,
          "cp_async_wait<2>();", "cp_async_wait<3>();"),
    fault("last block of K taken for a whole one", AHEAD, RAGGED, BOUNDS,
          "copy_k(params, head.k, k_stage(blocks.last)", "copy_k_whole(params, head.k, k_stage(blocks.last)"),
    fault("last block of V taken for a whole one", HALVES, RAGGED, BOUNDS,
          "copy_v(params, head.v, v_stage, blocks.last)",
          "copy_v_whole(params, head.v, v_stage, blocks.last)"),
    fault("V of the first visit copied once more, into another block's place", AHEAD, LONG, (*ASYNC, WRONG),
          "if (block == blocks.last) {\n            cp_async_wait<2>();",
          "if (block == blocks.last - 1) {\n            cp_async_wait<2>();"),
    fault("upper half ends a block too soon", HALVES, LONG, NUMBERS,
          "kv_blocks_of(params, tile.first_row, kRowTileStep).last;",
          "kv_blocks_of(params, tile.first_row, kRowTileStep).last - 1;"),
    fault("lower half begins a block too late", WINDOW_HALVES, LONG, NUMBERS,
          "block >= lower_first; --block)", "block > lower_first; --block)"),
    fault("lower half masked as the upper one", WINDOW_HALVES, LONG, NUMBERS,
          "first_row_of(warp) + kFirst * kRowTileStep, block * kBlockN, lane)",
          "first_row_of(warp), block * kBlockN, lane)"),
    fault("no warp waits for the grids ahead", PLAIN, RAGGED, ("dependency",),
          "    griddepcontrol_wait();\n", ""),
    fault("one warp waits for the grids ahead", PLAIN, RAGGED, ("dependency",),
          "    griddepcontrol_wait();\n", "    if (warp == 0) griddepcontrol_wait();\n"),
    fault("P fetched before the partner has stored it", PAIRS, RAGGED, ASYNC,
          "        barrier_sync(kThreads);\n        P<kRowTiles> partner_p;",
          "        P<kRowTiles> partner_p;"),
    fault("P stored before the partner has fetched that of the block before", PAIRS, RAGGED, ASYNC,
          "        cp_async_wait<0>();\n        barrier_sync(kThreads);\n        copy_v(",
          "        cp_async_wait<0>();\n        copy_v("),
    fault("own P fetched for the partner's", PAIRS, RAGGED, NUMBERS,
          "16 * (((1 - pair.part) * kKeyTiles + 2 * j + lane / 16) ^ lane % 8)",
          "16 * ((pair.part * kKeyTiles + 2 * j + lane / 16) ^ lane % 8)"),
    fault("row_max of the partner left alone", PAIRS, WIDE, NUMBERS,
          "if (raised || partner_raised)", "if (raised)"),
    fault("partner taken to have raised row_max with oneself", PAIRS, WIDE, NUMBERS,
          "const float partner_max = partner_raised\n", "const float partner_max = true\n"),
    fault("row_max before it was raised taken from another lane", PAIRS, WIDE, NUMBERS,
          "__shfl_sync(0xffffffff, previous_max, 2 * i + row8, 4)",
          "__shfl_sync(0xffffffff, previous_max, 2 * i, 4)"),
    fault("P of the partner not rescaled", PAIRS, WIDE, NUMBERS,
          "scale_p(partner_p, i, partner_correction);", ""),
    fault("sums of half of the keys", PAIRS, RAGGED, NUMBERS,
          "__uint_as_float(load_shared_32(pair.partner_sums + row_bytes(i, row8, lane)))", "0.0f"),
    fault("sums fetched before the partner has stored them", PAIRS, RAGGED, ASYNC,
          "    });\n    barrier_sync(kThreads);\n", "    });\n"),
    fault("output stored before the partner's columns are there", PAIRS, RAGGED, RACE,
          "barrier_sync(kThreads); constexpr int kPasses = kWarpRows / 2 / kRowsPerPass;",
          "__syncwarp(); constexpr int kPasses = kWarpRows / 2 / kRowsPerPass;"),
    fault("halves of the middle panel of V exchanged", SPLIT_PAIRS, RAGGED, NUMBERS,
          "v_panel ^ pair.part * kSwizzleBytes / 2", "v_panel ^ (1 - pair.part) * kSwizzleBytes / 2"),
    fault("halves of the middle panel of the output exchanged", SPLIT_PAIRS, RAGGED, NUMBERS,
          "part * kSwizzleChunks / 2 + n;", "(1 - part) * kSwizzleChunks / 2 + n;"),
    fault("masks of both parts as of the first", WINDOW_PAIRS, RAGGED, NUMBERS,
          "block * kBlockN + first_key, lane)", "block * kBlockN, lane)"),
    fault("no wait before a turn", TURNS, LONG, ASYNC,
          "auto begin_turn = [&]() { cp_async_wait<0>();", "auto begin_turn = [&]() {"),
    fault("no barrier before a turn", TURNS, LONG, (*ASYNC, "barrier", "deadlock"),
          "auto begin_turn = [&]() { cp_async_wait<0>(); barrier_sync(kThreads);",
          "auto begin_turn = [&]() { cp_async_wait<0>();"),
    fault("no barrier after a turn", TURNS, LONG, (*ASYNC, "barrier", "deadlock"),
          "auto end_turn = [&](int block) { barrier_sync(kThreads);", "auto end_turn = [&](int block) {"),
    fault("second group starts in step with the first", TURNS, LONG, (*ASYNC, "barrier", "deadlock"),
          "    if (group == 1) begin_turn();  // one turn behind\n", ""),
    fault("first group leaves without the last barrier", TURNS, LONG, ("barrier", "deadlock"),
          "if (group == 0) barrier_sync(kThreads);  // the second group's last turn begins here", ""),
    fault("group releases its stages before its MMAs", TURNS, LONG, ASYNC,
          "mma_pv(rows, p, v_fragments, v_lane(block));\n"
          "            mma_qk(scores, q_lane, k_lane(block - 1));\n            --block;\n"
          "            end_turn(block);",
          "--block;\n            end_turn(block);\n"
          "            mma_pv(rows, p, v_fragments, v_lane(block + 1));\n"
          "            mma_qk(scores, q_lane, k_lane(block));"),
    fault("copies always into the first stage", TURNS, LONG, ASYNC,
          "copy_rows<kHeadDim>(copy_stages + block % 2 * kStageBytes,", "copy_rows<kHeadDim>(copy_stages,"),
    fault("K of the wrong stage", TURNS, LONG, (*ASYNC, WRONG), "k_lane(block - 1)", "k_lane(block)"),
    fault("no warp barrier in the epilogue", PLAIN, RAGGED, RACE,
          "    __syncwarp();  // the warp reads only rows it wrote itself\n", ""),
    fault("no warp barrier between a mask's copy and its use", DENSE_TURNS,
          Shape(seqlen_q=100, seqlen_kv=150, heads=1), ASYNC,
          "cp_async_wait<0>();\n        __syncwarp();\n", "cp_async_wait<0>();\n"),
    # Addresses.
    fault("swizzle of the row below, on the writing side", PLAIN, RAGGED, NUMBERS,
          "destination = block + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));",
          "destination = block + row * kRowBytes + 16 * (chunk ^ swizzle_key(row + 2));"),
    fault("K read past its last row", PLAIN, RAGGED, BOUNDS,
          "params.k_row_stride, seen_rows(params, block * kBlockN),", "params.k_row_stride, {kBlockN},"),
    fault("V read past its last row", PLAIN, RAGGED, BOUNDS,
          "params.v_row_stride, seen_rows(params, block * kBlockN),", "params.v_row_stride, {kBlockN},"),
    fault("Q read past its last row", PLAIN, RAGGED, BOUNDS,
          "first < rows_left && element_index < params.head_dim ? 16 : 0",
          "element_index < params.head_dim ? 16 : 0"),
    fault("K and V read past a short head dim", PLAIN, SHORT_HEAD, BOUNDS,
          "chunk * kChunkElements < head_dim;", "chunk * kChunkElements < kColumns;"),
    fault("V read as wide as K", PLAIN, NARROW_V, BOUNDS,
          "                         params.head_dim_v);", "                         params.head_dim);"),
    fault("output written as wide as Q", PLAIN, NARROW_V, BOUNDS,
          "if (tile_row < num_rows(params) && element_index < params.head_dim_v) {",
          "if (tile_row < num_rows(params) && element_index < params.head_dim) {"),
    fault("mask read past its last key", DENSE, RAGGED, BOUNDS,
          "valid ? min(kBytes, left) : 0", "valid ? kBytes : 0"),
    fault("mask read past its last row", DENSE, RAGGED, BOUNDS,
          "const bool valid = tile_row < num_rows(params) && ", "const bool valid = "),
    fault("mask read 16 bytes at a time from rows aligned to 4", DENSE,
          Shape(seqlen_q=100, seqlen_kv=150, mask_alignment=4), ("alignment",),
          "params.mask_vector_width >= 16", "params.mask_vector_width >= 4"),
    fault("output written past its last row", PLAIN, RAGGED, BOUNDS,
          "if (tile_row < num_rows(params) && element_index < params.head_dim_v) {",
          "if (element_index < params.head_dim_v) {"),
    fault("output written past a short head dim", PLAIN, SHORT_HEAD, BOUNDS,
          "if (tile_row < num_rows(params) && element_index < params.head_dim_v) {",
          "if (tile_row < num_rows(params)) {"),
    fault("log-sum-exp written past its last row", PLAIN, RAGGED, (*BOUNDS, WRONG),
          "if (row < num_rows(params)) {", "{"),
    fault("input overwritten", PLAIN, RAGGED, ("global access",),
          "element* out = params.out + tile.batch",
          "element* out = const_cast<element*>(params.q) + tile.batch"),
    # Heads.
    fault("kv head taken modulo", GQA, GROUPED, NUMBERS,
          "tile.kv_head = divide(head, params.group_size_divisor);", "tile.kv_head = head % 2;"),
    fault("query of a packed row, where keys are hidden", PACKED, GROUPED, NUMBERS,
          "const int end = keys_of_query(params, query_of_row(params, row)).end",
          "const int end = keys_of_query(params, query_of_row(params, row + 1)).end"),
    fault("query of a packed row", PACKED, GROUPED, BOUNDS,
          "int row) {\n    return divide(row, params.group_size_divisor);",
          "int row) {\n    return divide(row + 1, params.group_size_divisor);"),
    fault("head of a packed row", PACKED, GROUPED, (*BOUNDS, WRONG),
          "const int head = tile.head + row - query * params.group_size;",
          "const int head = tile.head + row - query;"),
)  # fmt: skip
