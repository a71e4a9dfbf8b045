"""The derivative of a score modification with respect to ``score``, or to an array that it reads:
reverse-mode differentiation of its tree.

From the root down, each node passes the derivative of the result with respect to itself on to its arguments.
Where two branches meet, as at ``abs(score)`` with score 0, the derivative follows the branch that the formula
takes. The other branch has no effect, even if it is infinite or NaN.
"""

from __future__ import annotations

from functools import lru_cache

from flashgen.operators.formula import Node, number

_ZERO, _ONE = number(0.0), number(1.0)


@lru_cache(maxsize=64)
def derivative(tree: Node, wrt: str = "score") -> Node:
    """The tree of d(tree) / d(wrt): ``wrt`` is ``score``, or an array, of which each element that is read
    changes alike.
    """
    return _below(tree, _ONE, wrt, {})


def _below(node: Node, outer: Node, wrt: str, memo: dict[tuple[Node, Node], Node]) -> Node:
    """What a change of ``wrt`` adds to the result by way of ``node``, of which it changes by ``outer``.
    ``memo`` has the results so far.
    """
    if (node, outer) not in memo:
        memo[node, outer] = _contribution(node, outer, wrt, memo)
    return memo[node, outer]


def _contribution(node: Node, outer: Node, wrt: str, memo: dict[tuple[Node, Node], Node]) -> Node:
    if node.op in ("name", "load"):
        return outer if node.value == wrt else _ZERO
    if node.op in ("where", "min", "max") and wrt in node.reads():
        condition, a, b = _branches(node)
        return _where(condition, _below(a, outer, wrt, memo), _below(b, outer, wrt, memo))
    total = _ZERO
    for position, arg in enumerate(node.args):
        if arg.type != "bool" and wrt in arg.reads():
            total = _sum(total, _below(arg, _passed_on(node, position, outer), wrt, memo))
    return total


def _passed_on(node: Node, position: int, outer: Node) -> Node:
    """What the result changes by, for a change of an argument of ``node``."""
    args = node.args
    match node.op:
        case "+":
            return outer
        case "-":
            return outer if position == 0 else _negative(outer)
        case "neg":
            return _negative(outer)
        case "*":
            return _product(outer, args[1 - position])
        case "/" if position == 0:
            return _quotient(outer, args[1])
        case "/":
            return _negative(_quotient(_product(outer, node), args[1]))
        case "tanh":
            return _product(outer, Node("-", (_ONE, Node("*", (node, node)))))
        case "exp":
            return _product(outer, node)
        case "log":
            return _quotient(outer, args[0])
        case "abs":
            return _where(Node("<", (args[0], _ZERO), None, "bool"), _negative(outer), outer)
    raise AssertionError(f"{node.op} has no derivative")


def _branches(node: Node) -> tuple[Node, Node, Node]:
    """A choice as the condition under which it is the first of two values, and these."""
    if node.op == "where":
        return node.args
    first, second = node.args
    less = Node("<", node.args, None, "bool")  # as `formula.operation` has them
    return (less, first, second) if node.op == "min" else (less, second, first)


def _sum(a: Node, b: Node) -> Node:
    if a == _ZERO:
        return b
    return a if b == _ZERO else Node("+", (a, b))


def _product(a: Node, b: Node) -> Node:
    return b if a == _ONE else Node("*", (a, b))


def _quotient(a: Node, b: Node) -> Node:
    # As of softcap, which divides by its cap and multiplies by it.
    if a.op == "*" and a.args[0] == b:
        return a.args[1]
    return Node("/", (a, b))


def _negative(a: Node) -> Node:
    return number(-a.value) if a.op == "number" else Node("neg", (a,))


def _where(condition: Node, a: Node, b: Node) -> Node:
    return a if a == b else Node("where", (condition, a, b))
