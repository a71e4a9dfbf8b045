"""A kernel's parameter struct, defined once: the C text and the packing in Python come from the same table.

The struct follows natural C alignment (every member at a multiple of its own size, the whole padded to the
largest), and the C text carries a ``static_assert`` for its size and for each offset, so the two sides cannot
drift apart unseen.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from flashgen.families.params import C_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import numpy as np

    from flashgen.families.params import Param

_MAX_ALIGNMENT = 64  # of a tensor map; everything else is aligned to its size
_DOC_COLUMN = 42
_ASSERT_COLUMNS = 130


@dataclass(frozen=True, eq=False)
class Layout:
    """The place of each member. ``offsets`` (bytes) has the members in order; ``size`` and ``alignment`` are
    in bytes.

    ``struct`` packs the values, in the order of ``offsets``, into exactly ``size`` bytes.
    """

    offsets: dict[str, int]
    size: int
    alignment: int
    struct: struct.Struct
    formats: tuple[str, ...]

    @cached_property
    def dtype(self) -> np.dtype:
        """The same layout as a NumPy structured dtype; pointers are uint64, tensor maps raw bytes."""
        import numpy as np

        return np.dtype(
            {
                "names": list(self.offsets),
                "formats": list(self.formats),
                "offsets": list(self.offsets.values()),
                "itemsize": self.size,
            }
        )

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The struct's bytes; a tensor map's value is its bytes. Raises KeyError for a missing member and
        struct.error for a value that does not fit.
        """
        return self.struct.pack(*[values[name] for name in self.offsets])


@lru_cache(maxsize=256)
def layout(params: tuple[Param, ...]) -> Layout:
    """Offsets and packing of a struct of ``params`` in their order."""
    offsets: dict[str, int] = {}
    code, end, alignment = ["<"], 0, 1
    for param in params:
        size, char, _ = C_TYPES[param.ctype]
        padding = -end % min(size, _MAX_ALIGNMENT)
        code.append("x" * padding + char)
        offsets[param.name] = end + padding
        end += padding + size
        alignment = max(alignment, min(size, _MAX_ALIGNMENT))
    padding = -end % alignment
    code.append("x" * padding)
    formats = tuple(C_TYPES[param.ctype][2] for param in params)
    return Layout(offsets, end + padding, alignment, struct.Struct("".join(code)), formats)


def struct_text(params: tuple[Param, ...]) -> str:
    """The C struct ``Params`` with each member's doc after it, then the assertions on its size and offsets,
    several members to a line. No final newline.

    Needs ``element``, ``offsetof`` and the fixed-width integers in scope.
    """
    table = layout(params)
    lines = ["struct Params {"]
    for param in params:
        member = f"    {param.ctype} {param.name};"
        lines.append(f"{member:<{_DOC_COLUMN}}// {param.doc}" if param.doc else member)
    checks = [f"sizeof(Params) == {table.size}"]
    checks += [f"offsetof(Params, {member}) == {offset}" for member, offset in table.offsets.items()]
    return "\n".join([*lines, "};", *_assertions(checks)])


def _assertions(conditions: list[str]) -> list[str]:
    """Lines that assert as many of the conditions as fit on each."""
    lines: list[str] = []
    for condition in conditions:
        longer = f"{lines[-1].removesuffix(');')} && {condition});" if lines else ""
        if lines and len(longer) <= _ASSERT_COLUMNS:
            lines[-1] = longer
        else:
            lines.append(f"static_assert({condition});")
    return lines
