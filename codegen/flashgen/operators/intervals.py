"""Which values a formula of integers may have where its operands are only known to be between two bounds.

A condition is a `Truth`: whether it can be true and whether it can be false. A block of scores whose
condition cannot be true is empty, and one whose condition cannot be false is full. The answer is always on
the safe side: "can be" where it is not certain. Operands count as independent of each other, but equal
operands of a comparison's two sides cancel: ``q + 5 < kv + q`` is ``5 < kv``.

The bounds are of any kind that an `Algebra` computes with: integers, arrays of them, or C++.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Node(Protocol):
    """An operation of a formula; see `formula.Node`."""

    op: str
    args: tuple[Any, ...]
    value: Any


class Interval(NamedTuple):
    """The integers from ``low`` to ``high``, both included."""

    low: Any
    high: Any


class Truth(NamedTuple):
    """What a condition may come to."""

    can_be_true: Any
    can_be_false: Any


class Algebra:
    """What bounds are computed by; this one is for integers of Python."""

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def subtract(self, a: Any, b: Any) -> Any:
        return a - b

    def multiply(self, a: Any, b: Any) -> Any:
        return a * b

    def divide(self, a: Any, b: Any) -> Any:
        """Rounded down; b is above 0."""
        return a // b

    def minimum(self, a: Any, b: Any) -> Any:
        return min(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return max(a, b)

    def is_below(self, a: Any, b: Any) -> Any:
        return a < b

    def is_equal(self, a: Any, b: Any) -> Any:
        return a == b

    def both(self, a: Any, b: Any) -> Any:
        return a & b

    def either(self, a: Any, b: Any) -> Any:
        return a | b

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        """a where the condition holds, else b."""
        return a if condition else b


PLAIN = Algebra()


class Linear(NamedTuple):
    """A sum of operands, each times its factor, and a constant."""

    factors: dict[Node, int]
    constant: int


def linear(node: Node) -> Linear:
    """A number as a sum of operands that are not sums. Equal operands are there once, and not at all where
    their factors come to 0.
    """
    factors: dict[Node, int] = {}
    constant = _collect(node, 1, factors)
    return Linear({operand: factor for operand, factor in factors.items() if factor}, constant)


def _collect(node: Node, factor: int, factors: dict[Node, int]) -> int:
    """Add ``factor`` times a number to ``factors``; returns the constant that is left."""
    if node.op == "number":
        return factor * node.value
    if node.op == "neg":
        return _collect(node.args[0], -factor, factors)
    if node.op in ("+", "-"):
        first, second = node.args
        sign = -factor if node.op == "-" else factor
        return _collect(first, factor, factors) + _collect(second, sign, factors)
    if node.op == "*":
        for number, other in (node.args, node.args[::-1]):
            if number.op == "number":
                return _collect(other, factor * number.value, factors)
    factors[node] = factors.get(node, 0) + factor
    return 0


def difference(a: Node, b: Node) -> Linear:
    """a - b."""
    first, second = linear(a), linear(b)
    factors = dict(first.factors)
    for operand, factor in second.factors.items():
        factors[operand] = factors.get(operand, 0) - factor
    factors = {operand: factor for operand, factor in factors.items() if factor}
    return Linear(factors, first.constant - second.constant)


class Intervals:
    """The intervals of formulas; ``leaf`` gives the interval of a name or an element of an array."""

    def __init__(self, leaf: Callable[[Node], Interval], algebra: Algebra = PLAIN) -> None:
        self._leaf, self._algebra = leaf, algebra
        self._memo: dict[Node, Any] = {}

    def of(self, node: Node) -> Interval:
        """Which values a number may have."""
        return self._kept(node, self._interval)

    def truth(self, node: Node) -> Truth:
        """What a condition may come to."""
        return self._kept(node, self._truth)

    def magnitude(self, node: Node) -> int:
        """A bound of the size of a number and of all its partial sums, in integers of Python."""
        form = linear(node)
        size = abs(form.constant)
        for operand, factor in form.factors.items():
            low, high = self.of(operand)
            size += abs(factor) * max(abs(low), abs(high))
        return size

    def _kept(self, node: Node, compute: Callable[[Node], Any]) -> Any:
        if node not in self._memo:
            self._memo[node] = compute(node)
        return self._memo[node]

    def _interval(self, node: Node) -> Interval:
        if node.op in ("name", "load"):
            return self._leaf(node)
        algebra = self._algebra
        match node.op:
            case "abs":
                low, high = self.of(node.args[0])
                below = algebra.subtract(0, low)
                nearest = algebra.maximum(low, algebra.subtract(0, high))
                return Interval(algebra.maximum(0, nearest), algebra.maximum(below, high))
            case "min" | "max":
                one, other = map(self.of, node.args)
                extreme = algebra.minimum if node.op == "min" else algebra.maximum
                return Interval(extreme(one.low, other.low), extreme(one.high, other.high))
            case "where":
                return self._choice(node)
            case "//" | "%":
                return self._quotient(node)
            case "*":
                if not any(arg.op == "number" for arg in node.args):
                    return self._product(node)
        return self._sum(linear(node))

    def _sum(self, form: Linear) -> Interval:
        low = high = form.constant
        algebra = self._algebra
        for operand, factor in form.factors.items():
            first, last = self.of(operand) if factor > 0 else reversed(self.of(operand))
            if factor in (1, -1):
                combine = algebra.add if factor > 0 else algebra.subtract
                low, high = combine(low, first), combine(high, last)
            else:
                low = algebra.add(low, algebra.multiply(factor, first))
                high = algebra.add(high, algebra.multiply(factor, last))
        return Interval(low, high)

    def _product(self, node: Node) -> Interval:
        algebra, (one, other) = self._algebra, map(self.of, node.args)
        ends = [algebra.multiply(a, b) for a in one for b in other]
        low = high = ends[0]
        for end in ends[1:]:
            low, high = algebra.minimum(low, end), algebra.maximum(high, end)
        return Interval(low, high)

    def _quotient(self, node: Node) -> Interval:
        """Of a divisor above 0, which every divisor is."""
        algebra, (low, high) = self._algebra, self.of(node.args[0])
        least, most = self.of(node.args[1])
        if least is not most:
            least, most = algebra.maximum(1, least), algebra.maximum(1, most)
        first, last = algebra.divide(low, least), algebra.divide(high, least)
        if node.op == "//":
            if least is most:
                return Interval(first, last)
            return Interval(
                algebra.minimum(first, algebra.divide(low, most)),
                algebra.maximum(last, algebra.divide(high, most)),
            )
        end = algebra.subtract(most, 1)
        if least is not most:
            return Interval(0, end)
        # Between two multiples of the divisor the remainder grows by 1 from each number to the next.
        within, start = algebra.is_equal(first, last), algebra.multiply(first, least)
        return Interval(
            algebra.choose(within, algebra.subtract(low, start), 0),
            algebra.choose(within, algebra.subtract(high, start), end),
        )

    def _choice(self, node: Node) -> Interval:
        algebra, truth = self._algebra, self.truth(node.args[0])
        one, other = map(self.of, node.args[1:])

        def bound(a: Any, b: Any, extreme: Callable[[Any, Any], Any]) -> Any:
            unless = algebra.choose(truth.can_be_true, extreme(a, b), b)
            return algebra.choose(truth.can_be_false, unless, a)

        return Interval(
            bound(*(x.low for x in (one, other)), algebra.minimum),
            bound(*(x.high for x in (one, other)), algebra.maximum),
        )

    def _truth(self, node: Node) -> Truth:
        algebra = self._algebra
        if node.op == "not":
            return Truth(*reversed(self.truth(node.args[0])))
        if node.op in ("and", "or"):
            joined, *others = map(self.truth, node.args)
            true, false = (
                (algebra.both, algebra.either) if node.op == "and" else (algebra.either, algebra.both)
            )
            for other in others:
                joined = Truth(
                    true(joined.can_be_true, other.can_be_true),
                    false(joined.can_be_false, other.can_be_false),
                )
            return joined
        if node.op == "load":
            low, high = self.of(node)
            return Truth(algebra.is_below(0, high), algebra.is_below(low, 1))
        low, high = self._sum(difference(*node.args))
        match node.op:
            case "<":
                return Truth(algebra.is_below(low, 0), algebra.is_below(-1, high))
            case "<=":
                return Truth(algebra.is_below(low, 1), algebra.is_below(0, high))
            case ">":
                return Truth(algebra.is_below(0, high), algebra.is_below(low, 1))
            case ">=":
                return Truth(algebra.is_below(-1, high), algebra.is_below(low, 0))
        meets = algebra.both(algebra.is_below(low, 1), algebra.is_below(-1, high))
        differs = algebra.either(algebra.is_below(low, 0), algebra.is_below(0, high))
        return Truth(meets, differs) if node.op == "==" else Truth(differs, meets)
