"""The C++ compiler of this machine, and objects made with it."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import CompileError, NoHostCompilerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CANDIDATES = ("c++", "g++", "clang++")
_NEEDED = "GCC 12 or Clang 16, or newer"
_INSTALL = (
    f"install {_NEEDED} (Debian and Ubuntu: apt install g++, Fedora: dnf install gcc-c++), or name one in CXX"
)
_TIMEOUT = 600.0  # seconds; a variant takes some ten
_LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class HostCompiler:
    """``command`` starts it, ``version`` is what it says of itself in one line."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return f"{shlex.join(self.command)}: {self.version}"

    @property
    def is_old(self) -> bool:
        """Whether it is older than the simulator needs; False where its version is not understood."""
        number = re.search(r"\b(\d+)\.\d+", self.version)
        least = 16 if "clang" in self.version else 12
        return number is not None and int(number[1]) < least


def find() -> HostCompiler:
    """The compiler that CXX names, else the first of ``CANDIDATES`` that there is.

    Raises NoHostCompilerError where there is none, or where the one that CXX names does not start.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


def why_unavailable() -> str:
    """Why the simulator cannot compile here, and what to install; "" where it can."""
    try:
        find()
    except NoHostCompilerError as error:
        return str(error)
    return ""


def build(
    compiler: HostCompiler, options: Sequence[str], inputs: Sequence[Path], output: Path, name: str
) -> None:
    """Compile and link ``inputs`` into ``output``. Raises CompileError with the compiler's first messages."""
    command = [*compiler.command, *options, "-o", str(output), *map(str, inputs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{name}: {shlex.join(compiler.command)} did not finish: {error}") from error
    if done.returncode != 0:
        shown = "\n".join(done.stderr.strip().splitlines()[:_LOG_LINES])
        needed = f"; it needs {_NEEDED}" if compiler.is_old else ""
        raise CompileError(f"{name} does not compile for the simulator with {compiler}{needed}\n{shown}")


@functools.lru_cache(maxsize=8)
def _find(chosen: str, path: str) -> HostCompiler:
    if chosen:
        try:
            command = tuple(shlex.split(chosen))
        except ValueError as error:
            raise NoHostCompilerError(
                f"CXX is {chosen!r}, which is not a command: {error}; {_INSTALL}"
            ) from None
        compiler = _ask(command, path)
        if compiler is None:
            raise NoHostCompilerError(f"CXX is {chosen!r}, which does not start; {_INSTALL}")
        return compiler
    for name in CANDIDATES:
        compiler = _ask((name,), path)
        if compiler is not None:
            return compiler
    raise NoHostCompilerError(
        f"the simulator needs a C++ compiler, but none of {', '.join(CANDIDATES)} starts; {_INSTALL}"
    )


def _ask(command: tuple[str, ...], path: str) -> HostCompiler | None:
    program = shutil.which(command[0], path=path) if command else None
    if program is None:
        return None
    command = (program, *command[1:])
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return HostCompiler(command, lines[0].strip()) if done.returncode == 0 and lines else None
