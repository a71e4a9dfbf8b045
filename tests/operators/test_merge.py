"""The contract of merge, and its float64 reference against softmax over all keys."""

import numpy as np
import pytest

from flashgen.errors import (
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    DeviceTypeNotSupported,
)
from flashgen.operators import OPERATORS
from flashgen.operators.arguments import ArrayView, view_of_shape
from flashgen.operators.merge import MERGE, check_parts, normalise
from flashgen.operators.merge_reference import expected, judge

OUT, LSE = (2, 5, 3, 16), (2, 3, 5)


def views(**changes):
    given = {"o1": (OUT, "fp16"), "lse1": (LSE, "fp32"), "o2": (OUT, "fp16"), "lse2": (LSE, "fp32")}
    given |= changes
    return {
        name: x if isinstance(x, ArrayView) else view_of_shape(x[0], x[1], 0) for name, x in given.items()
    }


def test_the_problem_has_sizes_and_contiguous_results():
    problem = normalise(**views())
    assert OPERATORS["merge"] is MERGE
    assert problem.sizes == {"batch": 2, "seqlen_q": 5, "num_heads_q": 3, "head_dim_v": 16}
    assert problem.strides[0] == problem.strides[4] == (240, 48, 16)
    assert [MERGE.arguments[place].name for place in problem.results] == ["out", "lse_out"]
    assert problem.grid_extents({}) == {"query_rows": 15, "batch": 2}
    without = normalise(**{name: view_of_shape(x.shape[1:], x.dtype, 0) for name, x in views().items()})
    assert (without.batched, without.shape(4), without.shape(5)) == (False, OUT[1:], LSE[1:])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"o2": ((2, 5, 3, 24), "fp16")}, BadTensorShape, "o2 has shape"),
        ({"o2": (OUT[1:], "fp16")}, BadTensorShape, "o2 has shape"),
        ({"o2": (OUT, "bf16")}, BadTensorDtype, "o2 has dtype bf16"),
        ({"o1": (OUT, "float64")}, BadTensorDtype, "o1 has dtype float64"),
        ({"lse2": (LSE, "fp16")}, BadTensorDtype, "lse2 has dtype fp16"),
        ({"lse1": ((2, 5, 3), "fp32")}, BadTensorShape, "lse1 has shape"),
        ({"lse_out": ((2, 5, 3), "fp32")}, BadTensorShape, "lse_out has shape"),
        ({"out": ((*OUT[:3], 8), "fp16")}, BadTensorShape, "out has shape"),
        ({"out": (OUT, "fp32")}, BadTensorDtype, "out has dtype"),
        ({"o1": ((2, 5, 3, 12), "fp16"), "o2": ((2, 5, 3, 12), "fp16")}, BadTensorShape, "head_dim_v is 12"),
        ({"lse2": view_of_shape(LSE, "fp32", 1)}, DeviceTypeNotSupported, "lse2 is on GPU 1 but o1 is"),
        ({"o2": view_of_shape(OUT, "fp16", None)}, DeviceTypeNotSupported, "o2 is in host memory but o1 is"),
        ({"lse2": ArrayView("shape", 256, LSE, (15, 1, 3), "fp32", 0)}, BadTensorStrides, "lse2 has strides"),
        ({"o2": ArrayView("shape", 256, OUT, (244, 52, 17, 1), "fp16", 0)}, BadTensorStrides,
         "o2 has strides"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changes, error, words):
    with pytest.raises(error, match=words):
        normalise(**views(**changes))


def test_later_parts_are_named_by_their_number():
    first = view_of_shape(OUT, "fp16", 0), view_of_shape(LSE, "fp32", 0)
    with pytest.raises(BadTensorDtype, match="lse3"):
        check_parts([first, first, (first[0], view_of_shape(LSE, "fp16", 0))])


def softmax_parts(rng, scores, v):
    """o and lse in float64 of keys with these scores, (rows, keys), and values, (keys, columns)."""
    row_max = scores.max(axis=1, initial=-np.inf)
    finite = np.where(np.isneginf(row_max), 0, row_max)
    p = np.exp(scores - finite[:, None])
    total = p.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (p @ v) / np.where(total == 0, 1, total)[:, None], finite + np.log(total)


def test_the_reference_is_softmax_over_all_keys():
    rng = np.random.default_rng()
    scores, v = 20 * rng.standard_normal((50, 40)), rng.standard_normal((40, 8))
    scores[:5, :25] = -np.inf  # the first part sees nothing
    scores[3:9, 25:] = -np.inf  # the second one, and for some neither
    parts = [softmax_parts(rng, scores[:, keys], v[keys]) for keys in (slice(25), slice(25, 40))]
    whole, whole_lse = softmax_parts(rng, scores, v)
    arrays = []
    for o, lse in parts:
        marked = np.where(np.isneginf(lse) & (np.arange(50) % 2 > 0), np.inf, lse)  # as flash-attn marks them
        arrays += [np.where(np.isneginf(lse)[:, None], np.nan, o)[None, :, None], marked[None, None]]
    found = expected(*arrays, "fp32")
    np.testing.assert_allclose(found.out[0, :, 0], whole, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.lse[0, 0], whole_lse, rtol=1e-12)
    assert np.isneginf(found.lse[0, 0, 3:5]).all()
    assert not found.out_bound[0, 3:5].any()
    assert np.isfinite(found.out_bound).all()


def test_the_judge_refuses_what_is_a_step_of_the_dtype_off():
    rng = np.random.default_rng()
    problem = normalise(**views(o1=(OUT, "fp32"), o2=(OUT, "fp32")))
    o1, o2 = (1 + rng.random(OUT, np.float32) for _ in range(2))
    lse1, lse2 = (rng.standard_normal(LSE, np.float32) for _ in range(2))
    right = expected(*(x.astype(float) for x in (o1, lse1, o2, lse2)), "fp32")
    out, lse = right.out.astype(np.float32), right.lse.astype(np.float32)
    assert judge(problem, o1, lse1, o2, lse2, out, lse).ok
    assert not judge(problem, o1, lse1, o2, lse2, out * np.float32(1 + 2.0**-18), lse).ok
    assert not judge(problem, o1, lse1, o2, lse2, out, lse + np.float32(2.0**-17)).ok
    out[1, 2, 1, 3] = np.nan
    assert judge(problem, o1, lse1, o2, lse2, out, lse).out.index == (1, 2, 1, 3)
