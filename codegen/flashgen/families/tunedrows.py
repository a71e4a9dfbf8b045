"""Checking a file of tuned tiles against the spec that they are for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import SpecError
from flashgen.families.model import Content, Entry
from flashgen.families.schema import TUNED_FILE, tile_kinds, tuned_row
from flashgen.families.variant import TUNED_TILE
from flashgen.families.yamlfile import Document
from flashgen.operators import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.model import Point
    from flashgen.families.schema import File
    from flashgen.families.tiletable import TileTable
    from flashgen.families.tuned import Tuned


class TunedRow(NamedTuple):
    """One point's tile, its rate relative to its siblings, how that was measured, and what a block needs."""

    point: Point
    tile: dict[str, int]
    efficiency: float
    measured: dict[str, Any]
    entry: Entry


def read(tuned: Tuned, file: File, content: Content, table: TileTable) -> tuple[list[TunedRow], list[str]]:
    """The rows of a file that fit the spec, and what is wrong with the others: a line and an explanation.

    A row that does not fit was written for another state of the spec. Raises SpecError for a file that is
    damaged, or another GPU's.
    """
    document = Document(tuned.path, tuned.text)
    tuned_file = document.convert((), document.value, TUNED_FILE)
    if tuned_file.gpu != tuned.gpu:
        raise document.error(("gpu",), f"found {tuned_file.gpu!r}; the GPU is {tuned.gpu!r}")
    kind = tuned_row({**content.axes, "target": tuple(content.targets)}, tile_kinds(file))
    # A row that was measured before its family had an axis has the default of the operator.
    defaults = {
        name: axis.default
        for name, axis in OPERATORS[file.operator].axes.items()
        if axis.default in content.axes.get(name, ())
    }
    rows: dict[Point, TunedRow] = {}
    problems = []
    for index, value in enumerate(tuned_file.tiles):
        error = partial(document.error, ("tiles", index))
        try:
            value = defaults | value if isinstance(value, dict) else value
            row = document.convert(("tiles", index), value, kind)
            point = (*(row[axis] for axis in content.axes), row["target"])
            if point not in content.entries:
                raise error(f"{table.describe(point)}: the spec has no kernel for this point")
            if point in rows:
                raise error(f"a second row for {table.describe(point)}")
            tile = {key: row[key] for key in file.tile_keys}
            entry = _entry(tuned, table, tile, point, error)
            rows[point] = TunedRow(point, tile, row["efficiency"], row["measured"], entry)
        except SpecError as wrong:
            problems.append(wrong.explanation)
    return list(rows.values()), problems


def combine(content: Content, rows: Sequence[TunedRow], problems: Sequence[str] = ()) -> Content:
    """``content`` with the tuned rows as further tiles, called `TUNED_TILE`, of their points."""
    members, entries = list(content.rows), dict(content.entries)
    for row in rows:
        ordinary = members[entries[row.point][0].row]
        entries[row.point] += (row.entry._replace(row=len(members)),)
        members.append(
            ordinary._replace(
                tile=tuple(row.tile.items()),
                tile_name=TUNED_TILE,
                dispatch={**ordinary.dispatch, "efficiency": row.efficiency},
            )
        )
    return content._replace(rows=tuple(members), entries=entries, problems=tuple(problems))


def _entry(tuned: Tuned, table: TileTable, tile: dict[str, int], point: Point, error: Any) -> Entry:
    try:
        steps = table.resources(tile, point, error)
    except SpecError as wrong:
        if wrong.path == tuned.path:
            raise
        raise error(str(wrong)) from None  # about a box of the spec, which this tile does not fit
    return Entry(-1, False, steps)
