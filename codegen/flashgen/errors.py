"""Errors of the operator contract.

One class for each status, each also the built-in exception that a Python caller would catch. A message names
the argument, its value and what is expected. Nothing has been launched and no output touched when one is
raised.

A message refers to arguments (`arg`), so that a function whose signature has other names for them can have
its errors use these (`naming`). No text is searched for names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

__all__ = [
    "BadParam",
    "BadTensorDtype",
    "BadTensorShape",
    "BadTensorStrides",
    "CacheWarning",
    "CompileError",
    "CompileWarning",
    "DeviceTypeNotSupported",
    "FlashgenError",
    "GatherWarning",
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
    "UnexpectedCompile",
]


# A message refers to an argument between these: START, the name, and where its words differ TEXT and these,
# then END. They are private characters of Unicode, which repr() of anything in a message escapes.
_START, _TEXT, _END = "\ue000", "\ue001", "\ue002"


def _nothing_is_traced() -> bool:
    return False


# Whether torch.compile traces the caller, who then sees messages as they were made; PyTorch's own function
# once its tensors are used.
is_traced: Callable[[], bool] = _nothing_is_traced


def arg(name: str, words: str = "") -> str:
    """A reference to an argument, for the message of an error: ``f"{arg('q')} has shape {shape}"``. Callers
    under whose signature it has another name exchange it, see `naming`.

    name: the argument, or several joined by ", ", or any other term that callers may know in other words.
    words: what the message says, where that is not the name.
    """
    if is_traced():
        return words or name
    return f"{_START}{name}{_TEXT}{words}{_END}" if words else f"{_START}{name}{_END}"


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose. The first argument is the message, in which
    arguments are references (`arg`); ``str()`` shows their names.
    """

    def __str__(self) -> str:
        return text_of(self.message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def message(self) -> str:
        """The message with its references, to be part of another one."""
        return str(self.args[0]) if self.args else ""

    @property
    def subject(self) -> str:
        """The argument that the message begins with, or nothing."""
        first, _, _ = self.message.partition(_END)
        return first.removeprefix(_START).partition(_TEXT)[0] if first.startswith(_START) else ""

    def raise_as(self, names: Mapping[str, str], of: str) -> NoReturn:
        """Raise this error, or what it means in the call ``of``, with arguments named as its caller does."""
        self.rename(names)
        raise self

    def rename(self, names: Mapping[str, str]) -> None:
        """Call arguments as the caller does: ``names`` has the caller's name of each, where it differs."""
        if self.args and _START in self.message:
            self.args = (_renamed(self.message, names), *self.args[1:])


def text_of(message: str) -> str:
    """A message as a reader sees it: each reference is its words, or its name."""
    if _START not in message:
        return message
    text, *rest = message.split(_START)
    for part in rest:
        reference, _, after = part.partition(_END)
        name, _, words = reference.partition(_TEXT)
        text += (words or name) + after
    return text


def _renamed(message: str, names: Mapping[str, str]) -> str:
    text, *rest = message.split(_START)
    for part in rest:
        reference, _, after = part.partition(_END)
        name, _, words = reference.partition(_TEXT)
        if not words:  # of several arguments two may have one name
            reference = ", ".join(dict.fromkeys(names.get(one, one) for one in name.split(", ")))
        elif name in names:
            text += names[name] + after  # these may have references themselves
            continue
        text += f"{_START}{reference}{_END}{after}"
    return text


class naming:  # a generator of contextlib costs four times as much
    """Errors raised within call arguments as the caller does: ``with naming({"pages": "block_table"}): ...``.
    May be entered many times, by many threads.
    """

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, FlashgenError):
            error.rename(self._names)


class BadParam(FlashgenError, ValueError):
    """A scalar argument or a combination of arguments has no meaning, for example a NaN scale."""


class BadTensorShape(FlashgenError, ValueError):
    """An array has the wrong rank or extent."""


class BadTensorDtype(FlashgenError, TypeError):
    """An array's element type is unsupported or differs from its partners'."""


class BadTensorStrides(FlashgenError, ValueError):
    """An array's layout cannot be read by the kernels: last dimension not contiguous, rows not 16-byte
    aligned, overlap."""


class NullPointer(FlashgenError, ValueError):
    """A required array is None or has no memory."""


class InsufficientWorkspace(FlashgenError, ValueError):
    """The workspace that the caller passed is smaller than the plan needs."""


class DeviceTypeNotSupported(FlashgenError, RuntimeError):
    """No kernel serves the device of the arrays, or the arrays are on several devices."""


class InternalError(FlashgenError, RuntimeError):
    """Something that flashgen should have prevented, for example a kernel that does not compile."""


class CompileError(InternalError):
    """NVRTC rejected a kernel; the message carries its log."""


class UnexpectedCompile(FlashgenError, RuntimeError):
    """A call had to compile a kernel, which FLASHGEN_COMPILE=error or ``compiling("error")`` forbids."""


class NoCompilerError(InternalError):
    """CuPy or NVRTC cannot be imported or loaded, so nothing can be compiled or launched."""


class NoBindingError(InternalError):
    """The driver cannot make tensor maps, so kernels that need them cannot be launched."""


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
    """A spec file is wrong; the message names file, line, key and what is allowed.

    ``explanation`` is the message from the line on, where the error is about the file ``path``.
    """

    def __init__(self, explanation: str, path: Path | None = None) -> None:
        super().__init__(explanation if path is None else f"{path}:{explanation}")
        self.explanation, self.path = explanation, path


class CacheWarning(UserWarning):
    """The disk cache is damaged or cannot be used. Results stay correct, but kernels are compiled again."""


class CompileWarning(UserWarning):
    """A call compiles a kernel, and FLASHGEN_COMPILE=warn or ``compiling("warn")`` asks for a warning."""


class GatherWarning(UserWarning):
    """A JAX program on several devices has a call outside of ``jax.shard_map``: XLA gathers its arrays."""


class TemplateWarning(UserWarning):
    """No kernel of a user's specs uses a template that is beside these specs."""


class TunedWarning(UserWarning):
    """A tile that was tuned on this machine no longer fits; flashgen uses the shipped tile."""
