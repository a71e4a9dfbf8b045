"""The gradient of an array of a score modification in float64, and how far a kernel may be from it.

The bound. With the names of `gradients`, f'_ij the derivative of the modified score of (i, j) with respect to
the element a_n that it reads, ds_ij = p_ij (do_i v_j - delta_i) f'_ij, and m the scores that read a_n:

    |error of ds_ij| <= |ds_ij| r_i + |error of f'_ij| p_ij |t_ij| + 2^-126 (1 + |f'_ij t_ij|)
                        + |f'_ij| p_ij (2^-21 (G_ij + D_i + |dlse_i|) + e_i sum_j p_ij G_ij + w_i)
    w_i = 1.05 u R_i + least sum_j |do_i v_j| + least_out sum_c |do_ic|
    |error of da_n| <= sum of |error of ds_ij| + (2^-19 + 2^-24 sqrt(m)) sum of |ds_ij|
                       + 1.05 (unit roundoff of a's dtype) |da_n| + least step of that dtype

with t_ij = do_i v_j - delta_i.

- r, e, G, D, R: as in `gradients`.
- w: delta comes from the result of the forward call, which was rounded, and whose P were. least and least_out
  are what the forward call loses below the least step of the dtype, as in `reference`.
- No rounding of P or dS: their product is not an operand of an MMA, but is summed in fp32.
- The last term: sums of m terms in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators.formula import clamped
from flashgen.operators.gradients import score_gradients
from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import widened
from flashgen.operators.reduction import parameter
from flashgen.operators.reference import LEAST_OUT, LEAST_P, UNIT_ROUNDOFF, Verdict, batched, largest, softmax
from flashgen.operators.scoreparts import library_of, parts_of_scores, placement_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.gradients import ScoreGradients
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.reference import Softmax
    from flashgen.operators.score_gradient import ScoreGradientProblem

# Scores of a part: ten arrays of 4 MiB in float64.
_SCORES = 1 << 19


class Expected(NamedTuple):
    """The gradient and the largest errors that it may have, of the shape of its array, in float64."""

    value: Any
    bound: Any


def judge(
    problem: ScoreGradientProblem, arrays: Mapping[str, np.ndarray | None], sinks: np.ndarray | None = None
) -> Verdict:
    """Compare the gradient of a call with float64, on the host. ``arrays`` has arguments of the operator by
    name, as in `reference.judge`. ``out`` and ``lse`` are not read: they follow from the other inputs and
    ``sinks``.
    """
    dlse = arrays.get("dlse")
    array = None if problem.score is None else parameter(problem.score)
    right = score_gradient(
        *(batched(widened(arrays[name], problem.dtype), 4) for name in ("dout", "q", "k", "v")),
        problem.dtype,
        problem.softmax_scale,
        problem.extents,
        Band.of(problem),
        arrays.get("mask"),
        None if dlse is None else batched(dlse, 3).astype(np.float64),
        modification_of(problem, arrays),
        None if sinks is None else sinks.astype(np.float64),
        "fp32" if array is None else array.dtype,
    )
    result = widened(arrays["dscore"], "fp32" if array is None else array.dtype).reshape(right.value.shape)
    return Verdict(largest(result, *right), of="of the gradient ", axes="")


def score_gradient(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    dtype: str,
    scale: float,
    extents: tuple[int, ...],
    band: Band = Band(),  # noqa: B008 - immutable
    dense: Any = None,
    dlse: Any = None,
    modification: ScoreOfCall | None = None,
    sinks: Any = None,
    array_dtype: str = "fp32",
) -> Expected:
    """The gradient of the array that the modification is differentiated by, in float64, with the bound for a
    kernel of elements of ``dtype``. ``extents`` are the array's, 1 where it is broadcast; arguments are
    otherwise as in `gradients.gradients`.
    """
    xp, place = library_of(q), placement_of(q)
    total, bound, size, count = (xp.zeros(extents, dtype=xp.float64, **place).reshape(-1) for _ in range(4))
    for part in parts_of_scores(q, k, v, band, dense, None, modification, _SCORES):
        of_dout, of_q = part.rows_of(dout), part.rows_of(q)
        row = softmax(xp, of_q, part, scale, dtype, part.sinks_of(sinks))
        scores = score_gradients(xp, of_dout, of_q, part, row, part.numbers_of_rows(dlse), scale, dtype)
        wrong = _error(xp, of_dout, row, scores, dtype)
        ds, visible = scores.ds, scores.visible
        where = _elements(xp, part, extents, modification, ds, place)
        for sums, terms in ((total, ds), (bound, wrong), (size, xp.abs(ds)), (count, visible)):
            _add(xp, sums, where, terms)
    bound = bound + (2.0**-19 + 2.0**-24 * count**0.5) * size
    bound = xp.where(count == 0, 0.0, bound + 1.05 * UNIT_ROUNDOFF[array_dtype] * xp.abs(total) + 2.0**-126)
    if array_dtype == "fp16":
        bound = xp.where(count == 0, 0.0, bound + 2.0**-25)
    return Expected(total.reshape(extents), bound.reshape(extents))


def _error(xp: Any, dout: Any, row: Softmax, scores: ScoreGradients, dtype: str) -> Any:
    """How far a kernel may be from the gradient of each of some scores."""
    p = row.p
    wrong = 2.0**-21 * (scores.size_g + scores.size_d + abs(scores.dlse))
    wrong = wrong + 1.05 * UNIT_ROUNDOFF[dtype] * scores.size_r
    wrong = wrong + LEAST_P[dtype] * xp.sum(scores.visible * xp.abs(scores.products), axis=-1, keepdims=True)
    wrong = wrong + LEAST_OUT[dtype] * xp.sum(xp.abs(dout), axis=-1, keepdims=True)
    wrong = wrong + scores.forward_error
    wrong = xp.abs(scores.ds) * row.recomputed_error(xp) + p * xp.abs(scores.slope) * wrong
    wrong = wrong + scores.slope_error * p * xp.abs(scores.terms)
    return wrong + 2.0**-126 * (1.0 + xp.abs(scores.terms * scores.slope)) * scores.visible


def _elements(
    xp: Any,
    part: Any,
    extents: tuple[int, ...],
    modification: ScoreOfCall | None,
    ds: Any,
    place: dict[str, Any],
) -> Any:
    """For each score of a part the element of the flat array that it reads."""
    of_call = {
        "b": part.entry[:, None, None],
        "h": part.head[:, None, None],
        "q": xp.arange(part.rows.start, part.rows.start + ds.shape[1], **place)[:, None],
        "kv": xp.arange(ds.shape[2], **place),
    }
    indices = tuple(of_call.values()) if modification is None else modification.indices(part.at, xp)
    flat = xp.zeros(ds.shape, dtype=xp.int64, **place)
    for index, extent in zip(indices, extents, strict=True):
        flat = flat * extent + clamped(index, extent)
    return flat.reshape(-1)


def _add(xp: Any, sums: Any, where: Any, terms: Any) -> None:
    """Add each term to the sum of its element."""
    if xp.__name__ == "torch":
        sums.index_add_(0, where, terms.reshape(-1))
    else:
        sums += xp.bincount(where, terms.reshape(-1), sums.shape[0])
