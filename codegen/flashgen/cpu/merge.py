"""Merging two results of attention on the CPU, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.merge_reference import with_empty_rows_at_minus_infinity
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from flashgen.operators.merge import MergeProblem
    from flashgen.runtime.plans import Arrays


def run(problem: MergeProblem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order."""
    check_writable(problem, arrays)
    merge(problem, *(host_array(x) for x in arrays))


@np.errstate(all="ignore")
def merge(
    problem: MergeProblem,
    o1: np.ndarray,
    lse1: np.ndarray,
    o2: np.ndarray,
    lse2: np.ndarray,
    out: np.ndarray,
    lse_out: np.ndarray,
) -> None:
    """Fill ``out`` and ``lse_out``. Arrays have the shapes of the contract; bfloat16 elements are their bits
    in uint16.
    """
    lse1, lse2 = with_empty_rows_at_minus_infinity(lse1), with_empty_rows_at_minus_infinity(lse2)
    larger = np.maximum(lse1, lse2)
    # Where neither part saw a key the terms are 0: -inf must not be subtracted from itself.
    base = np.where(np.isneginf(larger), np.float32(0), larger)
    terms = np.exp(lse1 - base), np.exp(lse2 - base)
    total = terms[0] + terms[1]
    merged = np.zeros(out.shape, np.float32)
    for o, lse, term in ((o1, lse1, terms[0]), (o2, lse2, terms[1])):
        share = _of_rows(term / np.where(total == 0, np.float32(1), total))
        # What a part that saw no key has in its row may be NaN, which times 0 stays NaN.
        merged += np.where(
            _of_rows(np.isneginf(lse)), np.float32(0), widened(o, problem.dtype, np.float32) * share
        )
    out[...] = bfloat16_bits(merged) if problem.dtype == "bf16" else merged
    lse_out[...] = base + np.log(total)


def _of_rows(x: np.ndarray) -> np.ndarray:
    """A number for each (head, query) as one for each (query, head, column)."""
    return x.swapaxes(-1, -2)[..., None]
