"""The language of score modifications and of masks: an expression, checked, as a tree.

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
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.host import forks
from flashgen.operators.intervals import Interval, Intervals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

FUNCTIONS = {"tanh": 1, "exp": 1, "log": 1, "abs": 1, "min": 2, "max": 2, "where": 3}
INTEGER_FUNCTIONS = {name: count for name, count in FUNCTIONS.items() if name not in ("tanh", "exp", "log")}
# The largest integer, either way: that and a position still fit in 32 bits.
MAX_INTEGER = 2**30
# The longest text of a formula, the deepest nesting of its operations, and the most operations of formulas
# that are chained.
MAX_TEXT, MAX_DEPTH, MAX_SIZE = 10_000, 50, 2_500
_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_INTEGER_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_CONNECTIVES = {ast.BitAnd: "and", ast.BitOr: "or"}
_COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


# Bounds of what a mask computes: of positions, of heads and batch entries, of elements and of numbers; and of
# any value, so that the difference of two fits in 64 bits. Rows and keys of a last tile may be past
# the longest sequence, by less than 2048.
POSITIONS, _COUNTS = Interval(2048 - 2**30, 2**30 - 2048), Interval(0, 2**30)
ELEMENTS = Interval(-(2**31), 2**31 - 1)
MAX_VALUE = 2**61


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


_nodes: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()
_making = forks.guard()


class Node:
    """An operation on its arguments; never changed. ``op`` is ``number``, ``name``, ``load`` (whose arguments
    are indices), an operator, or a function; ``value`` is the number, or the name of what is read. ``type``
    is ``int``, ``float`` or ``bool``.

    Equal nodes are one object. What a formula, or its derivative, repeats is there once, and a function that
    remembers what it made of each node takes time for the distinct ones alone. ``size`` counts operations as
    often as the formula written out has them, and ``depth`` how deeply they are nested.
    """

    __slots__ = ("__weakref__", "_reads", "_repeated", "args", "depth", "op", "size", "type", "value")

    def __new__(
        cls,
        op: str,
        args: tuple[Node, ...] = (),
        value: float | str | None = None,
        type: str = "float",
    ) -> Node:
        key = (op, args, value, type)
        with _making:
            node = _nodes.get(key)
            if node is None:
                node = super().__new__(cls)
                node.op, node.args, node.value, node.type = key
                node.size = 1 + sum([arg.size for arg in args])
                node.depth = 1 + max([arg.depth for arg in args], default=0)
                names = {str(value)} if op in ("name", "load") else ()
                node._reads = frozenset().union(names, *[arg._reads for arg in args])
                node._repeated = None
                _nodes[key] = node
        return node

    def __reduce__(self) -> tuple[Any, ...]:
        return Node, (self.op, self.args, self.value, self.type)

    def __repr__(self) -> str:
        return f"Node({short_text(self)})"

    def walk(self) -> Iterator[Node]:
        """This node and all below it, each once, in the order in which the formula has them."""
        seen, waiting = set(), [self]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                yield node
                waiting += reversed(node.args)

    def reads(self) -> frozenset[str]:
        """The names and arrays in it."""
        return self._reads

    def repeated(self) -> frozenset[Node]:
        """The operations that several others, or one twice, take as arguments."""
        if self._repeated is None:
            uses = Counter(arg for node in self.walk() for arg in node.args if arg.args)
            self._repeated = frozenset(node for node, times in uses.items() if times > 1)
        return self._repeated

    def replaced(self, change: Callable[[Node], Node | None]) -> Node:
        """The tree with each node for which ``change`` gives another in its place, the topmost first."""
        memo: dict[Node, Node] = {}

        def of(node: Node) -> Node:
            if node not in memo:
                other = change(node)
                if other is None:
                    other = Node(node.op, tuple([of(arg) for arg in node.args]), node.value, node.type)
                memo[node] = other
            return memo[node]

        return of(self)


def number(value: float) -> Node:
    if value == 0:
        value = type(value)()  # -0.0 is equal to 0.0
    return Node("number", (), value, "int" if isinstance(value, int) else "float")


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
                raise self._error(x, f"{ast.unparse(x)!r} is no integer below 2^31, as a mask needs")
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


def bounds(leaf: Node) -> Interval:
    """What a name or an element of an array in a mask may be, in any call."""
    if leaf.op == "load":
        return ELEMENTS
    if leaf.value in ("q", "kv"):
        return POSITIONS
    return _COUNTS if leaf.value in ("h", "b") else ELEMENTS


def _instead(x: ast.expr) -> str:
    """What a message adds where a word of another language was meant."""
    if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Div):
        return ": integers are divided by //"
    if isinstance(x, ast.BinOp) and isinstance(x.op, (ast.FloorDiv, ast.Mod)):
        return " in a score"
    return ""


def text(node: Node) -> str:
    """A formula as it is written."""
    if node.op == "number":
        return repr(node.value)
    if node.op == "name":
        return str(node.value)
    if node.op == "load":
        return f"{node.value}[{', '.join(map(text, node.args))}]"
    if node.op == "neg":
        return f"-{_grouped(node.args[0])}"
    if node.op == "not":
        return f"not {_grouped(node.args[0])}"
    if node.op.isalpha() and node.op not in ("and", "or"):
        return f"{node.op}({', '.join(map(text, node.args))})"
    return f" {node.op} ".join(map(_grouped, node.args))


def short_text(node: Node) -> str:
    """A formula as it is written, or how long it is where a derivative repeats too much to be written out."""
    return text(node) if node.size <= MAX_SIZE else f"a formula of {node.size:,} operations"


def _grouped(node: Node) -> str:
    simple = node.op in ("number", "name", "load", *FUNCTIONS)
    return text(node) if simple else f"({text(node)})"


def evaluate(node: Node, values: Mapping[str, Any], xp: Any) -> Any:
    """The value of a formula. ``values`` has a number or an array of the library ``xp`` for each name, which
    broadcast, and a function of the indices for each declared array.
    """
    repeated, memo = node.repeated(), {}

    def of(node: Node) -> Any:
        if node.op == "number":
            return node.value
        if node.op == "name":
            return values[node.value]
        if node in memo:
            return memo[node]
        args = [of(arg) for arg in node.args]
        value = values[node.value](*args) if node.op == "load" else operation(node.op, args, xp)
        if node in repeated:
            memo[node] = value
        return value

    return of(node)


def operation(op: str, args: list[Any], xp: Any) -> Any:
    """One operation on numbers or arrays of the library ``xp``; ``math`` is one for plain numbers."""
    match op:
        case "+":
            return args[0] + args[1]
        case "-":
            return args[0] - args[1]
        case "*":
            return args[0] * args[1]
        case "/":
            return args[0] / args[1]
        case "//":
            return args[0] // args[1]
        case "%":
            return args[0] % args[1]
        case "neg":
            return -args[0]
        case "abs":
            return abs(args[0])
        case "sign":
            return math.copysign(1.0, args[0])
        case "min":
            return choose(xp, args[0] < args[1], args[0], args[1])
        case "max":
            return choose(xp, args[0] < args[1], args[1], args[0])
        case "where":
            return choose(xp, *args)
        case "tanh" | "exp" | "log":
            return getattr(xp, op)(args[0])
        case "<":
            return args[0] < args[1]
        case "<=":
            return args[0] <= args[1]
        case ">":
            return args[0] > args[1]
        case ">=":
            return args[0] >= args[1]
        case "==":
            return args[0] == args[1]
        case "!=":
            return args[0] != args[1]
        case "not":
            return ~args[0] if hasattr(args[0], "dtype") else not args[0]
    combined = args[0]
    for arg in args[1:]:
        combined = combined & arg if op == "and" else combined | arg
    return combined


def choose(xp: Any, condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b."""
    if not hasattr(condition, "dtype"):
        return a if condition else b
    return xp.where(condition, a, b)
