"""Calls without lengths in the simulator: thread blocks with equal shares of all keys, on wgmma and TMA."""

import dataclasses

import pytest

from flashgen.families.load import load_spec
from flashgen.host.paths import specs_dir
from flashgen.schedule.plan import plan_steps
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from simulator.test_varlen_simulated import grouped, verdict_of

# Two consumers and three; each mask; single heads, groups, and groups whose rows share a tile.
KERNELS = (
    "flash_split_hdim64_bf16_causal_m128_packgqa_sm90",
    "flash_split_hdim64_fp16_gqa_sm90",
    "flash_split_hdim64_fp16_local_m128_sm90",
)
VARIANTS = {v.name: v for v in load_spec(specs_dir() / "flash_split_sm90.yaml").variants()}


@pytest.mark.parametrize("name", KERNELS)
def test_within_the_bound_and_nothing_else_is_touched(name, compiler, fresh_seed):
    """With few multiprocessors a share has several tiles, with many several have a tile together."""
    variant = VARIANTS[name]
    window = (500, 20) if variant.mask_type == "local" else None
    example = make(variant, grouped(variant, Shape(170, 900, heads=1, batch=2, window=window)), fresh_seed)
    split = set()
    for multiprocessors in (2, 5, 13, 25):
        device = dataclasses.replace(hardware.pretend_for(variant), num_sms=multiprocessors)
        steps = plan_steps(example.problem, variant, device).steps
        split.add(steps[0].shares.split)
        assert len(steps) == 1 + steps[0].shares.split
        assert verdict_of(variant, example, fresh_seed, multiprocessors=multiprocessors) is None
    assert split == {True, False}


@pytest.mark.parametrize("shape", [Shape(1, 1, batch=3), Shape(200, 64), Shape(133, 20, batch=45)], ids=str)
def test_short_sequences(shape, compiler, fresh_seed):
    """More queries than keys as well; tiles that stay whole, in shares of several."""
    variant = VARIANTS[KERNELS[0]]
    for seed in range(fresh_seed, fresh_seed + 3):
        assert (
            verdict_of(variant, make(variant, grouped(variant, shape), seed), seed, multiprocessors=7) is None
        )
