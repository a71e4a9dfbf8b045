"""The backward pass for Hopper in clusters of two thread blocks in the simulator: pairs that are not whole,
masks under which the blocks of a pair see different queries, planted faults."""

from __future__ import annotations

import pytest

from backward_variants import MAIN
from flashgen.simulator.example import Shape
from flashgen.source.render import render
from simulator.calls import ORDERS, check_of, within_the_bound
from simulator.faults_backward_pair_sm90 import FAULTS, ONE_DOUT, PAIR

# One block of keys, whose pair is past the last key; an odd and an even number; one block of a pair sees no
# query of a step, or of any; parts of groups. With one buffer of dO: a single step, many, and other heads.
CASES = [
    ("192_bf16", Shape(70, 60, 1)),
    ("192_bf16", Shape(250, 190, 1)),
    ("192_bf16_causal", Shape(330, 300, 1, batch=2)),
    ("192_bf16_causal", Shape(100, 300, 1, top_left=True)),
    ("192_bf16_causal", Shape(70, 260, 4, 1)),
    ("192_128_bf16_local", Shape(300, 250, 1, window=(0, 3))),
    ("256_bf16", Shape(60, 130, 1)),
    ("256_fp16_causal", Shape(330, 260, 1, batch=2)),
    ("256_bf16_local", Shape(200, 190, 4, 1, window=(70, 5))),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[f"{name}-{shape.seqlen_kv}" for name, shape in CASES])
def test_within_the_bound(name, shape, compiler, fresh_seed):
    gqa = "_gqa" if shape.kv_heads not in (None, shape.heads) else ""
    within_the_bound(MAIN[f"flash_bwd_hdim{name}_pair{gqa}_sm90"], shape, fresh_seed)


def test_half_rows_of_k_alone_have_bank_conflicts(compiler, fresh_seed):
    """Half of a panel's columns is 64 bytes of each row, those of neighbouring rows in the same banks."""
    _, (_, main, *_) = within_the_bound(MAIN[PAIR], Shape(128, 64, 1), fresh_seed)
    source = render(MAIN[PAIR]).splitlines()
    conflicting = [
        source[access.line - 1] for access in main.accesses if access.conflicts and "shared" in access.kind
    ]
    assert conflicting == []
    products = [
        source[access.line - 1] for access in main.accesses if access.conflicts and access.kind == "wgmma"
    ]
    assert products
    assert all("wgmma_m64n32k16" in line for line in products)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    assert check_of(MAIN[fault.variant], fault.shape, fixed_seed, fault.sources) in fault.caught


@pytest.mark.parametrize("name", [PAIR, ONE_DOUT])
def test_without_it_nothing_is_found(name, compiler, fresh_seed):
    """Under several orders of threads."""
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(MAIN[name], FAULTS[0].shape, seed) is None
