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
    """The scores of some rows of some heads: (heads, rows, seqlen_kv).

    ``entry`` and ``head``, integers, are the pairs of batch entry and query head; ``rows`` is a slice. ``k``
    and ``v`` are (heads, seqlen_kv, width). ``hidden`` is true where a row does not see a key; None: all are
    seen. ``at`` is the score modification there. ``kept`` is what dropout multiplies P by; None without
    dropout. ``hidden`` and ``kept`` broadcast to the scores.
    """

    entry: Any
    head: Any
    rows: slice
    k: Any
    v: Any
    hidden: Any
    at: FormulaAt | None
    kept: Any

    def rows_of(self, x: Any) -> Any:
        """The rows of an array (batch, rows, num_heads_q, width): (heads, rows, width)."""
        return x[self.entry, self.rows, self.head]

    def sinks_of(self, sinks: Any) -> Any:
        """The sink of each head, (heads, 1, 1), of an array (num_heads_q,); None without sinks."""
        return None if sinks is None else sinks[self.head][:, None, None]

    def numbers_of_rows(self, x: Any) -> Any:
        """The numbers of the rows, (heads, rows, 1), of an array (batch, num_heads_q, rows); 0 for None."""
        return 0.0 if x is None else x[self.entry, self.head, self.rows][..., None]


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
    """All scores of a call in parts of about ``scores_at_once``; none without keys. Arguments as of
    `reference.attention`. Keys that ``band`` hides from all rows are set to 0, so they have no effect.
    """
    xp, place = library_of(q), placement_of(q)
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
            at = None if modification is None else modification.at(*positions)
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
    """The module of an array: NumPy, CuPy or PyTorch."""
    return importlib.import_module(type(x).__module__.partition(".")[0])


def placement_of(x: Any) -> dict[str, Any]:
    """The keywords by which the library of an array makes others on its device."""
    return {"device": x.device} if library_of(x).__name__ == "torch" else {}
