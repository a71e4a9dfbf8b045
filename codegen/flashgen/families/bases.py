"""Which specs a spec extends, and its operator. Found without a YAML parser, which a spec with a snapshot
does not need.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from flashgen.errors import SpecError
from flashgen.host.paths import read_file, specs_dir

if TYPE_CHECKING:
    from pathlib import Path

# Files of a spec folder that have no family: score modifications (``scores``), and masks (``masks``).
SCORES_FILE, MASKS_FILE = "scores.yaml", "masks.yaml"
NO_FAMILIES = (SCORES_FILE, MASKS_FILE)
MAX_BYTES = 1_000_000  # of a file of a spec folder; the largest shipped spec has some 20,000
_EXTENDS = re.compile(rb"^extends[ \t]*:[ \t]*['\"]?([\w-]+)", re.MULTILINE)
_OPERATOR = re.compile(rb"^operator[ \t]*:[ \t]*['\"]?([\w-]+)", re.MULTILINE)
_LENGTHS = re.compile(rb"^['\"]?lengths['\"]?[ \t]*:[ \t]*['\"]?([\w-]+)", re.MULTILINE)


def whole_text(path: Path, text: bytes) -> bytes:
    """The bytes that decide the content of the spec ``path``: its name (a spec that extends another and names
    no family takes it as the family), its text, and the texts that it extends.
    """
    return b"\0".join([os.fsencode(path.stem), text, *(content for _, content in bases(path, text))])


def is_of(operator: str, path: Path, text: bytes, has_lengths: bool | None = None) -> bool:
    """Whether the spec ``path`` is of this operator, for calls with or without lengths, or (None) for either;
    True as well where its texts do not say.
    """
    texts = [text, *(content for _, content in bases(path, text))]
    named = _first(_OPERATOR, texts)
    if named is None:
        return True
    return named == operator and has_lengths in (None, _first(_LENGTHS, texts) == "device")


def _first(pattern: re.Pattern[bytes], texts: list[bytes]) -> str | None:
    """The value of a key in the first of these texts that has it."""
    matches = (pattern.search(text) for text in texts)
    return next((match[1].decode() for match in matches if match), None)


def bases(path: Path, text: bytes) -> list[tuple[Path, bytes]]:
    """What ``text`` extends, what that extends, and so on: files and their contents."""
    files: list[tuple[Path, bytes]] = []
    chain = [path]
    while b"extends" in text and (match := _EXTENDS.search(text)):  # the first is much faster
        name = match[1].decode()
        line = text.count(b"\n", 0, match.start()) + 1
        beside, shipped = path.with_name(f"{name}.yaml"), specs_dir() / f"{name}.yaml"
        # The name of the file itself means the shipped one, which it replaces.
        base = beside if beside.is_file() and beside != path else shipped
        if base in chain:
            circle = ", ".join(file.stem for file in (*chain[chain.index(base) :], base))
            why = f"{name} extends itself: {circle}; name another spec, or leave it out"
            raise SpecError(f"{path}:{line}: extends: {why}")
        content = None
        if base.name not in NO_FAMILIES:
            with contextlib.suppress(OSError):
                content = read_file(base, MAX_BYTES)
        if content is None:
            names = sorted(file.stem for file in specs_dir().glob("*.yaml") if file.name not in NO_FAMILIES)
            folder = "" if beside == path else f"{path.parent} or "
            why = f"no spec {name} in {folder}{specs_dir()}; shipped are {', '.join(names)}"
            raise SpecError(f"{path}:{line}: extends: {why}")
        chain.append(base)
        files.append((base, content))
        path, text = base, content
    return files
