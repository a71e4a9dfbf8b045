"""The language of score modifications: what it allows, what it refuses and where, and what it means."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.operators.formula import evaluate, number, text
from flashgen.operators.parser import FormulaError, parse
from operators.formulas import ARRAYS, FORMULAS, SCALARS, Inputs, parsed, parsed_or_none, python_value

NAMES = {"score": "float", "q": "int", "kv": "int", "h": "int", "b": "int"} | SCALARS


@given(FORMULAS, st.integers(0, 2**32))
def test_a_formula_means_what_python_makes_of_it(formula, seed):
    inputs = Inputs(seed, count=8)
    tree = parsed_or_none(formula)
    if tree is None:
        return
    found = np.broadcast_to(evaluate(tree, inputs.values, np), (8,))
    np.testing.assert_allclose(found, python_value(formula, inputs.values), rtol=1e-12, atol=1e-12)


@given(FORMULAS)
def test_a_tree_is_written_as_it_is_read(formula):
    tree = parsed_or_none(formula)
    assert tree is None or parsed(text(tree)) == tree


@pytest.mark.parametrize(
    ("formula", "type"),
    [
        ("q - kv", "int"),
        ("abs(min(q, kv) - max(h, 3))", "int"),
        ("-n", "int"),
        ("where(q < kv, q, kv)", "int"),
        ("shift[b, kv] + 1", "int"),
        ("q * kv", "float"),
        ("q / 2", "float"),
        ("q + 1.0", "float"),
        ("where(q < kv, q, 0.5)", "float"),
        ("where(score < 0, q, kv)", "float"),
        ("score", "float"),
        ("exp(q)", "float"),
    ],
)
def test_positions_stay_integers_under_sums(formula, type):
    assert parsed(formula).type == type


def test_numbers_are_computed_when_read():
    assert parsed("2 * 3 - exp(0)") == number(5.0)
    assert parsed("-inf") == number(-math.inf)
    assert parsed("min(3, 2) + 1") == number(3)


@pytest.mark.parametrize(
    ("formula", "at", "says"),
    [
        ("score +", 0, "is not an expression"),
        ("score + * 2", 8, "is not an expression"),
        ("", 0, "is not an expression"),
        ("score; q", 5, "is not an expression"),
        ("x = score", 2, "is not an expression"),
        ("score + speed", 8, "unknown name 'speed'; known: .*score"),
        ("score ** 2", 0, "not allowed; allowed: names, numbers"),
        ("score // 2", 0, "not allowed"),
        ("score % 2", 0, "not allowed"),
        ("1 + (q & 1)", 5, "'q' is not a condition; & and | bind more tightly than comparisons"),
        ("+score", 0, "not allowed"),
        ("score if q < kv else 0", 0, "not allowed"),
        ("score.real", 0, "not allowed"),
        ("[score]", 0, "not allowed"),
        ("lambda: score", 0, "not allowed"),
        ("score + 'a'", 8, "not allowed"),
        ("score + True", 8, "not allowed"),
        ("score + 1j", 8, "not allowed"),
        ("__import__('os')", 0, "not allowed"),
        ("score + open(1)", 8, "not allowed"),
        ("score + math.exp(1)", 8, "not allowed"),
        ("score + exp(x=1)", 8, "not allowed"),
        ("score + min(*slope)", 8, "not allowed"),
        ("score + min(q)", 8, r"min\(\) takes 2 arguments, and 1 were given"),
        ("score + exp(q, kv)", 8, r"exp\(\) takes 1 arguments, and 2 were given"),
        ("score + (q < kv)", 9, "is a condition; .* needs a number"),
        ("q < kv", 0, "is a condition; a score is a number"),
        ("where(score, 1, 2)", 6, "'score' is not a condition; compare it"),
        ("where(q < kv and score, 1, 2)", 17, "'score' is not a condition"),
        ("where(not q, 1, 2)", 10, "'q' is not a condition"),
        ("where(q < kv is 3, 1, 2)", 6, "not allowed"),
        ("where(q is kv, 1, 2)", 6, "not allowed"),
        ("where(q in kv, 1, 2)", 6, "not allowed"),
        ("where(q < kv, h < 2, 1)", 14, "is a condition"),
        ("score + slope", 8, r"slope is an array; write slope\[b, h\]"),
        ("score + gain[b]", 8, "'gain' is not a declared array; arrays: bias, "),
        ("score + (slope + 1)[b, h]", 8, "is not a declared array"),
        ("score + slope[h]", 8, r"slope has 2 dimensions, \(b, h\); 1 indices"),
        ("score + slope[h, b]", 14, "the index of dimension b of slope is b itself"),
        ("score + slope[b, h + 1]", 17, "the index of dimension h of slope is h itself"),
        ("score + slope[b, 0]", 17, "the index of dimension h of slope is h itself"),
        ("score + slope[b, :]", 17, "not allowed"),
        ("score + table[h, score]", 17, "'score' is not an integer; an index of table must be one"),
        ("score + table[h, q / 2]", 17, "is not an integer"),
        ("score + table[h, 2 * q]", 17, "is not an integer"),
        ("score + table[h, shift[b, kv]]", 17, "cannot itself be an element of an array"),
        ("score + 1 / 0", 8, "'1 / 0' cannot be computed"),
        ("score + log(0)", 8, "cannot be computed"),
        ("score + exp(1e9)", 8, "cannot be computed"),
        ("score + (inf - inf)", 9, "is not a number"),
        ("score + 3000000000", 8, r"above 2\^30, the most of an integer; write it as a float"),
        ("score + (kv - (1000000000 + 1000000000))", 15, r"above 2\^30, the most of an integer"),
        ("-" * 3000 + "score", 0, "nested too deeply"),
        ("(" * 3000 + "score" + ")" * 3000, None, "not an expression|nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_with_its_place(formula, at, says):
    with pytest.raises(FormulaError, match=says) as caught:
        parse(formula, NAMES, ARRAYS)
    assert at is None or caught.value.column == at


def test_chained_comparisons_and_signs_are_shorthand():
    assert parsed("where(q < kv < 3, score, 2)") is parsed("where(q < kv and kv < 3, score, 2)")
    assert parsed("where((q < kv) & ~(q < 3), score, 2)") is parsed("where(q < kv and not q < 3, score, 2)")


def test_what_is_read():
    assert parsed("score + table[h, kv - q] * gain").reads() == {"score", "table", "h", "kv", "q", "gain"}
