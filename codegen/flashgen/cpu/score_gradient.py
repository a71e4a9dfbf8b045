"""The gradient of an array of a score modification on the CPU: scores in float32 over BLAS, sums in float64,
in one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.cpu.attention import BLOCK_KEYS, BLOCK_ROWS, named_on_host
from flashgen.operators.masks import Band, hidden_keys
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.operators.reduction import parameter
from flashgen.operators.scores import DIMENSIONS
from flashgen.runtime.hostarrays import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    block = max(1, BLOCK_ROWS // problem.group_size)
    for batch in range(problem.batch):
        for kv_head in range(problem.num_heads_kv):
            for start in range(0, problem.seqlen_q, block):
                rows = range(start, min(start + block, problem.seqlen_q))
                _add_rows(problem, named, score, batch, kv_head, rows, total)
    result = named["dscore"]
    rounded = total.reshape(result.shape).astype(np.float32)
    result[...] = bfloat16_bits(rounded) if result.dtype == np.uint16 else rounded


@np.errstate(all="ignore")
def _add_rows(
    problem: ScoreGradientProblem,
    arrays: Mapping[str, np.ndarray | None],
    score: ScoreOfCall | None,
    batch: int,
    kv_head: int,
    rows: range,
    total: np.ndarray,
) -> None:
    """What some rows of the heads that share a kv head add to the gradient."""
    group, count = problem.group_size, len(rows)
    heads, part = slice(kv_head * group, (kv_head + 1) * group), slice(rows.start, rows.stop)

    def of_heads(name: str) -> np.ndarray:
        some = widened(arrays[name][batch, part, heads], problem.dtype, np.float32)
        return some.transpose(1, 0, 2).reshape(group * count, -1)

    queries, douts = of_heads("q") * np.float32(problem.softmax_scale), of_heads("dout")
    delta = np.einsum("ij,ij->i", douts, of_heads("out"))
    if arrays["dlse"] is not None:
        delta -= arrays["dlse"][batch, heads, part].reshape(-1)
    lse = arrays["lse"][batch, heads, part].reshape(-1)
    # A row that sees nothing has no gradient, whatever its dlse is.
    delta[np.isneginf(lse)] = 0
    lse = np.where(np.isneginf(lse), np.float32(np.inf), lse)
    keys, values = (
        widened(arrays[name][batch, :, kv_head], problem.dtype, np.float32) for name in ("k", "v")
    )
    band, positions = Band.of(problem), np.arange(rows.start, rows.stop)[:, None]
    begin, end = band.keys_of_some(rows.start, rows.stop, problem.seqlen_kv)
    for first in range(begin, end, BLOCK_KEYS):
        some = np.arange(first, min(first + BLOCK_KEYS, end))
        block = slice(first, first + len(some))
        whole = (group, count, len(some))
        scores = (queries @ keys[block].T).reshape(whole)
        terms = (douts @ values[block].T - delta[:, None]).reshape(whole)
        at = None
        if score is not None:
            at = score.at(batch, np.arange(heads.start, heads.stop)[:, None, None], positions, some)
            terms = terms * at.derived().value(np, scores)
            scores = np.broadcast_to(at.value(np, scores), whole)
        dense = None if arrays["mask"] is None else arrays["mask"][batch, heads, part, block]
        hidden = hidden_keys(band, dense, positions, some)
        p = np.exp(np.minimum(scores - lse.reshape(group, count, 1), 0))
        p = p if hidden is None else np.where(hidden, np.float32(0), p)
        # Where a key is hidden the derivative may be anything.
        gradient = np.where(p == 0, 0, p * terms)
        if score is not None and problem.reduction.gathered:
            _gather(score, at, gradient, total)
        else:
            _add_block(problem, batch, heads, part, block, gradient, total)


def _gather(score: ScoreOfCall, at: FormulaAt, gradient: np.ndarray, total: np.ndarray) -> None:
    """Adds each score's part to the element whose index the formula has there."""
    flat = np.zeros(gradient.shape, np.int64)
    for index, extent in zip(score.indices(at), total.shape, strict=True):
        flat = flat * extent + np.clip(index, 0, extent - 1)
    sums = np.bincount(flat.reshape(-1), gradient.reshape(-1), total.size)
    total += sums.reshape(total.shape)


def _add_block(
    problem: ScoreGradientProblem,
    batch: int,
    heads: slice,
    rows: slice,
    keys: slice,
    gradient: np.ndarray,
    total: np.ndarray,
) -> None:
    """Adds a block of scores, (heads, rows, keys), to the elements that they read."""
    names = tuple(DIMENSIONS) if problem.score is None else parameter(problem.score).dimensions
    where = {"b": slice(batch, batch + 1), "h": heads, "q": rows, "kv": keys}
    kept = {name: extent > 1 for name, extent in zip(names, total.shape, strict=True)}
    summed = tuple(axis for axis, name in enumerate(DIMENSIONS) if not kept.get(name, False))
    block = gradient[None].sum(axis=summed, keepdims=True, dtype=np.float64)
    # The dimensions of the array, in its order.
    in_order = [list(DIMENSIONS).index(name) for name in names]
    rest = [axis for axis in range(4) if axis not in in_order]
    block = block.transpose(in_order + rest).reshape([block.shape[axis] for axis in in_order])
    total[tuple(where[name] if kept[name] else slice(None) for name in names)] += block
