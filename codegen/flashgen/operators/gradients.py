"""What the gradients of attention must be, in float64, and how far a kernel may be from them, element by
element.

Arrays may be of NumPy, CuPy or PyTorch, on any device, as in `reference`.

The bound. With the names of `backward` and of `reference`, D_i = sum_c |o_ic do_ic|, R_i = D_i +
sum_j p_ij |do_i v_j|, G_ij = sum_c |do_ic v_jc|, u the unit roundoff of the dtype, and
ds_ij = p_ij (do_i v_j - delta_i) f'_ij, where f' is the derivative of a score modification, 1 without one:

    w_i = exp(sink - lse_i)
    r_i = 2 e_i + 2^-22 (S_i + 3 |lse_i|)
    x_ij = |ds_ij| r_i + |f'_ij| p_ij (2^-21 (G_ij + D_i + |dlse_i|) + e_i sum_j p_ij G_ij)
           + |error of f'_ij| p_ij |do_i v_j - delta_i|
    |error of dv_j| <= 1.05 u (sum_i p_ij |do_i| + |dv_j|) + sum_i (p_ij (r_i + w) + least) |do_i| + least_out
    |error of dsink| <= sum_i w_i (|delta_i| (r_i + w) + 1.05 u R_i + 2^-21 (D_i + |dlse_i|)
                        + e_i sum_j p_ij G_ij + least sum_c |do_ic|)
    |error of dq_i| <= 1.05 u (scale sum_j (|ds_ij| + |f'_ij| p_ij R_i) |k_j| + |dq_i|)
                       + scale sum_j (x_ij + |ds_ij| w + least + 2^-126 |f'_ij t_ij|) |k_j| + least_out
    dk_j as dq_i, with sums over i and |q_i|

- u p, u |ds|: both are rounded to the dtype for the products with do, k and q. u |dv|, ...: so is the result.
- u p R: delta is made from the result of the forward call. The result was rounded, and so was each P of it:
  the two sums of R.
- 1.05: products of two errors, and sums by tensor cores, as in `reference`.
- r: p = exp(s - lse) is wrong by the errors of s, of the lse of the forward call, and of that of exp. 2^-21
  |lse|: kernels add this much to lse, so that its rounding never makes p too large.
- 2^-21 (G + D + |dlse|): the sums over head_dim and their difference, in fp32. e sum p G: the error of the
  forward result in fp32.
- dsink = -sum_i w_i delta_i, over the rows of all sequences. Its delta is wrong as in ds.
- With dropout let z_ij be 1 / (1 - dropout_p) where a score counts, else 0. dv and o are sums over p_ij z_ij,
  ds_ij is p_ij (z_ij do_i v_j - delta_i), and G_ij has the factor z_ij. delta needs none, as a sum over o.
- w = 2^-19 + 2^-24 sqrt(m): sums of m terms in fp32, as in `reference`.
- least: what p and ds lose below the least step of their dtype, for each pair that a mask does not hide:
  2^-25 in fp16, since both are packed as they are, and what is flushed to 0 in the others. least_out:
  likewise for the result. 2^-126 |f' t|, with t = do_i v_j - delta_i: p is flushed to 0 before it becomes
  ds = p f' t.

Where the elements are fp32, products of three TF32 ones leave out at most 2.5 * 2^-21 of each term. There the
bound is 1e-5 of the largest element of the gradient, or the terms above, if they are more: where a row sees
one key ds is 0, and fp32 leaves 2^-21 of G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators.dropout import dropout_of
from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import widened
from flashgen.operators.reference import (
    LEAST_OUT,
    UNIT_ROUNDOFF,
    Largest,
    batched,
    dense_mask,
    largest,
    sinks_of,
    softmax,
)
from flashgen.operators.scoreparts import library_of, parts_of_scores, placement_of
from flashgen.operators.visibility import visibility_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.backward import BackwardProblem
    from flashgen.operators.dropout import Dropout
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.reference import Softmax
    from flashgen.operators.scoreparts import PartOfScores
    from flashgen.operators.visibility import Visibility

# Scores of a part: ten arrays of 8 MiB in float64.
_SCORES = 1 << 20
_OF_LARGEST = 1e-5  # in fp32


class Gradient(NamedTuple):
    """A gradient and the largest errors that it may have: float64, of the shape of its array. Where nothing
    is seen both are 0.
    """

    value: Any
    bound: Any


@dataclass(frozen=True, slots=True)
class GradientVerdict:
    """The worst element of each gradient by name, at (batch, row, head, column)."""

    gradients: Mapping[str, Largest]

    @property
    def out(self) -> Largest:
        """The worst of all."""
        return max(self.gradients.values(), key=lambda gradient: gradient.share)

    @property
    def lse(self) -> None:
        """No result of this operator; see `reference.Verdict`."""
        return

    @property
    def ok(self) -> bool:
        return self.out.share <= 1

    def __str__(self) -> str:
        return "; ".join(
            f"error of {name} {worst.describe()}, at (batch, row, head, column) {worst.index}"
            for name, worst in self.gradients.items()
        )


def judge(problem: BackwardProblem, arrays: Mapping[str, np.ndarray | None]) -> GradientVerdict:
    """Compare the results of a call with float64, on the host.

    ``arrays`` has arguments of the operator by name, as in `reference.judge`. ``out`` and ``lse`` are not
    read: the gradients follow from the inputs of the forward call.
    """
    right = expected(problem, arrays)
    results = {name: widened(arrays[name], _dtype_of(problem, name)) for name in right}
    return GradientVerdict(
        {name: largest(results[name].reshape(x.value.shape), *x) for name, x in right.items()}
    )


def _dtype_of(problem: BackwardProblem, name: str) -> str:
    return problem.dtype_of(problem.operator.arguments[problem.operator.position(name)])


def expected(problem: BackwardProblem, arrays: Mapping[str, np.ndarray | None]) -> dict[str, Gradient]:
    """The gradients of a call on the host, by name; ``arrays`` as in `judge`."""
    dlse = arrays.get("dlse")
    return gradients(
        *(batched(widened(arrays[name], problem.dtype), 4) for name in ("dout", "q", "k", "v")),
        problem.dtype,
        problem.softmax_scale,
        Band.of(problem),
        dense_mask(problem, arrays),
        None if dlse is None else batched(dlse, 3).astype(np.float64),
        modification_of(problem, arrays),
        sinks_of(problem, arrays),
        visibility_of(problem, arrays),
        dropout_of(problem, arrays),
        _dtype_of(problem, "dk"),
    )


def gradients(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    dtype: str,
    scale: float,
    band: Band = Band(),  # noqa: B008 - immutable
    dense: Any = None,
    dlse: Any = None,
    modification: ScoreOfCall | None = None,
    sinks: Any = None,
    rule: Visibility | None = None,
    dropout: Dropout | None = None,
    dkv_dtype: str | None = None,
) -> dict[str, Gradient]:
    """The gradients of softmax(q k^T scale) v in float64 by name, each with the bound for a kernel of
    elements of ``dtype``; of dk and dv in ``dkv_dtype``, if it is another.

    dout is (batch, seqlen_q, num_heads_q, head_dim_v), dlse (batch, num_heads_q, seqlen_q), all others are as
    in `reference.attention`; float64, elements as the kernel got them.
    """
    xp, place = library_of(q), placement_of(q)
    batch, count, heads, _ = q.shape
    seqlen_kv, group = k.shape[1], heads // k.shape[2]

    def zeros(*shape: int) -> Gradient:
        return Gradient(*(xp.zeros(shape, dtype=xp.float64, **place) for _ in Gradient._fields))

    totals = {name: zeros(*x.shape) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if sinks is not None:
        totals["dsinks"] = zeros(heads)
        if not seqlen_kv and dlse is not None:  # the LSE is the sink
            terms = xp.where(sinks[:, None] == -np.inf, 0.0, dlse)
            totals["dsinks"].value[...] = xp.sum(terms, axis=(0, 2))
            totals["dsinks"].bound[...] = 2.0**-18 * xp.sum(xp.abs(terms), axis=(0, 2))
    seen = xp.zeros((batch, seqlen_kv, k.shape[2], 1), dtype=xp.float64, **place)
    sum_of_rows = 2.0**-19 + 2.0**-24 * (group * count) ** 0.5
    for part in parts_of_scores(q, k, v, band, dense, None, modification, _SCORES, rule, dropout):
        of_dout, of_q, sink = part.rows_of(dout), part.rows_of(q), part.sinks_of(sinks)
        row = softmax(xp, of_q, part, scale, dtype, sink)
        scores = score_gradients(xp, of_dout, of_q, part, row, part.numbers_of_rows(dlse), scale, dtype)
        dq, of_keys = _chain_rule(xp, of_dout, of_q, part, row, scores, scale, dtype, sum_of_rows)
        for total, values in zip(totals["dq"], dq, strict=True):
            total[part.entry, part.rows, part.head] = values
        of_sinks = None
        if sinks is not None:
            of_sinks = _of_sinks(xp, of_dout, row, sink, scores, dtype, sum_of_rows)
        seen_by = xp.sum(scores.visible, axis=1)[..., None]
        # Heads of a group add to one kv head, which an assignment by arrays of indices would do once.
        for i, (entry, head) in enumerate(zip(part.entry.tolist(), part.head.tolist(), strict=True)):
            one = entry, slice(None), head // group
            if of_sinks is not None:
                for total, values in zip(totals["dsinks"], of_sinks, strict=True):
                    total[head] += values[i]
            for name, gradient in of_keys.items():
                for total, values in zip(totals[name], gradient, strict=True):
                    total[one] += values[i]
            seen[one] += seen_by[i]
    return _finished(xp, totals, seen, dtype, dkv_dtype or dtype)


class ScoreGradients(NamedTuple):
    """The gradient of a part of the scores, ``ds`` (heads, rows, keys), and what its bound is made of, by the
    names at the top: ``terms`` are t, ``size_g`` G, and the ``slope`` f' has an error.

    ``visible`` is 1 where a row sees a key, else 0. ``products`` are do v, with dropout times its factor.
    ``delta``, ``dlse``, ``size_d`` (D) and ``size_r`` (R) are (heads, rows, 1); ``forward_error`` is what the
    errors of the forward result in fp32 do to delta, e sum p G.
    """

    ds: Any
    terms: Any
    slope: Any
    slope_error: Any
    visible: Any
    products: Any
    delta: Any
    dlse: Any
    size_d: Any
    size_r: Any
    size_g: Any
    forward_error: Any


def score_gradients(
    xp: Any, dout: Any, q: Any, part: PartOfScores, row: Softmax, dlse: Any, scale: float, dtype: str
) -> ScoreGradients:
    """The gradient of a part of the scores; ``row`` is their softmax. dout and q are (heads, rows, width),
    dlse is (heads, rows, 1), or 0.
    """
    p = row.p
    kept = 1.0 if part.kept is None else part.kept
    # An LSE of -inf has no effect, so its gradient may be anything.
    dlse = xp.where(row.sees_nothing, 0.0, dlse)
    visible = row.visible(xp)
    out = (p * kept) @ part.v
    products = dout @ part.v.swapaxes(1, 2) * kept
    size_d = xp.sum(xp.abs(out * dout), axis=-1, keepdims=True)
    size_g = xp.abs(dout) @ xp.abs(part.v).swapaxes(1, 2) * kept
    delta = xp.sum(out * dout, axis=-1, keepdims=True) - dlse
    terms = products - delta
    slope, slope_error = xp.ones_like(p), 0.0
    if part.at is not None:
        with np.errstate(all="ignore"):
            raw = q @ part.k.swapaxes(1, 2) * scale
            raw_error = 2.0**-21 * (xp.abs(q) @ xp.abs(part.k).swapaxes(1, 2) * scale)
            slope, slope_error = part.at.derived().value_with_error(xp, raw, raw_error, dtype)
            # The derivative may be one number for all scores; at hidden keys it may be anything.
            slope, slope_error = (xp.where(visible != 0, x + 0.0 * p, 0.0) for x in (slope, slope_error))
    return ScoreGradients(
        ds=p * terms * slope,
        terms=terms,
        slope=slope,
        slope_error=slope_error,
        visible=visible,
        products=products,
        delta=delta,
        dlse=dlse,
        size_d=size_d,
        size_r=size_d + xp.sum(p * xp.abs(products), axis=-1, keepdims=True),
        size_g=size_g,
        forward_error=row.error * xp.sum(p * size_g, axis=-1, keepdims=True),
    )


def _chain_rule(
    xp: Any,
    dout: Any,
    q: Any,
    part: PartOfScores,
    row: Softmax,
    scores: ScoreGradients,
    scale: float,
    dtype: str,
    sum_of_rows: float,
) -> tuple[Gradient, dict[str, Gradient]]:
    """dq of some rows of some heads, (heads, rows, columns), and what these add to dk and dv, with bounds
    except for the rounding of dk and dv. ``sum_of_rows`` is the error of a sum over all rows of a key.
    """
    u, p, ds, visible = UNIT_ROUNDOFF[dtype], row.p, scores.ds, scores.visible
    kept = 1.0 if part.kept is None else part.kept
    counted = p * kept
    factor, weight = row.recomputed_error(xp), p * xp.abs(scores.slope)
    wrong = 2.0**-21 * (scores.size_g + scores.size_d + abs(scores.dlse))
    wrong = wrong + scores.forward_error
    wrong_ds = xp.abs(ds) * factor + weight * wrong + scores.slope_error * p * xp.abs(scores.terms)
    wrong_ds = wrong_ds + 1.05 * u * (xp.abs(ds) + weight * scores.size_r)
    wrong_ds = wrong_ds + (LEAST_OUT[dtype] + 2.0**-126 * xp.abs(scores.terms * scores.slope)) * visible
    sum_of_keys = 2.0**-19 + 2.0**-24 * part.k.shape[1] ** 0.5
    wrong_p = counted * (1.05 * u + factor + sum_of_rows) + LEAST_OUT[dtype] * visible * kept

    def of_keys(x: Any, y: Any) -> Any:
        return x.swapaxes(1, 2) @ y

    dq = scale * (ds @ part.k)
    dq_bound = scale * ((wrong_ds + sum_of_keys * xp.abs(ds)) @ xp.abs(part.k)) + 1.05 * u * xp.abs(dq)
    dq_bound = xp.where(row.sees_nothing, 0.0, dq_bound + LEAST_OUT[dtype])
    dk_bound = scale * of_keys(wrong_ds + sum_of_rows * xp.abs(ds), xp.abs(q))
    return Gradient(dq, dq_bound), {
        "dk": Gradient(scale * of_keys(ds, q), dk_bound),
        "dv": Gradient(of_keys(counted, dout), of_keys(wrong_p, xp.abs(dout))),
    }


def _of_sinks(
    xp: Any, dout: Any, row: Softmax, sink: Any, scores: ScoreGradients, dtype: str, sum_of_rows: float
) -> Gradient:
    """What some rows of some heads add to dsinks, (heads,); arguments as of `_chain_rule`."""
    weight = xp.where(row.sees_nothing, 0.0, xp.exp(sink - row.finite_lse(xp)))
    wrong = 1.05 * UNIT_ROUNDOFF[dtype] * scores.size_r + 2.0**-21 * (scores.size_d + abs(scores.dlse))
    wrong = wrong + scores.forward_error
    wrong = wrong + LEAST_OUT[dtype] * xp.sum(xp.abs(dout), axis=-1, keepdims=True)
    wrong = wrong + xp.abs(scores.delta) * (row.recomputed_error(xp) + sum_of_rows)
    return Gradient(
        -xp.sum(weight * scores.delta, axis=(1, 2)),
        xp.sum(weight * wrong + 2.0**-126 * xp.abs(scores.delta), axis=(1, 2)),
    )


def _finished(
    xp: Any, totals: dict[str, Gradient], seen: Any, dtype: str, dkv_dtype: str
) -> dict[str, Gradient]:
    """The gradients with bounds that include the rounding of dk and dv; fp32 has a least bound, too."""
    rounded = 1.05 * UNIT_ROUNDOFF[dkv_dtype]
    for name in ("dk", "dv"):
        x, bound = totals[name]
        bound = xp.where(seen == 0, 0.0, bound + rounded * xp.abs(x) + LEAST_OUT[dkv_dtype])
        totals[name] = Gradient(x, bound)
    if dtype != "fp32":
        return totals

    def at_least(x: Any, bound: Any) -> Any:
        if 0 in x.shape:
            return bound
        least = _OF_LARGEST * float(xp.amax(xp.abs(x)))
        return xp.where((bound > 0) & (bound < least), least, bound)

    return {name: Gradient(x, at_least(x, bound)) for name, (x, bound) in totals.items()}
