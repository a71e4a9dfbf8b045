"""Attention of e4m3 codes on the CPU: numbers of the codes, then attention of float32."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from flashgen.cpu.attention import attention
from flashgen.operators.blocklists import NAMES as LISTS
from flashgen.operators.fp8 import CODES, arrays_of_sequence, numbers_of, scale_of_heads
from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import bfloat16_bits, codes_of
from flashgen.operators.sequences import sequences
from flashgen.operators.visibility import visibility_of
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.fp8 import Fp8Problem
    from flashgen.operators.modification import ScoreOfCall
    from flashgen.runtime.plans import Arrays


def run(problem: Fp8Problem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order. Raises BadParam for elements
    that contradict the problem, before anything is written.
    """
    check_writable(problem, arrays)
    named = {
        argument.name: None if x is None else host_array(x)
        for argument, x in zip(problem.operator.arguments, arrays, strict=True)
    }
    problem.operator.check_elements(problem, named)
    score = modification_of(problem, named, single=True)
    if problem.lengths is None:
        _attend(problem, named, score)
        return
    others = {name: x for name, x in named.items() if name not in LENGTH_ARRAYS}
    for sequence in sequences(problem, named):
        part = problem.of_sequence(sequence.q_length, sequence.kv_length)
        score = score and score._replace(offset=part.seqlen_kv - part.seqlen_q)
        _attend(part, arrays_of_sequence(problem, sequence, others), score, sequence.number)


def _attend(
    problem: Fp8Problem,
    named: Mapping[str, np.ndarray | None],
    score: ScoreOfCall | None,
    first_batch: int = 0,
) -> None:
    """Attention of sequences of one length. Batch entries of ``score`` are counted from ``first_batch``."""
    numbers = {name: numbers_of(problem, named, name, np.float32) for name in ("q", "k", "v")}
    kept = {name: named.get(name) for name in ("mask", "lse", "sinks", *LISTS)}
    rule = visibility_of(problem, named)
    out, _ = attention(dataclasses.replace(problem, dtype="fp32"), numbers | kept, score, first_batch, rule)
    if problem.out_dtype == CODES:
        scale = scale_of_heads(problem, named, "out", problem.num_heads_q)[:, None, :, None]
        named["out"][...] = codes_of(out, scale if problem.batched else scale[0])
        return
    with np.errstate(over="ignore"):  # fp16 becomes infinite
        named["out"][...] = bfloat16_bits(out) if problem.out_dtype == "bf16" else out
