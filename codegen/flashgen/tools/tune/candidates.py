"""Which tiles compete: what a spec says may be tried at a point, as far as a block may have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import SpecError
from flashgen.families.check import examine
from flashgen.families.model import Entry, Spec
from flashgen.families.tunedrows import TunedRow, combine
from flashgen.families.variant import TUNED_TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.variant import Variant
    from flashgen.tools.tune.subjects import Subject


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tile that does not compete, and why."""

    tile: dict[str, int]
    why: str


@dataclass(frozen=True, slots=True)
class Field:
    """Who competes for a subject: variants with the tiles to try, without the ordinary one.

    A candidate has the name that it would have if it won, so its compiled kernel is the one that a call looks
    for.
    """

    subject: Subject
    candidates: tuple[Variant, ...]
    dropped: tuple[Dropped, ...]


def fields(subjects: Sequence[Subject]) -> list[Field]:
    """The candidates of each subject. A tile that was tuned before competes again."""
    checked = {
        spec.path: examine(spec.path, spec.text) for spec in {s.spec.path: s.spec for s in subjects}.values()
    }
    entries = []
    for subject in subjects:
        spec_tables = checked[subject.spec.path]
        ordinary = dict(subject.ordinary.tile)
        tiles = spec_tables.space.at(subject.point, ordinary)
        if subject.tuned is not None and dict(subject.tuned.tile) not in tiles:
            tiles.insert(0, dict(subject.tuned.tile))
        rows, dropped = [], []
        for tile in tiles:
            if tile == ordinary:
                continue
            try:
                resources = spec_tables.table.resources(tile, subject.point, SpecError)
            except SpecError as error:
                dropped.append(Dropped(tile, str(error)))
                continue
            rows.append(TunedRow(subject.point, tile, 1.0, {}, Entry(-1, False, resources)))
        spec = Spec(subject.spec.path, subject.spec.text, combine(spec_tables.content, rows))
        variants = spec.select(target=subject.ordinary.target, **dict(subject.ordinary.axes))
        candidates = tuple(v for v in variants if v.is_main and v.tile_name == TUNED_TILE)
        entries.append(Field(subject, candidates, tuple(dropped)))
    return entries
