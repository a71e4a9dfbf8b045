"""The order of a generated kernel: the algorithm first, the functions that it calls after it.

A template writes each device function once, before its first use. The filter `from_the_top` brings the text
into the order in which a kernel is read: constants and types, a prototype of each function, the roles and the
kernel, then the functions and the assertions. A prototype has the first sentence of the function's comment,
and the function has the comment if it says more. The order does not change the machine code.

A section begins with a line ``// ==== name: what it is`` and ends with a line ``// ====``. Its prototypes
stay together, and so do its functions, both under its heading.

`sections` cuts such a text into the parts that a reader looks for.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

_WIDTH = 140  # of a line with a prototype
_MARK = re.compile("\x04[^\x05]*\x05")  # where a line is from, at its end (`source.render`)
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|//.*')
_NAME = re.compile(r"(\w+)\(")
_SENTENCE = re.compile(r"(.*?\S)[.:](?= |$)")
_SECTION = "// ===="
_DEFAULT = re.compile(r" = (?:[^,()]|\([^()]*\))+(?=[,)])")
# Text that neither the simulator nor another compiler than CUDA's compiles: wgmma, in PTX.
_PTX_BEGIN, _PTX_END = "#ifndef FLASHGEN_SIMULATOR", "#endif"


_SEAM = re.compile(r"^// ==== (\w+)\b.*\n(?:.*\n)*?// ====\n", re.MULTILINE)

# The parts of a kernel's file in their order, and what each has. Every line is in one of them.
SECTIONS: dict[str, str] = {
    "header": "what the kernel is, and what it was rendered from",
    "map": "what it computes; its warps, shared memory and barriers",
    "constants": "sizes of the tile, offsets in shared memory",
    "params": "the parameter struct",
    "verbs": "types, and a prototype of each function",
    "roles": "the algorithm: what each warp does, and the kernel",
    "definitions": "the functions that the roles call",
    "assertions": "what the launcher and the tile guarantee",
}


@dataclass(frozen=True)
class Section:
    """Lines of a kernel's source: one of `SECTIONS`, its first line counted from 1, and its text."""

    name: str
    first_line: int
    text: str


@dataclass
class _Unit:
    """A declaration at namespace scope with the comment before it, or a blank line."""

    comment: list[str]
    lines: list[str]


def from_the_top(text: str, *roles: str) -> str:
    """The text of a kernel in reading order. ``roles`` are functions that stay before the kernel."""
    first: list[str] = []
    algorithm: list[str] = []
    functions: list[str] = []
    assertions: list[str] = []
    part = functions  # or the functions of a section
    heading = ""
    last_prototype = None  # its end in `first`
    for unit in _units(_marked(text)):
        whole = [*unit.comment, *unit.lines]
        begin = _bare(unit.lines[0]) if unit.lines else ""
        signature = _signature(unit)
        mark = unit.comment[0] if unit.comment and not begin else ""
        if _bare(mark) == _SECTION:
            if part:
                functions += ["", heading, *part, mark]
            part = functions
            first += whole
        elif mark.startswith(_SECTION):
            heading, part = mark, []
            first += whole
        elif signature is not None and ("__global__" in signature or _name(signature) in roles):
            algorithm += ["", *whole]
        elif signature is not None:
            if last_prototype is not None and not any(first[last_prototype:]):
                del first[last_prototype:]  # the blank lines between two prototypes
            first += _prototype(signature, unit)
            last_prototype = len(first)
            part += ["", *_longer_comment(unit), *_without_defaults(unit)]
        elif begin.startswith(_PTX_BEGIN):
            part += ["", *whole]
        elif begin.startswith("static_assert("):
            assertions += whole
        else:
            first += whole
    if part is not functions:
        raise ValueError(f"the section {_bare(heading)!r} has no end, a line {_SECTION!r}")
    return "\n".join([*first, *algorithm, *functions, "", *assertions]) + "\n"


def sections(source: str) -> tuple[Section, ...]:
    """The parts of a rendered kernel, which together are its text, as a reader looks for them.

    A kernel whose template does not use `from_the_top` may have several parts of one name.
    """
    lines = source.splitlines(keepends=True)
    starts = [("header", 0)]
    at, after_kernel = 0, False
    for unit in _units(source.splitlines()):
        name = _section(unit, starts[-1][0], after_kernel) if at else "header"
        if name != starts[-1][0]:
            starts.append((name, at))
        after_kernel = after_kernel or "__global__" in (_signature(unit) or "")
        at += len(unit.comment) + len(unit.lines)
    ends = [*(first for _, first in starts[1:]), len(lines)]
    return tuple(
        Section(name, first + 1, "".join(lines[first:end]))
        for (name, first), end in zip(starts, ends, strict=True)
    )


