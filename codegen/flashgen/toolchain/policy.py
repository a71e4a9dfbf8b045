"""What happens when a call has to compile a kernel: nothing, a warning or an error.

A server compiles before it takes requests, with ``flashgen.warmup`` or a bundle. ``FLASHGEN_COMPILE`` and
``compiling`` tell it of a kernel that was forgotten, which would hold up a request for a second.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from flashgen.errors import BadParam, CompileWarning, UnexpectedCompile, arg
from flashgen.host import forks
from flashgen.operators.arguments import shown

if TYPE_CHECKING:
    from types import TracebackType

    from flashgen.families.variant import Variant

VARIABLE = "FLASHGEN_COMPILE"
MODES = ("allow", "warn", "error")
_lock = forks.guard()


class compiling:
    """While it is entered, calls of all threads that have to compile a kernel do what ``mode`` says: "allow"
    compiles, "warn" also warns with CompileWarning, "error" raises UnexpectedCompile before anything is
    compiled, queued or written. It replaces what FLASHGEN_COMPILE says.

    >>> with flashgen.compiling("error"):
    ...     serve()

    ``flashgen.warmup`` and the command line always compile. The CPU path and the simulator are not affected.
    Raises BadParam for another mode.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise BadParam(f"{arg('mode')} is {shown(mode)}; allowed are {', '.join(map(repr, MODES))}")
        self.mode = mode

    def __enter__(self) -> None:
        with _lock:
            _entered.append(self)

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            # Of two threads the first to enter may be the first to leave.
            place = max(place for place, x in enumerate(_entered) if x is self)
            del _entered[place]


_entered: list[compiling] = []


def mode() -> str:
    """What to do now. Raises what `of_variable` does, where nothing was entered."""
    with _lock:
        if _entered:
            return _entered[-1].mode
    return of_variable()


def of_variable() -> str:
    """What FLASHGEN_COMPILE says. Raises BadParam for another value."""
    value = os.environ.get(VARIABLE) or "allow"
    if value not in MODES:
        raise BadParam(f"{VARIABLE} is {value!r}; allowed are {', '.join(map(repr, MODES))}")
    return value


def before_compiling(variant: Variant, arch: str) -> None:
    """Tell of a kernel that a call is about to compile. Raises UnexpectedCompile, and what `mode` does."""
    chosen = mode()
    if chosen == "allow":
        return
    message = f"a call compiles {variant.name} for {arch}, which neither the disk cache nor a bundle has"
    advice = "compile it beforehand, with flashgen.warmup() or `flashgen bundle`"
    if chosen == "error":
        raise UnexpectedCompile(f"{message}; {advice}, or allow it with {VARIABLE}=allow")
    warnings.warn(f"{message}; {advice}", CompileWarning, stacklevel=2)
