"""What a kernel computes of a formula comes, all parts together, to the formula."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.operators.formula import Node, evaluate, number, text
from flashgen.operators.lowering import CONSTANT, key_slope, lower
from flashgen.operators.parser import parse
from operators.formulas import FORMULAS, INTEGERS, SCALARS, Inputs, parsed, parsed_or_none
from operators.lowered import Machine

KNOWN = frozenset(SCALARS)


@np.errstate(all="ignore")
@given(FORMULAS, st.integers(0, 2**32), st.booleans())
def test_the_lowered_formula_is_the_formula(formula, seed, approximate):
    inputs = Inputs(seed)
    tree = parsed_or_none(formula)
    if tree is None:
        return
    expected = np.broadcast_to(evaluate(tree, inputs.values, np), inputs.product.shape)
    lowered = lower(tree, KNOWN, approximate)
    found = Machine(inputs).score(lowered)
    # Relative to what is added up on the way: sums may cancel.
    size = 1e-9 * (1 + np.abs(expected) + np.abs(inputs.values["score"]))
    assert np.all((np.abs(found - expected) <= size) | _at_an_edge(tree, inputs)), lowered


def _at_an_edge(tree: Node, inputs: Inputs) -> np.ndarray:
    """Where floats that are compared are so near to each other that rounding decides."""
    near = np.zeros(inputs.product.shape, bool)
    for node in tree.walk():
        if node.op in ("<", "<=", ">", ">=", "==", "!="):
            a, b = (evaluate(arg, inputs.values, np) for arg in node.args)
            if any(arg.type == "float" for arg in node.args):
                near |= np.abs(a - b) <= 1e-9 * (1 + np.abs(a) + np.abs(b))
    return near


@given(INTEGERS, st.integers(0, 2**32))
def test_what_grows_with_the_key_grows_by_its_slope(formula, seed):
    tree, inputs = parsed(formula), Inputs(seed)
    slope = key_slope(tree)
    here, first = ({**inputs.values, "kv": key} for key in (inputs.at["kv"], inputs.first_key))
    if slope is not None:
        # A load is of the key's own element; Inputs takes it at `kv` whatever the name is.
        grown = evaluate(tree, here, np) - evaluate(tree, first, np)
        assert np.all(grown == slope * inputs.step)


def of_text(formula, approximate=True, arrays=None):
    names = {"score": "float", "q": "int", "kv": "int", "h": "int", "b": "int", "cap": "float", "n": "int"}
    arrays = {"slope": (("b", "h"), "float")} if arrays is None else arrays
    return lower(parse(formula, names, arrays), frozenset({"cap", "n"}), approximate)


def operations(node):
    return sum(each.op not in ("number", "name", "load", "float") for each in node.walk())


def test_softcap_is_a_multiplication_and_a_tanh():
    found = of_text("cap * tanh(score / cap)")
    (name,) = found.constants
    assert text(found.body) == f"tanh(product * {name})"
    scalars = {"cap": -4.0, "softmax_scale": 0.5}
    assert evaluate(found.factor, scalars, math) == 4
    assert evaluate(found.constants[name], scalars, math) == 0.125  # the signs of both caps together
    assert found.offset is None


def test_softcap_in_fp32_has_no_approximate_tanh():
    found = of_text("cap * tanh(score / cap)", approximate=False)
    assert "tanh" not in {node.op for node in found.body.walk()}
    assert [node.op for node in found.body.walk()].count("exp2") == 1
    assert found.factor == number(1.0)


def test_a_linear_bias_is_one_multiply_add_and_an_offset_of_the_row():
    found = of_text("score + slope[b, h] * (kv - q)")
    assert operations(found.body) == 2  # and the product with the slope, which is a constant of the row
    assert "kv" not in found.body.reads() | {"q"} - found.body.reads()
    assert "step" in found.body.reads()
    assert {"kv", "q"} <= found.offset.reads()


@pytest.mark.parametrize(
    "formula",
    [
        "score - slope[b, h] * abs(kv - q)",
        "score + slope[b, h] * (kv - q) * (kv - q)",
        "score * (kv - q)",
        "tanh(score + (kv - q))",
        "where(kv <= q, score, 0.0) + exp(kv - q)",
        "score + bias[q, kv]",
        "score + slope[b, h] * shift[b, kv]",
    ],
)
def test_what_is_not_linear_in_the_key_leaves_no_offset(formula):
    arrays = {
        "slope": (("b", "h"), "float"),
        "bias": (("q", "kv"), "float"),
        "shift": (("b", "kv"), "int"),
    }
    assert of_text(formula, arrays=arrays).offset is None


def test_scalars_come_to_one_constant_each():
    found = of_text("(score * cap * 2 + cap * cap - n) / (cap + 1)")
    assert operations(found.body) == 1
    assert found.body.op == "fma"
    assert set(found.constants) == {f"{CONSTANT}0", f"{CONSTANT}1"}


def test_equal_constants_are_one():
    assert len(of_text("tanh(score * (cap + 1)) + exp(cap + 1) * 0 + (cap + 1) * (cap + 1)").constants) <= 3


def test_positions_that_are_compared_stay_integers():
    found = of_text("where(abs(kv - q) <= n and (h < 3 or not b == 0), score, -inf)")
    assert found.constants == {}
    assert not [node for node in found.body.walk() if node.op == "float"]


def test_a_score_that_nothing_changes_is_the_scaled_product():
    assert text(of_text("score").body) == "product * softmax_scale"
