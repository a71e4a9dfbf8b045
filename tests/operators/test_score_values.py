"""A modification with its parameters: scalars, constants, chains, and the arrays of a call."""

import math
import random

import numpy as np
import pytest

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer
from flashgen.families.scores import load_scores
from flashgen.operators import operator_for
from flashgen.operators.attention import normalise
from flashgen.operators.formula import text
from flashgen.operators.modification import ScoreOfCall
from flashgen.operators.scores import chained
from flashgen.runtime.arrays import view

SHIPPED = load_scores(keywords=()).by_name
SOFTCAP, ALIBI, SYMMETRIC = (SHIPPED[name] for name in ("softcap", "alibi", "alibi_symmetric"))


def problem_of(score, arrays=(), scalars=(), seqlen_q=3, seqlen_kv=5, dtype=np.float32, **options):
    q, k = np.zeros((2, seqlen_q, 4, 8), dtype), np.zeros((2, seqlen_kv, 2, 8), dtype)
    views = [view(x, "array") for x in (q, k, k)]
    given = [None if x is None else view(x, "array") for x in arrays]
    return normalise(*views, score=score, score_arrays=given, score_scalars=scalars, **options)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("cap", [0.0, math.nan, math.inf, -math.inf, 1e39, 1e-45, "30", None, True, 1j])
def test_a_cap_that_is_no_cap_is_refused(cap, dtype):
    call = problem_of(SOFTCAP, dtype=dtype)
    with pytest.raises(BadParam, match=r"cap (=|is) "):
        call.with_scalars((None, cap))


def test_a_negative_cap_is_the_cap_itself():
    """cap tanh(s / cap) is even in cap; what softmax multiplies by has to be positive."""
    values = [problem_of(SOFTCAP, scalars=(cap,)).scalar_values() for cap in (3.0, -3.0)]
    assert values[0]["scale_log2"] == values[1]["scale_log2"] > 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_constants_of_softcap(dtype):
    found = SOFTCAP.constants({"cap": 30.0, "softmax_scale": 0.25}, dtype)
    if dtype == "fp32":  # cap tanh(x) = cap - 2 cap / (1 + 2^(2 log2(e) x))
        assert sorted(found.values()) == pytest.approx(
            sorted([0.25 / 30 * 2 * math.log2(math.e), -60.0, math.log2(math.e)])
        )
    else:
        assert found == pytest.approx({"score_constant_0": 0.25 / 30, "scale_log2": 30 * math.log2(math.e)})


def test_a_number_that_no_call_has_given_is_asked_for():
    problem = problem_of(SOFTCAP)
    assert math.isnan(problem.score_scalars[0])
    with pytest.raises(BadParam, match="cap is None; the score softcap needs a number"):
        problem.with_scalars((None, None))
    known = problem.with_scalars((None, 30))
    assert known.with_scalars((0.5, None)).score_scalars == (30.0,)
    assert known.with_scalars((None, 20.0)).score_scalars == (20.0,)
    assert hash(known) != hash(known.with_scalars((None, 20.0)))


def test_a_chain_takes_what_the_one_before_made():
    both = chained([SOFTCAP, ALIBI])
    assert both.name == "softcap_alibi"
    assert [param.name for param in both.params] == ["cap", "slope"]
    assert text(both.tree) == "(cap * tanh(score / cap)) + (slope[b, h] * (kv - q))"
    assert text(chained([ALIBI, SOFTCAP]).tree).count("slope") == 1
    assert chained([SOFTCAP]) is SOFTCAP
    assert chained([SOFTCAP, ALIBI]) == both != chained([ALIBI, SOFTCAP])
    with pytest.raises(BadParam, match="alibi, alibi_symmetric each have a parameter slope"):
        chained([ALIBI, SYMMETRIC])


def test_a_modification_has_an_operator_with_its_parameters_at_the_end():
    plain, both = (operator_for("attention", score) for score in (None, chained([SOFTCAP, ALIBI])))
    assert both.arguments[: len(plain.arguments)] == plain.arguments
    assert [argument.name for argument in both.arguments[len(plain.arguments) :]] == ["slope"]
    assert both.scalars == ("softmax_scale", "cap")
    assert operator_for("attention", SOFTCAP) is operator_for("attention", SOFTCAP)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4)])
def test_slopes_may_be_broadcast_over_the_batch(shape):
    slopes = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    assert problem_of(ALIBI, [slopes]).array("slope").extents == (2, 4)


