"""The shape of a spec file, as types that msgspec checks it against."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from flashgen.families.grid import SCHEDULES
from flashgen.families.params import CTYPES
from flashgen.host.paths import INSIDE
from flashgen.operators import OPERATORS

# Errors say that what a description says is expected.
_NAME = "a name of lower-case letters, digits and _ that begins with a letter"
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*$", description=_NAME)]
_SHORT_NAME = "a name of lower-case letters and digits that begins with a letter"
ShortName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9]*$", description=_SHORT_NAME)]
Arch = Annotated[str, msgspec.Meta(pattern=r"^sm_[0-9]+[af]?$", description="an architecture, such as sm_90")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Number = int | Annotated[str, msgspec.Meta(description="an expression")]
_INSIDE = "the name of a file below the folders of templates, without / at its start and without .."
Doc = Annotated[str, msgspec.Meta(pattern=r"^[^\n\\]*$", description="one line without a backslash")]
FileName = Annotated[str, msgspec.Meta(pattern=INSIDE, description=_INSIDE)]
# NVRTC has options that read and write files, so only these are passed on: they change the code, and no file.
_OPTIONS = (
    r"--?(use_fast_math|restrict|extra-device-vectorization|device-int128|device-debug|generate-line-info)",
    r"--?(ftz|prec-div|prec-sqrt|fmad)=(true|false)",
    r"--?maxrregcount=[0-9]+",
    r"--ptxas-options=-O[0-3]",
    r"--ptxas-options=--allow-expensive-optimizations=(true|false)",
    r"--?diag-suppress=[0-9]+",
    r"(-D|--define-macro=)[A-Za-z_][A-Za-z0-9_]*(=[A-Za-z0-9_.+-]*)?",
    r"(-U|--undefine-macro=)[A-Za-z_][A-Za-z0-9_]*",
    "-G|-lineinfo|-w",
)
_OPTION = (
    "an option of NVRTC that changes code alone: --use_fast_math, --ftz=, --prec-div=, --prec-sqrt=, --fmad= "
    "(true or false), --maxrregcount=N, --restrict, --extra-device-vectorization, --device-int128, "
    "--ptxas-options=-O3, --ptxas-options=--allow-expensive-optimizations=true, -DNAME=VALUE, -UNAME, "
    "--diag-suppress=N, -w, -lineinfo or -G"
)
Option = Annotated[
    str, msgspec.Meta(pattern=rf"\A(?:{'|'.join(f'(?:{each})' for each in _OPTIONS)})\Z", description=_OPTION)
]
AxisValue = Count | ShortName
AxisValues = Annotated[list[AxisValue], msgspec.Meta(min_length=1)]

# Names with a meaning in templates, tile rows or expressions; no axis or tile key may take one.
RESERVED = frozenset(
    (
        *("variant", "name", "header", "params_struct", "target"),
        *("element_bytes", "threads", "smem_bytes", "max_smem", "min", "max"),
        *("efficiency", "no_spills", "tile", "step"),
        *("score", "score_functions", "score_has_offset", "score_has_derivative"),
    )
)


class Target(msgspec.Struct, forbid_unknown_fields=True):
    """A class of devices that share tiles. ``max_smem`` is in bytes a block."""

    min_arch: Arch
    max_smem: Positive
    compile_for: Annotated[list[Arch], msgspec.Meta(min_length=1)]


class DefaultAxis(msgspec.Struct, forbid_unknown_fields=True):
    """An axis with the value of another, ``default``, and at some of these with further ones, ``also``."""

    default: str
    also: dict[str, Any] = {}


class BoxRow(msgspec.Struct, forbid_unknown_fields=True):
    """What one TMA load or store moves, as expressions."""

    columns: Number
    rows: Number


class ParamRow(msgspec.Struct, forbid_unknown_fields=True):
    """One member of the parameter struct. With a ``type`` the row declares it; without, it changes what is
    declared for all families: ``doc`` replaces the comment, and ``when`` the condition on each of its axes.
    """

    name: Name
    type: Literal[CTYPES] | None = None
    doc: Doc | None = None
    when: dict[str, Any] = {}
    box: BoxRow | None = None


class Range(msgspec.Struct, forbid_unknown_fields=True, rename={"first": "from", "last": "to"}):
    """The values ``first``, ``first + step``, ... up to ``last`` of a tile key."""

    first: Count
    last: Count
    step: Positive


class GridRow(msgspec.Struct, forbid_unknown_fields=True):
    """What a launch covers: the extent of a tile in each dimension, and how blocks go through the tiles."""

    covers: Annotated[dict[str, Number], msgspec.Meta(min_length=1)]
    schedule: Literal[SCHEDULES] = "tile_per_block"
    blocks_per_sm: Number = 1
    from_last_row: Number = 0
    split_gain: Number = 0
    part_time: Number = 0
    cluster: Number = 1
    step_rows: Number = 0
    in_turns: Number = 0
    beside: dict[str, Number] = {}
    kinds: Number = 1


class VisitsRow(msgspec.Struct, forbid_unknown_fields=True):
    """How a tile walks the scores; see `grid.Visits`."""

    rows: Number
    keys: Number
    mma_rows: Number
    mma: Number


class StepRow(msgspec.Struct, forbid_unknown_fields=True):
    """One kernel of a family whose calls take several. Dispatch chooses by the one that is ``main``. Calls
    that split no tile, and no group of query heads, pass over one that ``combines``. Only variants with the
    values of ``when`` have the step.
    """

    name: ShortName
    template: FileName
    threads: Number
    smem_bytes: Number
    grid: GridRow
    params: Annotated[list[Any], msgspec.Meta(min_length=1)]
    visits: VisitsRow | None = None
    dependent_launch: bool = False
    score_seam: bool = False
    main: bool = False
    combines: bool = False
    when: dict[str, Any] = {}


class BufferRow(msgspec.Struct, forbid_unknown_fields=True):
    """An array of the workspace. Its extents are expressions, also over sizes of the call."""

    dtype: Literal["fp16", "bf16", "fp32", "int32", "element"]
    shape: Annotated[list[Number], msgspec.Meta(min_length=1)]


class Dispatch(msgspec.Struct, forbid_unknown_fields=True):
    """Whether dispatch offers the family to calls, to which of them, and four numbers of the rule by which it
    chooses.
    """

    prefer: Literal["least_time", "on_request"] = "least_time"
    start: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    fill: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    passes: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    alone_gbps: Annotated[float, msgspec.Meta(gt=0, le=10_000)] = 50.0
    rows_at_most: Positive | None = None


class File(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file. Members typed Any are checked one by one, most of them once the axes are known.

    A family of one kernel says what a step says at the top of the file, and leaves ``steps`` out.
    """

    family: Name
    operator: Literal[tuple(OPERATORS)]
    header: FileName
    axes: dict[str, Any]
    targets: dict[str, Any]
    element_bytes: dict[str, Any]
    tile_keys: Annotated[list[Name], msgspec.Meta(min_length=1)]
    tiles: list[Any]
    algorithm: ShortName | None = None
    template: FileName | None = None
    threads: Number | None = None
    smem_bytes: Number | None = None
    grid: GridRow | None = None
    visits: VisitsRow | None = None
    params: list[Any] | None = None
    dependent_launch: bool = False
    score_seam: bool = False
    steps: list[Any] = []
    workspace: dict[Name, BufferRow] = {}
    description: str = ""
    tile_values: dict[Name, Annotated[list[ShortName], msgspec.Meta(min_length=1)]] = {}
    exclude: list[Any] = []
    commit: list[Any] = []
    tune: list[Any] = []
    no_spills: bool = False
    dispatch: Dispatch = msgspec.field(default_factory=Dispatch)
    options: list[Option] = []
    extends: Name | None = None


