"""The scores of attention in parts that fit into memory, for what computes with all of them in float64.

Arrays may be of NumPy, CuPy or PyTorch, on any device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators.masks import hidden_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.operators.dropout import Dropout
    from flashgen.operators.masks import Band
    from flashgen.operators.modification import FormulaAt, ScoreOfCall
    from flashgen.operators.visibility import Visibility


class PartOfScores(NamedTuple):
    """Some rows of some heads: ``entry`` and ``head``, integers, are the pairs of batch entry and query head,
    one after another; ``rows`` is a slice; ``k`` and ``v`` have a leading dimension of pairs; ``hidden``,
    ``at`` and ``kept`` are as `_attend` takes them.
    """

    entry: Any
    head: Any
    rows: slice
    k: Any
    v: Any
    hidden: Any
    at: FormulaAt | None
    kept: Any


def parts_of_scores(
    q: Any,
    k: Any,
    v: Any,
    band: Band,
    dense: Any,
    rows: Any,
    modification: ScoreOfCall | None,
    scores_at_once: int,
    rule: Visibility | None = None,
    dropout: Dropout | None = None,
) -> Iterator[PartOfScores]:
    """All scores of `attention`, whose arguments these are, in parts of about ``scores_at_once``; none where
    there are no keys. Keys that ``band`` hides from all rows are 0: what they hold has no effect.
    """
    xp = library_of(q)
    place = {"device": q.device} if xp.__name__ == "torch" else {}
    batch, count, heads, _ = q.shape
    seqlen_kv, group = k.shape[1], heads // k.shape[2]
    if rows is None:
        rows = xp.arange(count, **place)
    keys = xp.arange(seqlen_kv, **place)
    begin, end = (0, 0) if not count else band.keys_of_some(int(rows.min()), int(rows.max()) + 1, seqlen_kv)
    if dense is not None:
        dense = xp.broadcast_to(dense, (batch, heads, count, seqlen_kv))
    rows_at_once = max(1, min(count, scores_at_once // max(1, seqlen_kv)))
    pairs_at_once = max(1, scores_at_once // (rows_at_once * max(1, seqlen_kv)))
    for first in range(0, batch * heads if count and seqlen_kv else 0, pairs_at_once):
        pairs = xp.arange(first, min(first + pairs_at_once, batch * heads), **place)
        entry, head = pairs // heads, pairs % heads
        some_k, some_v = (x[entry, :, head // group] for x in (k, v))  # copies
        for x in (some_k, some_v):
            x[:, :begin] = x[:, end:] = 0
        for start in range(0, count, rows_at_once):
            part = slice(start, start + rows_at_once)
            some_dense = None if dense is None else dense[entry, head, part]
            positions = entry[:, None, None], head[:, None, None], rows[part][:, None], keys
            by_line = None if rule is None else rule.hides(*positions, xp)
            hidden = hidden_keys(band, some_dense, *positions[2:], by_line)
            at = None
            if modification is not None:
                at = modification.at(*positions)
            kept = None
            if dropout is not None:
                on_host = (_on_host(x) for x in (entry, head, rows[part], keys))
                kept = xp.asarray(dropout.factors(*on_host).astype(np.float64), **place)
            yield PartOfScores(entry, head, part, some_k, some_v, hidden, at, kept)


def _on_host(x: Any) -> np.ndarray:
    """An array of NumPy, CuPy or PyTorch as an array of NumPy."""
    if library_of(x).__name__ == "torch":
        x = x.cpu()
    return x.get() if hasattr(x, "get") else np.asarray(x)


def library_of(x: Any) -> Any:
    """The module of NumPy, CuPy or PyTorch that an array is of."""
    return importlib.import_module(type(x).__module__.partition(".")[0])
