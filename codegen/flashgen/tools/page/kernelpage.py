"""The page of a kernel, from its source and its machine code."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from flashgen.errors import InternalError, NoCompilerError
from flashgen.source.order import SECTIONS, sections
from flashgen.source.render import render
from flashgen.source.sharedmemory import regions
from flashgen.tools.page.drawing import shared_memory
from flashgen.tools.page.mapcomment import read_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashgen.families.variant import Variant
    from flashgen.toolchain.compile import Compiled
    from flashgen.toolchain.lineinfo import Instruction, Place

_TARGET = re.compile(r"`\((\.L_\w+)\)")  # of a branch
_OPEN = ("roles", "definitions")  # sections that a reader sees without a click; the map is above them


@dataclass(frozen=True)
class Run:
    """Successive instructions from the same place. ``lines`` are lines of the kernel's file: the place,
    then the calls around it, innermost first. ``header`` names the header that the place is in, if any.
    """

    number: int
    instructions: tuple[Instruction, ...]
    lines: tuple[int, ...]
    header: str


@dataclass(frozen=True)
class SourceLine:
    """A line as HTML, the first run of instructions that it is part of, and how many instructions it has."""

    number: int
    html: str
    run: int | None
    instructions: int


@dataclass(frozen=True)
class _Code:
    """The machine code, or why there is none."""

    kernel: Compiled | None
    runs: tuple[Run, ...]
    why_not: str


def page(variant: Variant, arch: str) -> str:
    """One HTML document with all that it needs. Without a compiler or a disassembler it says what is missing,
    and has the rest. Raises CompileError for a kernel that does not compile, and as `render`.
    """
    from flashgen import __version__

    source = render(variant)
    code = _code(variant, arch)
    texts = {section.name: section.text for section in sections(source)}
    memory = regions(source, variant)
    return _template().render(
        name=variant.name,
        arch=arch,
        version=__version__,
        facts=_facts(variant, code.kernel),
        map=read_map(texts.get("map", ""), texts.get("constants", "")),
        memory=memory,
        drawing=shared_memory(memory) if memory else "",
        sections=_folds(source, _lines(source, code.runs)),
        runs=code.runs,
        next_runs=_next_runs(code.runs),
        targets=_targets(code.runs),
        why_not=code.why_not,
    )


def _code(variant: Variant, arch: str) -> _Code:
    from flashgen.toolchain.lineinfo import compile_with_lines, instructions

    try:
        kernel = compile_with_lines(variant, arch)
    except NoCompilerError as error:
        return _Code(None, (), str(error))
    if kernel.is_ptx:
        return _Code(kernel, (), f"{arch} is PTX, which the driver translates when it loads it")
    try:
        return _Code(kernel, _runs(instructions(kernel.cubin), f"{variant.name}.cu"), "")
    except InternalError as error:  # there is no nvdisasm, or it is too old
        return _Code(kernel, (), str(error))


def _runs(code: Iterable[Instruction], file: str) -> tuple[Run, ...]:
    groups = itertools.groupby(code, key=lambda instruction: instruction.places)
    return tuple(
        Run(number, tuple(group), _lines_in(places, file), _header(places, file))
        for number, (places, group) in enumerate(groups)
    )


def _lines_in(places: Sequence[Place], file: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(place.line for place in places if place.file == file))


def _header(places: Sequence[Place], file: str) -> str:
    return f"{places[0].file}:{places[0].line}" if places and places[0].file != file else ""


def _targets(runs: Iterable[Run]) -> set[str]:
    """The labels that branches name."""
    return {label for run in runs for one in run.instructions for label in _TARGET.findall(one.text)}


def _next_runs(runs: Sequence[Run]) -> dict[int, int]:
    """The next run of the same line, by the number of a run."""
    following: dict[int, int] = {}
    last: dict[int, int] = {}
    for run in runs:
        if run.lines:
            before = last.get(run.lines[0])
            if before is not None:
                following[before] = run.number
            last[run.lines[0]] = run.number
    return following


def _lines(source: str, runs: Sequence[Run]) -> list[SourceLine]:
    first: dict[int, int] = {}
    counts: dict[int, int] = {}
    for run in runs:
        for line in run.lines:
            first.setdefault(line, run.number)
            counts[line] = counts.get(line, 0) + len(run.instructions)
    return [
        SourceLine(number, html, first.get(number), counts.get(number, 0))
        for number, html in enumerate(_highlighted(source), 1)
    ]


def _folds(source: str, lines: Sequence[SourceLine]) -> list[dict[str, Any]]:
    folds = []
    for section in sections(source):
        count = section.text.count("\n")
        folds.append(
            {
                "name": section.name,
                "about": SECTIONS[section.name],
                "open": section.name in _OPEN,
                "lines": lines[section.first_line - 1 : section.first_line - 1 + count],
            }
        )
    return folds


def _linked(text: str) -> str:
    """An instruction as HTML: the target of a branch is a link to its label."""
    label = _TARGET.search(text)
    if label is None:
        return escape(text)
    link = f'<a href="#{label[1].replace(".", "T")}">{label[1]}</a>'
    return f"{escape(text[: label.start(1)])}{link}{escape(text[label.end(1) :])}"


def _facts(variant: Variant, kernel: Compiled | None) -> list[tuple[str, str]]:
    facts = [(key, str(value)) for key, value in variant.axes]
    facts.append(("tile", ", ".join(f"{key} {value}" for key, value in variant.tile)))
    facts.append(("threads", f"{variant.threads} a block"))
    if kernel is None or kernel.registers is None:
        return facts
    block = kernel.registers * variant.threads
    return [
        *facts,
        ("registers", f"{kernel.registers} a thread at launch, {block:,} a block"),
        ("spills", f"{kernel.spill_stores} bytes stored, {kernel.spill_loads} bytes loaded, a thread"),
        ("stack", f"{kernel.stack} bytes a thread"),
    ]


def _highlighted(source: str) -> list[str]:
    """Each line as HTML, with the classes of Pygments, whose colours are in the template."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import CudaLexer

    lexer = CudaLexer(stripnl=False, ensurenl=False)
    return highlight(source, lexer, HtmlFormatter(nowrap=True)).removesuffix("\n").split("\n")


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashgen.tools.page", "."),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["linked"] = _linked
    return environment.get_template("page.html.j2")
