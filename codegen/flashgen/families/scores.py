"""Score modifications of spec folders: the file ``scores.yaml``, a line for each.

A modification belongs to no kernel family: every family whose kernels have a score
seam takes every modification, when a call asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping  # noqa: TC003
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

from flashgen.families.bases import SCORES_FILE
from flashgen.families.kinds import ANYTHING, Choice, Either, ListOf, MapOf, Text, record
from flashgen.families.load import spec_folders, text_of, yaml_files
from flashgen.families.parameters import KEPT
from flashgen.families.params import score_params
from flashgen.families.schema import NAME
from flashgen.families.yamlfile import Document
from flashgen.operators import OPERATORS
from flashgen.operators.contract import DTYPES
from flashgen.operators.formula import FUNCTIONS
from flashgen.operators.lowering import CONSTANT
from flashgen.operators.parser import FormulaError, parse
from flashgen.operators.scores import DIMENSIONS, FORMULA, HALF_TYPES, NAMES, TYPES, Score, ScoreParam

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from flashgen.errors import FlashgenError
    from flashgen.families.kinds import Keys, Kind
    from flashgen.families.variant import Variant
    from flashgen.operators.formula import Node

# Words that no member of a struct in a kernel can have for its name.
CPP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        alignas alignof and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl
        const const_cast constexpr continue decltype default delete do double dynamic_cast element else enum
        explicit export extern false float for friend goto if inline int int32_t int64_t long mutable
        namespace new noexcept not_eq nullptr operator or_eq private protected public register
        reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template
        tensor_map this thread_local throw true try typedef typeid typename uint32_t uint64_t uint8_t union
        unsigned using virtual void volatile wchar_t while xor xor_eq
        """,
    )
)

# What a kernel has beside the modification; without the arrays between its steps a call could be
# differentiated on the CPU alone.
_KERNEL_WORDS = ("product", "step", "params", "row", *KEPT)
# The operators that a modification is for.
_MODIFIED = ("attention", "attention_backward", "attention_weights", "score_gradient")


class _Row(NamedTuple):
    """A modification: its formula, and the type of each parameter, after the dimensions if it is an array."""

    score: Annotated[str, Text()]
    params: Annotated[Mapping[str, str | tuple[str, ...]], MapOf(Either(Text(), ListOf(Text())), NAME)] = {}


class _CommitRow(NamedTuple):
    """A kernel whose source is kept in the repository: a modification of a variant."""

    variant: Annotated[str, Text()]
    score: Annotated[str, NAME]


class _File(NamedTuple):
    scores: Annotated[Mapping[str, Any], MapOf(ANYTHING, NAME)]
    commit: Annotated[tuple[_CommitRow, ...], ListOf(record(_CommitRow))] = ()


ROW, FILE = record(_Row), record(_File)


class Scores(NamedTuple):
    """The modifications of some folders by name, and the pairs (variant, modification) that are committed."""

    by_name: dict[str, Score]
    committed: tuple[tuple[str, str], ...]

    def of(self, variants: Iterable[Variant]) -> tuple[Variant, ...]:
        """Those committed modifications that are of ``variants``."""
        plain = {variant.name: variant for variant in variants} if self.committed else {}
        return tuple(
            plain[name].modified(self.by_name[score], committed=True)
            for name, score in self.committed
            if name in plain
        )


def load_scores(extra: str | os.PathLike[str] | None = None, *, keywords: Collection[str]) -> Scores:
    """The modifications of the shipped folder, of those in ``FLASHGEN_SPECS``, then of ``extra``; a later one
    takes the place of an earlier one with its name. ``keywords`` are names that the caller's functions take
    beside the parameters of a modification, so no parameter may have one. Raises SpecError with the line and
    column of what is wrong.
    """
    by_name: dict[str, Score] = {}
    committed: list[tuple[str, str]] = []
    for folder in spec_folders(extra):
        for path in yaml_files(folder):
            if path.name == SCORES_FILE:
                scores = read_scores(path, keywords=keywords)
                by_name |= scores.by_name
                committed += scores.committed
    return Scores(by_name, tuple(committed))


def read_scores(path: Path, *, keywords: Collection[str]) -> Scores:
    """The modifications of one file; ``keywords`` as in `load_scores`. Raises SpecError."""
    document = Document(path, text_of(path))
    file = document.convert((), document.value, FILE)
    reserved = reserved_names().union(keywords)
    by_name = {name: _declared(document, name, row, reserved) for name, row in file.scores.items()}
    for i, row in enumerate(file.commit):
        if row.score not in by_name:
            names = ", ".join(by_name)
            raise document.error(("commit", i, "score"), f"no modification is called `{row.score}`: {names}")
    return Scores(by_name, tuple((row.variant, row.score) for row in file.commit))


