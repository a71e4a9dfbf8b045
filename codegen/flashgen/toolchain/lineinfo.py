"""Machine code with the line of the source that each instruction comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from flashgen.source.render import headers, include_dirs, render
from flashgen.toolchain.compile import compile_cubin
from flashgen.toolchain.disassemble import sass
from flashgen.toolchain.origins import template_lines_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.families.variant import Variant
    from flashgen.toolchain.compile import Compiled

_PLACE = re.compile(r'\s*//## File "([^"]*)", line (\d+)')
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*(?:/\*.*)?$")
_LABEL = re.compile(r"(\.L_\w+):")


@dataclass(frozen=True)
class Place:
    """A line of a file, by the file's name without its folder."""

    file: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, its text, the label before it if there is one, and its places. The first
    place is its own; each other one is the call by which the place before it was inlined.
    """

    address: int
    text: str
    label: str
    places: tuple[Place, ...]


def compile_with_lines(variant: Variant, arch: str) -> Compiled:
    """`variant` compiled for ``arch``, with line information. The instructions are the same as without.

    The disk cache is not used. Raises as `obtain`.
    """
    source = render(variant)
    options = (*variant.options, "--generate-line-info")
    with template_lines_named(variant, source):
        return compile_cubin(source, variant.name, arch, options, headers(source, include_dirs(variant)))


def instructions(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin that has line information, in the order of their addresses. Raises as
    `sass`.
    """
    return [*_parsed(sass(cubin, lines=True))]


def _parsed(text: str) -> Iterator[Instruction]:
    label, places = "", ()
    complete = True  # the places; the next comment begins others
    for line in text.splitlines():
        if match := _PLACE.match(line):
            place = Place(PurePath(match[1]).name, int(match[2]))
            places = (place,) if complete else (*places, place)
            complete = False
        elif match := _INSTRUCTION.match(line):
            yield Instruction(int(match[1], 16), match[2], label, places)
            label, complete = "", True
        elif match := _LABEL.match(line):
            label = match[1]
        elif line.startswith(".text."):
            places, complete = (), True
