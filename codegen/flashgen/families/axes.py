"""The axes of a spec file: the values of each, and which of them go together.

Most axes are lists, and every value of one goes with every value of another. An axis may instead have
another's value as its default, and further values beside it at some of them only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.families.schema import AXIS_VALUES, DEFAULT_AXIS, NAME, File

if TYPE_CHECKING:
    from flashgen.families.yamlfile import Document

# The most combinations of values, and the most kernels that they may make with targets, names of tiles and
# steps: a shipped spec has at most 1,280 and 7,680.
MAX_POINTS = MAX_KERNELS = 50_000
Value = str | int
Values = tuple[Value, ...]


class Choices(NamedTuple):
    """What an axis can be whose default is the value of ``leader``, an earlier axis: at each value of the
    leader that value first, then the others.
    """

    leader: str
    at: dict[Value, Values]


@dataclass(frozen=True, slots=True)
class Axes:
    """``values`` maps each axis to all that it can be, ``allowed`` those with a default to their choices."""

    values: dict[str, Values]
    allowed: dict[str, Choices]

    def points(self) -> list[Values]:
        """The combinations of values, in the order of the axes and of their values."""
        place = {axis: index for index, axis in enumerate(self.values)}
        points: list[Values] = [()]
        for axis, values in self.values.items():
            if axis in self.allowed:
                leader, at = self.allowed[axis]
                points = [(*point, value) for point in points for value in at[point[place[leader]]]]
            else:
                points = [(*point, value) for point in points for value in values]
        return points


def read_axes(document: Document, file: File) -> Axes:
    """The axes that ``file`` gives. Raises SpecError where they are wrong."""
    lists: dict[str, Values] = {}
    values: dict[str, Values] = {}
    allowed: dict[str, Choices] = {}
    for axis, declaration in file.axes.items():
        document.convert(("axes", axis), axis, NAME)
        if isinstance(declaration, dict):
            leader, at = allowed[axis] = _with_default(document, axis, declaration, lists)
            further = (value for choices in at.values() for value in choices)
            values[axis] = tuple(dict.fromkeys((*lists[leader], *further)))
        else:
            values[axis] = lists[axis] = _list(document, ("axes", axis), declaration)
    if "dtype" not in lists:
        raise document.error(("axes",), "the axis `dtype` is missing")
    count = 1
    for axis, choices in values.items():
        # At each value of its leader an axis with a default has at most this many.
        count *= max(map(len, allowed[axis].at.values())) if axis in allowed else len(choices)
        if count > MAX_POINTS:
            why = f"the values of the axes up to this one make more than {MAX_POINTS:,} combinations"
            raise document.error(("axes", axis), why)
    return Axes(values, allowed)


def _list(document: Document, keys: tuple[str, ...], declaration: Any) -> Values:
    values = tuple(document.convert(keys, declaration, AXIS_VALUES))
    if len(set(values)) < len(values):
        raise document.error(keys, f"a value occurs twice in {declaration}")
    return values


def _with_default(document: Document, axis: str, declaration: Any, lists: dict[str, Values]) -> Choices:
    """The choices of an axis with a default."""
    row = document.convert(("axes", axis), declaration, DEFAULT_AXIS)
    if row.default not in lists:
        why = f"`{row.default}` is not an earlier axis with a list of values; allowed: {', '.join(lists)}"
        raise document.error(("axes", axis, "default"), why)
    table: dict[Value, Values] = {value: (value,) for value in lists[row.default]}
    by_text = {str(value): value for value in table}
    for text, further in row.also.items():
        keys = ("axes", axis, "also", text)
        if text not in by_text:
            allowed = ", ".join(by_text)
            raise document.error(keys, f"not a value of axes.{row.default}; allowed: {allowed}")
        value = by_text[text]
        choices = _list(document, keys, further if isinstance(further, list) else [further])
        if value in choices:
            raise document.error(keys, f"`{value}` is the default here already; leave it out")
        table[value] += choices
    return Choices(row.default, table)