@cache
def reserved_names() -> frozenset[str]:
    """What no parameter may be called, beside what begins with `CONSTANT`: words of formulas, of kernels and
    of operators.
    """
    names = {*NAMES, *FUNCTIONS, "inf", *CPP_WORDS, *_KERNEL_WORDS}
    for name in _MODIFIED:
        operator = OPERATORS[name]
        names |= {*operator.positions, *operator.options, *operator.scalars}
    return frozenset(names)


class Source(Protocol):
    """Where a modification is written: a file, or the formula that a call passes. It makes the errors."""

    def error(self, keys: Keys, message: str, column: int | None = None) -> FlashgenError: ...

    def convert(self, keys: Keys, value: Any, kind: Kind) -> Any: ...


def _declared(document: Document, name: str, declaration: Any, reserved: frozenset[str]) -> Score:
    keys = ("scores", name)
    if any(name in (axis.choices or ()) for axis in OPERATORS["attention"].axes.values()):
        raise document.error(keys, f"`{name}` is a value of an axis; kernels would share names")
    if name.startswith(FORMULA):
        raise document.error(keys, f"names with {FORMULA} belong to formulas without a file; choose another")
    row = document.convert(keys, declaration, ROW)
    params = tuple(checked_param(document, keys, name, type, reserved) for name, type in row.params.items())
    return Score(name, row.score, params, checked_tree(document, keys, row.score, params))


def checked_tree(source: Source, keys: Keys, formula: str, params: tuple[ScoreParam, ...]) -> Node:
    """The tree of a formula that reads the score and these parameters, all of which it must read. Raises the
    error of ``source``.
    """
    names = dict(NAMES) | {p.name: TYPES[p.type].formula for p in params if not p.dimensions}
    arrays = {p.name: (p.dimensions, TYPES[p.type].formula) for p in params if p.dimensions}
    try:
        tree = parse(formula, names, arrays)
    except FormulaError as error:
        raise source.error((*keys, "score"), str(error), error.column) from None
    read = tree.reads()
    for operand in ("score", *(param.name for param in params)):
        if operand not in read:
            raise source.error((*keys, "score"), f"{formula!r} does not read `{operand}`")
    score = Score("", formula, params, tree)
    for dtype in DTYPES:
        members = [param.name for param in score_params(score, dtype, differentiated=True)]
        for param in params:
            twice = [member for member in _members(param) if members.count(member) > 1]
            if twice:
                raise source.error((*keys, "params", param.name), f"two members would be called {twice[0]}")
    return tree


def _members(param: ScoreParam) -> tuple[str, ...]:
    """What a parameter adds to the parameter struct, at most."""
    strides = param.argument().stride_names() if param.dimensions else ()
    return (param.name, *strides, *param.symbols)


def checked_param(
    source: Source,
    of_score: Keys,
    name: str,
    declaration: str | tuple[str, ...],
    reserved: frozenset[str],
) -> ScoreParam:
    """A parameter as ``declaration`` has it: its type, before it the dimensions of an array. Raises the error
    of ``source``.
    """
    keys = (*of_score, "params", name)
    operator = OPERATORS["attention"]
    if name in reserved or name.startswith(CONSTANT):
        raise source.error(keys, f"`{name}` is reserved; choose another name")
    if isinstance(declaration, tuple) and len(declaration) < 2:
        allowed = f"[dimensions, type], with dimensions {', '.join(DIMENSIONS)} or names of your own"
        raise source.error(keys, f"an array has dimensions: {allowed}")
    *dimensions, type = declaration if isinstance(declaration, tuple) else [declaration]
    source.convert(keys, type, Choice(TYPES))
    if not dimensions and type in HALF_TYPES.values():
        raise source.error(keys, f"`{type}` is a type of arrays; a number has type f32 or i32")
    param = ScoreParam(name, type, tuple(dimensions))
    for dimension, symbol in zip(dimensions, param.symbols, strict=True):
        source.convert(keys, dimension, NAME)
        if dimension == "score":
            raise source.error(keys, "no dimension is called `score`")
        if dimensions.count(dimension) > 1:
            raise source.error(keys, f"the dimension {dimension} occurs twice in {[*declaration]}")
        if dimension not in DIMENSIONS and symbol in operator.symbols:
            raise source.error(keys, f"its dimension would be called {symbol}, as one of attention's")
    if len(set(_members(param))) < len(_members(param)):
        raise source.error(
            keys,
            "two of its strides would have one name; q and kv are both rows, of which one is the last "
            "dimension, or rename a dimension of your own",
        )
    return param
