"""Which specs a spec extends, and its operator. Found without a YAML parser, which a spec with a snapshot
does not need.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from flashgen.errors import SpecError
from flashgen.paths import specs_dir

if TYPE_CHECKING:
    from pathlib import Path

_EXTENDS = re.compile(rb"^extends[ \t]*:[ \t]*['\"]?([\w-]+)", re.MULTILINE)
_OPERATOR = re.compile(rb"^operator[ \t]*:[ \t]*['\"]?([\w-]+)", re.MULTILINE)


def whole_text(path: Path, text: bytes) -> bytes:
    """What decides what the spec ``path`` says: its name, which is the family's where a spec that extends
    another names none, its text, and those of what it extends.
    """
    return b"\0".join([os.fsencode(path.stem), text, *(content for _, content in bases(path, text))])


def is_of(operator: str, path: Path, text: bytes) -> bool:
    """Whether the spec ``path`` is of this operator; True as well where its texts do not say."""
    for content in (text, *(content for _, content in bases(path, text))):
        if match := _OPERATOR.search(content):
            return match[1].decode() == operator
    return True


def bases(path: Path, text: bytes) -> list[tuple[Path, bytes]]:
    """What ``text`` extends, what that extends, and so on: files and their contents."""
    found: list[tuple[Path, bytes]] = []
    while b"extends" in text and (match := _EXTENDS.search(text)):  # the first is much faster
        name = match[1].decode()
        line = text.count(b"\n", 0, match.start()) + 1
        beside, shipped = path.with_name(f"{name}.yaml"), specs_dir() / f"{name}.yaml"
        known = {path, *(base for base, _ in found)}
        base = beside if beside.is_file() and beside not in known else shipped
        if base in known:
            raise SpecError(f"{path}:{line}: extends: {name} extends itself")
        try:
            content = base.read_bytes()
        except OSError:
            names = ", ".join(sorted(each.stem for each in specs_dir().glob("*.yaml")))
            raise SpecError(
                f"{path}:{line}: extends: no spec {name} in {path.parent} or {specs_dir()}; "
                f"shipped are {names}"
            ) from None
        found.append((base, content))
        path, text = base, content
    return found
