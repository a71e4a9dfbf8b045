"""Errors of the operator contract.

One class for each status, each also the built-in exception that a Python caller would catch. A message names
the argument, its value and what is expected. Nothing has been launched and no output touched when one is
raised.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "BadParam",
    "BadTensorDtype",
    "BadTensorShape",
    "BadTensorStrides",
    "CacheWarning",
    "CompileError",
    "DeviceTypeNotSupported",
    "FlashgenError",
    "InsufficientWorkspace",
    "InternalError",
    "NoBindingError",
    "NoCompilerError",
    "NoHostCompilerError",
    "NullPointer",
    "SimulationError",
    "SpecError",
    "TemplateWarning",
    "TunedWarning",
]


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose."""


class naming:  # a generator of contextlib costs four times as much
    """Errors raised within name arguments as the caller gave them: ``naming(pages="block_table")``."""

    def __init__(self, **names: str) -> None:
        self._names = names

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, FlashgenError):
            rename(error, **self._names)


def rename(error: FlashgenError, **names: str) -> None:
    """Exchange names of arguments in the message of an error for those that the caller gave them. A name may
    be a phrase, such as advice that the caller cannot follow: longer ones go first. Some names are English
    words as well: behind a number, `which` or `that`, as in "2 pages", they are no names.
    """
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    if words and error.args:
        message, *rest = error.args
        name = rf"(?<!\d )(?<!which )(?<!that )(?<!\w)(?:{words})(?!\w)"
        error.args = (re.sub(name, lambda word: names[word[0]], str(message)), *rest)


class BadParam(FlashgenError, ValueError):
    """A scalar argument or a combination of arguments has no meaning, such as a NaN scale or a window with a
    mask."""


class BadTensorShape(FlashgenError, ValueError):
    """An array has the wrong rank or extent."""


class BadTensorDtype(FlashgenError, TypeError):
    """An array's element type is unsupported or differs from its partners'."""


class BadTensorStrides(FlashgenError, ValueError):
    """An array's layout cannot be read by the kernels: last dimension not contiguous, rows not 16-byte
    aligned, overlap."""


class NullPointer(FlashgenError, ValueError):
    """A required array is None or has no memory behind it."""


class InsufficientWorkspace(FlashgenError, ValueError):
    """The workspace that the caller passed is smaller than the plan asks for."""


class DeviceTypeNotSupported(FlashgenError, RuntimeError):
    """The arrays live on a device, or on a mix of devices, that no kernel serves."""


class InternalError(FlashgenError, RuntimeError):
    """Something flashgen should have prevented, such as a kernel that does not compile."""


class CompileError(InternalError):
    """NVRTC rejected a kernel; the message carries its log."""


class NoCompilerError(InternalError):
    """CuPy or NVRTC cannot be imported or loaded, so nothing can be compiled or launched."""


class NoBindingError(InternalError):
    """The driver makes no tensor maps, so no kernel that reads by them can be launched."""


class NoHostCompilerError(InternalError):
    """The simulator needs a C++ compiler and finds none; the message says what to install."""


class SimulationError(InternalError):
    """A kernel did in the simulator what a GPU forbids or leaves undefined.

    ``check`` says what found it, one of ``flashgen.simulator.execute.CHECKS``, such as "race". ``kernel`` is
    the variant's name; ``block``, ``thread`` and ``line``, of the rendered source, are None where the error
    has no such place. ``other_thread`` and ``other_line`` are the second party of a race.
    """

    def __init__(
        self,
        message: str,
        *,
        check: str = "other",
        kernel: str = "",
        block: int | None = None,
        thread: int | None = None,
        line: int | None = None,
        other_thread: int | None = None,
        other_line: int | None = None,
    ) -> None:
        super().__init__(message)
        self.check = check
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.line = line
        self.other_thread = other_thread
        self.other_line = other_line


class SpecError(FlashgenError, ValueError):
    """A spec file is wrong; the message names file, line, key and what is allowed."""


class CacheWarning(UserWarning):
    """The disk cache is damaged or cannot be used; results stay right, only slower to come by."""


class TemplateWarning(UserWarning):
    """A template that a user has put beside specs is used by none of their kernels."""


class TunedWarning(UserWarning):
    """A tile that was tuned on this machine no longer fits; what is shipped serves instead."""
