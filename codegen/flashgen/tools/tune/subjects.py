"""What is tuned: the points whose kernels a call on this GPU could get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import BadParam, DeviceTypeNotSupported
from flashgen.families.variant import TUNED_TILE
from flashgen.operators.attention import ATTENTION
from flashgen.schedule.dispatch import preferred, runs_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashgen.families.arch import Device
    from flashgen.families.model import Point, Spec
    from flashgen.families.variant import Variant


@dataclass(frozen=True)
class Subject:
    """A point of a spec, its ordinary variant, and the one that was tuned on this GPU before, if any."""

    spec: Spec
    ordinary: Variant
    tuned: Variant | None

    @property
    def point(self) -> Point:
        """Axis values in the spec's order, then the target."""
        return (*(value for _, value in self.ordinary.axes), self.ordinary.target)

    @property
    def points(self) -> list[Point]:
        """The points that get the winner: the subject's, and the same with sinks, which a kernel reads once a
        row.
        """
        names = [name for name, _ in self.ordinary.axes]
        if "sinks" not in names:
            return [self.point]
        place = names.index("sinks")
        same = ((*self.point[:place], value, *self.point[place + 1 :]) for value in self.spec.axes["sinks"])
        return [point for point in same if point in self.spec.content.entries]


def subjects(specs: Sequence[Spec], selected: Iterable[Variant], device: Device) -> list[Subject]:
    """The points of the ``selected`` variants, in their order: for each family and combination of axis values
    those that dispatch would consider on ``device``.

    Kernels of other operators than attention, with lengths, with lists of key blocks, and with dropout are
    left out. So are kernels with sinks: they get the tile of the same kernel without (`Subject.points`).

    ``specs`` are the specs of the selected. Raises DeviceTypeNotSupported if none of the selected runs on the
    device, BadParam where only tiles with names were selected, or kernels that dispatch does not choose.
    """
    main = [variant for variant in selected if variant.is_main]
    timed = [
        variant
        for variant in main
        if variant.operator == ATTENTION.name
        and not variant.has_lengths
        and not _has_sinks(variant)
        and variant.axis("dropout") == "none"
        and variant.mask_type != "blocks"
    ]
    if main and not timed:
        if _has_sinks(main[0]) and not main[0].has_lengths:
            raise BadParam(
                "nothing to tune: the selected kernels have sinks, and take the tiles of kernels without; "
                "select sinks=none"
            )
        of_what = f"{main[0].operator}{' with lengths' if main[0].has_lengths else ''}"
        raise BadParam(
            f"nothing to tune: the selected kernels are of {of_what}, and tune times attention alone, "
            "without lengths"
        )
    selected = [variant for variant in timed if not variant.dispatch.on_request]
    if not selected:
        raise BadParam("nothing to tune: calls take the selected kernels only on request")
    ordinary = [variant for variant in selected if variant.tile_name in ("", TUNED_TILE)]
    if not ordinary:
        names = ", ".join(sorted({variant.tile_name for variant in selected}))
        raise BadParam(
            f"nothing to tune: only tiles without a name are tuned, and the selection has only {names}"
        )
    running = [variant for variant in ordinary if runs_on(variant, device)]
    if not running:
        raise DeviceTypeNotSupported(
            f"none of the selected variants, such as {ordinary[0]}, runs on {device}"
        )
    by_axes: dict[tuple, list[Variant]] = {}
    for variant in running:
        by_axes.setdefault((variant.family, frozenset(variant.axes)), []).append(variant)
    chosen = (preferred(alike)[0] for alike in by_axes.values())
    return [_subject(specs, variant) for variant in chosen]


def _has_sinks(variant: Variant) -> bool:
    return dict(variant.axes).get("sinks", "none") != "none"


def _subject(specs: Sequence[Spec], variant: Variant) -> Subject:
    spec = next(spec for spec in specs if spec.name == variant.spec)
    chosen = spec.select(target=variant.target, **dict(variant.axes))
    tiles = {each.tile_name: each for each in chosen if each.is_main}
    return Subject(spec, tiles[""], tiles.get(TUNED_TILE))
