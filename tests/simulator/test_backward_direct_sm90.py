"""The backward pass of small problems on Hopper in the simulator: every tile and mask type, planted faults,
the same bits each time."""

from __future__ import annotations

import numpy as np
import pytest

from backward_variants import MAIN
from flashgen.simulator.example import Shape, make
from simulator.calls import ORDERS, calls_of, check_of, simulated, within_the_bound
from simulator.faults_backward_direct_sm90 import FAULTS

# Every tile and mask type, both groupings; ragged tiles, short head dims, rows and keys that see nothing.
CASES = [
    ("32_bf16_local_direct", Shape(300, 400, 2, window=(150, 20), head_dim=24, head_dim_v=16)),
    ("32_fp16_causal_direct_gqa", Shape(40, 140, 2, 1, top_left=True)),  # a tile of keys without a step
    ("64_fp16_direct", Shape(400, 140, 1, batch=2)),
    ("64_bf16_causal_direct", Shape(300, 330, 1, batch=2)),
    ("64_bf16_causal_direct_gqa", Shape(330, 200, 4, 2)),
    ("64_bf16_local_direct", Shape(70, 300, 2, window=(30, 0))),
    ("32_fp16_direct_both_gqa", Shape(330, 130, 4, 2, batch=2)),  # more tiles of queries than of keys
    ("64_bf16_causal_direct_both", Shape(300, 430, 1, batch=2)),  # more of keys
    ("64_fp16_local_direct_both", Shape(70, 300, 2, window=(30, 0), head_dim=40)),
    ("96_fp16_causal_direct", Shape(70, 300, 1, head_dim=80, head_dim_v=72)),
    ("128_fp16_direct", Shape(200, 300, 1, head_dim=104)),
    ("128_bf16_local_direct_gqa", Shape(200, 300, 2, 1, window=(20, 30), top_left=True)),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_within_the_bound(name, shape, compiler, fresh_seed):
    within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], shape, fresh_seed)


@pytest.mark.parametrize("tile", ["direct", "direct_both"])
@pytest.mark.parametrize("seqlen_q", [1, 64, 129])
@pytest.mark.parametrize("seqlen_kv", [1, 63, 128])
def test_lengths_at_the_edges_of_blocks(seqlen_q, seqlen_kv, tile, compiler, fresh_seed):
    shape = Shape(seqlen_q, seqlen_kv, 1)
    within_the_bound(MAIN[f"flash_bwd_hdim64_bf16_causal_{tile}_sm90"], shape, fresh_seed)


@pytest.mark.parametrize("spread", [8.0, 40.0])
def test_scores_of_great_size(spread, compiler, fresh_seed):
    shape = Shape(200, 150, 1, spread=spread)
    within_the_bound(MAIN["flash_bwd_hdim64_bf16_causal_direct_sm90"], shape, fresh_seed)


def test_no_access_to_shared_memory_has_bank_conflicts(compiler, fresh_seed):
    for name in ("64_fp16_direct", "64_fp16_direct_both", "128_fp16_direct"):
        _, reports = within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], Shape(128, 128, 1), fresh_seed)
        counters = reports[0].counters
        assert counters["shared_wavefronts"] == counters["shared_wavefronts_ideal"]


def test_any_order_of_threads_gives_the_same_bits(compiler, fresh_seed):
    """Which is what lets it serve calls that ask for that."""
    for name in ("direct_gqa", "direct_both_gqa"):
        variant = MAIN[f"flash_bwd_hdim64_bf16_causal_{name}_sm90"]
        found = []
        for order in (1, 2):
            example = make(variant, Shape(200, 150, 2, 1), fresh_seed)
            simulated(variant, example, order)
            found.append([np.array(x) for x in example.arrays[8:11]])
        for first, second in zip(*found, strict=True):
            np.testing.assert_array_equal(first, second)


def test_there_are_enough_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 18


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(MAIN[fault.variant], fault.shape, fixed_seed, fault.sources) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(MAIN[fault.variant], fault.shape, seed) is None
