"""The gradients of attention on the CPU: blockwise in float32 over BLAS, or in float64 of such arrays.

For each block of query rows the keys are walked in blocks, whose P is computed again from the log-sum-exp of
the forward call. What a block adds to dk and dv is summed in float32 over all blocks and query heads of a kv
head, which one thread has.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.cpu.attention import named_on_host, number_of
from flashgen.cpu.keyspans import key_spans
from flashgen.cpu.queryrows import Call, rows_of_kv_head, store
from flashgen.cpu.threads import for_each
from flashgen.operators.backward import LENGTH_ARRAYS
from flashgen.operators.contract import MASK
from flashgen.operators.dropout import dropout_of
from flashgen.operators.numbers import widened
from flashgen.operators.sequences import arrays_of, sequences
from flashgen.operators.visibility import visibility_of
from flashgen.runtime.hostarrays import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.cpu.queryrows import QueryRows
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.backward import BackwardProblem
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.visibility import Visibility
    from flashgen.runtime.plans import Arrays


def run(problem: BackwardProblem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order. Raises BadParam for lengths
    that contradict the arrays, before anything is written.
    """
    check_writable(problem, arrays)
    named, score = named_on_host(problem, arrays)
    rule = visibility_of(problem, named)
    if problem.lengths is None:
        if named["mask"] is not None:
            named["mask"] = np.broadcast_to(named["mask"], MASK.extents(problem.sizes))
        if not problem.batched:
            leading = {x.name for x in problem.operator.arguments if x.leads_with_batch}
            named |= {name: x[None] for name, x in named.items() if x is not None and name in leading}
        if named["dsinks"] is not None:
            named["dsinks"][...] = 0
        gradients(problem, named, score, rule=rule)
        return
    in_order = sequences(problem, {name: named.pop(name) for name in LENGTH_ARRAYS})
    for argument in problem.operator.arguments:
        if argument.is_output and named[argument.name] is not None:
            named[argument.name][...] = 0  # also rows outside all sequences
    for sequence in in_order:
        part = problem.of_sequence(sequence.q_length, sequence.kv_length)
        part_of_score = score and score._replace(offset=part.seqlen_kv - part.seqlen_q)
        part_of_rule = rule and rule.of_sequence(sequence, problem)
        of_sequence = arrays_of(problem, sequence, named)
        gradients(part, of_sequence, part_of_score, sequence.number, part_of_rule)


def gradients(
    problem: BackwardProblem,
    arrays: Mapping[str, np.ndarray | None],
    score: ScoreOfCall | None = None,
    first_batch: int = 0,
    rule: Visibility | None = None,
) -> None:
    """Fill dq, dk and dv, and add to dsinks. ``arrays`` are by name, each with a batch; the others are as in
    `cpu.attention.attention`.
    """
    spans = key_spans(problem, arrays)
    call = Call(arrays, spans, score, first_batch, rule, dropout_of(problem, arrays))
    sinks = arrays.get("dsinks")
    dsinks = None if sinks is None else np.zeros((problem.batch, problem.num_heads_q), np.float32)
    tasks = [(batch, head) for batch in range(problem.batch) for head in range(problem.num_heads_kv)]
    pairs = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    work = pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)
    # Of one product BLAS may give other bits with other threads, of which another call may leave it one.
    compute = partial(_of_kv_head, problem, call, dsinks)
    for_each(compute, tasks, work, one_blas_thread=problem.deterministic)
    if sinks is not None:
        sinks += dsinks.sum(0)


class _KvHead(NamedTuple):
    """A kv head's keys and values, and what is summed of their gradients so far."""

    keys: np.ndarray
    values: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@np.errstate(all="ignore")
