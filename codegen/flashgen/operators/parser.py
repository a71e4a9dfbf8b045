"""The language of score modifications and of masks: text that is checked, and becomes a tree.

Allowed are names and numbers, ``+ - * /``, comparisons, also chained, ``and or not``, which may be written
``& | ~``, ``tanh exp log abs min max``, ``where(condition, a, b)`` and elements of declared arrays,
``slope[b, h]``. Nothing else is read: a formula cannot run code. ``q``, ``kv``, ``h`` and ``b`` are integers,
and so are their sums, differences, ``abs``, ``min`` and ``max``, and ``where`` under a condition of integers;
products and quotients are floats.

A mask is a condition of integers alone: products are integers, ``//`` and ``%`` round down, and there are
no floats, so no ``/``, ``tanh``, ``exp``, ``log`` and ``inf``.
"""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, NamedTuple

from flashgen.operators.formula import (
    ELEMENTS,
    FUNCTIONS,
    MAX_DEPTH,
    MAX_TEXT,
    MAX_VALUE,
    Node,
    bounds,
    number,
    operation,
)
from flashgen.operators.intervals import Intervals

if TYPE_CHECKING:
    from collections.abc import Mapping


INTEGER_FUNCTIONS = {name: count for name, count in FUNCTIONS.items() if name not in ("tanh", "exp", "log")}
# The largest integer, either way: that and a position still fit in 32 bits.
MAX_INTEGER = 2**30
_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_INTEGER_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_CONNECTIVES = {ast.BitAnd: "and", ast.BitOr: "or"}
_COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


class Language(NamedTuple):
    """What a formula may be made of. ``what`` it is in a message; ``allowed`` lists the words;
    ``is_condition`` is whether it is a condition of integers, and else a float.
    """

    what: str
    arithmetic: Mapping[type, str]
    functions: Mapping[str, int]
    is_condition: bool

    @property
    def allowed(self) -> str:
        """What a message lists."""
        numbers = "integers" if self.is_condition else "numbers, inf"
        signs = " ".join(dict.fromkeys(self.arithmetic.values()))
        return (
            f"names, {numbers}, {signs}, comparisons, and/or/not, array[index, ...], "
            f"{', '.join(self.functions)}()"
        )


SCORE = Language("a score is a number", _ARITHMETIC, FUNCTIONS, is_condition=False)
MASK = Language("a mask is a condition", _INTEGER_ARITHMETIC, INTEGER_FUNCTIONS, is_condition=True)


