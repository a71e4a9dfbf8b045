"""The map in the first comment of a kernel: who does what, shared memory, and a table of barriers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_TITLE = re.compile(r"^// Map\b")
_COLUMN = 18  # of the text of a row, counted from its label
_CONTINUED = " " * 12
_BARRIERS = ("mbarrier", "barrier")
_ELSEWHERE = ("named barriers", "other barriers")  # rows that refer to the declarations
_NAMED = re.compile(r"^enum NamedBarrier[^\n]*\{[^\n]*\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_MEMBER = re.compile(r"^ +(\w+) = ([^,]*),(?: *// (.*))?$", re.MULTILINE)
_MBARRIERS = re.compile(r"^struct Mbarriers \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_MBARRIER = re.compile(r"^ +uint64_t (\w+)(?:\[\w+\])?; *// (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class MapRow:
    """A row of the map: what, and what is said of it."""

    label: str
    text: str


@dataclass(frozen=True)
class BarrierRow:
    """A barrier: its names, who arrives in a phase, who waits. The comment of a declaration says both."""

    name: str
    arrivals: str
    waits: str


@dataclass(frozen=True)
class KernelMap:
    """What a kernel computes, as text; the rows of its map; its barriers; the text after these, such as a
    timeline.
    """

    summary: str
    rows: tuple[MapRow, ...]
    barriers: tuple[BarrierRow, ...]
    notes: str


def read_map(text: str, constants: str) -> KernelMap:
    """The map from the section of that name; barriers that it lacks from the section of constants."""
    lines = [line.removeprefix("//").removeprefix(" ") for line in text.rstrip().splitlines()]
    title = next((at for at, line in enumerate(text.splitlines()) if _TITLE.match(line)), len(lines))
    after = [at for at, line in enumerate(lines) if at > title and line and not line.startswith(" ")]
    end = after[0] if after else len(lines)
    rows: list[MapRow] = []
    barriers: list[BarrierRow] = []
    in_barriers, after_barrier = False, False
    for line in lines[title + 1 : end]:
        if line.startswith(_CONTINUED) and (barriers if after_barrier else rows):
            more = line.strip()
            if after_barrier:
                barriers[-1] = replace(barriers[-1], waits=f"{barriers[-1].waits} {more}")
            else:
                rows[-1] = replace(rows[-1], text=f"{rows[-1].text} {more}")
            continue
        label, *cells = _cells(line.strip())
        after_barrier = in_barriers and len(cells) == 2
        if label in _BARRIERS and "arrivals of a phase" in cells:
            in_barriers = True
        elif after_barrier:
            barriers.append(BarrierRow(label, *cells))
        elif label and label not in _ELSEWHERE:
            rows.append(MapRow(label, "  ".join(cells)))
    # The map has some barriers as rows; the comments of the declarations explain the others.
    listed = {name for row in barriers for name in row.name.split(", ")}
    named = [row for row in _named(constants) if row.name.split(" ")[0] not in listed]
    declared = [row for row in _mbarriers(constants) if row.name not in listed] if barriers else []
    rest = (*barriers, *declared, *named)
    return KernelMap(_joined(lines[:title]), tuple(rows), rest, "\n".join(lines[end:]))


def _joined(lines: list[str]) -> str:
    """Paragraphs as one line each; indented lines, which are formulas, stay as they are."""
    text = "\n".join(lines).strip("\n")
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _cells(row: str) -> list[str]:
    """The label and the columns of a row: two blanks are between them, or the label fills its column."""
    cells = re.split(r" {2,}", row)
    if len(cells[0]) > _COLUMN and cells[0][_COLUMN - 1] == " ":
        return [cells[0][:_COLUMN].rstrip(), cells[0][_COLUMN:], *cells[1:]]
    return cells


def _named(constants: str) -> tuple[BarrierRow, ...]:
    match = _NAMED.search(constants)
    members = _MEMBER.findall(match[1]) if match else []
    return tuple(BarrierRow(f"{name} = {value}", comment, "") for name, value, comment in members)


def _mbarriers(constants: str) -> tuple[BarrierRow, ...]:
    match = _MBARRIERS.search(constants)
    members = _MBARRIER.findall(match[1]) if match else []
    return tuple(BarrierRow(name, comment, "") for name, comment in members)
