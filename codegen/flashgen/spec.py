"""Spec files: which kernels exist.

A spec is one YAML file and one kernel family (``docs/spec-reference.md`` describes its keys). Loading checks
all of it: the types and names of its keys, that each point of the axes has a tile on each target, and that
each tile fits its target's shared memory. Variants are made on demand, so the first call of a kernel does not
pay for the hundreds that it leaves alone.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, SpecError
from flashgen.params import Param
from flashgen.paths import specs_dir
from flashgen.schema import AxisValues, File, Name, ParamRow, Positive, ShortName, Target, conditions
from flashgen.tiles import Entry, TileTable, as_values, check_names
from flashgen.variant import Variant
from flashgen.yamlfile import Document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.yamlfile import Keys


class Spec:
    """One loaded spec file.

    ``name`` is the file's stem, ``direction`` "forward" or "backward". ``axes`` maps each axis to its values;
    ``targets`` names the targets, preferred first. Raises SpecError for a file that is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._document = document = Document(path)
        self._file = file = document.convert((), document.value, File)
        self.family = file.family
        self.direction = file.direction
        self.description = file.description
        self.axes = self._load_axes()
        self._targets = self._load_targets()
        check_names(document, file, self.axes)
        self.targets = tuple(self._targets)
        self._element_bytes = self._load_element_bytes()
        self._params = self._load_params()
        self._limiting = tuple(axis for axis in self.axes if any(axis in dict(p.when) for p in self._params))
        self._params_at: dict[tuple[str | int, ...], tuple[Param, ...]] = {}
        self._entries = TileTable(document, file, self.axes, self._targets, self._element_bytes).entries

    def __repr__(self) -> str:
        return f"Spec({str(self.path)!r})"

    def variants(self) -> tuple[Variant, ...]:
        """Every variant: in the order of the axes' values, then of the targets, then of the tile names."""
        return tuple(self._variant(entry) for entries in self._entries.values() for entry in entries)

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
        points = itertools.product(*wanted)
        return tuple(self._variant(entry) for point in points for entry in self._entries.get(point, ()))

    def error(self, keys: Keys, message: str) -> SpecError:
        """A SpecError about this file that names the line of ``keys``."""
        return self._document.error(keys, message)

    def _load_axes(self) -> dict[str, tuple[str | int, ...]]:
        axes = {}
        for axis, given in self._file.axes.items():
            self._document.convert(("axes", axis), axis, Name)
            values = tuple(self._document.convert(("axes", axis), given, AxisValues))
            if len(set(values)) < len(values):
                raise self.error(("axes", axis), f"a value stands twice in {given}")
            axes[axis] = values
        if "dtype" not in axes:
            raise self.error(("axes",), "the axis `dtype` is missing")
        return axes

    def _load_targets(self) -> dict[str, Target]:
        targets = {}
        for name, given in self._file.targets.items():
            self._document.convert(("targets", name), name, ShortName)
            targets[name] = self._document.convert(("targets", name), given, Target)
        if not targets:
            raise self.error(("targets",), "there is no target")
        return targets

    def _load_element_bytes(self) -> dict[str, int]:
        given, dtypes = self._file.element_bytes, self.axes["dtype"]
        for dtype, size in given.items():
            self._document.convert(("element_bytes", dtype), size, Positive)
            if dtype not in dtypes:
                allowed = ", ".join(map(str, dtypes))
                raise self.error(("element_bytes", dtype), f"not a value of axes.dtype; allowed: {allowed}")
        for dtype in dtypes:
            if dtype not in given:
                raise self.error(("element_bytes",), f"the size of dtype `{dtype}` is missing")
        return given

    def _load_params(self) -> tuple[Param, ...]:
        params: dict[str, Param] = {}
        condition = conditions("When", self.axes)
        for i, given in enumerate(self._file.params):
            row = self._document.convert(("params", i), given, ParamRow)
            if row.name in params:
                raise self.error(("params", i, "name"), f"a second parameter is called `{row.name}`")
            when = self._document.convert(("params", i, "when"), row.when, condition)
            limits = ((axis, getattr(when, axis)) for axis in self.axes)
            kept = tuple((axis, as_values(limit)) for axis, limit in limits if limit is not None)
            params[row.name] = Param(row.name, row.type, row.doc, kept)
        return tuple(params.values())

    def _params_of(self, axes: dict[str, str | int]) -> tuple[Param, ...]:
        key = tuple(axes[axis] for axis in self._limiting)
        if key not in self._params_at:
            self._params_at[key] = tuple(param for param in self._params if param.present(axes))
        return self._params_at[key]

    def _variant(self, entry: Entry) -> Variant:
        if entry.variant is None:
            file, row, target = self._file, entry.row, entry.point[-1]
            device = self._targets[target]
            axes = dict(zip(self.axes, entry.point, strict=False))
            entry.variant = Variant(
                family=file.family,
                spec=self.name,
                template=file.template,
                target=target,
                min_arch=device.min_arch,
                archs=tuple(device.compile_for),
                max_smem=device.max_smem,
                axes=tuple(axes.items()),
                tile=tuple((key, getattr(row, key)) for key in file.tile_keys),
                tile_name=row.name or "",
                threads=entry.threads,
                smem_bytes=entry.smem_bytes,
                element_bytes=self._element_bytes[axes["dtype"]],
                params=self._params_of(axes),
                header=file.header,
                efficiency=row.efficiency,
                committed=entry.committed,
                no_spills=row.no_spills,
                options=tuple(file.options),
                priority=self.targets.index(target),
                spec_dir=str(self.path.parent),
            )
        return entry.variant


def load_spec(path: str | os.PathLike[str]) -> Spec:
    """Load and check one spec file.

    Raises SpecError; its message has the file, the line, the key, what was found and what is allowed.
    """
    return Spec(Path(path).absolute())


def load_specs(extra: str | os.PathLike[str] | None = None) -> tuple[Spec, ...]:
    """All specs: the shipped folder, then the folders in ``FLASHGEN_SPECS``, then ``extra``.

    ``FLASHGEN_SPECS`` separates folders as ``PATH`` does. A file whose stem an earlier folder has as well
    takes its place; any other file adds a family. Nothing is kept between calls. Raises SpecError for a wrong
    file, for a folder without specs, and when two specs would give their kernels the same names.
    """
    folders = [Path(part) for part in os.environ.get("FLASHGEN_SPECS", "").split(os.pathsep) if part]
    if extra is not None:
        folders.append(Path(extra))
    paths: dict[str, Path] = {}
    for folder in (specs_dir(), *(folder.expanduser() for folder in folders)):
        paths |= {path.stem: path for path in _spec_files(folder)}
    specs = tuple(load_spec(path) for path in paths.values())
    owners: dict[tuple[str, str], Spec] = {}
    for spec in specs:
        for target in spec.targets:
            owner = owners.setdefault((spec.family, target), spec)
            if owner is not spec:
                why = f"{owner.path} has a family `{spec.family}` with a target `{target}` as well"
                raise spec.error(("family",), f"{why}; rename one of them")
    return specs


def find(variants: Iterable[Variant], **axes: Any) -> tuple[Variant, ...]:
    """The variants with the given axis values, one value or several for each axis, in their order.

    Raises KeyError for an axis that a variant does not have.
    """
    wanted = {axis: as_values(value) for axis, value in axes.items()}
    return tuple(v for v in variants if all(v.axis(axis) in values for axis, values in wanted.items()))


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
