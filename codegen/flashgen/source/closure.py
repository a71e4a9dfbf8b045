"""What a kernel is made of: its template, the templates that this one includes, and its headers, by name."""

from __future__ import annotations

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
PRINTED = re.compile(r"\$\{\s*(\w+)\s*\}")


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


def closure(template: str, header: str, spec: str, folders: tuple[str, ...]) -> dict[str, str]:
    """Templates and headers that rendering and compiling a kernel may read, by name. ``spec`` is its file."""
    texts: dict[str, str] = {}
    included: list[tuple[str, str]] = []
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
                waiting += [(included_name, here) for included_name in _names(match[1][1:-1], folders)]
        included += included_by(text, str(path))
    included.append((header, spec))
    return texts | headers_of(included, files.including(folders))


def _names(name: str, folders: tuple[str, ...]) -> list[str]:
    """The templates that an included name may be: one, or all that match where it prints values."""
    pattern = PRINTED.sub("*", name)
    if pattern == name or files.INSIDE_FOLDER.match(pattern) is None:
        return [name]
    names = {path.relative_to(folder).as_posix() for folder in folders for path in Path(folder).glob(pattern)}
    return sorted(names) or [name]


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
