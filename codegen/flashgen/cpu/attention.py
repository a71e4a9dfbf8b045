"""Attention on the CPU: blockwise online softmax in float32 over BLAS, or in float64 of such arrays.

Rows of queries are cut into blocks, and for each the keys are walked in blocks with a running maximum and
sum, as in Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; memory beyond inputs and outputs is that
of one block of scores for each thread. The query heads of one kv head share a block. With lengths, sequences
are computed one after another.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flashgen.cpu.keyspans import key_spans
from flashgen.cpu.queryrows import Call, all_rows, store
from flashgen.cpu.threads import for_each
from flashgen.operators.contract import DOUBLE
from flashgen.operators.dropout import dropout_of
from flashgen.operators.kvcodes import whole_scales
from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import Decoded, widened
from flashgen.operators.sequences import arrays_of, check_scales, sequences
from flashgen.operators.trees import check_order, hidden_by_tree
from flashgen.operators.visibility import visibility_of
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.cpu.queryrows import QueryRows
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.visibility import Visibility
    from flashgen.runtime.plans import Arrays


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
    number, mask, sinks = number_of(problem), arrays.get("mask"), arrays.get("sinks")
    out, lse = arrays.get("out"), arrays.get("lse")
    if out is None:
        out = np.empty(problem.out_shape, np.float32)
    if lse is None:
        lse = np.empty(problem.lse_shape, np.float32)
    named = {"out": bits(out), "lse": lse} | {name: bits(arrays[name]) for name in ("q", "k", "v")}
    if not problem.batched:
        named = {name: x[None] for name, x in named.items()}
    if problem.kv_dtype is not None:
        named |= {name: Decoded(named[name], arrays.get(f"{name}_scale"), np.float32) for name in ("k", "v")}
    if sinks is not None:
        named["sinks"] = widened(bits(sinks), problem.sinks_dtype, number)
    if arrays.get("tree") is not None:
        mask = hidden_by_tree(arrays["tree"], problem.seqlen_kv)
    if mask is not None:
        full = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
        named["mask"] = np.broadcast_to(mask, full)
    spans = key_spans(problem, arrays)
    call = Call(named, spans, score, first_batch, rule, dropout_of(problem, arrays))
    pairs = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    work = pairs * (problem.head_dim + problem.head_dim_v)
    # Of one product BLAS may give other bits with other threads, of which a large batch leaves it one.
    attend = partial(_attend, problem, call)
    for_each(attend, all_rows(problem), work, one_blas_thread=problem.invariant)
    return out, lse


class _OnlineSoftmax:
    """Of each row the largest score so far, and relative to it the sum of exp(score) and P V."""

    def __init__(self, rows: int, width: int, number: type[np.floating]) -> None:
        self.largest = np.full(rows, -np.inf, number)
        self.total = np.zeros(rows, number)
        self.result = np.zeros((rows, width), number)

    def raise_to(self, scores: np.ndarray) -> np.ndarray:
        """Make the sums relative to these scores, one a row, where they are larger. Gives what scores are
        relative to now.
        """
        raised = np.maximum(self.largest, scores)
        # A row that has seen no key yet keeps -inf, which must not be subtracted from itself.
        finite = np.where(np.isneginf(raised), raised.dtype.type(0), raised)
        decay = np.exp(self.largest - finite)
        self.total *= decay
        self.result *= decay[:, None]
        self.largest = raised
        return finite


@np.errstate(all="ignore")
def _attend(problem: AttentionProblem, call: Call, rows: QueryRows) -> None:
    """A block of query rows."""
    arrays, number = call.arrays, number_of(problem)
    queries = rows.matrix(arrays["q"], problem.dtype, number) * number(problem.softmax_scale)
    softmax = _OnlineSoftmax(rows.count, problem.head_dim_v, number)
    for block in rows.seen_keys(problem, call):
        keys, values = (
            widened(arrays[name][rows.batch, block.slice, rows.kv_head], problem.dtype, number)
            for name in ("k", "v")
        )
        scores = queries @ keys.T
        of_heads = scores.reshape(*rows.shape, -1)
        if (formula := rows.formula(call, block)) is not None:
            of_heads[...] = formula.value(np, of_heads)
        if block.hidden is not None:
            np.copyto(of_heads, -np.inf, where=block.hidden)
        scores -= softmax.raise_to(scores.max(axis=1))[:, None]
        np.exp(scores, out=scores)
        softmax.total += scores.sum(axis=1)
        if (factors := rows.dropout_factors(call, block)) is not None:
            scores *= factors
        softmax.result += scores @ values

    if "sinks" in arrays:
        sinks = np.repeat(arrays["sinks"][rows.heads], len(rows.rows))
        softmax.total += np.exp(sinks - softmax.raise_to(sinks))
    result, total = softmax.result, softmax.total
    result /= np.where(total != 0, total, 1)[:, None]
    arrays["lse"][rows.batch, rows.heads, rows.slice] = (softmax.largest + np.log(total)).reshape(rows.shape)
    store(arrays["out"][rows.batch, rows.slice, rows.heads], rows.as_stored(result), problem)


def bits(x: np.ndarray) -> np.ndarray:
    """``x``, with elements of bfloat16 as their bits in uint16."""
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x
