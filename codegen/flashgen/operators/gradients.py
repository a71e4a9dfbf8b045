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
from flashgen.operators.scoreparts import library_of, parts_of_scores
from flashgen.operators.visibility import visibility_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.backward import BackwardProblem
    from flashgen.operators.dropout import Dropout
    from flashgen.operators.modification import FormulaAt, ScoreOfCall
    from flashgen.operators.visibility import Visibility

# Scores at once: 8 MiB in float64, of which there are ten.
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
    xp = library_of(q)
    place = {"device": q.device} if xp.__name__ == "torch" else {}
    batch, count, heads, _ = q.shape
    seqlen_kv, group = k.shape[1], heads // k.shape[2]
    totals = {
        name: Gradient(*(xp.zeros(x.shape, dtype=xp.float64, **place) for _ in Gradient._fields))
        for name, x in (("dq", q), ("dk", k), ("dv", v))
    }
    if sinks is not None:
        totals["dsinks"] = Gradient(
            *(xp.zeros((heads,), dtype=xp.float64, **place) for _ in Gradient._fields)
        )
        if not seqlen_kv and dlse is not None:  # the LSE is the sink
            terms = xp.where(sinks[:, None] == -np.inf, 0.0, dlse)
            totals["dsinks"].value[...] = xp.sum(terms, axis=(0, 2))
            totals["dsinks"].bound[...] = 2.0**-18 * xp.sum(xp.abs(terms), axis=(0, 2))
    seen = xp.zeros((batch, seqlen_kv, k.shape[2], 1), dtype=xp.float64, **place)
    for part in parts_of_scores(q, k, v, band, dense, None, modification, _SCORES, rule, dropout):
        of_part = part.entry, part.rows, part.head
        dq, of_keys, seen_by, of_sinks = _chain_rule(
            xp,
            dout[of_part],
            q[of_part],
            part.k,
            part.v,
            0.0 if dlse is None else dlse[part.entry, part.head, part.rows][..., None],
            part.hidden,
            scale,
            dtype,
            group * count,
            part.at,
            None if sinks is None else sinks[part.head][:, None, None],
            1.0 if part.kept is None else part.kept,
        )
        for total, values in zip(totals["dq"], dq, strict=True):
            total[of_part] = values
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


def _chain_rule(
    xp: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    dlse: Any,
    hidden: Any,
    scale: float,
    dtype: str,
    rows_of_key: int,
    at: FormulaAt | None,
    sink: Any,
    kept: Any,
) -> tuple[Gradient, dict[str, Gradient], Any, Gradient | None]:
    """For some rows of some heads, (heads, rows, columns): dq; what they add to dk and dv, with bounds but
    for the rounding of the results; how many of them see each key; and what they add to dsinks, if there are
    sinks. ``kept`` is what dropout multiplies P by, 1 without it.
    """
    u = UNIT_ROUNDOFF[dtype]
    row = softmax(xp, q, k, hidden, scale, dtype, at, sink)
    p, lse = row.p, xp.where(row.sees_nothing, 0.0, row.lse)
    dlse = xp.where(row.sees_nothing, 0.0, dlse)  # of an LSE of -inf it has no effect, whatever it is
    visible = xp.ones_like(p) if row.hidden is None else xp.where(row.hidden, 0.0, xp.ones_like(p))
    counted = p * kept
    out = counted @ v
    products = dout @ v.swapaxes(1, 2) * kept
    size_d = xp.sum(xp.abs(out * dout), axis=-1, keepdims=True)
    size_r = size_d + xp.sum(p * xp.abs(products), axis=-1, keepdims=True)
    size_g = xp.abs(dout) @ xp.abs(v).swapaxes(1, 2) * kept
    delta = xp.sum(out * dout, axis=-1, keepdims=True) - dlse
    terms = products - delta
    slope, slope_error = xp.ones_like(p), 0.0
    if at is not None:
        with np.errstate(all="ignore"):
            raw = q @ k.swapaxes(1, 2) * scale
            raw_error = 2.0**-21 * (xp.abs(q) @ xp.abs(k).swapaxes(1, 2) * scale)
            slope, slope_error = at.derived().value_with_error(xp, raw, raw_error, dtype)
            # A number stands for all; where a key is hidden the derivative may be anything.
            slope, slope_error = (xp.where(visible != 0, x + 0.0 * p, 0.0) for x in (slope, slope_error))
    ds = p * terms * slope
    weight = p * xp.abs(slope)

    factor = 2 * row.error + 2.0**-22 * (row.size + 3 * xp.abs(lse))
    wrong = 2.0**-21 * (size_g + size_d + abs(dlse))
    wrong = wrong + row.error * xp.sum(p * size_g, axis=-1, keepdims=True)
    wrong_ds = xp.abs(ds) * factor + weight * wrong + slope_error * p * xp.abs(terms)
    wrong_ds = wrong_ds + 1.05 * u * (xp.abs(ds) + weight * size_r)
    wrong_ds = wrong_ds + (LEAST_OUT[dtype] + 2.0**-126 * xp.abs(terms * slope)) * visible
    sum_of_keys = 2.0**-19 + 2.0**-24 * k.shape[1] ** 0.5
    sum_of_rows = 2.0**-19 + 2.0**-24 * rows_of_key**0.5
    wrong_p = counted * (1.05 * u + factor + sum_of_rows) + LEAST_OUT[dtype] * visible * kept

    of_sinks = None
    if sink is not None:
        weight_of_sink = xp.where(row.sees_nothing, 0.0, xp.exp(sink - lse))
        wrong_delta = 1.05 * u * size_r + 2.0**-21 * (size_d + abs(dlse))
        wrong_delta = wrong_delta + row.error * xp.sum(p * size_g, axis=-1, keepdims=True)
        wrong_delta = wrong_delta + LEAST_OUT[dtype] * xp.sum(xp.abs(dout), axis=-1, keepdims=True)
        wrong_delta = wrong_delta + xp.abs(delta) * (factor + sum_of_rows)
        of_sinks = Gradient(
            -xp.sum(weight_of_sink * delta, axis=(1, 2)),
            xp.sum(weight_of_sink * wrong_delta + 2.0**-126 * xp.abs(delta), axis=(1, 2)),
        )

    def of_keys(x: Any, y: Any) -> Any:
        return x.swapaxes(1, 2) @ y

    dq = scale * (ds @ k)
    dq_bound = scale * ((wrong_ds + sum_of_keys * xp.abs(ds)) @ xp.abs(k)) + 1.05 * u * xp.abs(dq)
    dq_bound = xp.where(row.sees_nothing, 0.0, dq_bound + LEAST_OUT[dtype])
    dk_bound = scale * of_keys(wrong_ds + sum_of_rows * xp.abs(ds), xp.abs(q))
    added = {
        "dk": Gradient(scale * of_keys(ds, q), dk_bound),
        "dv": Gradient(of_keys(counted, dout), of_keys(wrong_p, xp.abs(dout))),
    }
    return Gradient(dq, dq_bound), added, xp.sum(visible, axis=1)[..., None], of_sinks


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
