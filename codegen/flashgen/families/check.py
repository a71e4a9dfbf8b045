"""Checking a spec file: from its text to the plain values that a Spec is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import SpecError
from flashgen.families import extends, tunedrows
from flashgen.families.axes import read_axes
from flashgen.families.dispatch import OF_A_TILE
from flashgen.families.expression import Expression
from flashgen.families.grid import GROUP_PARTS, NUM_PARTS, Buffer
from flashgen.families.model import Content, TileRow
from flashgen.families.paramrows import ParamReader, limits
from flashgen.families.schema import (
    FILE,
    POSITIVE,
    SHORT_NAME,
    TARGET,
    File,
    Target,
    tile_kinds,
    when_kind,
)
from flashgen.families.searchspace import SearchSpace
from flashgen.families.steps import read_steps
from flashgen.families.tiletable import TileTable, check_names
from flashgen.operators import OPERATORS, operator_of

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.families.axes import Values
    from flashgen.families.tuned import Tuned
    from flashgen.families.yamlfile import Document


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
        rows, problems = tunedrows.read(tuned, checked.file, checked.content, checked.table)
    except SpecError as error:
        rows, problems = [], [error.explanation]
    return tunedrows.combine(checked.content, rows, problems)


def examine(path: Path, text: bytes) -> Checked:
    """Check ``text``, the content of ``path``. Raises SpecError where it is wrong."""
    document = extends.document(path, text)
    file = document.convert((), document.value, FILE)
    if file.has_lengths and not OPERATORS[file.operator].of_lengths:
        taking = ", ".join(name for name, operator in OPERATORS.items() if operator.of_lengths)
        raise document.error(("lengths",), f"calls of {file.operator} have none; only calls of {taking} do")
    axes = read_axes(document, file)
    targets = _targets(document, file)
    check_names(document, file, axes.values)
    _check_claims(document, file, axes.values)
    element_bytes = _element_bytes(document, file, axes.values)
    if not file.tiles:  # not before the axes, as a wrong value leaves no inherited row
        why = "found []; expected a list that is not empty"
        if isinstance(document, extends.Extended):
            why += "; no inherited row fits the axes and targets"
        raise document.error(("tiles",), why)
    condition = when_kind(axes.values, tile_kinds(file))
    features = {
        name: limits(document, condition, ("features", name), when) for name, when in file.features.items()
    }
    steps, main = read_steps(
        document, file, axes.values, ParamReader(document, file, axes.values, condition, features)
    )
    table = TileTable(document, file, axes, targets, element_bytes, steps)
    space = SearchSpace(document, file, axes.values, table.entries)
    content = Content(
        operator=file.operator,
        has_lengths=file.has_lengths,
        algorithm=file.algorithm or "",
        description=file.description,
        axes=axes.values,
        element_bytes=element_bytes,
        steps=tuple(step.step for step in steps),
        main=main,
        features=tuple(features.items()),
        workspace=_workspace(document, file, axes.values),
        family={
            "family": file.family,
            "header": file.header,
            "options": file.options,
        },
        dispatch=file.dispatch,
        targets={
            name: {
                "min_arch": target.min_arch,
                "max_smem": target.max_smem,
                "archs": target.compile_for,
                "priority": priority,
            }
            for priority, (name, target) in enumerate(targets.items())
        },
        rows=tuple(
            TileRow(
                tuple((key, row[key]) for key in file.tile_keys),
                row["name"] or "",
                row["no_spills"],
                {key: row[key] for key in OF_A_TILE},
            )
            for row in table.rows
        ),
        entries=table.entries,
    )
    return Checked(content, document, file, table, space)


def _targets(document: Document, file: File) -> dict[str, Target]:
    targets = {}
    for name, row in file.targets.items():
        document.convert(("targets", name), name, SHORT_NAME)
        targets[name] = document.convert(("targets", name), row, TARGET)
    if not targets:
        raise document.error(("targets",), "there is no target")
    return targets


def _element_bytes(document: Document, file: File, axes: dict[str, Values]) -> dict[str, int]:
    sizes, dtypes = file.element_bytes, axes["dtype"]
    for dtype, size in sizes.items():
        document.convert(("element_bytes", dtype), size, POSITIVE)
        if dtype not in dtypes:
            allowed = ", ".join(map(str, dtypes))
            raise document.error(("element_bytes", dtype), f"not a value of axes.dtype; allowed: {allowed}")
    for dtype in dtypes:
        if dtype not in sizes:
            if document.inherited(("element_bytes",)) and not document.inherited(("axes", "dtype")):
                why = f"the size of `{dtype}` is missing; give it in `element_bytes`"
                raise document.error(("axes", "dtype"), why)
            raise document.error(("element_bytes",), f"the size of dtype `{dtype}` is missing")
    return sizes


def _check_claims(document: Document, file: File, axes: dict[str, Values]) -> None:
    """That the operator says of each axis how a call gives its value, and takes every value."""
    claimed = operator_of(file.operator, file.has_lengths).axes
    for axis, values in axes.items():
        if axis not in claimed:
            why = (
                f"the operator {file.operator} does not say how a call chooses a value of this axis; "
                f"it claims {', '.join(claimed)}"
            )
            raise document.error(("axes", axis), why)
        choices = claimed[axis].choices
        for value in values:
            if value not in choices if choices else not isinstance(value, int) or value < 1:
                allowed = ", ".join(map(str, choices)) if choices else "whole numbers above 0"
                raise document.error(("axes", axis), f"no call needs `{value}`; allowed: {allowed}")
    for axis, claim in claimed.items():
        if claim.required and axis not in axes:
            raise document.error(("axes",), f"the axis `{axis}` is missing")


def _workspace(document: Document, file: File, axes: dict[str, Values]) -> tuple[Buffer, ...]:
    """The slices of the workspace, their extents checked as expressions."""
    operator = operator_of(file.operator, file.has_lengths)
    taken = {argument.name for argument in operator.arguments}
    variables = (*axes, *file.tile_keys, *operator.symbols, *operator.grid_dimensions)
    names = frozenset((*variables, NUM_PARTS, GROUP_PARTS))
    buffers = []
    for name, row in file.workspace.items():
        if name in taken:
            raise document.error(("workspace", name), f"an argument of {file.operator} has this name")
        for i, extent in enumerate(row.shape):
            try:
                Expression(extent, names)
            except ValueError as error:
                raise document.error(("workspace", name, "shape", i), str(error)) from None
        buffers.append(Buffer(name, row.dtype, tuple(map(str, row.shape))))
    return tuple(buffers)
