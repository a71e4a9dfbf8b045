"""Sequences of several lengths in the simulator: packed, padded, of a cache, in pages; planted faults."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flashgen.errors import BadParam
from flashgen.families.params import TENSOR_MAP
from flashgen.operators.masks import UNBOUNDED
from flashgen.schedule.tensormap import expressible
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import check_on, main_kernels, with_fault
from simulator.faults import ASYNC, BOUNDS, NUMBERS, WRONG, fault

VARIANTS = main_kernels(lambda spec: spec.operator == "attention" and spec.has_lengths)
# Each mask with rows and pages; grouped heads and packed GQA; both dtypes' MMAs; the tile without a name.
PLAIN = "flash_fwd_varlen_hdim32_fp16_m64_sm80"
CAUSAL = "flash_fwd_varlen_hdim32_bf16_causal_m64_sm80"
PAGED = "flash_fwd_varlen_hdim32_bf16_paged_m64_packgqa_sm80"
CAUSAL_PAGED = "flash_fwd_varlen_hdim32_fp16_causal_paged_m64_sm80"
KERNELS = (
    PLAIN,
    CAUSAL,
    PAGED,
    CAUSAL_PAGED,
    "flash_fwd_varlen_hdim32_bf16_local_m64_gqa_sm80",
    "flash_fwd_varlen_hdim32_fp16_local_paged_m64_packgqa_sm80",
    "flash_fwd_varlen_hdim32_fp32_causal_m64_packgqa_sm80",
    "flash_fwd_varlen_hdim32_fp32_paged_m64_gqa_sm80",
    "flash_fwd_varlen_hdim64_bf16_causal_paged_packgqa_sm80",
)
# Dense masks: where queries are padded, and keys as well, or rows or pages of a cache.
DENSE = "flash_fwd_varlen_hdim32_fp16_dense_m64_gqa_sm80"
DENSE_PAGED = "flash_fwd_varlen_hdim32_bf16_dense_paged_m64_packgqa_sm80"
DENSE_KERNELS = (DENSE, DENSE_PAGED, "flash_fwd_varlen_hdim32_fp32_dense_m64_sm80")
# One warp for the rows, and two; splits that the call fixes.
DENSE_DECODE = "flash_varlen_decode_hdim32_fp16_dense_packgqa_sm80"
DENSE_DECODE_PAGED = "flash_varlen_decode_hdim64_bf16_dense_paged_fixed_m32_sm80"
# On wgmma: one consumer and one Q buffer, several of both; warpgroups that skip KV blocks; a group that
# divides 64 rows and one that does not.
HOPPER = "flash_fwd_varlen_hdim32_bf16_causal_sm90"
HOPPER_SINGLE = "flash_fwd_varlen_hdim32_fp16_m64_sm90"
HOPPER_PAGED = "flash_fwd_varlen_hdim64_fp16_causal_paged_m128_packgqa_sm90"
HOPPER_KERNELS = (
    HOPPER,
    HOPPER_SINGLE,
    HOPPER_PAGED,
    "flash_fwd_varlen_hdim32_bf16_local_paged_sm90",
    "flash_fwd_varlen_hdim64_bf16_m128_gqa_sm90",
    "flash_fwd_varlen_hdim32_fp16_local_packgqa_sm90",
    "flash_fwd_varlen_hdim96_fp16_causal_m128_packgqa_sm90",
)
FEW = Shape(70, 150, heads=2, batch=8)
MANY = Shape(5, 20, heads=1, batch=45)
# Shares of all KV blocks: of one group of warps or several, several tiles for the rows of a head.
DECODE = "flash_varlen_decode_hdim32_bf16_packgqa_sm80"
DECODE_PAGED = "flash_varlen_decode_hdim32_fp16_paged_packgqa_sm80"
DECODE_LOCAL = "flash_varlen_decode_hdim32_fp16_local_paged_m32_packgqa_sm80"
COMBINE = "flash_varlen_combine_hdim32_bf16_packgqa_sm80"
DECODING = (
    DECODE,
    DECODE_PAGED,
    DECODE_LOCAL,
    "flash_varlen_decode_hdim32_bf16_causal_sm80",
    "flash_varlen_decode_hdim64_fp16_local_packgqa_sm80",
    "flash_varlen_decode_hdim64_bf16_causal_paged_m64_packgqa_sm80",
)
LONG = Shape(3, 2100, heads=1, batch=6)
TILES = Shape(330, 200, heads=1, batch=5)
TOKENS = Shape(1, 500, heads=2, batch=45)
HEADS = Shape(1, 2100, heads=4, batch=5)
# Values narrower than keys, and both than hdim32.
NARROW = Shape(70, 150, heads=1, batch=8, head_dim=24, head_dim_v=16)
NARROW_LONG = Shape(3, 900, heads=1, batch=6, head_dim=24, head_dim_v=16)


def grouped(variant, shape):
    if variant.gqa == "mha":
        return shape
    # A tensor map of packed rows needs a group that divides the tile.
    mapped = any(param.ctype == TENSOR_MAP for param in variant.params)
    group = 4 if mapped and variant.tile_value("block_m") % 3 else 3
    return dataclasses.replace(shape, heads=group * shape.heads, kv_heads=shape.heads)


def example_of(variant, shape, seed, packed_q=None, packed_kv=None, page_size=None):
    """The example of the first seed from ``seed`` on whose sequences are packed or in pages as asked for."""
    for each in range(seed, seed + 100):
        example = make(variant, shape, each)
        asked = (packed_q, packed_kv, page_size)
        found = (example.problem.lengths.packed_q, example.problem.lengths.packed_kv, example.k.shape[1])
        if all(a in (None, b) for a, b in zip(asked, found, strict=True)):
            return example
    raise AssertionError("no seed packs sequences so")


def verdict_of(variant, example, seed, source_of=render, multiprocessors=3):
    """The check that found something, or None."""
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=multiprocessors)
    return check_on(variant, example, seed, source_of, device=device)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("packed_q", [False, True], ids=["padded", "packed"])
def test_within_the_bound_and_nothing_else_is_touched(name, packed_q, compiler, fresh_seed):
    variant = VARIANTS[name]
    for packed_kv in [False] if "_paged_" in name else [False, True]:
        for shape in (FEW, MANY):
            example = example_of(variant, grouped(variant, shape), fresh_seed, packed_q, packed_kv)
            assert verdict_of(variant, example, fresh_seed) is None


@pytest.mark.parametrize(("window", "right"), [((-1, 0), 0), ((-1, 3), 3), ((-1, -1), UNBOUNDED)])
def test_a_window_without_a_left_side_hides_what_it_says(window, right, compiler, fresh_seed):
    variant = VARIANTS["flash_fwd_varlen_hdim32_bf16_local_m64_gqa_sm80"]
    example = make(variant, dataclasses.replace(FEW, kv_heads=1, window=window), fresh_seed)
    problem = example.problem
    found = (problem.mask_type, problem.shift, problem.window_left, problem.window_right)
    assert found == ("local", 0, UNBOUNDED, right)
    assert verdict_of(variant, example, fresh_seed) is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (CAUSAL_PAGED, NARROW),
        (DECODE_PAGED, NARROW_LONG),
        (HOPPER_KERNELS[3], NARROW),
        (HOPPER_PAGED, dataclasses.replace(NARROW, head_dim=56, head_dim_v=40)),
    ],
)
def test_pages_with_rows_narrower_than_the_kernel_holds(name, shape, compiler, fresh_seed):
    """NaN follows each row of K and V, and belongs to no array."""
    variant = VARIANTS[name]
    for packed_q in (False, True):
        example = example_of(variant, grouped(variant, shape), fresh_seed, packed_q)
        assert verdict_of(variant, example, fresh_seed) is None


def test_diagonals_of_sequences_end_bottom_right(fresh_seed):
    with pytest.raises(BadParam, match="causal_top_left does not fit"):
        make(VARIANTS[CAUSAL], dataclasses.replace(FEW, top_left=True), fresh_seed)


@pytest.mark.parametrize("name", DENSE_KERNELS)
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "bhqk"},
        {"mask": "b1qk", "mask_alignment": 4},
        {"mask": "qk", "window": (40, 0), "mask_alignment": 1},
    ],
    ids=lambda changes: changes["mask"],
)
def test_a_dense_mask_beside_lengths(name, changes, compiler, fresh_seed):
    variant = VARIANTS[name]
    shape = dataclasses.replace(grouped(variant, FEW), **changes)
    assert verdict_of(variant, make(variant, shape, fresh_seed), fresh_seed) is None


@pytest.mark.parametrize("name", [DENSE_DECODE, DENSE_DECODE_PAGED])
@pytest.mark.parametrize(
    "changes", [{"mask": "bhqk"}, {"mask": "qk", "window": (300, 0), "mask_alignment": 1}]
)
def test_drafts_in_a_tree(name, changes, compiler, fresh_seed):
    """A few queries, whose mask says which of the other drafts each one sees."""
    variant = VARIANTS[name]
    shape = dataclasses.replace(grouped(variant, LONG), **changes)
    assert verdict_of(variant, make(variant, shape, fresh_seed), fresh_seed) is None


@pytest.mark.parametrize("name", HOPPER_KERNELS)
@pytest.mark.parametrize("packed_q", [False, True], ids=["padded", "packed"])
def test_tiles_of_sequences(name, packed_q, compiler, fresh_seed):
    variant = VARIANTS[name]
    for shape, packed_kv in ((TILES, False), (MANY, not packed_q and "_paged_" not in name)):
        example = example_of(variant, grouped(variant, shape), fresh_seed, packed_q, packed_kv)
        assert verdict_of(variant, example, fresh_seed) is None


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("packed_q", [False, True], ids=["padded", "packed"])
def test_shares_of_sequences(name, packed_q, compiler, fresh_seed):
    variant = VARIANTS[name]
    for packed_kv in [False] if "_paged_" in name else [False, True]:
        for shape in (LONG, TOKENS, HEADS):
            example = example_of(variant, grouped(variant, shape), fresh_seed, packed_q, packed_kv)
            assert verdict_of(variant, example, fresh_seed) is None


@pytest.mark.parametrize("multiprocessors", [2, 4, 52])
def test_sets_of_heads(multiprocessors, compiler, fresh_seed):
    for name, shape in ((DECODE_PAGED, HEADS), (DECODING[3], dataclasses.replace(HEADS, heads=12))):
        variant = VARIANTS[name]
        example = make(variant, grouped(variant, shape), fresh_seed)
        assert verdict_of(variant, example, fresh_seed, multiprocessors=multiprocessors) is None


def test_neither_the_order_of_threads_nor_of_blocks_changes_a_bit(compiler, fresh_seed):
    variant, results = VARIANTS[DECODE_PAGED], set()
    for order in range(6):
        example = make(variant, grouped(variant, LONG), fresh_seed)
        assert verdict_of(variant, example, order) is None
        results.add(example.out.tobytes() + example.lse.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("name", [CAUSAL, CAUSAL_PAGED, DECODE, DECODE_LOCAL, HOPPER_SINGLE])
@pytest.mark.parametrize("shape", [Shape(1, 1, batch=3), Shape(7, 0, batch=2), Shape(65, 64)])
def test_short_sequences(name, shape, compiler, fresh_seed):
    variant = VARIANTS[name]
    for seed in range(fresh_seed, fresh_seed + 4):
        example = make(variant, grouped(variant, shape), seed)
        if expressible(example.problem, variant):  # there is no tensor map of no keys
            assert verdict_of(variant, example, seed) is None


@pytest.mark.parametrize("name", [PLAIN, CAUSAL_PAGED, DECODE_PAGED, HOPPER])
def test_lengths_may_change_after_the_grid_is_fixed(name, compiler, fresh_seed):
    """As in a graph that is replayed: the problem is that of the first lengths, the arrays have others."""
    variant = VARIANTS[name]
    shape = grouped(variant, FEW if variant.name != DECODE_PAGED else LONG)
    example = example_of(variant, shape, fresh_seed, packed_q=True, packed_kv=False)
    rng = np.random.default_rng(fresh_seed)
    cu, kv_lengths = example.lengths["cu_seqlens_q"], example.lengths["kv_lengths"]
    cu[1:-1] = np.sort(rng.integers(0, cu[-1] + 1, len(cu) - 2))
    kv_lengths[...] = rng.integers(0, kv_lengths + 1)
    # Sequences may now be as long as all tokens.
    problem = dataclasses.replace(example.problem, seqlen_q=example.problem.lengths.rows_q)
    assert verdict_of(variant, dataclasses.replace(example, problem=problem), fresh_seed) is None


def test_the_bits_of_a_sequence_do_not_depend_on_the_next_one(compiler, fresh_seed):
    """Though rows of that one are in the same warp."""
    variant = VARIANTS[HOPPER_SINGLE]
    example = example_of(variant, Shape(70, 500, heads=2, batch=2), fresh_seed, packed_q=True)
    results = set()
    for factor in (1, 50):
        example.q[70:] *= factor  # of the sequence after the first, whose length that is
        assert verdict_of(variant, example, fresh_seed) is None
        results.add(example.out[:70].tobytes() + example.lse[:, :70].tobytes())
    assert len(results) == 1


PADDED, PACKED = {"packed_q": False}, {"packed_q": True}
TILE_WAIT = "        mbarrier_wait(shared.tile_full(q_ring.stage), q_ring.parity);\n"
READ_TILE = (
    "        SequenceTile found;\n"
    "        found.load(shared.tile(q_ring.stage));\n"
    "        __syncwarp();  // all lanes have read it\n"
    "        release("
)
OF_ROW = " && panel * kPanelElements + chunk * kChunkElements < head_dim;"
FAULTS = (
    (fault("elements behind a row of a page", CAUSAL_PAGED, NARROW, BOUNDS, OF_ROW, ";"), {}),
    (fault("elements behind a row of a page, of a share", DECODE_PAGED, NARROW_LONG, BOUNDS,
           OF_ROW, ";"), {}),
    (fault("all pages instead of a length", CAUSAL_PAGED, FEW, (WRONG, *BOUNDS),
           "return {0, load_clamped(params.kv_lengths, sequence, params.seqlen_kv)};",
           "return {0, params.seqlen_kv};"), {}),
    (fault("the page of the next key", CAUSAL_PAGED, FEW, (WRONG, *BOUNDS),
           "divide(first_key + own_row, params", "divide(first_key + own_row + 1, params"), {}),
    (fault("the row that another lane has looked up", CAUSAL_PAGED, FEW, (WRONG, *BOUNDS),
           "pass * kRowsOfWarp + row % kRowsOfWarp);", "row % kRowsOfWarp);"), {}),
    (fault("the page table of the first sequence", CAUSAL_PAGED, FEW, NUMBERS,
           "own.pages += sequence * params.pages_batch_stride;", ""), {}),
    (fault("a row of the next sequence", PLAIN, FEW, (WRONG, "race", *BOUNDS),
           "own.seqlen_q = seqlen_q;", "own.seqlen_q = seqlen_q + 1;"), PACKED),
    (fault("a diagonal that all sequences share", CAUSAL, FEW, NUMBERS,
           "own.diagonal_offset += seqlen_kv - seqlen_q;", ""), {}),
    (fault("LSEs of the first sequence", PLAIN, FEW, (WRONG, "race"),
           "own.lse += sequence * params.lse_batch_stride + first_query;", ""), PACKED),
    (fault("the mask of the first sequence", DENSE, FEW, NUMBERS,
           "params.mask + tile.batch *", "params.mask + 0 *"), {}),
    (fault("the mask of the first head", DENSE_PAGED, FEW, NUMBERS,
           "params.mask_row_stride, params.mask_head_stride)", "params.mask_row_stride, 0)"), {}),
    (fault("drafts under the mask of the first sequence", DENSE_DECODE, LONG, NUMBERS,
           "params.mask + tile.batch *", "params.mask + 0 *"), {}),
    (fault("only the first 32 sequences are counted", PLAIN, MANY, NUMBERS,
           "left -= __shfl_sync(0xffffffff, end, 31);", ""), {}),
    (fault("the sum over the lanes wraps", PLAIN, MANY, (WRONG, "race", *BOUNDS),
           "if (lane >= distance) value += before;", "value += before;"), {}),
    (fault("the entry of the sequence, whatever the index says", PLAIN, FEW, (WRONG, *BOUNDS),
           "own.k += entry * params.k_batch_stride", "own.k += sequence * params.k_batch_stride"),
     {"packed_kv": False, "index": True}),
    (fault("lengths read ahead of the wait", PLAIN, FEW, ("dependency",),
           "    griddepcontrol_wait();\n", ""), {}),
    (fault("shares that leave the first KV block out", DECODE, LONG, (WRONG, *BOUNDS),
           "min(num_kv_blocks, share_of(params, thread_block) * per_share)",
           "min(num_kv_blocks, share_of(params, thread_block) * per_share + 1)"), {}),
    (fault("neighbouring thread blocks have the same head", DECODE, HEADS, NUMBERS,
           " + (thread_block & ((1 << params.head_sets_log2) - 1));", " + (thread_block & 0);",
           multiprocessors=4), {}),
    (fault("parts of the neighbouring set of heads", COMBINE, HEADS, (WRONG, *NUMBERS),
           "parts.set = block_index() - (share << params.head_sets_log2);",
           "parts.set = 0;", multiprocessors=12), {}),
    (fault("the next sequence with the pointers of this one", DECODE, TOKENS, (WRONG, *BOUNDS),
           "of_sequence(all, next_place_of_share.sequence, next_place_of_share.lengths) : params",
           "params : params"), {}),
    (fault("K of the next sequence is that of this one", DECODE, TOKENS, (WRONG, *BOUNDS),
           "fetch.index < fetch.place.end ? fetch.place : next_place(params, fetch.place)",
           "fetch.place"), {}),
    (fault("pages of the KV block before", DECODE_PAGED, LONG, (WRONG, *BOUNDS),
           "            fetch.pages = find_pages(params, fetch);",
           "            find_pages(params, fetch);"), {}),
    (fault("the offset of another key of the warp", DECODE_PAGED, LONG, (WRONG, *BOUNDS),
           "of_key[pass * kRowsPerPass / 32], row % 32)",
           "of_key[pass * kRowsPerPass / 32], row % 16)"), {}),
    (fault("pages as they were ahead of the wait", DECODE_PAGED, LONG, (WRONG, *BOUNDS),
           "        start.fetch.pages = find_pages(all, start.fetch);  // pages may",
           "        // pages may"), {}),
    (fault("an index as it was ahead of the wait", DECODE, LONG, ("dependency",),
           " || all.index != nullptr;", ";"), {"packed_kv": False, "index": True}),
    (fault("a lane whose own lengths do not differ begins with the old ones", DECODE, LONG, ("divergence",),
           "if (!__any_sync(0xffffffff, differ(lane_lengths, earlier)))",
           "if (!differ(lane_lengths, earlier))"),
     {"packed_kv": True}),
    (fault("old lengths that stay in L1", DECODE, LONG, ("dependency",),
           "int(load_relaxed_32(values + index))", "int(load_global_32(values + index))"),
     {"packed_kv": True}),
    (fault("old pages that stay in L1", DECODE_PAGED, LONG, ("dependency",),
           "valid ? load_relaxed_32(entry)", "valid ? load_global_32(entry)"), {}),
    (fault("a lost part", COMBINE, LONG, NUMBERS,
           "parts.first + warp % kTeam", "parts.first + 1 + warp % kTeam",
           multiprocessors=20), {}),
    (fault("parts of the thread block before", COMBINE, LONG, (WRONG, *NUMBERS, *BOUNDS),
           "const int slot = 2 * block +", "const int slot = 2 * block - 2 +",
           multiprocessors=20), {}),
    (fault("stored before all warps have their sums in shared memory", COMBINE, LONG,
           ("race", "uninitialised shared memory"),
           "        barrier_sync(kThreads);\n        const int team", "        const int team",
           multiprocessors=20), {}),
    (fault("sums of the next rows over those of these", COMBINE, LONG, ("race",),
           "threadIdx.x % kRowThreads);\n        }\n        barrier_sync(kThreads);\n",
           "threadIdx.x % kRowThreads);\n        }\n", multiprocessors=3), {}),
    (fault("a combined row of the first sequence", COMBINE, LONG, NUMBERS,
           "own.out += place.sequence * params.out_batch_stride + first_query * params.out_row_stride;",
           "own.out += place.sequence * params.out_batch_stride;",
           multiprocessors=20), PACKED),
    (fault("parts are read ahead of the wait, as lengths may be", COMBINE, LONG, ("dependency",),
           "    griddepcontrol_wait();\n", "", multiprocessors=20), {}),
    # Tiles of the Hopper kernel.
    (fault("V past the end as it is", HOPPER, TILES, NUMBERS,
           "            store_shared_128(rows + byte, 0.0f, 0.0f, 0.0f, 0.0f);\n", ""),
     {"packed_kv": False}),
    (fault("the last key is cleared as well", HOPPER, TILES, NUMBERS,
           "params.seqlen_kv - kv_block * kBlockN);", "params.seqlen_kv - kv_block * kBlockN - 1);"), {}),
    (fault("the first row past the end is not cleared", HOPPER, TILES, NUMBERS,
           "params.seqlen_kv - kv_block * kBlockN);", "params.seqlen_kv - kv_block * kBlockN + 1);"),
     {"packed_kv": False}),
    (fault("zeros without a proxy fence", HOPPER, TILES, ("proxy",),
           "    fence_proxy_async();  // wgmma would not see the zeros otherwise\n", ""), {}),
    (fault("V is multiplied before all consumers have cleared it", HOPPER, TILES, ("race",),
           "            mbarrier_wait(shared.rows_clear(), clear_parity);\n", ""), {}),
    (fault("a consumer that skips the last KV block does not clear its share", HOPPER, TILES, ("deadlock",),
           "            clear_tail(kv_block);\n            skip_block();", "            skip_block();"), {}),
    (fault("V is cleared before it has arrived", HOPPER, TILES, ("copy in flight", "race", WRONG),
           "            mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);\n            clear_rows",
           "            clear_rows"), {}),
    (fault("rows past the sequence are stored", HOPPER, TILES, (WRONG, "race", *BOUNDS),
           "return row >= 0 && row < num_rows(params);", "return row >= 0;"), PACKED),
    (fault("rows ahead of the sequence are stored", HOPPER, TILES, (WRONG, "race", *BOUNDS),
           "return row >= 0 && row < num_rows(params);", "return row < num_rows(params);",
           # In order, so that the sequence before does not store its own rows over them.
           multiprocessors=1), PACKED),
    (fault("queries of the first sequence", HOPPER, TILES, NUMBERS,
           "    tile.first_row += found.first_query;\n", ""), PACKED),
    (fault("keys of the first sequence", HOPPER, TILES, NUMBERS,
           "found.first_key + kv_block * kBlockN", "kv_block * kBlockN"), {"packed_kv": True}),
    (fault("the entry of the sequence, whatever the index says, by TMA", HOPPER, TILES, NUMBERS,
           "if (params.index != nullptr) tile.entry = load_clamped", "if (false) tile.entry = load_clamped"),
     {"packed_kv": False, "index": True}),
    (fault("a tile is overwritten before it is read", HOPPER, TILES, ("race", "deadlock", "mbarrier"),
           "    await_empty(shared.tile_empty(ring.stage), ring.parity ^ 1);\n", ""), {}),
    (fault("a tile is read before it is found", HOPPER, TILES, ("race", "uninitialised shared memory"),
           TILE_WAIT + READ_TILE, READ_TILE), {}),
    (fault("the next page of the sequence, by TMA", HOPPER_PAGED, TILES, (WRONG, *BOUNDS),
           "key < found.seqlen_kv) entry = load_global_32(entries + index",
           "key < found.seqlen_kv) entry = load_global_32(entries + index + 1"), {}),
    (fault("the page table of the first sequence, by TMA", HOPPER_PAGED, TILES, NUMBERS,
           "params.pages + found.sequence * params.pages_batch_stride", "params.pages"), {}),
    (fault("a box where the next one goes", HOPPER_PAGED, TILES, (*ASYNC, WRONG),
           "(panel * kBlockN + box * kBoxKeys)", "(panel * kBlockN + (box ^ 1) * kBoxKeys)"), {}),
    (fault("the page of the first box for all", HOPPER_PAGED, TILES, NUMBERS,
           "load_shared_32(boxes + box * sizeof(Box) + offsetof(Box, page));",
           "load_shared_32(boxes + offsetof(Box, page));"), {"page_size": 16}),
    (fault("the row of the first box for all", HOPPER_PAGED, TILES, NUMBERS,
           "load_shared_32(boxes + box * sizeof(Box) + offsetof(Box, row))",
           "load_shared_32(boxes + offsetof(Box, row))"),
     {"page_size": 64}),
    (fault("K and V share their boxes", HOPPER_PAGED, TILES, ("race", *NUMBERS),
           "shared.v_boxes()}", "shared.k_boxes()}"), {}),
    (fault("boxes are read before all lanes have written theirs", HOPPER_PAGED, TILES,
           ("race", "uninitialised shared memory"),
           "            await_empty(empty + 8 *", "            mbarrier_wait(empty + 8 *"), {}),
    (fault("every lane starts the loads of a box", HOPPER_PAGED, TILES, (*ASYNC, "mbarrier"),
           "            if (elect_one()) {\n", "            if (true) {\n"), {}),
    (fault("the page of the KV block visited before, by TMA", HOPPER_PAGED, TILES, NUMBERS,
           "        index -= block_pages;\n", ""), {"page_size": 16}),
    (fault("rows of the KV block visited before, by TMA", HOPPER_PAGED, TILES, NUMBERS,
           "        row -= block_rows;\n", ""), {"page_size": 256}),
    (fault("a row of the page before, in this one", HOPPER_PAGED, TILES, NUMBERS,
           "            --index;\n", ""), {"page_size": 48}),
    (fault("boxes are written before those of the KV block have been read", HOPPER_PAGED, TILES,
           ("race", *NUMBERS),
           "tile.kv_head, page); } } } __syncwarp();", "tile.kv_head, page); } } }"), {}),
    (fault("one of two producer warps alone lets a tile be overwritten", HOPPER_PAGED, TILES,
           ("race", "deadlock", "mbarrier"), "tile_empty(stage), 4 * kConsumers + kProducers);",
           "tile_empty(stage), 4 * kConsumers + 1);"), {}),
    (fault("the warp of V stays at one tile", HOPPER_PAGED, TILES, ("race", "deadlock", "mbarrier", WRONG),
           "        tile_ring.advance();\n", ""), {}),
    (fault("the lengths of the first 32 sequences for all", HOPPER_SINGLE, MANY, (WRONG, "race", *BOUNDS),
           "            if (params.batch_size > 32) row_blocks = count(params, first + lane);\n", ""), {}),
    (fault("the first row blocks are left out", HOPPER_SINGLE, TILES, NUMBERS,
           "if (slice == 0) return {-1};", "if (slice <= 1) return {-1};"), {}),
    (fault("lengths read ahead of the wait, for TMA", HOPPER, TILES, ("dependency",),
           "    griddepcontrol_wait();\n", ""), {}),
    (fault("does not wait for the parts", COMBINE, LONG, ("dependency",),
           "    griddepcontrol_wait();\n", ""), {}),
)  # fmt: skip


MAIN_OF = {step.name: variant for variant in VARIANTS.values() for step in variant.steps}


@pytest.mark.parametrize(("fault", "packing"), FAULTS, ids=lambda x: getattr(x, "name", ""))
def test_a_planted_fault_is_found(fault, packing, compiler, fixed_seed):
    """By one of a few examples: whether lengths and page tables of one show a fault is up to chance."""
    variant, packing = MAIN_OF[fault.variant], dict(packing)
    indexed, seed, shape = packing.pop("index", False), fixed_seed, grouped(variant, fault.shape)
    planted = with_fault(fault.plant, lambda step: step.name == fault.variant)
    verdicts = []
    while len(verdicts) < 4:
        example = example_of(variant, shape, seed, **packing)
        if not indexed or (example.lengths["index"] is not None and example.lengths["index"][0] != 0):
            verdicts.append(verdict_of(variant, example, seed, planted, fault.multiprocessors or 3))
            if verdicts[-1] in fault.caught:
                return
        seed += 100  # example_of() has looked so far: the next one may give the same example
    assert set(verdicts) & set(fault.caught), verdicts
