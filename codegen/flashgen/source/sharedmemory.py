"""The shared memory of a rendered kernel as regions, from the constants of its source.

Each kernel has a chain of constants: `kSharedBytes = kBarrierOffset + ...`, `kBarrierOffset = kVOffset +
...`, down to the first region, which begins at 0. The regions follow from the chain, and their sizes from the
values.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.families.variant import Variant

_CONSTANT = re.compile(r"^constexpr int (k\w+) = (.*?);", re.MULTILINE)
_OFFSET = re.compile(r"\bk\w*(?:Offset|SharedBytes)\w*")
# So many buffers of so many bytes: `kStages * kKBytes` at the end of an expression.
_BUFFERS = re.compile(r"(?:^|\+ )(\w+) \* (k\w+Bytes\w*)$")
_MAP_ROW = re.compile(r"^// +shared memory +(\w+),", re.MULTILINE)
_END = "kSharedBytes"
_MOST_BUFFERS = 8  # a larger factor counts rows
_NAMES = {
    "Dout": "dO",
    "DoutV": "dO",
    "Ds": "dS",
    "Lse": "LSE",
    "Delta": "delta",
    "Out": "O",
    "Barrier": "barriers",
    "TileShared": "second tile",
    "PeerK": "peer's K",
    "TileV": "tile, V or dO",
    "StepV": "step, V or dO",
}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


@dataclass(frozen=True)
class Region:
    """Bytes ``[begin, end)`` of a thread block's shared memory, in ``buffers`` equal parts."""

    name: str
    begin: int
    end: int
    buffers: int = 1

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


def regions(source: str, variant: Variant) -> tuple[Region, ...]:
    """The regions of the dynamic shared memory, which cover all of `variant.smem_bytes`.

    The last one is what aligns the first one to 1,024 bytes, where a kernel needs that. A kernel whose source
    has no such constants has one region.
    """
    texts = dict(_CONSTANT.findall(source))
    values = _values(texts, variant.element_bytes)
    total = variant.smem_bytes
    if not total:
        return ()
    if not 0 < values.get(_END, 0) <= total:
        return (Region("shared memory", 0, total),)
    parts: list[Region] = []
    constant, end = _END, values[_END]
    while constant in values:
        before = _OFFSET.search(texts[constant])
        name = before[0] if before and before[0] in values else ""
        begin = values[name] if name else 0
        if not 0 <= begin <= end:
            return (Region("shared memory", 0, total),)
        if begin < end:
            label = _label(name) if begin else _first_label(source, texts[constant], name)
            parts.append(Region(label, begin, end, _buffers(texts[constant], values, end - begin)))
        constant, end = name, begin
    if values[_END] < total:
        parts.insert(0, Region("alignment", values[_END], total))
    return tuple(reversed(parts))


def _label(offset: str) -> str:
    """A region's name from the constant with its offset: `kDoutOffset` is of dO."""
    stem = re.sub(r"Offset|Bytes", "", offset.removeprefix("k"))
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", stem)
    return _NAMES.get(stem, spaced.lower() if len(stem) > 1 else stem)


def _first_label(source: str, text: str, name: str) -> str:
    """The name of the region at 0: of its constant, of the bytes of its buffers, or the first word of the
    map's row.
    """
    if name:
        return _label(name)
    buffers = re.search(r"\bk(\w+)Bytes$", text)
    row = _MAP_ROW.search(source)
    if buffers and buffers[1] not in ("Row", "Stage"):
        return _label(f"k{buffers[1]}Offset")
    return row[1] if row else "first region"


def _buffers(text: str, values: Mapping[str, int], size: int) -> int:
    match = _BUFFERS.search(text)
    if match is None:
        return 1
    count = int(match[1]) if match[1].isdecimal() else values.get(match[1], 1)
    return count if 1 < count <= _MOST_BUFFERS and count * values.get(match[2], 0) == size else 1


def _values(texts: Mapping[str, str], element_bytes: int) -> dict[str, int]:
    """The constants that are sums, products and quotients of whole numbers and of constants before them."""
    values: dict[str, int] = {}
    for name, text in texts.items():
        text = text.replace("sizeof(element)", str(element_bytes)).replace("sizeof(float)", "4")
        try:
            values[name] = _value(ast.parse(re.sub(r"\bint\((\w+)\)", r"\1", text), mode="eval").body, values)
        except (SyntaxError, KeyError, ZeroDivisionError):
            continue  # of another kind
    return values


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    """The value of an expression; KeyError for what it cannot compute. C++ rounds quotients towards 0."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    raise KeyError(ast.dump(node))
