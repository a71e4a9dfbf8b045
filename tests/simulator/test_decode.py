"""Split-KV attention in the simulator: shares of every size, any order of threads, planted faults."""

from __future__ import annotations

import dataclasses
import math

import pytest

from flashgen.errors import SimulationError
from flashgen.families.load import load_specs
from flashgen.operators.splits import SplitEvery
from flashgen.schedule.plan import plan_steps
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.faults import WRONG
from simulator.faults_decode import FAULTS

MAIN = {
    step.name: variant
    for spec in load_specs()
    if spec.name == "flash_decode_sm80"
    for variant in spec.variants()
    if variant.is_main
    for step in variant.steps
}
PLAIN = "flash_decode_hdim64_fp16_sm80"
PACKED = "flash_decode_hdim64_bf16_packgqa_sm80"


def on(variant, multiprocessors):
    """A GPU of so many multiprocessors, each with room for one thread block of the variant."""
    gpu = hardware.pretend_for(variant)
    return dataclasses.replace(gpu, num_sms=multiprocessors, smem_per_sm=variant.smem_bytes + 1024)


def simulated(name, shape, seed, multiprocessors=3, order=None, threads=None):
    """The example after the call ran on it, and its planned steps; AssertionError if it is too far from
    float64."""
    variant = MAIN[name]
    example = make(variant, shape, seed)
    device = on(variant, multiprocessors)
    libraries = [load(render(step), step.name) for step in variant.steps]
    run_steps(
        libraries, variant, example, seed=seed if order is None else order, device=device, threads=threads
    )
    verdict = example.judge()
    assert verdict.ok, f"{name}, {shape}, {multiprocessors} multiprocessors: {verdict}"
    return example, plan_steps(example.problem, variant, device)


@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 5, 7, 16, 100])
def test_shares_of_every_size(multiprocessors, compiler, fresh_seed):
    """From one thread block for all tiles to one for each KV block."""
    shape = Shape(1, 2600, heads=6, kv_heads=2, batch=3)
    _, planned = simulated(PACKED, shape, fresh_seed, multiprocessors)
    assert [step.variant.step for step in planned.steps] == (
        ["decode", "combine"] if multiprocessors in (5, 16, 100) else ["decode"]
    )


@pytest.mark.parametrize("multiprocessors", [2, 4, 6, 52])
def test_sets_of_heads(multiprocessors, compiler, fresh_seed):
    """With parts of tiles and without."""
    for name, shape in (
        (PACKED, Shape(1, 2600, heads=24, kv_heads=8, batch=3)),
        (PLAIN, Shape(2, 1900, heads=6, batch=2)),
    ):
        _, planned = simulated(name, shape, fresh_seed, multiprocessors)
        heads = shape.kv_heads or shape.heads
        assert planned.steps[0].shares.head_sets == math.gcd(heads, multiprocessors, 4)


@pytest.mark.parametrize("splits", [1, 3, 50, SplitEvery(256), SplitEvery(4096)], ids=str)
def test_splits_that_the_call_fixes(splits, compiler, fresh_seed):
    """The last one of a tile reaches past its keys, which nothing reads."""
    shape = Shape(1, 2600, heads=6, kv_heads=2, batch=3, splits=splits)
    _, planned = simulated(PACKED, shape, fresh_seed)
    expected = {50: 21, SplitEvery(256): 11, SplitEvery(4096): 1}.get(splits, splits)
    assert planned.steps[0].launch.blocks == 3 * 2 * expected
    assert len(planned.steps) == (2 if expected > 1 else 1)
    assert planned.steps[0].shares.per_tile >= 21  # KV blocks
    windowed = Shape(5, 2000, 2, batch=2, window=(700, 0), splits=splits)
    simulated("flash_decode_hdim64_fp16_local_sm80", windowed, fresh_seed)


