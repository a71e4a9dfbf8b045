"""Attention weights on the CPU, in float32 over BLAS."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flashgen.cpu.attention import BLOCK_KEYS, BLOCK_ROWS, named_on_host
from flashgen.cpu.threads import for_each
from flashgen.operators.masks import Band, hidden_keys
from flashgen.operators.numbers import widened
from flashgen.runtime.hostarrays import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    block = max(1, BLOCK_ROWS // problem.group_size)
    tasks = [
        (batch, head, start, min(start + block, problem.seqlen_q))
        for batch in range(problem.batch)
        for head in range(problem.num_heads_kv)
        for start in range(0, problem.seqlen_q, block)
    ]
    for_each(partial(_weigh, problem, named, score), tasks, named["weights"].size * problem.head_dim)


@np.errstate(all="ignore")
def _weigh(
    problem: WeightsProblem,
    arrays: Mapping[str, np.ndarray],
    score: ScoreOfCall | None,
    task: tuple[int, int, int, int],
) -> None:
    """The weights of a block of query rows of the heads that share one kv head."""
    batch, kv_head, start, stop = task
    group, count, width = problem.group_size, stop - start, problem.head_dim
    heads = slice(kv_head * group, (kv_head + 1) * group)
    queries = widened(arrays["q"][batch, start:stop, heads], problem.dtype, np.float32)
    queries = queries.transpose(1, 0, 2).reshape(group * count, width) * np.float32(problem.softmax_scale)
    lse = arrays["lse"][batch, heads, start:stop, None]
    result = arrays["weights"][batch, heads, start:stop]
    result[...] = 0
    band, rows = Band.of(problem), np.arange(start, stop)[:, None]
    begin, end = band.keys_of_some(start, stop, problem.seqlen_kv)
    for first in range(begin, end, BLOCK_KEYS):
        last = min(first + BLOCK_KEYS, end)
        keys = np.arange(first, last)
        scores = queries @ widened(arrays["k"][batch, first:last, kv_head], problem.dtype, np.float32).T
        scores = scores.reshape(group, count, last - first)
        if score is not None:
            at = score.at(batch, np.arange(heads.start, heads.stop)[:, None, None], rows, keys)
            scores[...] = at.value(np, scores)
        dense = arrays["mask"][batch, heads, start:stop, first:last] if "mask" in arrays else None
        hidden = hidden_keys(band, dense, rows, keys)
        unseen = np.isneginf(scores) | np.isneginf(lse)
        # The LSE is rounded, and a weight is 1 at most; NaN stays NaN.
        weight = np.minimum(np.exp(scores - lse), np.float32(1))
        result[..., first:last] = np.where(unseen if hidden is None else unseen | hidden, 0, weight)
