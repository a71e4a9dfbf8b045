"""The operator attention_weights: its contract, and its reference beside plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.errors import BadTensorDtype, BadTensorShape, BadTensorStrides
from flashgen.operators import OPERATORS
from flashgen.operators.masks import Band
from flashgen.operators.weights import WEIGHTS, normalise
from flashgen.operators.weights_reference import judge, weights
from flashgen.runtime.arrays import view

RNG = np.random.default_rng()
BATCH, ROWS, KEYS, HEADS, KV_HEADS, WIDTH = 2, 7, 9, 4, 2, 16


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape, np.float32).astype(dtype)


def arrays(dtype=np.float32):
    return {
        "q": normal(BATCH, ROWS, HEADS, WIDTH, dtype=dtype),
        "k": normal(BATCH, KEYS, KV_HEADS, WIDTH, dtype=dtype),
        "lse": normal(BATCH, HEADS, ROWS),
    }


def problem_of(named, **options):
    return normalise(**{name: view(x, name) for name, x in named.items()}, **options)


def plain_weights(q, k, hidden):
    scores = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, HEADS // KV_HEADS, axis=2)) * WIDTH**-0.5
    scores = np.where(hidden, -np.inf, scores)
    row_max = np.max(scores, axis=-1, keepdims=True)
    p = np.exp(scores - np.where(np.isneginf(row_max), 0, row_max))
    total = p.sum(axis=-1, keepdims=True)
    return p / np.where(total == 0, 1, total)


def test_the_operator_is_known_by_its_name():
    assert OPERATORS["attention_weights"] is WEIGHTS
    assert [x.name for x in WEIGHTS.arguments] == ["q", "k", "mask", "lse", "weights"]
    assert not any(x.differentiable for x in WEIGHTS.arguments)


def test_a_problem_has_the_shapes_of_its_call():
    problem = problem_of(arrays(), causal=True)
    assert problem.shape(WEIGHTS.position("weights")) == (BATCH, HEADS, ROWS, KEYS)
    assert problem.mask_type == "causal"
    assert problem == problem_of(arrays(), causal=True)
    assert not problem.empty
    without_batch = problem_of({name: x[0] for name, x in arrays().items()})
    assert without_batch.shape(WEIGHTS.position("weights")) == (HEADS, ROWS, KEYS)


def test_nothing_to_write_is_empty():
    named = arrays()
    assert problem_of(named | {"k": named["k"][:, :0]}).empty
    assert problem_of(named | {"q": named["q"][:, :0], "lse": named["lse"][..., :0].copy()}).empty


@pytest.mark.parametrize(
    ("name", "wrong", "error", "words"),
    [
        ("lse", lambda x: x.astype(np.float16), BadTensorDtype, "lse has dtype fp16"),
        ("lse", lambda x: x[..., :-1].copy(), BadTensorShape, "lse has shape"),
        ("lse", lambda x: np.asfortranarray(x), BadTensorStrides, "lse has strides"),
        ("k", lambda x: x.astype(np.float16), BadTensorDtype, "k has dtype fp16"),
        ("k", lambda x: x[..., :8].copy(), BadTensorShape, "k has head_dim 8"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, wrong, error, words):
    named = arrays()
    with pytest.raises(error, match=words):
        problem_of(named | {name: wrong(named[name])})


def test_weights_of_another_dtype_or_shape_are_refused():
    for x, error in (
        (np.empty((BATCH, HEADS, ROWS, KEYS), np.float16), BadTensorDtype),
        (np.empty((BATCH, HEADS, KEYS, ROWS), np.float32), BadTensorShape),
    ):
        with pytest.raises(error, match="weights"):
            problem_of(arrays() | {"weights": x})


@pytest.mark.parametrize("band", [Band(), Band(KEYS - ROWS, right=0), Band(-3, 2, 1)])
@pytest.mark.parametrize("dense", [False, True])
def test_the_reference_is_softmax(band, dense):
    q, k = (x.astype(np.float64) for x in list(arrays().values())[:2])
    mask = RNG.random((ROWS, KEYS)) < 0.4 if dense else None
    rows, keys = np.arange(ROWS)[:, None], np.arange(KEYS)
    hidden = np.zeros((ROWS, KEYS), bool) if mask is None else mask
    out_of_band = band.hides(rows, keys)
    hidden = hidden if out_of_band is None else hidden | out_of_band
    expected = weights(q, k, "fp32", WIDTH**-0.5, band, mask)
    right = plain_weights(q, k, hidden)
    np.testing.assert_allclose(expected.weights, right, atol=1e-12)
    assert (expected.bound[..., hidden] == 0).all()
    seen = ~hidden & ~hidden.all(axis=1)[:, None]
    assert (expected.bound[..., seen] > 0).all()
    assert (expected.bound < 1e-4).all()


def test_a_bound_is_1_at_most():
    q, k = np.full((1, 1, 1, 16), 1e4), np.full((1, 3, 1, 16), 1e4)
    expected = weights(q, k, "bf16", 1.0)
    assert (expected.bound <= 1.0 + 2.0**-126).all()
    np.testing.assert_allclose(expected.weights, 1 / 3)


def test_a_wrong_weight_is_judged_by_its_place():
    named = arrays()
    problem = problem_of(named, causal=True)
    band = Band.of(problem)
    right = weights(named["q"].astype(np.float64), named["k"].astype(np.float64), "fp32", WIDTH**-0.5, band)
    result = right.weights.astype(np.float32)
    assert judge(problem, named | {"weights": result}).ok
    result[1, 2, 3, 4] += 1e-3
    verdict = judge(problem, named | {"weights": result})
    assert not verdict.ok
    assert verdict.out.index == (1, 2, 3, 4)
    assert "(batch, head, row, key) (1, 2, 3, 4)" in str(verdict)
    result = right.weights.astype(np.float32)
    result[0, 0, 0, KEYS - 1] = 1e-30  # a hidden key
    assert not judge(problem, named | {"weights": result}).ok
