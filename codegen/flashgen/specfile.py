"""Checking a spec file: from its text to the plain values that a Spec is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen import tunedfile
from flashgen.axes import read_axes
from flashgen.boxes import Boxes
from flashgen.errors import SpecError
from flashgen.params import TENSOR_MAP, Param
from flashgen.schema import (
    File,
    ParamRow,
    Positive,
    ShortName,
    Target,
    tile_types,
    when_type,
)
from flashgen.searchspace import SearchSpace
from flashgen.spec import Content, as_values
from flashgen.tiles import TileTable, check_names
from flashgen.yamlfile import Document

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.axes import Values
    from flashgen.tuned import Tuned


class Checked(NamedTuple):
    """A spec file that is right: what it says, and what tuning further needs of it."""

    content: Content
    document: Document
    file: File
    table: TileTable
    space: SearchSpace


def check(path: Path, text: bytes, tuned: Tuned | None = None) -> Content:
    """What ``text``, the content of ``path``, says, with the rows of ``tuned`` that fit it.

    Raises SpecError where the text is wrong; what is wrong with ``tuned`` is in ``Content.problems``.
    """
    checked = examine(path, text)
    if tuned is None:
        return checked.content
    try:
        rows, problems = tunedfile.read(tuned, checked.file, checked.content, checked.table)
    except SpecError as error:
        rows, problems = [], [tunedfile.without_path(tuned, error)]
    return tunedfile.combine(checked.content, rows, problems)


def examine(path: Path, text: bytes) -> Checked:
    """Check ``text``, the content of ``path``. Raises SpecError where it is wrong."""
    document = Document(path, text)
    file = document.convert((), document.value, File)
    axes = read_axes(document, file)
    targets = _targets(document, file)
    check_names(document, file, axes.values)
    element_bytes = _element_bytes(document, file, axes.values)
    params = _params(document, file, axes.values)
    boxes = Boxes(document, file, axes.values, params)
    table = TileTable(document, file, axes, targets, element_bytes, boxes)
    space = SearchSpace(document, file, axes.values, table.entries)
    content = Content(
        direction=file.direction,
        description=file.description,
        axes=axes.values,
        element_bytes=element_bytes,
        params=params,
        family={
            "family": file.family,
            "template": file.template,
            "header": file.header,
            "options": tuple(file.options),
            "schedule": file.schedule,
            "dependent_launch": file.dependent_launch,
            "start": file.dispatch.start,
            "fill": file.dispatch.fill,
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
    return Checked(content, document, file, table, space)


def _targets(document: Document, file: File) -> dict[str, Target]:
    targets = {}
    for name, given in file.targets.items():
        document.convert(("targets", name), name, ShortName)
        targets[name] = document.convert(("targets", name), given, Target)
    if not targets:
        raise document.error(("targets",), "there is no target")
    return targets


def _element_bytes(document: Document, file: File, axes: dict[str, Values]) -> dict[str, int]:
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


def _params(document: Document, file: File, axes: dict[str, Values]) -> tuple[Param, ...]:
    params: list[Param] = []
    condition = when_type(axes, tile_types(file))
    for i, given in enumerate(file.params):
        row = document.convert(("params", i), given, ParamRow)
        if row.type == TENSOR_MAP and row.box is None:
            raise document.error(("params", i), f"the key `box` is missing; a {TENSOR_MAP} needs it")
        if row.type != TENSOR_MAP and row.box is not None:
            raise document.error(("params", i, "box"), f"only a {TENSOR_MAP} has a box")
        when = document.convert(("params", i, "when"), row.when, condition)
        limits = ((key, getattr(when, key)) for key in (*axes, *file.tile_keys))
        kept = tuple((key, as_values(limit)) for key, limit in limits if limit is not None)
        param = Param(row.name, row.type, row.doc, kept)
        if any(other.name == row.name and not param.excludes(other) for other in params):
            raise document.error(
                ("params", i, "name"),
                f"a second parameter is called `{row.name}`, and no key of `when` keeps the two apart",
            )
        params.append(param)
    return tuple(params)
