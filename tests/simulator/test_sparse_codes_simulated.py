"""Latent attention to the tokens of lists in caches of FP8, in the simulator: codes with a scale, and rows
that carry them; rows that no list names are NaN in each of their parts.
"""

from __future__ import annotations

import pytest

from flashgen.simulator.example import Shape
from simulator.calls import calls_of, check_of, first_check, main_kernels, result_bits, small_gpu, with_fault
from simulator.faults_sparse_codes import FAULTS

MAIN = main_kernels(
    lambda spec: spec.operator == "sparse_latent_attention",
    lambda variant: variant.axis("kv_dtype") != "none",
)
NARROW = Shape(3, 70, heads=20, batch=2, head_dim=336, head_dim_v=272)
SHAPES = (
    Shape(1, 1, heads=1, batch=2),
    Shape(2, 0, heads=16),
    Shape(1, 65, heads=128, batch=2),
    Shape(2, 500, heads=33, batch=2, spread=8.0),
    Shape(2, 200, heads=64, batch=2, splits=3),
    NARROW,
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MAIN)
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    variant = MAIN[name]
    if shape is NARROW and variant.axis("kv_dtype") != "e4m3":
        pytest.skip("such rows have one length")
    result_bits(variant, shape, fresh_seed, fresh_seed, small_gpu(variant))


@pytest.mark.parametrize("name", sorted({fault.variant for fault in FAULTS}))
def test_the_order_of_threads_changes_no_bit(name, compiler, fresh_seed):
    variant, shape = MAIN[name], Shape(2, 600, heads=24, batch=2)
    device = small_gpu(variant)
    bits = {result_bits(variant, shape, fresh_seed, order, device, overlap=True) for order in range(2)}
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