def seams(source: str) -> tuple[Section, ...]:
    """The parts of a rendered kernel that begin with a line ``// ==== name: what it is`` and end with a line
    ``// ====``, which are both in the text. A seam may have several parts: of prototypes and of functions.
    """
    return tuple(
        Section(match[1], source.count("\n", 0, match.start()) + 1, match[0])
        for match in _SEAM.finditer(source)
    )


def _section(unit: _Unit, previous: str, after_kernel: bool) -> str:
    """The section of a unit that comes after one of ``previous``."""
    begin = unit.lines[0] if unit.lines else ""
    blank = not begin and not unit.comment
    if blank or (previous == "header" and begin.startswith("#include")):
        return previous
    if not begin and previous in ("header", "map"):
        return "map"
    if begin.startswith("static_assert("):
        return "assertions"
    if after_kernel:
        return "definitions"
    if _signature(unit) is not None:
        return "roles"
    if begin.startswith("struct Params {"):
        return "params"
    following = {"header": "constants", "map": "constants", "params": "verbs", "assertions": "constants"}
    return following.get(previous, previous)


def _marked(text: str) -> list[str]:
    """The lines, with a mark on each line where the renderer marked the last line of a value of several."""
    if "\x04" not in text:
        return text.splitlines()
    lines, mark = [], ""
    for line in reversed(text.splitlines()):
        match = _MARK.search(line)
        if match and match[0] == line:  # a value that ends with a line break
            mark = line
            lines.append("")
        elif match or not line:
            mark = match[0] if match else ""
            lines.append(line)
        else:
            lines.append(line + mark)
    return lines[::-1]


def _units(text: list[str]) -> list[_Unit]:
    units: list[_Unit] = []
    unit = _Unit([], [])
    depth = 0  # braces that are open
    for line in text:
        if not unit.lines and line.startswith("//"):
            unit.comment.append(line)
            continue
        unit.lines.append(line)
        if depth and "{" not in line and "}" not in line:
            continue  # most lines are within a function
        begin, code = unit.lines[0], _code(line)
        if begin.startswith(_PTX_BEGIN):
            complete = code.startswith(_PTX_END)
        else:
            depth += code.count("{") - code.count("}")
            complete = begin.startswith("#") or not begin or (not depth and code.endswith((";", "}")))
        if complete:
            units.append(unit)
            unit, depth = _Unit([], []), 0
    return [*units, unit]


def _code(line: str) -> str:
    """A line without comments and without what is in string literals."""
    return _LITERAL.sub(lambda match: '""' if match[0][0] == '"' else "", _bare(line)).rstrip()


def _bare(line: str) -> str:
    return _MARK.sub("", line)


def _signature(unit: _Unit) -> str | None:
    """What is before the body of a function, on one line; None where it is not a function."""
    if not unit.lines or not unit.lines[0].startswith(("template <", "__device__ ", 'extern "C" ')):
        return None
    parts = []
    for line in unit.lines:
        parts.append(_code(line).strip())
        if "{" in parts[-1]:
            break
    match = re.match(
        r'((?:template <[^{]*?> )?(?:__device__|extern "" __global__) [^;{]*\)) \{', " ".join(parts)
    )
    return match[1] if match else None


def _name(signature: str) -> str:
    match = _NAME.search(signature)
    assert match is not None
    return match[1]


def _prototype(signature: str, unit: _Unit) -> list[str]:
    mark = _MARK.search(unit.lines[0])
    end = mark[0] if mark else ""
    line = signature.replace("__forceinline__ ", "") + ";"
    comment = _first_sentence(unit.comment)
    if comment and len(line) + len(comment) + 4 <= _WIDTH:
        return [f"{line}  // {comment}{end}"]
    lines = [f"// {comment}"] if comment else []
    if lines and len(lines[0]) > _WIDTH:
        lines = textwrap.wrap(comment, _WIDTH, initial_indent="// ", subsequent_indent="// ")
    if len(line) <= _WIDTH:
        lines.append(line)
    else:
        # A line ends between two parameters alone.
        joined = re.sub(r"(?<!,) ", "\0", line)
        lines += [part.replace("\0", " ") for part in textwrap.wrap(joined, _WIDTH, subsequent_indent="    ")]
    return [line + end for line in lines]


def _first_sentence(comment: list[str]) -> str:
    text = " ".join(_bare(line).removeprefix("//").strip() for line in comment)
    match = _SENTENCE.match(text)
    return match[1] if match else text


def _longer_comment(unit: _Unit) -> list[str]:
    """The comment of a function, unless all of it is with the prototype."""
    text = " ".join(_bare(line).removeprefix("//").strip() for line in unit.comment)
    return [] if text.removesuffix(".") == _first_sentence(unit.comment) else unit.comment


def _without_defaults(unit: _Unit) -> list[str]:
    """The lines of a function, whose prototype has the defaults of its parameters."""
    end = next(i for i, line in enumerate(unit.lines, 1) if "{" in line)
    return [*(_DEFAULT.sub("", line) for line in unit.lines[:end]), *unit.lines[end:]]
