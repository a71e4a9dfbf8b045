"""The backward pass for Hopper in the simulator: every tile and mask type, shared memory, planted faults."""

from __future__ import annotations

import pytest

from backward_variants import MAIN
from flashgen.simulator.example import Shape
from simulator.calls import ORDERS, calls_of, check_of, within_the_bound
from simulator.faults_backward_sm90 import FAULTS

# Every tile and mask type, both groupings; ragged blocks, short head dims, rows and keys that see nothing.
CASES = [
    ("32_bf16", Shape(300, 150, 1, head_dim=24, head_dim_v=16)),
    ("32_fp16_causal_gqa", Shape(200, 150, 4, 2)),
    ("32_bf16_local", Shape(300, 400, 2, window=(150, 20))),
    ("64_fp16_gqa", Shape(150, 140, 3, 1)),
    ("64_bf16_causal", Shape(300, 330, 1, batch=2)),
    ("64_fp16_local_gqa", Shape(70, 300, 2, 1, window=(30, 0))),
    ("96_fp16_causal", Shape(70, 300, 1, head_dim=80, head_dim_v=72)),
    ("96_bf16_local", Shape(300, 100, 1, window=(20, 30), top_left=True)),
    ("128_bf16", Shape(200, 140, 2)),
    ("128_fp16_causal_gqa", Shape(150, 200, 2, 1, head_dim=104)),
    ("128_bf16_local", Shape(200, 300, 1, window=(70, 10))),
    ("32_fp16_dense", Shape(300, 272, 2, mask="hqk", batch=2)),
    ("64_bf16_dense_gqa", Shape(200, 150, 4, 2, mask="k", mask_alignment=1)),
    ("96_fp16_dense_ordered", Shape(100, 300, 2, window=(70, 10))),
    ("128_bf16_dense_gqa", Shape(150, 201, 2, 1, mask_alignment=4, window=(-1, 0))),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_within_the_bound(name, shape, compiler, fresh_seed):
    within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], shape, fresh_seed)


@pytest.mark.parametrize("seqlen_q", [1, 63, 128, 129])
@pytest.mark.parametrize("seqlen_kv", [1, 64, 129])
@pytest.mark.parametrize("name", ["64_fp16", "128_bf16_causal"])
def test_lengths_at_the_edges_of_blocks(name, seqlen_q, seqlen_kv, compiler, fresh_seed):
    within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], Shape(seqlen_q, seqlen_kv, 1), fresh_seed)


@pytest.mark.parametrize("window", [(0, 0), (63, 0), (64, 0), (65, 20), (130, 0), (-1, 0)])
@pytest.mark.parametrize("seqlen_q", [64, 200, 321])
@pytest.mark.parametrize("name", ["96_fp16_local", "128_bf16_local"])
def test_windows_of_which_a_consumer_sees_no_end(name, seqlen_q, window, compiler, fresh_seed):
    shape = Shape(seqlen_q, 200, 1, window=window, top_left=True)
    within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], shape, fresh_seed)


@pytest.mark.parametrize("spread", [8.0, 40.0])
def test_scores_of_great_size(spread, compiler, fresh_seed):
    shape = Shape(200, 150, 1, spread=spread)
    within_the_bound(MAIN["flash_bwd_hdim64_bf16_causal_sm90"], shape, fresh_seed)


def test_no_access_to_shared_memory_has_bank_conflicts(compiler, fresh_seed):
    for name in ("64_bf16", "128_bf16"):
        _, reports = within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], Shape(128, 128, 1), fresh_seed)
        counters = reports[1].counters
        assert counters["shared_wavefronts"] == counters["shared_wavefronts_ideal"]


def test_there_are_enough_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(MAIN[fault.variant], fault.shape, fixed_seed, fault.sources) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    """Under several orders of threads."""
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(MAIN[fault.variant], fault.shape, seed) is None
