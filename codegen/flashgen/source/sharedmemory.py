"""The shared memory of a rendered kernel as regions, from its source.

A kernel declares a `struct SharedStorage`, whose members are the regions, or it has a chain of constants:
`kSharedBytes = kBarrierOffset + ...`, `kBarrierOffset = kVOffset + ...`, down to the first region, which
begins at 0.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.families.variant import Variant

_CONSTANT = re.compile(r"^constexpr int (k\w+) = (.*?);", re.MULTILINE)
_OFFSET = re.compile(r"\bk\w*(?:Offset|SharedBytes)\w*")
# The number of buffers times the bytes of one: `kStages * kKBytes` at the end of an expression.
_BUFFERS = re.compile(r"(?:^|\+ )(\w+) \* (k\w+Bytes\w*)$")
_STRUCT = re.compile(r"^struct (?:alignas\((\d+)\) )?(\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_MEMBER = re.compile(r"^    (\w+) (\w+)((?:\[[^\]]+\])*);", re.MULTILINE)
_STORAGE = "SharedStorage"
_SIZES = {
    "float": 4,
    "int": 4,
    "int32_t": 4,
    "uint32_t": 4,
    "uint64_t": 8,
    "float2": 8,
    "uint4": 16,
    "uint8_t": 1,
}
_ALIGNMENTS = {"uint4": 16, "fp16": 2, "bf16": 2}  # of other types the size, at most 8
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
    # members of SharedStorage
    "k": "K",
    "v": "V",
    "q": "Q",
    "p": "P",
    "dout": "dO",
    "ds": "dS",
    "out": "O",
    "peer_k": "peer's K",
    "tile_v": "tile, V or dO",
    "step_v": "step, V or dO",
    "lse_log2": "LSE",
    "mbarriers": "barriers",
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
    values = _values(texts, _SIZES | {"element": variant.element_bytes})
    total = variant.smem_bytes
    if not total:
        return ()
    if members := _members(source, texts, variant.element_bytes):
        return _padded(members, total)
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


def _members(source: str, texts: Mapping[str, str], element_bytes: int) -> list[Region]:
    """The members of `SharedStorage`, successive mbarriers as one; none where the kernel has no such struct,
    or a member of another type.
    """
    structs = _STRUCT.findall(source)
    sizes = _SIZES | {"element": element_bytes}
    regions: list[Region] = []
    for _ in range(3):  # sizes of structs have constants, and constants have sizes of structs
        values = _values(texts, sizes)
        for alignment, struct, body in structs:
            regions = _laid_out(body, values, sizes)
            if regions:
                size = -(-regions[-1].end // int(alignment or 1)) * int(alignment or 1)
                regions[-1] = dataclasses.replace(regions[-1], end=size)
                sizes[struct] = size
            if struct == _STORAGE and regions:
                return _joined(regions)
    return []


def _laid_out(body: str, values: Mapping[str, int], sizes: Mapping[str, int]) -> list[Region]:
    """The members of a struct; none where one has an unknown type or extent."""
    regions: list[Region] = []
    for kind, name, dimensions in _MEMBER.findall(body):
        texts = re.findall(r"\[([^\]]+)\]", dimensions)
        try:
            extents = [_value(ast.parse(text, mode="eval").body, values) for text in texts]
            alignment = _ALIGNMENTS.get(kind, min(sizes[kind], 8))
            begin = -(-regions[-1].end // alignment) * alignment if regions else 0
            end = begin + sizes[kind] * math.prod(extents)
        except (KeyError, SyntaxError):
            return []
        counted = extents and 1 < extents[0] <= _MOST_BUFFERS and re.fullmatch(r"k\w*Stages|\d", texts[0])
        label = "barriers" if kind == "uint64_t" else _NAMES.get(name, name.replace("_", " "))
        regions.append(
            Region(
                label,
                begin,
                end,
                extents[0] if counted and (len(extents) > 1 or kind not in (*_SIZES, "element")) else 1,
            )
        )
    return regions


def _joined(regions: list[Region]) -> list[Region]:
    """The regions, with gaps added to the one before, and successive mbarriers as one."""
    joined: list[Region] = []
    for region in regions:
        if joined and (region.name == joined[-1].name == "barriers"):
            joined[-1] = Region("barriers", joined[-1].begin, region.end)
            continue
        if joined and joined[-1].end < region.begin:
            joined[-1] = Region(joined[-1].name, joined[-1].begin, region.begin)
        joined.append(region)
    return joined


def _padded(members: list[Region], total: int) -> tuple[Region, ...]:
    """The members, a second struct of the same size where there is room for it, and what aligns the first."""
    size = members[-1].end
    if size > total:
        return (Region("shared memory", 0, total),)
    parts = [*members]
    if total >= 2 * size:
        parts.append(Region("second tile", size, 2 * size))
    if parts[-1].end < total:
        parts.append(Region("alignment", parts[-1].end, total))
    return tuple(parts)


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


def _values(texts: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, int]:
    """The constants that are sums, products and quotients of whole numbers, of sizes of types, and of
    constants before them.
    """
    values: dict[str, int] = {}
    for name, text in texts.items():
        text = re.sub(r"\bsizeof\((\w+)\)", lambda match: str(sizes.get(match[1], match[0])), text)
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