class FormulaError(ValueError):
    """What is wrong with a formula, and at which of its characters, counted from 0."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


def parse(
    text: str,
    names: Mapping[str, str],
    arrays: Mapping[str, tuple[tuple[str, ...], str]],
    language: Language = SCORE,
) -> Node:
    """The tree of ``text``, a float, or a condition in the language of masks. ``names`` maps names to their
    types, ``arrays`` maps names of arrays to their dimensions and types.

    The text has at most MAX_TEXT characters and nests its operations at most MAX_DEPTH deep. A dimension
    called as one of ``names`` has that name as its index; any other has an integer. Raises
    FormulaError.
    """
    if len(text) > MAX_TEXT:
        raise FormulaError(f"the formula has {len(text):,} characters; at most {MAX_TEXT:,} are allowed", 0)
    too_deep = FormulaError(f"the formula is nested too deeply; at most {MAX_DEPTH} operations deep", 0)
    try:
        root = ast.parse(text, mode="eval").body
        tree = _Parser(names, arrays, language).node(root)
    except FormulaError:
        raise
    except (RecursionError, MemoryError):
        raise too_deep from None
    except (SyntaxError, ValueError) as error:
        column = max(0, (getattr(error, "offset", None) or 1) - 1)
        raise FormulaError(f"{text!r} is not an expression; allowed: {language.allowed}", column) from None
    if tree.depth > MAX_DEPTH:
        raise too_deep
    if (tree.type == "bool") != language.is_condition:
        kind = "a condition" if tree.type == "bool" else "a number"
        raise FormulaError(f"{text!r} is {kind}; {language.what}", 0)
    return tree


class _Parser:
    def __init__(
        self,
        names: Mapping[str, str],
        arrays: Mapping[str, tuple[tuple[str, ...], str]],
        language: Language,
    ) -> None:
        self._names, self._arrays, self._language = names, arrays, language
        self._intervals = Intervals(bounds)

    def node(self, x: ast.expr) -> Node:
        if isinstance(x, ast.Constant) and type(x.value) in (int, float):
            return self._number(x, x.value)
        if isinstance(x, ast.Name):
            return self._name(x)
        if isinstance(x, ast.BinOp) and type(x.op) in self._language.arithmetic:
            op, args = self._language.arithmetic[type(x.op)], self._numbers(x, x.left, x.right)
            if op in ("//", "%"):
                self._check_divisor(x, args[1])
            integral = (op in "+-" or self._language.is_condition) and all(arg.type == "int" for arg in args)
            return self._folded(x, op, args, "int" if integral else "float")
        if isinstance(x, ast.BinOp) and type(x.op) in _CONNECTIVES:
            return Node(_CONNECTIVES[type(x.op)], self._joined(x), None, "bool")
        if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
            args = self._numbers(x, x.operand)
            return self._folded(x, "neg", args, args[0].type)
        if isinstance(x, ast.UnaryOp) and isinstance(x.op, (ast.Not, ast.Invert)):
            return Node("not", (self._condition(x.operand),), None, "bool")
        if isinstance(x, ast.BoolOp):
            op = "and" if isinstance(x.op, ast.And) else "or"
            return Node(op, tuple(self._condition(value) for value in x.values), None, "bool")
        if isinstance(x, ast.Compare) and _COMPARISONS.keys() >= set(map(type, x.ops)):
            sides = self._numbers(x, x.left, *x.comparators)
            pairs = zip(x.ops, sides, sides[1:], strict=False)
            links = tuple(Node(_COMPARISONS[type(op)], (a, b), None, "bool") for op, a, b in pairs)
            return links[0] if len(links) == 1 else Node("and", links, None, "bool")
        if isinstance(x, ast.Call):
            return self._call(x)
        if isinstance(x, ast.Subscript):
            return self._load(x)
        raise self._error(x, f"{ast.unparse(x)!r} is not allowed{_instead(x)}; {self._allowed}")

    @property
    def _allowed(self) -> str:
        return f"allowed: {self._language.allowed}"

    def _number(self, x: ast.expr, value: float) -> Node:
        if self._language.is_condition:
            if not isinstance(value, int) or not -ELEMENTS.high <= value <= ELEMENTS.high:
                raise self._error(x, f"{ast.unparse(x)!r} is not an integer below 2^31; a mask needs one")
            return number(value)
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise self._error(
                x, f"{ast.unparse(x)!r} is above 2^30, the most of an integer; write it as a float"
            )
        if math.isnan(value):
            raise self._error(x, f"{ast.unparse(x)!r} is not a number")
        return number(value)

    def _error(self, x: ast.expr, message: str) -> FormulaError:
        return FormulaError(message, x.col_offset)

    def _name(self, x: ast.Name) -> Node:
        if x.id == "inf" and not self._language.is_condition:
            return number(math.inf)
        if x.id in self._names:
            return Node("name", (), x.id, self._names[x.id])
        if x.id in self._arrays:
            dimensions = ", ".join(self._arrays[x.id][0])
            raise self._error(x, f"{x.id} is an array; write {x.id}[{dimensions}]")
        names = ", ".join(sorted((*self._names, *self._arrays)))
        raise self._error(x, f"unknown name {x.id!r}; known: {names}")

    def _numbers(self, whole: ast.expr, *args: ast.expr) -> tuple[Node, ...]:
        nodes = tuple(self.node(arg) for arg in args)
        for node, arg in zip(nodes, args, strict=True):
            if node.type == "bool":
                raise self._error(
                    arg, f"{ast.unparse(arg)!r} is a condition; {ast.unparse(whole)!r} needs a number"
                )
        return nodes

    def _condition(self, x: ast.expr) -> Node:
        node = self.node(x)
        if node.type != "bool":
            raise self._error(x, f"{ast.unparse(x)!r} is not a condition; compare it with something")
        return node

    def _joined(self, x: ast.BinOp) -> tuple[Node, ...]:
        """Both sides of & or |, which bind more tightly than comparisons."""
        sides = self.node(x.left), self.node(x.right)
        for node, side in zip(sides, (x.left, x.right), strict=True):
            if node.type != "bool":
                raise self._error(
                    side,
                    f"{ast.unparse(side)!r} is not a condition; & and | bind more tightly than comparisons, "
                    "so put each comparison in parentheses",
                )
        return sides

    def _check_divisor(self, x: ast.BinOp, divisor: Node) -> None:
        """That a divisor has one value above 0, in all of a call."""
        is_param = divisor.op == "name" and divisor.value not in ("q", "kv", "h", "b")
        if not is_param and not (divisor.op == "number" and divisor.value > 0):
            raise self._error(
                x.right,
                f"{ast.unparse(x.right)!r} divides; a divisor is an integer above 0, or a number "
                "among the parameters",
            )

    def _checked(self, x: ast.expr, node: Node) -> Node:
        """An operation of a mask, which must fit in 64 bits whatever the arrays hold."""
        if self._language.is_condition and self._intervals.magnitude(node) > MAX_VALUE:
            raise self._error(x, f"{ast.unparse(x)!r} may be too large for a 64-bit integer")
        return node

    def _folded(self, x: ast.expr, op: str, args: tuple[Node, ...], type: str) -> Node:
        """The operation, or its value where it is one of numbers."""
        if not all(arg.op == "number" for arg in args):
            return self._checked(x, Node(op, args, None, type))
        try:
            return self._number(x, operation(op, [arg.value for arg in args], math))
        except (ArithmeticError, ValueError) as error:
            raise self._error(x, f"{ast.unparse(x)!r} cannot be computed: {error}") from None

    def _call(self, x: ast.Call) -> Node:
        name = x.func.id if isinstance(x.func, ast.Name) else ""
        functions = self._language.functions
        if name not in functions or x.keywords or any(isinstance(arg, ast.Starred) for arg in x.args):
            raise self._error(x, f"{ast.unparse(x)!r} is not allowed; {self._allowed}")
        if len(x.args) != functions[name]:
            raise self._error(x, f"{name}() takes {functions[name]} arguments, and {len(x.args)} were given")
        if name == "where":
            condition, args = (self._condition(x.args[0]),), self._numbers(x, *x.args[1:])
        else:
            condition, args = (), self._numbers(x, *x.args)
        keeps = name in ("abs", "min", "max", "where") and all(arg.type == "int" for arg in args)
        # What depends on a float is no integer of the position alone.
        keeps = keeps and all(node.type != "float" for tree in condition for node in tree.walk())
        return self._folded(x, name, (*condition, *args), "int" if keeps else "float")

    def _load(self, x: ast.Subscript) -> Node:
        name = x.value.id if isinstance(x.value, ast.Name) else ""
        if name not in self._arrays:
            arrays = ", ".join(sorted(self._arrays)) or "none is declared"
            raise self._error(x, f"{ast.unparse(x.value)!r} is not a declared array; arrays: {arrays}")
        dimensions, dtype = self._arrays[name]
        subscripts = x.slice.elts if isinstance(x.slice, ast.Tuple) else [x.slice]
        if len(subscripts) != len(dimensions):
            has = f"{name} has {len(dimensions)} dimensions, ({', '.join(dimensions)})"
            raise self._error(x, f"{has}; {len(subscripts)} indices")
        indices = self._numbers(x, *subscripts)
        for dimension, index, at in zip(dimensions, indices, subscripts, strict=True):
            if dimension in self._names and (index.op, index.value) != ("name", dimension):
                raise self._error(at, f"the index of dimension {dimension} of {name} is {dimension} itself")
            if index.type != "int":
                index_text = ast.unparse(at)
                raise self._error(at, f"{index_text!r} is not an integer; an index of {name} must be one")
            if any(node.op == "load" for node in index.walk()):
                raise self._error(at, f"an index of {name} cannot itself be an element of an array")
        return Node("load", indices, name, dtype)


def _instead(x: ast.expr) -> str:
    """What a message adds where a word of another language was meant."""
    if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Div):
        return ": integers are divided by //"
    if isinstance(x, ast.BinOp) and isinstance(x.op, (ast.FloorDiv, ast.Mod)):
        return " in a score"
    return ""
