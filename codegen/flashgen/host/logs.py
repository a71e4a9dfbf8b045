"""What flashgen does, through the standard library's ``logging``, under the logger "flashgen".

``FLASHGEN_LOG=info`` prints it on standard error: which kernel a new shape takes, what is compiled, why, and
how long it takes. ``debug`` adds what comes from the disk cache. Without the variable a program configures
the logger as any other.
"""

from __future__ import annotations

import logging
import os

from flashgen.errors import BadParam

VARIABLE = "FLASHGEN_LOG"
LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


def logger(room: str) -> logging.Logger:
    """The logger of a room of this package. Raises BadParam where FLASHGEN_LOG is no level."""
    _configure(os.environ.get(VARIABLE, ""))
    return logging.getLogger(f"flashgen.{room}")


def _configure(level: str) -> None:
    root = logging.getLogger("flashgen")
    if not level or root.handlers:
        return
    if level.lower() not in LEVELS:
        raise BadParam(f"{VARIABLE} is {level!r}; expected one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False  # else a program with a handler of its own says everything twice
