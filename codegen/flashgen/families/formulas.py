"""Score modifications without a file: a formula that a call passes for a name.

Its parameters are what it reads beside the positions and the score. Their dimensions follow from the indices
in the formula, their types from the values of the call.
"""

from __future__ import annotations

import ast
import hashlib
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, arg
from flashgen.families.scores import checked_param, checked_tree, reserved_names
from flashgen.operators.arguments import shown
from flashgen.operators.formula import FUNCTIONS, MAX_TEXT
from flashgen.operators.scores import DIMENSIONS, FORMULA, NAMES, Score

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from flashgen.families.kinds import Keys, Kind


class Passed:
    """A formula that a call passes as ``argument``, as the source of its errors."""

    def __init__(self, formula: str, argument: str = "score") -> None:
        self._formula, self._argument = formula, argument

    def error(self, keys: Keys, message: str, column: int | None = None) -> BadParam:
        where = "" if column is None else f"column {column + 1}: "
        param = f"the parameter {keys[1]}: " if keys[0] == "params" else ""
        message = message.replace(f"{self._formula!r} ", "it ")
        return BadParam(f"{arg(self._argument)} is {shown(self._formula)}; {where}{param}{message}")

    def convert(self, keys: Keys, value: Any, kind: Kind) -> Any:
        return kind.read(self.error, keys, value)  # type: ignore[arg-type]


def score_of_formula(formula: str, types: Mapping[str, str], *, keywords: Collection[str]) -> Score:
    """The modification that ``formula`` is. ``types`` has "f32" or "i32" for parameters, which are "f32"
    otherwise; ``keywords`` as in `scores.load_scores`. Raises BadParam, with the column of what is wrong.
    """
    source = Passed(formula)
    reserved = reserved_names().union(keywords)
    params = tuple(
        checked_param(source, (), name, (*dimensions, type) if dimensions else type, reserved)
        for name, dimensions in operands(formula, (*NAMES, *FUNCTIONS, "inf"), _dimensions).items()
        for type in (types.get(name, "f32"),)
    )
    tree = checked_tree(source, (), formula, params)
    text = ast.unparse(ast.parse(formula, mode="eval"))  # formulas that differ in spaces share a kernel
    digest = hashlib.sha256(repr((text, params)).encode()).hexdigest()[:10]
    return Score(FORMULA + digest, text, params, tree)


def modification(
    name: str, by_name: Mapping[str, Score], types: Mapping[str, str], *, keywords: Collection[str]
) -> Score | None:
    """The modification of this name, None if there is none; a name that is not an identifier is a formula.
    ``types`` and ``keywords`` as in `score_of_formula`. Raises BadParam for a wrong formula.
    """
    if name.isidentifier():
        return by_name.get(name)
    return score_of_formula(name, types, keywords=keywords)


def operands(
    formula: str, words: Collection[str], dimensions_of: Callable[[list[list[str]]], tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """The parameters of a formula in the order in which it names them, and the dimensions of each, none of a
    number; ``words`` of the language are no parameters. ``dimensions_of(indices)`` are the dimensions of an
    array that has, along each axis, all of these indices. Empty where the formula cannot be parsed, which
    `parse` reports.
    """
    try:
        tree = ast.parse(formula if len(formula) <= MAX_TEXT else "", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    indices: dict[str, list[list[str]]] = {}
    names = []
    functions = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            by_axis = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            of_array = indices.setdefault(node.value.id, [[] for _ in by_axis])
            # Of another number of indices parsing complains.
            for of_axis, index in zip(of_array, by_axis, strict=False):
                of_axis.append(ast.unparse(index))
        elif isinstance(node, ast.Name) and node not in functions:
            names.append((node.lineno, node.col_offset, node.id))
    dimensions = {name: dimensions_of(by_axis) for name, by_axis in indices.items()}
    return {name: dimensions.get(name, ()) for *_, name in sorted(names) if name not in words}


def conditions(formula: str) -> frozenset[str]:
    """The arrays of which a formula reads an element as a condition. Empty where it cannot be parsed."""
    try:
        tree = ast.parse(formula if len(formula) <= MAX_TEXT else "", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    places: list[ast.expr] = [tree.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp):
            places += node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
            places.append(node.operand)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            places += (node.left, node.right)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "where":
            places += node.args[:1]
    return frozenset(
        x.value.id for x in places if isinstance(x, ast.Subscript) and isinstance(x.value, ast.Name)
    )


def _dimensions(indices: list[list[str]]) -> tuple[str, ...]:
    """The dimensions of an array by its first indices: of the call's, or of the array."""
    return tuple(
        of_axis[0] if of_axis[0] in DIMENSIONS else f"axis{axis}" for axis, of_axis in enumerate(indices)
    )
