"""The gradients of attention on the CPU: blockwise in float32 over BLAS, or in float64 of such arrays.

For each block of query rows the keys are walked in blocks, whose P is computed again from the log-sum-exp of
the forward call. What a block adds to dk and dv is summed in float32 over all blocks and query heads of a kv
head, which one thread has.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.cpu.attention import BLOCK_KEYS, BLOCK_ROWS, LineOfRows, named_on_host, number_of, store
from flashgen.cpu.keyspans import KeySpans, block_rows, key_spans
from flashgen.cpu.threads import for_each
from flashgen.operators.backward import LENGTH_ARRAYS
from flashgen.operators.contract import MASK
from flashgen.operators.dropout import dropout_of
from flashgen.operators.masks import Band, hidden_keys
from flashgen.operators.numbers import widened
from flashgen.operators.sequences import arrays_of, sequences
from flashgen.operators.visibility import visibility_of
from flashgen.runtime.hostarrays import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.backward import BackwardProblem
    from flashgen.operators.dropout import Dropout
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.operators.visibility import Visibility
    from flashgen.runtime.plans import Arrays


class Call(NamedTuple):
    """The arrays of a call by name, each with a batch; bfloat16 elements are their bits. ``first_batch`` is
    the number that a score modification knows the first entry by. ``dsinks``, (batch, num_heads_q), has what
    each entry adds to the gradient of sinks. ``rule`` is a mask by a line; ``spans`` are the keys that rows
    go through.
    """

    arrays: Mapping[str, np.ndarray | None]
    score: ScoreOfCall | None
    first_batch: int = 0
    dsinks: np.ndarray | None = None
    rule: Visibility | None = None
    spans: KeySpans | None = None
    dropout: Dropout | None = None


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
        gradients(problem, Call(named, score, rule=rule))
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
        gradients(part, Call(of_sequence, part_of_score, sequence.number, rule=part_of_rule))


def gradients(problem: BackwardProblem, call: Call) -> None:
    """Fill dq, dk and dv, and add to dsinks."""
    call = call._replace(
        spans=key_spans(problem, call.arrays, BLOCK_KEYS), dropout=dropout_of(problem, call.arrays)
    )
    total = call.arrays.get("dsinks")
    if total is not None:
        call = call._replace(dsinks=np.zeros((problem.batch, problem.num_heads_q), np.float32))
    tasks = [(batch, head) for batch in range(problem.batch) for head in range(problem.num_heads_kv)]
    pairs = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    work = pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)
    # Of one product BLAS may give other bits with other threads, of which another call may leave it one.
    for_each(partial(_of_kv_head, problem, call), tasks, work, one_blas_thread=problem.deterministic)
    if total is not None:
        total += call.dsinks.sum(0)


@np.errstate(all="ignore")
def _of_kv_head(problem: BackwardProblem, call: Call, task: tuple[int, int]) -> None:
    """dk and dv of a kv head, and dq of the query heads that share it."""
    batch, kv_head = task
    keys, values = (
        widened(x[batch, :, kv_head], problem.dtype, number_of(problem))
        for x in (call.arrays["k"], call.arrays["v"])
    )
    dk, dv = np.zeros_like(keys), np.zeros_like(values)
    block = block_rows(problem, BLOCK_ROWS)
    for start in range(0, problem.seqlen_q, block):
        rows = range(start, min(start + block, problem.seqlen_q))
        _of_rows(problem, call, batch, kv_head, rows, keys, values, dk, dv)
    store(call.arrays["dk"][batch, :, kv_head], dk, problem)
    store(call.arrays["dv"][batch, :, kv_head], dv, problem)


def _rounded_up(lse: np.ndarray) -> np.ndarray:
    """The LSE plus what its rounding may have taken from it, as kernels have it, so that P <= softmax: large
    LSEs in fp32 would make P many times too large.
    """
    return lse + np.maximum(np.float32(2.0**-21) * np.abs(lse) - np.float32(2.0**-18), 0)


def _of_rows(
    problem: BackwardProblem,
    call: Call,
    batch: int,
    kv_head: int,
    rows: range,
    keys: np.ndarray,
    values: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
) -> None:
    """dq of some rows of the heads that share a kv head, and what these rows add to its dk and dv."""
    group, count, number = problem.group_size, len(rows), number_of(problem)
    scale = number(problem.softmax_scale)
    heads, part = slice(kv_head * group, (kv_head + 1) * group), slice(rows.start, rows.stop)

    def of_heads(x: np.ndarray) -> np.ndarray:
        some = widened(x[batch, part, heads], problem.dtype, number)
        return some.transpose(1, 0, 2).reshape(group * count, x.shape[-1])

    arrays, mask, dlse = call.arrays, call.arrays.get("mask"), call.arrays["dlse"]
    queries, douts = of_heads(arrays["q"]) * scale, of_heads(arrays["dout"])
    delta = np.einsum("ij,ij->i", douts, of_heads(arrays["out"]))
    if dlse is not None:
        delta -= dlse[batch, heads, part].reshape(-1)
    lse = arrays["lse"][batch, heads, part].reshape(-1)
    # The P of a row that sees nothing is exp(-inf); its dlse, which may be infinite or NaN, has no effect.
    sees_nothing = np.isneginf(lse)
    exact_lse = lse
    lse = np.where(sees_nothing, np.float32(np.inf), _rounded_up(lse))
    delta[sees_nothing] = 0
    if call.dsinks is not None:
        sinks = widened(arrays["sinks"], problem.sinks_dtype, np.float32)[heads]
        weights = np.where(sees_nothing, np.float32(0), np.exp(np.repeat(sinks, count) - exact_lse))
        call.dsinks[batch, heads] -= (weights * delta).reshape(group, count).sum(1)

    dq = np.zeros_like(queries)
    band, positions = Band.of(problem), np.arange(rows.start, rows.stop)[:, None]
    begin, end = band.keys_of_some(rows.start, rows.stop, problem.seqlen_kv)
    begin_every, end_every = band.keys_of_every(rows.start, rows.stop, problem.seqlen_kv)
    line = None if call.rule is None else LineOfRows(call.rule, batch, heads, rows)
    for first, last in call.spans(batch, kv_head, rows.start, begin, end):
        some, hidden, by_line = np.arange(first, last), None, None
        if line is not None:
            seen = line.hides(range(first, last))
            if seen.is_empty:
                continue
            by_line = seen.hidden
        if mask is not None or by_line is not None or first < begin_every or last > end_every:
            dense = None if mask is None else mask[batch, heads, part, first:last]
            hidden = hidden_keys(band, dense, positions, some, by_line)
            if hidden.all():
                continue
        whole = (group, count, last - first)
        p = queries @ keys[first:last].T
        slope = None
        if call.score is not None:
            group_heads = np.arange(heads.start, heads.stop)[:, None, None]
            at = call.score.at(call.first_batch + batch, group_heads, positions, some)
            slope = at.derived().value(np, p.reshape(whole))
            modified = np.broadcast_to(at.value(np, p.reshape(whole)), whole)  # a constant is one number
            p = np.array(modified, number).reshape(p.shape)
        p -= lse[:, None]
        np.minimum(p, 0, out=p)  # a score may be larger here than in the forward pass, by its rounding
        np.exp(p, out=p)
        if hidden is not None:
            np.copyto(p.reshape(whole), 0, where=hidden)
        ds = douts @ values[first:last].T
        if call.dropout is None:
            dv[first:last] += p.T @ douts
        else:
            group_heads = np.arange(heads.start, heads.stop)
            kept = call.dropout.factors(batch, group_heads, positions[:, 0], some).reshape(p.shape)
            dv[first:last] += (p * kept).T @ douts
            ds *= kept
        ds -= delta[:, None]
        ds *= p
        if slope is not None:
            ds.reshape(whole)[...] *= slope
            np.copyto(ds, 0, where=p == 0)  # where a key is hidden the derivative may be anything
        dq += ds @ keys[first:last]
        dk[first:last] += ds.T @ queries
    dq *= scale
    store(call.arrays["dq"][batch, part, heads], dq.reshape(group, count, -1).transpose(1, 0, 2), problem)
