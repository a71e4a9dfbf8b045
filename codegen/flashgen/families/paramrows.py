"""The ``params`` of a step: parameters that the spec names, and those that it adds, checked."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.families import parameters
from flashgen.families.model import as_values
from flashgen.families.parameters import ELEMENT, POINTERS, Declared
from flashgen.families.params import CTYPES, TENSOR_MAP, VECTOR_WIDTH, Param
from flashgen.families.schema import PARAM, BoxRow, File, ParamRow
from flashgen.operators import operator_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.families.axes import Values
    from flashgen.families.kinds import Keys, Record
    from flashgen.families.yamlfile import Document
    from flashgen.operators.operator import Operator

# A parameter by its name. A step that only reads an array of the workspace has it `const`.
_NAMED = re.compile(r"(const )?([a-z][a-z0-9_]*)")
# The types of numbers that a spec may add.
_NUMBERS = tuple(ctype for ctype in CTYPES if not ctype.endswith("*") and ctype != TENSOR_MAP)

Limits = tuple[tuple[str, tuple[str | int, ...]], ...]


class Member(NamedTuple):
    """A parameter of the struct, with the place of its row in the file, and what a tensor map moves."""

    param: Param
    keys: Keys
    box: BoxRow | None = None


def members(
    document: Document, file: File, axes: Mapping[str, Values], condition: Record, keys: Keys, rows: list[Any]
) -> tuple[Member, ...]:
    """The members of a struct in their order, from the ``rows`` at ``keys``. Raises SpecError."""
    if not rows:
        raise document.error(keys, "found []; expected a list that is not empty")
    found: list[Member] = []
    for i, row in enumerate(rows):
        for member in _members(document, file, axes, condition, (*keys, i), row):
            twice = (other.param for other in found if other.param.name == member.param.name)
            if not all(map(member.param.excludes, twice)):
                raise document.error(
                    (*member.keys, "name"),
                    f"a second parameter is called `{member.param.name}`, and no key of `when` keeps the two "
                    "apart",
                )
            allowed = _types_of(file, member.param.name)
            if member.param.ctype.removeprefix("const ") not in allowed:
                why = f"found {member.param.ctype!r}; allowed: {', '.join(allowed)}"
                raise document.error((*member.keys, "type"), why)
            found.append(member)
    return tuple(found)


def limits(document: Document, condition: Record, keys: Keys, when: dict[str, Any]) -> Limits:
    """The values of axes and tile keys that a ``when``, of the type ``condition``, names."""
    if not when:
        return ()
    checked = document.convert(keys, when, condition)
    return tuple((key, tuple(as_values(limit))) for key, limit in checked.items() if limit is not None)


def _members(
    document: Document, file: File, axes: Mapping[str, Values], condition: Record, keys: Keys, row: Any
) -> list[Member]:
    if isinstance(row, str):
        match = _NAMED.fullmatch(row)
        if match is None:
            raise document.error(
                keys, f"found {row!r}; expected the name of a parameter, or const and a name"
            )
        const, name = match.groups()
        row = ParamRow(name)
    else:
        row, const = document.convert(keys, row, PARAM), None
    own = limits(document, condition, (*keys, "when"), row.when)
    if row.type is not None:
        if row.type == TENSOR_MAP and row.box is None:
            raise document.error(keys, f"the key `box` is missing; a {TENSOR_MAP} needs it")
        if row.type != TENSOR_MAP and row.box is not None:
            raise document.error((*keys, "box"), f"only a {TENSOR_MAP} has a box")
        return [Member(Param(row.name, row.type, row.doc or "", own), keys, row.box)]
    operator, found = operator_of(file.operator, file.has_lengths), []
    for name, declared in _declared(document, file, keys, row).items():
        stated = dict(own)
        left = {axis: values for axis, values in declared.when.items() if axis not in stated}
        implied = _implied(left, axes, operator)
        if implied is None:
            if document.inherited(keys):
                continue
            conditions = "; ".join(f"{axis} {' or '.join(values)}" for axis, values in left.items())
            raise document.error(keys, f"no variant has `{name}`, which is of {conditions}; leave it out")
        ctype = declared.ctype
        if const:
            if not ctype.endswith("*") or ctype.startswith("const "):
                raise document.error(keys, f"`{name}` is a {ctype}; const is for an array that steps write")
            ctype = f"const {ctype}"
        when = tuple((implied | stated).items())
        doc = declared.doc if row.doc is None else row.doc
        found.append(Member(Param(name, ctype, doc, when), keys, row.box))
    return found


def _declared(document: Document, file: File, keys: Keys, row: ParamRow) -> dict[str, Declared]:
    operator = operator_of(file.operator, file.has_lengths)
    if row.box is not None:
        if not parameters.takes_tensor_map(row.name, operator):
            raise document.error(
                (*keys, "box"), f"only a {TENSOR_MAP} has a box, and only an array of elements is one"
            )
        return {row.name: parameters.tensor_map(row.name, operator)}
    found = parameters.declared(row.name, operator, file.workspace)
    if not found:
        close = difflib.get_close_matches(row.name, parameters.names(operator, file.workspace), n=3)
        hint = f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
        why = f"`{row.name}` is no parameter of {file.operator} and no array of `workspace`{hint}"
        raise document.error(keys, f"{why}. To add it, write {{name: {row.name}, type: ...}}")
    return found


def _implied(
    when: Mapping[str, tuple[str, ...]], axes: Mapping[str, Values], operator: Operator
) -> dict[str, tuple[str | int, ...]] | None:
    """The limits on the spec's axes that follow from a declared ``when``; None where no variant meets it."""
    limited: dict[str, tuple[str | int, ...]] = {}
    for axis, allowed in when.items():
        values = axes.get(axis) or (_default(axis, operator),)
        kept = tuple(value for value in values if value in allowed)
        if not kept:
            return None
        if len(kept) < len(values):
            limited[axis] = kept
    return limited


def _default(axis: str, operator: Operator) -> str | int | None:
    """The value of an axis that a spec lacks."""
    return operator.axes[axis].default if axis in operator.axes else "none"


def _types_of(file: File, name: str) -> tuple[str, ...]:
    """The types that the parameter ``name`` may have, without ``const``."""
    operator = operator_of(file.operator, file.has_lengths)
    if name in file.workspace:
        return (POINTERS.get(file.workspace[name].dtype, ELEMENT),)
    if name.endswith(VECTOR_WIDTH) and name.removesuffix(VECTOR_WIDTH) in operator.positions:
        return ("int32_t",)
    if name not in operator.positions:
        return _NUMBERS
    dtypes = operator.arguments[operator.position(name)].dtypes
    if not dtypes:
        return (ELEMENT, TENSOR_MAP)
    return tuple(dict.fromkeys(POINTERS.get(dtype, ELEMENT) for dtype in dtypes))
