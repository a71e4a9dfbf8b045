"""Pieces of C++ that masks by a line and score modifications are both written with."""

from __future__ import annotations

import re


def function(name: str, types: dict[str, str], body: list[str]) -> str:
    """A function; arguments that it does not read have no name."""
    opening = wrapped(name, arguments(types, used(types, "\n".join(body))))
    return "\n".join((*opening, *(f"    {line}" for line in body), "}"))


def used(types: dict[str, str], code: str) -> dict[str, bool]:
    return {name: bool(re.search(rf"\b{name}\b", code)) for name in types}


def arguments(types: dict[str, str], uses: dict[str, bool]) -> str:
    return ", ".join(f"{type} {name}" if uses[name] else type for name, type in types.items())


def wrapped(name: str, arguments: str) -> list[str]:
    """The opening line of a function, in two where it is long."""
    opening = f"__device__ __forceinline__ {name}({arguments}) {{"
    if len(opening) <= 132:
        return [opening]
    split = opening.rindex(", ", 0, 132) + 1
    return [opening[:split], " " * (opening.index("(") + 1) + opening[split + 1 :]]


def bare(code: str) -> str:
    """Without parentheses around all of it."""
    if not (code.startswith("(") and code.endswith(")")):
        return code
    depth = 0
    for place, character in enumerate(code):
        depth += (character == "(") - (character == ")")
        if depth == 0 and place < len(code) - 1:
            return code
    return code[1:-1]


def fresh_name(name: str, taken: list[str]) -> str:
    """``name``, or with a number after it where it is taken."""
    count, fresh = 1, name
    while fresh in taken:
        count += 1
        fresh = f"{name}_{count}"
    return fresh
