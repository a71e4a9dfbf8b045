"""The codec of a call for the graphs of PyTorch: what the schemas of its operators hold of a record.

Arrays are tensors, and each option is an entry of its own type, so that numbers may be symbols of
torch.compile. What no schema can hold, such as a score modification with its numbers, a mask by a line, or
splits, goes through one string, ``rest``: JSON with a version.
"""

from __future__ import annotations

import json
from functools import lru_cache
from numbers import Integral, Real
from operator import index as index_of
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.call.field import BACKWARD, FORWARD
from flashgen.call.fields import DIFFERENTIABLE, GRADIENTS, OF_BLOCK_MASK, SHORTHANDS
from flashgen.call.generate import function
from flashgen.call.mask import Mask, mask_of
from flashgen.call.parameters import POSITIONAL
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.scores import named_score
from flashgen.call.text import VERSION, option_of
from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import Expected, flag, length_bound, margin_of, shown
from flashgen.operators.contract import check_rank, scale_of
from flashgen.operators.dropout import probability_of
from flashgen.operators.maskoptions import mask_type_name, window_of
from flashgen.operators.splits import AUTO, SplitEvery, splits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashgen.call.record import Call
    from flashgen.operators.operator import Operator

# The largest integers of the schemas, and of a score modification.
_LARGEST, _LARGEST_PARAM = 2**63 - 1, 2**128
# The entries of a schema for a field of each kind.
_ENTRIES = {
    "flag": ("bool {}",),
    "mask_type": ("str? {}",),
    "name": ("str? {}",),
    "window": ("SymInt {}_left", "SymInt {}_right"),
    "number": ("float? {}",),
    "probability": ("float {}",),
    "bound": ("SymInt? {}",),
    "block_size": ("int[]? {}",),
    "margin": ("int {}",),
}
# The options of both records in the schemas. return_lse is left out: the operator itself says it.
OPTIONS = tuple(
    field
    for field in AttentionCall.fields
    if field.kind in _ENTRIES and field.name not in ("return_lse", "kv_dtype")
)
SCHEMA = ", ".join(
    (*(entry.format(field.name) for field in OPTIONS for entry in _ENTRIES[field.kind]), "str rest")
)
_WIDTHS = [len(_ENTRIES[field.kind]) for field in OPTIONS]
_OUT_DTYPE = sum(_WIDTHS[: [field.name for field in OPTIONS].index("out_dtype")])
_COUNT = sum(_WIDTHS) + 1  # of entries, with ``rest``
# The arrays of a call that operators read, the differentiable ones first. The arrays of a score modification
# and of a mask by a line, whose names are in ``rest``, come after them.
INPUTS = (
    *DIFFERENTIABLE,
    *(
        field.name
        for field in AttentionCall.fields
        if field.kind == "array"
        and not field.gradient
        and (set(FORWARD + BACKWARD) == {*field.functions} or field.name in OF_BLOCK_MASK)
        and field.name != "out"
    ),
)
INPUTS_SCHEMA = ", ".join(f"Tensor{'' if name in POSITIONAL['attention'] else '?'} {name}" for name in INPUTS)

# The arrays that receive gradients, also of optional inputs.
GRADIENTS_SCHEMA = ", ".join(
    f"Tensor({chr(ord('a') + place)}!){'' if name in POSITIONAL['attention'] else '?'} {gradient}"
    for place, (name, gradient) in enumerate(zip(DIFFERENTIABLE, GRADIENTS, strict=True))
)


def dtype_of_result(q: Tensor, entries: tuple[Any, ...]) -> torch.dtype:
    """The dtype of the result of a call with this q and the entries of SCHEMA, which may follow others."""
    if q.dtype not in (torch.float8_e4m3fn, torch.uint8):
        return q.dtype
    named = entries[len(entries) - _COUNT + _OUT_DTYPE]
    if named in ("e4m3", "float8_e4m3fn"):
        return torch.float8_e4m3fn
    return torch.float16 if named in ("fp16", "float16", "half") else torch.bfloat16


