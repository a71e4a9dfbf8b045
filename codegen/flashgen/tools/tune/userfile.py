"""The file of tiles that a user tuned on a GPU for one spec: adding what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from filelock import FileLock

from flashgen.families import tunedrows
from flashgen.families.check import examine
from flashgen.families.tuned import Tuned, path_for
from flashgen.toolchain import atomic

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    from flashgen.families.model import Point, Spec
    from flashgen.families.tunedrows import TunedRow


class Measured(NamedTuple):
    """A tile that won, its efficiency, and, for people, what was measured with what."""

    tile: Mapping[str, int]
    efficiency: float
    how: Mapping[str, Any]


class Written(NamedTuple):
    """The file, and what was wrong with rows of it that are gone now."""

    path: Path
    problems: tuple[str, ...]


def merge(
    spec: Spec,
    gpu: str,
    winners: Mapping[Point, Measured | None],
    folder: str | os.PathLike[str] | None = None,
) -> Written:
    """Bring the ``winners`` into the file of ``spec`` for ``gpu``, below ``folder`` or the user's own.

    A point's row takes the place of the one that is there; None takes it away, for the ordinary tile won.
    Rows of other points stay, except those that no longer fit the spec. The file appears whole or not at
    all, and processes that write at once wait for each other. Raises SpecError for a file that is damaged or
    another GPU's, OSError where it cannot be written.
    """
    path = path_for(spec.name, gpu, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        present, problems = read(spec, gpu, folder)
        rows = {row.point: Measured(row.tile, row.efficiency, row.measured) for row in present} | winners
        domain = (*spec.axes, "target")
        lines = [
            f"  - {_row_text(_members(dict(zip(domain, point, strict=True)), row))}"
            for point, row in rows.items()
            if row is not None
        ]
        if lines:
            atomic.replace(path, "\n".join([*_head(spec, gpu), *lines, ""]).encode())
        else:
            path.unlink(missing_ok=True)
    return Written(path, tuple(problems))


def read(
    spec: Spec, gpu: str, folder: str | os.PathLike[str] | None = None
) -> tuple[list[TunedRow], list[str]]:
    """The rows that the file has now, if there is one, and what is wrong with others; see `tunedrows.read`.

    Raises SpecError for a file that is damaged or another GPU's.
    """
    path = path_for(spec.name, gpu, folder)
    if not path.exists():
        return [], []
    checked = examine(spec.path, spec.text)
    return tunedrows.read(Tuned(path, gpu, path.read_bytes()), checked.file, checked.content, checked.table)


def _row_text(members: Mapping[str, Any]) -> str:
    """A row on one line: ``{head_dim: 64, dtype: fp16, ...}``."""
    return yaml.safe_dump(dict(members), default_flow_style=True, sort_keys=False, width=1 << 20).strip()


def _members(point: Mapping[str, Any], row: Measured) -> dict[str, Any]:
    members = {**point, **row.tile, "efficiency": row.efficiency}
    return {**members, "measured": dict(row.how)} if row.how else members


def _head(spec: Spec, gpu: str) -> list[str]:
    return [
        f"# Tiles of {spec.name} that `flashgen tune --write` measured on this GPU. Dispatch prefers them to",
        "# the ordinary ones there. A row, or the whole file, may be deleted. `measured` is for people.",
        _row_text({"gpu": gpu})[1:-1],
        "tiles:",
    ]
