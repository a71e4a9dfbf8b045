"""The float64 gradients against finite differences of the float64 result, and derivatives of formulas."""

import ml_dtypes
import numpy as np
import pytest

from flashgen.families.scores import load_scores
from flashgen.operators import formula, gradients, reference
from flashgen.operators.derivative import derivative
from flashgen.operators.formula import evaluate
from flashgen.operators.masks import Band
from flashgen.operators.modification import ScoreOfCall
from flashgen.operators.parser import parse

HEADS, KV_HEADS, QUERIES, KEYS = 4, 2, 5, 6
STEP = 1e-5


def random_case(rng):
    """q, k, v, dout and dlse of a small problem."""
    q = rng.standard_normal((2, QUERIES, HEADS, 8))
    k, v = rng.standard_normal((2, KEYS, KV_HEADS, 8)), rng.standard_normal((2, KEYS, KV_HEADS, 3))
    return q, k, v, rng.standard_normal((2, QUERIES, HEADS, 3)), rng.standard_normal((2, HEADS, QUERIES))


def softcap():
    return ScoreOfCall(load_scores(keywords=()).by_name["softcap"], {"cap": 1.5}, {}, KEYS - QUERIES)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("masked", ["none", "causal", "band and mask", "softcap"])
def test_they_are_what_the_result_changes_by(masked, with_dlse):
    rng = np.random.default_rng()
    q, k, v, dout, dlse = random_case(rng)
    band, dense, modification, scale = Band(), None, None, 0.6
    if masked == "causal":
        band = Band(-1, right=0)  # the first query sees nothing, the last key is seen by none
    elif masked == "band and mask":
        band, dense = Band(1, 2, 1), rng.random((2, 1, QUERIES, KEYS)) < 0.3
    elif masked == "softcap":
        modification = softcap()
    found = gradients.gradients(
        dout, q, k, v, "fp16", scale, band, dense, dlse if with_dlse else None, modification
    )

    def loss(*changed):
        result = reference.attention(*changed, "fp16", scale, band, dense, modification=modification)
        seen = np.isfinite(result.lse)
        of_lse = (dlse[seen] * result.lse[seen]).sum() if with_dlse else 0.0
        return (dout * result.out).sum() + of_lse

    inputs = [q, k, v]
    assert [*found] == ["dq", "dk", "dv"]
    for i, (gradient, _) in enumerate(found.values()):
        for at in np.ndindex(inputs[i].shape):
            ends = []
            for step in (STEP, -STEP):
                moved = [x.copy() for x in inputs]
                moved[i][at] += step
                ends.append(loss(*moved))
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * STEP), abs=1e-7)
    assert all((x.bound >= 0).all() for x in found.values())
    if masked == "causal":
        unseen = {"dq": 0, "dk": -1, "dv": -1}
        assert not any(x[:, row].any() for name, row in unseen.items() for x in found[name])


