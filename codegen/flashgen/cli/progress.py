"""How far a long command is: a bar on standard error where that is a terminal, else a line now and then."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_REMARK_AFTER = 2.0  # seconds of silence before a word on what takes so long
_REMARK_EVERY = 30.0  # seconds between signs of life where there is no terminal


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Gives a function to call after each of ``total`` steps, with what the step was."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    screen = Console(stderr=True)
    if not screen.is_terminal:
        done, last = 0, time.monotonic()

        def remark(text: str) -> None:
            nonlocal done, last
            done += 1
            if time.monotonic() - last > _REMARK_EVERY:
                last = time.monotonic()
                click.echo(f"{done} of {total} done, {text} the last", err=True)

        yield remark
        return
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left "),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says what takes its time: as long as it does on a terminal, else once it has taken some seconds."""
    from rich.console import Console

    screen = Console(stderr=True)
    if screen.is_terminal:
        with screen.status(what):
            yield
        return
    remark = threading.Timer(_REMARK_AFTER, lambda: click.echo(f"{what} ...", err=True))
    remark.daemon = True
    remark.start()
    try:
        yield
    finally:
        remark.cancel()
