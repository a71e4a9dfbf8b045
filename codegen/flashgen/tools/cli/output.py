"""What the commands print: in a terminal coloured and fitted to it; in a pipe plain, whole and aligned."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

_UNBOUNDED = 100_000
_GAP = 2
_INDENT = 2  # of the second and later lines of a row
_WRAPPED = 24  # the least width of a column that wraps


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; an optional one is left out where the terminal is too narrow for all. The text of
    one that wraps goes on in the next line, between words.
    """

    header: str
    number: bool = False
    optional: bool = False
    wraps: bool = False


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
# Invisible characters, some of which turn the direction of text; halves of characters, which no stream takes.
_HIDDEN = {
    code: f"\\u{code:04x}"
    for first, last in (
        (0x00AD, 0x00AD),
        (0x061C, 0x061C),
        (0x200B, 0x200F),
        (0x2028, 0x202E),
        (0x2060, 0x206F),
        (0xD800, 0xDFFF),
        (0xFEFF, 0xFEFF),
    )
    for code in range(first, last + 1)
}
_IN_TEXT = _HIDDEN | _CONTROLS
_IN_JSON = _HIDDEN | {code: f"\\u{code:04x}" for code in range(127, 160)}


def plain(text: str) -> str:
    """``text`` without control characters, by which a file could move the cursor, rename the window, or show
    other words than it has.
    """
    return text.translate(_IN_TEXT)


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines, of which parts may come from files."""
    click.echo(plain(text), err=err)


def console() -> Console:
    """A console on standard output; in a pipe it has no colours and does not wrap."""
    from rich.console import Console

    terminal = Console(highlight=False)
    if not terminal.is_terminal:
        terminal = Console(highlight=False, width=_UNBOUNDED)
    return terminal


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] | None = None
) -> None:
    """Print rows under headers; `styles` colours whole rows in a terminal.

    No cell is ever cut. In a terminal that is too narrow, optional columns are left out, the last first. If
    the others need more than one line, each row goes on in indented lines below.
    """
    from rich.text import Text

    screen = console()
    rows = [[plain(cell) for cell in row] for row in rows]
    shown = _fitting(columns, rows, screen.width)
    chosen = [columns[at] for at in shown]
    cells = [[row[at] for at in shown] for row in rows]
    bands = _bands(chosen, cells, screen.width)
    colours = ["bold", *(styles or [""] * len(rows))]
    for row, style in zip([[column.header for column in chosen], *cells], colours, strict=True):
        lines = [line for band in bands for line in band.lines(row)]
        if screen.is_terminal:
            # The terminal itself folds a line that is still too long, so that it is whole when it is copied.
            screen.print(Text("\n".join(lines), style=style), soft_wrap=True)
        else:
            click.echo("\n".join(lines))
    hidden = [column.header for at, column in enumerate(columns) if at not in shown]
    if hidden:
        more = f"a wider terminal, a pipe or --json also shows {', '.join(hidden)}"
        screen.print(Text("\n".join(_wrapped(more, screen.width)), style="dim"), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Band:
    """The columns of one line of each row: where they are in the row, and how wide."""

    columns: Sequence[Column]
    places: Sequence[int]
    widths: Sequence[int]
    gap: int
    indent: int

    def lines(self, row: Sequence[str]) -> list[str]:
        """The part of a row that is in this band: one line, or more where a cell wraps."""
        cells = [
            _wrapped(row[at], width) if column.wraps else [row[at]]
            for column, at, width in zip(self.columns, self.places, self.widths, strict=True)
        ]
        lines = []
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = [
                part.rjust(width) if column.number else part.ljust(width)
                for column, part, width in zip(self.columns, parts, self.widths, strict=True)
            ]
            lines.append((" " * self.indent + (" " * self.gap).join(padded)).rstrip())
        return lines


def _full_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column with nothing wrapped."""
    return [max(map(len, [column.header, *(row[at] for row in rows)])) for at, column in enumerate(columns)]


