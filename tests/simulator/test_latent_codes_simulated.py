"""Decoding in latent space from caches of FP8 in the simulator: codes with a scale, and rows that carry them;
rows that no sequence has are NaN in each of their parts.
"""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.operators.splits import SplitEvery
from flashgen.simulator.example import Shape
from simulator.calls import calls_of, check_of, first_check, main_kernels, result_bits, small_gpu, with_fault
from simulator.faults_latent_codes import FAULTS

MAIN = main_kernels(
    lambda spec: spec.operator == "latent_attention", lambda variant: variant.axis("kv_dtype") != "none"
)
FIXED = "flash_mla_decode_hdim576_512_bf16_causal_paged_fixed_e4m3_packgqa_sm80"
SHAPES = (
    Shape(1, 1, heads=1, batch=2),
    Shape(3, 0, heads=16),
    Shape(1, 65, heads=128, batch=3),
    Shape(2, 700, heads=33, batch=2, spread=8.0),
)
NARROW = Shape(9, 70, heads=20, batch=2, head_dim=336, head_dim_v=272)


# Of clusters, which take two groups of 64 heads or four.
PAIRS = (
    Shape(1, 65, heads=128, batch=3),
    Shape(2, 600, heads=256, batch=2, spread=8.0),
    dataclasses.replace(NARROW, heads=128),
)


def shapes_of(variant):
    return PAIRS if variant.grid.cluster > 1 else (*SHAPES, NARROW)


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, it in MAIN.items() for shape in shapes_of(it)], ids=str
)
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    variant = MAIN[name]
    if shape.head_dim is not None and variant.axis("kv_dtype") != "e4m3":
        pytest.skip("such rows have one length")
    result_bits(variant, shape, fresh_seed, fresh_seed, small_gpu(variant))


@pytest.mark.parametrize("name", sorted({fault.variant for fault in FAULTS}))
def test_the_order_of_threads_changes_no_bit(name, compiler, fresh_seed):
    variant = MAIN[name]
    shape = Shape(2, 300, heads=64 * variant.grid.cluster if variant.grid.cluster > 1 else 24, batch=3)
    device = small_gpu(variant)
    bits = {result_bits(variant, shape, fresh_seed, order, device, overlap=True) for order in range(2)}
    assert len(bits) == 1


@pytest.mark.parametrize("splits", [1, SplitEvery(128)], ids=str)
def test_bits_of_fixed_splits_do_not_depend_on_multiprocessors(splits, compiler, fresh_seed):
    variant, shape = MAIN[FIXED], Shape(2, 500, heads=24, batch=3, splits=splits)
    bits = {result_bits(variant, shape, fresh_seed, count, small_gpu(variant, count)) for count in (2, 7)}
    assert len(bits) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant, seeds = MAIN[fault.variant], range(fixed_seed, fixed_seed + 8)
    planted = with_fault(fault.plant)
    assert first_check(variant, fault.shape, seeds, planted, device=small_gpu(variant)) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    variant = MAIN[fault.variant]
    assert check_of(variant, fault.shape, fresh_seed, device=small_gpu(variant)) is None
