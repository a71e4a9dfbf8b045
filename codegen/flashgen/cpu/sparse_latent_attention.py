"""Latent attention to the tokens of lists, on the CPU: one call of attention for each query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.cpu.attention import attention, named_on_host
from flashgen.operators.sparse_latent import queries
from flashgen.runtime.hostarrays import check_writable

if TYPE_CHECKING:
    from flashgen.operators.sparse_latent import SparseLatentProblem
    from flashgen.runtime.plans import Arrays


def run(problem: SparseLatentProblem, arrays: Arrays, stream: int) -> None:
    """As `cpu.attention.run`. Raises BadParam for lengths and indices that contradict the arrays."""
    check_writable(problem, arrays)
    named, _ = named_on_host(problem, arrays)
    for query in queries(problem, named):
        attention(query.problem, query.arrays)
