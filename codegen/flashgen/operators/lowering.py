"""From the formula of a score modification to what a kernel computes.

``score`` becomes the product q k^T times softmax_scale, exp becomes 2^x, log becomes log2. A value is kept as
a x + b, with a and b known before the launch, for as long as that is possible: so products and sums of
scalars come to one constant each, and a multiply-add takes both.

- In kernels of 16-bit elements tanh is the approximate instruction, whose relative error of 2^-11 is that of
  rounding to fp16. In fp32, tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x)).
- A factor of a tanh that is all of the score is left to softmax, which scales its scores anyway; its sign
  goes into the argument.
- x / y = x (1 / y), by the approximate reciprocal, or by a constant.
- Where a sum of integers that grow with the key is added to the score, as a position is, what it comes to
  at a lane's first key is left to the row: the scores get the rest, whose terms are the same in all blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flashgen.operators.formula import Node, number

SCALE = Node("name", (), "softmax_scale")
PRODUCT = Node("name", (), "product")
STEP = Node("float", (Node("name", (), "step", "int"),))
_ONE, _ZERO = number(1.0), number(0.0)
_LOG2_E = math.log2(math.e)
# The scalar constants of a kernel are called so, with a number behind.
CONSTANT = "score_constant_"


class Lowered(NamedTuple):
    """What a kernel computes of a modification. Beside the operations of formulas the body has ``exp2``,
    ``log2``, ``rcp`` (1 / x), ``fma`` (x y + z) and ``float`` (of an integer). It reads ``product``, and
    ``step``, the distance of a key from the lane's first one. ``constants`` are the formulas, over scalars,
    of what it reads by their names. ``offset``, in which kv is the lane's first key, is still to be added to
    all scores of a row and a block; ``factor``, a positive scalar, is still to multiply all scores.
    ``derivative`` is the derivative of the modified score, offset and factor included, with respect to
    ``score``, for kernels that need it; None if it is 1.
    """

    body: Node
    constants: dict[str, Node]
    offset: Node | None
    factor: Node
    derivative: Node | None = None

    @property
    def trees(self) -> tuple[Node, ...]:
        """All that a kernel computes."""
        return tuple(tree for tree in (self.body, self.offset, self.derivative) if tree is not None)


class _Affine(NamedTuple):
    """a x + b, with scalar formulas a and b; b alone where x is None."""

    a: Node
    x: Node | None
    b: Node


def lower(tree: Node, scalars: frozenset[str], approximate: bool, derivative: Node | None = None) -> Lowered:
    """The body and the constants of a formula in which ``scalars`` are known before a launch;
    ``approximate`` is whether tanh may be. ``derivative`` is the formula's derivative, if the kernel needs
    it; equal nodes of both are computed once.
    """
    lowering = _Lowering(scalars, approximate)
    whole, factor = lowering.affine(tree), _ONE
    if whole.b == _ZERO and whole.x in lowering.arguments:
        factor = _host("abs", whole.a)
        sign = _host("sign", whole.a)
        argument = _scaled(lowering.arguments[whole.x], sign)
        signed = Node("tanh", (lowering.value(argument),))
        lowering.has(whole.x, _Affine(sign, signed, _ZERO))
        whole = _plain(signed)
    body, offset = _without_offset(lowering.value(whole))
    slope = None if derivative is None else lowering.value(lowering.affine(derivative))
    slope = None if slope == _ONE else slope
    constants: dict[Node, str] = {}
    for node in (part for tree in (body, offset, slope) if tree for part in tree.walk()):
        if node.op == "constant":
            constants.setdefault(node, f"{CONSTANT}{len(constants)}")

    def named(node: Node) -> Node | None:
        return Node("name", (), constants[node]) if node in constants else None

    return Lowered(
        body.replaced(named),
        {name: node.args[0] for node, name in constants.items()},
        offset and offset.replaced(named),
        factor,
        slope and slope.replaced(named),
    )


class _Lowering:
    def __init__(self, scalars: frozenset[str], approximate: bool) -> None:
        self._scalars, self._approximate = scalars, approximate
        # What the approximate tanh in the tree are of.
        self.arguments: dict[Node | None, _Affine] = {}
        # And values that the kernel already has for some of them.
        self.known: dict[Node, _Affine] = {}
        self._made: dict[Node, _Affine] = {}

    def has(self, tanh: Node, instead: _Affine) -> None:
        """The kernel has ``instead`` for an approximate tanh."""
        self.known[tanh] = instead
        self._made.clear()

    def affine(self, node: Node) -> _Affine:
        """A number, integer or float, as a x + b."""
        if node not in self._made:
            self._made[node] = self._affine(node)
        return self._made[node]

    def _affine(self, node: Node) -> _Affine:
        if self._is_scalar(node):
            return _Affine(_ONE, None, node)
        if node.op == "name" and node.value == "score":
            return _Affine(SCALE, PRODUCT, _ZERO)
        if node.type == "int" and node.op not in ("abs", "min", "max", "where"):
            return _plain(Node("float", (node,)))
        if node.op in ("name", "load"):
            return _plain(node)
        if node.op == "where":
            return _plain(Node("where", (self._condition(node.args[0]), *map(self._lowered, node.args[1:]))))
        args = [self.affine(arg) for arg in node.args]
        match node.op:
            case "+":
                return self._sum(*args)
            case "-":
                return self._sum(args[0], _scaled(args[1], number(-1.0)))
            case "neg":
                return _scaled(args[0], number(-1.0))
            case "*":
                return self._product(*args)
            case "/":
                return self._quotient(*args)
            case "tanh":
                if self._approximate:
                    tanh = Node("tanh", (self.value(args[0]),))
                    self.arguments[tanh] = args[0]
                    return self.known.get(tanh, _plain(tanh))
                power = Node("exp2", (self.value(_scaled(args[0], number(2 * _LOG2_E))),))
                return _Affine(number(-2.0), Node("rcp", (Node("+", (power, _ONE)),)), _ONE)
            case "exp":
                return _plain(Node("exp2", (self.value(_scaled(args[0], number(_LOG2_E))),)))
            case "log":
                return _Affine(number(math.log(2)), Node("log2", (self.value(args[0]),)), _ZERO)
        return _plain(Node(node.op, tuple(self.value(arg) for arg in args)))

    def value(self, it: _Affine) -> Node:
        """The node that computes a x + b."""
        if it.x is None:
            return self._constant(it.b)
        if it.b == _ZERO:
            if it.a == _ONE:
                return it.x
            return Node("neg", (it.x,)) if it.a == number(-1.0) else Node("*", (it.x, self._constant(it.a)))
        offset = self._constant(it.b)
        if it.a == _ONE:
            return Node("+", (it.x, offset))
        if it.a == number(-1.0):
            return Node("-", (offset, it.x))
        return Node("fma", (it.x, self._constant(it.a), offset))

    def _lowered(self, node: Node) -> Node:
        return self.value(self.affine(node))

    def _is_scalar(self, node: Node) -> bool:
        return node.type != "bool" and node.reads() <= self._scalars

    def _condition(self, node: Node) -> Node:
        """A condition; integers are compared as such."""
        if node.op in ("and", "or", "not"):
            return Node(node.op, tuple(map(self._condition, node.args)), None, "bool")
        if all(arg.type == "int" for arg in node.args):
            return node
        return Node(node.op, tuple(map(self._lowered, node.args)), None, "bool")

    def _sum(self, first: _Affine, second: _Affine) -> _Affine:
        offset = _add(first.b, second.b)
        if first.x is None or second.x is None:
            rest = second if first.x is None else first
            return _Affine(rest.a, rest.x, offset)
        if first.a == second.a:
            return _Affine(first.a, Node("+", (first.x, second.x)), offset)
        if second.a not in (_ONE, number(-1.0)):
            first, second = second, first
        # What is left of the sum is a multiply-add, or a sum where neither has a factor.
        other = self.value(second._replace(b=_ZERO))
        if first.a == _ONE:
            return _Affine(_ONE, Node("+", (first.x, other)), offset)
        return _Affine(_ONE, Node("fma", (first.x, self._constant(first.a), other)), offset)

    def _product(self, first: _Affine, second: _Affine) -> _Affine:
        if first.x is None or second.x is None:
            scalar, rest = (first, second) if first.x is None else (second, first)
            return _scaled(rest, scalar.b)
        if first.b == _ZERO and second.b == _ZERO:
            return _Affine(_multiply(first.a, second.a), Node("*", (first.x, second.x)), _ZERO)
        return _plain(Node("*", (self.value(first), self.value(second))))

    def _quotient(self, first: _Affine, second: _Affine) -> _Affine:
        if second.x is None:
            return _scaled(first, _divide(_ONE, second.b))
        return self._product(first, _plain(Node("rcp", (self.value(second),))))

    def _constant(self, node: Node) -> Node:
        """What stands for a scalar formula in the kernel: a number, a parameter, or a constant."""
        if node.op in ("number", "name"):
            return node if node.type == "float" else _float(node)
        return Node("constant", (node,))


def key_slope(node: Node) -> int | None:
    """By how much an integer grows from key to key; None where that is no constant."""
    if node.op in ("number", "name"):
        return int(node.value == "kv")
    slopes = [key_slope(arg) for arg in node.args]
    if node.op == "load" or None in slopes:
        return 0 if "kv" not in node.reads() else None
    if node.op == "neg":
        return -slopes[0]
    if node.op in ("+", "-"):
        return slopes[0] + (slopes[1] if node.op == "+" else -slopes[1])
    return None if any(slopes) else 0


def _without_offset(body: Node) -> tuple[Node, Node | None]:
    """A sum without what grows linearly with the key, as far as that is its value at the first key; and
    that value.
    """
    if body.op not in ("fma", "+"):
        return body, None
    *_, added = body.args
    if "product" in added.reads():
        return body, None
    if body.op == "+" and "kv" not in added.reads():
        first, offset = _without_offset(body.args[0])
        return Node("+", (first, added)), offset
    line = _line(added)
    if line is None or line[1] == _ZERO:
        return body, None
    base, slope = line
    return Node(body.op, (*body.args[:-1], _times(slope, STEP))), base


def _line(node: Node) -> tuple[Node, Node] | None:
    """A node's value at the first key, and its growth from key to key where no key changes that."""
    if "kv" not in node.reads():
        return node, _ZERO
    if node.op == "float":
        slope = key_slope(node.args[0])
        return None if slope is None else (node, number(float(slope)))
    if node.op == "neg":
        line = _line(node.args[0])
        return line and (Node("neg", (line[0],)), _times(number(-1.0), line[1]))
    if node.op in ("+", "-"):
        lines = [_line(arg) for arg in node.args]
        if None in lines:
            return None
        (_, first), (_, second) = lines
        slope = _add(first, second if node.op == "+" else _times(number(-1.0), second))
        return node, slope
    if node.op in ("*", "fma"):
        first, second, *rest = node.args
        changing, factor = (first, second) if "kv" in first.reads() else (second, first)
        lines = [_line(changing), *map(_line, rest)]
        if "kv" in factor.reads() or None in lines:
            return None
        slope = _times(factor, lines[0][1])
        return node, _add(slope, lines[1][1]) if rest else slope
    return None


