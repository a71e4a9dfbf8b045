"""What attention of e4m3 codes must give, in float64, and how far a kernel may be from it.

Of one row let s_j be the scores in natural units, w_j their softmax, m the largest and L = sum_j exp(s_j -
m); c = softmax_scale q_scale k_scale turns a product of codes into a score. P is e4m3 of 2^8 exp(s_j - m),
or larger by less than 2^0.75, and is divided by a row_sum of unrounded P. Tensor cores add 32 e4m3 products
at a time: they cut the products and the sum before off at 2^-13 of the largest of them, by exponent, and the
result after 13 bits of fraction (https://arxiv.org/abs/2511.10909). Then

1. |error of s_j| <= E_j = c sum_i 2^-13 (33 M_ij + |C_ij|) + delta, over the instructions i of head_dim.
   C_ij is the sum after i, M_ij the larger of 2^(the largest sum of exponents of a pair) and the sum before,
   both raised by the error so far. delta = 2^-24 (2 |s_j| + 3 |m| + 8 + sqrt(n)) + (1 + n / 64) 2^-22: the
   steps in fp32. With a_j = exp(E_j) - 1 and A = sum_j w_j a_j, the weight of key j is off by at most w_j
   (a_j + A) / (1 - A).
2. Rounding P errs by r_j = max(2^-4 w_j (1 + a_j), 2^-10 exp(max E) / (2^8 L)), as a part of row_sum.
3. The tensor core adds P V of T keys (`KEYS_TOGETHER`, or all n where accumulate is "fast"). Each
   instruction errs by 34 2^-13 of the sum of sizes so far: k = T / 32 * 34 * 2^-13 and k' = k / (1 - k) in
   all. There a |v| below 2^-6 counts as 2^-6. Subnormal P add at most (n / 32) 33 2^-19 exp(max E) max |v| /
   (2^8 L).

    |error of out| <= v_scale / (1 - A) sum_j |v_j| (w_j (a_j + A) + r_j + k' (w_j (1 + a_j) + r_j))
                      + the last of 3 + u |out| + (n / T + 4) 2^-24 v_scale sum_j w_j |v_j|
    |error of lse| <= max E + 2^-22 (max |s_j| + |lse|)

If the result has codes, u is 2^-4, or an error of 2^-10 out_scale where that is more, and out is cut at 448
out_scale.

A score modification gets s_j with their error, and E_j begins with the running error of its formula. A sink
is a key without a value: it joins L and A, and leaves r_j beside the largest score of a key.

Without promotion k reaches 1 at 7,700 keys, and no bound is left. Errors of rounding P are close to
independent, so of zero-mean v the errors are far below the bound: tests compare them with `Reference.noise`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.operators.fp8 import CODES, numbers_of, scale_of_heads
from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import widened
from flashgen.operators.reference import (
    LEAST_OUT,
    UNIT_ROUNDOFF,
    Expected,
    Verdict,
    batched,
    dense_mask,
    finite_sizes,
    largest,
    sinks_of,
)
from flashgen.operators.scoreparts import parts_of_scores
from flashgen.operators.visibility import visibility_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.fp8 import Fp8Problem
    from flashgen.operators.modification import FormulaAt

# Keys whose P V is one sum of the tensor core where sums are promoted: no KV block has more.
KEYS_TOGETHER = 128
_DEPTH = 32  # of an instruction
_CUT = 2.0**-13
_P_SCALE = 2.0**8
_SCORES = 1 << 20


class Numbers(NamedTuple):
    """q, k and v of a call in float64, (batch, rows, heads, width): codes without their scales, and the
    scales, (batch, heads).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    score_scale: np.ndarray
    value_scale: np.ndarray


class Reference(NamedTuple):
    """What a call must give; and sqrt(sum_j w_j^2 v_j^2) of each element of ``out``, its noise if each P errs
    by its own size.
    """

    expected: Expected
    noise: np.ndarray


def judge(problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None]) -> Verdict:
    """Compare the results of a call with float64, on the host. ``arrays`` has arguments of the operator by
    name; codes are bytes, bfloat16 elements may be their bits.
    """
    expected = reference(problem, arrays).expected
    out = batched(_result(problem, arrays), 4)
    lse = arrays.get("lse")
    of_lse = None if lse is None else largest(batched(lse, 3), expected.lse, expected.lse_bound)
    return Verdict(largest(out, expected.out, expected.out_bound), of_lse)


