"""Bundles: compiled kernels in one file, a read-only layer under the disk cache.

A bundle is a zip file: ``manifest.json`` lists its kernels and its checked specs, and says which flashgen and
which compiler made it; ``entries/`` has entries of the disk cache, each under its key and with its SHA-256.
What the manifest does not list is not served. Where ``FLASHGEN_BUNDLE`` names bundles, a kernel in one of
them needs neither NVRTC nor a disk cache that can be written.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import re
import warnings
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen import __version__
from flashgen.errors import BadParam, CacheWarning
from flashgen.host import forks, paths
from flashgen.toolchain import atomic, private
from flashgen.toolchain.cacheentry import MAX_BYTES as MAX_ENTRY
from flashgen.toolchain.cacheentry import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT = 2
_MANIFEST = "manifest.json"
_FOLDER = "entries/"
_REMEDY = "copy it again, or make it anew with `flashgen bundle`"
# What the manifest, and the file, may have in bytes; all shipped kernels have half of that. Zip packs zeros a
# thousandfold.
MAX_MANIFEST, MAX_BUNDLE = 1 << 22, 1 << 30
_KEY = re.compile("[0-9a-f]{64}")
# What zipfile raises for damaged data, members of other kinds, and encrypted ones.
_DAMAGED = (
    OSError,
    zipfile.BadZipFile,
    zlib.error,
    LookupError,
    ValueError,
    NotImplementedError,
    RuntimeError,
)
# zipfile has a lock for each file, which a child of a fork would find locked if a thread of its parent reads.
_reading = forks.guard()
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # a zip's first moment: equal kernels make equal files


class Held(NamedTuple):
    """One kernel of a bundle: its variant's name, its architecture, and its key in the cache."""

    variant: str
    arch: str
    key: str


class HeldSpec(NamedTuple):
    """One checked spec of a bundle: the spec's name, and the key of its snapshot in the cache."""

    spec: str
    key: str


