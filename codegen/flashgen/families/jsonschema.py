"""The JSON Schema of spec files, `scores.yaml` and `masks.yaml`, from the kinds by which they are checked.

An editor completes and checks YAML by it. It knows less than loading does: the axes of a file decide what its
tiles, parameters and conditions may say, and no schema can follow that.
"""

from __future__ import annotations

from typing import Any

from flashgen.families import masks, scores
from flashgen.families.kinds import ANYTHING, Either, Field, Integer, Kind, ListOf, MapOf, Null, Record, Text
from flashgen.families.schema import (
    AXIS_VALUES,
    DEFAULT_AXIS,
    FILE,
    NAME,
    PARAM,
    RANGE,
    STEP,
    TARGET,
    tile_row,
    tune_row,
)

_DIALECT = "http://json-schema.org/draft-07/schema#"
_VALUE = Either(Integer(), Text())
# The value of an axis or a tile key: one, several, or all.
_CONDITIONS = (_VALUE, ListOf(_VALUE), Null())
# `q_row_stride`, `const part_outputs`, or a row.
_PARAMS = ListOf(
    Either(
        Text("a name, or const and the name of a part of the workspace", r"^(const )?[a-z][a-z0-9_]*$"), PARAM
    )
)


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each kind of file, by name."""
    return {"spec": spec_schema(), "scores": scores_schema(), "masks": masks_schema()}


def spec_schema() -> dict[str, Any]:
    """The schema of a spec. One that extends another may leave any key out."""
    # What a file's axes decide is checked here as far as it is the same for all.
    refined = {
        "axes": MapOf(Either(AXIS_VALUES, DEFAULT_AXIS), NAME),
        "targets": MapOf(TARGET, NAME),
        "element_bytes": MapOf(Integer(1)),
        "params": _PARAMS,
        "steps": ListOf(Record(STEP.fields | {"params": Field(_PARAMS)})),
    }
    fields = {key: Field(refined.get(key, field.kind), field.default) for key, field in FILE.fields.items()}
    schema = Record(fields).schema()
    properties = schema["properties"]
    properties["tiles"] = _rows(tile_row({}, {}, {}, False), Either(*_CONDITIONS))
    properties["tune"] = _rows(tune_row({}, {}), Either(*_CONDITIONS, RANGE))
    for key in ("exclude", "commit"):
        properties[key] = _rows(Record({}), ANYTHING)
    # A step of a spec that extends another says what differs.
    properties["steps"]["items"]["required"] = ["name"]
    required = schema.pop("required")
    return {
        "$schema": _DIALECT,
        "title": "A spec of flashgen: one family of kernels",
        **schema,
        "anyOf": [{"required": ["extends"]}, {"required": required}],
    }


def scores_schema() -> dict[str, Any]:
    """The schema of a `scores.yaml`."""
    file = Record(scores.FILE.fields | {"scores": Field(MapOf(scores.ROW, NAME))})
    return {"$schema": _DIALECT, "title": "Score modifications of flashgen", **file.schema()}


def masks_schema() -> dict[str, Any]:
    """The schema of a `masks.yaml`."""
    file = Record(masks.FILE.fields | {"masks": Field(MapOf(masks.ROW, NAME))})
    return {"$schema": _DIALECT, "title": "Masks of flashgen, by a line each", **file.schema()}


def _rows(row: Record, other: Kind) -> dict[str, Any]:
    """A list of rows that have the fields of ``row``, and ``other`` values of axes and tile keys."""
    return {"type": "array", "items": row.schema() | {"additionalProperties": other.schema()}}
