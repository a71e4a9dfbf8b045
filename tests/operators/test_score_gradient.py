"""The operator score_gradient: its contract, how arrays are summed, its reference beside autograd."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.call.fields import PLAN_KEYWORDS
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides
from flashgen.families.formulas import score_of_formula
from flashgen.operators import OPERATORS
from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.reduction import reduction
from flashgen.operators.score_gradient import SCORE_GRADIENT, normalise
from flashgen.operators.score_gradient_reference import judge, score_gradient
from flashgen.runtime.arrays import view

RNG = np.random.default_rng()
BATCH, ROWS, KEYS, HEADS, KV_HEADS, WIDTH = 2, 7, 9, 4, 2, 16
BIAS = "score + bias[b, h, q, kv]"


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def arrays():
    return {
        "dout": normal(BATCH, ROWS, HEADS, 8),
        "q": normal(BATCH, ROWS, HEADS, WIDTH),
        "k": normal(BATCH, KEYS, KV_HEADS, WIDTH),
        "v": normal(BATCH, KEYS, KV_HEADS, 8),
        "out": normal(BATCH, ROWS, HEADS, 8),
        "lse": normal(BATCH, HEADS, ROWS),
    }


def score_of(formula, wrt="a", **types):
    return score_of_formula(formula, types, keywords=PLAN_KEYWORDS).with_respect_to(wrt)


def problem_of(score, params, named=None, **options):
    named = named or arrays()
    return normalise(
        **{name: view(x, name) for name, x in named.items()},
        score=score,
        score_arrays=[view(params[param.name], param.name) for param in score.arrays],
        score_scalars=[params[param.name] for param in score.scalars],
        **options,
    )


def test_the_operator_is_known_by_its_name():
    assert OPERATORS["score_gradient"] is SCORE_GRADIENT
    names = [x.name for x in SCORE_GRADIENT.arguments]
    assert names == ["dout", "q", "k", "v", "mask", "out", "lse", "dlse", "dscore"]


@pytest.mark.parametrize(
    ("formula", "extents", "expected"),
    [
        (BIAS.replace("bias", "a"), (2, 4, 7, 9), ("none", True, True, False)),
        (BIAS.replace("bias", "a"), (1, 4, 7, 9), ("none", False, True, False)),
        (BIAS.replace("bias", "a"), (2, 1, 1, 9), ("columns", True, False, False)),
        ("score * a[h, kv, q]", (4, 1, 7), ("rows", False, True, False)),
        ("score + a[b, h] * (kv - q)", (1, 4), ("all", False, True, False)),
        ("score + a[h, min(abs(kv - q), 15)]", (4, 16), ("diagonals", False, True, True)),
        ("score + a[where(kv < q, 0, 1)]", (2,), ("diagonals", False, False, True)),
        ("score + a[max(q - kv, -3) + 3]", (9,), ("diagonals", False, False, True)),
        ("score + a[min(h, 2), min(kv, 3)]", (3, 4), ("columns", False, True, True)),
        ("score + a[b, q + h]", (2, 30), ("rows", True, True, True)),
        ("score * a[0]", (1,), ("all", False, False, True)),
    ],
)
def test_how_an_array_is_summed(formula, extents, expected):
    assert tuple(reduction(score_of(formula), extents)) == expected


@pytest.mark.parametrize(
    ("formula", "shape", "words"),
    [
        ("score + a[q + kv]", (9,), "the index of a depends on q and kv other than by kv - q"),
        ("score + a[where(kv < 3, q, 1)]", (9,), "the index of a depends on q and kv other than by kv - q"),
        ("score + a[kv - q] + a[q - kv]", (9,), "reads a at 2 indices"),
        ("score + a[kv - q, h]", (3, HEADS), "a has the dimensions axis0, h"),
        ("score + a[q, kv - q]", (ROWS, 3), "a has the dimensions q, axis1"),
    ],
)
def test_an_array_that_kernels_cannot_sum_is_refused_by_name(formula, shape, words):
    with pytest.raises(BadParam, match=words):
        problem_of(score_of(formula), {"a": normal(*shape)})


def test_an_array_of_integers_has_no_gradient():
    score = score_of("score + a[q]", a="i32")
    with pytest.raises(BadParam, match="a is an array of integers"):
        problem_of(score, {"a": np.zeros(ROWS, np.int32)})


def test_the_gradient_has_the_shape_of_the_array():
    position = SCORE_GRADIENT.position("dscore")
    for shape in ((KEYS,), (HEADS, 1, KEYS), (BATCH, HEADS, ROWS, KEYS)):
        problem = problem_of(score_of(BIAS, "bias"), {"bias": normal(*shape)})
        assert problem.shape(position) == shape
    plain = normalise(**{name: view(x, name) for name, x in arrays().items()})
    assert plain.shape(position) == (BATCH, HEADS, ROWS, KEYS)
    table = problem_of(score_of("score + a[h, min(kv, 3)]"), {"a": normal(HEADS, 4)})
    assert table.shape(position) == (HEADS, 4)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("lse", lambda x: x.astype(np.float16), BadTensorDtype),
        ("out", lambda x: x[..., :4].copy(), BadTensorShape),
        ("dout", lambda x: x.astype(np.float16), BadTensorDtype),
        ("dscore", lambda x: x.astype(np.float16), BadTensorDtype),
        ("dscore", lambda x: x[:-1].copy(), BadTensorShape),
        ("dscore", lambda x: np.asfortranarray(x), BadTensorStrides),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, wrong, error):
    named = arrays() | {"dscore": np.empty((HEADS, ROWS, KEYS), np.float32)}
    params = {"bias": normal(HEADS, ROWS, KEYS)}
    problem_of(score_of(BIAS, "bias"), params, named)
    with pytest.raises(error, match=name):
        problem_of(score_of(BIAS, "bias"), params, named | {name: wrong(named[name])})


FORMULAS = {
    "bias": (BIAS.replace("bias", "a"), (HEADS, ROWS, KEYS), lambda s, a, d: s + a),
    "capped": ("2 * tanh((score + a[kv]) / 2)", (KEYS,), lambda s, a, d: 2 * ((s + a) / 2).tanh()),
    "gain": ("score * exp(a[h, q])", (HEADS, ROWS), lambda s, a, d: s * a.exp()[..., None]),
    "slope": ("score + a[b, h] * (kv - q)", (BATCH, HEADS), lambda s, a, d: s + a[..., None, None] * d),
    "table": (
        "score + a[h, min(abs(kv - q), 3)]",
        (HEADS, 4),
        lambda s, a, d: s + a[:, d.abs().clamp(max=3)],
    ),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_reference_is_the_derivative(name, masked):
    torch = pytest.importorskip("torch")
    formula, shape, modify = FORMULAS[name]
    named, score, array = arrays(), score_of(formula), normal(*shape)
    options = {"causal": True} if masked else {}
    problem = problem_of(score, {"a": array}, named, **options)
    dout, q, k, v = (torch.from_numpy(named[x]).double() for x in ("dout", "q", "k", "v"))
    a = torch.from_numpy(array).double().requires_grad_()
    distance = torch.arange(KEYS) - torch.arange(ROWS)[:, None] - (KEYS - ROWS)
    heads = torch.arange(HEADS) // (HEADS // KV_HEADS)
    scores = modify(torch.einsum("bihd,bjhd->bhij", q, k[:, :, heads]) * WIDTH**-0.5, a, distance)
    if masked:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    dlse = torch.randn(BATCH, HEADS, ROWS, dtype=torch.float64)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v[:, :, heads])
    ((out * dout).sum() + (scores.logsumexp(-1) * dlse).sum()).backward()
    for xp in (np, torch):
        tensors = (dout, q, k, v) if xp is torch else tuple(x.numpy() for x in (dout, q, k, v))
        expected = score_gradient(
            *tensors,
            "fp32",
            WIDTH**-0.5,
            problem.extents,
            Band.of(problem),
            dlse=dlse if xp is torch else dlse.numpy(),
            modification=modification_of(problem, {"a": xp.asarray(array)}, xp),
        )
        result, bound = (np.asarray(x).reshape(shape) for x in expected)
        np.testing.assert_allclose(result, a.grad, rtol=1e-10, atol=1e-12)
        assert (bound <= 1e-2 * (1 + np.abs(result).max())).all()


def test_a_wrong_element_is_judged_by_its_place():
    named, score, array = arrays(), score_of(BIAS, "bias"), normal(1, HEADS, ROWS, KEYS)
    problem = problem_of(score, {"bias": array}, named, causal=True)
    tensors = (named[name].astype(np.float64) for name in ("dout", "q", "k", "v"))
    named["bias"] = array
    right = score_gradient(
        *tensors,
        "fp32",
        WIDTH**-0.5,
        problem.extents,
        Band.of(problem),
        modification=modification_of(problem, named),
    )
    named["dscore"] = right.value.astype(np.float32)
    assert judge(problem, named).ok
    named["dscore"][0, 2, 3, 4] += 1e-3
    assert judge(problem, named).out.index == (0, 2, 3, 4)
    named["dscore"] = right.value.astype(np.float32)
    named["dscore"][0, 0, 0, KEYS - 1] = 1e-30  # no query sees this key
    assert not judge(problem, named).ok


def test_the_bound_allows_for_a_forward_pass_that_rounded_its_p():
    """Each P of a row is rounded the way that moves delta most, by up to half a unit in the last place. `out`
    itself is near 0, and so is what its own rounding moves.
    """
    q, k, v, dout = (normal(1, 6, 1, 8).astype(np.float64) for _ in range(4))
    q *= 1e-3
    v[:, 1::2] = -v[:, ::2]
    right = score_gradient(dout, q, k, v, "bf16", 1.0, (1, 1, 6, 6))
    scores = q[0, :, 0] @ k[0, :, 0].T
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout[0, :, 0] @ v[0, :, 0].T
    rounded = p * (1 + 2.0**-9 * np.sign(dp))
    ds = p * (dp - (rounded * dp).sum(-1, keepdims=True))
    shares = np.abs(ds - right.value[0, 0]) / right.bound[0, 0]
    assert shares.max() < 1