class Bundle:
    """A bundle that was opened and checked: of this version of flashgen, with an entry for all that it lists.
    ``distrust`` says why another user could have written it, "" if only this user and root could.

    Raises BadParam where it is not; the message says what would do. Threads may share it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with private.reached(path) as way:
                data, status = private.read(way.name, MAX_BUNDLE, way.folder)
            self.distrust = way.distrust or private.distrust(status)
            # In memory: a process that is forked would share the position in an open file.
            self._file = zipfile.ZipFile(io.BytesIO(data))
            manifest = json.loads(self._read(_MANIFEST, MAX_MANIFEST))
            maker = manifest["format"], manifest["flashgen"]
            if maker == (FORMAT, __version__):
                self.compiler: str = manifest["compiler"]
                self.kernels = tuple(Held(**entry) for entry in manifest["kernels"])
                self.specs = tuple(HeldSpec(**entry) for entry in manifest["specs"])
                for text in (self.compiler, *itertools.chain(*self.kernels, *self.specs)):
                    if not isinstance(text, str):
                        raise TypeError(f"its manifest has {text!r} where a text should be")
        except FileNotFoundError:
            raise BadParam(
                f"{path} does not exist; `flashgen bundle --select ... -o {path}` writes a bundle"
            ) from None
        except (*_DAMAGED, TypeError) as error:
            raise BadParam(f"{path} is not a bundle, or is damaged ({error}); {_REMEDY}") from error
        if maker != (FORMAT, __version__):
            raise BadParam(
                f"{path} was made by flashgen {maker[1]} (format {maker[0]}); this is flashgen {__version__} "
                f"(format {FORMAT}), which reads only its own bundles; {_REMEDY}"
            )
        # A user who packs it again may add other folders and files.
        members = (name.removeprefix(_FOLDER) for name in self._file.namelist() if name.startswith(_FOLDER))
        held = {name for name in members if _KEY.fullmatch(name)}
        listed = {entry.key: entry.variant for entry in self.kernels}
        listed |= {entry.key: entry.spec for entry in self.specs}
        missing = [name for key, name in listed.items() if key not in held]
        if missing:
            raise BadParam(f"{path} lists {missing[0]} and does not hold it; {_REMEDY}")
        self._listed = frozenset(listed)

    def get(self, key: str) -> bytes | None:
        """The payload under ``key``, or None. Raises BadParam where it is damaged."""
        if key not in self._listed:
            return None
        try:
            data = self._read(_FOLDER + key, MAX_ENTRY)
        except _DAMAGED as error:
            raise BadParam(f"{self.path} is damaged: {key} cannot be read ({error}); {_REMEDY}") from error
        payload = unpack(data, key)
        if payload is None:
            raise BadParam(f"{self.path} is damaged: the SHA-256 of {key} does not match; {_REMEDY}")
        return payload

    def _read(self, name: str, most: int) -> bytes:
        """A member of the file. Raises ValueError for more than ``most`` bytes, which are not unpacked."""
        with _reading, self._file.open(name) as member:
            data = member.read(most + 1)  # the size that the zip states need not be true
        if len(data) > most:
            raise ValueError(f"{name} has more than {most:,} bytes")
        return data

    def verify(self) -> None:
        """Read every entry. Raises BadParam for a damaged one."""
        for key in self._listed:
            self.get(key)


def write(
    path: Path,
    compiler: str,
    entries: Mapping[str, bytes],
    kernels: Iterable[Held],
    specs: Iterable[HeldSpec] = (),
) -> None:
    """Write `packed` to ``path``. It appears under its name when it is whole."""
    atomic.replace(path, packed(compiler, entries, kernels, specs))


def packed(
    compiler: str, entries: Mapping[str, bytes], kernels: Iterable[Held], specs: Iterable[HeldSpec] = ()
) -> bytes:
    """A bundle of ``kernels`` and ``specs``, whose payloads are ``entries``, by their keys."""
    manifest: dict[str, Any] = {"format": FORMAT, "flashgen": __version__, "compiler": compiler}
    manifest["kernels"] = [entry._asdict() for entry in kernels]
    manifest["specs"] = [entry._asdict() for entry in specs]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_member(_MANIFEST), json.dumps(manifest, indent=2))
        for key in sorted(entries):
            file.writestr(_member(_FOLDER + key), pack(key, entries[key]))
    return archive.getvalue()


def active(value: str | None = None) -> tuple[Bundle, ...]:
    """The bundles that ``value`` names, separated as in PATH; None: FLASHGEN_BUNDLE. Opened once each.

    Raises BadParam for one that cannot be used, and for one that another user could have written; where
    FLASHGEN_TRUST names that one, it is used, with a CacheWarning.
    """
    value = os.environ.get(paths.BUNDLE_VARIABLE, "") if value is None else value
    named = [part for part in value.split(os.pathsep) if part]
    trust = os.environ.get(paths.TRUST_VARIABLE, "")
    return tuple(_open(paths.expanded(paths.BUNDLE_VARIABLE, part), trust) for part in named)


@functools.cache
def _open(path: Path, trust: str) -> Bundle:
    """``trust`` is what FLASHGEN_TRUST says now."""
    bundle = Bundle(path)
    if bundle.distrust and not private.is_trusted(path):
        refused = private.Distrusted(path, bundle.distrust)
        raise BadParam(f"{path} is not used: {refused.strerror}")
    if bundle.distrust:
        message = f"{path} is used, as {paths.TRUST_VARIABLE} says: {bundle.distrust}"
        warnings.warn(message, CacheWarning, stacklevel=2)
    return bundle


def installed() -> tuple[Bundle, ...]:
    """The bundle of the package flashgen-kernels, or none where that is not installed. Raises BadParam where
    it belongs to another version of flashgen, or is damaged.

    Who may write to it is not checked: they may write to the packages beside it as well.
    """
    path = paths.kernels_bundle()
    try:
        return () if path is None else (Bundle(path),)
    except BadParam as error:
        install = f"pip install flashgen-kernels=={__version__}"
        raise BadParam(f"the installed flashgen-kernels is not used: {error}; or {install}") from error


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, LONG_AGO)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = 0o644 << 16
    return member
