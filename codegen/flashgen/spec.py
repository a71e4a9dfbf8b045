"""Spec files: which kernels exist.

A spec is one YAML file and one kernel family (``docs/spec-reference.md`` describes its keys). Loading checks
all of it: the types and names of its keys, that each point of the axes has a tile on each target, and that
each tile fits its target's shared memory. Variants are made on demand, so the first call of a kernel does not
pay for the hundreds that it leaves alone.

Checking is the work of ``specfile``, which needs a YAML parser and a validator. This module needs neither: a
text that was checked once is known again by its snapshot in the disk cache (``snapshot``).
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, SpecError
from flashgen.params import TENSOR_MAP
from flashgen.paths import specs_dir
from flashgen.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashgen.cache import CubinCache
    from flashgen.params import Box, Param
    from flashgen.yamlfile import Keys

# Axis values in spec order, then the target.
Point = tuple[Any, ...]
# Some members of Variant, by name.
Members = dict[str, Any]


class Entry(NamedTuple):
    """A point's tile: the index of its row in ``Content.rows``, and what follows from the two together.

    ``boxes`` are those of the tensor maps among its parameters, in their order.
    """

    row: int
    threads: int
    smem_bytes: int
    committed: bool
    boxes: tuple[Box, ...] = ()


class Content(NamedTuple):
    """What a checked spec file says, in plain values.

    Variants are put together from ``family``, which all of them share, from their target, their tile row and
    their entry. ``targets`` are in order of preference; ``entries`` has the tiles of each point, the default
    one first, and no point that is excluded. ``problems`` says, line by line, what is left out of a file of
    tuned tiles.
    """

    direction: str
    description: str
    axes: dict[str, tuple[str | int, ...]]
    element_bytes: dict[str, int]
    params: tuple[Param, ...]
    family: Members
    targets: dict[str, Members]
    rows: tuple[Members, ...]
    entries: dict[Point, tuple[Entry, ...]]
    problems: tuple[str, ...] = ()


class Spec:
    """One loaded spec file.

    ``name`` is the file's stem, ``direction`` "forward" or "backward". ``axes`` maps each axis to its values;
    ``targets`` names the targets, preferred first. ``content`` is what ``specfile.check`` made of
    ``text``, and may have tuned tiles besides.
    """

    def __init__(self, path: Path, text: bytes, content: Content) -> None:
        self.path = path
        self.name = path.stem
        self.content = content
        self.family: str = content.family["family"]
        self.direction = content.direction
        self.description = content.description
        self.axes = content.axes
        self.targets = tuple(content.targets)
        self.text = text
        self._limiting = tuple(dict.fromkeys(key for param in content.params for key, _ in param.when))
        self._params_at: dict[tuple[Any, ...], tuple[Param, ...]] = {}
        self._made: dict[tuple[Point, int], Variant] = {}

    def __repr__(self) -> str:
        return f"Spec({str(self.path)!r})"

    def variants(self) -> tuple[Variant, ...]:
        """Every variant: in the order of the axes' values, then of the targets, then of the tile names."""
        return self._at(self.content.entries)

    def select(self, *, target: str | Iterable[str] | None = None, **axes: Any) -> tuple[Variant, ...]:
        """The variants at some points, without making the others.

        Each axis may be given one value or several; an axis left out takes all of its values. A value that
        the spec does not have selects nothing. Raises BadParam for an axis that it does not have.
        """
        unknown = sorted(axes.keys() - self.axes.keys())
        if unknown:
            raise BadParam(f"{self.name} has no axis {', '.join(unknown)}; it has {', '.join(self.axes)}")
        wanted = [as_values(axes.get(axis, values)) for axis, values in self.axes.items()]
        wanted.append(self.targets if target is None else as_values(target))
        return self._at(itertools.product(*wanted))

    def error(self, keys: Keys, message: str) -> SpecError:
        """A SpecError about this file that names the line of ``keys``."""
        from flashgen.yamlfile import Document

        return Document(self.path, self.text).error(keys, message)

    def _at(self, points: Iterable[Point]) -> tuple[Variant, ...]:
        entries = self.content.entries
        return tuple(self._variant(point, entry) for point in points for entry in entries.get(point, ()))

    def _variant(self, point: Point, entry: Entry) -> Variant:
        key = point, entry.row
        if key not in self._made:
            content, target = self.content, point[-1]
            axes = dict(zip(self.axes, point, strict=False))
            self._made[key] = Variant(
                **content.family,
                **content.targets[target],
                **content.rows[entry.row],
                spec=self.name,
                spec_dir=str(self.path.parent),
                target=target,
                axes=tuple(axes.items()),
                threads=entry.threads,
                smem_bytes=entry.smem_bytes,
                committed=entry.committed,
                element_bytes=content.element_bytes[axes["dtype"]],
                params=self._params_of(axes | dict(content.rows[entry.row]["tile"]), entry.boxes),
            )
        return self._made[key]

    def _params_of(self, values: dict[str, str | int], boxes: tuple[Box, ...]) -> tuple[Param, ...]:
        key = (*(values[name] for name in self._limiting), boxes)
        if key not in self._params_at:
            present = (param for param in self.content.params if param.present(values))
            left = iter(boxes)
            self._params_at[key] = tuple(
                replace(param, box=next(left)) if param.ctype == TENSOR_MAP else param for param in present
            )
        return self._params_at[key]


