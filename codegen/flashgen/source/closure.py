"""What a kernel is made of: its template, the templates that this one includes, and its headers, by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import SpecError
from flashgen.host.paths import templates_dir
from flashgen.source import files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.variant import Variant

# Lines that bring in another template, for example //% include "x" and //% from "x" import y. The name of an
# included one may print a value: //% include "mask_${ mask_type }.cuh.j2".
REFERENCE = re.compile(r"^[ \t]*//%[-+]?[ \t]*(?:include|import|from|extends)\b[ \t]*(\"[^\"]*\"|'[^']*')?")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"(flashgen/[^"]+)"[^\n]*\n?', re.MULTILINE)
# Headers that the compiler would look for in the current directory.
_OTHER_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"((?!flashgen/|\$\{)[^"\n]*)"', re.MULTILINE)
PRINTED = re.compile(r"\$\{\s*([\w.]+)\s*\}")
# What most templates lack, so that they need no other search.
_ANY_INCLUDE = re.compile(r"#[ \t]*include\b")


def search_path(variant: Variant) -> tuple[str, ...]:
    """Folders in which a variant's templates are looked for, first match wins.

    The folder ``templates`` beside the spec's own folder, the spec's own folder, then the shipped templates.
    Headers are in the folder ``include`` of any of them.
    """
    return folders_for(variant.spec_dir)


def folders_for(spec_dir: str) -> tuple[str, ...]:
    """`search_path` of the variants of a spec in that folder; "" is a spec without a file."""
    folders = [str(templates_dir())]
    if spec_dir:
        spec_folder = Path(spec_dir)
        folders = [str(spec_folder.parent / "templates"), str(spec_folder), *folders]
    return tuple(dict.fromkeys(folders))


def spec_file(variant: Variant) -> str:
    """The file of a variant's spec."""
    return str(Path(variant.spec_dir, f"{variant.spec}.yaml"))


def closure(template: str, headers: Sequence[str], spec: str, folders: tuple[str, ...]) -> dict[str, str]:
    """Templates and headers that rendering and compiling a kernel may read, by name. ``headers`` are those
    that it names by `source.parts`, ``spec`` is its file.
    """
    texts: dict[str, str] = {}
    included: list[tuple[str, str]] = []
    listings: dict[str, list[str]] = {}
    waiting = [(template, "")]
    while waiting:
        name, at = waiting.pop(0)
        if name in texts:
            continue
        try:
            path = files.find(name, folders)
        except files.Outside as error:
            raise SpecError(f"{at or spec}: {error}") from error
        if path is None:
            raise files.missing(name, spec, folders, at)
        texts[name] = text = files.read(path)
        for number, line in enumerate(text.split("\n"), 1):
            for match in REFERENCE.finditer(line) if "//%" in line else ():  # most lines have none
                here = f"{path}:{number}"
                if match[1] is None:
                    raise files.wrong(here, "the name of an included template must be a plain string")
                names = _names(match[1][1:-1], folders, listings)
                waiting += [(included_name, here) for included_name in names]
        included += included_by(text, str(path))
    included += [(header, spec) for header in headers]
    return texts | headers_of(included, files.including(folders))


def _names(name: str, folders: tuple[str, ...], listings: dict[str, list[str]]) -> list[str]:
    """The templates that an included name may be: one, or all that match where it prints values. ``listings``
    keeps what is in a folder.
    """
    pattern = PRINTED.sub("*", name)
    if pattern == name or files.INSIDE_FOLDER.match(pattern) is None:
        return [name]
    return sorted({match for folder in folders for match in _matches(pattern, folder, listings)}) or [name]


def _matches(pattern: str, folder: str, listings: dict[str, list[str]]) -> list[str]:
    """The paths below a folder that match what is before the first and after the last value of each part.

    A Path globs in ten times the time, and a call whose kernel is on disk waits for this.
    """
    paths = [folder]
    for part in pattern.split("/"):
        first, *others = part.split("*")
        paths = [
            f"{path}/{name}"
            for path in paths
            for name in (_listing(path, listings) if others else [part])
            if name.startswith(first) and name.endswith(others[-1] if others else part)
        ]
    parents = ((path, *path.rsplit("/", 1)) for path in paths)
    return [path[len(folder) + 1 :] for path, parent, name in parents if name in _listing(parent, listings)]


def _listing(folder: str, listings: dict[str, list[str]]) -> list[str]:
    """The names in a folder; none where it is no folder."""
    if folder not in listings:
        try:
            listings[folder] = os.listdir(folder)  # noqa: PTH208 - as in _matches
        except OSError:
            listings[folder] = []
    return listings[folder]


def headers_of(included: list[tuple[str, str]], folders: Sequence[str]) -> dict[str, str]:
    """The texts of headers that are included, and of those that they include; each with where it is."""
    texts: dict[str, str] = {}
    waiting = [*included]
    while waiting:
        name, at = waiting.pop(0)
        if name not in texts:
            path = files.locate(name, folders, at)
            texts[name] = files.read(path)
            waiting += included_by(texts[name], str(path))
    return texts


def included_by(text: str, file: str) -> list[tuple[str, str]]:
    """The headers that ``text`` includes, each with the file and line."""
    if _ANY_INCLUDE.search(text) is None:
        return []
    other = _OTHER_INCLUDE.search(text)
    if other:
        raise files.wrong(
            f"{file}:{files.line_of(other)}",
            f'#include "{other[1]}": in quotes only "flashgen/..." may stand, a header in the folder '
            "include/flashgen/ of the templates or specs, as the compiler would look for another one in the "
            f"current directory; <{other[1]}> is for headers of CUDA",
        )
    if '"flashgen/' not in text:
        return []
    return [(match[1], f"{file}:{files.line_of(match)}") for match in INCLUDE.finditer(text)]
