"""What the gradients of attention must be, in float64, and how far a kernel may be from them, element by
element.

Arrays may be of NumPy, CuPy or PyTorch, on any device, as in `reference`.

The bound. With the names of `backward` and of `reference`, D_i = sum_c |o_ic do_ic|, G_ij = sum_c |do_ic
v_jc|, u the unit roundoff of the dtype, and ds_ij = p_ij (do_i v_j - delta_i) f'_ij, where f' is the
derivative of a score modification, 1 without one:

    r_i = 2 e_i + 2^-22 (S_i + 3 |lse_i|)
    x_ij = |ds_ij| r_i + |f'_ij| p_ij (2^-21 (G_ij + D_i + |dlse_i|) + e_i sum_j p_ij G_ij)
           + |error of f'_ij| p_ij |do_i v_j - delta_i|
    |error of dv_j| <= 1.05 u (sum_i p_ij |do_i| + |dv_j|) + sum_i (p_ij (r_i + w) + least) |do_i| + least_out
    |error of dq_i| <= 1.05 u (scale sum_j (|ds_ij| + |f'_ij| p_ij D_i) |k_j| + |dq_i|)
                       + scale sum_j (x_ij + |ds_ij| w + least + 2^-126 |f'_ij t_ij|) |k_j| + least_out
    dk_j as dq_i, with sums over i and |q_i|

- u p, u |ds|: both are rounded to the dtype for the products with do, k and q. u |dv|, ...: so is the result.
- u p D: delta is made from the result of the forward call, which was rounded. An error of P there moves delta
  by p_ij (do_i v_j), which does not exceed sum_j |ds_ij| + |delta_i|.
- 1.05: products of two errors, and sums by tensor cores, as in `reference`.
- r: p = exp(s - lse) is wrong by the errors of s, of the lse of the forward call, and of that of exp. 2^-21
  |lse|: kernels add this much to lse, so that its rounding never makes p too large.
- 2^-21 (G + D + |dlse|): the sums over head_dim and their difference, in fp32. e sum p G: the error of the
  forward result in fp32.
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

from flashgen.operators.masks import Band
from flashgen.operators.numbers import widened
from flashgen.operators.reference import (
    LEAST_OUT,
    UNIT_ROUNDOFF,
    Largest,
    batched,
    largest,
    library_of,
    modification_of,
    parts_of_scores,
    softmax,
)

if TYPE_CHECKING:
    from flashgen.operators.backward import BackwardProblem
    from flashgen.operators.scores import FormulaAt, ScoreOfCall

# Scores at once: 8 MiB in float64, of which there are ten.
_SCORES = 1 << 20
_OF_LARGEST = 1e-5  # in fp32


class Gradients(NamedTuple):
    """The gradients, and the largest errors that they may have: float64, of the shapes of q, k and v. Where
    nothing is seen both are 0.
    """

    dq: Any
    dk: Any
    dv: Any
    dq_bound: Any
    dk_bound: Any
    dv_bound: Any


@dataclass(frozen=True, slots=True)
class GradientVerdict:
    """The worst elements of dq, dk and dv, each at (batch, row, head, column)."""

    dq: Largest
    dk: Largest
    dv: Largest

    @property
    def out(self) -> Largest:
        """The worst of all."""
        return max((self.dq, self.dk, self.dv), key=lambda gradient: gradient.share)

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
            for name, worst in (("dq", self.dq), ("dk", self.dk), ("dv", self.dv))
        )


def judge(
    problem: BackwardProblem,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    *score_arrays: np.ndarray,
) -> GradientVerdict:
    """Compare the results of a call with float64, on the host.

    Arrays have the shapes of the contract, in its order; bfloat16 elements may be of ml_dtypes, their bits in
    uint16, or numbers. ``out`` and ``lse`` are not read: the gradients follow from q, k and v.
    """
    dout, q, k, v, dq, dk, dv = (batched(widened(x, problem.dtype), 4) for x in (dout, q, k, v, dq, dk, dv))
    right = gradients(
        dout,
        q,
        k,
        v,
        problem.dtype,
        problem.softmax_scale,
        Band.of(problem),
        mask,
        None if dlse is None else batched(dlse, 3).astype(np.float64),
        modification_of(problem, score_arrays),
    )
    return GradientVerdict(
        largest(dq, right.dq, right.dq_bound),
        largest(dk, right.dk, right.dk_bound),
        largest(dv, right.dv, right.dv_bound),
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
) -> Gradients:
    """The gradients of softmax(q k^T scale) v in float64, and the bound for a kernel of elements of
    ``dtype``.

    dout is (batch, seqlen_q, num_heads_q, head_dim_v), dlse (batch, num_heads_q, seqlen_q), all others are as
    in `reference.attention`; float64, elements as the kernel got them.
    """
    xp = library_of(q)
    place = {"device": q.device} if xp.__name__ == "torch" else {}
    batch, count, heads, _ = q.shape
    seqlen_kv, group = k.shape[1], heads // k.shape[2]
    gradients = Gradients(*(xp.zeros(x.shape, dtype=xp.float64, **place) for x in (q, k, v, q, k, v)))
    seen = xp.zeros((batch, seqlen_kv, k.shape[2], 1), dtype=xp.float64, **place)
    for part in parts_of_scores(q, k, v, band, dense, None, modification, _SCORES):
        of_part = part.entry, part.rows, part.head
        of_rows, of_keys, seen_by = _chain_rule(
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
        )
        gradients.dq[of_part], gradients.dq_bound[of_part] = of_rows
        # Heads of a group add to one kv head, which an assignment by arrays of indices would do once.
        for i, (entry, head) in enumerate(zip(part.entry.tolist(), part.head.tolist(), strict=True)):
            one = entry, slice(None), head // group
            for name, values in of_keys.items():
                getattr(gradients, name)[one] += values[i]
            seen[one] += seen_by[i]
    return _finished(xp, gradients, seen, dtype)


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
) -> tuple[tuple[Any, Any], dict[str, Any], Any]:
    """For some rows of some heads, (heads, rows, columns): dq and its bound; what they add to dk, dv and
    their bounds, but for the rounding of the results; and how many of them see each key.
    """
    u = UNIT_ROUNDOFF[dtype]
    row = softmax(xp, q, k, hidden, scale, dtype, at)
    p, lse = row.p, xp.where(row.sees_nothing, 0.0, row.lse)
    dlse = xp.where(row.sees_nothing, 0.0, dlse)  # of an LSE of -inf it has no effect, whatever it is
    visible = xp.ones_like(p) if row.hidden is None else xp.where(row.hidden, 0.0, xp.ones_like(p))
    out = p @ v
    size_d = xp.sum(xp.abs(out * dout), axis=-1, keepdims=True)
    size_g = xp.abs(dout) @ xp.abs(v).swapaxes(1, 2)
    terms = dout @ v.swapaxes(1, 2) - (xp.sum(out * dout, axis=-1, keepdims=True) - dlse)
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
    wrong_ds = wrong_ds + 1.05 * u * (xp.abs(ds) + weight * size_d)
    wrong_ds = wrong_ds + (LEAST_OUT[dtype] + 2.0**-126 * xp.abs(terms * slope)) * visible
    sum_of_keys = 2.0**-19 + 2.0**-24 * k.shape[1] ** 0.5
    sum_of_rows = 2.0**-19 + 2.0**-24 * rows_of_key**0.5
    wrong_p = p * (1.05 * u + factor + sum_of_rows) + LEAST_OUT[dtype] * visible

    def of_keys(x: Any, y: Any) -> Any:
        return x.swapaxes(1, 2) @ y

    dq = scale * (ds @ k)
    dq_bound = scale * ((wrong_ds + sum_of_keys * xp.abs(ds)) @ xp.abs(k)) + 1.05 * u * xp.abs(dq)
    dq_bound = xp.where(row.sees_nothing, 0.0, dq_bound + LEAST_OUT[dtype])
    added = {
        "dk": scale * of_keys(ds, q),
        "dv": of_keys(p, dout),
        "dk_bound": scale * of_keys(wrong_ds + sum_of_rows * xp.abs(ds), xp.abs(q)),
        "dv_bound": of_keys(wrong_p, xp.abs(dout)),
    }
    return (dq, dq_bound), added, xp.sum(visible, axis=1)[..., None]


def _finished(xp: Any, gradients: Gradients, seen: Any, dtype: str) -> Gradients:
    """The gradients with bounds that include the rounding of dk and dv; fp32 has a least bound, too."""
    rounded = 1.05 * UNIT_ROUNDOFF[dtype]
    dk_bound, dv_bound = (
        xp.where(seen == 0, 0.0, bound + rounded * xp.abs(x) + LEAST_OUT[dtype])
        for x, bound in ((gradients.dk, gradients.dk_bound), (gradients.dv, gradients.dv_bound))
    )
    gradients = gradients._replace(dk_bound=dk_bound, dv_bound=dv_bound)
    if dtype != "fp32":
        return gradients

    def at_least(x: Any, bound: Any) -> Any:
        if 0 in x.shape:
            return bound
        least = _OF_LARGEST * float(xp.amax(xp.abs(x)))
        return xp.where((bound > 0) & (bound < least), least, bound)

    return gradients._replace(
        dq_bound=at_least(gradients.dq, gradients.dq_bound),
        dk_bound=at_least(gradients.dk, gradients.dk_bound),
        dv_bound=at_least(gradients.dv, gradients.dv_bound),
    )
