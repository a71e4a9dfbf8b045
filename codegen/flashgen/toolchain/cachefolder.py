"""The folder of the disk cache: where it is, which files in it are the cache's, and reaching these alone.

    .flashgen-cache     the marker, a file: the cache made this folder, or found it empty
    entries/ab/KEY      an entry; ``ab`` is how its key begins, which has 64 hexadecimal digits
    tmp/NAME            an entry that is being written; 24 hexadecimal digits
    locks/abc.lock      the lock of the keys that begin with ``abc``

Only regular files of these names are read, counted or removed, in a folder that has the marker. All else
there is somebody else's and stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from flashgen.toolchain import private
from flashgen.toolchain.cacheentry import BEGIN_BYTES, MAX_BYTES, begins
from flashgen.toolchain.private import Distrusted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

MARKER = ".flashgen-cache"
SUBFOLDER = "flashgen-cache"
_MARKED = b"The disk cache of flashgen is in this folder. `flashgen cache clear` empties it.\n"
_KEY = re.compile(r"[0-9a-f]{64}")
_SHELF = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"[0-9a-f]{24}")
_LOCK = re.compile(r"[0-9a-f]{3}\.lock")


class File(NamedTuple):
    """A file of the cache: its name, its bytes, and when it was last used, in seconds since the epoch."""

    name: str
    bytes: int
    used: float


def place(named: Path) -> Path:
    """Where the cache goes for somebody who names this folder: there, if it is not there yet, is a cache, or
    is empty and nobody else may write to it; else into a folder of its own within.
    """
    try:
        with private.opened(named, follow_link=True) as folder:
            if _is_marked(folder):
                return named
            usable = _is_cache(folder)
            if usable and not any(_names(folder)) and private.distrust(os.fstat(folder)):
                usable = private.is_trusted(named)
    except OSError:  # it is not there, no folder, or closed to this user: reading or writing will say so
        return named
    return named if usable else named / SUBFOLDER


class CacheFolder:
    """Reads, writes, lists and removes the files of one cache. Everything raises OSError: of the class
    Distrusted where another user could have written what it is about.
    """

    def __init__(self, named: Path) -> None:
        self.root = place(named)
        self.allowed = ""  # why the folder would not be used, if FLASHGEN_TRUST did not name it
        self._reached: tuple[int, int] | None = None  # device and inode of the folder whose way was checked

    def path(self, key: str) -> Path:
        """The file of an entry, which need not be there."""
        return self.root / "entries" / key[:2] / key

    def read(self, key: str) -> tuple[bytes, float]:
        """The bytes of an entry, and when it was last used."""
        with self._shelf(key) as shelf:
            data, status = private.read(key, MAX_BYTES, shelf)
        self._judge(status, self.path(key))
        return data, status.st_mtime

    def touch(self, key: str) -> None:
        """Say that an entry was used now."""
        with self._shelf(key) as shelf:
            os.utime(key, dir_fd=shelf, follow_symlinks=False)

    def write(self, key: str, data: bytes) -> None:
        """Put an entry in its place, whole."""
        if len(data) > MAX_BYTES:
            why = f"an entry of {len(data):,} bytes is too large; at most {MAX_BYTES:,} are kept"
            raise OSError(errno.EFBIG, why, str(self.path(key)))
        temporary = os.urandom(12).hex()
        with self._part("tmp") as tmp, self._part("entries", key[:2]) as shelf:
            try:
                private.write(temporary, data, tmp)
                private.move(temporary, tmp, key, shelf)
            except OSError:
                with contextlib.suppress(OSError):
                    private.remove(temporary, tmp)
                raise

    def try_to_write(self) -> None:
        """Write a file and remove it."""
        name = os.urandom(12).hex()
        with self._part("tmp") as tmp:
            try:
                private.write(name, b"probe", tmp)
            finally:
                with contextlib.suppress(OSError):
                    private.remove(name, tmp)

    def remove(self, key: str) -> None:
        """Remove an entry."""
        with self._part("entries", key[:2], make=False) as shelf:
            private.remove(key, shelf)

    def entries(self, closed: list[tuple[Path, OSError]] | None = None) -> Iterator[File]:
        """Every entry; what another process removes meanwhile is left out. A folder that cannot be listed
        goes to ``closed``.
        """
        with self._listed(closed, "entries") as entries:
            shelves = [] if entries is None else list(filter(_SHELF.fullmatch, _names(entries)))
        for shelf in shelves:
            with self._listed(closed, "entries", shelf) as folder:
                files = [] if folder is None else list(_files(folder))
            yield from (file for file in files if _KEY.fullmatch(file.name) and file.name[:2] == shelf)

    def remove_left_over(self, before: float) -> None:
        """Remove the files of writers that were killed: those that nobody wrote to since ``before``."""
        with contextlib.suppress(OSError), self._part("tmp", make=False) as tmp:
            for file in list(_files(tmp)):
                if _TEMPORARY.fullmatch(file.name) and file.used < before:
                    with contextlib.suppress(OSError):
                        private.remove(file.name, tmp)

    def lock(self, name: str) -> Path:
        """The lock file ``name``, in a folder that is there."""
        with self._part("locks"):
            return self.root / "locks" / f"{name}.lock"

    def check(self) -> None:
        """Raise Distrusted where others may write to the folder, or could have chosen it. Nothing is said of
        one that cannot be opened.
        """
        try:
            with self._root():
                pass
        except Distrusted:
            raise
        except OSError:
            return

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        """The folder, held open. The way to it is followed once, and again when it leads to another one."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(private.opened(self.root, follow_link=True))
            status = os.fstat(folder)
            if (status.st_dev, status.st_ino) != self._reached:
                way = stack.enter_context(private.reached(self.root))
                folder = stack.enter_context(private.opened(way.name, way.folder))
                status = os.fstat(folder)
                self._accept(way.distrust, self.root)
                self._reached = status.st_dev, status.st_ino
            self._judge(status, self.root)
            yield folder

    @contextlib.contextmanager
    def _shelf(self, key: str) -> Iterator[int]:
        """The folder of an entry to read, held open."""
        path = self.path(key)
        with (
            self._root() as root,
            private.opened("entries", root) as entries,
            private.opened(path.parent.name, entries) as shelf,
        ):
            for folder, name in ((entries, path.parent.parent), (shelf, path.parent)):
                self._judge(os.fstat(folder), name)
            yield shelf

    def _judge(self, status: os.stat_result, path: Path) -> None:
        self._accept(private.distrust(status), path)

    def _accept(self, why: str, path: Path) -> None:
        """Raise Distrusted for this reason, unless it is "" or FLASHGEN_TRUST names the path."""
        if why and not private.is_trusted(path):
            raise Distrusted(path, why)
        self.allowed = self.allowed or why

    @contextlib.contextmanager
    def _part(self, *names: str, make: bool = True) -> Iterator[int]:
        """A folder of the cache to write to, held open, with all that is around it: made where it is not
        there.
        """
        with contextlib.ExitStack() as stack:
            if make:
                private.make_folders(self.root)
            folder = stack.enter_context(self._root())
            self._mark(folder)
            path = self.root
            for name in names:
                if make:
                    private.make_folder(name, folder)
                path = path / name
                folder = stack.enter_context(private.opened(name, folder))
                self._judge(os.fstat(folder), path)
            yield folder

    @contextlib.contextmanager
    def _listed(self, closed: list[tuple[Path, OSError]] | None, *names: str) -> Iterator[int | None]:
        """A folder of the cache to read, held open; None where it is not there or cannot be listed."""
        with contextlib.ExitStack() as stack:
            folder: int | None = None
            try:
                folder = stack.enter_context(self._root())
                for name in names:
                    folder = stack.enter_context(private.opened(name, folder))
            except (FileNotFoundError, NotADirectoryError):
                folder = None
            except OSError as error:
                folder = None
                if closed is not None:
                    closed.append((self.root.joinpath(*names), error))
            yield folder

    def _mark(self, root: int) -> None:
        """See to it that the root has the marker."""
        if _is_marked(root):
            return
        if not _is_cache(root):
            why = f"it holds other files, and no {MARKER}; FLASHGEN_CACHE_DIR names another folder"
            raise OSError(errno.ENOTEMPTY, why, str(self.root))
        with contextlib.suppress(FileExistsError):  # another process was faster
            private.write(MARKER, _MARKED, root)


