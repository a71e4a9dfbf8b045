"""What attention must give, in float64, and how far a kernel may be from it, element by element.

Arrays may be of NumPy, CuPy or PyTorch, on any device: what is called here has one name in all of them.

The bound. Of one row let s_j be the scores (scaled, natural units) of the n keys that it sees, p_j their
softmax, o = sum_j p_j v_j a result, A = sum_j p_j |v_j|, and S = softmax_scale max_j sum_i |q_i k_ji|. With u
the unit roundoff of the dtype,

    e = 2^-21 S + 2^-19 + 2^-24 sqrt(n)
    |error of out| <= 1.05 u (A + |o|) + A e + least_p sum_j |v_j| + least_out
    |error of lse| <= e + 2^-22 (S + |lse|)

- u A: each P is rounded to the dtype for P V; their sum is taken before. u |o|: the result is rounded.
- 1.05: products of two errors, and P V summed by tensor cores, which truncate every 16 keys and so lose up to
  2^-27 A a key. With more than a few thousand keys P's own errors average out and leave u A to that loss:
  enough for 2^16 keys whose values all have one sign, in fp16.
- e: an error d of s_j makes p_j wrong by the factor exp(d), so natural units are those that count; in log2
  units, which kernels use, scores and their errors are both 1.44 times as large.
- 2^-21 S: the sum over head_dim in fp32, softmax_scale log2(e) in fp32, and the subtraction of row_max. All
  are relative to the terms of q k and not to s_j, of which cancellation may leave nothing; |s_j| <= S.
- 2^-19: ex2.approx (2^-22), factors of rescaling, the reciprocal of row_sum, and P V within a block of keys.
- 2^-24 sqrt(n): row_sum, and P V over the blocks, rounded to nearest in fp32 up to n times. Errors of random
  sign add up to 0.24 * 2^-24 sqrt(n) in the root mean square if one lane takes all keys; kernels use four.
- least_p: P loses what lies below the least step of its dtype. In fp16, which has subnormals, that is half of
  2^-24 of a P that kernels bias by 2^7, so 2^-32; in the others what ex2.approx.ftz flushes to 0, 2^-126.
- least_out: likewise for the result, which has no bias: 2^-25 in fp16.
- 2^-22 (S + |lse|): lg2.approx of row_sum, the logarithm of which is at most S + |lse|, and the change to
  base e.

A sink counts as a key without a value: S and e have its size, too. A row that sees no key has the sink as its
LSE.

With dropout let z_j be 1 / (1 - dropout_p) where a score counts, else 0. o and A are sums of p_j z_j v_j; p_j
is still the softmax over all keys. least_p becomes least_p z_j.

A score modification f takes the place of s_j, S is the largest |f|, and the first two terms of e are those
of its running error (`roundoff`), which begins with 2^-21 of the scaled sum of |q_i k_ji|.

k and v of e4m3 codes are codes times scales. A kernel takes q k and P V of the codes, which have no error of
their own, and multiplies both by scales: 2^-24 S more in e, and 2^-24 A more of out. Neither is more if the
scales are powers of two, but both bounds have them. If each token has scales, a kernel multiplies v by them
before P V and rounds the products to the dtype: 1.05 u A + least_out more of out.

fp32 has no u A: its P V, and Q K^T, are three products of TF32 that leave out at most 2.5 * 2^-21 of each
term. For P V that is within 2^-19. For Q K^T it is more than 2^-21 S only if nearly all terms agree in the
sign of their errors, which are independent: as a rule they come to 2^-21 S / sqrt(head_dim).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators.blocklists import hidden_by_lists
from flashgen.operators.dropout import dropout_of
from flashgen.operators.kvcodes import TOKEN
from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import Decoded, widened
from flashgen.operators.scoreparts import library_of, parts_of_scores, placement_of
from flashgen.operators.trees import hidden_by_tree
from flashgen.operators.visibility import visibility_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.dropout import Dropout
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.scoreparts import PartOfScores
    from flashgen.operators.visibility import Visibility

UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
# Exponent of the largest error of a P that fp16 holds as a subnormal: kernels bias P by 2^7.
FP16_P_EXPONENT = -32
LEAST_OUT = {"fp16": 2.0**-25, "bf16": 2.0**-126, "fp32": 2.0**-126}
LEAST_P = LEAST_OUT | {"fp16": 2.0**FP16_P_EXPONENT}

# Scores at once: 32 MiB in float64.
_SCORES = 1 << 22


class Expected(NamedTuple):
    """Results, and the largest errors that they may have, in float64. The errors of a row that sees nothing
    and has no sink are 0.

    ``out`` and ``out_bound`` have the shape (batch, rows, num_heads_q, head_dim_v), ``lse`` and ``lse_bound``
    (batch, num_heads_q, rows). A row that sees nothing has out 0, and lse -inf or its sink.
    """

    out: Any
    lse: Any
    out_bound: Any
    lse_bound: Any


class Largest(NamedTuple):
    """The element whose error is the largest share of its bound: that share, infinite for NaN or a wrong
    infinity; the error, the bound, and the element's index."""

    share: float
    error: float
    bound: float
    index: tuple[int, ...]

    def as_dict(self) -> dict[str, float | None]:
        """Share, error and bound, for JSON: None for what is infinite."""
        numbers = {"share": self.share, "error": self.error, "bound": self.bound}
        return {name: number if math.isfinite(number) else None for name, number in numbers.items()}

    def describe(self) -> str:
        """The error in a few words, without the place."""
        if math.isinf(self.error):
            return "NaN or infinite"
        if math.isinf(self.share):
            return f"{self.error:.1e} where the result is exact"
        return f"{self.error:.1e}, {self.share:.3g} of its bound"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst elements of ``out``, at (batch, row, head, column), and of the log-sum-exp, at (batch, head,
    row); None if it was not compared. For other results than ``out`` a message names them by ``of`` and
    their dimensions by ``axes``.
    """

    out: Largest
    lse: Largest | None = None
    of: str = ""
    axes: str = "(batch, row, head, column) "

    @property
    def ok(self) -> bool:
        return self.out.share <= 1 and (self.lse is None or self.lse.share <= 1)

    def __str__(self) -> str:
        text = f"error {self.of}{self.out.describe()}, at {self.axes}{self.out.index}"
        if self.lse is not None:
            text += f"; error of the LSE {self.lse.describe()}, at (batch, head, row) {self.lse.index}"
        return text


def judge(
    problem: AttentionProblem, arrays: Mapping[str, np.ndarray | None], rule: Visibility | None = None
) -> Verdict:
    """Compare the results of a call with float64, on the host.

    ``arrays`` has arguments of the operator by name, in the shapes of the contract; one that is absent may be
    left out or None. bfloat16 elements may be of ml_dtypes, their bits in uint16, or numbers. ``rule`` is the
    mask by a line of one sequence of a call; of a whole call the arrays say it.
    """
    q, k, v, out = (batched(numbers_of(problem, arrays, name), 4) for name in ("q", "k", "v", "out"))
    mask, lse = dense_mask(problem, arrays), arrays.get("lse")
    expected = attention(
        *(q, k, v, problem.dtype, problem.softmax_scale, Band.of(problem), mask),
        modification=modification_of(problem, arrays),
        sinks=sinks_of(problem, arrays),
        rule=visibility_of(problem, arrays) if rule is None else rule,
        dropout=dropout_of(problem, arrays),
        scaled=problem.kv_dtype is not None,
        rounds_v=problem.kv_scales == TOKEN,
    )
    of_lse = None if lse is None else largest(batched(lse, 3), expected.lse, expected.lse_bound)
    return Verdict(largest(out, expected.out, expected.out_bound), of_lse)


def numbers_of(problem: AttentionProblem, arrays: Mapping[str, np.ndarray | None], name: str) -> np.ndarray:
    """The numbers in float64 that an array of a call holds; of e4m3 codes each times its scale."""
    if name in ("k", "v") and problem.kv_dtype is not None:
        return Decoded(arrays[name], arrays.get(f"{name}_scale"), np.float64).whole()
    return widened(arrays[name], problem.dtype)


def dense_mask(problem: AttentionProblem, arrays: Mapping[str, np.ndarray | None]) -> np.ndarray | None:
    """The dense mask of a call among its arrays by name, or its tree or its lists of key blocks as one, or
    None. Lists of a mask by a line are left out, because its line hides the same keys.
    """
    if arrays.get("tree") is not None:
        return hidden_by_tree(arrays["tree"], problem.seqlen_kv)
    has_lists = problem.block_lists is not None and problem.rule is None
    return hidden_by_lists(problem, arrays) if has_lists else arrays.get("mask")


def sinks_of(problem: AttentionProblem, arrays: Mapping[str, np.ndarray | None]) -> np.ndarray | None:
    """The sinks of a call among its arrays by name, in float64; None if it has none."""
    sinks = arrays.get("sinks")
    return None if sinks is None else widened(sinks, problem.sinks_dtype)


def attention(
    q: Any,
    k: Any,
    v: Any,
    dtype: str,
    scale: float,
    band: Band = Band(),  # noqa: B008 - immutable
    dense: Any = None,
    rows: Any = None,
    modification: ScoreOfCall | None = None,
    sinks: Any = None,
    rule: Visibility | None = None,
    dropout: Dropout | None = None,
    scaled: bool = False,
    rounds_v: bool = False,
) -> Expected:
    """softmax(q k^T scale) v in float64, and the bound for a kernel that computes in ``dtype``.

    q is (batch, rows, num_heads_q, head_dim), k (batch, seqlen_kv, num_heads_kv, head_dim), v likewise with
    head_dim_v: float64, elements as the kernel got them. ``dense``, nonzero where a key is hidden, broadcasts
    to (batch, num_heads_q, rows, seqlen_kv). ``rows`` are the positions of q's rows among all queries,
    integers; None if q has all of them. ``modification`` modifies the scores; its arrays are float64.
    ``sinks`` are (num_heads_q,), float64. ``rule`` is a mask by a line. ``dropout`` says which scores count.
    ``scaled`` is whether the kernel multiplies scores and results by scales of k and v, ``rounds_v`` whether
    it rounds v times its scale to ``dtype``.
    """
    xp, place = library_of(q), placement_of(q)
    batch, count, heads, _ = q.shape
    expected = Expected(
        xp.zeros((batch, heads, count, v.shape[-1]), dtype=xp.float64, **place),
        xp.full((batch, heads, count), -math.inf, dtype=xp.float64, **place),
        xp.zeros((batch, heads, count, v.shape[-1]), dtype=xp.float64, **place),
        xp.zeros((batch, heads, count), dtype=xp.float64, **place),
    )
    if sinks is not None and not k.shape[1]:
        expected.lse[...] = sinks[:, None]
        expected.lse_bound[...] = 2.0**-19 + 2.0**-20 * finite_sizes(xp, sinks)[:, None]
    for part in parts_of_scores(q, k, v, band, dense, rows, modification, _SCORES, rule, dropout):
        sink = part.sinks_of(sinks)
        results = _attend(xp, part.rows_of(q), part, scale, dtype, sink, scaled, rounds_v)
        for whole, result in zip(expected, results, strict=True):
            whole[part.entry, part.head, part.rows] = result
    return expected._replace(out=expected.out.swapaxes(1, 2), out_bound=expected.out_bound.swapaxes(1, 2))


def shares(result: Any, expected: Any, bound: Any) -> Any:
    """|result - expected| / bound, element by element; infinite where one is NaN or they are not the same
    infinity. An element whose bound is 0 must be exact.
    """
    xp = library_of(expected)
    with np.errstate(all="ignore"):
        share = xp.where(result == expected, 0.0, xp.abs(result - expected) / bound)
    return xp.where(share == share, share, math.inf)


def largest(result: Any, expected: Any, bound: Any) -> Largest:
    """The worst of ``shares``; a share of 0 where there are no elements."""
    ratios = shares(result, expected, bound)
    if 0 in ratios.shape:
        return Largest(0.0, 0.0, 0.0, ())
    index = tuple(map(int, np.unravel_index(int(ratios.reshape(-1).argmax()), tuple(ratios.shape))))
    share = float(ratios[index])
    error = abs(float(result[index]) - float(expected[index])) if share else 0.0
    return Largest(share, math.inf if math.isnan(error) else error, float(bound[index]), index)


class Softmax(NamedTuple):
    """The softmax of some rows, (heads, rows, keys), in float64; ``hidden`` is true where a row does not see
    a key, None if all rows see all keys. The others are (heads, rows, 1): the log-sum-exp, S and e of the
    bound, and whether a row sees nothing and has no sink: its p is 0, its LSE -inf.
    """

    p: Any
    hidden: Any
    lse: Any
    size: Any
    error: Any
    sees_nothing: Any

    def finite_lse(self, xp: Any) -> Any:
        """The log-sum-exp, 0 for a row that sees nothing."""
        return xp.where(self.sees_nothing, 0.0, self.lse)

    def visible(self, xp: Any) -> Any:
        """1 where a row sees a key, else 0."""
        ones = xp.ones_like(self.p)
        return ones if self.hidden is None else xp.where(self.hidden, 0.0, ones)

    def recomputed_error(self, xp: Any) -> Any:
        """The relative error of exp(s - lse), with s computed again and the LSE of the forward call: r of the
        bounds of `gradients`.
        """
        return 2 * self.error + 2.0**-22 * (self.size + 3 * xp.abs(self.finite_lse(xp)))


def finite_sizes(xp: Any, x: Any) -> Any:
    """Absolute values, 0 for an infinity."""
    return xp.where(xp.abs(x) == math.inf, 0.0, xp.abs(x))


def softmax(
    xp: Any,
    q: Any,
    part: PartOfScores,
    scale: float,
    dtype: str,
    sink: Any = None,
    scaled: bool = False,
) -> Softmax:
    """The softmax of a part of the scores, with at least one key: q (heads, rows, head_dim), ``sink`` (heads,
    1, 1).
    """
    k, hidden = part.k, part.hidden
    scores = q @ k.swapaxes(1, 2) * scale
    score_sizes = xp.abs(q) @ xp.abs(k).swapaxes(1, 2) * scale
    score_errors = (2.0**-21 + (2.0**-24 if scaled else 0.0)) * score_sizes
    if part.at is not None:
        with np.errstate(all="ignore"):
            scores, errors = part.at.value_with_error(xp, scores, score_errors, dtype)
        scores = scores + xp.zeros_like(score_sizes)  # a constant is one number
        score_sizes = xp.abs(scores)
        score_errors = errors + 2.0**-21 * score_sizes
        unseen = scores == -math.inf
        hidden = unseen if hidden is None else unseen | hidden
    keys_seen = k.shape[1]
    if hidden is not None:
        keys_seen = xp.sum(xp.where(hidden, 0.0, xp.ones_like(scores)), axis=-1, keepdims=True)
        scores = xp.where(hidden, -math.inf, scores)
        score_sizes = xp.where(hidden, 0.0, score_sizes)
        score_errors = xp.where(hidden, 0.0, score_errors)
    row_max = xp.amax(scores, axis=-1, keepdims=True)
    size = xp.amax(score_sizes, axis=-1, keepdims=True)
    error = xp.amax(score_errors, axis=-1, keepdims=True)
    if sink is not None:
        sink_size = finite_sizes(xp, sink)
        row_max, size = xp.maximum(row_max, sink + 0.0 * size), xp.maximum(size, sink_size + 0.0 * size)
        error = xp.maximum(error, 2.0**-21 * sink_size + 0.0 * size)
    sees_nothing = row_max == -math.inf
    finite_max = xp.where(sees_nothing, 0.0, row_max)
    p = xp.exp(scores - finite_max)
    row_sum = xp.sum(p, axis=-1, keepdims=True)
    if sink is not None:
        row_sum = row_sum + xp.exp(sink - finite_max)
    row_sum = xp.where(sees_nothing, 1.0, row_sum)
    error = error + 2.0**-19 + 2.0**-24 * keys_seen**0.5
    return Softmax(p / row_sum, hidden, row_max + xp.log(row_sum), size, error, sees_nothing)


def _attend(
    xp: Any,
    q: Any,
    part: PartOfScores,
    scale: float,
    dtype: str,
    sink: Any,
    scaled: bool,
    rounds_v: bool,
) -> tuple[Any, Any, Any, Any]:
    """`Expected` for a part of the scores; arguments as in `softmax` and `attention`."""
    p, hidden, lse, size, error, sees_nothing = softmax(xp, q, part, scale, dtype, sink, scaled)
    kept = part.kept
    if kept is not None:
        p = p * kept
    out, v_sizes = p @ part.v, xp.abs(part.v)
    visible_v = xp.sum(v_sizes, axis=1, keepdims=True)
    if hidden is not None or kept is not None:
        visible = xp.ones_like(p) if kept is None else kept
        visible_v = (visible if hidden is None else xp.where(hidden, 0.0, visible)) @ v_sizes
    mean_size = p @ v_sizes
    out_bound = 1.05 * UNIT_ROUNDOFF[dtype] * (mean_size + xp.abs(out)) + mean_size * error
    out_bound = out_bound + LEAST_P[dtype] * visible_v + LEAST_OUT[dtype]
    if scaled:
        out_bound = out_bound + 2.0**-24 * mean_size
    if rounds_v:
        out_bound = out_bound + 1.05 * UNIT_ROUNDOFF[dtype] * mean_size + LEAST_OUT[dtype]
    lse_bound = error + 2.0**-22 * (size + xp.abs(lse))
    out_bound, lse_bound = (xp.where(sees_nothing, 0.0, bound) for bound in (out_bound, lse_bound))
    return out, lse[..., 0], out_bound, lse_bound[..., 0]


def batched(x: np.ndarray, dimensions: int) -> np.ndarray:
    """``x`` with a batch dimension, where it has one dimension fewer than with it."""
    return x if x.ndim == dimensions else x[None]
