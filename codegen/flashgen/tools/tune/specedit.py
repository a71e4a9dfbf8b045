"""Writing winners into a spec file, as a maintainer would by hand: rows change in place, and comments
stay.

The text is edited at the places that the YAML parser gives, then read anew and compared with what was meant.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import SpecError
from flashgen.families.check import examine
from flashgen.families.model import as_values
from flashgen.tools.tune.rows import conditions, row_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import yaml

    from flashgen.families.check import Checked
    from flashgen.families.model import Content, Point
    from flashgen.tools.tune.userfile import Measured

Tile = tuple[tuple[str, int | str], ...]


class _Edit(NamedTuple):
    """Replace the text from ``start`` to ``end`` (line and column, from 0) by ``new``."""

    start: tuple[int, int]
    end: tuple[int, int]
    new: str


def edited(path: Path, text: bytes, winners: Mapping[Point, Measured | None]) -> bytes:
    """``text``, the content of the spec ``path``, with the tiles of ``winners`` at their points.

    A row whose points were all tuned takes the tile that won at most of them. Any other winner gets a row of
    its own above the row that serves its points now, with the same further keys, such as ``no_spills``. None
    is a point whose ordinary tile won. Points that were not tuned keep their tiles.

    Raises SpecError for a row that cannot be edited as text: not on lines of its own, or after an anchor.
    """
    checked = examine(path, text)
    serving: dict[int, list[Point]] = defaultdict(list)
    for point, entries in checked.content.entries.items():
        serving[entries[0].row].append(point)
    edits = []
    for index, points in serving.items():
        tuned = [point for point in points if point in winners]
        if tuned:
            edits += _row_edits(checked, index, points, {point: winners[point] for point in tuned})
    result = _apply(text.decode(), edits).encode()
    expected = _ordinary_tiles(checked.content)
    expected |= {point: tuple(won.tile.items()) for point, won in winners.items() if won is not None}
    try:
        tiles = _ordinary_tiles(examine(path, result).content)
    except SpecError as error:
        raise _by_hand(checked, f"the edited text would be wrong: {error}") from None
    if tiles != expected:
        raise _by_hand(checked, "the edited text would say something else; is there an anchor?")
    return result


def _by_hand(checked: Checked, why: str) -> SpecError:
    return checked.document.error(("tiles",), f"the rows cannot be edited as text: {why}. Edit them by hand")


def _ordinary_tiles(content: Content) -> dict[Point, Tile]:
    return {point: content.rows[entries[0].row].tile for point, entries in content.entries.items()}


def _row_edits(
    checked: Checked, index: int, points: Sequence[Point], winners: Mapping[Point, Measured | None]
) -> list[_Edit]:
    """The edits of one row, which serves ``points``, some of them with a winner."""
    now: Tile = checked.content.rows[index].tile
    groups: dict[Tile, list[Point]] = defaultdict(list)
    for point, won in winners.items():
        groups[now if won is None else tuple(won.tile.items())].append(point)
    edits = []
    kept = now
    if len(winners) == len(points):
        kept = max(groups, key=lambda tile: (len(groups[tile]), tile == now))
        if kept != now:
            edits += _changed(checked, index, dict(kept), _efficiency(groups[kept], winners))
    for tile, alike in groups.items():
        if tile != kept:
            efficiency = None if tile == now else _efficiency(alike, winners)
            edits.append(_inserted(checked, index, alike, dict(tile), efficiency))
    return edits


def _efficiency(points: Sequence[Point], winners: Mapping[Point, Measured | None]) -> float:
    """Geometric mean over the points."""
    logs = [math.log(winners[point].efficiency) for point in points]
    return round(math.exp(math.fsum(logs) / len(logs)), 3)


def _changed(checked: Checked, index: int, tile: Mapping[str, int], efficiency: float) -> list[_Edit]:
    """New values in the place of the old ones."""
    values: dict[str, Any] = {**tile, "efficiency": efficiency}
    fields = checked.file.tiles[index]
    edits = []
    for key, value in values.items():
        if key in fields:
            if fields[key] != value:
                node = checked.document.node(("tiles", index, key))
                edits.append(_Edit(_place(node.start_mark), _place(node.end_mark), str(value)))
        elif value != 1.0:
            row = checked.document.node(("tiles", index))
            name, last = row.value[-1]
            between = ", " if row.flow_style else f"\n{' ' * name.start_mark.column}"
            end = _place(last.end_mark)
            edits.append(_Edit(end, end, f"{between}{key}: {value}"))
    return edits


def _inserted(
    checked: Checked, index: int, points: Sequence[Point], tile: Mapping[str, int], efficiency: float | None
) -> _Edit:
    """Rows for some of the points of a row, in lines above it."""
    content, fields = checked.content, checked.file.tiles[index]
    domain = {**content.axes, "target": tuple(content.targets)}
    further = {key: fields[key] for key in fields if key not in domain and key not in tile}
    if efficiency is not None:
        further["efficiency"] = efficiency
    row = checked.document.node(("tiles", index))
    line, column = _place(row.start_mark)
    before = checked.document.line(line)[:column]
    if before.strip() != "-":
        raise checked.document.error(
            ("tiles", index), "tiles can be written where each row has lines of its own"
        )
    rows = [
        row_text({**limits, **tile, **further, **_promise(checked, fields, limits)})
        for limits in conditions(points, domain)
    ]
    return _Edit((line, 0), (line, 0), "".join(f"{before}{text}\n" for text in rows))


def _promise(checked: Checked, fields: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """``no_spills`` of a narrower row: the architectures that ``fields`` names and it has."""
    named = fields.get("no_spills")
    if not isinstance(named, list):
        return {}
    targets = checked.content.targets
    admitted = as_values(limits.get("target", tuple(targets)))
    compiled = {arch for name in admitted for arch in targets[name]["archs"]}
    return {"no_spills": [arch for arch in named if arch in compiled] or False}


def _place(mark: yaml.Mark) -> tuple[int, int]:
    return mark.line, mark.column


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    lines = text.split("\n")
    # From the end, so that places further up stay true.
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        (first, start), (last, end) = edit.start, edit.end
        joined = lines[first][:start] + edit.new + lines[last][end:]
        lines[first : last + 1] = joined.split("\n")
    return "\n".join(lines)
