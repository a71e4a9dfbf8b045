"""Files of templates and headers: where they are, what they hold, and what is wrong with them."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import FlashgenError, InternalError, SpecError
from flashgen.host.paths import INSIDE, specs_dir, templates_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

INSIDE_FOLDER = re.compile(INSIDE)
# The line that begins a part of a template: //: name, and a comment if need be.
_PART_LINE = re.compile(r"^[ \t]*//:(.*)\n?", re.MULTILINE)
_PART_NAME = re.compile(r"[ \t]+(\w+)[ \t]*(?://#.*)?")
_ONLY_COMMENTS = re.compile(r"(?:[ \t]*(?://#.*)?\n)*")


class BadName(SpecError):
    """A name leads out of the folder that it is looked for in, or names a part that its file lacks. Who has
    the name adds its file and line.
    """


class Part(NamedTuple):
    """The text of one part of a template, and the number of its first line in the file."""

    first_line: int
    text: str


def parts_of(text: str, file: str) -> dict[str, Part]:
    """The parts of a template, by name. The main part is the text before the first ``//: name``, and its name
    is "". A file of parts alone has none: only comments come before its first part.

    The blank line before a ``//: name`` belongs to no part. Raises SpecError, or InternalError for a shipped
    template, for a name that is wrong or occurs twice.
    """
    begins = [*_PART_LINE.finditer(text)]
    if not begins:
        return {"": Part(1, text)}
    main = text[: begins[0].start()]
    parts = {} if _ONLY_COMMENTS.fullmatch(main) else {"": Part(1, _without_blank_line(main))}
    for begin, after in zip(begins, [*begins[1:], None], strict=True):
        name, line = _PART_NAME.fullmatch(begin[1]), line_of(begin)
        if name is None:
            raise wrong(f"{file}:{line}", f"{begin[0].strip()!r} begins no part; write //: and a name")
        if name[1] in parts:
            first = parts[name[1]].first_line - 1
            raise wrong(f"{file}:{line}", f"a second part {name[1]}; the first one begins in line {first}")
        body = _without_blank_line(text[begin.end() : after.start()]) if after else text[begin.end() :]
        parts[name[1]] = Part(line + 1, body)
    return parts


def _without_blank_line(text: str) -> str:
    return text[:-1] if text.endswith("\n\n") or text == "\n" else text


def matching(parts: dict[str, Part], pattern: str, file: str) -> list[str]:
    """The parts that have this name, in which ``*`` is any text. Raises BadName if the file has none."""
    if pattern in parts:
        return [pattern]
    names = fnmatch.filter(parts, pattern) if "*" in pattern else []
    if not names:
        what = f"no part {pattern}" if pattern else "no text before its first part"
        raise BadName(f"{file} has {what}; its parts are {', '.join(filter(None, parts)) or 'none'}")
    return names


def line_of(match: re.Match[str]) -> int:
    # A match may begin with the blank lines before it.
    start = match.start() + len(match[0]) - len(match[0].lstrip())
    return match.string.count("\n", 0, start) + 1


def including(folders: Sequence[str]) -> tuple[str, ...]:
    """The folders ``include`` of these folders, of those that have one."""
    includes = []
    for folder in folders:
        path = Path(folder, "include")
        if path.is_dir():
            _check_link("include", folder)
            includes.append(str(path))
    return tuple(includes)


def include_folders(include_dirs: Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    return (str(templates_dir() / "include"),) if include_dirs is None else tuple(map(str, include_dirs))


def find(name: str, folders: Sequence[str]) -> Path | None:
    """The file in the first folder that has the name; None if none does. Raises SpecError where that is no
    file, and where the name, or a link, leads out of the folder.
    """
    if INSIDE_FOLDER.match(name) is None:
        raise BadName(f"{name!r} is not the name of a file below the folders {', '.join(folders)}")
    for folder in folders:
        path = Path(folder, name)
        if path.is_file():
            _check_link(name, folder)
            return path
        if os.path.lexists(path):
            what = "a link to nothing" if path.is_symlink() and not path.exists() else "no file"
            raise SpecError(f"{path} is {what}; put a file there, or remove it")
    return None


def _check_link(name: str, folder: str) -> None:
    """Raise SpecError where a link in a user's folder leads out of it. Installers may link the shipped
    files.
    """
    path = folder
    for part in name.split("/"):
        path += f"/{part}"
        if os.path.islink(path):  # noqa: PTH114 - a Path takes longer, and a kernel on disk waits for this
            real = os.path.realpath(Path(folder, name))
            inside = Path(real).is_relative_to(os.path.realpath(folder))
            if not inside and Path(folder) not in (templates_dir(), templates_dir() / "include"):
                raise BadName(f"{path} is a link out of {folder}; put the file itself there")


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error


def locate(name: str, folders: Sequence[str], at: str) -> Path:
    try:
        path = find(name, folders)
    except BadName as error:
        raise SpecError(f"{at}: {error}") from error
    if path is None:
        raise wrong(at, f'#include "{name}": no such header; searched {", ".join(folders) or "no folder"}')
    return path


def wrong(where: str, message: str) -> FlashgenError:
    """What is wrong with a template or a header, at its file and line: the user's mistake where the file is
    theirs. ``where`` is no path for what is in no file.
    """
    shipped = any(Path(where).is_relative_to(folder) for folder in (templates_dir(), specs_dir()))
    is_users = Path(where).is_absolute() and not shipped
    return (SpecError if is_users else InternalError)(f"{where}: {message}")


def missing(name: str, spec: str, folders: Sequence[str], at: str) -> SpecError:
    """``at`` is the file and line that ask for the template, "" where the spec's own file does."""
    searched = ", ".join(folders)
    if at:
        return SpecError(f"{at}: template {name} is in none of {searched}")
    return SpecError(f"{_spec_line(spec, name)}: template: {name} is in none of {searched}")


def _spec_line(spec: str, template: str) -> str:
    """``file:line`` of the key of a spec that names a template; the file alone where a base of it does."""
    named = rf"""^[^#\n]*\btemplate:[ \t]*["']?{re.escape(template)}(?=["'\s,}}]|$)"""
    match = re.search(named, read(Path(spec)), re.MULTILINE) if Path(spec).is_file() else None
    return f"{spec}:{line_of(match)}" if match else spec


def template_line(error: BaseException, folders: Sequence[str]) -> str:
    """``file:line`` of the innermost template frame of an error raised while rendering; "" outside of any."""
    where, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if any(file.startswith(folder) for folder in folders):
            where = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