def _least_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The least width of each column in a terminal of ``width``: one that wraps holds its longest word."""
    least = _full_widths(columns, rows)
    for at, column in enumerate(columns):
        if column.wraps:
            words = [word for text in [column.header, *(row[at] for row in rows)] for word in text.split()]
            least[at] = max([min(least[at], _WRAPPED, width - _INDENT), *map(len, words)])
    return least


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Which columns are shown: as many as fit into one line. The later optional ones go first."""
    least = _least_widths(columns, rows, width)
    shown = [*range(len(columns))]
    for at in reversed(range(len(columns))):
        if columns[at].optional and _needed([least[column] for column in shown], 1) > width:
            shown.remove(at)
    return shown


def _needed(widths: Sequence[int], gap: int) -> int:
    """The width of a line of columns."""
    return sum(widths) + gap * (len(widths) - 1)


def _bands(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[_Band]:
    """The columns in as few lines as hold them. Each line but the first is indented."""
    full, least = _full_widths(columns, rows), _least_widths(columns, rows, width)
    lines: list[list[int]] = []
    for at in range(len(columns)):
        indent = _INDENT if len(lines) > 1 else 0
        joined = [*lines[-1], at] if lines else []
        if joined and indent + _needed([least[column] for column in joined], 1) <= width:
            lines[-1] = joined
        else:
            lines.append([at])
    bands = []
    for number, places in enumerate(lines):
        indent = _INDENT if number else 0
        gap = _GAP if indent + _needed([least[at] for at in places], _GAP) <= width else 1
        spare = max(0, width - indent - _needed([least[at] for at in places], gap))
        widths = []
        for at in places:  # what is left over goes to the columns that wrap
            widths.append(least[at] + min(spare, full[at] - least[at]))
            spare -= widths[-1] - least[at]
        bands.append(_Band([columns[at] for at in places], places, widths, gap, indent))
    return bands


def print_pairs(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print a card of names and values; a value may have several lines."""
    from rich.text import Text

    screen = console()
    if title:
        screen.print(Text(plain(title), style="bold"))
    width = max((len(name) for name, _ in pairs), default=0)
    if not screen.is_terminal:
        for name, value in pairs:
            lines = plain(value).splitlines() or [""]
            click.echo(
                "\n".join(
                    [
                        f"  {name:<{width}}  {lines[0]}".rstrip(),
                        *(f"  {'':{width}}  {line}" for line in lines[1:]),
                    ]
                )
            )
        return
    indent = " " * (2 + width + _GAP)
    for name, value in pairs:
        lines = _wrapped(plain(value), max(20, screen.width - len(indent)))
        screen.print(
            Text(f"  {name:<{width}}", style="cyan"), Text(f"{'':{_GAP}}{lines[0]}"), sep="", soft_wrap=True
        )
        for line in lines[1:]:
            screen.print(Text(indent + line), soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters, broken between words alone: a path stays whole, to be copied. A
    line that is indented, such as an excerpt of source, stays as it is.
    """
    lines = []
    for line in text.splitlines() or [""]:
        if line.startswith(" "):
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    return lines


def fitted(message: str) -> str:
    """A message for standard error, in lines that fit where that is a terminal."""
    message = plain(message)
    if not sys.stderr.isatty():
        return message
    return "\n".join(_wrapped(message, shutil.get_terminal_size().columns))


def print_code(text: str, lexer: str) -> None:
    """Print source: highlighted in a terminal, byte for byte in a pipe."""
    screen = console()
    if not screen.is_terminal:
        click.echo(text, nl=not text.endswith("\n"))
        return
    from rich.syntax import Syntax

    # Printed as text rather than as a Syntax block, which would cut long lines at the terminal's edge.
    highlighted = Syntax("", lexer, theme="ansi_dark", background_color="default").highlight(plain(text))
    highlighted.rstrip()
    screen.print(highlighted, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(as_json(value))


def as_json(value: Any) -> str:
    """A JSON document. JSON escapes some control characters; the others are escaped as well."""
    return json.dumps(value, indent=2, ensure_ascii=False).translate(_IN_JSON)


def note(message: str) -> None:
    """A remark for the person, on standard error so that it never mixes with what a pipe reads."""
    click.echo(fitted(message), err=True)


def counted(count: int, noun: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def kilobytes(count: int) -> str:
    """Bytes as KB of 1,024, the unit in which CUDA's shared memory is usually given."""
    return f"{count / 1024:.1f}".removesuffix(".0")


def size(count: float) -> str:
    """Bytes in the unit that keeps the figure short."""
    for unit in ("B", "KB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"
