"""Spec files: which kernels exist.

A spec is one YAML file and one kernel family (``docs/spec-reference.md`` describes its keys). Loading checks
all of it: the types and names of its keys, that each point of the axes has a tile on each target, and that
each tile fits its target's shared memory. Variants are made on demand, so the first call of a kernel does not
pay for the hundreds that it leaves alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, SpecError
from flashgen.families.params import TENSOR_MAP
from flashgen.families.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from flashgen.families.dispatch import Dispatch
    from flashgen.families.grid import Buffer, Grid, Visits
    from flashgen.families.kinds import Keys
    from flashgen.families.params import Box, Param

# Axis values in spec order, then the target.
Point = tuple[Any, ...]
# Some members of Variant, by name.
Members = dict[str, Any]


class Resources(NamedTuple):
    """What one step takes with a tile at a point: threads and dynamic shared memory of a block, the boxes of
    the tensor maps among its parameters, in their order, its grid, and how a tile walks the scores.
    """

    threads: int
    smem_bytes: int
    boxes: tuple[Box, ...]
    grid: Grid
    visits: Visits | None


class Entry(NamedTuple):
    """A point's tile: the index of its row in ``Content.rows``, and for each step what follows from the two
    together.
    """

    row: int
    committed: bool
    steps: tuple[Resources, ...]


class TileRow(NamedTuple):
    """A row of the tile table: the tile keys, the name of the tile, promises of registers, and the numbers of
    `Dispatch` that are its own.
    """

    tile: tuple[tuple[str, int | str], ...]
    tile_name: str
    no_spills: bool | tuple[str, ...]
    dispatch: dict[str, float]


class Step(NamedTuple):
    """One kernel of a family: what its variants share.
    ``score_seam`` is whether it takes score modifications. ``when`` lists, per axis or tile key, the values
    for which variants have the step; empty means always.
    """

    name: str
    template: str
    params: tuple[Param, ...]
    dependent_launch: bool
    score_seam: bool
    combines: bool
    commit: bool
    when: tuple[tuple[str, tuple[str | int, ...]], ...]

    def present(self, values: Members) -> bool:
        """Whether variants with these values of axes and tile keys have the step."""
        return _holds(self.when, values)


class Content(NamedTuple):
    """What a checked spec file says, in plain values.

    ``has_lengths`` is whether kernels read the lengths of sequences on the device. ``algorithm`` is the name
    by which a call may ask for the family, and empty where it has none.
    Variants are put together from ``family``, which all of them share, from their step, their target, their
    tile row and their entry. ``steps`` are in the order of a call; ``main`` is the one whose variant dispatch
    chooses. ``features`` has for each the limits of axes and tile keys of the variants that have it.
    ``targets`` are in order of preference; ``entries`` has the tiles of each point, the default one first,
    and no point that is excluded. ``problems`` says, line by line, what is left out of a file of tuned tiles.
    """

    operator: str
    has_lengths: bool
    algorithm: str
    description: str
    axes: dict[str, tuple[str | int, ...]]
    element_bytes: dict[str, int]
    steps: tuple[Step, ...]
    main: int
    features: tuple[tuple[str, tuple[tuple[str, tuple[str | int, ...]], ...]], ...]
    workspace: tuple[Buffer, ...]
    family: Members
    dispatch: Dispatch
    targets: dict[str, Members]
    rows: tuple[TileRow, ...]
    entries: dict[Point, tuple[Entry, ...]]
    problems: tuple[str, ...] = ()


class Spec:
    """One loaded spec file.

    ``name`` is the file's stem, ``operator`` the name of what its kernels compute, ``has_lengths`` whether
    they read the lengths of sequences on the device, ``algorithm`` the name by which a call may ask for them
    (empty: none). ``axes`` maps each axis to its values; ``targets`` names the
    targets, preferred first. ``content`` is what ``check.check`` made of ``text``, and may have tuned tiles
    besides.
    """

    def __init__(self, path: Path, text: bytes, content: Content) -> None:
        self.path = path
        self.name = path.stem
        self.content = content
        self.family: str = content.family["family"]
        self.operator = content.operator
        self.has_lengths = content.has_lengths
        self.algorithm = content.algorithm
        self.on_request: bool = content.dispatch.on_request
        self.score_seam = any(step.score_seam for step in content.steps)
        self.description = content.description
        self.axes = content.axes
        self.targets = tuple(content.targets)
        self.text = text
        self._params_at: dict[tuple[Any, ...], tuple[Param, ...]] = {}
        self._made: dict[tuple[Point, int], tuple[Variant, ...]] = {}

    def __repr__(self) -> str:
        return f"Spec({str(self.path)!r})"

    def variants(self) -> tuple[Variant, ...]:
        """Every variant: in the order of the axes' values, then of the targets, then of the tile names, then
        of the steps.
        """
        return self._at(self.content.entries)

    def select(self, *, target: str | Iterable[str] | None = None, **axes: Any) -> tuple[Variant, ...]:
        """The variants at some points, without making the others.

        Each axis may be given one value or several; an axis left out takes all of its values. A value that
        the spec does not have selects nothing. Raises BadParam for an axis that it does not have.
        """
        unknown = sorted(axes.keys() - self.axes.keys())
        if unknown:
            raise BadParam(f"{self.name} has no axis {', '.join(unknown)}; it has {', '.join(self.axes)}")
        choices = [as_values(axes.get(axis, values)) for axis, values in self.axes.items()]
        choices.append(self.targets if target is None else as_values(target))
        return self._at(itertools.product(*choices))

    def error(self, keys: Keys, message: str) -> SpecError:
        """A SpecError about this file that names the line of ``keys``."""
        from flashgen.families.yamlfile import Document

        return Document(self.path, self.text).error(keys, message)

    def _at(self, points: Iterable[Point]) -> tuple[Variant, ...]:
        entries = self.content.entries
        return tuple(
            variant
            for point in points
            for entry in entries.get(point, ())
            for variant in self._variants(point, entry)
        )

    def _variants(self, point: Point, entry: Entry) -> tuple[Variant, ...]:
        """The kernels of one tile at a point, in the order of a call."""
        key = point, entry.row
        if key not in self._made:
            content = self.content
            values = dict(zip(self.axes, point, strict=False)) | dict(content.rows[entry.row].tile)
            present = [index for index, step in enumerate(content.steps) if step.present(values)]
            before = tuple(self._variant(point, entry, index) for index in present if index < content.main)
            after = tuple(self._variant(point, entry, index) for index in present if index > content.main)
            main = self._variant(point, entry, content.main, is_main=True, before=before, after=after)
            self._made[key] = main.steps
        return self._made[key]

    def _variant(
        self, point: Point, entry: Entry, index: int, is_main: bool = False, **around: tuple[Variant, ...]
    ) -> Variant:
        content, target = self.content, point[-1]
        step, takes, row = content.steps[index], entry.steps[index], content.rows[entry.row]
        axes = dict(zip(self.axes, point, strict=False))
        values = axes | dict(row.tile)
        return Variant(
            **content.family,
            **content.targets[target],
            dispatch=content.dispatch._replace(**row.dispatch),
            tile=row.tile,
            tile_name=row.tile_name,
            no_spills=row.no_spills,
            spec=self.name,
            spec_dir=str(self.path.parent),
            operator=self.operator,
            has_lengths=self.has_lengths,
            step=step.name,
            template=step.template,
            dependent_launch=step.dependent_launch,
            score_seam=step.score_seam,
            combines=step.combines,
            workspace=content.workspace,
            target=target,
            features=tuple(name for name, limits in content.features if _holds(limits, values)),
            axes=tuple(axes.items()),
            threads=takes.threads,
            smem_bytes=takes.smem_bytes,
            grid=takes.grid,
            visits=takes.visits,
            committed=entry.committed and step.commit,
            element_bytes=content.element_bytes[axes["dtype"]],
            params=self._params_of(index, values, takes.boxes),
            is_main=is_main,
            **around,
        )

    def _params_of(
        self, index: int, values: dict[str, str | int], boxes: tuple[Box, ...]
    ) -> tuple[Param, ...]:
        params = self.content.steps[index].params
        limiting = dict.fromkeys(key for param in params for key, _ in param.when)
        key = (index, *(values[name] for name in limiting), boxes)
        if key not in self._params_at:
            present = (param for param in params if param.present(values))
            left = iter(boxes)
            self._params_at[key] = tuple(
                param._replace(when=(), box=next(left) if param.ctype == TENSOR_MAP else None)
                for param in present
            )
        return self._params_at[key]


def _holds(limits: Iterable[tuple[str, tuple[str | int, ...]]], values: Members) -> bool:
    """Whether axes and tile keys have values within these limits."""
    return all(values[key] in limit for key, limit in limits)


def as_values(value: Any) -> Sequence[Any]:
    """One value or several as a sequence."""
    return (value,) if isinstance(value, (str, int)) else tuple(value)
