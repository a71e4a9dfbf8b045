"""Score modifications in the backward kernels of both families, against float64; and faults at the seam."""

from __future__ import annotations

import numpy as np
import pytest

from backward_variants import MAIN
from flashgen.families.scores import load_scores
from flashgen.operators.numbers import widened
from flashgen.operators.scores import chained
from flashgen.simulator.example import Shape, make
from simulator.calls import check_on
from simulator.faults_backward_scores import FAULTS
from simulator.faults_scores import LINES

# Each mask type, both groupings, both orders of dQ and fp32; of Hopper both numbers of queries of a step.
CASES = [
    ("32_bf16_local_gqa_sm80", "by_key", Shape(70, 150, 4, 2, batch=2, window=(70, 5))),
    ("32_fp16_dense_sm80", "hides", Shape(70, 150, 2)),
    ("32_fp16_ordered_sm80", "alibi_symmetric+by_key", Shape(70, 150, 2)),
    ("32_fp32_causal_sm80", "softcap+alibi", Shape(70, 90, 2, batch=2)),
    ("32_bf16_sm90", "hides", Shape(150, 140, 2)),
    ("64_bf16_causal_sm90", "alibi", Shape(150, 140, 2, batch=2)),
    ("64_fp16_local_sm90", "softcap", Shape(150, 140, 2, window=(70, 5))),
    ("128_fp16_gqa_sm90", "by_key", Shape(70, 140, 4, 1)),
    ("192_fp16_causal_gqa_sm90", "softcap+by_key", Shape(70, 140, 2, 1)),
    ("192_128_bf16_causal_sm90", "alibi", Shape(150, 100, 1)),
    ("192_bf16_local_pair_gqa_sm90", "softcap+by_key", Shape(90, 150, 2, 1, window=(60, 5))),
    ("256_bf16_causal_sm90", "falls", Shape(70, 80, 1)),
    ("256_bf16_pair_sm90", "softcap", Shape(130, 70, 1)),
]


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    (folder / "scores.yaml").write_text(LINES)
    return load_scores(folder, keywords=()).by_name


def modified(name, names, scores):
    return MAIN[name].modified(chained([scores[each] for each in names]))


def check_of(variant, shape, seed, *source_of):
    """The check that found something in a call of this shape, or None. The inputs are those of the first seed
    from ``seed`` on of whose scores none may be 0 in fp32, where `falls` has no value."""
    for each in range(seed, seed + 100):
        example = make(variant, shape, each)
        q, k = (widened(example.array(name), variant.dtype) for name in ("q", "k"))
        k = k.repeat(q.shape[2] // k.shape[2], axis=2)
        if np.abs(np.einsum("bihd,bjhd->bhij", q, k)).min(initial=1.0) > 1e-5:
            return check_on(variant, example, seed, *source_of)
    raise AssertionError("no seed keeps scores from 0")


@pytest.mark.parametrize(("name", "names", "shape"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES])
def test_a_modified_kernel(name, names, shape, scores, compiler, fresh_seed):
    variant = modified(f"flash_bwd_hdim{name}", names.split("+"), scores)
    assert check_of(variant, shape, fresh_seed) is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, scores, compiler, fixed_seed):
    variant = modified(fault.variant, fault.scores, scores)
    assert check_of(variant, fault.shape, fixed_seed, fault.sources) in fault.caught


CLEAN = {(fault.variant, fault.scores): fault for fault in FAULTS}


@pytest.mark.parametrize(
    "fault", CLEAN.values(), ids=lambda fault: f"{fault.variant} {'+'.join(fault.scores)}"
)
def test_without_it_nothing_is_found(fault, scores, compiler, fresh_seed):
    """Also at the ends of blocks, and where rows see nothing."""
    variant = modified(fault.variant, fault.scores, scores)
    for seed in range(fresh_seed, fresh_seed + 3):
        assert check_of(variant, fault.shape, seed) is None
    for seqlen_q, seqlen_kv in ((1, 1), (128, 129), (140, 60)):
        assert check_of(variant, Shape(seqlen_q, seqlen_kv, 2, 1), fresh_seed) is None


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 3), (3, 0)])
def test_without_queries_or_keys(seqlen_q, seqlen_kv, scores, compiler, fresh_seed):
    variant = modified("flash_bwd_hdim32_fp16_causal_gqa_sm80", ["falls"], scores)
    assert check_of(variant, Shape(seqlen_q, seqlen_kv, 2, 1), fresh_seed) is None
