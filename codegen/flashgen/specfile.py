"""Checking a spec file: from its text to the plain values that a Spec is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.boxes import Boxes
from flashgen.params import TENSOR_MAP, Param
from flashgen.schema import AxisValues, File, Name, ParamRow, Positive, ShortName, Target, conditions
from flashgen.spec import Content, as_values
from flashgen.tiles import TileTable, check_names
from flashgen.yamlfile import Document

if TYPE_CHECKING:
    from pathlib import Path

Axes = dict[str, tuple[str | int, ...]]


def check(path: Path, text: bytes) -> Content:
    """What ``text``, the content of ``path``, says. Raises SpecError where it is wrong."""
    document = Document(path, text)
    file = document.convert((), document.value, File)
    axes = _axes(document, file)
    targets = _targets(document, file)
    check_names(document, file, axes)
    element_bytes = _element_bytes(document, file, axes)
    params = _params(document, file, axes)
    boxes = Boxes(document, file, axes, params)
    table = TileTable(document, file, axes, targets, element_bytes, boxes)
    return Content(
        direction=file.direction,
        description=file.description,
        axes=axes,
        element_bytes=element_bytes,
        params=params,
        family={
            "family": file.family,
            "template": file.template,
            "header": file.header,
            "options": tuple(file.options),
            "schedule": file.schedule,
        },
        targets={
            name: {
                "min_arch": target.min_arch,
                "max_smem": target.max_smem,
                "archs": tuple(target.compile_for),
                "priority": priority,
            }
            for priority, (name, target) in enumerate(targets.items())
        },
        rows=tuple(
            {
                "tile": tuple((key, getattr(row, key)) for key in file.tile_keys),
                "tile_name": row.name or "",
                "efficiency": row.efficiency,
                "no_spills": row.no_spills if isinstance(row.no_spills, bool) else tuple(row.no_spills),
            }
            for row in table.rows
        ),
        entries=table.entries,
    )


def _axes(document: Document, file: File) -> Axes:
    axes = {}
    for axis, given in file.axes.items():
        document.convert(("axes", axis), axis, Name)
        values = tuple(document.convert(("axes", axis), given, AxisValues))
        if len(set(values)) < len(values):
            raise document.error(("axes", axis), f"a value stands twice in {given}")
        axes[axis] = values
    if "dtype" not in axes:
        raise document.error(("axes",), "the axis `dtype` is missing")
    return axes


def _targets(document: Document, file: File) -> dict[str, Target]:
    targets = {}
    for name, given in file.targets.items():
        document.convert(("targets", name), name, ShortName)
        targets[name] = document.convert(("targets", name), given, Target)
    if not targets:
        raise document.error(("targets",), "there is no target")
    return targets


def _element_bytes(document: Document, file: File, axes: Axes) -> dict[str, int]:
    given, dtypes = file.element_bytes, axes["dtype"]
    for dtype, size in given.items():
        document.convert(("element_bytes", dtype), size, Positive)
        if dtype not in dtypes:
            allowed = ", ".join(map(str, dtypes))
            raise document.error(("element_bytes", dtype), f"not a value of axes.dtype; allowed: {allowed}")
    for dtype in dtypes:
        if dtype not in given:
            raise document.error(("element_bytes",), f"the size of dtype `{dtype}` is missing")
    return given


def _params(document: Document, file: File, axes: Axes) -> tuple[Param, ...]:
    params: dict[str, Param] = {}
    condition = conditions("When", axes)
    for i, given in enumerate(file.params):
        row = document.convert(("params", i), given, ParamRow)
        if row.name in params:
            raise document.error(("params", i, "name"), f"a second parameter is called `{row.name}`")
        if row.type == TENSOR_MAP and row.box is None:
            raise document.error(("params", i), f"the key `box` is missing; a {TENSOR_MAP} needs it")
        if row.type != TENSOR_MAP and row.box is not None:
            raise document.error(("params", i, "box"), f"only a {TENSOR_MAP} has a box")
        when = document.convert(("params", i, "when"), row.when, condition)
        limits = ((axis, getattr(when, axis)) for axis in axes)
        kept = tuple((axis, as_values(limit)) for axis, limit in limits if limit is not None)
        params[row.name] = Param(row.name, row.type, row.doc, kept)
    return tuple(params.values())