@pytest.mark.parametrize(
    ("slopes", "error", "says"),
    [
        (np.zeros(3, np.float32), BadTensorShape, r"slope has shape \(3,\); .* \(batch, num_heads_q\)"),
        (np.zeros((3, 4), np.float32), BadTensorShape, r"slope has shape \(3, 4\)"),
        (np.zeros((2, 1), np.float32), BadTensorShape, r"slope has shape \(2, 1\)"),
        (np.zeros((1, 2, 4), np.float32), BadTensorShape, r"slope has shape \(1, 2, 4\)"),
        (np.zeros((), np.float32), BadTensorShape, r"slope has shape \(\)"),
        (np.zeros(4, np.float16), BadTensorDtype, "slope has dtype fp16; expected fp32"),
        (np.zeros(4, np.float64), BadTensorDtype, "slope has dtype float64; expected fp32"),
        (np.zeros(4, np.int32), BadTensorDtype, "slope has dtype int32; expected fp32"),
        (None, NullPointer, "slope is None; the score alibi needs an array"),
    ],
)
def test_slopes_that_do_not_fit_are_refused(slopes, error, says):
    with pytest.raises(error, match=says):
        problem_of(ALIBI, [slopes])


def test_the_shape_of_an_array_of_one_dimension_is_shown_as_a_tuple(tmp_path):
    (tmp_path / "scores.yaml").write_text(
        'scores:\n  gained: {score: "score * gain[h]", params: {gain: [h, f32]}}\n'
    )
    score = load_scores(tmp_path, keywords=()).by_name["gained"]
    with pytest.raises(BadTensorShape, match=r"gain has shape \(3,\); .* \(num_heads_q,\) = \(4,\), "):
        problem_of(score, [np.zeros(3, np.float32)])
    with pytest.raises(NullPointer, match=r"needs an array \(num_heads_q,\)$"):
        problem_of(score, [None])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (1, 0)}, {"mask_type": 2}])
def test_positions_do_not_depend_on_the_mask(options):
    """One causal query hides nothing, and needs no mask; it still stands at the last key."""
    problem = problem_of(ALIBI, [np.ones(4, np.float32)], seqlen_q=1, seqlen_kv=500, **options)
    found = ScoreOfCall(ALIBI, {}, {"slope": np.ones((2, 4))}, problem.seqlen_kv - problem.seqlen_q)
    bias = found.at(0, 0, np.arange(1)[:, None], np.arange(500)).value(np, np.zeros((1, 500)))
    assert np.array_equal(bias[0], np.arange(500) - 499)


def test_the_elements_that_a_score_reads_are_clamped_to_the_array(tmp_path):
    (tmp_path / "scores.yaml").write_text(
        'scores:\n  near: {score: "score + table[h, abs(q - kv)]", params: {table: [h, distance, f32]}}\n'
    )
    score = load_scores(tmp_path, keywords=()).by_name["near"]
    table = np.arange(8.0).reshape(2, 4)
    call = ScoreOfCall(score, {}, {"table": table}, 0)
    found = call.at(0, 1, np.arange(6)[:, None], np.arange(6)).value(np, np.zeros((6, 6)))
    distance = np.abs(np.arange(6)[:, None] - np.arange(6))
    assert np.array_equal(found, table[1][np.minimum(distance, 3)])


def test_the_size_of_a_dimension_of_its_own_is_the_arrays(tmp_path):
    (tmp_path / "scores.yaml").write_text(
        'scores:\n  near: {score: "score + table[h, q - kv]", params: {table: [h, distance, f32]}}\n'
    )
    score, length = load_scores(tmp_path, keywords=()).by_name["near"], random.randint(1, 30)
    problem = problem_of(score, [np.zeros((4, length), np.float32)])
    assert problem.sizes["table_distance"] == length
    assert problem.score_sizes == (("table_distance", length),)
    with pytest.raises(BadTensorShape, match=r"table has shape \(4, 0\); it must not be empty"):
        problem_of(score, [np.zeros((4, 0), np.float32)])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (2.0, "n is 2.0; the score shifted needs an integer"),
        (True, "n is True"),
        (2**31, "n is 2147483648; it must be finite, at most"),
        ("2", "n is '2'"),
    ],
)
def test_integers_are_integers(given, says, tmp_path):
    (tmp_path / "scores.yaml").write_text(
        'scores:\n  shifted: {score: "score + min(kv, n)", params: {n: i32}}\n'
    )
    problem = problem_of(load_scores(tmp_path, keywords=()).by_name["shifted"])
    assert problem.values({"gqa": "gqa"})["n"] == 0  # a struct's word for a number that is not there yet
    with pytest.raises(BadParam, match=says):
        problem.with_scalars((None, given))
    assert problem.with_scalars((None, np.int64(-7))).values({"gqa": "gqa"})["n"] == -7


def test_the_problem_says_what_it_wants():
    assert problem_of(SOFTCAP, scalars=(3,)).description().endswith("score softcap")
