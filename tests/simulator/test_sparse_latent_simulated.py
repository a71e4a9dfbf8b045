"""Latent attention to the tokens of lists, in the simulator: lists that end in a KV block, entries that
name no token, pages, splits; any order of threads, planted faults.
"""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.operators.sparse_latent import NO_TOKEN
from flashgen.operators.splits import SplitEvery
from flashgen.schedule.plan import plan_steps
from flashgen.simulator.example import Shape, make
from simulator.calls import (
    calls_of,
    check_of,
    first_check,
    main_kernels,
    result_bits,
    simulated,
    small_gpu,
    with_fault,
)
from simulator.faults_sparse_latent import COMBINE_FAULTS, FAULTS

MAIN = main_kernels(
    lambda spec: spec.operator == "sparse_latent_attention",
    lambda variant: variant.axis("kv_dtype") == "none",
)
# seqlen_kv are the entries of a list.
SHAPES = (
    Shape(1, 1, heads=1, batch=2),
    Shape(2, 0, heads=16),
    Shape(1, 65, heads=128, batch=2),
    Shape(5, 129, heads=8, batch=3),
    Shape(2, 500, heads=33, batch=2, spread=8.0),
    Shape(3, 6, heads=20, batch=2, head_dim=328, head_dim_v=264),
    Shape(2, 200, heads=64, batch=2, splits=3),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MAIN)
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    variant = MAIN[name]
    result_bits(variant, shape, fresh_seed, fresh_seed, small_gpu(variant))


@pytest.mark.parametrize("name", [name for name in MAIN if "bf16_paged" in name])
def test_the_order_of_threads_changes_no_bit(name, compiler, fresh_seed):
    variant, shape = MAIN[name], Shape(2, 600, heads=24, batch=2)
    device = small_gpu(variant)
    steps = plan_steps(make(variant, shape, fresh_seed).problem, variant, device).steps
    assert [step.variant.step for step in steps] == ["main", "combine"]
    bits = {result_bits(variant, shape, fresh_seed, order, device, overlap=True) for order in range(3)}
    assert len(bits) == 1


@pytest.mark.parametrize("name", [name for name in MAIN if "fp16" in name])
def test_an_index_outside_the_sequence_names_no_token(name, compiler, fresh_seed):
    variant, results = MAIN[name], set()
    for garbage in (NO_TOKEN, -(2**31), 2**31 - 1, None):
        example = make(variant, Shape(2, 100, heads=24, batch=3), fresh_seed)
        indices, lengths = example.named["indices"], example.named["kv_lengths"]
        values = lengths[:, None, None] if garbage is None else garbage
        np.copyto(indices, values, where=indices == NO_TOKEN)
        simulated(variant, example, fresh_seed, device=small_gpu(variant))
        results.add(example.named["out"].tobytes() + example.named["lse"].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("splits", [1, 5, SplitEvery(64)], ids=str)
@pytest.mark.parametrize("name", [name for name in MAIN if "bf16_paged" in name])
def test_bits_of_fixed_splits_do_not_depend_on_multiprocessors(name, splits, compiler, fresh_seed):
    variant, shape = MAIN[name], Shape(2, 300, heads=24, batch=2, splits=splits)
    bits = {result_bits(variant, shape, fresh_seed, count, small_gpu(variant, count)) for count in (2, 7)}
    assert len(bits) == 1


def test_faults_have_different_names():
    faults = (*FAULTS, *COMBINE_FAULTS)
    assert len({fault.name for fault in faults}) == len(faults)


@pytest.mark.parametrize("fault", [*FAULTS, *COMBINE_FAULTS], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant, seeds = MAIN[fault.variant], range(fixed_seed, fixed_seed + 8)
    step = "combine" if fault in COMBINE_FAULTS else "main"
    planted = with_fault(fault.plant, lambda of_step: of_step.step == step)
    assert first_check(variant, fault.shape, seeds, planted, device=small_gpu(variant)) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    variant = MAIN[fault.variant]
    for seed in range(fresh_seed, fresh_seed + 2):
        assert check_of(variant, fault.shape, seed, device=small_gpu(variant)) is None
