"""Edits of rendered kernels that hold when comments are reworded and lines are broken elsewhere."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\w+|\s+|.', re.DOTALL)


class Token(NamedTuple):
    text: str
    begin: int
    end: int


def tokens(source: str) -> list[Token]:
    """The tokens of C++ without comments."""
    found = (Token(match[0], match.start(), match.end()) for match in _TOKEN.finditer(source))
    return [token for token in found if not token.text.isspace() and token.text[:2] not in ("//", "/*")]


def replace(source: str, old: str, new: str, name: str) -> str:
    """The source with ``new`` instead of ``old``, whose tokens stand once in it: comments and white space do
    not count.

    AssertionError, with ``name``, where they stand there more or less than once.
    """
    wanted = [token.text for token in tokens(old)]
    assert wanted, f"{name}: {old!r} is no code"
    present = tokens(source)
    texts = [token.text for token in present]
    size = len(wanted)
    places = [
        at
        for at, text in enumerate(texts)
        if text == wanted[0] and texts[at : at + size] == wanted  # the first one alone is quick to compare
    ]
    assert len(places) == 1, _complaint(source, old, name, [present[at].begin for at in places])
    begin, end = present[places[0]].begin, present[places[0] + size - 1].end
    # What follows must not become part of a comment.
    line_end = "\n" if "//" in new.rpartition("\n")[2] else ""
    return f"{source[:begin]}{new}{line_end}{source[end:]}"


def _complaint(source: str, old: str, name: str, places: list[int]) -> str:
    lines = source.splitlines()
    if places:
        why = f"stands {len(places)} times; add a statement beside it"
        numbers = [source.count("\n", 0, place) for place in places]
    else:
        code = [" ".join(token.text for token in tokens(line)) for line in lines]
        asked = " ".join(token.text for token in tokens(old))
        numbers = [code.index(near) for near in difflib.get_close_matches(asked, set(code), n=3, cutoff=0.3)]
        why = "is not in the kernel; the nearest lines are"
    shown = "".join(f"\n  {number + 1}: {lines[number].strip()}" for number in numbers)
    return f"{name}: {old!r} {why}{shown}"
