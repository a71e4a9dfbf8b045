"""The keys of a spec file, and the kind of each one's value."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from flashgen.families.dispatch import OF_A_TILE, Dispatch
from flashgen.families.grid import Grid, Visits
from flashgen.families.kinds import (
    ANYTHING,
    EXPRESSION,
    FLAG,
    REQUIRED,
    Choice,
    Either,
    Field,
    Integer,
    Kind,
    ListOf,
    MapOf,
    Record,
    Text,
    fields_of,
    optional,
    record,
)
from flashgen.families.params import CTYPES
from flashgen.host.paths import INSIDE
from flashgen.operators import OPERATORS

_NAME = "a name of lower-case letters, digits and _ that begins with a letter"
NAME = Text(_NAME, r"^[a-z][a-z0-9_]*$")
_SHORT_NAME = "a name of lower-case letters and digits that begins with a letter"
SHORT_NAME = Text(_SHORT_NAME, r"^[a-z][a-z0-9]*$")
ARCH = Text("an architecture, such as sm_90", r"^sm_[0-9]+[af]?$")
COUNT = Integer(0)
POSITIVE = Integer(1)
DOC = Text("one line without a backslash", r"^[^\n\\]*$")
_INSIDE = "the name of a file below the folders of templates, without / at its start and without .."
FILE_NAME = Text(_INSIDE, INSIDE)
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
OPTION = Text(_OPTION, rf"\A(?:{'|'.join(f'(?:{option})' for option in _OPTIONS)})\Z")
AXIS_VALUES = ListOf(Either(COUNT, SHORT_NAME), least=1)
_MAPPING = MapOf(ANYTHING)
_LIST = ListOf(ANYTHING)
_ARCHS = ListOf(ARCH, least=1)

# Names with a meaning in templates, tile rows or expressions; no axis or tile key may take one.
RESERVED = frozenset(
    (
        *("variant", "name", "header", "params_struct", "param_names", "pv_columns", "target"),
        *("element_bytes", "threads", "smem_bytes", "max_smem", "min", "max"),
        *("efficiency", "no_spills", "tile", "step", "features", "parts"),
        *("score", "score_functions", "score_has_offset", "score_has_derivative", "has_tree"),
        *("score_loads_by_key", "score_staged", "staged_dtype", "staged_bytes", "staged_row_stride"),
        *("element_stages", "streaming", "streaming_fp32"),
        *("rule", "rule_functions", "range_function", "verdict_functions"),
        *("row_spans", "key_spans", "block_spans", "skips_by_line", "line_arrays"),
        *("range_functions", "line_runs", "line_by", "tiles_in_order", "length_classes"),
        *("dq_widths", "gradient_bytes", "gradient_dtype"),
    )
)


class Target(NamedTuple):
    """A class of devices that share tiles. ``max_smem`` is in bytes a block."""

    min_arch: Annotated[str, ARCH]
    max_smem: Annotated[int, POSITIVE]
    compile_for: Annotated[tuple[str, ...], _ARCHS]


class DefaultAxis(NamedTuple):
    """An axis with the value of another, ``default``, and at some of these with further ones, ``also``."""

    default: Annotated[str, Text()]
    also: Annotated[Mapping[str, Any], _MAPPING] = {}


class BoxRow(NamedTuple):
    """What one TMA load or store moves, as expressions."""

    columns: Annotated[int | str, EXPRESSION]
    rows: Annotated[int | str, EXPRESSION]


class ParamRow(NamedTuple):
    """One member of the parameter struct. With a ``type`` the row declares it; without, it changes what is
    declared for all families: ``doc`` replaces the comment, and ``when`` the condition on each of its axes.
    """

    name: Annotated[str, NAME]
    type: Annotated[str | None, optional(Choice(CTYPES))] = None
    doc: Annotated[str | None, optional(DOC)] = None
    when: Annotated[Mapping[str, Any], _MAPPING] = {}
    box: Annotated[BoxRow | None, optional(record(BoxRow))] = None


class Range(NamedTuple):
    """The values ``first``, ``first + step``, ... up to ``last`` of a tile key."""

    first: int
    last: int
    step: int


RANGE = Record(
    {"from": Field(COUNT), "to": Field(COUNT), "step": Field(POSITIVE)},
    lambda **ends: Range(ends["from"], ends["to"], ends["step"]),
)


_EXTENTS = fields_of(Grid)
GRID = Record(
    _EXTENTS | {"covers": Field(_EXTENTS["covers"].kind), "beside": Field(_EXTENTS["beside"].kind, {})}, Grid
)
VISITS = record(Visits)


class StepRow(NamedTuple):
    """One kernel of a family whose calls take several. Dispatch chooses by the one that is ``main``. Calls
    that split no tile, and no group of query heads, pass over one that ``combines``. Only variants with the
    values of ``when`` have the step. Without ``commit`` none of them is in generated/.
    """

    name: Annotated[str, SHORT_NAME]
    template: Annotated[str, FILE_NAME]
    threads: Annotated[int | str, EXPRESSION]
    smem_bytes: Annotated[int | str, EXPRESSION]
    grid: Annotated[Grid, GRID]
    params: Annotated[tuple[Any, ...], ListOf(ANYTHING, least=1)]
    visits: Annotated[Visits | None, optional(VISITS)] = None
    dependent_launch: Annotated[bool, FLAG] = False
    score_seam: Annotated[bool, FLAG] = False
    main: Annotated[bool, FLAG] = False
    combines: Annotated[bool, FLAG] = False
    when: Annotated[Mapping[str, Any], _MAPPING] = {}
    commit: Annotated[bool, FLAG] = True


class BufferRow(NamedTuple):
    """An array of the workspace. Its extents are expressions, also over sizes of the call."""

    dtype: Annotated[str, Choice(("fp16", "bf16", "fp32", "int32", "element"))]
    shape: Annotated[tuple[int | str, ...], ListOf(EXPRESSION, least=1)]


_DISPATCH = fields_of(Dispatch)
_OF_TILES = {key: _DISPATCH.pop(key) for key in OF_A_TILE}
BUFFER = record(BufferRow)
DISPATCH = Record(_DISPATCH, Dispatch)


class File(NamedTuple):
    """The whole file. What can be anything is checked part by part, most of it once the axes are known.

    A family of one kernel says what a step says at the top of the file, and leaves ``steps`` out.
    """

    family: Annotated[str, NAME]
    operator: Annotated[str, Choice(OPERATORS)]
    header: Annotated[str, FILE_NAME]
    axes: Annotated[Mapping[str, Any], _MAPPING]
    targets: Annotated[Mapping[str, Any], _MAPPING]
    element_bytes: Annotated[Mapping[str, Any], _MAPPING]
    tile_keys: Annotated[tuple[str, ...], ListOf(NAME, least=1)]
    tiles: Annotated[tuple[Any, ...], _LIST]
    lengths: Annotated[str, Choice(("none", "device"))] = "none"
    algorithm: Annotated[str | None, optional(SHORT_NAME)] = None
    template: Annotated[str | None, optional(FILE_NAME)] = None
    threads: Annotated[int | str | None, optional(EXPRESSION)] = None
    smem_bytes: Annotated[int | str | None, optional(EXPRESSION)] = None
    grid: Annotated[Grid | None, optional(GRID)] = None
    visits: Annotated[Visits | None, optional(VISITS)] = None
    params: Annotated[tuple[Any, ...] | None, optional(_LIST)] = None
    dependent_launch: Annotated[bool, FLAG] = False
    score_seam: Annotated[bool, FLAG] = False
    steps: Annotated[tuple[Any, ...], _LIST] = ()
    features: Annotated[Mapping[str, Mapping[str, Any]], MapOf(_MAPPING, NAME)] = {}
    workspace: Annotated[Mapping[str, BufferRow], MapOf(BUFFER, NAME)] = {}
    description: Annotated[str, Text()] = ""
    tile_values: Annotated[Mapping[str, tuple[str, ...]], MapOf(ListOf(SHORT_NAME, least=1), NAME)] = {}
    tile_defaults: Annotated[Mapping[str, Any], _MAPPING] = {}
    exclude: Annotated[tuple[Any, ...], _LIST] = ()
    commit: Annotated[tuple[Any, ...], _LIST] = ()
    tune: Annotated[tuple[Any, ...], _LIST] = ()
    no_spills: Annotated[bool, FLAG] = False
    dispatch: Annotated[Dispatch, DISPATCH] = Dispatch()
    options: Annotated[tuple[str, ...], ListOf(OPTION)] = ()
    extends: Annotated[str | None, optional(NAME)] = None

    @property
    def has_lengths(self) -> bool:
        """Whether its kernels read the lengths of sequences on the device."""
        return self.lengths == "device"


FILE, TARGET, DEFAULT_AXIS, PARAM, STEP = map(record, (File, Target, DefaultAxis, ParamRow, StepRow))


def conditions(domain: Mapping[str, Sequence[Any]], fields: Mapping[str, Field] = {}) -> Record:
    """A mapping with keys of ``domain``: each has one of its values, several, or is left out.

    ``fields`` are further keys.
    """
    limits = {axis: Field(_some_of(Choice(values)), None) for axis, values in domain.items()}
    return Record(limits | dict(fields))


def tile_kinds(file: File) -> dict[str, Kind]:
    """The kind of each tile key's value: one of its names in ``tile_values``, or a number."""
    return {
        key: Choice(file.tile_values[key]) if key in file.tile_values else COUNT for key in file.tile_keys
    }


