"""Tiles that were measured on one GPU: where their files are.

Below one folder, ``<GPU>/<spec>.yaml`` has rows for that spec on that GPU; `flashgen tune --write` makes it.
``tunedrows`` checks what such a file holds.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

from flashgen.errors import BadParam, TunedWarning
from flashgen.families.bases import MAX_BYTES
from flashgen.host.paths import read_file, tuned_dir


class Tuned(NamedTuple):
    """The text of the file of one spec for the GPU called ``gpu``."""

    path: Path
    gpu: str
    text: bytes

    def warn(self, problem: str) -> None:
        """Say that something in the file is left out; ``problem`` begins with its line."""
        warnings.warn(f"{self.path}:{problem}. {ADVICE}", TunedWarning, stacklevel=3)


ADVICE = "It is left out. To mend it, delete it and measure anew: flashgen tune --write"


def slug(gpu: str) -> str:
    """The name of a GPU as a folder's name: ``NVIDIA H200`` is ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"


def path_for(spec: str, gpu: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The file of a spec for a GPU, below ``folder`` or the user's own. It need not exist."""
    return Path(folder or tuned_dir()) / slug(gpu) / f"{spec}.yaml"


def find(spec: str, gpu: str) -> Tuned | None:
    """What the user has tuned for a spec on a GPU; None, with a warning, where the file cannot be read."""
    path = path_for(spec, gpu)
    try:
        return Tuned(path, gpu, read_file(path, MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        Tuned(path, gpu, b"").warn(f"1: cannot be read: {error.strerror}")
        return None


def present_gpu() -> str | None:
    """The name of the first GPU of this machine, if there is one and any GPU has been tuned at all.

    Where nothing has been tuned this costs a look at the disk, and loads no CUDA.
    """
    if not _any_tuned():
        return None
    from flashgen.runtime import device

    return device.device(0).name if device.available() else None


def _any_tuned() -> bool:
    """Whether there is a folder of tuned tiles. A user without a home, or without access to it, has none."""
    try:
        return tuned_dir().is_dir()
    except (BadParam, OSError):
        if os.environ.get("FLASHGEN_TUNED"):
            raise
        return False
