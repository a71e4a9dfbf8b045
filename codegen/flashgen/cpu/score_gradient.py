"""The gradient of an array of a score modification on the CPU: scores in float32 over BLAS, sums in float64,
in one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.cpu.attention import named_on_host
from flashgen.cpu.attention_backward import RowsOfGradients
from flashgen.cpu.keyspans import key_spans
from flashgen.cpu.queryrows import Call, all_rows
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.operators.reduction import parameter
from flashgen.operators.scores import DIMENSIONS
from flashgen.runtime.hostarrays import check_writable

if TYPE_CHECKING:
    from flashgen.cpu.queryrows import KeyBlock, QueryRows
    from flashgen.operators.modification import FormulaAt, ScoreOfCall
    from flashgen.operators.score_gradient import ScoreGradientProblem
    from flashgen.runtime.plans import Arrays


def run(problem: ScoreGradientProblem, arrays: Arrays, stream: int) -> None:
    """Compute the gradient among ``arrays``, which are in the operator's order."""
    check_writable(problem, arrays)
    named, score = named_on_host(problem, arrays)
    if not problem.batched:
        leading = {x.name for x in problem.operator.arguments if x.leads_with_batch} - {"dscore"}
        named |= {name: x[None] for name, x in named.items() if x is not None and name in leading}
    if (mask := named["mask"]) is not None:
        whole = problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv
        named["mask"] = np.broadcast_to(mask, whole)
    total = np.zeros(problem.extents, np.float64)
    call = Call(named, key_spans(problem, named), score)
    for rows in all_rows(problem):
        _add_rows(problem, call, rows, total)
    result = named["dscore"]
    rounded = total.reshape(result.shape).astype(np.float32)
    result[...] = bfloat16_bits(rounded) if result.dtype == np.uint16 else rounded


@np.errstate(all="ignore")
def _add_rows(problem: ScoreGradientProblem, call: Call, block: QueryRows, total: np.ndarray) -> None:
    """What a block of query rows adds to the gradient."""
    rows = RowsOfGradients.of(problem, call.arrays, block, np.float32)
    lse = np.where(rows.sees_nothing, np.float32(np.inf), rows.lse)
    keys, values = (
        widened(call.arrays[name][block.batch, :, block.kv_head], problem.dtype, np.float32)
        for name in ("k", "v")
    )
    for some in block.seen_keys(problem, call):
        scores = (rows.queries @ keys[some.slice].T).reshape(*block.shape, -1)
        terms = (rows.douts @ values[some.slice].T - rows.delta[:, None]).reshape(scores.shape)
        if (formula := block.formula(call, some)) is not None:
            terms = terms * formula.derived().value(np, scores)
            scores = np.broadcast_to(formula.value(np, scores), terms.shape)
        p = np.exp(np.minimum(scores - lse.reshape(*block.shape, 1), 0))
        if some.hidden is not None:
            p = np.where(some.hidden, np.float32(0), p)
        # Where a key is hidden the derivative may be anything.
        gradient = np.where(p == 0, 0, p * terms)
        if formula is not None and problem.reduction.gathered:
            _gather(call.score, formula, gradient, total)
        else:
            _add_block(problem, block, some, gradient, total)


def _gather(score: ScoreOfCall, at: FormulaAt, gradient: np.ndarray, total: np.ndarray) -> None:
    """Adds each score's part to the element whose index the formula has there."""
    flat = np.zeros(gradient.shape, np.int64)
    for index, extent in zip(score.indices(at), total.shape, strict=True):
        flat = flat * extent + np.clip(index, 0, extent - 1)
    sums = np.bincount(flat.reshape(-1), gradient.reshape(-1), total.size)
    total += sums.reshape(total.shape)


def _add_block(
    problem: ScoreGradientProblem, rows: QueryRows, keys: KeyBlock, gradient: np.ndarray, total: np.ndarray
) -> None:
    """Adds a block of scores, (heads, rows, keys), to the elements that they read."""
    names = tuple(DIMENSIONS) if problem.score is None else parameter(problem.score).dimensions
    where = {"b": slice(rows.batch, rows.batch + 1), "h": rows.heads, "q": rows.slice, "kv": keys.slice}
    kept = {name: extent > 1 for name, extent in zip(names, total.shape, strict=True)}
    summed = tuple(axis for axis, name in enumerate(DIMENSIONS) if not kept.get(name, False))
    block = gradient[None].sum(axis=summed, keepdims=True, dtype=np.float64)
    # The dimensions of the array, in its order.
    in_order = [list(DIMENSIONS).index(name) for name in names]
    rest = [axis for axis in range(4) if axis not in in_order]
    block = block.transpose(in_order + rest).reshape([block.shape[axis] for axis in in_order])
    total[tuple(where[name] if kept[name] else slice(None) for name in names)] += block
