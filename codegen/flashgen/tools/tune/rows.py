"""Tile rows as text of a YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.families.model import Point


def row_text(members: Mapping[str, Any]) -> str:
    """A row on one line: ``{head_dim: 64, dtype: fp16, ...}``."""
    return yaml.safe_dump(dict(members), default_flow_style=True, sort_keys=False, width=1 << 20).strip()


def conditions(points: Sequence[Point], domain: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few conditions that hold at exactly ``points``, none of them at the same point.

    ``domain`` has the values of each axis, the target last. An axis that may have any value is left out, one
    value stands alone, several stand in a list.
    """
    return [
        _condition(box, domain) for box in _boxes(sorted(points, key=lambda p: _place(p, domain)), domain)
    ]


def _boxes(points: list[Point], domain: Mapping[str, Sequence[Any]]) -> list[list[list[Any]]]:
    """``points`` as products of values per axis."""
    sides = [list(dict.fromkeys(values)) for values in zip(*points, strict=True)]
    size = 1
    for side in sides:
        size *= len(side)
    if size == len(points):
        return [
            [
                sorted(side, key=list(values).index)
                for side, values in zip(sides, domain.values(), strict=True)
            ]
        ]
    splits = []
    for axis, side in enumerate(sides):
        if len(side) > 1:
            # Values with the same points beside them stay together.
            alike: dict[frozenset, list[Point]] = {}
            for value in side:
                part = [point for point in points if point[axis] == value]
                rest = frozenset((*point[:axis], *point[axis + 1 :]) for point in part)
                alike.setdefault(rest, []).extend(part)
            if len(alike) > 1:
                splits.append([box for part in alike.values() for box in _boxes(part, domain)])
    return min(splits, key=len)


def _condition(box: Sequence[Sequence[Any]], domain: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    condition = {}
    for (axis, values), side in zip(domain.items(), box, strict=True):
        if len(side) < len(values):
            condition[axis] = side[0] if len(side) == 1 else list(side)
    return condition


def _place(point: Point, domain: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    return tuple(list(values).index(value) for value, values in zip(point, domain.values(), strict=True))