def test_pieces_of_any_size_give_the_same(monkeypatch):
    q, k, v, dout, dlse = random_case(np.random.default_rng())
    given = dout, q, k, v, "bf16", 0.3, Band(1, right=0), None, dlse
    whole = gradients.gradients(*given)
    for at_once in (1, 13, 40):
        monkeypatch.setattr(gradients, "_SCORES", at_once)
        for name, parts in gradients.gradients(*given).items():
            for one, other in zip(parts, whole[name], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_without_queries_or_keys_they_are_zero(queries, keys):
    q, k = np.ones((1, queries, 2, 8)), np.ones((1, keys, 2, 8))
    found = gradients.gradients(q, q, k, k, "fp16", 1.0)
    assert [x.value.shape for x in found.values()] == [q.shape, k.shape, k.shape]
    assert not any(x.any() for gradient in found.values() for x in gradient)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_bound_tells_a_wrong_sum_from_a_rounded_one(dtype):
    rng = np.random.default_rng()
    q, k, v, dout = (rng.standard_normal((1, 40, 2, 16)) for _ in range(4))
    right = gradients.gradients(dout, q, k, v, dtype, 0.25, Band(right=0))
    u = reference.UNIT_ROUNDOFF[dtype]
    for x, bound in right.values():
        rounded = x * (1 + u * rng.uniform(-1, 1, x.shape))
        assert gradients.largest(rounded, x, bound).share <= 1
    without = gradients.gradients(dout[:, :-1], q[:, :-1], k, v, dtype, 0.25, Band(right=0))
    assert gradients.largest(without["dk"].value, *right["dk"]).share > 1
    assert gradients.largest(without["dv"].value, *right["dv"]).share > 1
    other_delta = gradients.gradients(
        dout, q, k, v, dtype, 0.25, Band(right=0), None, np.full((1, 2, 40), 0.1)
    )
    assert gradients.largest(other_delta["dq"].value, *right["dq"]).share > 1


FORMULAS = [
    "score",
    "2 - score * score / slope",
    "slope * tanh(score / slope) - 3 * score",
    "exp(-abs(score)) + log(score * score + 1)",
    "min(score, slope) * max(score, -1)",
    "where(score < 0.2, exp(score), slope)",
    "slope / (2 + score * score)",
    "slope",
]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_derivative_is_what_a_formula_changes_by(text):
    names = {"score": "float", "slope": "float"}
    tree = parse(text, names, {})
    score = np.random.default_rng().uniform(-2, 2, 200)
    score = score[(abs(score) > 0.01) & (abs(score - 0.2) > 0.01) & (abs(score - 0.7) > 0.01)]
    score = score[abs(score + 1) > 0.01]

    def value(tree, score):
        return evaluate(tree, {"score": score, "slope": 0.7}, np)

    change = (value(tree, score + STEP) - value(tree, score - STEP)) / (2 * STEP)
    np.testing.assert_allclose(value(derivative(tree), score) + 0 * score, change + 0 * score, atol=1e-8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("cap * tanh(score / cap)", "1 - tanh(score / cap) * tanh(score / cap)"), ("score + cap", "1.0")],
)
def test_a_derivative_has_no_factor_that_cancels(text, expected):
    names = {"score": "float", "cap": "float"}
    found, wanted = derivative(parse(text, names, {})), parse(expected, names, {})
    assert formula.text(found).replace("1.0", "1") == formula.text(wanted).replace("1.0", "1")


@pytest.mark.parametrize("text", ["where(score > 0, log(score), score)", "min(score, exp(score * 400))"])
def test_the_branch_that_is_not_taken_has_no_part_in_a_derivative(text):
    tree = parse(text, {"score": "float"}, {})
    with np.errstate(all="ignore"):
        found = evaluate(derivative(tree), {"score": np.float32([0, 500, 600])}, np)
    assert np.isfinite(found).all()


def test_the_bound_of_dk_holds_if_p_and_o_of_the_forward_pass_were_rounded():
    """Of a key of one row: dk = p (do v - delta) q, where only delta is wrong, as made from a rounded result.
    With few columns of V the roundings of P do not even out.
    """
    rng, batch, keys, scale = np.random.default_rng(), 4000, 200, 0.25
    q, dout = (_bf16(rng.standard_normal((batch, 1, 1, width))) for width in (16, 8))
    k, v = (_bf16(rng.standard_normal((batch, keys, 1, width))) for width in (16, 8))
    scores = np.einsum("bqhd,bkhd->bk", q, k) * scale
    p = np.exp(scores - scores.max(1, keepdims=True))
    total = p.sum(1)[:, None]
    out = _bf16(np.einsum("bk,bkc->bc", _bf16(p), v[:, :, 0]) / total)
    delta = (out * dout[:, 0, 0]).sum(1, keepdims=True)
    ds = p / total * (np.einsum("bkc,bc->bk", v[:, :, 0], dout[:, 0, 0]) - delta)
    right = gradients.gradients(dout, q, k, v, "bf16", scale)["dk"]
    found = scale * ds[:, :, None, None] * q
    assert (np.abs(found - right.value) <= right.bound).all()


def _bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)
