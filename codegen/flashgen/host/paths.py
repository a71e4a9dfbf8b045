"""Where flashgen's own files are: specs, templates, its code, the generated slice and the disk cache."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.util
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import BadParam, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["specs_dir", "templates_dir"]

BUNDLE_VARIABLE = "FLASHGEN_BUNDLE"  # names bundles of compiled kernels, separated as in PATH
TRUST_VARIABLE = "FLASHGEN_TRUST"  # names caches and bundles that other users may write, separated as in PATH
# The package with compiled kernels, a distribution beside this one, and the bundle in it.
KERNELS_PACKAGE, KERNELS_BUNDLE = "flashgen_kernels", "kernels.zip"
# The name of a file below a folder: relative, and without a step upwards.
INSIDE = r"\A(?!/)(?!(?:.*/)?\.\.(?:/|\Z))[^\0\n\\]+\Z"

_TEMPORARY = "TMPDIR names another folder"
_PACKAGE = Path(__file__).resolve().parent.parent


def checkout() -> Path | None:
    """The repository's root when the package runs from a checkout (in place or editable), else None."""
    root = _PACKAGE.parent.parent
    return root if _package_of(root) == _PACKAGE else None


def unused_checkout(folder: Path) -> Path | None:
    """The checkout of flashgen around ``folder`` whose files are not the ones in use; None if there is none.

    Specs and templates that are edited there have no effect on this process.
    """
    for root in (folder, *folder.parents):
        if _package_of(root):
            return None if root == checkout() else root
    return None


def _package_of(root: Path) -> Path | None:
    """The package in ``root`` if that is a checkout of the repository."""
    package = root / "codegen" / "flashgen"
    parts = (package / "host" / "paths.py", root / "specs", root / "templates")
    return package if all(part.exists() for part in parts) else None


def data_dir(name: str) -> Path:
    """The folder ``specs`` or ``templates``: the repository's own in a checkout, the packaged copy in a
    wheel.

    Raises InternalError when neither is there, which means a broken installation.
    """
    root = checkout()
    folder = root / name if root else _PACKAGE / "_data" / name
    if not folder.is_dir():
        raise InternalError(f"{folder} is missing, so this installation is incomplete; reinstall flashgen")
    return folder


def specs_dir() -> Path:
    """The folder of the shipped spec files."""
    return data_dir("specs")


@functools.cache
def kernels_bundle() -> Path | None:
    """The bundle of the package flashgen-kernels, which is not imported; None where it is not installed."""
    package = importlib.util.find_spec(KERNELS_PACKAGE)
    folders = list(package.submodule_search_locations or ()) if package else []
    return next((path for folder in folders if (path := Path(folder) / KERNELS_BUNDLE).is_file()), None)


def templates_dir() -> Path:
    """The folder of the shipped templates, with ``lib/`` and ``include/flashgen/`` below it."""
    return data_dir("templates")


@functools.cache
def code_digest(*rooms: str) -> bytes:
    """SHA-256 over the code of some rooms of this package, to tell apart what different versions made."""
    digest = hashlib.sha256()
    for room in rooms:
        for module in sorted((_PACKAGE / room).glob("*.py")):
            digest.update(module.name.encode() + b"\0" + module.read_bytes())
    return digest.digest()


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file. Raises OSError, also for a pipe or a device, which could block or never end, and
    for more than ``most`` bytes.
    """
    return read_with_status(path, most)[0]


def read_with_status(
    path: str | os.PathLike[str], most: int, folder: int | None = None
) -> tuple[bytes, os.stat_result]:
    """As `read_file`, and the status of the file from the same moment. ``path`` counts from the folder of
    this descriptor, if any, and is no link there.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if folder is None else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=folder)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))
        if status.st_size > most:
            why = f"it has {status.st_size:,} bytes; at most {most:,} are read"
            raise OSError(errno.EFBIG, why, os.fspath(path))
        with os.fdopen(handle, "rb", buffering=0, closefd=False) as file:
            return file.read(), status
    finally:
        os.close(handle)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, removed at the end. Raises InternalError where there can be none, or it is full."""
    import tempfile  # most calls need none

    try:
        temporary = tempfile.TemporaryDirectory(prefix="flashgen-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InternalError(f"no temporary folder can be made: {error}; {_TEMPORARY}") from error
    with temporary as folder:
        try:
            yield Path(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            where = Path(folder).parent
            raise InternalError(
                f"the temporary folder {where} cannot be written: {error.strerror}; {_TEMPORARY}"
            ) from error


def temporary_problem() -> str:
    """Why temporary files cannot be used, or libraries in them not be loaded; "" where they can."""
    try:
        with temporary_folder() as folder, (folder / "probe").open("wb") as probe:
            probe.write(bytes(1 << 20))
            probe.flush()
            flags = os.statvfs(folder).f_flag if hasattr(os, "statvfs") else 0
    except InternalError as error:
        return str(error)
    if flags & getattr(os, "ST_NOEXEC", 0):
        return f"the temporary folder {folder.parent} is mounted noexec: no library in it loads; {_TEMPORARY}"
    return ""


def generated_dir() -> Path:
    """The committed slice of rendered sources. Raises BadParam outside a checkout; a wheel has none."""
    root = checkout()
    if root is None:
        raise BadParam("generated/ belongs to a checkout of the repository; name another folder with --out")
    return root / "generated"


def cache_dir() -> Path:
    """The folder of compiled kernels: ``FLASHGEN_CACHE_DIR``, else the user's cache folder. It need not
    exist. Raises BadParam where it would be in the home of a user who has none.
    """
    chosen = os.environ.get("FLASHGEN_CACHE_DIR")
    if chosen:
        return expanded("FLASHGEN_CACHE_DIR", chosen)
    import platformdirs  # takes 2 ms beside CuPy or PyTorch, 20 without

    with _home_or("FLASHGEN_CACHE_DIR"):
        return platformdirs.user_cache_path("flashgen")


def tuned_dir() -> Path:
    """The folder of tiles tuned on this machine: ``FLASHGEN_TUNED``, else in the user's configuration folder.
    It need not exist. Raises BadParam where that variable names what cannot be a folder.
    """
    chosen = os.environ.get("FLASHGEN_TUNED")
    if chosen:
        folder = expanded("FLASHGEN_TUNED", chosen)
        try:
            nearest = next(filter(Path.exists, (folder, *folder.parents)), None)
            why = "" if nearest is None or nearest.is_dir() else f"{nearest} is not a folder"
        except OSError as error:
            why = f"{error.filename} cannot be looked at: {error.strerror}"
        if why:
            raise BadParam(
                f"FLASHGEN_TUNED is {chosen!r}, but {why}; name a folder, which need not exist, or unset it"
            )
        return folder
    import platformdirs

    with _home_or("FLASHGEN_TUNED"):
        return platformdirs.user_config_path("flashgen") / "tuned"


def expanded(variable: str, chosen: str | os.PathLike[str]) -> Path:
    """The path that a variable, or an argument, names. Raises BadParam for a home, ``~user``, of no user."""
    try:
        return Path(chosen).expanduser()
    except RuntimeError:
        user = Path(chosen).parts[0]
        raise BadParam(
            f"{variable} is {str(chosen)!r}, but {user} is the home of no user; write the whole path"
        ) from None


@contextlib.contextmanager
def _home_or(variable: str) -> Iterator[None]:
    """Raises BadParam, which names a variable to set instead, for a user without a home."""
    try:
        yield
    except RuntimeError:
        raise BadParam(
            f"this user has no home folder, so flashgen's files have no place; set {variable} to a folder, "
            "or HOME"
        ) from None