def error_over_noise(problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None]) -> float:
    """The root mean square of the errors of ``out``, over the one of `Reference.noise`: for diffuse scores
    and zero-mean v about 0.025, whatever the sizes, and at most 0.03.
    """
    right = reference(problem, arrays)
    error = batched(_result(problem, arrays), 4) - right.expected.out
    return math.sqrt((error**2).mean() / (right.noise**2).mean())


def reference(problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None]) -> Reference:
    """The results of a call in float64, with their bounds."""
    numbers = _numbers(problem, arrays)
    batch, count, heads, _ = numbers.q.shape
    out = np.zeros((batch, heads, count, numbers.v.shape[-1]))
    expected = Expected(out, np.full(out.shape[:3], -math.inf), np.zeros_like(out), np.zeros(out.shape[:3]))
    noise = np.zeros_like(out)
    band, mask, sinks = Band.of(problem), dense_mask(problem, arrays), sinks_of(problem, arrays)
    if sinks is not None and not numbers.k.shape[1]:
        expected.lse[...] = sinks[:, None]
        expected.lse_bound[...] = 2.0**-20 + 2.0**-20 * finite_sizes(np, sinks)[:, None]
    score = modification_of(problem, arrays)
    rule = visibility_of(problem, arrays)
    for part in parts_of_scores(numbers.q, numbers.k, numbers.v, band, mask, None, score, _SCORES, rule):
        q = numbers.q[part.entry, part.rows, part.head]
        scales = (x[part.entry, part.head][:, None, None] for x in (numbers.score_scale, numbers.value_scale))
        sink = None if sinks is None else sinks[part.head][:, None, None]
        results = _attend(problem, q, part.k, part.v, part.hidden, *scales, part.at, sink)
        for whole, result in zip((*expected, noise), results, strict=True):
            whole[part.entry, part.head, part.rows] = result
    out, bound = _rounded(problem, arrays, out.swapaxes(1, 2), expected.out_bound.swapaxes(1, 2))
    return Reference(expected._replace(out=out, out_bound=bound), noise.swapaxes(1, 2))


def _result(problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None]) -> np.ndarray:
    """The numbers of ``out``."""
    if problem.out_dtype == CODES:
        return numbers_of(problem, arrays, "out", np.float64)
    return widened(arrays["out"], problem.out_dtype)