def conditions(name: str, domain: Mapping[str, Sequence[Any]], fields: Iterable[Any] = ()) -> type:
    """A type whose keys are those of ``domain``, each holding one of its values, several, or left out.

    ``fields`` adds further keys, written as for ``msgspec.defstruct``.
    """
    limits = []
    for axis, values in domain.items():
        value = Literal[tuple(values)]
        limits.append((axis, value | Annotated[list[value], msgspec.Meta(min_length=1)] | None, None))
    return msgspec.defstruct(name, [*limits, *fields], forbid_unknown_fields=True, kw_only=True)


def tile_types(file: File) -> dict[str, Any]:
    """The type of each tile key's value: one of its names in ``tile_values``, or a number."""
    return {
        key: Literal[tuple(file.tile_values[key])] if key in file.tile_values else Count
        for key in file.tile_keys
    }


def when_type(domain: Mapping[str, Sequence[Any]], keys: Mapping[str, Any]) -> type:
    """The type of the condition of a parameter or a step: values of axes and of tile keys."""
    limits = [
        (key, value | Annotated[list[value], msgspec.Meta(min_length=1)] | None, None)
        for key, value in keys.items()
    ]
    return conditions("When", domain, limits)


def expression_names(file: File, axes: Iterable[str]) -> frozenset[str]:
    """The names that an expression may use."""
    return frozenset((*axes, *file.tile_keys, "element_bytes", "max_smem"))


def tile_row(domain: Mapping[str, Sequence[Any]], keys: Mapping[str, Any], no_spills: bool) -> type:
    """The type of a row of the tile table: conditions, the tile keys, and what else a row may say.

    ``no_spills`` is what holds for a row that does not say it.
    """
    promise = bool | Annotated[list[Arch], msgspec.Meta(min_length=1)]
    extra = [("name", ShortName | None, None), ("efficiency", Rate, 1.0), ("no_spills", promise, no_spills)]
    return conditions("Tile", domain, [*keys.items(), *extra])


def tune_row(domain: Mapping[str, Sequence[Any]], keys: Mapping[str, Any]) -> type:
    """The type of a row of ``tune``: conditions, and for tile keys the values to try."""
    fields = []
    for key, value in keys.items():
        choice = value | Annotated[list[value], msgspec.Meta(min_length=1)] | None
        fields.append((key, choice | Range if value is Count else choice, None))
    return conditions("Tune", domain, fields)


class TunedFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file of tiles that were measured on one GPU; its rows are checked one by one."""

    gpu: str
    tiles: list[Any]


def tuned_row(domain: Mapping[str, Sequence[Any]], keys: Mapping[str, Any]) -> type:
    """The type of such a row: one point, its tile, and how that was measured."""
    fields = [(axis, Literal[tuple(values)]) for axis, values in domain.items()]
    fields += keys.items()
    fields += [("efficiency", Rate), ("measured", dict[str, Any], {})]
    return msgspec.defstruct("Tuned", fields, forbid_unknown_fields=True, kw_only=True)