@pytest.mark.parametrize("seqlen_kv", [0, 1, 16, 127, 128, 129, 640, 641])
@pytest.mark.parametrize("name", [PLAIN, PACKED])
def test_lengths_at_the_edges_of_kv_blocks(name, seqlen_kv, compiler, fresh_seed):
    heads = {"heads": 3} if name == PLAIN else {"heads": 8, "kv_heads": 2}
    simulated(name, Shape(1, seqlen_kv, **heads, batch=2), fresh_seed)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("flash_decode_hdim64_fp16_causal_packgqa_sm80", Shape(3, 900, 8, 2)),
        ("flash_decode_hdim64_fp16_causal_packgqa_sm80", Shape(9, 700, 3, 1)),  # two tiles of rows
        ("flash_decode_hdim64_fp16_causal_m32_packgqa_sm80", Shape(8, 900, 6, 2)),
        ("flash_decode_hdim64_fp16_causal_m64_packgqa_sm80", Shape(8, 900, 16, 2)),
        ("flash_decode_hdim64_fp16_causal_sm80", Shape(16, 7, 2, batch=2)),  # rows that see no key
        ("flash_decode_hdim64_fp16_causal_sm80", Shape(16, 1000, 2, top_left=True)),
        ("flash_decode_hdim64_fp16_local_sm80", Shape(5, 2000, 2, batch=2, window=(700, 0))),
        ("flash_decode_hdim64_fp16_local_sm80", Shape(1, 2000, 2, window=(0, 0))),
        ("flash_decode_hdim64_fp16_local_sm80", Shape(16, 3, 2, window=(1, 1))),
        ("flash_decode_hdim192_128_bf16_packgqa_sm80", Shape(1, 700, 8, 2)),
        ("flash_decode_hdim128_bf16_packgqa_sm80", Shape(1, 700, 8, 2, head_dim=104, head_dim_v=72)),
        ("flash_decode_hdim80_fp16_packgqa_sm86", Shape(2, 500, 8, 2, head_dim_v=8)),
    ],
    ids=str,
)
def test_masks_and_head_dims(name, shape, compiler, fresh_seed):
    for multiprocessors in (1, 3, 6):
        simulated(name, shape, fresh_seed, multiprocessors)


@pytest.mark.parametrize("name", [PLAIN, "flash_decode_hdim256_bf16_sm80", "flash_decode_hdim80_fp16_sm80"])
def test_many_parts_of_a_tile(name, compiler, fresh_seed):
    """More than warps of the step that combines have on their way at once."""
    keys = MAIN[name].visits.keys
    _, planned = simulated(name, Shape(1, 40 * keys + 1, heads=1), fresh_seed, multiprocessors=50)
    assert planned.steps[0].launch.blocks == 41


@pytest.mark.parametrize("spread", [8.0, 40.0])
def test_parts_with_very_different_row_max(spread, compiler, fresh_seed):
    simulated(PACKED, Shape(1, 1500, 8, 2, spread=spread), fresh_seed, multiprocessors=5)


def test_a_part_all_of_whose_keys_are_hidden_adds_nothing(compiler, fresh_seed):
    """Rows of one tile see different KV blocks, so that for some a whole part is hidden."""
    shape = Shape(16, 1300, heads=2, window=(60, 0), top_left=True)
    simulated("flash_decode_hdim32_fp16_local_sm80", shape, fresh_seed, multiprocessors=9)
    shape = Shape(16, 20, heads=2)
    simulated("flash_decode_hdim64_fp16_causal_sm80", shape, fresh_seed, multiprocessors=9)


def test_neither_the_order_of_threads_nor_of_blocks_changes_a_bit(compiler, fresh_seed):
    shape = Shape(1, 2600, heads=8, kv_heads=2, batch=2)
    results = set()
    for order, threads in ((1, 1), (2, 1), (3, 2), (4, 5)):
        example, planned = simulated(PACKED, shape, fresh_seed, 3, order, threads)
        assert len(planned.steps) == 2
        results.add((example.out.tobytes(), example.lse.tobytes()))
    assert len(results) == 1


def named(cases):
    return pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in cases])


def verdict_of(fault, sources, seed):
    """The check that found something, or None."""
    variant = MAIN[fault.variant]
    example = make(variant, fault.shape, seed)
    libraries = [load(source, step.name) for source, step in zip(sources, variant.steps, strict=True)]
    device = on(variant, fault.multiprocessors)
    try:
        reports = run_steps(libraries, variant, example, seed=seed, device=device)
    except SimulationError as error:
        return error.check
    assert None not in reports, "the fault needs tiles that are split"
    return None if example.judge().ok else WRONG


@named(FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    """By one of a few examples: a part that is lost may be one of small weights, one time in four."""
    sources = [
        fault.plant(render(step)) if step.name == fault.variant else render(step)
        for step in MAIN[fault.variant].steps
    ]
    verdicts = (verdict_of(fault, sources, seed) for seed in range(fixed_seed, fixed_seed + 12))
    assert any(verdict in fault.caught for verdict in verdicts)


@pytest.mark.parametrize(
    "fault", list({(f.variant, f.shape, f.multiprocessors): f for f in FAULTS}.values()), ids=lambda f: f.name
)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    sources = [render(step) for step in MAIN[fault.variant].steps]
    for seed in range(fresh_seed, fresh_seed + 8):
        assert verdict_of(fault, sources, seed) is None
