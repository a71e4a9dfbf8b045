"""The boxes of a spec's tensor maps: how much of an array TMA moves at a time, at each point and tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.families.expression import Expression
from flashgen.families.params import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flashgen.families.kinds import Keys
    from flashgen.families.paramrows import Member
    from flashgen.families.params import Param
    from flashgen.families.yamlfile import Document

# Limits of ``cuTensorMapEncodeTiled``. SWIZZLES are the bytes of a box's rows for which there is a swizzle.
DTYPES = ("fp16", "bf16", "fp32", "e4m3")
SWIZZLES = (32, 64, 128)
MAX_BOX = 256
_OF_CODES = "kv_dtype"  # the axis that says whether k and v are codes of a byte


class Boxes:
    """The boxes of one step, as expressions. Raises SpecError for one that is no expression."""

    def __init__(self, document: Document, names: frozenset[str], members: Iterable[Member]) -> None:
        """``names`` may stand in a box of the ``members``."""
        self._document, self._names = document, names
        self._maps = [
            (
                member.param,
                (*member.keys, "box"),
                self._expression((*member.keys, "box", "columns"), member.box.columns),
                self._expression((*member.keys, "box", "rows"), member.box.rows),
            )
            for member in members
            if member.box is not None
        ]
        # The axes and tile keys on which the boxes depend.
        self.reads = {"dtype", "element_bytes", *({_OF_CODES} & names)} if self._maps else set()
        for param, _, columns, rows in self._maps:
            self.reads |= {key for key, _ in param.when} | columns.reads | rows.reads

    def at(self, values: Mapping[str, str | int], where: Callable[[], str]) -> tuple[Box, ...]:
        """The boxes of the tensor maps that exist where axes and tile keys have these ``values``.

        Raises SpecError, which says ``where``, for a box that TMA cannot move.
        """
        return tuple(
            self._box(param, keys, columns, rows, values, where)
            for param, keys, columns, rows in self._maps
            if param.present(values)
        )

    def _expression(self, keys: Keys, text: str | int) -> Expression:
        try:
            return Expression(text, self._names)
        except ValueError as error:
            raise self._document.error(keys, str(error)) from None

    def _box(
        self,
        param: Param,
        keys: Keys,
        columns: Expression,
        rows: Expression,
        values: Mapping[str, str | int],
        where: Callable[[], str],
    ) -> Box:
        if values["dtype"] not in DTYPES:
            why = f"dtype {values['dtype']} has no tensor map ({where()}); allowed: {', '.join(DTYPES)}"
            raise self._document.error(keys, why)
        box = Box(
            self._number((*keys, "columns"), columns, values, where),
            self._number((*keys, "rows"), rows, values, where),
        )
        codes = param.name in ("k", "v") and values.get(_OF_CODES) == "e4m3"
        row_bytes = box.columns * (1 if codes else values["element_bytes"])
        if row_bytes not in SWIZZLES:
            width = f"{box.columns} columns are {row_bytes} bytes for {where()}"
            why = f"{width}; allowed: the bytes of a swizzle, {', '.join(map(str, SWIZZLES))}"
            raise self._document.error((*keys, "columns"), why)
        if not 1 <= box.rows <= MAX_BOX:
            raise self._document.error(
                (*keys, "rows"), f"{box.rows} rows for {where()}; allowed: 1 to {MAX_BOX}"
            )
        return box

    def _number(
        self, keys: Keys, expression: Expression, values: Mapping[str, str | int], where: Callable[[], str]
    ) -> int:
        try:
            return expression(values)
        except ValueError as error:
            raise self._document.error(keys, f"{where()}: {error}") from None
