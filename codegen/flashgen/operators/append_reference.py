"""`append` in float64, and its bound.

The bound, with u the unit roundoff of the dtype, and r the result:

    |error of r| <= 1.01 u |r| + 1.01 2^-23 (|c x| + |s y|) + least_out

- 2^-23: the product with s, and the sum, are each rounded to fp32; that with c may be. |r| is no larger.
- 1.01 u |r|: the result is rounded to the dtype. least_out: half of the least step of the dtype.

What is not rotated is copied: to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.append_rows import new_tokens, pair_slices, queries, slots, total_lengths
from flashgen.operators.numbers import widened
from flashgen.operators.reference import LEAST_OUT, UNIT_ROUNDOFF, Largest, Verdict, largest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.append import AppendProblem
    from flashgen.operators.append_rows import Tokens


def judge(
    problem: AppendProblem, before: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray | None]
) -> Verdict:
    """Compare the results of a call with float64, on the host; what a call must not touch has to be, to the
    bit, as ``before``, which has k_cache, v_cache and q_rotated. ``arrays`` has all arguments by name, None
    for what is absent; bfloat16 elements are their bits in uint16. Of the worst element ``index`` is the
    (batch, token, head, column), or, of what must not be touched, the place in its array.
    """

    def batched(x: np.ndarray) -> np.ndarray:
        return x if problem.batched else x[None]

    def numbers(x: np.ndarray) -> np.ndarray:
        return widened(batched(x), problem.dtype)

    def compared(
        name: str, places: tuple[np.ndarray, ...], written: np.ndarray, value: np.ndarray, bound: np.ndarray
    ) -> Largest:
        """The worst element of an output; where ``written``, it is to have ``value`` at ``places``."""
        result, old = arrays[name], before[name]
        if name == "q_rotated":
            result, old = batched(result), batched(old)
        bits = f"u{result.itemsize}"
        changed = result.view(bits) != old.view(bits)
        changed[tuple(place[written] for place in places)] = False
        if changed.any():
            index = tuple(int(i[0]) for i in np.nonzero(changed))
            return Largest(np.inf, np.inf, 0.0, index)
        mask = written[:, :, None, None]
        taken = widened(result[places], problem.dtype)
        return largest(np.where(mask, taken, 0), np.where(mask, value, 0), np.where(mask, bound, 0))

    tables = None
    if problem.pairs != "none":
        tables = tuple(widened(arrays[name], problem.table_dtype) for name in ("cos", "sin"))

    def with_row(tokens: Tokens) -> np.ndarray:
        if tables is None:
            return tokens.real
        return tokens.real & (tokens.row >= 0) & (tokens.row < problem.num_positions)

    new = new_tokens(problem, arrays)
    page, slot, there = slots(problem, new, arrays)
    stored = there & with_row(new)
    k, v = numbers(arrays["k_new"]), numbers(arrays["v_new"])
    k_bound, v_bound = np.zeros(k.shape), np.zeros(v.shape)
    if tables is not None:
        k, k_bound = _rotated(problem, k, new.row, tables)
    worst = [
        compared("k_cache", (page, slot), stored, k, k_bound),
        compared("v_cache", (page, slot), stored, v, v_bound),
    ]
    if arrays["q"] is not None:
        of_q = queries(problem, arrays)
        value, bound = _rotated(problem, numbers(arrays["q"]), of_q.row, tables)
        places = tuple(np.indices(of_q.row.shape))
        worst.append(compared("q_rotated", places, with_row(of_q), value, bound))
    total = total_lengths(problem, arrays)
    worst.append(largest(arrays["total_lengths"].astype(float), total.astype(float), np.zeros(total.shape)))
    return Verdict(max(worst, key=lambda element: element.share), None)


def _rotated(
    problem: AppendProblem, x: np.ndarray, row: np.ndarray, tables: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """x rotated, in float64, and its bound. Rows past the tables count as row 0."""
    c, s = (table[np.where(row < problem.num_positions, row, 0)][:, :, None] for table in tables)
    first, second = pair_slices(problem)
    out, bound = x.copy(), np.zeros(x.shape)
    for half, other, sign in ((first, second, -1), (second, first, 1)):
        out[..., half] = c * x[..., half] + sign * s * x[..., other]
        terms = np.abs(c * x[..., half]) + np.abs(s * x[..., other])
        bound[..., half] = 1.01 * (UNIT_ROUNDOFF[problem.dtype] * np.abs(out[..., half]) + 2.0**-23 * terms)
        bound[..., half] += LEAST_OUT[problem.dtype]
    return out, bound
