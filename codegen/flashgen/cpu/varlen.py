"""``varlen`` on the CPU: the sequences one after another, each by `cpu.attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.cpu import attention
from flashgen.operators.reference import modification_of
from flashgen.operators.sequences import sequences
from flashgen.operators.varlen import ARGUMENTS, LENGTH_ARRAYS, VARLEN
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.varlen import VarlenProblem
    from flashgen.runtime.plans import Arrays

_MASK = VARLEN.arguments[VARLEN.position("mask")]


def run(problem: VarlenProblem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order."""
    check_writable(problem, arrays)
    host = [None if x is None else host_array(x) for x in arrays]
    named = dict(zip((argument.name for argument in ARGUMENTS), host, strict=False))
    score_arrays = host[len(ARGUMENTS) :]
    lengths = {name: named.pop(name) for name in LENGTH_ARRAYS}
    varlen(problem, **named, lengths=lengths, score_arrays=score_arrays)


def varlen(
    problem: VarlenProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    *,
    mask: np.ndarray | None = None,
    lengths: dict[str, np.ndarray | None],
    score_arrays: Sequence[np.ndarray] = (),
) -> None:
    """Compute ``out``, and ``lse`` if it is there, in float32. Arrays have the shapes of the contract,
    ``lengths`` those of `varlen.LENGTH_ARRAYS`. Raises BadParam for lengths that contradict the arrays,
    before anything is written.
    """
    q, out = (x[None] if problem.packed_q else x for x in (q, out))
    k, v = (x[None] if problem.packed_kv else x for x in (k, v))
    if lse is not None and problem.packed_q:
        lse = lse[None]
    if mask is not None:
        mask = np.broadcast_to(mask, _MASK.extents(problem.sizes))
    whole = modification_of(problem, score_arrays, single=True)
    for sequence in sequences(problem, lengths):
        own = problem.of_sequence(sequence.q_length, sequence.kv_length)
        entry, rows = sequence.queries()
        attention.attention(
            own,
            q[entry, rows][None],
            sequence.keys(k)[None],
            sequence.keys(v)[None],
            None if mask is None else mask[sequence.number, ..., : sequence.kv_length][None],
            out=out[entry, rows][None],
            lse=None if lse is None else lse[entry, :, rows][None],
            score=whole and whole._replace(offset=own.seqlen_kv - own.seqlen_q),
            first_batch=sequence.number,
        )
