"""What a formula costs: time and text grow with its length, whatever it repeats."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from flashgen.errors import BadParam
from flashgen.families.params import score_params
from flashgen.families.scores import read_scores
from flashgen.operators.derivative import derivative
from flashgen.operators.formula import MAX_DEPTH, evaluate, number
from flashgen.operators.parser import FormulaError, parse
from flashgen.operators.roundoff import evaluate_with_error
from flashgen.operators.scores import NAMES, Score, chained
from flashgen.source.scores import score_functions


def nested(function, depth):
    text = "score"
    for _ in range(depth):
        text = function.format(text)
    return text


def score_of(text, name="nested"):
    return Score(name, text, (), parse(text, NAMES, {}))


DEEP = [
    "abs({} - 1)",
    "min({}, 3) - q",
    "tanh(-{})",
    "where({} < 2, q, kv) + 2",
    "1 / (2 + exp({}))",
    "max(abs({}), h)",
]


@pytest.mark.parametrize("function", DEEP)
def test_a_deep_formula_takes_a_moment(function):
    score = score_of(nested(function, 15))
    begin = time.process_time()
    slope = derivative(score.tree)
    for dtype in ("fp16", "fp32"):
        lengths = [
            len(score_functions(each, dtype, differentiated=True))
            for each in (score_of(nested(function, 5)), score)
        ]
        assert lengths[1] < 10 * lengths[0] + 2000
    with np.errstate(all="ignore"):
        x = np.linspace(-3, 3, 7) + 0.123
        values = {"score": x, "q": np.arange(7), "kv": np.arange(7), "h": 1, "b": 0}
        for tree in (score.tree, slope):
            expected = evaluate(tree, values, np)
            found, error = evaluate_with_error(tree, values, {"score": 0 * x}, "fp32", np)
            np.testing.assert_array_equal(found, expected)
            assert np.shape(error) in ((), (7,))
        # As a difference of its values says, where it has no corner nearby.
        above, below = (evaluate(score.tree, values | {"score": x + d}, np) for d in (1e-6, -1e-6))
        numeric, exact = (above - below) / 2e-6 + 0 * x, evaluate(slope, values, np) + 0 * x
        assert np.mean(np.abs(numeric - exact) < 1e-3) > 0.5
    assert time.process_time() - begin < 3


# Formulas whose derivatives, written out, are much longer than they are.
LONG = [
    nested("({0}) * ({0})", 9),
    nested("({0}) / (({0}) + 1.5)", 8),
    nested("({0}) * ({0}) * q", 6),
    nested("max({0}, {0} * {0})", 5),
    "*".join(f"(score + {n}.5)" for n in range(48)),
    nested("tanh({0}) * ({0})", 9),
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[-12:])
def test_what_a_derivative_repeats_is_not_written_out(text, tmp_path):
    """From the file to the kernel's text, and the call on the CPU."""
    (tmp_path / "scores.yaml").write_text(f"scores:\n  long: {{score: '{text}'}}\n")
    begin = time.process_time()
    score = read_scores(tmp_path / "scores.yaml", keywords=()).by_name["long"]
    for dtype in ("fp16", "fp32"):
        for differentiated in (False, True):
            assert len(score_functions(score, dtype, differentiated)) < 100 * len(text)
            params = score_params(score, dtype, differentiated)
            assert sum(len(param.doc or "") for param in params) < 100 * len(text)
    with np.errstate(all="ignore"):
        score.constants({"softmax_scale": 0.1}, "fp16", differentiated=True)
        values = {"score": np.linspace(-1, 1, 5), "q": 1, "kv": 1, "h": 1, "b": 0}
        evaluate(derivative(score.tree), values, np)
    with contextlib.suppress(BadParam):  # whose message has the formula
        score.check({"softmax_scale": np.inf}, "fp16", differentiated=True)
    assert len(repr(derivative(score.tree))) < 100_000
    assert time.process_time() - begin < 3


def test_squares_of_squares_are_refused_where_they_are_too_long():
    square = score_of("score * score", "square")
    chained([square] * 4)
    begin = time.process_time()
    with pytest.raises(
        BadParam, match=r"the scores square, .* operations, .*at most 2,500 and 50 are allowed"
    ):
        chained([square] * 40)
    score = chained([square] * 8)
    assert len(score_functions(score, "fp32", differentiated=True)) < 100_000
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "text",
    [
        nested("abs({})", MAX_DEPTH + 1),
        "-" * 9000 + "score",
        "(" * 190 + "score" + ")" * 190 + " + " + nested("abs({})", 150),
        " + ".join(["score"] * 2000),
        "not " * 2000 + "score",
        "score" + "[0" * 2000,
        "score + 1" * 100_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_formula_beyond_the_limits_is_refused_at_once(text):
    begin = time.process_time()
    with pytest.raises(FormulaError, match=r"nested too deeply|characters|not an expression|not a condition"):
        parse(text, NAMES, {})
    assert time.process_time() - begin < 1


def test_equal_nodes_are_one_in_every_thread():
    import threading

    found = []
    several = [
        threading.Thread(target=lambda: found.append(parse("abs(score * 3.25 + q)", NAMES, {})))
        for _ in range(8)
    ]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert len(set(map(id, found))) == 1
    assert number(1) is not number(1.0)
    import pickle

    assert pickle.loads(pickle.dumps(found[0])) is found[0]
