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
from typing import TYPE_CHECKING

from flashgen.host.paths import TRUST_VARIABLE, expanded, read_with_status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
    user = os.geteuid()
    if status.st_uid not in (_ROOT, user):
        return f"it belongs to user {status.st_uid}, and this is user {user}"
    if status.st_mode & _OTHERS_WRITE:
        who = "every user" if status.st_mode & stat.S_IWOTH else "its group"
        return f"{who} may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Whether FLASHGEN_TRUST names this file or folder, or a folder around it."""
    named = [part for part in os.environ.get(TRUST_VARIABLE, "").split(os.pathsep) if part]
    real = os.path.realpath(path)
    return any(_is_in(real, os.path.realpath(expanded(TRUST_VARIABLE, part))) for part in named)


def _is_in(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


def read(path: str | os.PathLike[str], folder: int | None = None) -> tuple[bytes, os.stat_result]:
    """The content of a file, and its status from the same moment. Raises OSError, also for a link."""
    return read_with_status(path, folder, follow_link=False)


def write(name: str, data: bytes, folder: int) -> None:
    """Write the new file ``name`` into the folder of this descriptor, for this user alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, 0o600, dir_fd=folder)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o600)
        file.write(data)


def remove(name: str, folder: int) -> None:
    """Remove the regular file ``name`` from the folder of this descriptor. Raises OSError for a link."""
    if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", name)
    os.unlink(name, dir_fd=folder)


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
def opened(
    path: str | os.PathLike[str], folder: int | None = None, follow_link: bool = False
) -> Iterator[int]:
    """The descriptor of a folder. ``folder``: the descriptor of its parent, if any. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)
