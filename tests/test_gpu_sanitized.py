"""What compute-sanitizer is given to watch, without a GPU: the variants cover all, the problems fit them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fake_gpu import H200
from flashgen.schedule.dispatch import runs_on
from flashgen.schedule.grid import launch_of, tiles
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.tensormap import expressible
from flashgen.simulator.example import make
from gpu import sanitized
from gpu.test_sanitizer_gpu import _CLEAN, _FOUND, TOOLS, chosen

CHOSEN = chosen(H200)


def test_every_tile_mask_type_grouping_head_dim_and_dtype_is_watched():
    def seen(variants):
        keys = [(v.spec, v.target, v.tile) for v in variants]
        keys += [(v.spec, v.mask_type, v.gqa) for v in variants]
        keys += [(v.spec, v.head_dim, v.mask_type) for v in variants]
        return set(keys) | {(v.spec, v.dtype) for v in variants}

    runnable = [v for v in sanitized.VARIANTS.values() if runs_on(v, H200)]
    assert seen(CHOSEN) == seen(runnable)
    specs = {f"{family}_{target}" for family in ("flash_decode", "flash_fwd") for target in ("sm80", "sm90")}
    specs.add("flash_split_sm90")
    assert {v.spec for v in CHOSEN} == specs
    assert len(CHOSEN) < len(runnable) / 10


@pytest.mark.drawn
@pytest.mark.parametrize("variant", CHOSEN, ids=lambda variant: variant.name)
def test_the_problems_are_the_variants_own_and_small(variant):
    few = dataclasses.replace(H200, num_sms=sanitized.MULTIPROCESSORS)
    for shape in sanitized.shapes(variant):
        problem = make(variant, shape, 1).problem
        assert (problem.mask_type, problem.dtype) == (variant.mask_type, variant.dtype)
        assert problem.group_size > 1 or variant.gqa == "mha"
        assert expressible(problem, variant)
        assert tiles(problem, variant) <= 24
        if variant.grid.persistent:
            assert tiles(problem, variant) > launch_of(problem, variant, few).blocks
    if variant.grid.shares:
        longest = make(variant, sanitized.shapes(variant)[-1], 1).problem
        assert len(plan_steps(longest, variant, few).steps) == 2
    ragged = make(variant, sanitized.shapes(variant)[0], 1).problem
    assert ragged.seqlen_kv > 3 * variant.tile_value("block_n")
    assert ragged.head_dim < variant.head_dim


def test_the_extent_ends_with_the_last_element():
    x = np.zeros((4, 9, 6, 5), np.float16)[1:3, 2:7:2, ::3, :3]
    memory = sanitized._bytes(x)
    assert memory.nbytes == sanitized.extent(x)
    memory[:2] = memory[-2:] = 0xFF
    assert np.isnan(x[0, 0, 0, 0])
    assert np.isnan(x[-1, -1, -1, -1])
    assert np.isnan(x).sum() == 2


def test_each_tool_has_a_fault_planted_for_it():
    assert set(sanitized.PLANTED) == {f"planted-{tool}" for tool in TOOLS}


def test_a_share_is_clean_only_where_each_tool_says_so():
    memcheck = "========= ERROR SUMMARY: 0 errors"
    racecheck = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert all(_CLEAN.search(said) and not _FOUND.search(said) for said in (memcheck, racecheck))
    for said in ("ERROR SUMMARY: 1 error", "RACECHECK SUMMARY: 10 hazards displayed (0 errors, 10 warnings)"):
        assert _FOUND.search(said)
        assert not _CLEAN.search(said)
