"""The error bound of a formula holds for a kernel's arithmetic at its worst."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.operators.lowering import lower
from flashgen.operators.roundoff import evaluate_with_error
from operators.formulas import FORMULAS, SCALARS, Inputs, parsed, parsed_or_none
from operators.lowered import Machine


def value_and_bound(tree, inputs, dtype):
    errors = {"score": 2.0**-21 * np.abs(inputs.values["score"])}
    value, bound = evaluate_with_error(tree, inputs.values, errors, dtype, np)
    value, bound = np.broadcast_arrays(value, bound + np.zeros(inputs.product.shape))
    return value, bound + 2.0**-21 * np.abs(value)  # what softmax's own arithmetic is granted


@np.errstate(all="ignore")
@given(FORMULAS, st.integers(0, 2**32), st.sampled_from(["fp16", "bf16", "fp32"]))
def test_single_precision_at_its_worst_stays_within_the_bound(formula, seed, dtype):
    inputs = Inputs(seed)
    tree = parsed_or_none(formula)
    if tree is None:
        return
    value, bound = value_and_bound(tree, inputs, dtype)
    lowered = lower(tree, frozenset(SCALARS), approximate=dtype != "fp32")
    found = Machine(inputs, exact=False, rng=np.random.default_rng(seed)).score(lowered)
    over = np.abs(found - value) > bound
    assert not over.any(), (lowered, value[over], (found - value)[over], bound[over])


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(
    ("formula", "least"),
    [
        ("gain * tanh(score / gain)", 0.1),
        ("exp(score / 8)", 0.1),
        # Distances here are far shorter than a block of keys, on which their error is reckoned.
        ("score + slope[b, h] * (kv - q)", 0.01),
    ],
)
def test_the_bound_is_no_larger_than_it_must_be(formula, least, dtype):
    """The worst of many errors comes to some share of its bound."""
    shares = []
    for seed in range(20):
        inputs = Inputs(seed, count=400)
        tree = parsed(formula)
        value, bound = value_and_bound(tree, inputs, dtype)
        machine = Machine(inputs, exact=False, rng=np.random.default_rng(seed))
        found = machine.score(lower(tree, frozenset(SCALARS), approximate=dtype != "fp32"))
        shares.append(np.max(np.abs(found - value) / bound))
    assert least < max(shares) <= 1


def test_a_hidden_score_has_an_error_of_nothing():
    inputs = Inputs(3)
    tree = parsed("max(where(kv <= q, score, -inf), score)")
    with np.errstate(all="ignore"):
        value, bound = value_and_bound(tree, inputs, "fp16")
    assert np.all(np.isfinite(value))
    assert np.all(bound < 1e-3 * (1 + np.abs(value)))
