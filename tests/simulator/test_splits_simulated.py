"""Splits that a call fixes, in the simulator: the bits of a sequence are its own, whatever the batch, its
order, the lengths of neighbours and the multiprocessors of the GPU; planted faults.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import flashgen
from flashgen import SplitEvery
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.calls import with_fault
from simulator.faults import BOUNDS, NUMBERS, fault
from simulator.test_varlen_simulated import COMBINE, DECODE, MAIN_OF, example_of, grouped, verdict_of

HEADS, KV_HEADS, WIDTH = 4, 2, 32


@pytest.fixture
def gpu_of(forget_plans, monkeypatch):
    """``gpu_of(n)`` makes the pretended GPU one of n multiprocessors."""
    known = hardware.pretend

    def pretend_to_have(num_sms):
        def pretended(arch=None):
            return dataclasses.replace(known(arch), num_sms=num_sms)

        monkeypatch.setattr(hardware, "pretend", pretended)
        forget_plans()

    return pretend_to_have


def rows(rng, *shape):
    return rng.standard_normal((*shape, WIDTH), np.float32).astype(np.float16)


def attend(*arrays, **options):
    return flashgen.attention(*arrays, backend="simulator", return_lse=True, **options)


def bits(out, lse):
    return np.ascontiguousarray(out).tobytes(), np.ascontiguousarray(lse).tobytes()


@pytest.mark.parametrize("splits", [1, 3, SplitEvery(256)])
def test_batches_of_any_size_on_any_gpu(splits, compiler, gpu_of, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q, k, v = rows(rng, 5, 2, HEADS), rows(rng, 5, 900, KV_HEADS), rows(rng, 5, 900, KV_HEADS)
    found = [set() for _ in q]
    for batch, num_sms in (([0], 1), ([1], 108), ([4, 2, 0], 7), ([3, 1], 2), (range(5), 108), (range(5), 3)):
        gpu_of(num_sms)
        which = list(batch)
        out, lse = attend(q[which], k[which], v[which], causal=True, splits=splits)
        for place, b in enumerate(which):
            found[b].add(bits(out[place], lse[place]))
    assert [len(each) for each in found] == [1] * 5
    gpu_of(108)
    plan = flashgen.plan(q, k, v, causal=True, splits=splits, backend="simulator")
    assert plan.steps[0].shares.split == (splits != 1)


# Queries, keys.
SEQUENCES = ((1, 1300), (3, 0), (2, 1), (1, 256), (3, 700), (0, 400), (3, 3), (1, 257))
BATCHES = (
    *([each] for each in range(len(SEQUENCES))),
    range(len(SEQUENCES)),
    (6, 4, 0, 3),
    (7, 1, 5, 4, 2),
    (3, 3, 0, 3),
)


def paged(rng, k, v, batch, size):
    """The keys of some sequences in pages of a pool in random order; NaN where no key is."""
    counts = [-(-len(k[b]) // size) for b in batch]
    order = rng.permutation(sum(counts) + 2)
    pool_k, pool_v = (np.full((len(order), size, KV_HEADS, WIDTH), np.nan, np.float16) for _ in "kv")
    table, used = np.full((len(batch), max(1, *counts)), -1, np.int32), 0
    for place, (b, count) in enumerate(zip(batch, counts, strict=True)):
        table[place, :count] = order[used : used + count]
        used += count
        at = np.arange(len(k[b]))
        for pool, x in ((pool_k, k[b]), (pool_v, v[b])):
            pool[table[place, at // size], at % size] = x
    lengths = np.array([len(k[b]) for b in batch], np.int32)
    return flashgen.KVCache(pool_k, pool_v, lengths, pages=table)


@pytest.mark.parametrize("layout", ["packed", "paged"])
@pytest.mark.parametrize(
    ("splits", "window"), [(SplitEvery(256), (-1, -1)), (SplitEvery(256), (600, 0)), (5, (-1, 0))], ids=str
)
def test_sequences_of_any_neighbours_on_any_gpu(layout, splits, window, compiler, gpu_of, fresh_seed):
    """Also where the window is longer than all keys of the batch."""
    rng = np.random.default_rng(fresh_seed)
    q, k, v = (
        [rows(rng, lengths[at], heads) for lengths in SEQUENCES] for at, heads in ((0, HEADS), (1, 2), (1, 2))
    )
    found = [set() for _ in SEQUENCES]
    for batch in map(list, BATCHES):
        gpu_of(int(rng.choice([1, 2, 5, 108])))
        cu_q, cu_kv = (np.cumsum([0, *(len(x[b]) for b in batch)]).astype(np.int32) for x in (q, k))
        options = {"cu_seqlens_q": cu_q, "max_seqlen_q": 3, "window_size": window, "splits": splits}
        queries = np.concatenate([q[b] for b in batch])
        if layout == "paged":
            out, lse = attend(queries, paged(rng, k, v, batch, int(rng.choice([1, 16, 48]))), **options)
        else:
            keys = (np.concatenate([x[b] for b in batch]) for x in (k, v))
            out, lse = attend(queries, *keys, cu_seqlens_kv=cu_kv, **options)
        for b, begin, end in zip(batch, cu_q[:-1], cu_q[1:], strict=True):
            found[b].add(bits(out[begin:end], lse[:, begin:end]))
    assert [len(each) for each in found] == [1] * len(SEQUENCES)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_prefill_that_nothing_splits(arch, compiler, gpu_of, monkeypatch, fresh_seed):
    """With fewer tokens in a batch than a sequence may have, too, and rows of neighbours in the same tile."""
    monkeypatch.setenv(hardware.ARCH_VARIABLE, arch)
    rng = np.random.default_rng(fresh_seed)
    lengths = (70, 130, 5)
    q, k, v = ([rows(rng, n, heads) for n in lengths] for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = [set() for _ in lengths]
    for batch, num_sms in (((0,), 1), ((1,), 2), ((2,), 100), ((0, 1, 2), 100), ((2, 0), 3)):
        gpu_of(num_sms)
        cu = np.cumsum([0, *(lengths[b] for b in batch)]).astype(np.int32)
        options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 130, "causal": True}
        arrays = (np.concatenate([x[b] for b in batch]) for x in (q, k, v))
        out, lse = attend(*arrays, **options, splits=SplitEvery(1024))
        for b, begin, end in zip(batch, cu[:-1], cu[1:], strict=True):
            found[b].add(bits(out[begin:end], lse[:, begin:end]))
    assert [len(each) for each in found] == [1, 1, 1]


def test_equal_shares_are_not_so(compiler, gpu_of, fresh_seed):
    """What the tests above would find."""
    rng = np.random.default_rng(fresh_seed)
    q, k, v = rows(rng, 3, 1, HEADS), rows(rng, 3, 3000, KV_HEADS), rows(rng, 3, 3000, KV_HEADS)
    found = set()
    for num_sms in (1, 5, 30):
        gpu_of(num_sms)
        out, lse = attend(q, k, v)
        found.add(bits(out, lse))
    assert len(found) > 1


FIXED = DECODE.replace("_packgqa", "_fixed_packgqa")
FIXED_PAGED = "flash_varlen_decode_hdim32_fp16_local_paged_fixed_m32_packgqa_sm80"
FIXED_COMBINE = COMBINE.replace("_packgqa", "_fixed_packgqa")
LONG = Shape(3, 2100, heads=1, batch=6, splits=3)
MANY = Shape(1, 500, heads=2, batch=45, splits=SplitEvery(256))


@pytest.mark.parametrize(("name", "multiprocessors"), [(FIXED, 1), (FIXED, 40), (FIXED_PAGED, 3)])
def test_within_the_bound(name, multiprocessors, compiler, fresh_seed):
    variant = MAIN_OF[name]
    for shape in (LONG, MANY, dataclasses.replace(LONG, splits=50), dataclasses.replace(MANY, splits=1)):
        example = make(variant, grouped(variant, shape), fresh_seed)
        assert verdict_of(variant, example, fresh_seed, multiprocessors=multiprocessors) is None


def test_lengths_may_change_after_the_grid_is_fixed(compiler, fresh_seed):
    """As in a graph that is replayed; no sequence outgrows the workspace."""
    variant = MAIN_OF[FIXED]
    example = example_of(variant, grouped(variant, LONG), fresh_seed, packed_q=True, packed_kv=False)
    rng = np.random.default_rng(fresh_seed)
    kv_lengths = example.lengths["kv_lengths"]
    kv_lengths[...] = rng.integers(0, kv_lengths + 1)
    for multiprocessors in (2, 30):
        assert verdict_of(variant, example, fresh_seed, multiprocessors=multiprocessors) is None


def test_a_length_above_its_bound_writes_nothing_outside_of_the_workspace(compiler, fresh_seed):
    """The sequence is cut to the bound, and the splits of others stay their own."""
    variant = MAIN_OF[FIXED]
    example = example_of(variant, grouped(variant, LONG), fresh_seed, packed_q=True, packed_kv=False)
    problem = dataclasses.replace(example.problem, seqlen_kv=example.problem.seqlen_kv // 2)
    libraries = [load(render(step), step.name) for step in variant.steps]
    run_steps(libraries, variant, dataclasses.replace(example, problem=problem), seed=fresh_seed)


FAULTS = (
    fault("a split that begins a KV block late", FIXED, LONG, NUMBERS,
          "return {tile, tiles.first_kv_block + first,", "return {tile, tiles.first_kv_block + first + 1,"),
    fault("a split that reaches into the next", FIXED, LONG, (*NUMBERS, "uninitialised shared memory"),
          "min(first + tiles.kv_blocks_per_split, tiles.kv_blocks)",
          "min(first + tiles.kv_blocks_per_split + 1, tiles.kv_blocks)"),
    fault("K and V of the tile's first split for each", FIXED, LONG, NUMBERS,
          "first_block_of(tiles, index - place.begin - tile_index * tiles.pieces())",
          "first_block_of(tiles, 0)"),
    fault("K and V of a split twice", FIXED, LONG, NUMBERS, "if (ends_piece(fetch.left)) ++fetch.index;", ""),
    fault("Q of the next tile for the next split", FIXED, LONG, (*NUMBERS, *BOUNDS),
          "(index - place.begin) / tiles_of(params).splits : 0", "part.tile + 1 : 0"),
    fault("the slot of the share", FIXED, LONG, (*NUMBERS, "race"),
          "tiles.splits == 1 ? -1 : index}", "tiles.splits == 1 ? -1 : block_index()}"),
    fault("the first split left out", FIXED_COMBINE, LONG, NUMBERS,
          "parts.first + warp % kTeam", "parts.first + 1 + warp % kTeam"),
    fault("the split before", FIXED_COMBINE, LONG, (*NUMBERS, *BOUNDS),
          "int64_t(split) * kBlockM + row", "int64_t(split - 1) * kBlockM + row"),
    fault("rows of the head's first tile", FIXED_COMBINE, dataclasses.replace(LONG, seqlen_q=9), NUMBERS,
          "find_tile(params, place, tile)", "find_tile(params, place, 0)"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant = MAIN_OF[fault.variant]
    example = make(variant, grouped(variant, fault.shape), fixed_seed)
    planted = with_fault(fault.plant, lambda step: step.name == fault.variant)
    assert verdict_of(variant, example, fixed_seed, planted) in fault.caught
