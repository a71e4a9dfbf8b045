"""Faults to plant into rendered kernels, and the check of the simulator that must find each."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.simulator.example import Shape

# Ways of finding a fault that are no SimulationError.
WRONG = "wrong numbers"


@dataclass(frozen=True)
class Fault:
    """``caught`` names the checks any of which may find it first: which one does depends on the order of
    threads. ``edits`` are (old text, new text) pairs; each old text stands once in the source of ``variant``.
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
            assert source.count(old) == 1, f"{self.name}: {old!r} stands {source.count(old)} times"
            source = source.replace(old, new)
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


FAULTS = (
    # Masks.
    fault(
        "causal diagonal one key late",
        STAGES,
        RAGGED,
        NUMBERS,
        "query + params.diagonal_offset + 1)",
        "query + params.diagonal_offset + 2)",
    ),
    fault(
        "causal diagonal one key early",
        STAGES,
        RAGGED,
        NUMBERS,
        "query + params.diagonal_offset + 1)",
        "query + params.diagonal_offset)",
    ),
    fault(
        "window begins one key late",
        LOCAL,
        RAGGED,
        NUMBERS,
        "max(0, diagonal - params.window_left)",
        "max(0, diagonal - params.window_left + 1)",
    ),
    fault(
        "last key of the tail not hidden",
        PLAIN,
        Shape(seqlen_q=64, seqlen_kv=72),
        NUMBERS,
        "if (8 * j >= end) scores",
        "if (8 * j > end) scores",
    ),
    fault(
        "hidden block of keys not skipped but not masked either",
        STAGES,
        RAGGED,
        NUMBERS,
        "if ((block + 1) * kBlockN > every.end) {\n        hide_late_keys",
        "if (false) {\n        hide_late_keys",
    ),
    fault(
        "mask word of the wrong lane",
        DENSE,
        RAGGED,
        NUMBERS,
        "const int owner = row * kLanesPerRow + 8 * first / kLaneKeys;",
        "const int owner = row * kLanesPerRow + 8 * first / kLaneKeys ^ 1;",
    ),
    # Softmax.
    fault(
        "output not rescaled",
        PLAIN,
        WIDE,
        NUMBERS,
        "output[i][n][2 * half] *= correction[half];",
        "",
    ),
    fault(
        "sum not rescaled",
        PLAIN,
        WIDE,
        NUMBERS,
        "rows.sum[i][half] *= correction[half];",
        "",
    ),
    fault(
        "sum of half a quad",
        PLAIN,
        RAGGED,
        NUMBERS,
        "value += __shfl_xor_sync(0xffffffff, value, 1);",
        "",
    ),
    fault(
        "sign in the log-sum-exp",
        PLAIN,
        RAGGED,
        NUMBERS,
        "rows.reference[i][half] + log2_approx",
        "rows.reference[i][half] - log2_approx",
    ),
    fault(
        "lanes of a warp part before a shuffle",
        PLAIN,
        WIDE,
        ("divergence", "deadlock"),
        "    moves = __any_sync(0xffffffff, moves);\n",
        "",
    ),
    # Registers.
    fault(
        "scores not zeroed",
        PLAIN,
        RAGGED,
        ("uninitialised register", WRONG),
        "for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;",
        "",
    ),
    fault(
        "short sums of fp32 not zeroed",
        FP32,
        RAGGED,
        ("uninitialised register", WRONG),
        "float sums[kRowTiles][kTilesPerSum][4] = {};",
        "float sums[kRowTiles][kTilesPerSum][4];",
    ),
    fault(
        "halves of K's fragment swapped",
        PLAIN,
        RAGGED,
        NUMBERS,
        "(scores[i][j], q_fragment[i], k_fragment[0], k_fragment[1])",
        "(scores[i][j], q_fragment[i], k_fragment[1], k_fragment[0])",
    ),
    fault(
        "registers of P's fragment swapped",
        PLAIN,
        RAGGED,
        NUMBERS,
        "fragment[i][j / 2][j % 2 * 2] = pack",
        "fragment[i][j / 2][j % 2 * 2 + 4] = pack",
        "fragment[i][j / 2][j % 2 * 2 + 1] = pack",
        "fragment[i][j / 2][j % 2 * 2] = pack",
        "fragment[i][j / 2][j % 2 * 2 + 4] = pack",
        "fragment[i][j / 2][j % 2 * 2 + 1] = pack",
    ),
    fault(
        "V not transposed",
        PLAIN,
        RAGGED,
        NUMBERS,
        "ldmatrix_x4_trans(v_fragment, ",
        "ldmatrix_x4(v_fragment, ",
    ),
    fault(
        "low part of a split fp32 forgotten",
        FP32,
        RAGGED,
        NUMBERS,
        "    mma_m16n8k8_tf32(accumulator, a.low, b_high[0], b_high[1]);\n",
        "",
    ),
    # Barriers and copies.
    fault(
        "no barrier before K is read",
        STAGES,
        RAGGED,
        ASYNC,
        "        barrier_sync(kThreads);\n        copy_v(first_v, v_tiles, block);",
        "        copy_v(first_v, v_tiles, block);",
    ),
    fault(
        "no barrier before V is read",
        STAGES,
        RAGGED,
        ASYNC,
        "        barrier_sync(kThreads);\n        if (block > first_block) copy_k(",
        "        if (block > first_block) copy_k(",
    ),
    fault(
        "wait for K one group short",
        STAGES,
        RAGGED,
        ("copy in flight",),
        "cp_async_wait<0>();\n        barrier_sync(kThreads);\n        copy_v",
        "cp_async_wait<1>();\n        barrier_sync(kThreads);\n        copy_v",
    ),
    fault(
        "wait for V one group short",
        STAGES,
        RAGGED,
        ("copy in flight",),
        "cp_async_wait<0>();\n        barrier_sync(kThreads);\n        if (block",
        "cp_async_wait<1>();\n        barrier_sync(kThreads);\n        if (block",
    ),
    fault(
        "note of a tile without keys read before it is written, K a block ahead",
        HALVES,
        Shape(seqlen_q=70, seqlen_kv=0),
        ("race", "uninitialised shared memory"),
        "barrier_sync(kThreads);  // the note is written: a tile",
        "// a tile",
    ),
    fault(
        "note of a tile without keys read before it is written",
        STAGES,
        Shape(seqlen_q=70, seqlen_kv=0),
        ("race", "uninitialised shared memory"),
        "barrier_sync(kThreads);  // the note is written: a tile",
        "// a tile",
    ),
    fault(
        "no barrier before V is read, with the next K under way",
        HALVES,
        LONG,
        ASYNC,
        "cp_async_wait<1>();\n        barrier_sync(kThreads);\n",
        "cp_async_wait<1>();\n",
    ),
    fault(
        "wait for V one group short, with the next K under way",
        HALVES,
        LONG,
        ("copy in flight",),
        "cp_async_wait<1>();",
        "cp_async_wait<2>();",
    ),
    fault(
        "no empty group behind the V of the last block that is visited",
        HALVES,
        LONG,
        ("copy in flight",),
        "cp_async_commit();  // nothing, so that V's is the last group but one here, too",
        "",
    ),
    fault(
        "next K into the stage of this one",
        HALVES,
        LONG,
        (*ASYNC, WRONG),
        "copy_k(Whole{}, k, k_stage(block - 1), block - 1);",
        "copy_k(Whole{}, k, k_stage(block), block - 1);",
    ),
    fault(
        "first visit does not wait for Q and K",
        AHEAD,
        LONG,
        ASYNC,
        "cp_async_wait<2>();",
        "cp_async_wait<3>();",
    ),
    fault(
        "last block of K taken for a whole one",
        AHEAD,
        RAGGED,
        BOUNDS,
        "copy_k(MaybeRagged{}, first_k,",
        "copy_k(Whole{}, first_k,",
    ),
    fault(
        "last block of V taken for a whole one",
        HALVES,
        RAGGED,
        BOUNDS,
        "copy_v(MaybeRagged{}, first_v,",
        "copy_v(Whole{}, first_v,",
    ),
    fault(
        "V of the first visit copied once more, into another block's place",
        AHEAD,
        LONG,
        (*ASYNC, WRONG),
        "if (block == last_block) {\n            cp_async_wait<2>();",
        "if (block == last_block - 1) {\n            cp_async_wait<2>();",
    ),
    fault(
        "upper half ends a block too soon",
        HALVES,
        LONG,
        NUMBERS,
        "kRowTileStep).end + kBlockN - 1) / kBlockN - 1;",
        "kRowTileStep).end + kBlockN - 1) / kBlockN - 2;",
    ),
    fault(
        "lower half begins a block too late",
        WINDOW_HALVES,
        LONG,
        NUMBERS,
        "block >= lower_first; --block)",
        "block > lower_first; --block)",
    ),
    fault(
        "window of one half checked with the rows of both",
        WINDOW_HALVES,
        LONG,
        NUMBERS,
        "keys_of_every(params, tile_row + kBegin * kRowTileStep, (kEnd - kBegin) * kRowTileStep)",
        "keys_of_every(params, tile_row, kRowTileStep)",
    ),
    fault(
        "no warp waits for the grids ahead",
        PLAIN,
        RAGGED,
        ("dependency",),
        "    griddepcontrol_wait();\n",
        "",
    ),
    fault(
        "one warp waits for the grids ahead",
        PLAIN,
        RAGGED,
        ("dependency",),
        "    griddepcontrol_wait();\n",
        "    if (warp == 0) griddepcontrol_wait();\n",
    ),
    fault(
        "weights fetched before the partner has stored them",
        PAIRS,
        RAGGED,
        ASYNC,
        "        barrier_sync(kThreads);\n\n        const shared_address fetched_weights",
        "\n        const shared_address fetched_weights",
    ),
    fault(
        "weights stored before the partner has fetched those of the block before",
        PAIRS,
        RAGGED,
        ASYNC,
        "        cp_async_wait<0>();\n        barrier_sync(kThreads);\n        copy_v(",
        "        cp_async_wait<0>();\n        copy_v(",
    ),
    fault(
        "own weights fetched for the partner's",
        PAIRS,
        RAGGED,
        NUMBERS,
        "16 * (((1 - part) * kKeyTiles + 2 * j + lane / 16) ^ lane % 8)",
        "16 * ((part * kKeyTiles + 2 * j + lane / 16) ^ lane % 8)",
    ),
    fault(
        "references of the partner left alone",
        PAIRS,
        WIDE,
        NUMBERS,
        "if (moved || partner_moved) {",
        "if (moved) {",
    ),
    fault(
        "partner taken to have moved with oneself",
        PAIRS,
        WIDE,
        NUMBERS,
        "partner_moved ? __uint_as_float(load_shared_32(partner_moves + 16 + 4 * row_in_pair(i, half)))",
        "true ? __uint_as_float(load_shared_32(partner_moves + 16 + 4 * row_in_pair(i, half)))",
    ),
    fault(
        "reference before a move taken from another lane",
        PAIRS,
        WIDE,
        NUMBERS,
        "__shfl_sync(0xffffffff, previous_reference, 2 * i + half, 4)",
        "__shfl_sync(0xffffffff, previous_reference, 2 * i, 4)",
    ),
    fault(
        "weights of the partner not rescaled",
        PAIRS,
        WIDE,
        NUMBERS,
        "partner_weights.scale(i, partner_correction);",
        "",
    ),
    fault(
        "sums of half of the keys",
        PAIRS,
        RAGGED,
        NUMBERS,
        "__uint_as_float(load_shared_32(partner_sums + 4 * row_in_pair(i, half)))",
        "0.0f",
    ),
    fault(
        "sums fetched before the partner has stored them",
        PAIRS,
        RAGGED,
        ASYNC,
        "    }\n    barrier_sync(kThreads);\n#pragma unroll\n    for (int i = 0; i < kRowTiles; ++i) {\n"
        "#pragma unroll\n        for (int half = 0; half < 2; ++half) {\n            rows.sum[i][half] +=",
        "    }\n#pragma unroll\n    for (int i = 0; i < kRowTiles; ++i) {\n"
        "#pragma unroll\n        for (int half = 0; half < 2; ++half) {\n            rows.sum[i][half] +=",
    ),
    fault(
        "output stored before the partner's columns are there",
        PAIRS,
        RAGGED,
        RACE,
        "    barrier_sync(kThreads);\n    constexpr int kStoredRows",
        "    __syncwarp();\n    constexpr int kStoredRows",
    ),
    fault(
        "halves of the middle panel of V exchanged",
        SPLIT_PAIRS,
        RAGGED,
        NUMBERS,
        "(operand_address(v_tiles, lane) ^ part * kSwizzleBytes / 2)",
        "(operand_address(v_tiles, lane) ^ (1 - part) * kSwizzleBytes / 2)",
    ),
    fault(
        "halves of the middle panel of the output exchanged",
        SPLIT_PAIRS,
        RAGGED,
        NUMBERS,
        "(lane_row ^ part * kSwizzleBytes / 2)",
        "(lane_row ^ (1 - part) * kSwizzleBytes / 2)",
    ),
    fault(
        "masks of both parts as of the first",
        WINDOW_PAIRS,
        RAGGED,
        NUMBERS,
        "block * kBlockN + warp / kPairs * kPartKeys",
        "block * kBlockN",
    ),
    fault(
        "no wait before products in turns",
        TURNS,
        LONG,
        ASYNC,
        "is here.\n        cp_async_wait<0>();\n",
        "is here.\n",
    ),
    fault(
        "no barrier before products in turns",
        TURNS,
        LONG,
        (*ASYNC, "barrier", "deadlock"),
        "is here.\n        cp_async_wait<0>();\n        barrier_sync(kThreads);\n",
        "is here.\n        cp_async_wait<0>();\n",
    ),
    fault(
        "no barrier after products in turns",
        TURNS,
        LONG,
        (*ASYNC, "barrier", "deadlock"),
        "overwrite.\n        barrier_sync(kThreads);\n",
        "overwrite.\n",
    ),
    fault(
        "second group starts in step with the first",
        TURNS,
        LONG,
        (*ASYNC, "barrier", "deadlock"),
        "    if (group == 1) {  // one turn behind\n        cp_async_wait<0>();\n"
        "        barrier_sync(kThreads);\n    }\n",
        "",
    ),
    fault(
        "first group leaves without the last barrier",
        TURNS,
        LONG,
        ("barrier", "deadlock"),
        "if (group == 0) barrier_sync(kThreads);  // the second group's last turn begins here",
        "",
    ),
    fault(
        "group releases its stages before the products",
        TURNS,
        LONG,
        ASYNC,
        "multiply_pv(output, weights, v_fragments, in_stage(v_lane, block));\n"
        "            multiply_qk(scores, q_lane, in_stage(k_lane, block - 1));\n            --block;\n"
        "            end_products(block);",
        "--block;\n            end_products(block);\n"
        "            multiply_pv(output, weights, v_fragments, in_stage(v_lane, block + 1));\n"
        "            multiply_qk(scores, q_lane, in_stage(k_lane, block));",
    ),
    fault(
        "copies always into the first stage",
        TURNS,
        LONG,
        ASYNC,
        "copy_rows<kHeadDim>(copy_tiles + block % 2 * kStageBytes,",
        "copy_rows<kHeadDim>(copy_tiles,",
    ),
    fault(
        "K of the wrong stage",
        TURNS,
        LONG,
        (*ASYNC, WRONG),
        "in_stage(k_lane, block - 1)",
        "in_stage(k_lane, block)",
    ),
    fault(
        "no warp barrier in the epilogue",
        PLAIN,
        RAGGED,
        RACE,
        "    __syncwarp();\n\n    // All pieces",
        "    // All pieces",
    ),
    fault(
        "no warp barrier between a mask's copy and its use",
        DENSE_TURNS,
        Shape(seqlen_q=100, seqlen_kv=150, heads=1),
        ASYNC,
        "cp_async_wait<0>();\n        __syncwarp();\n",
        "cp_async_wait<0>();\n",
    ),
    # Addresses.
    fault(
        "swizzle of the row below, on the writing side",
        PLAIN,
        RAGGED,
        NUMBERS,
        "destination = tile + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));",
        "destination = tile + row * kRowBytes + 16 * (chunk ^ swizzle_key(row + 2));",
    ),
    fault(
        "K read past its last row",
        PLAIN,
        RAGGED,
        BOUNDS,
        "copy_rows<kHeadDim>(stage, k + block * kBlockN * params.k_row_stride, params.k_row_stride,\n"
        "                            params.seqlen_kv - block * kBlockN,",
        "copy_rows<kHeadDim>(stage, k + block * kBlockN * params.k_row_stride, params.k_row_stride,\n"
        "                            kBlockN,",
    ),
    fault(
        "V read past its last row",
        PLAIN,
        RAGGED,
        BOUNDS,
        "copy_rows<kHeadDimV>(stage, v + block * kBlockN * params.v_row_stride, params.v_row_stride,\n"
        "                             params.seqlen_kv - block * kBlockN,",
        "copy_rows<kHeadDimV>(stage, v + block * kBlockN * params.v_row_stride, params.v_row_stride,\n"
        "                             kBlockN,",
    ),
    fault(
        "Q read past its last row",
        PLAIN,
        RAGGED,
        BOUNDS,
        "first < rows_left && element_index < params.head_dim ? 16 : 0",
        "element_index < params.head_dim ? 16 : 0",
    ),
    fault(
        "K and V read past a short head dim",
        PLAIN,
        SHORT_HEAD,
        BOUNDS,
        "chunk * kChunkElements < head_dim ? 16",
        "chunk * kChunkElements < kColumns ? 16",
    ),
    fault(
        "V read as wide as K",
        PLAIN,
        NARROW_V,
        BOUNDS,
        "params.seqlen_kv - block * kBlockN, params.head_dim_v);",
        "params.seqlen_kv - block * kBlockN, params.head_dim);",
    ),
    fault(
        "output written as wide as Q",
        PLAIN,
        NARROW_V,
        BOUNDS,
        "if (tile_row < num_rows(params) && element_index < params.head_dim_v) {",
        "if (tile_row < num_rows(params) && element_index < params.head_dim) {",
    ),
    fault(
        "mask read past its last key",
        DENSE,
        RAGGED,
        BOUNDS,
        "valid ? min(kBytes, params.seqlen_kv - first_key - key) : 0",
        "valid ? kBytes : 0",
    ),
    fault(
        "mask read past its last row",
        DENSE,
        RAGGED,
        BOUNDS,
        "const bool valid = tile_row < num_rows(params) && ",
        "const bool valid = ",
    ),
    fault(
        "mask read 16 bytes at a time from rows aligned to 4",
        DENSE,
        Shape(seqlen_q=100, seqlen_kv=150, mask_alignment=4),
        ("alignment",),
        "params.mask_vector_width >= 16",
        "params.mask_vector_width >= 4",
    ),
    fault(
        "output written past its last row",
        PLAIN,
        RAGGED,
        BOUNDS,
        "if (tile_row < num_rows(params) && element_index < params.head_dim_v) {",
        "if (element_index < params.head_dim_v) {",
    ),
    fault(
        "output written past a short head dim",
        PLAIN,
        SHORT_HEAD,
        BOUNDS,
        "if (tile_row < num_rows(params) && element_index < params.head_dim_v) {",
        "if (tile_row < num_rows(params)) {",
    ),
    fault(
        "log-sum-exp written past its last row",
        PLAIN,
        RAGGED,
        (*BOUNDS, WRONG),
        "if (row < num_rows(params)) {",
        "{",
    ),
    fault(
        "input overwritten",
        PLAIN,
        RAGGED,
        ("global access",),
        "element* out = params.out + tile.batch",
        "element* out = const_cast<element*>(params.q) + tile.batch",
    ),
    # Heads.
    fault(
        "kv head taken modulo",
        GQA,
        GROUPED,
        NUMBERS,
        "tile.kv_head = divide(tile.head, params.group_size_divisor);",
        "tile.kv_head = tile.head % params.num_heads_kv;",
    ),
    fault(
        "query of a packed row, where keys are hidden",
        PACKED,
        GROUPED,
        NUMBERS,
        "const int end = keys_of_query(params, query_of_row(params, row)).end",
        "const int end = keys_of_query(params, query_of_row(params, row + 1)).end",
    ),
    fault(
        "query of a packed row",
        PACKED,
        GROUPED,
        BOUNDS,
        "int row) {\n    return divide(row, params.group_size_divisor);",
        "int row) {\n    return divide(row + 1, params.group_size_divisor);",
    ),
    fault(
        "head of a packed row",
        PACKED,
        GROUPED,
        (*BOUNDS, WRONG),
        "const int head = tile.head + row - query * params.group_size;",
        "const int head = tile.head + row - query;",
    ),
)
