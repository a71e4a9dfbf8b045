"""Masks by one line: the file ``masks.yaml`` of spec folders, a line for each, and lines that a call passes.

As a score modification, a mask belongs to no kernel family.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping  # noqa: TC003
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from flashgen.families.bases import MASKS_FILE
from flashgen.families.formulas import Passed, conditions, operands
from flashgen.families.kinds import ANYTHING, Choice, Either, ListOf, MapOf, Text, record
from flashgen.families.load import spec_folders, text_of, yaml_files
from flashgen.families.schema import NAME
from flashgen.families.yamlfile import Document
from flashgen.operators.parser import INTEGER_FUNCTIONS, MASK, FormulaError, parse
from flashgen.operators.rules import DIMENSIONS, LINE, NAMES, TOKEN, Rule, RuleParam

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.families.kinds import Keys
    from flashgen.families.scores import Source
    from flashgen.operators.formula import Node

# What no parameter may be called: the words of the language.
_RESERVED = frozenset({*NAMES, *INTEGER_FUNCTIONS, "and", "or", "not"})


class _Row(NamedTuple):
    """A mask: the condition under which a key is visible, and the type of each parameter, after the
    dimensions if it is an array.
    """

    visible: Annotated[str, Text()]
    params: Annotated[Mapping[str, str | tuple[str, ...]], MapOf(Either(Text(), ListOf(Text())), NAME)] = {}


class _File(NamedTuple):
    masks: Annotated[Mapping[str, Any], MapOf(ANYTHING, NAME)]


ROW, FILE = record(_Row), record(_File)


@lru_cache(maxsize=32)
def load_masks(folders: str) -> Mapping[str, Rule]:
    """The masks of the shipped folder and of ``folders``, the value of ``FLASHGEN_SPECS``, by name; a later
    one replaces an earlier one with its name. Raises SpecError with the line and column of what is wrong.
    """
    rules: dict[str, Rule] = {}
    for folder in spec_folders():
        for path in yaml_files(folder):
            if path.name == MASKS_FILE:
                rules |= read_masks(path)
    return rules


def read_masks(path: Path) -> dict[str, Rule]:
    """The masks of one file. Raises SpecError."""
    document = Document(path, text_of(path))
    file = document.convert((), document.value, FILE)
    return {name: _declared(document, name, row) for name, row in file.masks.items()}


def _declared(document: Document, name: str, declaration: Any) -> Rule:
    keys = ("masks", name)
    if name.startswith(LINE):
        raise document.error(keys, f"names with {LINE} belong to masks without a file; choose another")
    row = document.convert(keys, declaration, ROW)
    params = tuple(_checked_param(document, keys, param, type) for param, type in row.params.items())
    return Rule(name, row.visible, params, _checked_tree(document, keys, row.visible, params))


@lru_cache(maxsize=256)
def rule_of_line(line: str) -> Rule:
    """The mask that a call passes as a line. An array has the dimensions of its indices: b and h are
    dimensions of the call, and an index that somewhere is q or kv belongs to an element for each token; if an
    array is read by both at once, a[q, kv], these are dimensions of their own. An array is of bools where the
    line reads an element as a condition. Raises BadParam, with the column of what is wrong.
    """
    source, bools = Passed(line, "line"), conditions(line)
    params = tuple(
        _checked_param(
            *(source, (), name),
            (*dimensions, "bool" if name in bools else "i32") if dimensions else "i32",
        )
        for name, dimensions in operands(line, _RESERVED, _dimensions).items()
    )
    tree = _checked_tree(source, (), line, params)
    text = ast.unparse(ast.parse(line, mode="eval"))  # lines that differ in spaces share a kernel
    digest = hashlib.sha256(repr((text, params)).encode()).hexdigest()[:10]
    return Rule(LINE + digest, text, params, tree)


def _dimensions(indices: list[list[str]]) -> tuple[str, ...]:
    """The dimensions of an array that has these indices in a line, along each axis."""
    words = [set(of_axis) for of_axis in indices]
    by_token = [bool({"q", "kv"} & of_axis) for of_axis in words]
    return tuple(
        of_axis[0]
        if words[axis] in ({"b"}, {"h"}) or (sum(by_token) > 1 and words[axis] in ({"q"}, {"kv"}))
        else TOKEN
        if by_token[axis]
        else f"axis{axis}"
        for axis, of_axis in enumerate(indices)
    )


def _checked_param(source: Source, of_mask: Keys, name: str, declaration: str | tuple[str, ...]) -> RuleParam:
    """A parameter as ``declaration`` has it. Raises the error of ``source``."""
    keys = (*of_mask, "params", name)
    if name in _RESERVED:
        raise source.error(keys, f"`{name}` is reserved; choose another name")
    if isinstance(declaration, tuple) and len(declaration) < 2:
        allowed = f"[dimensions, i32 or bool], with dimensions {', '.join(DIMENSIONS)} or names of your own"
        raise source.error(keys, f"an array has dimensions: {allowed}")
    *dimensions, type = declaration if isinstance(declaration, tuple) else [declaration]
    source.convert(keys, type, Choice(("i32", "bool") if dimensions else ("i32",)))
    for dimension in dimensions:
        source.convert(keys, dimension, NAME)
        if dimensions.count(dimension) > 1:
            raise source.error(keys, f"the dimension {dimension} occurs twice in {[*declaration]}")
    param = RuleParam(name, tuple(dimensions), is_bool=type == "bool")
    if dimensions:
        argument = param.argument()
        members = (argument.name, *argument.stride_names(), *param.symbols)
        if len(set(members)) < len(members):
            raise source.error(
                keys, "two of its strides would have one name; of q, kv and token one is the last dimension"
            )
    return param


def _checked_tree(source: Source, keys: Keys, line: str, params: tuple[RuleParam, ...]) -> Node:
    """The tree of a line that reads all of these parameters. Raises the error of ``source``."""
    names = dict(NAMES) | {param.name: "int" for param in params if not param.dimensions}
    arrays = {
        param.name: (param.dimensions, "bool" if param.is_bool else "int")
        for param in params
        if param.dimensions
    }
    try:
        tree = parse(line, names, arrays, MASK)
    except FormulaError as error:
        raise source.error((*keys, "visible"), str(error), error.column) from None
    for param in params:
        if param.name not in tree.reads():
            raise source.error((*keys, "visible"), f"{line!r} does not read `{param.name}`")
    members: list[str] = []
    for param in params:
        members += [f"mask_{param.name}", *(param.argument().stride_names() if param.dimensions else ())]
    twice = sorted({member for member in members if members.count(member) > 1})
    if twice:
        raise source.error((*keys, "visible"), f"two members would be called {twice[0]}; rename a parameter")
    return tree
