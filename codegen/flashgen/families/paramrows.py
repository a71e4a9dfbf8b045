"""The ``params`` of a step: parameters that the spec names, and those that it adds, checked."""

from __future__ import annotations

import difflib
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.families import parameters
from flashgen.families.model import as_values
from flashgen.families.parameters import CODES, ELEMENT, FEATURE, POINTERS, Declared, When
from flashgen.families.params import CTYPES, TENSOR_MAP, VECTOR_WIDTH, Param
from flashgen.families.schema import PARAM, BoxRow, File, ParamRow
from flashgen.operators import operator_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.families.axes import Values
    from flashgen.families.kinds import Keys, Record
    from flashgen.families.yamlfile import Document

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


class ParamReader:
    """Reads the ``params`` of the steps of a spec: of one with these ``axes`` and ``features``, whose
    conditions are of the kind ``condition``.
    """

    def __init__(
        self,
        document: Document,
        file: File,
        axes: Mapping[str, Values],
        condition: Record,
        features: Mapping[str, Limits],
    ) -> None:
        self._document, self._file, self._axes = document, file, axes
        self._condition, self._features = condition, features
        self._operator = operator_of(file.operator, file.has_lengths)

    def members(self, keys: Keys, rows: Sequence[Any]) -> tuple[Member, ...]:
        """The members of a struct in their order, from the ``rows`` at ``keys``. Raises SpecError."""
        if not rows:
            raise self._document.error(keys, "found []; expected a list that is not empty")
        struct: list[Member] = []
        for i, row in enumerate(rows):
            for member in self._members((*keys, i), row):
                twice = (other.param for other in struct if other.param.name == member.param.name)
                if not all(map(member.param.excludes, twice)):
                    why = (
                        f"a second parameter is called `{member.param.name}`, and no key of `when` keeps the"
                    )
                    raise self._document.error((*member.keys, "name"), f"{why} two apart")
                allowed = _types_of(self._file, member.param.name)
                if member.param.ctype.removeprefix("const ") not in allowed:
                    why = f"found {member.param.ctype!r}; allowed: {', '.join(allowed)}"
                    raise self._document.error((*member.keys, "type"), why)
                struct.append(member)
        return tuple(struct)

    def limits(self, keys: Keys, when: Mapping[str, Any]) -> Limits:
        """The values of axes and tile keys that a ``when`` at ``keys`` names."""
        return limits(self._document, self._condition, keys, when)

    def _members(self, keys: Keys, row: Any) -> list[Member]:
        """The members that a row stands for."""
        error, const = partial(self._document.error, keys), None
        if isinstance(row, str):
            match = _NAMED.fullmatch(row)
            if match is None:
                raise error(f"found {row!r}; expected the name of a parameter, or const and a name")
            const, name = match.groups()
            row = ParamRow(name)
        else:
            row = self._document.convert(keys, row, PARAM)
        stated = self.limits((*keys, "when"), row.when)
        if row.type is not None:
            if row.type == TENSOR_MAP and row.box is None:
                raise error(f"the key `box` is missing; a {TENSOR_MAP} needs it")
            if row.type != TENSOR_MAP and row.box is not None:
                raise self._document.error((*keys, "box"), f"only a {TENSOR_MAP} has a box")
            return [Member(Param(row.name, row.type, row.doc or "", stated), keys, row.box)]
        members = []
        for name, declared in self._declared(keys, row).items():
            left = {key: values for key, values in declared.when.items() if key not in dict(stated)}
            implied = self._implied(left)
            if implied is None:
                if self._document.inherited(keys):
                    continue
                conditions = "; ".join(f"{key} {' or '.join(values)}" for key, values in left.items())
                raise error(f"no variant has `{name}`, which is of {conditions}; leave it out")
            ctype = declared.ctype
            if const:
                if not ctype.endswith("*") or ctype.startswith("const "):
                    raise error(f"`{name}` is a {ctype}; const is for an array that steps write")
                ctype = f"const {ctype}"
            doc = declared.doc if row.doc is None else row.doc
            param = Param(name, ctype, doc, tuple((implied | dict(stated)).items()))
            members.append(Member(param, keys, row.box))
        return members

    def _declared(self, keys: Keys, row: ParamRow) -> dict[str, Declared]:
        """What is declared of a row without a type, by name."""
        if row.box is not None:
            if not parameters.takes_tensor_map(row.name, self._operator):
                why = f"only a {TENSOR_MAP} has a box, and only an array of elements is one"
                raise self._document.error((*keys, "box"), why)
            return {row.name: parameters.tensor_map(row.name, self._operator)}
        workspace = self._file.workspace
        declared = parameters.declared(row.name, self._operator, workspace)
        if not declared:
            close = difflib.get_close_matches(row.name, parameters.names(self._operator, workspace), n=3)
            hint = f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
            operator = self._operator.name
            why = f"`{row.name}` is neither a parameter of {operator} nor an array of `workspace`{hint}"
            raise self._document.error(keys, f"{why}. To add it, write {{name: {row.name}, type: ...}}")
        return declared

    def _implied(self, when: When) -> dict[str, tuple[str | int, ...]] | None:
        """The limits that a declared ``when`` sets in this spec; None where no variant meets it."""
        limited: dict[str, tuple[str | int, ...]] = {}
        for key, allowed in when.items():
            if key == FEATURE:
                if allowed[0] not in self._features:
                    return None
                limited |= self._features[allowed[0]]
                continue
            if key not in self._axes and key not in self._operator.axes:
                continue  # it tells variants of other operators apart
            values = self._axes.get(key) or (self._operator.axes[key].default,)
            kept = tuple(value for value in values if value in allowed)
            if not kept:
                return None
            if len(kept) < len(values):
                limited[key] = kept
        return limited


def limits(document: Document, condition: Record, keys: Keys, when: Mapping[str, Any]) -> Limits:
    """The values of axes and tile keys that a ``when``, of the type ``condition``, names."""
    if not when:
        return ()
    checked = document.convert(keys, when, condition)
    return tuple((key, tuple(as_values(limit))) for key, limit in checked.items() if limit is not None)


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
        codes = (CODES,) if {*as_values(file.axes.get("kv_dtype", ()))} - {"none"} else ()
        sums = (POINTERS["fp32"],) if "fp32dkv" in as_values(file.axes.get("dkv_dtype", ())) else ()
        return (ELEMENT, *codes, *sums, TENSOR_MAP)
    return tuple(dict.fromkeys(POINTERS.get(dtype, ELEMENT) for dtype in dtypes))
