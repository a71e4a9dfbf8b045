"""What a merge must give, in float64, and how far a kernel may be from it.

The bound. Let r_1 and r_2 be the shares e^(l - lse), d = |l_1 - l_2|, and u the unit roundoff of the dtype.

    w = 2^-21 + 2^-22 d
    |error of out| <= 1.01 u |out| + 2^-21 (r_1 |o_1| + r_2 |o_2|) + (w r_1 r_2 + 2^-125) (|o_1| + |o_2|)
                      + least_out
    |error of lse| <= 2^-22 |lse| + 2^-21 + w r_2,  part 2 being the smaller

- w: the relative error of e^-d. The subtraction, and the product with log2(e), are each wrong by 2^-24 of d
  and of 1.44 d; ex2.approx by 2^-22. It moves r_1 r_2 w from one part to the other.
- 2^-21: the reciprocal of the sum, its products with both terms, and the two products with o, in fp32.
- 2^-125: ex2.approx.ftz flushes terms below 2^-126 to 0, and their products with the reciprocal may be.
- 1.01 u |out|: the result is rounded to the dtype. least_out: half of the least step of the dtype.
- 2^-21 of lse: lg2.approx of a sum from 1 to 2, rounded; 2^-22 |lse|: the addition of m.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.numbers import widened
from flashgen.operators.reference import LEAST_OUT, UNIT_ROUNDOFF, Expected, Verdict, largest

if TYPE_CHECKING:
    from flashgen.operators.merge import MergeProblem


def expected(o1: Any, lse1: Any, o2: Any, lse2: Any, dtype: str) -> Expected:
    """The result in float64, and the bound for a kernel that computes in ``dtype``. Each o is (batch,
    seqlen_q, num_heads_q, head_dim_v), each lse (batch, num_heads_q, seqlen_q), of NumPy, in float64, with
    elements as the kernel got them.
    """
    lse1, lse2 = with_empty_rows_at_minus_infinity(lse1), with_empty_rows_at_minus_infinity(lse2)
    larger, smaller = np.maximum(lse1, lse2), np.minimum(lse1, lse2)
    sees_nothing, alone = larger == -np.inf, smaller == -np.inf
    difference = np.where(alone, 0.0, np.where(alone, 0.0, larger) - np.where(alone, 0.0, smaller))
    lse = larger + np.log1p(np.where(alone, 0.0, np.exp(-difference)))
    base = np.where(sees_nothing, 0.0, lse)
    share1, share2 = np.exp(lse1 - base), np.exp(lse2 - base)
    weight_error = 2.0**-21 + 2.0**-22 * difference
    lse_bound = 2.0**-22 * np.abs(base) + 2.0**-21 + weight_error * np.minimum(share1, share2)

    def of_rows(x: Any) -> Any:
        return x.swapaxes(1, 2)[..., None]

    of_part1 = np.where(of_rows(lse1) == -np.inf, 0.0, o1)
    of_part2 = np.where(of_rows(lse2) == -np.inf, 0.0, o2)
    r1, r2 = of_rows(share1), of_rows(share2)
    out = r1 * of_part1 + r2 * of_part2
    size1, size2 = np.abs(of_part1), np.abs(of_part2)
    out_bound = 1.01 * UNIT_ROUNDOFF[dtype] * np.abs(out) + 2.0**-21 * (r1 * size1 + r2 * size2)
    out_bound += (of_rows(weight_error) * r1 * r2 + 2.0**-125) * (size1 + size2) + LEAST_OUT[dtype]
    return Expected(
        out,
        lse,
        np.where(of_rows(sees_nothing), 0.0, out_bound),
        np.where(sees_nothing, 0.0, lse_bound),
    )


def with_empty_rows_at_minus_infinity(lse: np.ndarray) -> np.ndarray:
    """An LSE of -inf for each row without keys, where flash-attn has +inf."""
    return np.where(np.isposinf(lse), -np.inf, lse).astype(lse.dtype, copy=False)


def judge(
    problem: MergeProblem,
    o1: np.ndarray,
    lse1: np.ndarray,
    o2: np.ndarray,
    lse2: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
) -> Verdict:
    """Compare the results of a call with float64, on the host. Arrays have the shapes of the contract;
    bfloat16 elements may be of ml_dtypes, their bits in uint16, or numbers.
    """

    def batched(x: np.ndarray) -> np.ndarray:
        return x if problem.batched else x[None]

    o1, o2, out = (batched(widened(x, problem.dtype)) for x in (o1, o2, out))
    lse1, lse2, lse = (batched(x).astype(np.float64) for x in (lse1, lse2, lse))
    right = expected(o1, lse1, o2, lse2, problem.dtype)
    return Verdict(largest(out, right.out, right.out_bound), largest(lse, right.lse, right.lse_bound))
