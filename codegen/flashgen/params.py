"""A kernel's parameter struct, defined once: the C text and the packing in Python come from the same table.

The struct follows natural C alignment (every member at a multiple of its own size, the whole padded to the
largest), and the C text carries a ``static_assert`` for its size and for each offset, so the two sides cannot
drift apart unseen.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import numpy as np

# A parameter of this type holds what the copy engine has to know of an array (``tensormap``).
TENSOR_MAP = "tensor_map"
# C type -> (size in bytes, struct code, numpy code)
_CTYPES: dict[str, tuple[int, str, str]] = {
    "const element*": (8, "Q", "<u8"),
    "element*": (8, "Q", "<u8"),
    "const float*": (8, "Q", "<u8"),
    "float*": (8, "Q", "<u8"),
    "const uint8_t*": (8, "Q", "<u8"),
    "uint8_t*": (8, "Q", "<u8"),
    "const int32_t*": (8, "Q", "<u8"),
    "int32_t*": (8, "Q", "<u8"),
    "int64_t": (8, "q", "<i8"),
    "uint64_t": (8, "Q", "<u8"),
    "int32_t": (4, "i", "<i4"),
    "uint32_t": (4, "I", "<u4"),
    "float": (4, "f", "<f4"),
    TENSOR_MAP: (128, "128s", "V128"),
}
_MAX_ALIGNMENT = 64  # of a tensor map; everything else is aligned to its size
CTYPES = tuple(_CTYPES)

_DOC_COLUMN = 42
_ASSERT_COLUMNS = 130


class Box(NamedTuple):
    """What one copy by a tensor map brings: ``rows`` rows of ``columns`` elements each."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True)
class Param:
    """One member of the parameter struct. ``ctype`` is one of ``CTYPES``; ``doc`` is its comment in the C
    struct.

    ``when`` lists, per axis or tile key, the values for which the member exists; empty means always. ``box``
    is that of a tensor map in a variant, and None for any other type.
    """

    name: str
    ctype: str
    doc: str = ""
    when: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    box: Box | None = None

    def present(self, values: Mapping[str, str | int]) -> bool:
        """Whether a variant with these values of axes and tile keys has the member."""
        return all(values[key] in limit for key, limit in self.when)

    def excludes(self, other: Param) -> bool:
        """Whether no variant has both: some key is limited to values that have none in common."""
        limits = dict(other.when)
        return any(set(limits[key]).isdisjoint(limit) for key, limit in self.when if key in limits)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each member lies. ``offsets`` (bytes) has the members in order; ``size`` and ``alignment`` are in
    bytes.

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
        size, char, _ = _CTYPES[param.ctype]
        padding = -end % min(size, _MAX_ALIGNMENT)
        code.append("x" * padding + char)
        offsets[param.name] = end + padding
        end += padding + size
        alignment = max(alignment, min(size, _MAX_ALIGNMENT))
    padding = -end % alignment
    code.append("x" * padding)
    formats = tuple(_CTYPES[param.ctype][2] for param in params)
    return Layout(offsets, end + padding, alignment, struct.Struct("".join(code)), formats)


def struct_text(params: tuple[Param, ...], name: str = "Params") -> str:
    """The C struct with each member's doc behind it, then the assertions on its size and offsets, several
    members to a line. No final newline.

    Needs ``element``, ``offsetof`` and the fixed-width integers in scope.
    """
    table = layout(params)
    lines = [f"struct {name} {{"]
    for param in params:
        member = f"    {param.ctype} {param.name};"
        lines.append(f"{member:<{_DOC_COLUMN}}// {param.doc}" if param.doc else member)
    checks = [f"sizeof({name}) == {table.size}"]
    checks += [f"offsetof({name}, {member}) == {offset}" for member, offset in table.offsets.items()]
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
