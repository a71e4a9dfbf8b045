"""Integer expressions in spec files, such as ``(block_m + 2 * stages * block_n) * head_dim * element_bytes``.

Allowed are names, integers, strings to compare with, ``+ - * // %``, comparisons, ``and or not``, ``a if c
else b``, ``min`` and ``max``. Strings have no arithmetic. Nothing else is evaluated, so an expression cannot
run code; the templates of a spec can.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType

_FUNCTIONS = {"min": min, "max": max}
_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.UnaryOp,
    ast.USub,
    ast.Not,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.IfExp,
    ast.Load,
)
# The longest text of an expression, and the deepest nesting of its parts.
MAX_TEXT, MAX_DEPTH = 1_000, 50
ALLOWED = "names, integers, + - * // %, comparisons, and/or/not, a if c else b, min(), max()"


class Expression:
    """A checked expression over ``names``; ``reads`` are those that it uses.

    Raises ValueError with a message that says what was found and what is allowed.
    """

    __slots__ = ("_code", "_number", "_numbers", "reads", "text")

    def __init__(self, text: str | int, names: frozenset[str]) -> None:
        self.text = " ".join(str(text).split())
        # Most are numbers, which need no compiler.
        self._number = text if type(text) is int else None
        self._code: CodeType | None = None
        self._numbers: tuple[str, ...] = ()
        if self._number is None:
            self._code, self._numbers = _compile(self.text, names)
        self.reads = names.intersection(self._code.co_names) if self._code else frozenset()

    def __call__(self, values: Mapping[str, str | int]) -> int:
        """The expression's value. Raises ValueError when it is not an integer or cannot be computed."""
        if self._number is not None:
            return self._number
        for name in self._numbers:
            if isinstance(values.get(name), str):
                value = values[name]
                raise ValueError(
                    f"{self.text!r} cannot be computed: {name} is {value!r}, and texts are only compared"
                )
        try:
            result = eval(self._code, {"__builtins__": {}, **_FUNCTIONS}, values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(f"{self.text!r} cannot be computed: {error}") from None
        if type(result) is not int:
            raise ValueError(f"{self.text!r} gives {result!r}; an integer is needed")
        if abs(result) >= 1 << 63:
            raise ValueError(f"{self.text!r} gives an integer of more than 64 bits")
        return result


def _compile(text: str, names: frozenset[str]) -> tuple[CodeType, tuple[str, ...]]:
    """The code of an expression, and the names in it that must be numbers."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"an expression has {len(text):,} characters; at most {MAX_TEXT:,} are allowed")
    too_deep = ValueError(f"{text!r} is nested too deeply; at most {MAX_DEPTH} parts deep")
    try:
        tree = ast.parse(text, mode="eval")
    except (RecursionError, MemoryError):
        raise too_deep from None
    except (SyntaxError, ValueError):
        raise ValueError(f"{text!r} is not an expression; allowed: {ALLOWED}") from None
    if _is_deeper(tree, MAX_DEPTH):
        raise too_deep
    functions = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            callee = node.func
            if (
                not isinstance(callee, ast.Name)
                or callee.id not in _FUNCTIONS
                or node.keywords
                or not node.args
            ):
                raise ValueError(f"{ast.unparse(node)!r} in {text!r} is not allowed; allowed: {ALLOWED}")
            functions.add(callee)
        elif isinstance(node, ast.Constant):
            if type(node.value) not in (int, str):
                raise ValueError(f"{node.value!r} in {text!r} is not an integer; allowed: {ALLOWED}")
        elif not isinstance(node, (ast.Name, *_NODES)):
            raise ValueError(f"{type(node).__name__} in {text!r} is not allowed; allowed: {ALLOWED}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node not in functions and node.id not in names:
            raise ValueError(f"unknown name {node.id!r} in {text!r}; known: {', '.join(sorted(names))}")
    return compile(tree, "<spec>", "eval"), _numbers(tree, text)


def _is_deeper(tree: ast.AST, depth: int) -> bool:
    level = [tree]
    for _ in range(depth + 1):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return bool(level)


def _numbers(tree: ast.Expression, text: str) -> tuple[str, ...]:
    """The names that are operands of arithmetic, or arguments. Raises ValueError for a string there."""
    waiting: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            waiting += [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            waiting.append(node.operand)
        elif isinstance(node, ast.Call):
            waiting += node.args
    operands = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            raise ValueError(f"{text!r} cannot be computed: {node.value!r} is a text, which is only compared")
        if isinstance(node, ast.Name):
            operands.add(node.id)
        elif isinstance(node, ast.IfExp):
            waiting += [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            waiting += node.values
    return tuple(sorted(operands))
