"""Over which scores the gradient of an array of a score modification is summed.

Each score adds to one element of the array: the element that the formula reads there. So the gradient is a
sum over the batch entries, heads, queries and keys that read an element. Kernels sum tiles of scores first,
and how depends on what tells elements apart:

    none       query and key: a score matrix is not summed, only batch entries and heads are
    rows       the query alone
    columns    the key alone
    diagonals  the distance between both
    all        neither
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import BadParam, arg
from flashgen.operators.scores import DIMENSIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.formula import Node
    from flashgen.operators.scores import Score, ScoreParam

SUMS = ("none", "rows", "columns", "diagonals", "all")


class Reduction(NamedTuple):
    """How the gradient of an array is summed: ``sums``, one of SUMS; whether batch entries and heads have
    sums of their own; and whether elements are ``gathered`` from the sums of all places that read them.
    """

    sums: str
    keeps_batch: bool
    keeps_heads: bool
    gathered: bool


def reduction(score: Score | None, extents: Sequence[int]) -> Reduction:
    """The reduction of the array that ``score`` is differentiated by; of the scores themselves without one.
    ``extents`` are of the array's dimensions, 1 where it is broadcast. Raises BadParam for an array whose
    gradient kernels cannot sum.
    """
    dimensions = tuple(DIMENSIONS) if score is None else parameter(score).dimensions
    kept = {name for name, extent in zip(dimensions, extents, strict=True) if extent > 1}
    indices = () if score is None else indices_of(score)
    reads = kept.union(*(index.reads() for index in indices)) & DIMENSIONS.keys()
    sums = {(): "all", ("kv",): "columns", ("q",): "rows"}.get(tuple(sorted(reads & {"q", "kv"})), "none")
    if indices and sums == "none":
        sums = "diagonals"
    return Reduction(sums, "b" in reads, "h" in reads, bool(indices))


def parameter(score: Score) -> ScoreParam:
    """The array that ``score`` is differentiated by."""
    return next(param for param in score.arrays if param.name == score.wrt)


@lru_cache(maxsize=64)
def indices_of(score: Score) -> tuple[Node, ...]:
    """The indices of the dimensions that the array has beside the dimensions of the call. Raises BadParam for
    an array whose gradient kernels cannot sum.
    """
    array = parameter(score)
    if array.is_integer:
        raise BadParam(f"{arg(array.name)} is an array of integers, which has no gradient")
    loads = {node for node in score.tree.walk() if node.op == "load" and node.value == array.name}
    is_of_array = [dimension not in DIMENSIONS for dimension in array.dimensions]
    if not any(is_of_array):
        return ()
    if len(loads) > 1:
        raise BadParam(
            f"the score {score.title} reads {arg(array.name)} at {len(loads)} indices; its gradient "
            "needs one index, in which where() may choose"
        )
    (load,) = loads
    first = is_of_array.index(True)
    if not all(is_of_array[first:]) or {"q", "kv"} & set(array.dimensions):
        raise BadParam(
            f"{arg(array.name)} has the dimensions {', '.join(array.dimensions)}; for its gradient, "
            "dimensions of the array come after b and h, and without q and kv"
        )
    indices = load.args[first:]
    both = {"q", "kv"} <= frozenset().union(*(index.reads() for index in indices))
    if both and any(_shift(index) != 0 for index in indices):
        raise BadParam(
            f"the index of {arg(array.name)} depends on q and kv other than by kv - q; such an array has no "
            "gradient"
        )
    return indices


def _shift(node: Node) -> int | None:
    """By how much an integer grows if q and kv both grow by 1; None where that is no constant."""
    if node.op == "name":
        return int(node.value in ("q", "kv"))
    shifts = [_shift(operand) for operand in node.args]
    if None in shifts:
        return None
    match node.op:
        case "number":
            return 0
        case "+":
            return shifts[0] + shifts[1]
        case "-":
            return shifts[0] - shifts[1]
        case "neg":
            return -shifts[0]
        case "min" | "max" | "<" | "<=" | ">" | ">=" | "==" | "!=":
            is_same = shifts[0] == shifts[1]
            return None if not is_same else shifts[0] if node.type == "int" else 0
        case "where":
            return shifts[1] if shifts[0] == 0 and shifts[1] == shifts[2] else None
    return None if any(shifts) else 0
