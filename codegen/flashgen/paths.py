"""Where flashgen's own files lie: specs, templates, its code, the generated slice and the disk cache."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from flashgen.errors import BadParam, InternalError

__all__ = ["specs_dir", "templates_dir"]

BUNDLE_VARIABLE = "FLASHGEN_BUNDLE"  # names bundles of compiled kernels, separated as in PATH
TRUST_VARIABLE = "FLASHGEN_TRUST"  # names caches and bundles that other users may write, separated as in PATH
# The name of a file below a folder: relative, and without a step upwards.
INSIDE = r"\A(?!/)(?!(?:.*/)?\.\.(?:/|\Z))[^\0\n\\]+\Z"

_PACKAGE = Path(__file__).resolve().parent


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
    parts = (package / "paths.py", root / "specs", root / "templates")
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


def generated_dir() -> Path:
    """The committed slice of rendered sources. Raises BadParam outside a checkout; a wheel has none."""
    root = checkout()
    if root is None:
        raise BadParam("generated/ belongs to a checkout of the repository; name another folder with --out")
    return root / "generated"


def cache_dir() -> Path:
    """The folder of compiled kernels: ``FLASHGEN_CACHE_DIR``, else the user's cache folder. It need not
    exist. Raises BadParam for the home of a user that there is not.
    """
    chosen = os.environ.get("FLASHGEN_CACHE_DIR")
    if chosen:
        return expanded("FLASHGEN_CACHE_DIR", chosen)
    return _users("XDG_CACHE_HOME", "~/.cache", "FLASHGEN_CACHE_DIR") / "flashgen"


def tuned_dir() -> Path:
    """The folder of tiles tuned on this machine: ``FLASHGEN_TUNED``, else in the user's configuration folder.
    It need not exist. Raises BadParam where that variable names what cannot be a folder.
    """
    chosen = os.environ.get("FLASHGEN_TUNED")
    if chosen:
        folder = expanded("FLASHGEN_TUNED", chosen)
        try:
            found = next(filter(Path.exists, (folder, *folder.parents)), None)
            why = "" if found is None or found.is_dir() else f"{found} is no folder"
        except OSError as error:
            why = f"{error.filename} cannot be looked at: {error.strerror}"
        if why:
            raise BadParam(
                f"FLASHGEN_TUNED is {chosen!r}, but {why}; name a folder, which need not exist, or unset it"
            )
        return folder
    return _users("XDG_CONFIG_HOME", "~/.config", "FLASHGEN_TUNED") / "flashgen" / "tuned"


def expanded(variable: str, chosen: str | os.PathLike[str]) -> Path:
    """The path that a variable, or an argument, names. Raises BadParam for the home of a user that there is
    not.
    """
    try:
        return Path(chosen).expanduser()
    except RuntimeError:
        user = Path(chosen).parts[0]
        raise BadParam(
            f"{variable} is {str(chosen)!r}, but {user} is the home of no user; write the whole path"
        ) from None


def _users(variable: str, default: str, own: str) -> Path:
    """A base folder of the XDG specification, which wants absolute paths and says to ignore others. Raises
    BadParam, which names flashgen's ``own`` variable, for a user without a home.
    """
    chosen = Path(os.environ.get(variable, ""))
    if chosen.is_absolute():
        return chosen
    try:
        return Path(default).expanduser()
    except RuntimeError:
        raise BadParam(
            f"this user has no home folder, so {default} is nowhere; set {own} to a folder, or HOME"
        ) from None
