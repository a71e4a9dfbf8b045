"""Compiled kernels, and checked specs, on disk: content-addressed, verified on read, bounded, never a reason
for a wrong answer.

An entry is one file (`flashgen.toolchain.entry`). It appears under its name by an atomic rename, so a reader
sees all of it or none, even if the writer is killed. A write does not wait for the disk: what a loss of power
leaves of an entry, the SHA-256 tells from a whole one. Trouble with it costs speed and a `CacheWarning`, not
correctness: what cannot be written is kept in memory, what cannot be trusted is built again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashgen import paths
from flashgen.errors import BadParam, CacheWarning
from flashgen.toolchain.entry import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flashgen.toolchain.bundle import Bundle

MAX_BYTES = 1 << 30
SIZE_VARIABLE = "FLASHGEN_CACHE_SIZE"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_TOUCH_AFTER = 3600.0  # seconds; a write for each read would cost more than a precise order of use is worth
_STALE_AFTER = 3600.0  # seconds; no build takes that long, so an older temporary file is left over
_LOCK_TIMEOUT = 120.0  # seconds; a stopped process may hold a lock for ever, and building twice is harmless
_LOST = "kernels compiled now are lost when this process ends; FLASHGEN_CACHE_DIR names another folder"
_KEEP = 0.9  # evict down to this share of the bound, so that a full cache does not evict on every write


class CacheInfo(NamedTuple):
    """Where the cache lies, its files and bytes, the bound, and why it cannot be written ("" if it can)."""

    root: Path
    entries: int
    bytes: int
    max_bytes: int
    problem: str


class CacheReport(NamedTuple):
    """What `CubinCache.verify` found: intact entries, the damaged files, which it removed, those of them that
    it could not remove, and what could not be read, with why.
    """

    intact: int
    damaged: tuple[Path, ...]
    left: tuple[Path, ...] = ()
    unreadable: tuple[tuple[Path, str], ...] = ()


class CacheCleared(NamedTuple):
    """What `CubinCache.clear` did: entries removed, entries that could not be, and why ("" if all were)."""

    removed: int
    left: int
    problem: str


def key_for(source_digest: str, arch: str, options: Sequence[str], compiler_version: str) -> str:
    """The key of a compiled kernel: 64 hexadecimal digits over everything that decides its bytes."""
    return hashlib.sha256(repr((source_digest, arch, tuple(options), compiler_version)).encode()).hexdigest()


def default() -> CubinCache:
    """The cache of this process in the folder that `paths.cache_dir` names now, over the bundles of
    FLASHGEN_BUNDLE.
    """
    return _at(paths.cache_dir(), bound(), os.environ.get(paths.BUNDLE_VARIABLE, ""))


@functools.cache
def _at(root: Path, size: int, bundles: str) -> CubinCache:
    if not bundles:
        return CubinCache(root, size)
    from flashgen.toolchain.bundle import active

    return CubinCache(root, size, active(bundles))


def bound() -> int:
    """The bound of the cache: FLASHGEN_CACHE_SIZE, such as 500MB or 4G, in units of 1,024; else 1 GB.

    Raises BadParam where the variable is no size.
    """
    text = os.environ.get(SIZE_VARIABLE, "")
    if not text:
        return MAX_BYTES
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", text.strip().upper())
    if parsed is None or not float(parsed[1]):
        raise BadParam(f"{SIZE_VARIABLE} is {text!r}; expected a size such as 500MB or 4GB")
    return int(float(parsed[1]) * _UNITS[parsed[2]])


class CubinCache:
    """Byte strings by 64-digit hexadecimal key, shared by all processes and threads that use one folder.

    ``root`` is by default `paths.cache_dir`; it is created when something is stored. The least recently read
    entries go when the entries exceed ``max_bytes``, by default `bound`; each writing process may
    be a 64th late to notice. What the folder lacks is looked for in ``bundles``.
    """

    def __init__(
        self, root: Path | None = None, max_bytes: int | None = None, bundles: Sequence[Bundle] = ()
    ) -> None:
        self.root = Path(root) if root is not None else paths.cache_dir()
        self.max_bytes = bound() if max_bytes is None else max_bytes
        self.bundles = tuple(bundles)
        self._memory: dict[str, bytes] = {}
        self._warned: set[str] = set()
        self._room = 0  # bytes to write before the folder's size is looked at again
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def get(self, key: str) -> bytes | None:
        """The payload under ``key``, or None. A damaged entry is removed, with a warning, and is none."""
        payload = self._memory.get(key)
        if payload is None:
            payload = self._on_disk(key)
        for bundle in self.bundles:
            if payload is None:
                payload = bundle.get(key)
        return payload

    def _on_disk(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn_once("read", f"cannot read the kernel cache in {self.root} ({_reason(error)})")
            return None
        payload = unpack(data, key)
        if payload is None:
            _remove(path)
            warnings.warn(f"{path} is damaged; it will be built again", CacheWarning, stacklevel=2)
            return None
        _touch(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Store ``payload``; on any failure of the disk keep it in this process instead, with one warning."""
        path = self._path(key)
        temporary = self._temporary()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.parent.mkdir(exist_ok=True)
            temporary.write_bytes(pack(key, payload))
            temporary.replace(path)
        except OSError as error:
            _remove(temporary)
            self._memory[key] = payload
            message = f"cannot write the kernel cache in {self.root} ({_reason(error)}); {_LOST}"
            self._warn_once("write", message)
        else:
            # As one: a thread that tidies meanwhile, and has not seen this entry, gives the room anew.
            with self._guard:
                self._room -= len(payload)
                full = self._room < 0
            if full:
                self._tidy(path)

    def keeps(self, key: str) -> bool:
        """Whether later processes will find ``key``: it is on disk or in a bundle."""
        return self._path(key).is_file() or any(bundle.get(key) for bundle in self.bundles)

    def get_or_build(self, key: str, build: Callable[[], bytes]) -> bytes:
        """The payload under ``key``, else what ``build`` returns, which is stored.

        Among the processes and threads that ask at once, one builds and the others wait for it. An exception
        of ``build`` passes through and the next in line builds.
        """
        payload = self.get(key)
        if payload is not None:
            return payload
        with self._locked(key):
            payload = self.get(key)
            if payload is None:
                payload = build()
                self.put(key, payload)
        return payload

    def info(self) -> CacheInfo:
        """Size and state. Whether it can be written is tried out."""
        sizes = [size for _, size, _ in self._entries()]
        return CacheInfo(self.root, len(sizes), sum(sizes), self.max_bytes, self._write_problem())

    def verify(self) -> CacheReport:
        """Read every entry, check it, and remove the damaged ones. What cannot be read may be sound, and
        stays.
        """
        damaged, left = [], []
        unreadable = _closed_folders(self.root / "entries")
        intact = 0
        for name, _, _ in self._entries():
            path = Path(name)
            try:
                sound = unpack(path.read_bytes(), path.name) is not None
            except FileNotFoundError:
                continue
            except OSError as error:
                unreadable.append((path, _reason(error)))
                continue
            if sound:
                intact += 1
            else:
                damaged.append(path)
                if not _remove(path):
                    left.append(path)
        return CacheReport(intact, tuple(damaged), tuple(left), tuple(unreadable))

    def clear(self, wanted: Callable[[bytes], bool] | None = None, unused_for: float = 0.0) -> CacheCleared:
        """Remove the entries of whose payload ``wanted`` is true, and that nobody read for so many seconds,
        which are known to an hour; by default all. Kernels that are loaded stay usable, and what processes
        hold or write meanwhile is left to them.
        """
        removed, left, problem = 0, 0, ""
        everything = wanted is None and not unused_for
        for name, _, used in self._entries():
            if unused_for and time.time() - used < unused_for:
                continue
            if wanted is not None and not self._is_wanted(Path(name), wanted):
                continue
            try:
                Path(name).unlink()
                removed += 1
            except FileNotFoundError:  # another process was faster
                continue
            except OSError as error:
                left, problem = left + 1, _reason(error)
        if everything:
            self._memory.clear()
            self._remove_stale()
        return CacheCleared(removed, left, problem)

    def _is_wanted(self, path: Path, wanted: Callable[[bytes], bool]) -> bool:
        try:
            payload = unpack(path.read_bytes(), path.name)
        except OSError:
            return False
        return payload is not None and wanted(payload)

    def _path(self, key: str) -> Path:
        return self.root / "entries" / key[:2] / key

    def _temporary(self) -> Path:
        return self.root / "tmp" / os.urandom(12).hex()

    def _entries(self) -> Iterator[tuple[str, int, float]]:
        """Path, bytes and time of last use of each entry."""
        for folder in _folders(self.root / "entries"):
            yield from _files(folder)

    def _tidy(self, fresh: Path) -> None:
        """Drop what killed processes left and the least recently used beyond the bound, but not ``fresh``."""
        self._remove_stale()
        entries = list(self._entries())
        total = sum(size for _, size, _ in entries)
        if total > self.max_bytes:
            for name, size, _ in sorted(entries, key=lambda entry: entry[2]):
                if Path(name) != fresh and _remove(Path(name)):
                    total -= size
                if total <= _KEEP * self.max_bytes:
                    break
        self._room = self.max_bytes // 64

    def _remove_stale(self) -> None:
        """Drop what killed processes left; a younger temporary file may be one that is being written."""
        for name, _, used in _files(self.root / "tmp"):
            if time.time() - used > _STALE_AFTER:
                _remove(Path(name))

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of ``key`` among processes and threads; in a folder without locks, among threads."""
        import filelock

        # A lock file cannot be removed safely, so keys share 4096; sharing one only makes a build wait.
        path = self.root / "locks" / f"{key[:3]}.lock"
        lock = filelock.FileLock(path, timeout=_LOCK_TIMEOUT)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = lock.acquire(poll_interval=0.01)
        except (OSError, NotImplementedError, filelock.Timeout):
            with self._guard:
                held = self._locks.setdefault(key, threading.Lock())
        with held:
            yield

    def _write_problem(self) -> str:
        probe = self._temporary()
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"probe")
        except OSError as error:
            return _reason(error)
        finally:
            _remove(probe)
        return ""

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, CacheWarning, stacklevel=3)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _TOUCH_AFTER:
            os.utime(path)


def _remove(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _closed_folders(root: Path) -> list[tuple[Path, str]]:
    """Folders of entries that this user cannot list, and why."""
    closed = []
    for folder in (root, *_folders(root)):
        try:
            os.scandir(folder).close()
        except FileNotFoundError:
            continue
        except OSError as error:
            closed.append((folder, _reason(error)))
    return closed


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(root) as found:
        return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
    return []


def _files(folder: Path) -> list[tuple[str, int, float]]:
    """Path, bytes and modification time of each; what another process removes meanwhile is left out."""
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                files.append((entry.path, status.st_size, status.st_mtime))
    return files
