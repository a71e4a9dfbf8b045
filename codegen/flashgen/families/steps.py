"""The kernels of a family, step by step: their keys checked, and what each takes at a point with a tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.families.expression import Expression
from flashgen.families.grid import GRID_NUMBERS, Grid, Visits
from flashgen.families.model import Resources, Step
from flashgen.families.schema import STEP, File, StepRow, expression_names
from flashgen.families.tensormaps import Boxes
from flashgen.operators import operator_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashgen.errors import SpecError
    from flashgen.families.axes import Values
    from flashgen.families.kinds import Keys
    from flashgen.families.paramrows import ParamReader
    from flashgen.families.yamlfile import Document

# What a family of one kernel says at the top of its file.
_OF_A_STEP = ("template", "threads", "smem_bytes", "grid", "params")
# Schedules whose thread blocks may be in clusters.
_CLUSTERED = ("tile_per_block", "tile_per_cluster", "sequences", "shares")
_MAY_HAVE = ("visits", "dependent_launch", "score_seam")


def read_steps(
    document: Document, file: File, axes: Mapping[str, Values], reader: ParamReader
) -> tuple[list[StepTable], int]:
    """The steps of a family, and which of them dispatch chooses. Raises SpecError where they are wrong."""
    if not file.steps:
        for key in _OF_A_STEP:
            if getattr(file, key) is None:
                raise document.error((), f"the key `{key}` is missing")
        values = {key: getattr(file, key) for key in (*_OF_A_STEP, *_MAY_HAVE)}
        return [StepTable(document, file, axes, reader, (), StepRow(name="only", **values))], 0
    for key in (*_OF_A_STEP, *_MAY_HAVE):
        if getattr(file, key):
            raise document.error((key,), "each of `steps` has its own; leave this one out")
    rows = [document.convert(("steps", i), row, STEP) for i, row in enumerate(file.steps)]
    names = [row.name for row in rows]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise document.error(("steps", i, "name"), f"a second step is called `{name}`")
    main = [i for i, row in enumerate(rows) if row.main]
    if len(main) != 1:
        raise document.error(("steps",), f"{len(main)} steps say `main: true`; one of them must")
    if rows[main[0]].when:
        raise document.error(("steps", main[0], "when"), "every variant has the main step")
    for i, row in enumerate(rows):
        if row.combines and (i <= main[0] or not _splits(rows[main[0]])):
            why = "only a step after a main one with `schedule: shares` or `part_time` has parts"
            raise document.error(("steps", i, "combines"), why)
    tables = [StepTable(document, file, axes, reader, ("steps", i), row) for i, row in enumerate(rows)]
    return tables, main[0]


def _splits(row: StepRow) -> bool:
    """Whether a main step may leave parts of its results to a step that combines them."""
    return row.grid.schedule == "shares" or bool(row.grid.part_time)


class StepTable:
    """One kernel of a family. Raises SpecError for an expression, a parameter or a grid that is wrong."""

    def __init__(
        self,
        document: Document,
        file: File,
        axes: Mapping[str, Values],
        reader: ParamReader,
        keys: Keys,
        row: StepRow,
    ) -> None:
        self._document, self._keys = document, keys
        self._names = expression_names(file, axes)
        self._reads = {"max_smem"}
        listed = reader.members((*keys, "params"), row.params)
        self.step = Step(
            row.name if keys else "",
            row.template,
            tuple(member.param for member in listed),
            row.dependent_launch,
            row.score_seam,
            row.combines,
            row.commit,
            reader.limits((*keys, "when"), row.when),
        )
        parts = {"shares": "shares are", "tile_per_cluster": "parts of a cluster's tile are"}
        if row.grid.schedule in parts and row.visits is None and not row.combines:
            why = f"{parts[row.grid.schedule]} of KV blocks: `visits` is missing"
            raise document.error((*keys, "grid", "schedule"), why)
        if row.grid.part_time and (not row.main or row.grid.schedule != "tile_per_block"):
            why = "only the main step splits groups of query heads, one thread block to each tile and part"
            raise document.error((*keys, "grid", "part_time"), why)
        self._of_keys = row.main and "key_rows" in row.grid.covers
        if self._of_keys and not row.grid.step_rows:
            why = "tiles of keys go through query rows in steps, and `step_rows` is how many rows one has"
            raise document.error((*keys, "grid"), why)
        if row.grid.beside and row.grid.schedule != "tile_per_block":
            why = "only with one thread block to each tile"
            raise document.error((*keys, "grid", "beside"), why)
        self._threads = self._expression(("threads",), row.threads)
        self._smem_bytes = self._expression(("smem_bytes",), row.smem_bytes)
        dimensions = operator_of(file.operator, file.has_lengths).grid_dimensions
        for key in ("covers", "beside"):
            for name in getattr(row.grid, key):
                if name not in dimensions:
                    why = f"{file.operator} has no such dimension; allowed: {', '.join(dimensions)}"
                    raise document.error((*keys, "grid", key, name), why)
        self._schedule = row.grid.schedule
        self._covers, self._beside = (
            {name: self._expression(("grid", key, name), it) for name, it in getattr(row.grid, key).items()}
            for key in ("covers", "beside")
        )
        self._numbers = {
            name: self._expression(("grid", name), getattr(row.grid, name)) for name in GRID_NUMBERS
        }
        self._visits = None
        if row.visits is not None:
            self._visits = [
                self._expression(("visits", key), getattr(row.visits, key)) for key in Visits._fields
            ]
        self._boxes = Boxes(document, self._names, listed)
        self._reads |= self._boxes.reads
        self._resources: dict[tuple[str | int, ...], Resources] = {}

    def at(
        self,
        values: Mapping[str, str | int],
        where: Callable[[], str],
        error: Callable[[str], SpecError],
    ) -> Resources:
        """What the step takes where axes and tile keys have these ``values``, and a block may have
        ``max_smem`` bytes of shared memory.

        Raises what ``error`` makes of a message for what a block may not have, and SpecError for a box.
        """
        # Most points differ in axes that nothing here depends on, such as the mask type.
        key = tuple([values[name] for name in self._reads])
        resources = self._resources.get(key)
        if resources is None:
            resources = self._resources[key] = self._computed(values, where, error)
        return resources

    def _computed(
        self,
        values: Mapping[str, str | int],
        where: Callable[[], str],
        error: Callable[[str], SpecError],
    ) -> Resources:
        """`at`, anew."""
        try:
            threads, smem_bytes = self._threads(values), self._smem_bytes(values)
            grid = Grid(
                covers=tuple((name, extent(values)) for name, extent in self._covers.items()),
                schedule=self._schedule,
                beside=tuple((name, extent(values)) for name, extent in self._beside.items()),
                **{name: number(values) for name, number in self._numbers.items()},
            )
            visits = None
            if self._visits is not None:
                visits = Visits(*(number(values) for number in self._visits))
        except ValueError as cause:
            raise error(f"{where()}: {cause}") from None
        if not 32 <= threads <= 1024 or threads % 32:
            raise error(f"{threads} threads for {where()}; allowed: multiples of 32 from 32 to 1024")
        if not 0 <= smem_bytes <= values["max_smem"]:
            allowed = f"at most {values['max_smem']}"
            raise error(f"{smem_bytes} bytes of shared memory for {where()}; allowed: {allowed}")
        possible = (1, 2) if grid.beside else (1,)
        if grid.kinds not in possible:
            raise error(
                f"{grid.kinds} kinds of tiles for {where()}; allowed: {' or '.join(map(str, possible))}"
            )
        positive = [extent for _, extent in (*grid.covers, *grid.beside)]
        positive += [*(visits or ()), *([grid.step_rows] if self._of_keys else ())]
        least = Grid._field_defaults
        if min(positive) < 1 or any(getattr(grid, name) < least[name] for name in GRID_NUMBERS):
            raise error(f"an extent of `grid` or `visits` is below 1 for {where()}")
        if grid.cluster > 1 and grid.schedule not in _CLUSTERED:
            why = f"only with one of the schedules {', '.join(_CLUSTERED)}"
            raise error(f"clusters of {grid.cluster} for {where()}: {why}")
        return Resources(threads, smem_bytes, self._boxes.at(values, where), grid, visits)

    def _expression(self, keys: Keys, text: str | int) -> Expression:
        try:
            expression = Expression(text, self._names)
        except ValueError as error:
            raise self._document.error((*self._keys, *keys), str(error)) from None
        self._reads |= expression.reads
        return expression
