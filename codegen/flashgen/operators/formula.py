"""The tree of a formula, of a score modification or a mask: its nodes, its text and its value."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from flashgen.host import forks
from flashgen.operators.intervals import Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

FUNCTIONS = {"tanh": 1, "exp": 1, "log": 1, "abs": 1, "min": 2, "max": 2, "where": 3}
# The longest text of a formula, the deepest nesting of its operations, and the most operations of formulas
# that are chained.
MAX_TEXT, MAX_DEPTH, MAX_SIZE = 10_000, 50, 2_500


# Bounds of what a mask computes: of positions, of heads and batch entries, of elements and of numbers; and of
# any value, so that the difference of two fits in 64 bits. Rows and keys of a last tile may be past
# the longest sequence, by less than 2048.
POSITIONS, _COUNTS = Interval(2048 - 2**30, 2**30 - 2048), Interval(0, 2**30)
ELEMENTS = Interval(-(2**31), 2**31 - 1)
MAX_VALUE = 2**61


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


def bounds(leaf: Node) -> Interval:
    """What a name or an element of an array in a mask may be, in any call."""
    if leaf.op == "load":
        return ELEMENTS if leaf.type == "int" else Interval(0, 1)
    if leaf.value in ("q", "kv"):
        return POSITIONS
    return _COUNTS if leaf.value in ("h", "b") else ELEMENTS


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


def loader(dimensions: Sequence[str], array: Any, at: Mapping[str, Any]) -> Callable[..., Any]:
    """A function from the indices in a formula to elements of an array of these dimensions. The index of a
    dimension in ``at`` is taken from there; an index past an end stands for the last element.
    """

    def load(*positions: Any) -> Any:
        index = tuple(
            at[dimension] if dimension in at else clamped(position, extent)
            for dimension, position, extent in zip(dimensions, positions, array.shape, strict=True)
        )
        return array[index]

    return load


def clamped(index: Any, extent: int) -> Any:
    """An index, or an array of them, moved into [0, extent)."""
    if not hasattr(index, "dtype"):
        return min(max(index, 0), extent - 1)
    return index.clip(0, extent - 1)


def choose(xp: Any, condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b."""
    if not hasattr(condition, "dtype"):
        return a if condition else b
    return xp.where(condition, a, b)
