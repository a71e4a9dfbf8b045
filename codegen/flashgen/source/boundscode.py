"""Bounds of integers as C++: the algebra of `intervals` whose values are code."""

from __future__ import annotations

from typing import Any

from flashgen.operators.intervals import Algebra


class BoundsCode(Algebra):
    """Bounds that are C++: a number of Python, or the name of a variable of ``lines``."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def put(self, kind: str, code: str) -> str:
        """The name of a variable of this C++ type with this value, a new one where there is none yet."""
        line = f"{kind} {code}"
        if line not in self._names:
            name = f"{'is' if kind == 'bool' else 'bound'}_{len(self._names)}"
            self.lines.append(f"const {kind} {name} = {code};")
            self._names[line] = name
        return self._names[line]

    def _of(self, a: Any, b: Any, python: Any, kind: str, code: str) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return python(a, b)
        return self.put(kind, code.format(a=literal(a), b=literal(b)))

    def add(self, a: Any, b: Any) -> Any:
        return b if a == 0 else a if b == 0 else self._of(a, b, super().add, "int64_t", "{a} + {b}")

    def subtract(self, a: Any, b: Any) -> Any:
        return a if b == 0 else self._of(a, b, super().subtract, "int64_t", "{a} - {b}")

    def multiply(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().multiply, "int64_t", "{a} * {b}")

    def divide(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().divide, "int64_t", "floor_divide<int64_t>({a}, {b})")

    def minimum(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().minimum, "int64_t", "{a} < {b} ? {a} : {b}")

    def maximum(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().maximum, "int64_t", "{a} > {b} ? {a} : {b}")

    def is_below(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().is_below, "bool", "{a} < {b}")

    def is_equal(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().is_equal, "bool", "{a} == {b}")

    def both(self, a: Any, b: Any) -> Any:
        return self._joined(a, b, "&&", neutral=True)

    def either(self, a: Any, b: Any) -> Any:
        return self._joined(a, b, "||", neutral=False)

    def _joined(self, a: Any, b: Any, sign: str, neutral: bool) -> Any:
        for one, other in ((a, b), (b, a)):
            if isinstance(one, bool):
                return other if one == neutral else one
        return self.put("bool", f"{a} {sign} {b}")

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return a if condition else b
        return self.put("int64_t", f"{condition} ? {literal(a)} : {literal(b)}")


def literal(x: Any) -> str:
    """A bound in C++."""
    return x if isinstance(x, str) else f"int64_t({x})"


def condition(x: Any) -> str:
    """A condition in C++."""
    return x if isinstance(x, str) else str(bool(x)).lower()
