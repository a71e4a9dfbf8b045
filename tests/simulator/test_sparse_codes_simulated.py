"""Latent attention to the tokens of lists in caches of FP8, in the simulator: codes with a scale, and rows
that carry them; rows that no list names are NaN in each of their parts.
"""

from __future__ import annotations

import pytest

from flashgen.families.load import load_specs
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import calls_of, check_of, simulated
from simulator.faults_sparse_codes import FAULTS
from simulator.test_sparse_latent_simulated import device_of

MAIN = {
    variant.name: variant
    for spec in load_specs()
    if spec.operator == "sparse_latent_attention"
    for variant in spec.variants()
    if variant.is_main and variant.axis("kv_dtype") != "none"
}
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
    example = make(variant, shape, fresh_seed)
    simulated(variant, example, fresh_seed, device=device_of(variant))
    assert example.judge().ok, f"{name}, {shape}: {example.judge()}"


@pytest.mark.parametrize("name", sorted({fault.variant for fault in FAULTS}))
def test_the_order_of_threads_changes_no_bit(name, compiler, fresh_seed):
    variant, results = MAIN[name], set()
    for order in range(2):
        example = make(variant, Shape(2, 600, heads=24, batch=2), fresh_seed)
        simulated(variant, example, order, device=device_of(variant), overlap=True)
        assert example.judge().ok, example.judge()
        results.add(example.named["out"].tobytes() + example.named["lse"].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant = MAIN[fault.variant]

    def source_of(step):
        return fault.plant(render(step)) if step == variant else render(step)

    seeds = range(fixed_seed, fixed_seed + 8)
    checks = (check_of(variant, fault.shape, seed, source_of, device=device_of(variant)) for seed in seeds)
    assert next(filter(None, checks), None) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    variant = MAIN[fault.variant]
    assert check_of(variant, fault.shape, fresh_seed, device=device_of(variant)) is None
