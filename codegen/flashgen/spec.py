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
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from flashgen.errors import BadParam, SpecError
from flashgen.expression import Expression
from flashgen.params import CTYPES, Param
from flashgen.paths import specs_dir
from flashgen.variant import Variant
from flashgen.yamlfile import Document, Keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*$")]
_TileName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9]*$")]
_Arch = Annotated[str, msgspec.Meta(pattern=r"^sm_[0-9]+[af]?$")]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]
_Value = Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+$")]

# What templates find beside the axes and the tile keys; a spec must not give these names to its own.
CONTEXT_NAMES = frozenset(
    ("variant", "name", "header", "params_struct", "element_bytes", "threads", "smem_bytes", "target")
)
_ROW_NAMES = ("name", "target", "efficiency", "no_spills")


class _Target(msgspec.Struct, forbid_unknown_fields=True):
    min_arch: _Arch
    max_smem: _Positive
    compile_for: Annotated[list[_Arch], msgspec.Meta(min_length=1)]


class _Param(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    type: Literal[CTYPES]
    doc: str = ""
    when: dict[str, Any] = {}


class _Dispatch(msgspec.Struct, forbid_unknown_fields=True):
    prefer: Literal["least_time"] = "least_time"


class _File(msgspec.Struct, forbid_unknown_fields=True, rename={"direction": "pass"}):
    family: _Name
    template: str
    header: str
    direction: Literal["forward", "backward"]
    axes: dict[str, Any]
    targets: dict[str, Any]
    element_bytes: dict[str, Any]
    threads: int | str
    smem_bytes: int | str
    tile_keys: Annotated[list[_Name], msgspec.Meta(min_length=1)]
    tiles: Annotated[list[Any], msgspec.Meta(min_length=1)]
    params: Annotated[list[Any], msgspec.Meta(min_length=1)]
    description: str = ""
    exclude: list[Any] = []
    commit: list[Any] = []
    no_spills: bool = False
    dispatch: _Dispatch = msgspec.field(default_factory=_Dispatch)
    options: list[str] = []


class _Conditions:
    """Entries that each restrict some axes, asked many times which of them hold at a point.

    Bit i of ``_bits[axis][value]`` says that entry i admits the value, so a question is one ``and`` per axis.
    """

    def __init__(self, domain: Mapping[str, Sequence[Any]], entries: Iterable[Any]) -> None:
        rows = list(entries)
        self._all = (1 << len(rows)) - 1
        self._bits: list[dict[Any, int]] = []
        for axis, values in domain.items():
            admitted = [_as_list(getattr(row, axis)) for row in rows]
            if any(given is not None for given in admitted):
                bits = {
                    value: sum(1 << i for i, given in enumerate(admitted) if given is None or value in given)
                    for value in values
                }
            else:
                bits = dict.fromkeys(values, self._all)
            self._bits.append(bits)

    def holding(self, point: Iterable[Any]) -> int:
        """Bit mask of the entries that hold at ``point``, whose values come in the order of the domain."""
        mask = self._all
        for bits, value in zip(self._bits, point, strict=True):
            mask &= bits[value]
        return mask


class _Entry:
    """A point with its tile, from which a Variant is made when it is asked for."""

    __slots__ = ("committed", "row", "smem_bytes", "target", "threads", "values", "variant")

    def __init__(
        self, values: tuple, target: str, row: Any, threads: int, smem_bytes: int, committed: bool
    ) -> None:
        self.values, self.target, self.row = values, target, row
        self.threads, self.smem_bytes, self.committed = threads, smem_bytes, committed
        self.variant: Variant | None = None


class Spec:
    """One loaded spec file. ``axes`` maps each axis to its values, ``targets`` names the targets, preferred
    first.

    ``name`` is the file's stem; ``direction`` is "forward" or "backward".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._document = document = Document(path)
        self._file = file = document.convert((), document.value, _File)
        self.family, self.template, self.header = file.family, file.template, file.header
        self.direction, self.description = file.direction, file.description
        self.axes = self._load_axes()
        self._targets = {
            str(document.convert(("targets",), name, _TileName)): document.convert(
                ("targets", name), value, _Target
            )
            for name, value in file.targets.items()
        }
        self.targets = tuple(self._targets)
        if not self.targets:
            raise document.error(("targets",), "a spec needs at least one target")
        self._element_bytes = self._load_element_bytes()
        self._params = self._load_params()
        self._params_of: dict[tuple, tuple[Param, ...]] = {}
        self._check_names()
        self._entries = self._enumerate()

    def __repr__(self) -> str:
        return f"Spec({str(self.path)!r})"

    def variants(self) -> tuple[Variant, ...]:
        """Every variant: the axes in spec order, then the targets, then the tiles."""
        return tuple(self._variant(entry) for entries in self._entries.values() for entry in entries)

    def select(self, *, target: str | Iterable[str] | None = None, **axes: Any) -> tuple[Variant, ...]:
        """The variants at some points only, without making the others.

        Each axis may be given one value or several; an axis left out takes all of its values. A value that
        the spec does not have selects nothing; an axis that it does not have raises BadParam.
        """
        unknown = axes.keys() - self.axes.keys()
        if unknown:
            raise BadParam(
                f"{self.name} has no axis {', '.join(sorted(unknown))}; it has {', '.join(self.axes)}"
            )
        wanted = [_as_list(axes.get(axis)) or values for axis, values in self.axes.items()]
        wanted.append(_as_list(target) or self.targets)
        return tuple(
            self._variant(entry)
            for point in itertools.product(*wanted)
            for entry in self._entries.get(point, ())
        )

    def _load_axes(self) -> dict[str, tuple[str | int, ...]]:
        axes = {}
        for axis, values in self._file.axes.items():
            self._document.convert(("axes", axis), axis, _Name)
            checked = self._document.convert(
                ("axes", axis), values, Annotated[list[_Value], msgspec.Meta(min_length=1)]
            )
            if len(set(checked)) < len(checked):
                raise self._document.error(("axes", axis), f"a value stands twice in {checked}")
            axes[axis] = tuple(checked)
        for needed in ("dtype",):
            if needed not in axes:
                raise self._document.error(("axes",), f"the axis `{needed}` is missing")
        return axes

    def _load_element_bytes(self) -> dict[str, int]:
        given, dtypes = self._file.element_bytes, self.axes["dtype"]
        for dtype, size in given.items():
            self._document.convert(("element_bytes", dtype), size, _Positive)
            if dtype not in dtypes:
                raise self._document.error(
                    ("element_bytes", dtype), f"not a value of axes.dtype; allowed: {_listing(dtypes)}"
                )
        for dtype in dtypes:
            if dtype not in given:
                raise self._document.error(("element_bytes",), f"the size of dtype `{dtype}` is missing")
        return given

    def _load_params(self) -> tuple[Param, ...]:
        params: dict[str, Param] = {}
        condition = self._struct("Condition", (), targets=False)
        for i, row in enumerate(self._file.params):
            keys: Keys = ("params", i)
            checked = self._document.convert(keys, row, _Param)
            if checked.name in params:
                raise self._document.error((*keys, "name"), f"a second parameter called `{checked.name}`")
            when = self._document.convert((*keys, "when"), checked.when, condition)
            limits = ((axis, _as_list(getattr(when, axis))) for axis in self.axes)
            params[checked.name] = Param(
                checked.name,
                checked.type,
                checked.doc,
                tuple((axis, tuple(values)) for axis, values in limits if values is not None),
            )
        return tuple(params.values())

    def _struct(self, name: str, fields: Iterable[Any], targets: bool = True) -> type:
        """A msgspec type: the axes (and ``target``), each with one value or several, and ``fields``."""
        domain = dict(self.axes)
        if targets:
            domain["target"] = self.targets
        limits = [
            (
                axis,
                Literal[values] | Annotated[list[Literal[values]], msgspec.Meta(min_length=1)] | None,
                None,
            )
            for axis, values in domain.items()
        ]
        return msgspec.defstruct(name, [*limits, *fields], forbid_unknown_fields=True, kw_only=True)

    def _check_names(self) -> None:
        """Names must not collide: in a template's context, in a tile row, or in the file names of two
        variants.
        """
        reserved = CONTEXT_NAMES | {*_ROW_NAMES, "max_smem"}
        seen: dict[str, Keys] = {}
        for keys, name in [
            *((("axes", axis), axis) for axis in self.axes),
            *((("tile_keys", i), key) for i, key in enumerate(self._file.tile_keys)),
        ]:
            if name in reserved or name in seen:
                why = "is reserved" if name in reserved else "is taken"
                raise self._document.error(
                    keys, f"the name `{name}` {why}; reserved: {_listing(sorted(reserved))}"
                )
            seen[name] = keys
        parts: dict[str, str] = dict.fromkeys(self.targets, "targets")
        for axis, values in self.axes.items():
            for value in values:
                if isinstance(value, str) and value != "none" and parts.setdefault(value, axis) != axis:
                    raise self._document.error(
                        ("axes", axis),
                        f"`{value}` is also a value of {parts[value]}, so file names would collide",
                    )

    def _enumerate(self) -> dict[tuple, list[_Entry]]:
        """All points with their tiles, keyed by the axis values and the target."""
        document, file = self._document, self._file
        row_fields = [
            ("name", _TileName | None, None),
            *((key, _Positive) for key in file.tile_keys),
            ("efficiency", _Rate, 1.0),
            ("no_spills", bool, file.no_spills),
        ]
        rows = self._rows("tiles", self._struct("Tile", row_fields))
        names = dict.fromkeys((None, *(row.name for row in rows)))
        of_name = {name: sum(1 << i for i, row in enumerate(rows) if row.name == name) for name in names}
        domain = {**self.axes, "target": self.targets}
        tiles = _Conditions(domain, rows)
        excluded = _Conditions(domain, self._rows("exclude", self._struct("Exclude", ())))
        tile_names = tuple(name or "" for name in names)
        commit_rows = self._rows(
            "commit", self._struct("Commit", [("name", Literal[tile_names] | None, None)])
        )
        committed = _Conditions(domain, commit_rows)
        known = frozenset((*self.axes, *file.tile_keys, "element_bytes", "max_smem"))
        threads = self._expression("threads", known)
        smem_bytes = self._expression("smem_bytes", known)
        entries: dict[tuple, list[_Entry]] = {}
        used: set[int] = set()
        for point in itertools.product(*domain.values()):
            if excluded.holding(point):
                continue
            holding, commits = tiles.holding(point), committed.holding(point)
            found = []
            for name, mask in of_name.items():
                hits = holding & mask
                if not hits:
                    if name is None:
                        raise document.error(
                            ("tiles",),
                            f"no row without a name serves {self._describe(point)}; add one or exclude it",
                        )
                    continue
                index = (hits & -hits).bit_length() - 1
                used.add(index)
                row = rows[index]
                found.append(
                    _Entry(
                        point[:-1],
                        point[-1],
                        row,
                        *self._resources(index, row, point, threads, smem_bytes),
                        bool(commits)
                        and any(
                            commits >> i & 1 and commit.name in (None, row.name or "")
                            for i, commit in enumerate(commit_rows)
                        ),
                    )
                )
            entries[point] = found
        for i in range(len(rows)):
            if i not in used:
                raise document.error(
                    ("tiles", i), "the row never applies: earlier rows, or exclude, leave it no point"
                )
        return entries

    def _rows(self, key: str, type: type) -> list[Any]:
        return [self._document.convert((key, i), row, type) for i, row in enumerate(getattr(self._file, key))]

    def _expression(self, key: str, names: frozenset[str]) -> Expression:
        try:
            return Expression(getattr(self._file, key), names)
        except ValueError as error:
            raise self._document.error((key,), str(error)) from None

    def _resources(
        self, index: int, row: Any, point: tuple, threads: Expression, smem_bytes: Expression
    ) -> tuple[int, int]:
        """Threads and shared-memory bytes of a tile at a point, checked against what a block may have."""
        limit = self._targets[point[-1]].max_smem
        values = dict(zip(self.axes, point[:-1], strict=True))
        values["element_bytes"] = self._element_bytes[values["dtype"]]
        values["max_smem"] = limit
        for key in self._file.tile_keys:
            values[key] = getattr(row, key)
        keys: Keys = ("tiles", index)
        try:
            count, size = threads(values), smem_bytes(values)
        except ValueError as error:
            raise self._document.error(keys, f"at {self._describe(point)}: {error}") from None
        if not 32 <= count <= 1024 or count % 32:
            raise self._document.error(
                keys, f"{count} threads at {self._describe(point)}; allowed: a multiple of 32 from 32 to 1024"
            )
        if not 0 <= size <= limit:
            raise self._document.error(
                keys, f"{size} bytes of shared memory at {self._describe(point)}; the target allows {limit}"
            )
        return count, size

    def _describe(self, point: tuple) -> str:
        return " ".join(f"{axis}={value}" for axis, value in zip((*self.axes, "target"), point, strict=True))

    def _variant(self, entry: _Entry) -> Variant:
        if entry.variant is None:
            file, row, target = self._file, entry.row, self._targets[entry.target]
            axes = dict(zip(self.axes, entry.values, strict=True))
            params = tuple(param for param in self._params if param.present(axes))
            entry.variant = Variant(
                family=file.family,
                spec=self.name,
                template=file.template,
                target=entry.target,
                min_arch=target.min_arch,
                archs=tuple(target.compile_for),
                max_smem=target.max_smem,
                axes=tuple(axes.items()),
                tile=tuple((key, getattr(row, key)) for key in file.tile_keys),
                tile_name=row.name or "",
                threads=entry.threads,
                smem_bytes=entry.smem_bytes,
                element_bytes=self._element_bytes[axes["dtype"]],
                params=self._params_of.setdefault(params, params),
                header=file.header,
                efficiency=row.efficiency,
                committed=entry.committed,
                no_spills=row.no_spills,
                options=tuple(file.options),
                priority=self.targets.index(entry.target),
                spec_dir=str(self.path.parent),
            )
        return entry.variant


def load_spec(path: str | os.PathLike[str]) -> Spec:
    """Load and check one spec file. Raises SpecError, which names the file, the line, the key and what is
    allowed.
    """
    return Spec(Path(path).absolute())


def load_specs(extra: str | os.PathLike[str] | None = None) -> tuple[Spec, ...]:
    """All specs: the shipped folder, then the folders in ``FLASHGEN_SPECS``, then ``extra``.

    A file whose stem an earlier folder has as well takes its place; any other file adds a family. Raises
    SpecError for a wrong file, for a folder without specs, and when two specs would give their kernels the
    same names.
    """
    folders = [Path(part) for part in os.environ.get("FLASHGEN_SPECS", "").split(os.pathsep) if part]
    if extra is not None:
        folders.append(Path(extra))
    paths: dict[str, Path] = {}
    for folder in (specs_dir(), *(folder.expanduser() for folder in folders)):
        found = sorted(path for path in _listdir(folder) if path.suffix in (".yaml", ".yml"))
        if not found:
            raise SpecError(f"{folder}: a spec folder holds at least one .yaml file, and this one holds none")
        paths |= {path.stem: path for path in found}
    specs = tuple(load_spec(path) for path in paths.values())
    owners: dict[tuple[str, str], Spec] = {}
    for spec in specs:
        for target in spec.targets:
            owner = owners.setdefault((spec.family, target), spec)
            if owner is not spec:
                raise spec._document.error(
                    ("family",),
                    f"{owner.path} has family `{spec.family}` with target `{target}` as well; rename one",
                )
    return specs


def find(variants: Iterable[Variant], **axes: Any) -> tuple[Variant, ...]:
    """The variants with the given axis values, one value or several for each axis, in their order.

    Raises KeyError for an axis that a variant does not have.
    """
    wanted = {axis: _as_list(value) for axis, value in axes.items()}
    return tuple(v for v in variants if all(v.axis(axis) in values for axis, values in wanted.items()))


def _as_list(value: Any) -> Sequence[Any] | None:
    if value is None:
        return None
    return (value,) if isinstance(value, (str, int)) else tuple(value)


def _listdir(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise SpecError(f"{folder}: the spec folder cannot be read: {error}") from error


def _listing(values: Iterable[Any]) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown) if len(shown) <= 12 else ", ".join(shown[:12]) + f" and {len(shown) - 12} more"
