"""Chunks of queries on many keys in the simulator: thread blocks with equal shares of all keys, on wgmma and
TMA; planted faults.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flashgen.schedule.plan import plan_steps
from flashgen.schedule.tensormap import expressible
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from simulator.calls import with_fault
from simulator.faults import BOUNDS, NUMBERS, fault
from simulator.test_varlen_simulated import VARIANTS, example_of, grouped, verdict_of

# Two consumers and three; each mask; rows and pages; a group that does not divide 64 rows.
CAUSAL = "flash_varlen_split_hdim64_bf16_causal_m128_packgqa_sm90"
FULL = "flash_varlen_split_hdim64_fp16_packgqa_sm90"
WINDOW_PAGED = "flash_varlen_split_hdim64_fp16_local_paged_m128_gqa_sm90"
KERNELS = (CAUSAL, FULL, WINDOW_PAGED)
COMBINE = "flash_varlen_split_combine_hdim64_bf16_causal_m128_packgqa_sm90"
CHUNKS = Shape(70, 900, heads=1, batch=3)
WINDOWS = Shape(70, 900, heads=1, batch=3, window=(500, 0))
MANY = Shape(5, 20, heads=1, batch=45)
# With few multiprocessors a share has whole tiles and both parts; with many, several have a tile together.
FEW_SMS, MANY_SMS = 2, 25


def shape_of(variant, shape):
    changed = dataclasses.replace(shape, window=(500, 0)) if variant.mask_type == "local" else shape
    return grouped(variant, changed)


def checked(variant, example, seed, multiprocessors):
    """`verdict_of`, where the grid that the problem gets on so many multiprocessors splits tiles."""
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=multiprocessors)
    steps = plan_steps(example.problem, variant, device).steps
    assert [step.variant.step for step in steps] == ["main", "combine"]
    assert steps[0].launch.blocks <= multiprocessors
    return verdict_of(variant, example, seed, multiprocessors=multiprocessors)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("packed_q", [False, True], ids=["padded", "packed"])
def test_within_the_bound_and_nothing_else_is_touched(name, packed_q, compiler, fresh_seed):
    variant = VARIANTS[name]
    for shape, multiprocessors in ((MANY, 7),) if packed_q else ((CHUNKS, FEW_SMS), (CHUNKS, MANY_SMS)):
        packed_kv = None if variant.axis("pages") == "paged" else bool(fresh_seed % 2)
        example = example_of(variant, shape_of(variant, shape), fresh_seed, packed_q, packed_kv)
        assert checked(variant, example, fresh_seed, multiprocessors) is None


@pytest.mark.parametrize("shape", [Shape(1, 1, batch=3), Shape(7, 0, batch=2), Shape(200, 64)], ids=str)
def test_short_sequences(shape, compiler, fresh_seed):
    """More queries than keys as well."""
    variant = VARIANTS[CAUSAL]
    for seed in range(fresh_seed, fresh_seed + 4):
        example = make(variant, grouped(variant, shape), seed)
        if expressible(example.problem, variant):  # there is no tensor map of no keys
            assert verdict_of(variant, example, seed) is None


def test_lengths_may_change_after_the_grid_is_fixed(compiler, fresh_seed):
    """As in a graph that is replayed: the problem is that of the first lengths, the arrays have others."""
    variant = VARIANTS[CAUSAL]
    example = example_of(variant, grouped(variant, CHUNKS), fresh_seed, packed_q=True, packed_kv=False)
    rng = np.random.default_rng(fresh_seed)
    cu, kv_lengths = example.lengths["cu_seqlens_q"], example.lengths["kv_lengths"]
    cu[1:-1] = np.sort(rng.integers(0, cu[-1] + 1, len(cu) - 2))
    kv_lengths[...] = rng.integers(0, kv_lengths + 1)
    # Sequences may now be as long as all tokens.
    problem = dataclasses.replace(example.problem, seqlen_q=example.problem.lengths.rows_q)
    example = dataclasses.replace(example, problem=problem)
    for multiprocessors in (FEW_SMS, MANY_SMS):
        assert checked(variant, example, fresh_seed, multiprocessors) is None


def test_neither_the_order_of_threads_nor_of_blocks_changes_a_bit(compiler, fresh_seed):
    variant, results = VARIANTS[CAUSAL], set()
    for order in range(4):
        example = make(variant, grouped(variant, CHUNKS), fresh_seed)
        assert checked(variant, example, order, 7) is None
        results.add(example.out.tobytes() + example.lse.tobytes())
    assert len(results) == 1


MAIN_OF = {step.name: variant for variant in VARIANTS.values() for step in variant.steps}
FAULTS = (
    fault("the part with which a share ends is left out", CAUSAL, CHUNKS, NUMBERS,
          "            pass_on_part(last_place, last);\n", ""),
    fault("whole tiles are left out", CAUSAL, CHUNKS, NUMBERS,
          "while (index < last)", "while (false)", multiprocessors=1),
    fault("both parts of a share in one slot", CAUSAL, CHUNKS, (*NUMBERS, "race"),
          "(index == share.begin ? 0 : 1)", "0"),
    fault("a part taken for a whole tile", CAUSAL, CHUNKS, (*NUMBERS, "race"),
          "count == tiles.kv_blocks ? -1 : slot", "-1"),
    fault("all KV blocks of a tile for a part", CAUSAL, CHUNKS, NUMBERS,
          "min(blocks.last, found.end_block - 1)", "blocks.last"),
    fault("a window that begins with the first KV block", WINDOW_PAGED, WINDOWS, NUMBERS,
          "const int first = tiles.first_kv_block + index - tile_begin;",
          "const int first = index - tile_begin;"),
    fault("rows of a part by their place in the sequence", CAUSAL, CHUNKS, (*NUMBERS, *BOUNDS, "race"),
          "int64_t(slot) * kBlockM + row - tile.first_row", "int64_t(slot) * kBlockM + row"),
    fault("rows past the sequence are stored", CAUSAL, CHUNKS, (*NUMBERS, "race", *BOUNDS),
          "return row < num_rows(params);", "return true;"),
    fault("a lost part", COMBINE, CHUNKS, NUMBERS,
          "(begin + tiles.kv_blocks - 1) / counts.per_share :",
          "(begin + tiles.kv_blocks - 1) / counts.per_share - 1 :"),
    fault("the slot of the share's other part", COMBINE, CHUNKS, (*NUMBERS, "uninitialised global memory"),
          "&& !parts.begins_share ? 1 : 0", "&& !parts.begins_share ? 0 : 1"),
    fault("does not wait for the parts", COMBINE, CHUNKS, ("dependency",),
          "    griddepcontrol_wait();\n", ""),
    fault("lengths read ahead of the wait", CAUSAL, CHUNKS, ("dependency",),
          "    griddepcontrol_wait();\n", ""),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    """By one of a few examples: whether the lengths of one show a fault is up to chance."""
    variant = MAIN_OF[fault.variant]
    planted = with_fault(fault.plant, lambda step: step.name == fault.variant)
    verdicts = []
    for seed in range(fixed_seed, fixed_seed + 4):
        example = example_of(variant, grouped(variant, fault.shape), seed)
        verdicts.append(verdict_of(variant, example, seed, planted, fault.multiprocessors or 7))
        if verdicts[-1] in fault.caught:
            return
    raise AssertionError(f"found {verdicts}")