def load_spec(path: str | os.PathLike[str], cache: CubinCache | None = None, gpu: str | None = None) -> Spec:
    """Load and check one spec file, or know from its snapshot in ``cache`` that it was checked before.

    With the name of a ``gpu``, tiles that the user tuned on it are added; one that does not fit is left out
    with a TunedWarning. Raises SpecError; its message has the file, the line, the key, what was found and
    what is allowed.
    """
    path = Path(path).absolute()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error

    tuned = None
    if gpu is not None:
        from flashgen.tuned import find

        tuned = find(path.stem, gpu)

    def check() -> Content:
        from flashgen.specfile import check

        return check(path, text, tuned)

    if cache is None:
        content = check()
    else:
        from flashgen.snapshot import recall

        # No YAML holds a NUL, so these bytes stand for these three texts alone.
        known_by = text if tuned is None else b"\0".join((text, tuned.gpu.encode(), tuned.text))
        content = recall(known_by, cache, check)
    for problem in content.problems:
        tuned.warn(problem)
    return Spec(path, text, content)


def load_specs(
    extra: str | os.PathLike[str] | None = None, cache: CubinCache | None = None, gpu: str | None = None
) -> tuple[Spec, ...]:
    """All specs: the shipped folder, then the folders in ``FLASHGEN_SPECS``, then ``extra``.

    ``FLASHGEN_SPECS`` separates folders as ``PATH`` does. A file whose stem an earlier folder has as well
    takes its place; any other file adds a family. ``cache`` keeps what was checked for later processes;
    ``gpu`` is as for `load_spec`.
    Raises SpecError for a wrong file, for a folder without specs, and when two specs would give their kernels
    the same names.
    """
    folders = [Path(part) for part in os.environ.get("FLASHGEN_SPECS", "").split(os.pathsep) if part]
    if extra is not None:
        folders.append(Path(extra))
    paths: dict[str, Path] = {}
    for folder in (specs_dir(), *(folder.expanduser() for folder in folders)):
        paths |= {path.stem: path for path in _spec_files(folder)}
    specs = tuple(load_spec(path, cache, gpu) for path in paths.values())
    owners: dict[tuple[str, str], Spec] = {}
    for spec in specs:
        for target in spec.targets:
            owner = owners.setdefault((spec.family, target), spec)
            if owner is not spec:
                why = f"{owner.path} has a family `{spec.family}` with a target `{target}` as well"
                raise spec.error(("family",), f"{why}; rename one of them")
    return specs


def as_values(value: Any) -> Sequence[Any]:
    """One value or several as a sequence."""
    return (value,) if isinstance(value, (str, int)) else tuple(value)


def _spec_files(folder: Path) -> list[Path]:
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise SpecError(f"{folder}: this spec folder cannot be read: {error.strerror}") from error
    for path in paths:
        if path.suffix == ".yml":
            raise SpecError(f"{path}: spec files end in .yaml; rename it")
    found = [path for path in paths if path.suffix == ".yaml"]
    if not found:
        raise SpecError(f"{folder}: a spec folder needs at least one .yaml file; this one has none")
    return found
