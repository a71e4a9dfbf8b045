"""What a kernel is made of: its template, the templates that this one includes, and its headers, by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import SpecError
from flashgen.host.paths import templates_dir
from flashgen.source import files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.variant import Variant

# Lines that bring in another template, for example //% include "x" and //% from "x" import y. The name of an
# included one may print values, and names a part of a file after a colon:
# //% include "masks_${ target }.cuh.j2:of_${ mask_type }".
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
    read = _read(template, spec, folders)
    included = read.headers + [(header, spec) for header in headers]
    return read.texts | headers_of(included, files.including(folders))


def parts_read(template: str, spec: str, folders: tuple[str, ...]) -> set[str]:
    """The parts of files that rendering may read, as ``file:part``, and of main parts the file alone."""
    return _read(template, spec, folders).parts


class _Read(NamedTuple):
    """What rendering may read: files by name, and parts of them; and the headers that the files include, each
    with the file and line.
    """

    texts: dict[str, str]
    parts: set[str]
    headers: list[tuple[str, str]]


def _read(template: str, spec: str, folders: tuple[str, ...]) -> _Read:
    """A file is read once, however many of its parts are included."""
    read = _Read({}, set(), [])
    paths: dict[str, str] = {}
    parts: dict[str, dict[str, files.Part]] = {}
    listings: dict[str, list[str]] = {}
    waiting = [(template, "")]
    while waiting:
        name, at = waiting.pop(0)
        if name in read.parts:
            continue
        file, _, part = name.partition(":")
        try:
            if file not in parts:
                path = files.find(file, folders)
                if path is None:
                    raise files.missing(file, spec, folders, at)
                text, paths[file] = files.read(path), str(path)
                read.texts[file] = text
                parts[file] = files.parts_of(text, paths[file])
                read.headers.extend(included_by(text, paths[file]))
            matching = files.matching(parts[file], part, paths[file])
        except files.BadName as error:
            raise SpecError(f"{at or spec}: {error}") from error
        for part in matching:
            name = f"{file}:{part}" if part else file
            if name not in read.parts:
                read.parts.add(name)
                waiting += _references(parts[file][part], paths[file], folders, listings)
    return read


def _references(
    part: files.Part, path: str, folders: tuple[str, ...], listings: dict[str, list[str]]
) -> list[tuple[str, str]]:
    """The templates that a part includes, each with the file and line."""
    references = []
    for number, line in enumerate(part.text.split("\n"), part.first_line):
        for match in REFERENCE.finditer(line) if "//%" in line else ():  # most lines have none
            here = f"{path}:{number}"
            if match[1] is None:
                raise files.wrong(here, "the name of an included template must be a plain string")
            references += [(name, here) for name in _names(match[1][1:-1], folders, listings)]
    return references


def _names(name: str, folders: tuple[str, ...], listings: dict[str, list[str]]) -> list[str]:
    """The templates that an included name may be: one, or all that match where it prints values. In the name
    of a part ``*`` remains for a value. ``listings`` keeps what is in a folder.
    """
    pattern, colon, part = PRINTED.sub("*", name).partition(":")
    if "*" not in pattern or files.INSIDE_FOLDER.match(pattern) is None:
        return [pattern + colon + part]
    matches = {match for folder in folders for match in _matches(pattern, folder, listings)}
    return [match + colon + part for match in sorted(matches)] or [name]


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
