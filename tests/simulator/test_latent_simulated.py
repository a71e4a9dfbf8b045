"""Decoding in latent space in the simulator: sequences of several lengths, heads that fill no tile, narrow
rows, pages, splits; any order of threads, planted faults.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.operators.splits import SplitEvery
from flashgen.schedule.plan import plan_steps
from flashgen.simulator.example import Shape, make
from simulator.calls import calls_of, check_of, first_check, main_kernels, result_bits, small_gpu, with_fault
from simulator.faults_latent import (
    BLOCKS,
    CAUSAL,
    FAULTS,
    GATHER,
    MMA,
    MMA_PAGED,
    PAGED,
    QUARTERS,
    ROPE,
    ROWS,
    ROWS_OF_MANY,
)

MAIN = main_kernels(
    lambda spec: spec.operator == "latent_attention", lambda variant: variant.axis("kv_dtype") == "none"
)
FIXED = "flash_mla_decode_hdim576_512_bf16_causal_paged_fixed_packgqa_sm80"
SHAPES = (
    Shape(1, 1, heads=1, batch=2),
    Shape(3, 0, heads=16),
    Shape(1, 65, heads=128, batch=3),
    Shape(7, 129, heads=8, batch=5),
    Shape(2, 1000, heads=33, batch=2, spread=8.0),
    Shape(9, 6, heads=20, batch=2, head_dim=328, head_dim_v=264),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MAIN)
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    variant = MAIN[name]
    if shape.seqlen_kv == 0 and any(param.box for param in variant.params):
        pytest.skip("no tensor map has an array without elements; dispatch takes another kernel")
    result_bits(variant, shape, fresh_seed, fresh_seed, small_gpu(variant))


@pytest.mark.parametrize("name", [ROWS, CAUSAL, PAGED, BLOCKS, GATHER, ROPE, MMA, MMA_PAGED, FIXED])
def test_the_order_of_threads_changes_no_bit(name, compiler, fresh_seed):
    variant, shape = MAIN[name], Shape(2, 500, heads=24, batch=3)
    device = small_gpu(variant)
    steps = plan_steps(make(variant, shape, fresh_seed).problem, variant, device).steps
    assert [step.variant.step for step in steps] == ["main", "combine"]
    bits = {result_bits(variant, shape, fresh_seed, order, device, overlap=True) for order in range(3)}
    assert len(bits) == 1


@pytest.mark.parametrize("name", [ROWS, BLOCKS, GATHER, MMA_PAGED, FIXED])
def test_groups_of_heads_read_the_keys_side_by_side(name, compiler, fresh_seed):
    """Two groups are two sets of heads, where thread blocks come in pairs; three are one."""
    device = small_gpu(MAIN[name], 4)
    for heads in (128, 192):
        result_bits(MAIN[name], Shape(2, 300, heads=heads, batch=2), fresh_seed, fresh_seed, device)


@pytest.mark.parametrize("heads", [1, 2, 3], ids="{} heads".format)
@pytest.mark.parametrize("name", [ROWS, BLOCKS, MMA, FIXED])
def test_thread_blocks_share_the_columns_of_a_row(name, heads, compiler, fresh_seed):
    """With up to two rows more than four thread blocks combine each, with three fewer."""
    shape = replace(ROWS_OF_MANY, heads=heads, splits=11 if name == FIXED else "auto")
    bits = {
        result_bits(MAIN[name], shape, fresh_seed, order, small_gpu(MAIN[name], 12), overlap=True)
        for order in range(2)
    }
    assert len(bits) == 1


@pytest.mark.parametrize("fault", QUARTERS, ids=lambda fault: fault.name)
def test_a_fault_of_shared_columns_is_found(fault, compiler, fixed_seed):
    variant, seeds = MAIN[fault.variant], range(fixed_seed, fixed_seed + 8)
    planted = with_fault(fault.plant, lambda step: step.step == "combine")
    assert first_check(variant, fault.shape, seeds, planted, device=small_gpu(variant, 12)) in fault.caught


@pytest.mark.parametrize("splits", [1, 5, SplitEvery(128)], ids=str)
def test_bits_of_fixed_splits_do_not_depend_on_multiprocessors(splits, compiler, fresh_seed):
    variant, shape = MAIN[FIXED], Shape(2, 500, heads=24, batch=3, splits=splits)
    bits = {result_bits(variant, shape, fresh_seed, count, small_gpu(variant, count)) for count in (2, 7)}
    assert len(bits) == 1


def test_there_are_enough_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant, seeds = MAIN[fault.variant], range(fixed_seed, fixed_seed + 8)
    # Some faults need packed queries, a tile that is split, or pages of several rows, as the seed will.
    planted, device = with_fault(fault.plant), small_gpu(variant, fault.multiprocessors or 3)
    assert first_check(variant, fault.shape, seeds, planted, device=device) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    variant = MAIN[fault.variant]
    for seed in range(fresh_seed, fresh_seed + 2):
        assert check_of(variant, fault.shape, seed, device=small_gpu(variant)) is None
