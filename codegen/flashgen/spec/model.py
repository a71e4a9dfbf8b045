"""Spec files: which kernels exist.

A spec is one YAML file and one kernel family (``docs/spec-reference.md`` describes its keys). Loading checks
all of it: the types and names of its keys, that each point of the axes has a tile on each target, and that
each tile fits its target's shared memory. Variants are made on demand, so the first call of a kernel does not
pay for the hundreds that it leaves alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, SpecError
from flashgen.spec.params import TENSOR_MAP
from flashgen.spec.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from flashgen.spec.params import Box, Param
    from flashgen.spec.yamlfile import Keys

# Axis values in spec order, then the target.
Point = tuple[Any, ...]
# Some members of Variant, by name.
Members = dict[str, Any]


class Entry(NamedTuple):
    """A point's tile: the index of its row in ``Content.rows``, and what follows from the two together.

    ``boxes`` are those of the tensor maps among its parameters, in their order.
    """

    row: int
    threads: int
    smem_bytes: int
    committed: bool
    boxes: tuple[Box, ...] = ()


class Content(NamedTuple):
    """What a checked spec file says, in plain values.

    Variants are put together from ``family``, which all of them share, from their target, their tile row and
    their entry. ``targets`` are in order of preference; ``entries`` has the tiles of each point, the default
    one first, and no point that is excluded. ``problems`` says, line by line, what is left out of a file of
    tuned tiles.
    """

    direction: str
    description: str
    axes: dict[str, tuple[str | int, ...]]
    element_bytes: dict[str, int]
    params: tuple[Param, ...]
    family: Members
    targets: dict[str, Members]
    rows: tuple[Members, ...]
    entries: dict[Point, tuple[Entry, ...]]
    problems: tuple[str, ...] = ()


class Spec:
    """One loaded spec file.

    ``name`` is the file's stem, ``direction`` "forward" or "backward". ``axes`` maps each axis to its values;
    ``targets`` names the targets, preferred first. ``content`` is what ``check.check`` made of
    ``text``, and may have tuned tiles besides.
    """

    def __init__(self, path: Path, text: bytes, content: Content) -> None:
        self.path = path
        self.name = path.stem
        self.content = content
        self.family: str = content.family["family"]
        self.direction = content.direction
        self.description = content.description
        self.axes = content.axes
        self.targets = tuple(content.targets)
        self.text = text
        self._limiting = tuple(dict.fromkeys(key for param in content.params for key, _ in param.when))
        self._params_at: dict[tuple[Any, ...], tuple[Param, ...]] = {}
        self._made: dict[tuple[Point, int], Variant] = {}

    def __repr__(self) -> str:
        return f"Spec({str(self.path)!r})"

    def variants(self) -> tuple[Variant, ...]:
        """Every variant: in the order of the axes' values, then of the targets, then of the tile names."""
        return self._at(self.content.entries)

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
        return self._at(itertools.product(*wanted))

    def error(self, keys: Keys, message: str) -> SpecError:
        """A SpecError about this file that names the line of ``keys``."""
        from flashgen.spec.yamlfile import Document

        return Document(self.path, self.text).error(keys, message)

    def _at(self, points: Iterable[Point]) -> tuple[Variant, ...]:
        entries = self.content.entries
        return tuple(self._variant(point, entry) for point in points for entry in entries.get(point, ()))

    def _variant(self, point: Point, entry: Entry) -> Variant:
        key = point, entry.row
        if key not in self._made:
            content, target = self.content, point[-1]
            axes = dict(zip(self.axes, point, strict=False))
            self._made[key] = Variant(
                **content.family,
                **content.targets[target],
                **content.rows[entry.row],
                spec=self.name,
                spec_dir=str(self.path.parent),
                target=target,
                axes=tuple(axes.items()),
                threads=entry.threads,
                smem_bytes=entry.smem_bytes,
                committed=entry.committed,
                element_bytes=content.element_bytes[axes["dtype"]],
                params=self._params_of(axes | dict(content.rows[entry.row]["tile"]), entry.boxes),
            )
        return self._made[key]

    def _params_of(self, values: dict[str, str | int], boxes: tuple[Box, ...]) -> tuple[Param, ...]:
        key = (*(values[name] for name in self._limiting), boxes)
        if key not in self._params_at:
            present = (param for param in self.content.params if param.present(values))
            left = iter(boxes)
            self._params_at[key] = tuple(
                replace(param, box=next(left)) if param.ctype == TENSOR_MAP else param for param in present
            )
        return self._params_at[key]


def as_values(value: Any) -> Sequence[Any]:
    """One value or several as a sequence."""
    return (value,) if isinstance(value, (str, int)) else tuple(value)
