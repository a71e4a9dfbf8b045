"""Files and folders that nobody else can write: made so whatever the umask, and checked before they are used.

What the cache and the bundles hold runs as this user. A SHA-256 that is stored beside its data says that the
data is whole, not who wrote it. The owner and the mode of the file say that. Folders are held open, and what
is in them is reached by their descriptors, so no symbolic link below them is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from flashgen.host.paths import TRUST_VARIABLE, expanded, read_with_status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_LINKS = 40  # on the way to a file, as Linux has it


class Distrusted(PermissionError):
    """A file or a folder that another user could have written; ``strerror`` says who, and what would do."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        remedy = (
            "make it yours alone (chown, chmod -R go-w), or, if you trust all who may write to it, name it "
            f"in {TRUST_VARIABLE}"
        )
        super().__init__(errno.EPERM, f"{why}; {remedy}", os.fspath(path))


def distrust(status: os.stat_result) -> str:
    """Why another user could have written what has this status; "" if only this user and root could."""
    if _is_of_another(status):
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & _OTHERS_WRITE:
        who = "every user" if status.st_mode & stat.S_IWOTH else "its group"
        return f"{who} may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _is_of_another(status: os.stat_result) -> bool:
    return status.st_uid not in (_ROOT, os.geteuid())


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Whether FLASHGEN_TRUST names this file or folder, or a folder around it."""
    named = [part for part in os.environ.get(TRUST_VARIABLE, "").split(os.pathsep) if part]
    real = os.path.realpath(path)
    return any(_is_in(real, os.path.realpath(expanded(TRUST_VARIABLE, part))) for part in named)


def _is_in(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


def read(path: str | os.PathLike[str], most: int, folder: int) -> tuple[bytes, os.stat_result]:
    """The content of a file in the folder of this descriptor, and its status from the same moment. Raises
    OSError, also for a link, and for a file of more than ``most`` bytes.
    """
    return read_with_status(path, most, folder)


class Reached(NamedTuple):
    """What a path leads to: its name in a folder that is open, "." for the folder itself, and why another
    user could have chosen it, "" if only this user and root could.
    """

    name: str
    folder: int
    distrust: str


@contextlib.contextmanager
def reached(path: str | os.PathLike[str]) -> Iterator[Reached]:
    """Follow a path, step by step, and look at the owner of each symbolic link on the way. Raises OSError.

    Another user who may write to a folder on the way can put a link there that leads to files which belong
    to this user and hold what the other wrote, for example in a clone of the other's repository.
    """
    begin, waiting = _steps(os.fspath(path))
    name, links, why = ".", 0, ""
    folder = os.open(begin, _STEP)
    try:
        while waiting:
            name = waiting.pop()
            handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            status = os.fstat(handle)
            if stat.S_ISLNK(status.st_mode):
                begin, target = _steps(_target(handle))
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
                if _is_of_another(status) and not why:
                    users = f"user {status.st_uid}, and this is user {os.geteuid()}"
                    why = f"{name}, on the way to it, is a link of {users}"
                waiting += target
                name, handle = ".", os.open(begin, _STEP, dir_fd=folder)
            elif waiting or stat.S_ISDIR(status.st_mode):
                name = "."
            else:  # a file, the last of the path
                os.close(handle)
                break
            os.close(folder)
            folder = handle
        yield Reached(name, folder, why)
    finally:
        os.close(folder)


def _target(link: int) -> str:
    """What the link of this descriptor, which is closed, says."""
    try:
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _steps(path: str) -> tuple[str, list[str]]:
    """The folder where a path begins, and the names in it, the last one first."""
    names = [name for name in reversed(path.split("/")) if name not in ("", ".")]
    return "/" if path.startswith("/") else ".", names


def write(name: str, data: bytes, folder: int) -> None:
    """Write the new file ``name`` into the folder of this descriptor, for this user alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, 0o600, dir_fd=folder)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o600)
        file.write(data)


def remove(name: str, folder: int) -> None:
    """Remove the regular file ``name`` from the folder of this descriptor. Raises OSError for a link."""
    _check_regular(name, folder)
    os.unlink(name, dir_fd=folder)


def move(name: str, folder: int, to: str, to_folder: int) -> None:
    """Move a file from one folder into another, where it replaces a regular file of that name. Raises OSError
    for a link.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_regular(to, to_folder)
    os.rename(name, to, src_dir_fd=folder, dst_dir_fd=to_folder)


def _check_regular(name: str, folder: int) -> None:
    if not is_regular(name, folder):
        raise OSError(errno.EINVAL, f"{name} is not a regular file", name)


def is_regular(name: str, folder: int) -> bool:
    """Whether ``name`` in the folder of this descriptor is a regular file. Raises OSError."""
    return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def make_folder(path: str | os.PathLike[str], folder: int | None = None) -> None:
    """Make a folder for this user alone, unless it is there. ``folder``: the descriptor of its parent."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=folder)
        status = os.stat(path, dir_fd=folder, follow_symlinks=False)
        if status.st_mode & 0o777 != 0o700:  # the umask took a part of it
            os.chmod(path, 0o700, dir_fd=folder)


def make_folders(path: Path) -> None:
    """`make_folder` for ``path`` and for all that is missing above it."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        make_folder(folder)


@contextlib.contextmanager
def scanned(folder: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """What is in the folder of this descriptor. Raises OSError."""
    handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(handle) as entries:
            yield entries
    finally:
        os.close(handle)


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], folder: int | None = None, follow_link: bool = False
) -> Iterator[int]:
    """The descriptor of a folder, which need not be readable. ``folder``: the descriptor of its parent, if
    any. Raises OSError.
    """
    handle = os.open(path, _STEP if follow_link else _STEP | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)
