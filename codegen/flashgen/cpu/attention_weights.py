"""Attention weights on the CPU, in float32 over BLAS."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flashgen.cpu.attention import named_on_host
from flashgen.cpu.keyspans import key_spans
from flashgen.cpu.queryrows import Call, all_rows
from flashgen.cpu.threads import for_each
from flashgen.operators.numbers import widened
from flashgen.runtime.hostarrays import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.cpu.queryrows import QueryRows
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.weights import WeightsProblem
    from flashgen.runtime.plans import Arrays


def run(problem: WeightsProblem, arrays: Arrays, stream: int) -> None:
    """Compute the weights among ``arrays``, which are in the operator's order."""
    check_writable(problem, arrays)
    weights(problem, *named_on_host(problem, arrays))


def weights(
    problem: WeightsProblem, arrays: Mapping[str, np.ndarray | None], score: ScoreOfCall | None = None
) -> None:
    """Fill ``weights`` of these arrays by name, which are as in `cpu.attention.attention`."""
    named = {name: arrays[name] for name in ("q", "k", "lse", "weights")}
    if not problem.batched:
        named = {name: x[None] for name, x in named.items()}
    if (mask := arrays.get("mask")) is not None:
        named["mask"] = np.broadcast_to(mask, named["weights"].shape)
    call = Call(named, key_spans(problem, arrays), score)
    for_each(partial(_weigh, problem, call), all_rows(problem), named["weights"].size * problem.head_dim)


@np.errstate(all="ignore")
def _weigh(problem: WeightsProblem, call: Call, rows: QueryRows) -> None:
    """The weights of a block of query rows."""
    arrays, where = call.arrays, (rows.batch, rows.heads, rows.slice)
    queries = rows.matrix(arrays["q"], problem.dtype, np.float32) * np.float32(problem.softmax_scale)
    lse, result = arrays["lse"][where][..., None], arrays["weights"][where]
    result[...] = 0
    for block in rows.seen_keys(problem, call):
        keys = widened(arrays["k"][rows.batch, block.slice, rows.kv_head], problem.dtype, np.float32)
        scores = (queries @ keys.T).reshape(*rows.shape, -1)
        if (formula := rows.formula(call, block)) is not None:
            scores[...] = formula.value(np, scores)
        unseen = np.isneginf(scores) | np.isneginf(lse)
        if block.hidden is not None:
            unseen = unseen | block.hidden
        # The LSE is rounded, and a weight is 1 at most; NaN stays NaN.
        result[..., block.slice] = np.where(unseen, 0, np.minimum(np.exp(scores - lse), np.float32(1)))
