"""Attention on the CPU: blockwise online softmax in float32 over BLAS, or in float64 of such arrays.

Rows of queries are cut into blocks, and for each the keys are walked in blocks with a running maximum and
sum, as in Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; memory beyond inputs and outputs is that
of one block of scores for each thread. The query heads of one kv head share a block. With lengths, sequences
are computed one after another.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.cpu.keyspans import block_rows, key_spans
from flashgen.cpu.threads import for_each
from flashgen.operators.contract import DOUBLE
from flashgen.operators.dropout import dropout_of
from flashgen.operators.kvcodes import whole_scales
from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.masks import Band, hidden_keys
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import Decoded, bfloat16_bits, widened
from flashgen.operators.sequences import arrays_of, check_scales, sequences
from flashgen.operators.trees import check_order, hidden_by_tree
from flashgen.operators.visibility import visibility_of
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.cpu.keyspans import KeySpans
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.dropout import Dropout
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.visibility import Visibility
    from flashgen.runtime.plans import Arrays

BLOCK_ROWS = 512
BLOCK_KEYS = 256


def run(problem: AttentionProblem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order. Raises BadParam for lengths
    that contradict the arrays, before anything is written.
    """
    check_writable(problem, arrays)
    named, score = named_on_host(problem, arrays)
    rule = visibility_of(problem, named)
    if problem.lengths is None:
        attention(problem, named, score, rule=rule)
        return
    lengths = {name: named.pop(name) for name in LENGTH_ARRAYS}
    of_call = sequences(problem, lengths)
    check_scales(problem, of_call, named)
    if named.get("tree") is not None:
        check_order(named["tree"], of_call)
    for sequence in of_call:
        part = problem.of_sequence(sequence.q_length, sequence.kv_length)
        attention(
            part,
            arrays_of(problem, sequence, named),
            score and score._replace(offset=part.seqlen_kv - part.seqlen_q),
            sequence.number,
            rule and rule.of_sequence(sequence, problem),
        )


def named_on_host(
    problem: AttentionProblem, arrays: Arrays
) -> tuple[dict[str, np.ndarray | None], ScoreOfCall | None]:
    """The arrays of a call by name, with elements of bfloat16 as their bits, and its score modification."""
    arguments = problem.operator.arguments
    named = {
        argument.name: None if x is None else bits(host_array(x))
        for argument, x in zip(arguments, arrays, strict=True)
    }
    if problem.kv_dtype is not None:
        named |= whole_scales(problem.sizes, named)
    return named, modification_of(problem, named, single=problem.dtype != DOUBLE)


def number_of(problem: AttentionProblem) -> type[np.floating]:
    """The type of the numbers that a problem is computed in."""
    return np.float64 if problem.dtype == DOUBLE else np.float32


