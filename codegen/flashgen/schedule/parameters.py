"""The parameter struct of a step: every value that a spec may name in ``params``, and where a call's pointers
go."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import SpecError
from flashgen.families.grid import GROUP_PARTS
from flashgen.families.params import C_TYPES, TENSOR_MAP, VECTOR_WIDTH, vector_width
from flashgen.schedule.fastdivision import divisor
from flashgen.schedule.grid import all_heads, heads, row_blocks, row_blocks_beside, rows_ahead, tiles
from flashgen.schedule.sections import KeyTiles, sections
from flashgen.schedule.tensormap import BYTES, REQUIREMENTS, TensorMap, describe
from flashgen.schedule.workspace import buffer_of
from flashgen.source.params import layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Number, Operator, Problem
    from flashgen.schedule.shares import Shares
    from flashgen.schedule.workspace import Workspace

_DIVISOR = "_divisor"
# Of the main step's `KeyTiles`; and how many query heads' dq is left to the step before.
OF_KEY_TILES = ("clear_distance", "key_blocks_of_head", "num_key_blocks", "blocks_together")
_CLEARED_HEADS = "cleared_heads"
NO_KEY_TILES = KeyTiles()
_OF_SECTIONS = (
    "heads_per_l2_group",
    "num_l2_groups",
    "l2_group_tiles_divisor",
    "l2_group_heads_divisor",
    "last_l2_group_heads_divisor",
)
_OF_SHARES = (
    "first_kv_block",
    "num_kv_blocks",
    "kv_blocks_per_tile",
    "kv_blocks_per_share",
    "num_shares",
    "kv_blocks_per_split",
    "splits_per_tile",
    "head_sets_log2",
    "heads_per_set",
)


class Struct(NamedTuple):
    """A step's parameter struct for one problem, and what a call has to fill in.

    ``template`` has everything but pointers and tensor maps. ``pointers`` lists (offset, source, distance):
    the address of a source, plus a distance in bytes, goes to an offset. Sources are the operator's arguments
    in their order, then the workspace. ``maps`` lists (offset, source, map), ``widths`` (offset, source,
    strides in bytes) of each ``..._vector_width``, and ``scalars`` (offset, struct code, name) of each number
    that follows from the scalars of a call. Offsets are in bytes.
    """

    template: bytes
    alignment: int
    pointers: tuple[tuple[int, int, int], ...]
    maps: tuple[tuple[int, int, TensorMap], ...]
    widths: tuple[tuple[int, int, tuple[int, ...]], ...]
    scalars: tuple[tuple[int, str, str], ...]


def parameters(
    problem: Problem,
    variant: Variant,
    device: Device,
    shares: Shares | None = None,
    parts: int = 1,
    key_tiles: KeyTiles = NO_KEY_TILES,
) -> dict[str, Number]:
    """Every number that a spec may name in ``params``, by name.

    Sizes have the names of the operator's symbols, strides are in elements: ``q_row_stride``. The rest are
    `Problem.values` and numbers of the grid. ``num_row_blocks`` is the tiles of one (batch, head), and
    ``num_row_blocks_beside`` the tiles of the second kind, which ``num_tiles`` leaves out.
    ``heads_per_l2_group`` and ``num_l2_groups`` come from `sections`. Names with ``kv_block`` come from
    ``shares``, the shares of the main step's grid. Names that end in ``_divisor`` are a `divisor`. The query
    heads of a kv head are ``group_parts`` times ``heads_per_part``. ``clear_distance`` is the main step's,
    and ``cleared_heads`` the query heads of as many heads of its grid; ``key_blocks_of_head``,
    ``num_key_blocks`` and ``blocks_together`` are of its ``key_tiles``, too.
    """
    values: dict[str, Number] = dict(problem.sizes)
    for argument, strides in zip(problem.operator.arguments, problem.strides, strict=True):
        names = argument.stride_names()
        values |= zip(names, strides or (0,) * len(names), strict=True)
    values |= problem.values(problem.operator.axis_values(dict(variant.axes)))
    blocks = row_blocks(problem, variant)
    if "group_size" in values:
        per_part = int(values["group_size"]) // parts
        values |= {GROUP_PARTS: parts, "heads_per_part": per_part}
        values |= zip(OF_KEY_TILES, key_tiles, strict=True)
        values[_CLEARED_HEADS] = key_tiles.clear_distance * per_part
    values |= {
        "num_row_blocks": blocks,
        "num_row_blocks_beside": row_blocks_beside(problem, variant),
        "num_tiles": tiles(problem, variant),
        "rows_ahead": rows_ahead(problem, variant),
        # A grid without tiles is not launched, but it has a struct.
        "num_heads_divisor": divisor(max(1, heads(problem, variant))),
        "num_row_blocks_divisor": divisor(max(1, blocks)),
        "group_size_divisor": divisor(int(values.get("group_size", 1))),
    }
    if shares is not None:
        numbers = (
            shares.first,
            shares.kv_blocks // shares.head_sets,
            shares.per_tile,
            shares.per_share,
            shares.of_a_set,
            shares.per_split,
            shares.splits,
            shares.head_sets.bit_length() - 1,
            heads(problem, variant) // shares.head_sets,
        )
        values |= zip(_OF_SHARES, numbers, strict=True)
    for name in {param.name for param in variant.params} - values.keys():
        base = name.removesuffix(_DIVISOR)
        if base != name and base in values:
            values[name] = divisor(max(1, int(values[base])))
    if any(param.name in _OF_SECTIONS for param in variant.params):
        values |= _sections(problem, variant, device, parts)
    return values


def _sections(problem: Problem, variant: Variant, device: Device, parts: int) -> dict[str, int]:
    cut = sections(problem, variant, device, parts)
    last = all_heads(problem, variant, parts) - (cut.count - 1) * cut.heads
    tiles_of_section = cut.heads * row_blocks(problem, variant)
    numbers = (
        cut.heads,
        cut.count,
        divisor(max(1, tiles_of_section)),
        divisor(cut.heads),
        divisor(max(1, last)),
    )
    return dict(zip(_OF_SECTIONS, numbers, strict=True))


def _widths(operator: Operator) -> list[str]:
    return [argument.name + VECTOR_WIDTH for argument in operator.arguments]


def pack(
    problem: Problem,
    variant: Variant,
    device: Device,
    workspace: Workspace | None = None,
    shares: Shares | None = None,
    parts: int = 1,
    key_tiles: KeyTiles = NO_KEY_TILES,
) -> Struct:
    """The parameter struct of one step. The pointer to an array of the workspace without elements is null.

    Raises SpecError for a parameter that nobody can give, one that overflows, and an array that a tensor map
    cannot describe; dispatch does not choose such a variant.
    """
    operator, table = problem.operator, layout(variant.params)
    slices: Mapping[str, int] = workspace.offsets if workspace else {}
    sizes = {buffer.name: buffer.nbytes for buffer in workspace.slices} if workspace else {}
    numbers = parameters(problem, variant, device, shares, parts, key_tiles)
    values: dict[str, Number | bytes] = dict(numbers)
    pointers, maps, widths, scalars = [], [], [], []
    of_scalars = problem.scalar_values().keys()
    for param in variant.params:
        name, offset = param.name, table.offsets[param.name]
        buffer = buffer_of(name, slices)
        base = name.removesuffix(VECTOR_WIDTH)
        if param.ctype == TENSOR_MAP:
            described = describe(problem, variant, param)
            if described is None:
                raise SpecError(f"{variant.name} needs, for its tensor map of {name}, {REQUIREMENTS}")
            maps.append((offset, operator.position(name), described))
            values[name] = bytes(BYTES)
        elif buffer in slices:
            if sizes[buffer]:
                pointers.append((offset, len(operator.arguments), slices[buffer]))
            values[name] = 0
        elif name in operator.positions:
            pointers.append((offset, operator.position(name), 0))
            values[name] = 0
        elif base != name and base in operator.positions:
            array = problem.array(base)
            strides = tuple(stride * array.element_bytes for stride in array.strides) if array else ()
            widths.append((offset, operator.position(base), strides))
            values[name] = vector_width(*strides)
        elif name in of_scalars:
            scalars.append((offset, C_TYPES[param.ctype][1], name))
        elif name not in numbers:
            names = {*operator.positions, *slices, *numbers, *_OF_SECTIONS, *_OF_SHARES, *_widths(operator)}
            raise SpecError(
                f"{variant.spec}: params names {name}, which the launcher cannot give; it knows "
                f"{', '.join(sorted(names))}"
            )
    try:
        template = table.pack(values)
    except struct.error as error:
        raise SpecError(
            f"{variant.spec}: a parameter of {variant.name} does not hold its value: {error}"
        ) from error
    alignment = max(8, table.alignment)
    return Struct(template, alignment, tuple(pointers), tuple(maps), tuple(widths), tuple(scalars))


def filled(params: Struct, pointers: tuple[int, ...], scalars: Mapping[str, Number]) -> bytearray:
    """The struct of one call but for its tensor maps: ``pointers`` by source, ``scalars`` by name."""
    memory = bytearray(params.template)
    for offset, source, distance in params.pointers:
        memory[offset : offset + 8] = (pointers[source] + distance).to_bytes(8, "little")
    for offset, source, strides in params.widths:
        memory[offset : offset + 4] = vector_width(pointers[source], *strides).to_bytes(4, "little")
    for offset, code, name in params.scalars:
        struct.pack_into(f"<{code}", memory, offset, scalars[name])
    return memory