def arguments_schema(operator: Operator, absent: tuple[str, ...] = ()) -> str:
    """The entries of all arguments of an operator. An array that it writes to is passed to it, under its own
    alias. ``absent`` are optional outputs.
    """
    entries, results = [], 0
    for argument in operator.arguments:
        alias = ""
        if argument.is_output:
            alias = f"({chr(ord('a') + results)}!)"
            results += 1
        mark = "?" if argument.optional or argument.name in absent else ""
        entries.append(f"Tensor{alias}{mark} {argument.name}")
    return ", ".join(entries)


def encode(call: Call) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The arrays of a score modification and of a mask by a line, and the entries of SCHEMA. Raises BadParam,
    and BadTensorShape for q, from which the shapes of results are derived.
    """
    check_rank(call.q.shape)
    score_arrays, score = encode_score(call) if call.has_score() else ([], "")
    mask = ""
    if isinstance(call.mask, Mask):
        mask = _encode_mask(call.mask)
        score_arrays = [*score_arrays, *call.mask.arguments.values()]
    entries: list[Any] = []
    is_expected = ""
    for field in OPTIONS:
        value = getattr(call, field.name, field.default)
        if field.kind == "flag":
            value = flag(field.name, value)
        elif field.kind == "mask_type":
            value = mask_type_name(value)
        elif field.kind == "number":
            value = None if value is None else scale_of(value, call.q.shape[-1])
        elif field.kind == "margin":
            value = margin_of(field.name, value)
        elif field.kind == "probability":
            value = probability_of(value)
        elif field.kind == "bound":
            if isinstance(value, Expected):
                value, is_expected = value.bound, ', "bounds are expected": true'
            value = _whole(field.name, value)
        elif field.kind == "window":
            left, value = window_of(value)
            entries.append(_fitting(left))
            value = _fitting(value)
        entries.append(value)
    splits = _splits(getattr(call, "splits", AUTO))
    width = getattr(call, "head_dim_v", None)  # of the values of a latent cache
    latent = "" if width is None else f', "head_dim_v": {index_of(width)}'
    if latent and call.kv_dtype is not None:
        latent += f', "kv_dtype": "{call.kv_dtype}"'
    rest = f'{{"version": {VERSION}, "splits": {splits}{is_expected}{latent}{score}{mask}}}'
    return score_arrays, (*entries, rest)


def decode(
    record: type[Call], arrays: Mapping[str, Any], score_arrays: list[Tensor], entries: tuple[Any, ...]
) -> Any:
    """The record of a call, of its arrays by name and of what `encode` gave. Raises BadParam for entries of
    another version.
    """
    call = call_of(record, **arrays)
    rest = _parsed(_READERS[record](call, entries))
    if rest is _DEFAULT:
        return call
    changes: dict[str, Any] = {}
    if "bounds are expected" in rest:
        names = [field.name for field in OPTIONS if field.kind == "bound"]
        changes |= {name: Expected(getattr(call, name)) for name in names}
    if record is AttentionCall:  # gradients have no splits
        changes["splits"] = option_of(rest["splits"])
    if "head_dim_v" in rest:
        changes |= {name: rest.get(name) for name in ("head_dim_v", "kv_dtype")}
    if "mask" in rest:
        mask = rest["mask"]
        count = len(score_arrays) - len(mask["arrays"])
        of_mask = dict(zip(mask["arrays"], score_arrays[count:], strict=True))
        score_arrays = score_arrays[:count]
        changes["mask"] = mask_of(mask["line"], of_mask, mask["numbers"])
    if "arrays" in rest:
        params = dict(zip(rest["arrays"], score_arrays, strict=True)) | rest["numbers"]
        changes |= {"score": rest["score"], "params": params} if rest["score"] else params
    return call.replace(**changes)


def _reader(record: type[Call]) -> Callable[[Any, tuple[Any, ...]], str]:
    """A function that sets the options of a record from entries, and gives the last entry."""
    names = {field.name for field in record.fields}
    lines, position = ["def read(call, entries):"], 0
    for field in OPTIONS:
        count = len(_ENTRIES[field.kind])
        value = ", ".join(f"entries[{position + place}]" for place in range(count))
        if field.name in names:
            lines.append(f"    call.{field.name} = {value}")
        position += count
    return function("read", "\n".join((*lines, f"    return entries[{position}]", "")), {})


_READERS = {record: _reader(record) for record in (AttentionCall, GradientCall)}
_REST = f'{{"version": {VERSION}, "splits": "{AUTO}"'
_DEFAULT: dict[str, Any] = json.loads(_REST + "}")


@lru_cache(maxsize=1024)
def _parsed(rest: str) -> dict[str, Any]:
    if rest == _REST + "}":
        return _DEFAULT
    values: dict[str, Any] = json.loads(rest)
    if values.get("version") != VERSION:
        raise BadParam(
            f"rest has version {values.get('version')}; this flashgen reads version {VERSION}: export the "
            "program anew"
        )
    return values


# The functions below write JSON without the module json, which torch.compile does not trace.


def encode_score(call: Call) -> tuple[list[Tensor], str]:
    """The arrays of a score modification, and the members of ``rest`` that say what it is. Raises
    BadParam.
    """
    names, values = named_score(call)
    # Names and formulas are written into a string of JSON without escapes.
    for name in names:
        if not name.isprintable() or '"' in name or "\\" in name:
            raise BadParam(f"{arg('score')} is {name!r}; neither a name nor a formula has such characters")
    for name in values:
        if not (isinstance(name, str) and name.isidentifier()):
            raise BadParam(f"{arg('score')} {', '.join(names)} has no parameter {name}")
    if call.score is None:
        # Keep the names of the caller, for errors in a graph.
        names = ()
        values = {name: getattr(call, name) for name, _ in SHORTHANDS if getattr(call, name) is not None}
        for name, shorthand in SHORTHANDS:
            if name in values and not shorthand.positive and not isinstance(values[name], Tensor):
                raise BadParam(
                    f"{arg(name)} has type {type(values[name]).__name__}, with tensors; pass a tensor, "
                    "which torch.as_tensor makes"
                )
    arrays = {name: x for name, x in values.items() if isinstance(x, Tensor)}
    numbers = [f'"{name}": {_number(name, x)}' for name, x in values.items() if name not in arrays]
    score = (
        f', "score": [{_strings(names)}], "arrays": [{_strings(arrays)}], "numbers": {{{", ".join(numbers)}}}'
    )
    return list(arrays.values()), score


def _encode_mask(mask: Mask) -> str:
    """The member of ``rest`` that says what a mask by a line is."""
    line = " ".join(mask.line.split())  # none of the language's words ends a string of JSON
    numbers = ", ".join([f'"{name}": {index_of(x)}' for name, x in mask.numbers.items()])
    return f', "mask": {{"line": "{line}", "arrays": [{_strings(mask.arrays)}], "numbers": {{{numbers}}}}}'


def _strings(names: Any) -> str:
    return ", ".join([f'"{name}"' for name in names])


def _splits(splits: Any) -> str:
    splits = splits_of(splits)
    if isinstance(splits, str):
        return f'"{splits}"'
    # Dynamo may have made a number symbolic, which no string holds; operator.index makes it a constant.
    if isinstance(splits, SplitEvery):
        return f'{{"every": {index_of(splits.keys)}}}'
    return str(index_of(splits))


def _number(name: str, x: Any) -> str:
    if not isinstance(x, Real) or isinstance(x, bool):  # before the float that hides what it was
        what = f"has type {type(x).__name__}" if hasattr(x, "shape") else f"is {shown(x)}"
        raise BadParam(f"{arg(name)} {what}; expected a tensor or a number")
    if not isinstance(x, Integral):
        number = float(x)
        # JSON has its words for these.
        return "NaN" if number != number else repr(number).replace("inf", "Infinity")
    if abs(x) > _LARGEST_PARAM:  # Python may refuse to print it
        raise BadParam(f"{arg(name)} is {shown(x)}; it must be finite, at most 3e+38")
    return repr(int(x))


def _whole(name: str, bound: Any) -> int | None:
    """A bound in a type that a graph can hold. Raises BadParam."""
    # Dynamo calls one that is symbolic an int, of which operator.index would make a constant.
    if bound is None:
        return None
    whole = type(bound) is int or isinstance(bound, torch.SymInt)
    return _fitting(bound if whole else length_bound(name, bound))


def _fitting(bound: int) -> int:
    """A bound as the schemas of the operators hold it, above any length."""
    return bound if isinstance(bound, torch.SymInt) else min(bound, _LARGEST)