def _of_kv_head(
    problem: BackwardProblem, call: Call, dsinks: np.ndarray | None, task: tuple[int, int]
) -> None:
    """dk and dv of a kv head, and dq of the query heads that share it. ``dsinks``, (batch, num_heads_q),
    receives what each entry adds to the gradient of sinks.
    """
    batch, head = task
    keys, values = (
        widened(call.arrays[name][batch, :, head], problem.dtype, number_of(problem)) for name in ("k", "v")
    )
    kv = _KvHead(keys, values, np.zeros_like(keys), np.zeros_like(values))
    for block in rows_of_kv_head(problem, batch, head):
        rows = RowsOfGradients.of(problem, call.arrays, block, number_of(problem))
        if dsinks is not None:
            sinks = widened(call.arrays["sinks"], problem.sinks_dtype, np.float32)[block.heads]
            weights = np.exp(np.repeat(sinks, len(block.rows)) - rows.lse)
            terms = np.where(rows.sees_nothing, np.float32(0), weights) * rows.delta
            dsinks[batch, block.heads] -= terms.reshape(block.shape).sum(1)
        dq = _of_rows(problem, call, block, rows, kv)
        store(call.arrays["dq"][batch, block.slice, block.heads], block.as_stored(dq), problem)
    store(call.arrays["dk"][batch, :, head], kv.dk, problem)
    store(call.arrays["dv"][batch, :, head], kv.dv, problem)


class RowsOfGradients(NamedTuple):
    """What gradients read of a block of query rows: matrices of q, times the softmax scale, and dout, and a
    number of each row. ``delta`` is what P's gradient is relative to: dout out - dlse.
    """

    queries: np.ndarray
    douts: np.ndarray
    delta: np.ndarray
    lse: np.ndarray

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        arrays: Mapping[str, np.ndarray | None],
        rows: QueryRows,
        number: type[np.floating],
    ) -> RowsOfGradients:
        where = rows.batch, rows.heads, rows.slice
        queries, douts, outs = (rows.matrix(arrays[x], problem.dtype, number) for x in ("q", "dout", "out"))
        delta = np.einsum("ij,ij->i", douts, outs)
        if arrays["dlse"] is not None:
            delta -= arrays["dlse"][where].reshape(-1)
        lse = arrays["lse"][where].reshape(-1)
        # A row that sees nothing has no gradient; its dlse, which may be infinite or NaN, has no effect.
        delta[np.isneginf(lse)] = 0
        return cls(queries * number(problem.softmax_scale), douts, delta, lse)

    @property
    def sees_nothing(self) -> np.ndarray:
        return np.isneginf(self.lse)


def _rounded_up(lse: np.ndarray) -> np.ndarray:
    """The LSE plus what its rounding may have taken from it, as kernels have it, so that P <= softmax: large
    LSEs in fp32 would make P many times too large.
    """
    return lse + np.maximum(np.float32(2.0**-21) * np.abs(lse) - np.float32(2.0**-18), 0)


def _of_rows(
    problem: BackwardProblem, call: Call, block: QueryRows, rows: RowsOfGradients, kv: _KvHead
) -> np.ndarray:
    """dq of some rows, a matrix. Adds what these rows give to the gradients of their kv head."""
    number, dq = number_of(problem), np.zeros_like(rows.queries)
    # The P of a row that sees nothing is exp(-inf).
    lse = np.where(rows.sees_nothing, np.float32(np.inf), _rounded_up(rows.lse))
    for some in block.seen_keys(problem, call):
        p = rows.queries @ kv.keys[some.slice].T
        by_head, slope = (*block.shape, -1), None
        if (formula := block.formula(call, some)) is not None:
            scores = p.reshape(by_head)
            slope = formula.derived().value(np, scores)
            modified = np.broadcast_to(formula.value(np, scores), scores.shape)  # a constant is one number
            p = np.array(modified, number).reshape(p.shape)
        p -= lse[:, None]
        np.minimum(p, 0, out=p)  # a score may be larger here than in the forward pass, by its rounding
        np.exp(p, out=p)
        if some.hidden is not None:
            np.copyto(p.reshape(by_head), 0, where=some.hidden)
        ds = rows.douts @ kv.values[some.slice].T
        if (factors := block.dropout_factors(call, some)) is None:
            kv.dv[some.slice] += p.T @ rows.douts
        else:
            kv.dv[some.slice] += (p * factors).T @ rows.douts
            ds *= factors
        ds -= rows.delta[:, None]
        ds *= p
        if slope is not None:
            ds.reshape(by_head)[...] *= slope
            np.copyto(ds, 0, where=p == 0)  # where a key is hidden the derivative may be anything
        dq += ds @ kv.keys[some.slice]
        kv.dk[some.slice] += ds.T @ rows.queries
    return dq * number(problem.softmax_scale)
