"""Decoding in latent space in the simulator: sequences of several lengths, heads that fill no tile, narrow
rows, pages, splits; any order of threads, planted faults.
"""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.families.load import load_specs
from flashgen.operators.splits import SplitEvery
from flashgen.schedule.plan import plan_steps
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import calls_of, check_of, simulated
from simulator.faults_latent import (
    BLOCKS,
    CAUSAL,
    FAULTS,
    GATHER,
    MMA,
    MMA_PAGED,
    MULTIPROCESSORS,
    PAGED,
    ROPE,
    ROWS,
)

MAIN = {
    variant.name: variant
    for spec in load_specs()
    if spec.operator == "latent_attention"
    for variant in spec.variants()
    if variant.is_main and variant.axis("kv_dtype") == "none"
}
FIXED = "flash_mla_decode_hdim576_512_bf16_causal_paged_fixed_packgqa_sm80"
SHAPES = (
    Shape(1, 1, heads=1, batch=2),
    Shape(3, 0, heads=16),
    Shape(1, 65, heads=128, batch=3),
    Shape(7, 129, heads=8, batch=5),
    Shape(2, 1000, heads=33, batch=2, spread=8.0),
    Shape(9, 6, heads=20, batch=2, head_dim=328, head_dim_v=264),
)


def device_of(variant):
    """A GPU so small that thread blocks have several tiles."""
    gpu = hardware.pretend_for(variant)
    return dataclasses.replace(gpu, num_sms=MULTIPROCESSORS, smem_per_sm=variant.smem_bytes + 1024)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MAIN)
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    variant = MAIN[name]
    if shape.seqlen_kv == 0 and any(param.box for param in variant.params):
        pytest.skip("no tensor map has an array without elements; dispatch takes another kernel")
    example = make(variant, shape, fresh_seed)
    simulated(variant, example, fresh_seed, device=device_of(variant))
    assert example.judge().ok, f"{name}, {shape}: {example.judge()}"


@pytest.mark.parametrize("name", [ROWS, CAUSAL, PAGED, BLOCKS, GATHER, ROPE, MMA, MMA_PAGED, FIXED])
def test_the_order_of_threads_changes_no_bit(name, compiler, fresh_seed):
    variant, results = MAIN[name], set()
    for order in range(3):
        example = make(variant, Shape(2, 500, heads=24, batch=3), fresh_seed)
        steps = plan_steps(example.problem, variant, device_of(variant)).steps
        assert [step.variant.step for step in steps] == ["main", "combine"]
        simulated(variant, example, order, device=device_of(variant), overlap=True)
        assert example.judge().ok, example.judge()
        results.add(example.named["out"].tobytes() + example.named["lse"].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("name", [ROWS, BLOCKS, GATHER, MMA_PAGED, FIXED])
def test_groups_of_heads_read_the_keys_side_by_side(name, compiler, fresh_seed):
    """Two groups are two sets of heads, where thread blocks come in pairs; three are one."""
    device = dataclasses.replace(device_of(MAIN[name]), num_sms=4)
    for heads in (128, 192):
        example = make(MAIN[name], Shape(2, 300, heads=heads, batch=2), fresh_seed)
        simulated(MAIN[name], example, fresh_seed, device=device)
        assert example.judge().ok, example.judge()


@pytest.mark.parametrize("splits", [1, 5, SplitEvery(128)], ids=str)
def test_bits_of_fixed_splits_do_not_depend_on_multiprocessors(splits, compiler, fresh_seed):
    results = set()
    for count in (2, 7):
        variant = MAIN[FIXED]
        example = make(variant, Shape(2, 500, heads=24, batch=3, splits=splits), fresh_seed)
        simulated(variant, example, count, device=dataclasses.replace(device_of(variant), num_sms=count))
        assert example.judge().ok, example.judge()
        results.add(example.named["out"].tobytes() + example.named["lse"].tobytes())
    assert len(results) == 1


def test_there_are_enough_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant = MAIN[fault.variant]

    def source_of(step):
        return fault.plant(render(step)) if step == variant else render(step)

    # Some faults need packed queries, a tile that is split, or pages of several rows, as the seed will.
    seeds = range(fixed_seed, fixed_seed + 8)
    checks = (check_of(variant, fault.shape, seed, source_of, device=device_of(variant)) for seed in seeds)
    assert next(filter(None, checks), None) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    variant = MAIN[fault.variant]
    for seed in range(fresh_seed, fresh_seed + 2):
        assert check_of(variant, fault.shape, seed, device=device_of(variant)) is None