def _times(a: Node, b: Node) -> Node:
    if a.op != "number" and b == number(-1.0):
        return Node("neg", (a,))
    if b.op != "number" and a == number(-1.0):
        return Node("neg", (b,))
    return _multiply(a, b)


def _host(op: str, node: Node) -> Node:
    """|x| or the sign of x, for a scalar."""
    if node.op == "number":
        return number(abs(node.value) if op == "abs" else math.copysign(1.0, node.value))
    return Node(op, (node,))


def _float(node: Node) -> Node:
    return number(float(node.value)) if node.op == "number" else Node("float", (node,))


def _plain(x: Node) -> _Affine:
    return _Affine(_ONE, x, _ZERO)


def _scaled(it: _Affine, by: Node) -> _Affine:
    return _Affine(it.a if it.x is None else _multiply(it.a, by), it.x, _multiply(it.b, by))


def _multiply(a: Node, b: Node) -> Node:
    if a.op == "number" and b.op == "number":
        return number(float(a.value) * b.value)
    if _ZERO in (a, b):
        return _ZERO
    if a == _ONE or b == _ONE:
        return b if a == _ONE else a
    if a == b and a.op == "sign":
        return _ONE
    if b.op == "/" and b.args[0] == _ONE:
        return Node("/", (a, b.args[1]))
    return Node("*", (a, b))


def _divide(a: Node, b: Node) -> Node:
    if a.op == "number" and b.op == "number" and b.value:
        return number(a.value / b.value)
    return Node("/", (a, b))


def _add(a: Node, b: Node) -> Node:
    if a.op == "number" and b.op == "number":
        return number(float(a.value) + b.value)
    if a == _ZERO or b == _ZERO:
        return b if a == _ZERO else a
    return Node("+", (a, b))
