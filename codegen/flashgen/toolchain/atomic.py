"""Writing a file so that a reader sees the old one or the new one, whole, even if the writer is killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Replace the file ``path`` by ``content``; write into anything but a regular file, for example /dev/null
    or a pipe. Raises OSError of this name if the folder is not writable or full.
    """
    if _is_device(path):
        path.write_bytes(content)
        return
    handle, temporary = _beside(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes files that only their owner can read.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, temporary):
            error.filename = str(path)
        raise


def check(path: Path) -> None:
    """Raise the OSError with which `replace` would fail, before the work that makes the content."""
    if _is_device(path):
        return
    handle, temporary = _beside(path)
    os.close(handle)
    Path(temporary).unlink()


def _is_device(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: a device or a pipe, which no file may replace."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the folder of ``path``, and its name."""
    try:
        return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        error.filename = str(path)
        raise
