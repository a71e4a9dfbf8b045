"""Compiled kernels, and checked specs, on disk: content-addressed, verified on read, bounded, never a reason
for a wrong answer.

An entry is one file (`toolchain.cacheentry`) of the cache's folder (`toolchain.cachefolder`).
It appears under its name by an atomic rename, so a reader sees all of it or none, even if the writer is
killed. A write does not wait for the disk: what a loss of power leaves of an entry, the SHA-256 tells from a
whole one. Trouble with it costs speed and a `CacheWarning`, not correctness: what cannot be written is kept
in memory, what is damaged, or may be another user's, is built again.
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
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import BadParam, CacheWarning
from flashgen.host import forks, paths
from flashgen.toolchain.cacheentry import pack, unpack
from flashgen.toolchain.cachefolder import CacheFolder
from flashgen.toolchain.private import Distrusted

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
    """Where the cache is, its files and bytes, the bound, and why it cannot be written ("" if it can)."""

    root: Path
    entries: int
    bytes: int
    max_bytes: int
    problem: str


class CacheReport(NamedTuple):
    """What `CubinCache.verify` found: intact entries, damaged files (which it removed), damaged files that it
    could not remove, and files that could not be read or may be another user's, with why.
    """

    intact: int
    damaged: tuple[Path, ...]
    left: tuple[Path, ...] = ()
    unreadable: tuple[tuple[Path, str], ...] = ()


class CacheCleared(NamedTuple):
    """What `CubinCache.clear` did: entries removed, entries that could not be, and why; why as well where
    it did not look, as others may write to the folder.
    """

    removed: int
    left: int
    problem: str


def key_for(source_digest: str, arch: str, options: Sequence[str], compiler_version: str) -> str:
    """The key of a compiled kernel: 64 hexadecimal digits over everything that decides its bytes."""
    return hashlib.sha256(repr((source_digest, arch, tuple(options), compiler_version)).encode()).hexdigest()


def default() -> CubinCache:
    """The cache of this process in the folder that `paths.cache_dir` names now, over the bundles of
    FLASHGEN_BUNDLE and the installed one.
    """
    bundles, trust = (os.environ.get(name, "") for name in (paths.BUNDLE_VARIABLE, paths.TRUST_VARIABLE))
    return _at(paths.cache_dir(), bound(), bundles, trust)


@functools.cache
def _at(root: Path, size: int, bundles: str, trust: str) -> CubinCache:
    if not bundles and paths.kernels_bundle() is None:
        return CubinCache(root, size)
    from flashgen.toolchain.bundle import active, installed

    layers = active(bundles)
    try:
        layers += installed()
    except BadParam as error:  # nobody named it, so it costs a compile and no call
        warnings.warn(str(error), CacheWarning, stacklevel=2)
    return CubinCache(root, size, layers)


def bound() -> int:
    """The bound of the cache: FLASHGEN_CACHE_SIZE, such as 500MB or 4G, in units of 1,024; else 1 GB.

    Raises BadParam where the variable is no size.
    """
    text = os.environ.get(SIZE_VARIABLE, "")
    if not text:
        return MAX_BYTES
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", text.strip().upper())
    if parsed is None or not 0 < float(parsed[1]) < 1e12:
        raise BadParam(f"{SIZE_VARIABLE} is {text!r}; expected a size such as 500MB or 4GB")
    return int(float(parsed[1]) * _UNITS[parsed[2]])


class CubinCache:
    """Byte strings by 64-digit hexadecimal key, shared by all processes and threads that use one folder.

    ``root`` is by default `paths.cache_dir`; it is created when something is stored. A folder that holds
    other files gets one for the cache within it (`cachefolder.place`). The least recently read
    entries go when the entries exceed ``max_bytes``, by default `bound`; each writing process may
    be a 64th late to notice. What the folder lacks is looked for in ``bundles``.
    """

    def __init__(
        self, root: Path | None = None, max_bytes: int | None = None, bundles: Sequence[Bundle] = ()
    ) -> None:
        self._folder = CacheFolder(paths.cache_dir() if root is None else Path(root))
        self.root = self._folder.root
        self.max_bytes = bound() if max_bytes is None else max_bytes
        self.bundles = tuple(bundles)
        self._memory: dict[str, bytes] = {}
        self._warned: set[str] = set()
        self._room = 0  # bytes to write before the folder's size is looked at again
        self._renew_locks()
        _caches.add(self)

    def _renew_locks(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def get(self, key: str, bundled: bool = True) -> bytes | None:
        """The payload under ``key``, or None. A damaged entry is removed, with a warning, and is none; so is
        one that may be another user's. Bundles are not looked into without ``bundled``.
        """
        payload = self._memory.get(key)
        if payload is None:
            payload = self._on_disk(key)
        for bundle in self.bundles if bundled else ():
            if payload is None:
                payload = bundle.get(key)
        return payload

    def _on_disk(self, key: str) -> bytes | None:
        try:
            data, used = self._folder.read(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn_of(error, "read", f"cannot read the kernel cache in {self.root} ({_reason(error)})")
            return None
        self._warn_if_shared()
        payload = unpack(data, key)
        if payload is None:
            self._remove(key)
            message = f"{self._folder.path(key)} is damaged; it will be built again"
            warnings.warn(message, CacheWarning, stacklevel=2)
            return None
        if time.time() - used > _TOUCH_AFTER:
            with contextlib.suppress(OSError):
                self._folder.touch(key)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Store ``payload``; on any failure of the disk keep it in this process instead, with one warning."""
        try:
            self._folder.write(key, pack(key, payload))
        except OSError as error:
            self._memory[key] = payload
            message = f"cannot write the kernel cache in {self.root} ({_reason(error)}); {_LOST}"
            self._warn_of(error, "write", message)
        else:
            self._warn_if_shared()
            # As one: a thread that tidies meanwhile, and has not seen this entry, gives the room anew.
            with self._guard:
                self._room -= len(payload)
                full = self._room < 0
            if full:
                self._tidy(key)

    def keeps(self, key: str) -> bool:
        """Whether later processes will find ``key``: it is on disk or in a bundle."""
        with contextlib.suppress(OSError):
            self._folder.read(key)
            return True
        return any(bundle.get(key) for bundle in self.bundles)

    def get_or_build(self, key: str, build: Callable[[], bytes], bundled: bool = True) -> bytes:
        """The payload under ``key``, as `get` has it, else what ``build`` returns, which is stored.

        Among the processes and threads that ask at once, one builds and the others wait for it. An exception
        of ``build`` passes through and the next in line builds.
        """
        payload = self.get(key, bundled)
        if payload is not None:
            return payload
        with self._locked(key):
            payload = self.get(key, bundled)
            if payload is None:
                payload = build()
                self.put(key, payload)
        return payload

    def info(self) -> CacheInfo:
        """Size and state. Whether it can be written is tried out."""
        sizes = [entry.bytes for entry in self._folder.entries()]
        return CacheInfo(self.root, len(sizes), sum(sizes), self.max_bytes, self._write_problem())

    def verify(self) -> CacheReport:
        """Read every entry, check it, and remove the damaged ones. What cannot be read may be sound, and
        stays; so does what may be another user's.
        """
        closed: list[tuple[Path, OSError]] = []
        damaged, left = [], []
        intact = 0
        for key in [entry.name for entry in self._folder.entries(closed)]:
            path = self._folder.path(key)
            try:
                sound = unpack(self._folder.read(key)[0], key) is not None
            except FileNotFoundError:
                continue
            except OSError as error:
                closed.append((path, error))
                continue
            if sound:
                intact += 1
            else:
                damaged.append(path)
                if not self._remove(key):
                    left.append(path)
        unreadable = tuple((path, _reason(error)) for path, error in closed)
        return CacheReport(intact, tuple(damaged), tuple(left), unreadable)

    def clear(self, matches: Callable[[bytes], bool] | None = None, unused_for: float = 0.0) -> CacheCleared:
        """Remove the entries whose payload ``matches`` and that nobody read for ``unused_for`` seconds, a
        time that is exact to an hour; by default all entries. Loaded kernels stay usable, and files that
        processes hold or write meanwhile stay.
        """
        removed, left, problem = 0, 0, ""
        everything = matches is None and not unused_for
        try:
            self._folder.check()
        except Distrusted as error:
            return CacheCleared(0, 0, _reason(error))
        for key, _, used in list(self._folder.entries()):
            if unused_for and time.time() - used < unused_for:
                continue
            if matches is not None and not self._is_wanted(key, matches):
                continue
            try:
                self._folder.remove(key)
                removed += 1
            except FileNotFoundError:  # another process was faster
                continue
            except OSError as error:
                left, problem = left + 1, _reason(error)
        if everything:
            self._memory.clear()
            self._remove_stale()
        return CacheCleared(removed, left, problem)

    def _is_wanted(self, key: str, matches: Callable[[bytes], bool]) -> bool:
        try:
            payload = unpack(self._folder.read(key)[0], key)
        except OSError:
            return False
        return payload is not None and matches(payload)

    def _remove(self, key: str) -> bool:
        with contextlib.suppress(OSError):
            self._folder.remove(key)
            return True
        return False

    def _tidy(self, fresh: str) -> None:
        """Drop what killed processes left and the least recently used beyond the bound, but not ``fresh``."""
        self._remove_stale()
        entries = list(self._folder.entries())
        total = sum(entry.bytes for entry in entries)
        if total > self.max_bytes:
            for key, size, _ in sorted(entries, key=lambda entry: entry.used):
                if key != fresh and self._remove(key):
                    total -= size
                if total <= _KEEP * self.max_bytes:
                    break
        self._room = self.max_bytes // 64

    def _remove_stale(self) -> None:
        """Drop what killed processes left; a younger temporary file may be one that is being written."""
        self._folder.remove_left_over(time.time() - _STALE_AFTER)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of ``key`` among processes and threads; in a folder without locks, among threads."""
        import filelock

        # A lock file cannot be removed safely, so keys share 4096; sharing one only makes a build wait.
        try:
            lock = filelock.FileLock(self._folder.lock(key[:3]), timeout=_LOCK_TIMEOUT, mode=0o600)
            held = lock.acquire(poll_interval=0.01)
        except (OSError, NotImplementedError, filelock.Timeout):
            with self._guard:
                held = self._locks.setdefault(key, threading.Lock())
        with held:
            yield

    def _write_problem(self) -> str:
        try:
            self._folder.try_to_write()
        except OSError as error:
            return _reason(error)
        return ""

    def _warn_of(self, error: OSError, kind: str, message: str) -> None:
        """Warn of what the disk says; of what may be another user's in a sentence of its own."""
        if isinstance(error, Distrusted):
            kind, message = "distrusted", f"{error.filename} is not used: {error.strerror}"
        self._warn_once(kind, message)

    def _warn_if_shared(self) -> None:
        if self._folder.allowed:
            message = f"{self.root} is used, as {paths.TRUST_VARIABLE} says: {self._folder.allowed}"
            self._warn_once("shared", message)

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, CacheWarning, stacklevel=4)


_caches: weakref.WeakSet[CubinCache] = weakref.WeakSet()


@forks.in_child
def _renew_locks() -> None:
    for cache in _caches:
        cache._renew_locks()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
