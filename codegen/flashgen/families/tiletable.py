"""Which tile serves which point of a spec's axes, on each target."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.families.axes import MAX_KERNELS
from flashgen.families.kinds import Choice, Field, Kind, optional
from flashgen.families.model import Entry, as_values
from flashgen.families.schema import RESERVED, File, Target, conditions, tile_kinds, tile_row
from flashgen.families.variant import DEFAULT_TILE, TUNED_TILE, name_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flashgen.errors import SpecError
    from flashgen.families.axes import Axes
    from flashgen.families.model import Point, Resources
    from flashgen.families.steps import StepTable
    from flashgen.families.yamlfile import Document


class TileTable:
    """The tile table of one spec: its ``rows``, and as ``entries`` the tiles of each point, the default one
    first.

    Raises SpecError for a row that is wrong or never applies, a point that has no default tile, a tile that
    asks for more threads or shared memory than a block may have, a box that TMA cannot move, and a promise
    about an architecture that the row is not compiled for.
    """

    def __init__(
        self,
        document: Document,
        file: File,
        axes: Axes,
        targets: Mapping[str, Target],
        element_bytes: Mapping[str, int],
        steps: Sequence[StepTable],
    ) -> None:
        self._document, self._file, self._axes = document, file, axes.values
        self._targets, self._element_bytes, self._steps = targets, element_bytes, steps
        domain = {**axes.values, "target": tuple(targets)}
        kinds = tile_kinds(file)
        defaults = {
            key: document.convert(("tile_defaults", key), value, kinds[key])
            for key, value in file.tile_defaults.items()
        }
        self.rows = self._load("tiles", tile_row(domain, kinds, defaults, file.no_spills))
        self._tiles = [{key: row[key] for key in file.tile_keys} for row in self.rows]
        self._by_name = self._names()
        self._matching = Matcher(domain, self.rows)
        self._excluded = Matcher(domain, self._load("exclude", conditions(domain)))
        name = Field(optional(Choice(self._by_name)), None)
        commit = self._load("commit", conditions(domain, {"name": name}))
        self._committed = Matcher(domain, commit)
        self._commits = {
            name: _bits(i for i, row in enumerate(commit) if row["name"] in (None, name))
            for name in self._by_name
        }
        self._used: set[int] = set()
        points = axes.points()
        kernels = len(points) * len(targets) * len(self._by_name) * len(steps)
        if kernels > MAX_KERNELS:
            why = f"{len(points):,} combinations of axes, {len(targets):,} targets, "
            why += f"{len(self._by_name):,} names of tiles and {len(steps):,} steps make {kernels:,} kernels"
            raise document.error(("tiles",), f"{why}; at most {MAX_KERNELS:,} are allowed")
        self.entries: dict[Point, tuple[Entry, ...]] = {
            point: self._tiles_at(point)
            for point in ((*values, target) for values in points for target in targets)
            if not self._excluded.at(point)
        }
        for index in range(len(self.rows)):
            if index not in self._used:
                if document.inherited(("tiles", index)):
                    continue
                why = "the row never applies: earlier rows take all of its points, or `exclude` removes them"
                raise document.error(("tiles", index), why)
            self._check_promise(index)

    def _load(self, key: str, kind: Kind) -> list[Any]:
        return [self._document.convert((key, i), row, kind) for i, row in enumerate(getattr(self._file, key))]

    def _names(self) -> dict[str, int]:
        """Per tile name the bit mask of its rows, the default name first."""
        masks = {DEFAULT_TILE: 0}
        for index, row in enumerate(self.rows):
            if row["name"] == DEFAULT_TILE:
                why = f"`{DEFAULT_TILE}` stands for rows without a name; leave the name out"
                raise self._document.error(("tiles", index, "name"), why)
            if row["name"] == TUNED_TILE:
                why = f"`{TUNED_TILE}` stands for rows that `flashgen tune` measured; choose another name"
                raise self._document.error(("tiles", index, "name"), why)
            name = row["name"] or DEFAULT_TILE
            masks[name] = masks.get(name, 0) | 1 << index
        return masks

    def _tiles_at(self, point: Point) -> tuple[Entry, ...]:
        """For each tile name the first row that matches the point."""
        matching, committed = self._matching.at(point), self._committed.at(point)
        entries = []
        for name, rows in self._by_name.items():
            hits = matching & rows
            if hits:
                index = (hits & -hits).bit_length() - 1
                self._used.add(index)
                error = partial(self._document.error, ("tiles", index))
                steps = self.resources(self._tiles[index], point, error)
                entries.append(Entry(index, bool(committed & self._commits[name]), steps))
            elif name == DEFAULT_TILE:
                why = f"no row without a name serves {self.describe(point)}; add a row, or exclude the point"
                raise self._document.error(("tiles",), why)
        return tuple(entries)

    def resources(
        self, tile: Mapping[str, int | str], point: Point, error: Callable[[str], SpecError]
    ) -> tuple[Resources, ...]:
        """What each step takes with this tile.

        Raises what ``error`` makes of a message where a block may not have it, and SpecError for a box.
        """
        values = dict(zip(self._axes, point, strict=False))
        values["element_bytes"] = self._element_bytes[values["dtype"]]
        values["max_smem"] = self._targets[point[-1]].max_smem
        values |= tile
        return tuple(step.at(values, lambda: self.describe(point), error) for step in self._steps)

    def _check_promise(self, index: int) -> None:
        """That ``no_spills`` names architectures that `flashgen build` would find wanting."""
        named, admitted = self.rows[index]["no_spills"], self.rows[index]["target"]
        names = self._targets if admitted is None else as_values(admitted)
        targets = [self._targets[name] for name in names]
        compiled = list(dict.fromkeys(arch for target in targets for arch in target.compile_for))
        for i, arch in enumerate(() if isinstance(named, bool) else named):
            where = ("tiles", index, "no_spills", i)
            if arch not in compiled:
                why = f"no target of the row is compiled for {arch}; allowed: {', '.join(compiled)}"
                raise self._document.error(where, why)
            if arch in named[:i]:
                raise self._document.error(where, f"{arch} occurs twice")

    def describe(self, point: Point) -> str:
        """A point as text: ``head_dim=64 dtype=fp16 ... target=sm80``."""
        return " ".join(f"{axis}={value}" for axis, value in zip((*self._axes, "target"), point, strict=True))


def check_names(document: Document, file: File, axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise SpecError where two names would collide: in a template or expression, or in two variants' file
    names.
    """
    named = [(("axes", axis), axis) for axis in axes]
    named += [(("tile_keys", i), key) for i, key in enumerate(file.tile_keys)]
    seen: set[str] = set()
    for keys, name in named:
        if name in RESERVED:
            raise document.error(keys, f"`{name}` is reserved; so are {', '.join(sorted(RESERVED))}")
        if name in seen:
            raise document.error(keys, f"`{name}` is already an axis or a tile key")
        seen.add(name)
    for part, keys in (("tile_values", file.tile_values), ("tile_defaults", file.tile_defaults)):
        for key in keys:
            if key not in file.tile_keys:
                why = f"no tile key; the tile keys are {', '.join(file.tile_keys)}"
                raise document.error((part, key), why)
    owners = {
        TUNED_TILE: "tiles",
        **dict.fromkeys(file.targets, "targets"),
        **{row["name"]: "tiles" for row in file.tiles if isinstance(row, dict) and "name" in row},
    }
    # Inherited axes first: where one has a value from an axis of the file, the file is at fault.
    for axis in sorted(axes, key=lambda axis: not document.inherited(("axes", axis))):
        for value in axes[axis]:
            owner = owners.setdefault(name_part(axis, value), axis) if value != "none" else axis
            if owner != axis:
                raise document.error(
                    ("axes", axis), f"`{value}` stands in {owner} as well, so two kernels could share a name"
                )


def _bits(indices: Iterable[int]) -> int:
    """The number with these bits."""
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits


class Matcher:
    """Rows that each restrict some axes, asked many times which of them hold at a point.

    Bit i of ``_bits[axis][value]`` says that row i admits the value, so a question is one ``and`` per axis.
    """

    def __init__(self, domain: Mapping[str, Sequence[Any]], rows: Sequence[Any]) -> None:
        self._all = (1 << len(rows)) - 1
        self._bits: list[dict[Any, int]] = []
        for axis, values in domain.items():
            bits = dict.fromkeys(values, _bits(i for i, row in enumerate(rows) if row[axis] is None))
            for index, row in enumerate(rows):
                for value in () if row[axis] is None else as_values(row[axis]):
                    bits[value] |= 1 << index
            self._bits.append(bits)

    def at(self, point: Iterable[Any]) -> int:
        """Bit mask of the rows that hold at ``point``, whose values come in the order of the domain."""
        mask = self._all
        for bits, value in zip(self._bits, point, strict=True):
            mask &= bits[value]
        return mask
