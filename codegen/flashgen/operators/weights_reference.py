"""The attention weights in float64, and how far a kernel may be from them, element by element.

The bound. With s_ij the score of a visible key, p_ij its weight, and e_i, S_i and lse_i as in `reference`, a
kernel computes 2^(scale_log2 q k - lse log2(e)), with the LSE of the forward call:

    r_ij = 2 e_i + 2^-22 (S_i + 3 |lse_i|)
    |error of p_ij| <= min(1, p_ij (exp(r_ij) - 1)) + 2^-126

- e_i twice: the score of this pass, and the scores that the LSE sums.
- 2^-22 (S + |lse|): the bound of the LSE. 2^-21 |lse|: its rounding to log2 units, and the subtraction.
- exp(r) - 1: an error r of the exponent makes p wrong by this factor. A weight never exceeds 1, so the error
  is at most 1.
- 2^-126: what exp2 flushes to 0.
- A hidden key, and each key of a row that sees nothing: exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import widened
from flashgen.operators.reference import Verdict, batched, largest, softmax
from flashgen.operators.scoreparts import library_of, parts_of_scores, placement_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.weights import WeightsProblem

# Scores at once: 8 MiB in float64, of which there are several.
_SCORES = 1 << 20
_LARGEST_FACTOR = 700.0  # exp() of it is finite


class Expected(NamedTuple):
    """The weights and the largest errors that they may have: (batch, num_heads_q, rows, seqlen_kv), in
    float64.
    """

    weights: Any
    bound: Any


def judge(problem: WeightsProblem, arrays: Mapping[str, np.ndarray | None]) -> Verdict:
    """Compare the weights of a call with float64, on the host. ``arrays`` has arguments of the operator by
    name, as in `reference.judge`. ``lse`` is not read: it follows from the other inputs.
    """
    right = weights(
        *(batched(widened(arrays[name], problem.dtype), 4) for name in ("q", "k")),
        problem.dtype,
        problem.softmax_scale,
        Band.of(problem),
        arrays.get("mask"),
        modification_of(problem, arrays),
    )
    worst = largest(batched(arrays["weights"], 4), right.weights, right.bound)
    return Verdict(worst, of="of the weights ", axes="(batch, head, row, key) ")


def weights(
    q: Any,
    k: Any,
    dtype: str,
    scale: float,
    band: Band = Band(),  # noqa: B008 - immutable
    dense: Any = None,
    modification: ScoreOfCall | None = None,
) -> Expected:
    """softmax(q k^T scale) in float64, and the bound for a kernel of elements of ``dtype``. Arguments as in
    `reference.attention`.
    """
    xp, place = library_of(q), placement_of(q)
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    expected = Expected(*(xp.zeros(shape, dtype=xp.float64, **place) for _ in Expected._fields))
    for part in parts_of_scores(q, k, k, band, dense, None, modification, _SCORES):
        row = softmax(xp, part.rows_of(q), part, scale, dtype)
        factor = row.recomputed_error(xp)
        bound = row.p * (xp.exp(xp.where(factor < _LARGEST_FACTOR, factor, _LARGEST_FACTOR)) - 1.0)
        bound = xp.where(bound < 1.0, bound, 1.0) + 2.0**-126
        if row.hidden is not None:
            bound = xp.where(row.hidden, 0.0, bound)
        expected.weights[part.entry, part.head, part.rows] = row.p
        expected.bound[part.entry, part.head, part.rows] = bound
    return expected
