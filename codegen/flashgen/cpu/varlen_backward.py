"""``varlen_backward`` on the CPU: the sequences one after another, each by `cpu.attention_backward`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.cpu.attention import bits
from flashgen.cpu.attention_backward import Call, gradients
from flashgen.operators import varlen
from flashgen.operators.reference import modification_of
from flashgen.operators.sequences import sequences
from flashgen.operators.varlen_backward import ARGUMENTS, LENGTH_ARRAYS
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from flashgen.operators.varlen_backward import VarlenBackwardProblem
    from flashgen.runtime.plans import Arrays


def run(problem: VarlenBackwardProblem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order."""
    check_writable(problem, arrays)
    given, score_arrays = arrays[: len(ARGUMENTS)], arrays[len(ARGUMENTS) :]
    host = {
        argument.name: None if x is None else bits(host_array(x))
        for argument, x in zip(ARGUMENTS, given, strict=True)
    }
    lengths = dict.fromkeys(varlen.LENGTH_ARRAYS) | {name: host.pop(name) for name in LENGTH_ARRAYS}
    found = sequences(problem, lengths)  # raises, before anything is written
    packed = {
        argument.name: problem.packed_q if "batch_q" in argument.symbols else problem.packed_kv
        for argument in ARGUMENTS
    }
    host = {name: x[None] if x is not None and packed[name] else x for name, x in host.items()}
    for name in ("dq", "dk", "dv"):
        host[name][...] = 0  # also of rows that are no sequence's
    whole = modification_of(problem, [host_array(x) for x in score_arrays], single=True)
    for each in found:
        own = problem.of_sequence(each.q_length, each.kv_length)
        entry, rows = each.queries()
        call = {name: host[name][entry, rows][None] for name in ("dout", "q", "out", "dq")}
        call |= {name: each.keys(host[name])[None] for name in ("k", "v", "dk", "dv")}
        call |= {
            name: None if host[name] is None else host[name][entry, :, rows][None] for name in ("lse", "dlse")
        }
        score = whole and whole._replace(offset=own.seqlen_kv - own.seqlen_q)
        gradients(own, Call(**call, mask=None, score=score, first_batch=each.number))