def attention(
    problem: AttentionProblem,
    arrays: Mapping[str, np.ndarray | None],
    score: ScoreOfCall | None = None,
    first_batch: int = 0,
    rule: Visibility | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """``(out, lse)`` of a problem, computed in float32, or in float64 if its elements are.

    ``arrays`` has arguments of the operator by name, in the shapes of the contract; one that is absent may be
    left out or None. bfloat16 elements are of ml_dtypes, or their bits in uint16. ``out``
    (``problem.out_shape``; rounded to its own dtype, or to bfloat16 bits where q has these) and ``lse``
    receive the results; where they are missing, arrays of float32 are made. ``score`` is the `modification`
    of a call; its batch entries are counted from ``first_batch``. ``rule`` is a mask by a line.
    """
    out, lse, mask = (arrays.get(name) for name in ("out", "lse", "mask"))
    if out is None:
        out = np.empty(problem.out_shape, np.float32)
    if lse is None:
        lse = np.empty(problem.lse_shape, np.float32)
    whole = (*(arrays[name] for name in ("q", "k", "v")), out)
    sinks = (
        None
        if arrays.get("sinks") is None
        else widened(bits(arrays["sinks"]), problem.sinks_dtype, number_of(problem))
    )
    dropout = dropout_of(problem, arrays)
    q4, k4, v4, out4 = (bits(x) if problem.batched else bits(x)[None] for x in whole)
    if problem.kv_dtype is not None:
        k4, v4 = (Decoded(x, arrays.get(f"{name}_scale"), np.float32) for name, x in (("k", k4), ("v", v4)))
    lse3 = lse if problem.batched else lse[None]
    if arrays.get("tree") is not None:
        mask = hidden_by_tree(arrays["tree"], problem.seqlen_kv)
    if mask is not None:
        full = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
        mask = np.broadcast_to(mask, full)
    block, spans = block_rows(problem, BLOCK_ROWS), key_spans(problem, arrays, BLOCK_KEYS)
    tasks = [
        (batch, head, start, min(start + block, problem.seqlen_q))
        for batch in range(problem.batch)
        for head in range(problem.num_heads_kv)
        for start in range(0, problem.seqlen_q, block)
    ]
    attend = partial(
        _attend, problem, q4, k4, v4, mask, out4, lse3, sinks, spans, score, first_batch, rule, dropout
    )
    pairs = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    work = pairs * (problem.head_dim + problem.head_dim_v)
    # Of one product BLAS may give other bits with other threads, of which a large batch leaves it one.
    for_each(attend, tasks, work, one_blas_thread=problem.invariant)
    return out, lse


@np.errstate(all="ignore")
def _attend(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray | Decoded,
    v: np.ndarray | Decoded,
    mask: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray,
    sinks: np.ndarray | None,
    spans: KeySpans,
    score: ScoreOfCall | None,
    first_batch: int,
    rule: Visibility | None,
    dropout: Dropout | None,
    task: tuple[int, int, int, int],
) -> None:
    """One block of query rows of the heads that share one kv head."""
    batch, kv_head, start, stop = task
    group, count, number = problem.group_size, stop - start, number_of(problem)
    width, width_v = problem.head_dim, problem.head_dim_v
    heads = slice(kv_head * group, (kv_head + 1) * group)
    queries = widened(q[batch, start:stop, heads], problem.dtype, number)
    queries = queries.transpose(1, 0, 2).reshape(group * count, width) * number(problem.softmax_scale)

    row_max = np.full(group * count, -np.inf, number)
    row_sum = np.zeros(group * count, number)
    result = np.zeros((group * count, width_v), number)
    band = Band.of(problem)
    rows = np.arange(start, stop)[:, None]
    begin, end = band.keys_of_some(start, stop, problem.seqlen_kv)
    begin_every, end_every = band.keys_of_every(start, stop, problem.seqlen_kv)
    line = None if rule is None else LineOfRows(rule, batch, heads, range(start, stop))
    for first, last in spans(batch, kv_head, start, begin, end):
        hidden = by_line = None
        if line is not None:
            seen = line.hides(range(first, last))
            if seen.is_empty:
                continue
            by_line = seen.hidden
        if mask is not None or by_line is not None or first < begin_every or last > end_every:
            dense = None if mask is None else mask[batch, heads, start:stop, first:last]
            hidden = hidden_keys(band, dense, rows, np.arange(first, last), by_line)
            if hidden.all():
                continue
        keys = widened(k[batch, first:last, kv_head], problem.dtype, number)
        scores = queries @ keys.T
        if score is not None:
            group_heads = np.arange(heads.start, heads.stop)[:, None, None]
            at = score.at(first_batch + batch, group_heads, rows, np.arange(first, last))
            whole = scores.reshape(group, count, last - first)
            whole[...] = at.value(np, whole)
        if hidden is not None:
            np.copyto(scores.reshape(group, count, last - first), -np.inf, where=hidden)
        raised = np.maximum(row_max, scores.max(axis=1))
        # A row that has seen no key yet keeps -inf, which must not be subtracted from itself.
        finite = np.where(np.isneginf(raised), number(0), raised)
        scores -= finite[:, None]
        np.exp(scores, out=scores)
        decay = np.exp(row_max - finite)
        row_sum = row_sum * decay + scores.sum(axis=1)
        result *= decay[:, None]
        if dropout is not None:
            kept = dropout.factors(
                batch, np.arange(heads.start, heads.stop), rows[:, 0], np.arange(first, last)
            )
            scores.reshape(kept.shape)[...] *= kept
        result += scores @ widened(v[batch, first:last, kv_head], problem.dtype, number)
        row_max = raised

    if sinks is not None:
        sink = np.repeat(sinks[heads], count)
        raised = np.maximum(row_max, sink)
        finite = np.where(np.isneginf(raised), number(0), raised)
        decay = np.exp(row_max - finite)
        row_sum = row_sum * decay + np.exp(sink - finite)
        result *= decay[:, None]
        row_max = raised
    result /= np.where(row_sum != 0, row_sum, 1)[:, None]
    lse[batch, heads, start:stop] = (row_max + np.log(row_sum)).reshape(group, count)
    store(out[batch, start:stop, heads], result.reshape(group, count, width_v).transpose(1, 0, 2), problem)


class Seen(NamedTuple):
    """Of a block whether a mask by a line hides all of it, and where it hides keys, (heads or 1, rows, keys);
    None where it hides none.
    """

    is_empty: bool
    hidden: np.ndarray | None


class LineOfRows:
    """A mask by a line for some rows of the query heads that share a kv head."""

    def __init__(self, rule: Visibility, batch: int, heads: slice, rows: range) -> None:
        self._rule, self._batch, self._rows = rule, batch, rows
        self._heads = range(heads.start, heads.stop if rule.reads_head else heads.start + 1)
        self._spans = [rule.spans(batch, head, "q", [rows]) for head in self._heads]

    def hides(self, keys: range) -> Seen:
        """What it hides of a block of scores. Only a block that may have hidden keys and visible ones is
        looked at element by element.
        """
        rule, batch = self._rule, self._batch
        truths = [
            rule.at(batch, head).truth(
                *(of_rows, rule.spans(batch, head, "kv", [keys])),
                rule.spans_of_scores(batch, head, [self._rows], [keys]),
            )
            for head, of_rows in zip(self._heads, self._spans, strict=True)
        ]
        if not any(bool(truth.can_be_true) for truth in truths):
            return Seen(is_empty=True, hidden=None)
        if not any(bool(truth.can_be_false) for truth in truths):
            return Seen(is_empty=False, hidden=None)
        hidden = rule.hides(
            batch,
            np.arange(self._heads.start, self._heads.stop)[:, None, None],
            np.arange(self._rows.start, self._rows.stop)[:, None],
            np.arange(keys.start, keys.stop),
        )
        return Seen(False, np.broadcast_to(hidden, (len(self._heads), len(self._rows), len(keys))))


def bits(x: np.ndarray) -> np.ndarray:
    """``x``, with elements of bfloat16 as their bits in uint16."""
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def store(target: np.ndarray, values: np.ndarray, problem: AttentionProblem) -> None:
    """Round ``values`` to the dtype of ``target``, or to bfloat16 where it has the bits of these."""
    if problem.dtype == "bf16" and target.dtype == np.uint16:
        values = bfloat16_bits(values)
    target[...] = values
