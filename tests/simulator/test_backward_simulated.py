"""The backward pass in the simulator: every tile, mask and dtype, planted faults."""

from __future__ import annotations

import pytest

from backward_variants import MAIN
from flashgen.simulator.example import Shape
from simulator.calls import ORDERS, calls_of, check_of, within_the_bound
from simulator.faults_backward import FAULTS

# Every tile, each mask type, both groupings, both orders of dQ; ragged blocks, short head dims.
CASES = [
    ("32_fp16_causal_gqa_sm80", Shape(100, 150, 4, 2, batch=2)),
    ("32_bf16_local_sm80", Shape(150, 300, 2, window=(70, 20))),
    ("32_fp16_dense_ordered_gqa_sm80", Shape(100, 150, 3, 1, mask="k", mask_alignment=1)),
    ("64_bf16_sm80", Shape(150, 140, 1, head_dim=56, head_dim_v=40)),
    ("64_fp16_causal_ordered_sm86", Shape(150, 140, 1)),
    ("64_bf16_dense_sm80", Shape(70, 200, 2, mask="hqk", mask_alignment=4, window=(-1, 0))),
    ("64_bf16_dense_sm86", Shape(70, 70, 2, window=(20, 5))),
    ("96_bf16_causal_sm80", Shape(100, 140, 1, head_dim=80)),
    ("96_fp16_local_gqa_sm86", Shape(70, 100, 2, 1, window=(9, 0))),
    ("96_bf16_dense_sm86", Shape(70, 70, 1)),
    ("128_fp16_local_ordered_sm80", Shape(100, 150, 1, window=(30, 30))),
    ("128_bf16_gqa_sm86", Shape(50, 70, 2, 1, head_dim=112)),
    ("128_bf16_dense_sm80", Shape(50, 140, 1, mask="qk")),
    ("192_128_bf16_causal_gqa_sm80", Shape(70, 100, 2, 1)),
    ("192_128_fp16_dense_sm80", Shape(70, 110, 2, head_dim_v=120)),
    ("192_bf16_ordered_gqa_sm80", Shape(70, 110, 2, 1)),
    ("192_128_fp16_sm86", Shape(70, 70, 1, head_dim=160)),
    ("192_fp16_causal_sm80", Shape(70, 100, 1, top_left=True)),
    ("192_fp16_sm86", Shape(70, 70, 1)),
    ("256_fp16_causal_sm80", Shape(100, 70, 1)),
    ("256_bf16_local_sm86", Shape(70, 50, 1, window=(5, 5))),
    ("32_fp32_causal_gqa_sm80", Shape(70, 90, 2, 1)),
    ("64_fp32_dense_sm86", Shape(70, 70, 1)),
    ("96_fp32_local_sm80", Shape(50, 70, 1, window=(20, 0))),
    ("96_fp32_sm86", Shape(50, 70, 1)),
    ("128_fp32_ordered_sm86", Shape(50, 50, 1, head_dim=100)),
    ("192_fp32_sm86", Shape(40, 20, 1)),
    ("192_128_fp32_sm80", Shape(40, 40, 1)),
    ("256_fp32_sm80", Shape(40, 40, 1)),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_within_the_bound(name, shape, compiler, fresh_seed):
    within_the_bound(MAIN[f"flash_bwd_hdim{name}"], shape, fresh_seed)


def test_the_cases_have_every_tile():
    def tile_of(variant):
        return variant.tile, variant.dtype == "fp32"

    cases = [MAIN[f"flash_bwd_hdim{name}"] for name, _ in CASES]
    family = [variant for variant in MAIN.values() if variant.spec == "flash_bwd_sm80"]
    assert set(map(tile_of, family)) == set(map(tile_of, cases))


@pytest.mark.parametrize("name", ["fp16_sm80", "fp16_causal_ordered_sm80"])
def test_lengths_at_the_edges_of_blocks(name, compiler, fresh_seed):
    """Also rows that see nothing, and keys that nobody sees."""
    variant = MAIN[f"flash_bwd_hdim32_{name}"]
    for seqlen_q in (0, 1, 63, 64, 65, 127, 128, 129):
        for seqlen_kv in (0, 1, 128, 129):
            if seqlen_q + seqlen_kv:
                within_the_bound(variant, Shape(seqlen_q, seqlen_kv, 2), fresh_seed)


def test_keys_that_nobody_sees_have_gradients_of_zero(compiler, fresh_seed):
    shape = Shape(40, 400, 2, window=(3, 3), top_left=True)
    example, _ = within_the_bound(MAIN["flash_bwd_hdim32_bf16_local_sm80"], shape, fresh_seed)
    for name in ("dk", "dv"):
        assert not example.array(name)[:, 50:].any()


def test_without_a_gradient_of_lse(compiler, fresh_seed):
    shape = Shape(70, 90, 2, return_lse=False)
    example, _ = within_the_bound(MAIN["flash_bwd_hdim32_fp16_sm80"], shape, fresh_seed)
    assert example.array("dlse") is None


@pytest.mark.parametrize("spread", [8.0, 40.0])
def test_scores_of_great_size(spread, compiler, fresh_seed):
    shape = Shape(100, 200, 2, spread=spread)
    within_the_bound(MAIN["flash_bwd_hdim32_bf16_sm80"], shape, fresh_seed)


def test_no_access_to_shared_memory_has_bank_conflicts(compiler, fresh_seed):
    for name, shape in (("64_bf16_sm80", Shape(128, 128, 1)), ("96_bf16_sm86", Shape(64, 64, 1))):
        _, reports = within_the_bound(MAIN[f"flash_bwd_hdim{name}"], shape, fresh_seed)
        counters = reports[1].counters
        assert counters["shared_wavefronts"] == counters["shared_wavefronts_ideal"]


def test_there_are_enough_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 12


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(MAIN[fault.variant], fault.shape, fixed_seed, fault.sources, threads=1) in fault.caught


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(MAIN[fault.variant], fault.shape, seed, threads=1) is None
