"""Decoding in clusters in the simulator: parts of every size in clusters of every size, sequences of several
lengths, any order of threads, planted faults.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator import test_varlen_simulated as varlen
from simulator.calls import ORDERS, calls_of, check_of, within_the_bound
from simulator.covering import VARIANTS
from simulator.faults_decode_clusters import FAULTS, VARLEN_FAULTS
from simulator.test_varlen_simulated import example_of, grouped, verdict_of

NAMES = {2: "c2_", 3: "c3_", 4: "c4_", 6: "c6_", 8: "", 16: "c16_"}
CLUSTERS = {
    cluster: VARIANTS[f"flash_decode_hdim160_bf16_{name}packgqa_sm90"] for cluster, name in NAMES.items()
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_parts_of_every_size(cluster, compiler, fresh_seed):
    """Fewer KV blocks than thread blocks, more, none; rows for some of the thread blocks, for all of them,
    and a tile of one row.
    """
    variant = CLUSTERS[cluster]
    assert variant.grid.cluster == cluster
    keys = variant.visits.keys
    for blocks in (0, 1, cluster - 1, cluster + 1, 3 * cluster):
        within_the_bound(variant, Shape(1, max(0, blocks * keys - 5), heads=3, kv_heads=1), fresh_seed)
    within_the_bound(variant, Shape(1, 1, heads=16, kv_heads=1, batch=2), fresh_seed)
    within_the_bound(variant, Shape(17, 2 * keys, heads=1, return_lse=False), fresh_seed)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("flash_decode_hdim64_fp16_causal_c2_packgqa_sm90", Shape(3, 900, 8, 2)),
        ("flash_decode_hdim64_fp16_causal_c2_packgqa_sm90", Shape(9, 700, 3, 1)),  # two tiles of rows
        ("flash_decode_hdim32_fp16_causal_sm90", Shape(16, 7, 2, batch=2)),  # rows that see no key
        ("flash_decode_hdim32_fp16_causal_sm90", Shape(16, 1000, 2, top_left=True)),
        ("flash_decode_hdim64_bf16_local_c4_sm90", Shape(5, 2000, 2, batch=2, window=(700, 0))),
        ("flash_decode_hdim64_bf16_local_c4_sm90", Shape(1, 2000, 2, window=(0, 0))),
        # Parts all of whose keys are hidden from some rows, or from all.
        ("flash_decode_hdim64_bf16_local_c4_sm90", Shape(16, 1300, 2, window=(60, 0), top_left=True)),
        ("flash_decode_hdim32_fp16_causal_sm90", Shape(16, 20, heads=2)),
        ("flash_decode_hdim192_128_bf16_c4_packgqa_sm90", Shape(1, 700, 8, 2)),
        ("flash_decode_hdim96_bf16_c2_packgqa_sm90", Shape(1, 700, 8, 2, head_dim=80, head_dim_v=72)),
        ("flash_decode_hdim160_bf16_packgqa_sm90", Shape(1, 1500, 8, 2, spread=8.0)),
        ("flash_decode_hdim160_bf16_packgqa_sm90", Shape(1, 1500, 8, 2, spread=40.0)),
    ],
    ids=str,
)
def test_masks_and_head_dims(name, shape, compiler, fresh_seed):
    within_the_bound(VARIANTS[name], shape, fresh_seed)


def test_the_order_of_threads_changes_no_bit(compiler, fresh_seed):
    results = set()
    for order in range(4):
        example = make(CLUSTERS[8], Shape(1, 900, heads=8, kv_heads=2, batch=2), fresh_seed)
        assert verdict_of(CLUSTERS[8], example, order) is None
        results.add(example.out.tobytes() + example.lse.tobytes())
    assert len(results) == 1


# Sequences of several lengths: each cluster, each mask, rows and pages, both kinds of GQA.
ROWS = "flash_varlen_decode_hdim32_bf16_packgqa_sm90"
PAGED = "flash_varlen_decode_hdim160_fp16_paged_c16_packgqa_sm90"
KERNELS = (
    ROWS,
    PAGED,
    "flash_varlen_decode_hdim64_fp16_causal_c2_sm90",
    "flash_varlen_decode_hdim64_bf16_c3_packgqa_sm90",
    "flash_varlen_decode_hdim160_bf16_local_paged_c4_packgqa_sm90",
    "flash_varlen_decode_hdim96_fp16_causal_paged_c6_packgqa_sm90",
)
DENSE = (
    "flash_varlen_decode_hdim32_fp16_dense_c2_packgqa_sm90",
    "flash_varlen_decode_hdim160_bf16_dense_paged_sm90",
)
LONG = Shape(3, 900, heads=1, batch=6)
TOKENS = Shape(1, 300, heads=2, batch=12)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("packed_q", [False, True], ids=["padded", "packed"])
def test_sequences(name, packed_q, compiler, fresh_seed):
    variant = varlen.VARIANTS[name]
    for packed_kv in [False] if "_paged_" in name else [False, True]:
        for shape in (LONG, TOKENS):
            example = example_of(variant, grouped(variant, shape), fresh_seed, packed_q, packed_kv)
            assert verdict_of(variant, example, fresh_seed) is None


@pytest.mark.parametrize("name", [ROWS, PAGED])
@pytest.mark.parametrize("shape", [Shape(1, 1, batch=3), Shape(7, 0, batch=2), Shape(20, 64)], ids=str)
def test_short_sequences(name, shape, compiler, fresh_seed):
    variant = varlen.VARIANTS[name]
    for seed in range(fresh_seed, fresh_seed + 3):
        assert verdict_of(variant, make(variant, grouped(variant, shape), seed), seed) is None


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_pages(page_size, compiler, fresh_seed):
    variant = varlen.VARIANTS[PAGED]
    narrow = Shape(2, 700, heads=1, batch=4, head_dim=152, head_dim_v=80)
    example = example_of(variant, grouped(variant, narrow), fresh_seed, page_size=page_size)
    assert verdict_of(variant, example, fresh_seed) is None


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    "changes", [{"mask": "bhqk"}, {"mask": "qk", "window": (300, 0), "mask_alignment": 1}], ids=str
)
def test_drafts_in_a_tree(name, changes, compiler, fresh_seed):
    variant = varlen.VARIANTS[name]
    shape = dataclasses.replace(grouped(variant, LONG), **changes)
    assert verdict_of(variant, make(variant, shape, fresh_seed), fresh_seed) is None


@pytest.mark.parametrize("name", [ROWS, PAGED])
def test_lengths_may_change_after_the_grid_is_fixed(name, compiler, fresh_seed):
    """As in a graph that is replayed: the problem is that of the first lengths, the arrays have others."""
    variant = varlen.VARIANTS[name]
    example = example_of(variant, grouped(variant, LONG), fresh_seed, packed_q=True, packed_kv=False)
    rng = np.random.default_rng(fresh_seed)
    cu, kv_lengths = example.lengths["cu_seqlens_q"], example.lengths["kv_lengths"]
    cu[1:-1] = np.sort(rng.integers(0, cu[-1] + 1, len(cu) - 2))
    kv_lengths[...] = rng.integers(0, kv_lengths + 1)
    # Sequences may now be as long as all tokens.
    problem = dataclasses.replace(example.problem, seqlen_q=example.problem.lengths.rows_q)
    assert verdict_of(variant, dataclasses.replace(example, problem=problem), fresh_seed) is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant = VARIANTS[fault.variant]
    source = fault.plant(render(variant))
    verdicts = [check_of(variant, fault.shape, fixed_seed, lambda step: source)]
    while verdicts[-1] is None and len(verdicts) < 4:
        verdicts.append(check_of(variant, fault.shape, fixed_seed + len(verdicts), lambda step: source))
    assert verdicts[-1] in fault.caught, verdicts


@pytest.mark.parametrize("fault", calls_of(FAULTS), ids=lambda fault: fault.name)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    for seed in range(fresh_seed, fresh_seed + ORDERS):
        assert check_of(VARIANTS[fault.variant], fault.shape, seed) is None


@pytest.mark.parametrize(("fault", "packing"), VARLEN_FAULTS, ids=lambda x: getattr(x, "name", ""))
def test_a_planted_fault_among_sequences_is_found(fault, packing, compiler, fixed_seed):
    varlen.test_a_planted_fault_is_found(fault, packing, compiler, fixed_seed)
