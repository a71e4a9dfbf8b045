"""Decoding in latent space from caches of FP8 in the simulator: codes with a scale, and rows that carry them;
rows that no sequence has are NaN in each of their parts.
"""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.families.load import load_specs
from flashgen.operators.splits import SplitEvery
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import calls_of, check_of, simulated
from simulator.faults_latent_codes import FAULTS
from simulator.test_latent_simulated import device_of

MAIN = {
    variant.name: variant
    for spec in load_specs()
    if spec.operator == "latent_attention"
    for variant in spec.variants()
    if variant.is_main and variant.axis("kv_dtype") != "none"
}
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
    example = make(variant, shape, fresh_seed)
    simulated(variant, example, fresh_seed, device=device_of(variant))
    assert example.judge().ok, f"{name}, {shape}: {example.judge()}"


@pytest.mark.parametrize("name", sorted({fault.variant for fault in FAULTS}))
def test_the_order_of_threads_changes_no_bit(name, compiler, fresh_seed):
    variant, results = MAIN[name], set()
    heads = 64 * variant.grid.cluster if variant.grid.cluster > 1 else 24
    for order in range(2):
        example = make(variant, Shape(2, 300, heads=heads, batch=3), fresh_seed)
        simulated(variant, example, order, device=device_of(variant), overlap=True)
        assert example.judge().ok, example.judge()
        results.add(example.named["out"].tobytes() + example.named["lse"].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("splits", [1, SplitEvery(128)], ids=str)
def test_bits_of_fixed_splits_do_not_depend_on_multiprocessors(splits, compiler, fresh_seed):
    results = set()
    for count in (2, 7):
        variant = MAIN[FIXED]
        example = make(variant, Shape(2, 500, heads=24, batch=3, splits=splits), fresh_seed)
        simulated(variant, example, count, device=dataclasses.replace(device_of(variant), num_sms=count))
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
