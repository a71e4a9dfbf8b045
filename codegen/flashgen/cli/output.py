"""What the commands print: in a terminal coloured and fitted to it; in a pipe plain, whole and aligned."""

from __future__ import annotations

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
_WRAPPED = 24  # characters that a column which wraps has at least


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; an optional one is left out where the terminal is too narrow for all. The text of
    one that wraps goes on in the next line, between words.
    """

    header: str
    number: bool = False
    optional: bool = False
    wraps: bool = False


def console() -> Console:
    """A console on standard output; in a pipe it has no colours and does not wrap."""
    from rich.console import Console

    found = Console(highlight=False)
    if not found.is_terminal:
        found = Console(highlight=False, width=_UNBOUNDED)
    return found


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] | None = None
) -> None:
    """Print rows under headers; `styles` colours whole rows in a terminal."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    shown, gap = _fitting(columns, rows, screen.width)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for at in shown:
        justify = "right" if columns[at].number else "left"
        table.add_column(columns[at].header, justify=justify, no_wrap=not columns[at].wraps, overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*(Text(row[at]) for at in shown), style=styles[index] if styles else None)
    if not screen.is_terminal:
        with screen.capture() as captured:
            screen.print(table)
        click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
        return
    screen.print(table)
    hidden = [column.header for at, column in enumerate(columns) if at not in shown]
    if hidden:
        screen.print(f"[dim]a wider terminal, a pipe or --json also shows {', '.join(hidden)}[/dim]")


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Which columns fit, the later optional ones going first, and the gap between them."""
    widths = [max(map(len, [column.header, *(row[at] for row in rows)])) for at, column in enumerate(columns)]
    widths = [
        min(each, _WRAPPED) if column.wraps else each for each, column in zip(widths, columns, strict=True)
    ]
    shown = [*range(len(columns))]

    def needed(gap: int) -> int:
        return sum(widths[at] for at in shown) + gap * (len(shown) - 1)

    for at in reversed(range(len(columns))):
        if columns[at].optional and needed(_GAP) > width:
            shown.remove(at)
    return shown, _GAP if needed(_GAP) <= width else 1


def print_pairs(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print a card of names and values; a value may have several lines."""
    from rich.text import Text

    screen = console()
    if title:
        screen.print(Text(title, style="bold"))
    width = max((len(name) for name, _ in pairs), default=0)
    if not screen.is_terminal:
        for name, value in pairs:
            lines = value.splitlines() or [""]
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
        lines = _wrapped(value, max(20, screen.width - len(indent)))
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
    highlighted = Syntax("", lexer, theme="ansi_dark", background_color="default").highlight(text)
    highlighted.rstrip()
    screen.print(highlighted, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


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