def _rounded(
    problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None], out: np.ndarray, bound: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``out`` (batch, rows, heads, width) and its bound, with the rounding to the dtype of the result."""
    if problem.out_dtype != CODES:
        rounding = UNIT_ROUNDOFF[problem.out_dtype] * (np.abs(out) + bound) + LEAST_OUT[problem.out_dtype]
        return out, np.where(bound == 0, 0.0, bound + rounding)
    scale = scale_of_heads(problem, arrays, "out", problem.num_heads_q).astype(np.float64)[:, None, :, None]
    rounding = np.maximum(2.0**-4 * (np.abs(out) + bound), 2.0**-10 * scale) + 2.0**-22 * np.abs(out)
    return np.clip(out, -448 * scale, 448 * scale), np.where(bound == 0, 0.0, bound + rounding)


def _numbers(problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None]) -> Numbers:
    from ml_dtypes import float8_e4m3fn

    q, k, v = (batched(arrays[name].view(float8_e4m3fn).astype(np.float64), 4) for name in ("q", "k", "v"))
    of_q, of_k, of_v = (
        scale_of_heads(problem, arrays, name, x.shape[2]).astype(np.float64)
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    group = problem.group_size
    score_scale = problem.softmax_scale * of_q * np.repeat(of_k, group, axis=1)
    return Numbers(q, k, v, score_scale, np.repeat(of_v, group, axis=1))


def _power(codes: np.ndarray) -> np.ndarray:
    """2^exponent of e4m3 numbers; 0 of 0."""
    exponent = np.maximum(np.frexp(codes)[1] - 1, -6)
    return np.where(codes == 0, 0.0, np.ldexp(1.0, exponent))


def _score_errors(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """How far the tensor core may be from products of codes: q (heads, rows, head_dim), k (heads, keys,
    head_dim).
    """
    total = np.zeros((q.shape[0], q.shape[1], k.shape[1]))
    error = np.zeros_like(total)
    of_q, of_k = _power(q), _power(k)
    for begin in range(0, q.shape[2], _DEPTH):
        part = slice(begin, begin + _DEPTH)
        most = np.abs(total) + error
        for i in range(begin, min(begin + _DEPTH, q.shape[2])):
            np.maximum(most, of_q[:, :, i, None] * of_k[:, None, :, i], out=most)
        total = total + q[..., part] @ k[..., part].swapaxes(1, 2)
        error = error + _CUT * (33 * most + np.abs(total) + error + 33 * _CUT * most)
    return error


def _attend(
    problem: Fp8Problem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    hidden: np.ndarray | None,
    scale: np.ndarray,
    value_scale: np.ndarray,
    at: FormulaAt | None,
    sink: np.ndarray | None,
) -> tuple[np.ndarray, ...]:
    """`Expected` and noise of some heads; the scales, and ``sink`` if any, are (heads, 1, 1). ``at`` is the
    score modification there.
    """
    keys = k.shape[1]
    scores = scale * (q @ k.swapaxes(1, 2))
    sizes, errors = np.abs(scores), scale * _score_errors(q, k)
    if at is not None:
        with np.errstate(all="ignore"):
            # The scale of the codes is a rounding of its own.
            scores, errors = at.value_with_error(np, scores, errors + 2.0**-22 * sizes, problem.dtype)
        scores = scores + np.zeros_like(sizes)  # a constant is one number
        sizes, unseen = finite_sizes(np, scores), scores == -math.inf
        errors = errors + 2.0**-21 * sizes
        hidden = unseen if hidden is None else unseen | hidden
    if hidden is not None:
        hidden = np.broadcast_to(hidden, scores.shape)
        scores = np.where(hidden, -math.inf, scores)
        sizes, errors = (np.where(hidden, 0.0, x) for x in (sizes, errors))
    key_max = row_max = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        row_max = np.maximum(row_max, sink)
    sees_nothing = row_max == -math.inf
    finite_max = np.where(sees_nothing, 0.0, row_max)
    exponentials = np.exp(scores - finite_max)
    row_sum = exponentials.sum(axis=-1, keepdims=True)
    if sink is not None:
        row_sum = row_sum + np.exp(sink - finite_max)
    row_sum = np.where(sees_nothing, 1.0, row_sum)
    weights = exponentials / row_sum
    fp32 = 2.0**-24 * (2 * sizes + 3 * np.abs(finite_max) + 8 + math.sqrt(keys))
    errors = errors + fp32 + (1 + keys / 64) * 2.0**-22
    most = errors.max(axis=-1, keepdims=True)
    factors = np.expm1(np.minimum(errors, 50.0))
    mean_factor = (weights * factors).sum(axis=-1, keepdims=True)
    most_size = sizes.max(axis=-1, keepdims=True)
    if sink is not None:
        sink_size = finite_sizes(np, sink)
        sink_error = 2.0**-21 * (1 + sink_size)
        mean_factor = mean_factor + np.exp(sink - finite_max) / row_sum * np.expm1(sink_error)
        most, most_size = np.maximum(most, sink_error), np.maximum(most_size, sink_size)
    # P is rounded beside the largest score of a key, which the sink may exceed.
    least_p = 2.0**-10 * np.exp(np.minimum(most, 50.0) + key_max - finite_max) / (_P_SCALE * row_sum)
    visible = np.ones_like(weights) if hidden is None else np.where(hidden, 0.0, 1.0)
    rounding = np.maximum(2.0**-4 * weights * (1 + factors), least_p * visible)
    together = KEYS_TOGETHER if problem.accumulate == "promoted" else keys
    lost = together / _DEPTH * 34 * _CUT
    lost = lost / (1 - lost) if lost < 1 else math.inf
    v_sizes = np.abs(v)
    mean_size = weights @ v_sizes
    with np.errstate(all="ignore"):
        of_weights = (weights * (factors + mean_factor) + rounding) @ v_sizes
        of_sums = lost * ((weights * (1 + factors) + rounding) @ np.maximum(v_sizes, 2.0**-6))
        subnormal = keys / _DEPTH * 33 * 2.0**-9 * least_p * v_sizes.max(axis=1, keepdims=True, initial=0)
        bound = np.where(mean_factor < 1, (of_weights + of_sums) / (1 - mean_factor), math.inf)
    out = weights @ v
    bound = value_scale * (bound + subnormal + (keys / together + 4) * 2.0**-24 * mean_size)
    lse = row_max + np.log(row_sum)
    lse_bound = most + 2.0**-22 * (most_size + np.abs(lse))
    noise = value_scale * np.sqrt(weights**2 @ v**2)
    bound, lse_bound = (np.where(sees_nothing, 0.0, x) for x in (bound, lse_bound))
    return value_scale * out, lse[..., 0], bound, lse_bound[..., 0], noise
