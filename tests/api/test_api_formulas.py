"""Calls with a formula for a score: the result, the gradients and the errors are those of a named score."""

import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorDtype

BIAS = "score + bias[b, h, q, kv]"


@pytest.fixture
def arrays(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q, k, v = (rng.standard_normal((2, 30, 4, 32), np.float32) for _ in "qkv")
    return q, k, v, rng.standard_normal((2, 4, 30, 30), np.float32)


def test_a_formula_gives_what_its_named_score_gives(arrays):
    *qkv, bias = arrays
    named = flashgen.attention(*qkv, score="bias", params={"bias": bias})
    np.testing.assert_array_equal(flashgen.attention(*qkv, score=BIAS, params={"bias": bias}), named)
    plan = flashgen.plan(*qkv, score=BIAS, params={"bias": bias})
    np.testing.assert_array_equal(plan(*qkv, bias=bias), named)


def test_names_and_formulas_form_a_chain(arrays):
    *qkv, bias = arrays
    named = flashgen.attention(*qkv, score=("softcap", "bias"), params={"cap": 2.0, "bias": bias})
    chain = ["softcap", "score +\n bias[b,h,q,kv]"]
    np.testing.assert_array_equal(
        flashgen.attention(*qkv, score=chain, params={"cap": 2.0, "bias": bias}), named
    )


def test_an_integer_is_an_integer_parameter_and_a_float_a_float(arrays):
    *qkv, _ = arrays
    window = flashgen.attention(*qkv, window_size=(3, 3))
    hides = "where(abs(kv - q) <= n, score, -inf)"
    for n in (3, np.int64(3), 3.0):
        result = flashgen.attention(*qkv, score=hides, params={"n": n})
        np.testing.assert_allclose(result, window, rtol=0, atol=1e-5)
    # An index needs an integer.
    table = np.zeros((4, 8), np.float32)
    shifted = "score + table[h, min(abs(q - kv) + n, 7)]"
    flashgen.attention(*qkv, score=shifted, params={"table": table, "n": 1})
    with pytest.raises(BadParam, match="is not an integer; an index of table must be one"):
        flashgen.attention(*qkv, score=shifted, params={"table": table, "n": 1.0})


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_differentiates_and_compiles_a_formula(arrays, compiled):
    torch = pytest.importorskip("torch")
    q, k, v, bias = map(torch.from_numpy, arrays)

    def loss(q, score):
        return flashgen.attention(q, k, v, score=score, params={"bias": bias}).square().sum()

    grads = []
    for score in ("bias", BIAS):
        x = q.clone().requires_grad_()
        call = torch.compile(loss, fullgraph=True) if compiled else loss
        call(x, score).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_errors_name_the_formula_and_its_parameters(arrays):
    q, k, v, bias = arrays

    def call(score, **params):
        flashgen.attention(q, k, v, score=score, params=params)

    with pytest.raises(BadParam, match=r"score `score \+ bias\[b, h, q, kv\]` needs the parameter bias"):
        call(BIAS)
    with pytest.raises(BadParam, match=r"has no parameter x; it has bias"):
        call(BIAS, bias=bias, x=1.0)
    with pytest.raises(BadTensorDtype, match="bias has dtype float64; expected fp32"):
        call(BIAS, bias=bias.astype(np.float64))
    with pytest.raises(BadParam, match=r"bias has type ndarray; the score `score [+] bias` needs a number"):
        call("score + bias", bias=bias)
    with pytest.raises(
        BadParam, match=r"score is 'min'; there are 'alibi', .* and formulas that read `score`"
    ):
        call("min")
