"""A score modification with the arrays and numbers of a call, for the CPU path and the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators.derivative import derivative
from flashgen.operators.formula import Node, evaluate, loader
from flashgen.operators.numbers import widened
from flashgen.operators.reduction import indices_of, parameter
from flashgen.operators.roundoff import evaluate_with_error
from flashgen.operators.scores import DIMENSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.scores import Score


class ScoreOfCall(NamedTuple):
    """A modification with the arrays and numbers of a call, all of one library. ``offset`` is seqlen_kv -
    seqlen_q; ``arrays`` have the shapes that their parameters declare, by broadcasting.
    """

    score: Score
    scalars: Mapping[str, Any]
    arrays: Mapping[str, Any]
    offset: int

    def at(self, b: Any, h: Any, rows: Any, keys: Any) -> FormulaAt:
        """The modification for batch entries, query heads, rows of queries and keys, integers that broadcast
        to the shape of the scores.
        """
        indices = {"b": b, "h": h, "kv": keys, "q": rows}
        loads = {
            param.name: loader(param.dimensions, self.arrays[param.name], indices)
            for param in self.score.arrays
        }
        values = {**self.scalars, **loads, **indices, "q": rows + self.offset}
        return FormulaAt(self.score.tree, values, self.score.wrt)

    def indices(self, at: FormulaAt, xp: Any = np) -> tuple[Any, ...]:
        """The index in each dimension of the array that the modification is differentiated by, where ``at``
        is; not yet clamped.
        """
        of_call = {**at.values, "q": at.values["q"] - self.offset}
        indices = iter(indices_of(self.score))
        return tuple(
            of_call[name] if name in DIMENSIONS else evaluate(next(indices), at.values, xp)
            for name in parameter(self.score).dimensions
        )


def modification_of(
    problem: AttentionProblem, arrays: Mapping[str, Any], xp: Any = np, single: bool = False
) -> ScoreOfCall | None:
    """The score modification of a problem, None if it has none. ``arrays`` has the arrays of a call by name,
    of the library ``xp``; the modification has its own arrays in float64. With ``single`` (NumPy only) its
    numbers are float32, so that scores in float32 stay so.
    """
    score = problem.score
    if score is None:
        return None
    tables = {}
    for param in score.arrays:
        array, extents = arrays[param.name], param.argument().extents(problem.sizes)
        if param.dtype == "bf16" and xp is np:
            array = widened(array, "bf16", np.float32)  # which may be bits
        if param.is_integer or not single or param.dtype == "fp16":
            # Kernels compute integers in 32 bits.
            wide = xp.int32 if param.is_integer else xp.float32 if single else xp.float64
            array = array.to(wide) if xp.__name__ == "torch" else array.astype(wide, copy=False)
        tables[param.name] = xp.broadcast_to(array, extents)
    scalars = {
        param.name: np.float32(value) if single and not param.is_integer else value
        for param, value in zip(score.scalars, problem.score_scalars, strict=True)
    }
    return ScoreOfCall(score, scalars, tables, problem.seqlen_kv - problem.seqlen_q)


class FormulaAt(NamedTuple):
    """A formula with what it reads at some elements of S."""

    tree: Node
    values: Mapping[str, Any]
    wrt: str = "score"

    def value(self, xp: Any, score: Any) -> Any:
        """The modified scores."""
        return evaluate(self.tree, {**self.values, "score": score}, xp)

    def value_with_error(self, xp: Any, score: Any, error: Any, dtype: str) -> tuple[Any, Any]:
        """The modified scores, in float64, and how far from them a kernel of elements of ``dtype`` may be
        whose own scores have an ``error``.
        """
        return evaluate_with_error(self.tree, {**self.values, "score": score}, {"score": error}, dtype, xp)

    def derived(self) -> FormulaAt:
        """The derivative with respect to the score there, or to the array of `Score.with_respect_to`."""
        return FormulaAt(derivative(self.tree, self.wrt), self.values)
