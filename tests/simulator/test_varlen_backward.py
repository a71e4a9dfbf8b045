"""Gradients of sequences of several lengths in the simulator: packed, padded; planted faults."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from flashgen.errors import BadParam
from flashgen.families.load import load_specs
from flashgen.families.scores import load_scores
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.scores import chained
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import check_on, simulated
from simulator.faults_varlen_backward import FAULTS, LEAKS

MAIN = {
    variant.name.removeprefix("flash_bwd_varlen_hdim"): variant
    for spec in load_specs()
    if spec.operator == "attention_backward" and spec.has_lengths
    for variant in spec.variants()
    if variant.is_main
}


def example_of(name, shape, seed, packed_q=None, packed_kv=None, behind=False):
    """The example of the first seed from ``seed`` on whose sequences are packed as asked for, with rows
    ``behind`` the last one.
    """
    for each in range(seed, seed + 100):
        example = make(MAIN[name], shape, each)
        if packed_q not in (None, example.problem.lengths.packed_q):
            continue
        if packed_kv not in (None, example.problem.lengths.packed_kv):
            continue
        if not behind or all(
            rows > example.array(cu)[-1]
            for cu, rows in (
                ("cu_seqlens_q", example.problem.lengths.rows_q),
                ("cu_seqlens_kv", example.problem.lengths.rows_kv),
            )
        ):
            return example
    raise AssertionError("no seed packs sequences so")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("32_fp16_causal_gqa_sm80", ["softcap", "alibi"]),
        ("32_bf16_sm80", ["alibi_symmetric"]),
        ("128_bf16_causal_gqa_sm90", ["softcap", "alibi"]),
        ("192_fp16_causal_sm90", ["softcap"]),
    ],
    ids=["softcap+alibi", "alibi_symmetric", "softcap+alibi_sm90", "softcap_wide"],
)
def test_a_score_modification(name, names, compiler, fresh_seed):
    """Positions and batch entries of parameters are those of the sequence."""
    scores = load_scores(keywords=()).by_name
    variant = MAIN[name].modified(chained([scores[each] for each in names]))
    for seed in (fresh_seed, fresh_seed + 1):
        example = make(variant, Shape(70, 90, 2, 1 if "gqa" in name else None, batch=4), seed)
        assert check_on(variant, example, seed) is None


# Each mask type, both groupings and orders of dQ, one stage and two, all dtypes.
CASES = [
    ("32_fp16_causal_gqa_sm80", Shape(100, 150, 2, 1, batch=5)),
    ("32_bf16_local_ordered_sm80", Shape(150, 200, 1, batch=4, window=(70, 20))),
    ("64_bf16_sm86", Shape(150, 140, 1, batch=3, head_dim=56, head_dim_v=40)),
    ("128_fp16_causal_sm86", Shape(70, 100, 1, batch=3, head_dim=80)),
    ("192_fp16_sm86", Shape(70, 70, 1, batch=2)),
    ("32_fp32_local_gqa_sm80", Shape(70, 90, 2, 1, batch=3)),
    ("32_fp16_sm90", Shape(150, 140, 1, batch=4, head_dim=24)),
    ("64_bf16_causal_gqa_sm90", Shape(150, 200, 2, 1, batch=4)),
    ("96_fp16_local_sm90", Shape(100, 200, 1, batch=3, head_dim=80, head_dim_v=72, window=(70, 20))),
    ("128_bf16_causal_gqa_sm90", Shape(100, 150, 2, 1, batch=3)),
    ("192_fp16_causal_gqa_sm90", Shape(100, 150, 2, 1, batch=3)),
    ("192_128_bf16_local_sm90", Shape(100, 200, 1, batch=3, head_dim=176, head_dim_v=120, window=(70, 20))),
    ("256_bf16_sm90", Shape(70, 140, 1, batch=3, head_dim=200)),
    ("64_fp16_causal_ordered_gqa_sm90", Shape(150, 300, 2, 1, batch=4)),
    ("128_bf16_local_ordered_sm90", Shape(150, 300, 1, batch=3, window=(70, 20))),
    ("192_128_fp16_ordered_gqa_sm90", Shape(100, 150, 2, 1, batch=3)),
    ("192_fp16_pair_gqa_sm90", Shape(100, 200, 2, 1, batch=4)),
    ("192_128_bf16_causal_pair_sm90", Shape(150, 200, 1, batch=4, head_dim=176, head_dim_v=120)),
    ("192_bf16_local_pair_gqa_sm90", Shape(100, 300, 2, 1, batch=3, window=(70, 20))),
    ("192_128_fp16_causal_ordered_pair_gqa_sm90", Shape(100, 300, 2, 1, batch=3)),
    ("256_bf16_causal_pair_gqa_sm90", Shape(100, 200, 2, 1, batch=3)),
    ("256_fp16_ordered_pair_gqa_sm90", Shape(100, 200, 2, 1, batch=3)),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
@pytest.mark.parametrize("packed_q", [False, True], ids=["padded", "packed"])
def test_within_the_bound_and_all_else_is_zero(name, shape, packed_q, compiler, fresh_seed):
    for packed_kv in (False, True):
        example = example_of(name, shape, fresh_seed, packed_q, packed_kv)
        assert check_on(MAIN[name], example, fresh_seed) is None


@pytest.mark.parametrize("window", [(-1, 0), (-1, 3), (-1, -1)])
def test_a_window_without_a_left_side(window, compiler, fresh_seed):
    variant = MAIN["32_fp32_local_gqa_sm80"]
    example = make(variant, Shape(70, 90, 2, 1, batch=3, window=window), fresh_seed)
    problem = example.problem
    right = UNBOUNDED if window[1] < 0 else window[1]
    found = (problem.mask_type, problem.shift, problem.window_left, problem.window_right)
    assert found == ("local", 0, UNBOUNDED, right)
    assert check_on(variant, example, fresh_seed) is None


def test_diagonals_of_sequences_end_bottom_right(fresh_seed):
    with pytest.raises(BadParam, match="causal_top_left does not fit"):
        make(MAIN["32_fp16_causal_gqa_sm80"], Shape(70, 90, 2, 1, batch=3, top_left=True), fresh_seed)


PLAIN, ORDERED = "32_fp16_sm80", "32_fp16_causal_ordered_sm80"
HOPPER, WIDE = "32_fp16_sm90", "192_128_fp16_sm90"
PAIR, PAIR_ORDERED = "192_128_fp16_pair_sm90", "192_128_fp16_causal_ordered_pair_sm90"
HOPPER_ORDERED, WIDE_ORDERED = "32_fp16_causal_ordered_sm90", "192_128_fp16_causal_ordered_sm90"
SHORT, MANY = Shape(1, 1, batch=3), Shape(5, 130, batch=40)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *itertools.product([PLAIN, ORDERED], [SHORT, Shape(7, 0, batch=2), Shape(0, 9, batch=2), MANY]),
        *itertools.product([HOPPER, WIDE, PAIR, HOPPER_ORDERED, WIDE_ORDERED], [SHORT, MANY]),
        *itertools.product([HOPPER, PAIR], [Shape(3, 66, batch=150)]),  # more than a lane keeps in registers
    ],
    ids=str,
)
def test_short_and_many_sequences(name, shape, compiler, fresh_seed):
    for seed in range(fresh_seed, fresh_seed + 2):
        example = make(MAIN[name], dataclasses.replace(shape, heads=1), seed)
        assert check_on(MAIN[name], example, seed) is None


def test_without_a_gradient_of_lse(compiler, fresh_seed):
    example = make(MAIN[PLAIN], Shape(70, 90, 2, batch=3, return_lse=False), fresh_seed)
    assert example.array("dlse") is None
    assert check_on(MAIN[PLAIN], example, fresh_seed) is None


@pytest.mark.parametrize("name", [ORDERED, HOPPER, WIDE, PAIR, HOPPER_ORDERED])
@pytest.mark.parametrize("packed_kv", [False, True], ids=["padded", "packed"])
def test_lengths_may_change_after_the_grid_is_fixed(packed_kv, name, compiler, fresh_seed):
    """As in a graph that is replayed: the problem is that of the first lengths, the arrays have others."""
    shape = Shape(100, 150, 2, batch=6)
    example = example_of(name, shape, fresh_seed, packed_q=True, packed_kv=packed_kv)
    rng = np.random.default_rng(fresh_seed)
    for boundaries in ("cu_seqlens_q", "cu_seqlens_kv"):
        cu = example.array(boundaries)
        if cu is not None:
            cu[1:-1] = np.sort(rng.integers(0, cu[-1] + 1, len(cu) - 2))
    if not packed_kv:
        example.array("kv_lengths")[...] = rng.integers(0, example.array("kv_lengths") + 1)
    # Sequences may now be as long as all tokens.
    problem = dataclasses.replace(
        example.problem,
        seqlen_q=example.problem.lengths.rows_q,
        seqlen_kv=example.problem.lengths.rows_kv,
        diagonal_offset=example.problem.lengths.rows_kv - example.problem.lengths.rows_q,
    )
    example = dataclasses.replace(example, problem=problem)
    example.forward()
    assert check_on(MAIN[name], example, fresh_seed) is None


@pytest.mark.parametrize("name", [PLAIN, ORDERED, HOPPER, WIDE, PAIR, HOPPER_ORDERED])
def test_lengths_that_contradict_the_arrays_stay_within_them(name, compiler, fresh_seed):
    """The simulator would find an access to other memory."""
    rng = np.random.default_rng(fresh_seed)
    example = example_of(name, Shape(100, 150, 2, batch=4), fresh_seed, packed_q=True, packed_kv=True)
    example = dataclasses.replace(example, problem=dataclasses.replace(example.problem, seqlen_q=64))
    for of_array in ("cu_seqlens_q", "cu_seqlens_kv"):
        cu = example.array(of_array)
        cu[...] = rng.integers(-5, 2 * abs(cu[-1]) + 5, len(cu))
    simulated(MAIN[name], example, fresh_seed)


@pytest.mark.parametrize("name", [HOPPER, WIDE, PAIR, HOPPER_ORDERED, WIDE_ORDERED, PAIR_ORDERED])
def test_what_lies_behind_the_last_sequence_is_not_summed(name, compiler, fresh_seed):
    """TMA brings it in, and it is NaN: also where the last queries come last."""
    example = example_of(name, Shape(100, 150, 1), fresh_seed, packed_q=True, packed_kv=True, behind=True)
    assert check_on(MAIN[name], example, fresh_seed) is None


def sequences_that_differ(name, seed, source_of=render):
    """Which sequences have other gradients where one of them is NaN, besides itself. Its last block of
    queries is not whole, and the next sequence has queries.
    """
    shape = Shape(100, 150, 2, batch=4)
    for each in range(seed, seed + 100):
        example, poisoned = (example_of(name, shape, each, packed_q=True, packed_kv=True) for _ in range(2))
        queries, keys = (np.diff(example.array(f"cu_seqlens_{side}")) for side in ("q", "kv"))
        # Two of the four units of its last 64 rows are past it, and at most one of these is of no sequence.
        ragged = [i for i in range(3) if 0 < queries[i] % 64 <= 32 and queries[i + 1] and keys[i]]
        if ragged:
            break
    wrong = ragged[0]
    for of_array in ("dout", "q", "k", "v", "out", "lse", "dlse"):
        poisoned.of_sequence(poisoned.sequences()[wrong])[of_array][...] = np.nan
    for each in (example, poisoned):
        check_on(MAIN[name], each, seed, source_of, threads=1)
    differ = []
    for sequence in example.sequences():
        found, expected = poisoned.of_sequence(sequence), example.of_sequence(sequence)
        alike = all(found[gradient].tobytes() == expected[gradient].tobytes() for gradient in ("dk", "dv"))
        if not (alike and np.allclose(found["dq"], expected["dq"], rtol=0.01, atol=0.01)):
            differ.append(sequence.number)
    return set(differ) - {wrong}


@pytest.mark.parametrize("name", [PLAIN, HOPPER, WIDE, PAIR, HOPPER_ORDERED, WIDE_ORDERED, PAIR_ORDERED])
def test_a_sequence_of_nan_leaves_the_others_alone(name, compiler, fresh_seed):
    assert not sequences_that_differ(name, fresh_seed)


@pytest.mark.parametrize("fault", LEAKS, ids=[fault.name for fault in LEAKS])
def test_a_leak_is_found(fault, compiler, fixed_seed):
    assert sequences_that_differ(fault.variant, fixed_seed, fault.sources)


@pytest.mark.parametrize("name", [ORDERED, HOPPER_ORDERED, WIDE_ORDERED, PAIR_ORDERED])
def test_in_turns_dq_repeats_to_the_bit(name, compiler, fresh_seed):
    found = set()
    for order, threads in ((1, 1), (2, 4), (3, 8)):
        example = make(MAIN[name], Shape(200, 600, 1, batch=3), fresh_seed)
        assert check_on(MAIN[name], example, order, threads=threads) is None
        found.add(example.array("dq").tobytes())
    assert len(found) == 1


def test_there_are_enough_faults_of_different_names():
    assert len({fault.name for fault, _ in FAULTS}) == len(FAULTS) >= 8


@pytest.mark.parametrize(("fault", "packing"), FAULTS, ids=[fault.name for fault, _ in FAULTS])
def test_a_planted_fault_is_found(fault, packing, compiler, fixed_seed):
    example = example_of(fault.variant, fault.shape, fixed_seed, **packing)
    assert check_on(MAIN[fault.variant], example, fixed_seed, fault.sources, threads=1) in fault.caught


def test_without_one_nothing_is_found(compiler, fresh_seed):
    for name, shape in dict.fromkeys((fault.variant, fault.shape) for fault, _ in FAULTS):
        for seed in range(fresh_seed, fresh_seed + 3):
            assert check_on(MAIN[name], make(MAIN[name], shape, seed), seed) is None, seed
