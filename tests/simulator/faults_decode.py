"""Faults to plant into the kernels of split-KV attention: in shares, in what groups of warps hand on, in what
the last step combines."""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, NUMBERS, RACE, WRONG, Fault, fault

# 16 rows, a warp a group; two row warps a group; both under masks; the step behind the first.
DECODE = "flash_decode_hdim64_bf16_packgqa_sm80"
ROWS = "flash_decode_hdim64_fp16_causal_m32_packgqa_sm80"
WINDOW = "flash_decode_hdim64_fp16_local_sm80"
COMBINE = "flash_combine_hdim64_bf16_packgqa_sm80"

# Tiles of 20 KV blocks on 3 multiprocessors: shares begin and end within tiles, and some have parts of two.
SPLIT = Shape(seqlen_q=1, seqlen_kv=2500, heads=4, kv_heads=2, batch=2)
QUERIES = Shape(seqlen_q=5, seqlen_kv=2500, heads=8, kv_heads=2)
WINDOWED = Shape(seqlen_q=3, seqlen_kv=2900, heads=2, window=(2400, 0))
# Scores of a standard deviation of 8, so that row_max differs from part to part.
WIDE = Shape(seqlen_q=1, seqlen_kv=2500, heads=4, kv_heads=2, spread=8.0)
# More parts of a tile than the step that combines has warps.
MANY_PARTS = Shape(seqlen_q=1, seqlen_kv=5200, heads=2, kv_heads=1, spread=8.0)
# More rows than the step that combines has thread blocks.
MANY_ROWS = Shape(seqlen_q=1, seqlen_kv=2500, heads=16, kv_heads=2, batch=4)

UNWAITED = ("dependency",)
UNSEEN = ("uninitialised shared memory",)


def split(name: str, variant: str, shape: Shape, caught: tuple[str, ...], *texts: str) -> Fault:
    """A fault on a GPU so small that tiles are split."""
    return fault(name, variant, shape, caught, *texts, multiprocessors=3)


