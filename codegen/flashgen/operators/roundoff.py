"""How far a kernel's value of a formula may be from the exact one: a running error bound, in float64.

Each operation of fp32 adds its roundoff to what the errors of its arguments come to, to first order and with
a factor of 2 to spare, so that factors may be collected in another order than the formula has. Of the
approximate functions: ex2.approx and rcp.approx have relative errors of 2^-22 and 2^-23, lg2.approx an
absolute one of 2^-22 near 1 and a relative one elsewhere. In fp32 tanh is 1 - 2 / (1 + 2^(2 log2(e) x)),
whose absolute error is below 2^-20; in kernels of 16-bit elements it is tanh.approx, with a relative error of
2^-11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.operators.formula import Node, choose, operation

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
# Of a number, and of an operation, relative to its operands: two units of roundoff.
_ROUNDOFF = 2.0**-23
# An integer that grows with the key is the sum of its value at a block's first key and of the rest, which are
# scaled one by one: keys of a block, at most.
_BLOCK = 256


def evaluate_with_error(
    node: Node, values: Mapping[str, Any], errors: Mapping[str, Any], dtype: str, xp: Any
) -> tuple[Any, Any]:
    """The value of a formula, as `formula.evaluate` gives it, and a bound of its error. For a condition the
    second value says whether the error can change its outcome. ``errors`` has the errors of names; ``dtype``
    is the dtype of the kernel's elements.
    """
    repeated, memo = node.repeated(), {}

    def of(node: Node) -> tuple[Any, Any]:
        if node in memo:
            return memo[node]
        if node.op == "number":
            return node.value, 0.0
        if node.op == "name":
            value = values[node.value]
            return value, errors.get(node.value, 0.0 if node.type == "int" else abs(value) * _ROUNDOFF)
        result = _of_operation(node, [of(arg) for arg in node.args], values, dtype, xp)
        if node in repeated:
            memo[node] = result
        return result

    return of(node)


def _of_operation(
    node: Node, pairs: list[tuple[Any, Any]], values: Mapping[str, Any], dtype: str, xp: Any
) -> tuple[Any, Any]:
    """The value and the error of an operation, from the values and errors of its arguments."""
    args, wrong = [value for value, _ in pairs], [error for _, error in pairs]
    if node.type == "float":  # where an integer becomes a float
        for i, arg in enumerate(node.args):
            if arg.type == "int" and "kv" in arg.reads():
                wrong[i] = _ROUNDOFF * (abs(args[i]) + _BLOCK)
    if node.op == "load":
        return values[node.value](*args), 0.0
    value = operation(node.op, args, xp)
    if node.type == "int":
        return value, 0.0
    if node.op == "tanh":
        return value, wrong[0] + (2.0**-20 if dtype == "fp32" else 2.0**-11 * abs(value) + 2.0**-24)
    return value, _error(node.op, value, args, wrong, xp)


def _error(op: str, value: Any, args: list[Any], wrong: list[Any], xp: Any) -> Any:
    """The error of one operation from the errors of its arguments."""
    if op in _COMPARISONS:
        return abs(args[0] - args[1]) < wrong[0] + wrong[1]
    if op in ("and", "or", "not"):
        return sum(wrong) > 0
    if op == "where":
        sure = choose(xp, args[0], wrong[1], wrong[2])
        both = wrong[1] + wrong[2] + abs(args[1] - args[2])
        return choose(xp, wrong[0], both, sure)
    if op in ("neg", "abs"):
        return wrong[0]
    if op in ("min", "max"):
        return wrong[0] + wrong[1]
    if op in ("+", "-"):
        return wrong[0] + wrong[1] + _ROUNDOFF * (abs(args[0]) + abs(args[1]))
    if op == "*":
        return abs(args[0]) * wrong[1] + (abs(args[1]) + wrong[1]) * wrong[0] + _ROUNDOFF * abs(value)
    if op == "/":
        return (wrong[0] + abs(value) * wrong[1]) / abs(args[1]) * 2 + 4 * _ROUNDOFF * abs(value)
    if op == "exp":
        return value * xp.expm1(wrong[0] + 2.0**-21 + 2 * _ROUNDOFF * abs(args[0])) + 2.0**-126
    return 2 * wrong[0] / abs(args[0]) + 2.0**-21 + 2.0**-21 * abs(value)
