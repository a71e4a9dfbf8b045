"""The backward pass for Hopper at wide head dims in the simulator: every head dim and mask type, shared
memory, planted faults."""

from __future__ import annotations

import pytest

from backward_variants import MAIN
from flashgen.simulator.example import Shape
from simulator.calls import ORDERS, calls_of, check_of, within_the_bound
from simulator.faults_backward_wide_sm90 import FAULTS

# Every head dim and mask type, both groupings; ragged blocks, short head dims, rows and keys that see
# nothing.
CASES = [
    ("192_bf16", Shape(150, 70, 1, head_dim=136, head_dim_v=160)),
    ("192_bf16_causal", Shape(200, 150, 1)),
    ("192_fp16_local_gqa", Shape(100, 130, 2, 1, window=(30, 10))),
    ("192_128_fp16_causal_gqa", Shape(140, 100, 4, 2, head_dim_v=96)),
    ("192_128_bf16_local", Shape(200, 100, 1, window=(20, 30), top_left=True)),
    ("256_fp16", Shape(150, 70, 1, batch=2)),
    ("256_bf16_causal_gqa", Shape(70, 200, 2, 1, head_dim=248, head_dim_v=200)),
    ("256_bf16_local", Shape(150, 200, 1, window=(0, 0))),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_within_the_bound(name, shape, compiler, fresh_seed):
    within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], shape, fresh_seed)


@pytest.mark.parametrize("seqlen_q", [1, 64, 65])
@pytest.mark.parametrize("seqlen_kv", [1, 65])
@pytest.mark.parametrize("name", ["192_bf16_causal", "256_fp16"])
def test_lengths_at_the_edges_of_blocks(name, seqlen_q, seqlen_kv, compiler, fresh_seed):
    within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], Shape(seqlen_q, seqlen_kv, 1), fresh_seed)


def test_scores_of_great_size(compiler, fresh_seed):
    shape = Shape(150, 100, 1, spread=20.0)
    within_the_bound(MAIN["flash_bwd_hdim192_bf16_causal_sm90"], shape, fresh_seed)


def test_no_access_to_shared_memory_has_bank_conflicts(compiler, fresh_seed):
    for name in ("192_bf16_causal", "256_fp16"):
        _, reports = within_the_bound(MAIN[f"flash_bwd_hdim{name}_sm90"], Shape(128, 64, 1), fresh_seed)
        counters = reports[1].counters
        assert counters["shared_wavefronts"] == counters["shared_wavefronts_ideal"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(MAIN[fault.variant], fault.shape, fixed_seed, fault.sources) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    """Under several orders of threads."""
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(MAIN[fault.variant], fault.shape, seed) is None
