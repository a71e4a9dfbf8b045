"""A lock that processes and threads share: one of the operating system, on a file."""

from __future__ import annotations

import contextlib
import fcntl
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_POLL = 0.01  # seconds


def acquired(path: Path, timeout: float = math.inf) -> contextlib.ExitStack:
    """The lock of the file ``path``, which is made where there is none; the end of this context releases it.

    Raises OSError where files have no locks, and where another one holds it for ``timeout`` seconds.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("ab"))
        until = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL)
        # Closing the file would not do: a process that was forked meanwhile has it open.
        stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        return stack.pop_all()
