"""What a spec lets the tuner try instead of its tiles: the key ``tune``."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from flashgen.families.model import as_values
from flashgen.families.schema import File, Range, tile_kinds, tune_row
from flashgen.families.tiletable import Matcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashgen.families.model import Point
    from flashgen.families.yamlfile import Document


MAX_TILES = 10_000  # of all rows; a shipped spec has some 200


class SearchSpace:
    """The rows of ``tune`` of one spec.

    Raises SpecError for a row that is wrong, names no tile key, has an empty range, or holds at no point.
    """

    def __init__(
        self,
        document: Document,
        file: File,
        axes: Mapping[str, Sequence[Any]],
        points: Iterable[Point],
    ) -> None:
        domain = {**axes, "target": tuple(file.targets)}
        kind = tune_row(domain, tile_kinds(file))
        rows = [document.convert(("tune", i), row, kind) for i, row in enumerate(file.tune)]
        self._choices = [_choices(document, i, row, file.tile_keys) for i, row in enumerate(rows)]
        tiles = 0
        for i, choices in enumerate(self._choices):
            tiles += math.prod(map(_count, choices.values()))
            if tiles > MAX_TILES:
                why = f"with the rows before it {tiles:,} tiles to try; at most {MAX_TILES:,} are allowed"
                raise document.error(("tune", i), why)
        self._matching = Matcher(domain, rows)
        used = 0
        for point in points if rows else ():
            used |= self._matching.at(point)
        for i in range(len(rows)):
            if not used >> i & 1 and not document.inherited(("tune", i)):
                why = "the row never applies: `exclude` removes all of its points"
                raise document.error(("tune", i), why)

    def at(self, point: Point, tile: Mapping[str, int | str]) -> list[dict[str, int | str]]:
        """The tiles to try at a point, each once, in the order of the rows.

        Every row that holds adds all combinations of its values; a key that it leaves out is as in ``tile``.
        """
        holding = self._matching.at(point)
        tiles: dict[tuple[int | str, ...], dict[str, int | str]] = {}
        for i, choices in enumerate(self._choices):
            if holding >> i & 1:
                for values in itertools.product(*choices.values()):
                    tried = {**tile, **dict(zip(choices, values, strict=True))}
                    tiles.setdefault(tuple(tried.values()), tried)
        return list(tiles.values())


def _count(values: Sequence[int | str]) -> int:
    """How many values there are; ``len`` has a limit for a range."""
    return (values[-1] - values[0]) // values.step + 1 if isinstance(values, range) else len(values)


def _choices(document: Document, index: int, row: Any, keys: Iterable[str]) -> dict[str, Sequence[int | str]]:
    """The values of each tile key that the row names."""
    choices: dict[str, Sequence[int | str]] = {}
    for key in keys:
        choice = row[key]
        if isinstance(choice, Range):
            if choice.last < choice.first:
                why = f"from {choice.first} to {choice.last} is empty; `to` is at least `from`"
                raise document.error(("tune", index, key), why)
            choices[key] = range(choice.first, choice.last + 1, choice.step)
        elif choice is not None:
            choices[key] = as_values(choice)
    if not choices:
        raise document.error(("tune", index), f"no values to try; name some of {', '.join(keys)}")
    return choices
