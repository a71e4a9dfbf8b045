"""Consumers that skip a block: all lanes of a warp have seen full before lane 0 arrives on empty.

A lane that still polls the phase of `full` two phases later would wait for ever. In the simulator no lane
polls at a pace of its own, so this reads the text.
"""

from __future__ import annotations

import re

import pytest

from flashgen.families.load import load_specs
from flashgen.source.render import render

SKIP = re.compile(r"^( *)auto skip_block = .*?^\1\};", re.MULTILINE | re.DOTALL)
MEETS = re.compile(r"__syncwarp\(\)|barrier_sync\(")
# One of each spec, mask and head dim: of the other axes skipping does not depend.
VARIANTS = {
    (variant.spec, variant.mask_type, variant.head_dim): variant
    for spec in load_specs()
    for variant in spec.variants()
    if variant.target == "sm90" and variant.mask_type in ("causal", "local", "blocks")
}.values()


def waits_and_releases(text: str) -> list[str]:
    """What stands between each wait of `skip_block` and the release that follows, without comments."""
    found = SKIP.search(text)
    code = re.sub(r"//.*", "", found[0]) if found else ""
    turn = re.search(r"auto begin_turn = (.*)", text)
    if turn:
        code = code.replace("begin_turn();", turn[1])
    return re.findall(r"mbarrier_wait\(shared\.\w+_full.*?\n(.*?)release\(", code, re.DOTALL)


@pytest.mark.parametrize("family", sorted({variant.family for variant in VARIANTS}))
def test_all_lanes_meet_before_a_skipped_block_is_released(family):
    for variant in VARIANTS:
        if variant.family == family:
            for between in waits_and_releases(render(variant)):
                assert MEETS.search(between), f"{variant.name}: {between}"


def test_a_missing_meeting_is_found():
    text = """
    auto begin_turn = [] {};
    auto skip_block = [&] {
        mbarrier_wait(shared.k_full(ring.stage), ring.parity);
        begin_turn();
        release(shared.k_empty(ring.stage));
        mbarrier_wait(shared.v_full(ring.stage), ring.parity);
        __syncwarp();
        release(shared.v_empty(ring.stage));
    };
"""
    first, second = waits_and_releases(text)
    assert not MEETS.search(first)
    assert MEETS.search(second)
