"""The folder of rendered sources, ``generated/``: what belongs in it, how it differs, and bringing it up to
date.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flashgen.errors import SpecError
from flashgen.source.render import RENDERED_BY, render
from flashgen.toolchain import atomic

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from flashgen.families.variant import Variant

_SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class Difference:
    """One file that is not what the specs and templates say.

    ``kind`` is "missing" (it should be there), "stale" (nothing renders it any more) or "changed". ``added``
    and ``removed`` count the lines that rendering it anew would add and remove; ``diff`` is the start of the
    unified diff from the file to what would be rendered.
    """

    file: str
    kind: Literal["missing", "stale", "changed"]
    added: int = 0
    removed: int = 0
    diff: str = ""

    def __str__(self) -> str:
        if self.kind != "changed":
            return f"{self.kind}: {self.file}"
        return f"changed: {self.file} (+{self.added} -{self.removed})\n{self.diff}"


@dataclass(frozen=True, slots=True)
class Written:
    """File names that ``write_generated`` wrote, because they were new or different, and that it removed."""

    changed: tuple[str, ...]
    removed: tuple[str, ...]


def generated_files(variants: Iterable[Variant]) -> dict[str, str]:
    """File name and source of each variant. Raises SpecError when two variants have the same file name."""
    files: dict[str, str] = {}
    for variant in variants:
        if variant.filename in files:
            raise SpecError(f"{variant.spec}: two variants are called {variant.name}")
        files[variant.filename] = render(variant)
    return files


def diff_generated(
    files: Mapping[str, str], folder: str | os.PathLike[str], complete: bool = True
) -> list[Difference]:
    """How ``folder`` differs from ``files``, by file name; empty when it does not.

    With ``complete``, ``files`` is all that the folder should hold, and any other rendered source in it is
    stale.
    """
    folder = Path(folder)
    differences = []
    for name, text in files.items():
        path = folder / name
        if not path.is_file():
            differences.append(Difference(name, "missing"))
        elif path.read_bytes() != text.encode():
            differences.append(_changed(name, path.read_text(encoding="utf-8", errors="replace"), text))
    if complete:
        differences += [Difference(name, "stale") for name in _rendered(folder) if name not in files]
    return sorted(differences, key=lambda difference: difference.file)


def write_generated(
    files: Mapping[str, str], folder: str | os.PathLike[str], complete: bool = False
) -> Written:
    """Write ``files`` into ``folder``, which is made if need be; a file that is right already is not touched.

    Each file appears whole or not at all. With ``complete``, sources that were rendered once and are not in
    ``files`` are removed; files that flashgen did not write stay, and so do copies under names of their own.
    Raises OSError where the folder is not writable.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    differing = [d.file for d in diff_generated(files, folder, complete=False)]
    for name in differing:
        atomic.replace(folder / name, files[name].encode())
    stale = [name for name in _rendered(folder) if name not in files] if complete else []
    for name in stale:
        (folder / name).unlink()
    return Written(tuple(differing), tuple(stale))


def _rendered(folder: Path) -> list[str]:
    """Names of the sources in ``folder`` that carry flashgen's header comment with their own name."""
    paths = sorted(folder.glob("*.cu")) if folder.is_dir() else []
    return [path.name for path in paths if path.read_bytes().startswith(_header(path.stem))]


def _header(name: str) -> bytes:
    return f"// {name}\n//\n// {RENDERED_BY}\n".encode()


def _changed(name: str, old: str, new: str) -> Difference:
    lines = list(
        difflib.unified_diff(
            old.splitlines(), new.splitlines(), f"{name} (now)", f"{name} (rendered)", lineterm="", n=1
        )
    )
    body = lines[2:]
    added = sum(line.startswith("+") for line in body)
    removed = sum(line.startswith("-") for line in body)
    if not body:
        body = ["only line endings or undecodable bytes differ"]
    shown = body[:_SHOWN_LINES]
    if len(body) > len(shown):
        shown.append(f"... {len(body) - len(shown)} more lines")
    return Difference(name, "changed", added, removed, "\n".join(f"  {line}" for line in shown))