def when_kind(domain: Mapping[str, Sequence[Any]], keys: Mapping[str, Kind]) -> Record:
    """The condition of a parameter or a step: values of axes and of tile keys."""
    return conditions(domain, {key: Field(_some_of(value), None) for key, value in keys.items()})


def expression_names(file: File, axes: Iterable[str]) -> frozenset[str]:
    """The names that an expression may use."""
    return frozenset((*axes, *file.tile_keys, "element_bytes", "max_smem"))


def tile_row(
    domain: Mapping[str, Sequence[Any]],
    keys: Mapping[str, Kind],
    defaults: Mapping[str, Any],
    no_spills: bool,
) -> Record:
    """A row of the tile table: conditions, the tile keys, and what else a row may say.

    ``defaults`` are the values of tile keys that a row may leave out, ``no_spills`` of the key of that name.
    """
    further = {
        "name": Field(optional(SHORT_NAME), None),
        "no_spills": Field(Either(FLAG, _ARCHS), no_spills),
    }
    tile = {key: Field(kind, defaults.get(key, REQUIRED)) for key, kind in keys.items()}
    return conditions(domain, tile | _OF_TILES | further)


def tune_row(domain: Mapping[str, Sequence[Any]], keys: Mapping[str, Kind]) -> Record:
    """A row of ``tune``: conditions, and for tile keys the values to try."""
    fields = {}
    for key, kind in keys.items():
        further = (RANGE,) if kind is COUNT else ()
        fields[key] = Field(Either(_some_of(kind), *further), None)
    return conditions(domain, fields)


class TunedFile(NamedTuple):
    """A file of tiles that were measured on one GPU; its rows are checked one by one."""

    gpu: Annotated[str, Text()]
    tiles: Annotated[tuple[Any, ...], _LIST]


TUNED_FILE = record(TunedFile)


def tuned_row(domain: Mapping[str, Sequence[Any]], keys: Mapping[str, Kind]) -> Record:
    """A row of such a file: one point, its tile, and how that was measured."""
    fields = {axis: Field(Choice(values)) for axis, values in domain.items()}
    fields |= {key: Field(kind) for key, kind in keys.items()}
    fields["efficiency"] = Field(_OF_TILES["efficiency"].kind)
    return Record(fields | {"measured": Field(_MAPPING, {})})


def _some_of(kind: Kind) -> Either:
    """One value of a kind, several, or null."""
    return optional(Either(kind, ListOf(kind, least=1)))