def _is_marked(folder: int) -> bool:
    """Whether a folder has the marker. A cache may be called as the marker is, but that is a folder."""
    with contextlib.suppress(FileNotFoundError):
        return private.is_regular(MARKER, folder)
    return False


def _is_cache(folder: int) -> bool:
    """Whether a folder has nothing but what the cache writes: one of an earlier version of flashgen, or an
    empty one. A marker settles it: another thread or process may have just written it.
    """
    parts = list(_names(folder))
    if MARKER in parts:
        return _is_marked(folder)
    return _all_are(_is_part, parts, folder)


def _is_part(name: str, root: int) -> bool:
    return name in _PARTS and _holds(_PARTS[name], name, root)


def _is_shelf(name: str, entries: int) -> bool:
    return _SHELF.fullmatch(name) is not None and _holds(_is_entry, name, entries)


def _is_entry(name: str, shelf: int) -> bool:
    """Whether a file is an entry by its name and by how it begins: other programs name files so as well."""
    if _KEY.fullmatch(name) is None or not private.is_regular(name, shelf):
        return False
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=shelf)
    with os.fdopen(handle, "rb") as file:
        return begins(file.read(BEGIN_BYTES))


def _is_temporary(name: str, tmp: int) -> bool:
    return _TEMPORARY.fullmatch(name) is not None and private.is_regular(name, tmp)


def _is_lock(name: str, locks: int) -> bool:
    return _LOCK.fullmatch(name) is not None and private.is_regular(name, locks)


_PARTS = {"entries": _is_shelf, "tmp": _is_temporary, "locks": _is_lock}


def _holds(is_one: Callable[[str, int], bool], name: str, folder: int) -> bool:
    """Whether ``name`` is a folder, and all in it are what ``is_one`` is about."""
    try:
        with private.opened(name, folder) as inside:
            return _all_are(is_one, _names(inside), inside)
    except NotADirectoryError:
        return False


def _all_are(is_one: Callable[[str, int], bool], names: Iterable[str], folder: int) -> bool:
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if not is_one(name, folder):
                return False
    return True


def _names(folder: int) -> Iterator[str]:
    with private.scanned(folder) as entries:
        for entry in entries:
            yield entry.name


def _files(folder: int) -> Iterator[File]:
    """The regular files of a folder."""
    with private.scanned(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False):
                    yield File(entry.name, status.st_size, status.st_mtime)
