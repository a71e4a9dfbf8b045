"""How far a long command is: a bar on standard error where that is a terminal, else a line now and then."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashgen.tools.cli.output import plain, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

_REMARK_AFTER = 2.0  # seconds of silence before a word on what takes so long
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds between signs of life where there is no terminal


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Gives a function to call after each of ``total`` steps, with what the step was. ``what`` says what all
    the steps together do.

    On a terminal there is a bar, and below it the last step. Elsewhere there is a line for what is done, and
    lines for steps: at first one a second, then fewer and fewer, down to one in half a minute.
    """
    from rich.console import Console

    screen = Console(stderr=True)
    if screen.is_terminal:
        with _bar(total, what, screen) as step:
            yield step
        return
    done, last, pause = 0, time.monotonic(), _FIRST_PAUSE

    def remark(text: str) -> None:
        nonlocal done, last, pause
        done += 1
        if time.monotonic() - last >= pause:
            last, pause = time.monotonic(), min(2 * pause, _LONGEST_PAUSE)
            say(f"{what}: {done} of {total} done, {text} the last", err=True)

    with waiting(what):
        yield remark


@contextmanager
def _bar(total: int, what: str, screen: Console) -> Iterator[Callable[[str], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class TwoLines(Progress):
        """The bar, and below it the last step: the line of the bar has no room for a kernel's name."""

        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:
                yield Text(plain(task.description), overflow="fold")

    columns = [MofNCompleteColumn(), TimeElapsedColumn()]
    if screen.width >= 50:
        columns += [TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left")]
    if screen.width >= 72:
        columns.insert(0, BarColumn(bar_width=20))
    with TwoLines(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=total)
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
    remark = threading.Timer(_REMARK_AFTER, lambda: say(f"{what} ...", err=True))
    remark.daemon = True
    remark.start()
    try:
        yield
    finally:
        remark.cancel()