FAULTS = (
    # Shares.
    split("a share begins a KV block late", DECODE, SPLIT, NUMBERS,
          "share_of(params, thread_block) * params.kv_blocks_per_share;",
          "share_of(params, thread_block) * params.kv_blocks_per_share + (thread_block == 1);"),
    split("a share ends a KV block early", DECODE, SPLIT, NUMBERS,
          "return {begin, begin + min(params.kv_blocks_per_share,",
          "return {begin, begin - (thread_block == 1) + min(params.kv_blocks_per_share,"),
    fault("neighbouring thread blocks have the same head", DECODE, SPLIT, NUMBERS,
          " + (thread_block & ((1 << params.head_sets_log2) - 1));", " + (thread_block & 0);",
          multiprocessors=6),
    fault("parts of the neighbouring set of heads", COMBINE, SPLIT, NUMBERS,
          "parts.set = head - (nth_head << params.head_sets_log2);", "parts.set = 0;", multiprocessors=6),
    split("K and V stay with the tile before", DECODE, SPLIT, NUMBERS,
          "if (--fetch.left > 0) {", "if (--fetch.left > -1000) {"),
    split("Q of the tile before", DECODE, SPLIT, NUMBERS,
          "if (more) copy_q(params, find_tile(params, part.tile + 1), smem);",
          "if (more) cp_async_commit();"),
    split("both parts of a share in one slot", DECODE, SPLIT, NUMBERS, "(index == share.begin ? 0 : 1)", "0"),
    split("a part taken for a whole tile", DECODE, SPLIT, NUMBERS,
          "count == params.kv_blocks_per_tile ? -1 : slot",
          "count >= params.kv_blocks_per_tile - 7 ? -1 : slot"),
    split("a part that is lost", DECODE, SPLIT, NUMBERS,
          "if (part.slot >= 0) {", "if (part.slot == 2) {\n    } else if (part.slot >= 0) {"),
    split("a window that begins with the first KV block", WINDOW, WINDOWED, NUMBERS,
          "const int first = params.first_kv_block + index - tile_begin;",
          "const int first = index - tile_begin;"),
    # Stages.
    split("a wait that is one KV block short", DECODE, SPLIT, ASYNC,
          "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();"),
    split("lanes do not wait for each other's copies", DECODE, SPLIT, ASYNC,
          "void sync_group(int) { __syncwarp(); }", "void sync_group(int) {}"),
    split("row warps do not wait for each other's copies", ROWS, QUERIES, ASYNC,
          "barrier_sync(kGroupBarrier + group, kGroupThreads);", "__syncwarp();"),
    split("fetched into the stage that is computed", DECODE, SPLIT, (*ASYNC, WRONG),
          "fetch_next(params, share, fetch, stage_address(stage == 0 ? kStages - 1 : stage - 1), group);",
          "fetch_next(params, share, fetch, stage_address(stage), group);"),
    split("Q is not waited for", DECODE, SPLIT, ASYNC,
          "cp_async_wait<0>();\n        barrier_sync(kThreads);  // Q is here",
          "barrier_sync(kThreads);  // Q is here"),
    split("the first Q is not waited for", DECODE, SPLIT, ASYNC,
          "cp_async_wait<kStages - 1>();", "cp_async_wait<kStages>();"),
    # Groups.
    split("a group that is left out", DECODE, SPLIT, NUMBERS,
          "for (int group = 1; group < kGroups; ++group) {",
          "for (int group = 2; group < kGroups; ++group) {"),
    split("O of a group is not brought to the larger row_max", DECODE, WIDE, NUMBERS,
          "rows[i].output[n][0] += __uint_as_float(values.x) * other_factor[0];",
          "rows[i].output[n][0] += __uint_as_float(values.x);"),
    split("sent before every group has finished with the stage", DECODE, SPLIT, ASYNC,
          "barrier_sync(kThreads); if (more) copy_q(params, find_tile(params, part.tile + 1), smem);",
          "if (more) copy_q(params, find_tile(params, part.tile + 1), smem);"),
    split("fetched before group 0 has received", DECODE, SPLIT, ASYNC, "barrier_sync(kThreads); }", "}"),
    split("the kernel does not wait for the one before it", DECODE, SPLIT, UNWAITED,
          "    griddepcontrol_wait();\n", ""),
    split("the step that combines may begin before the wait", DECODE, SPLIT, UNWAITED,
          "    griddepcontrol_wait();\n",
          "    griddepcontrol_launch_dependents();\n    griddepcontrol_wait();\n"),
    # The step that combines.
    split("a combine that does not wait", COMBINE, SPLIT, UNWAITED, "    griddepcontrol_wait();\n", ""),
    split("the first part from the slot of a share's first", COMBINE, SPLIT, NUMBERS,
          "(share == parts.first && !parts.begins_share ? 1 : 0)", "0"),
    split("the last part left out", COMBINE, SPLIT, NUMBERS,
          "first <= parts.last; first += kStep * kPartsAtOnce",
          "first < parts.last; first += kStep * kPartsAtOnce"),
    fault("parts are not brought to the larger row_max", COMBINE, MANY_PARTS, NUMBERS,
          "const float other_factor = rescale_factor(row_max, larger);", "const float other_factor = 1.0f;",
          multiprocessors=50),
    split("the warps' sums are not brought to the larger row_max", COMBINE, WIDE, NUMBERS,
          "rescale_factor(__uint_as_float(load_shared_32(smem + kSumsOffset + warp * 8)), row_max);",
          "1.0f;"),
    fault("only as many parts as are on their way at once", COMBINE, MANY_PARTS, NUMBERS,
          "first <= parts.last; first += kStep * kPartsAtOnce",
          "first <= parts.last && first < first_part + 1; first += kStep * kPartsAtOnce", multiprocessors=50),
    split("a row of the workspace for the next one", COMBINE, SPLIT, NUMBERS,
          "int64_t(slot) * kBlockM + row;", "int64_t(slot) * kBlockM + (row ^ 1);"),
    split("stored before all warps have their sums in shared memory", COMBINE, SPLIT, (*RACE, *UNSEEN),
          "lane), smem, warp, lane);\n        barrier_sync(kThreads);", "lane), smem, warp, lane);"),
    split("sums of the next row over those of this one", COMBINE, MANY_ROWS, RACE,
          "barrier_sync(kThreads); }", "}"),
)  # fmt: skip
