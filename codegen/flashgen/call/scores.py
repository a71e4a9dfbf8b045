"""The score modification of a call: its names or formulas, its arrays and its numbers."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.call.fields import PLAN_KEYWORDS, SHORTHANDS
from flashgen.call.keywords import advice
from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown
from flashgen.operators.maskoptions import sees_no_later_key

if TYPE_CHECKING:
    from flashgen.call.record import Call
    from flashgen.operators.scores import Score, ScoreSource


def score_of(call: Call) -> tuple[Score | None, tuple[Any, ...], tuple[Any, ...]]:
    """The score modification of a call, None where params are empty, its arrays and its numbers. Raises
    BadParam.
    """
    names, values = named_score(call)
    if not names:
        return None, (), ()
    score = _chain(os.environ.get("FLASHGEN_SPECS", ""), names, _types(names, values))
    params = {param.name for param in score.params}
    # Report a wrong name before a missing one: it is likely to be meant for it.
    for name in sorted(values.keys() - params, key=str):
        has = f"it has {', '.join(sorted(params)) or 'none'}{advice(str(name), params)}"
        raise BadParam(f"{arg('score')} {score.title} has no parameter {name}; {has}")
    for name in sorted(params - values.keys()):
        example = ", ".join(f"{param!r}: ..." for param in sorted(params))
        raise BadParam(f"{arg('score')} {score.title} needs the parameter {name}; pass params={{{example}}}")
    tensors = _tensors(score, values)
    if tensors:
        score = _with_tensors(score, tensors)
        values |= {name: values[name].reshape(1) for name in tensors}
    return (
        score,
        tuple([values[param.name] for param in score.arrays]),
        tuple([values[param.name] for param in score.scalars]),
    )


def _types(names: tuple[str, ...], values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The type of each parameter, where the modification depends on it."""
    typed = not all(map(str.isidentifier, names))
    for x in values.values():
        # Arrays of 16-bit elements have kernels of their own.
        typed = typed or getattr(getattr(x, "dtype", None), "itemsize", 0) == 2
    return tuple((name, _type(values[name])) for name in sorted(values, key=str)) if typed else ()


def _tensors(score: Score, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the numbers of a modification that are passed as arrays."""
    tensors: tuple[str, ...] = ()
    for param in score.scalars:
        if _is_tensor(values.get(param.name)) and not param.is_integer:
            tensors += (param.name,)
    return tensors


def score_from(source: ScoreSource) -> Score:
    """The score modification of this source, of the folders of FLASHGEN_SPECS. Raises BadParam."""
    score = _chain(os.environ.get("FLASHGEN_SPECS", ""), source.names, source.types)
    return _with_tensors(score, source.tensors) if source.tensors else score


def named_score(call: Call) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the score modifications of a call, and their parameters. Raises BadParam."""
    score, params = call.score, call.params
    names = [score] if isinstance(score, str) else score
    if names is not None and not (isinstance(names, (list, tuple)) and names):
        raise BadParam(_no_score(score))
    for name in names or ():
        if not isinstance(name, str):
            raise BadParam(_no_score(name))
    if params is not None and not isinstance(params, Mapping):
        raise BadParam(
            f"{arg('params')} is {shown(params)}; it must map the names of parameters to numbers and arrays"
        )
    names = [name if name.isidentifier() else " ".join(name.split()) for name in names or ()]
    values = dict(params or {})
    if not names and values:
        raise BadParam(f"{arg('params')} has {', '.join(map(str, values))}, but no score was given")
    for name, shorthand in SHORTHANDS:
        value = getattr(call, name)
        if value is None:
            continue
        if score is not None:
            raise BadParam(
                f"{arg('score')} is {shown(score)} and {arg(name)} was given as well; name all in score, "
                f"such as ({shorthand.other!r}, 'mine'), and give their params"
            )
        if shorthand.positive:
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                none = f"{arg(f'no {name}', 'None')} for {shorthand.without}"
                raise BadParam(f"{arg(name)} is {shown(value)}; it must be a number above 0, or {none}")
        is_causal = sees_no_later_key(call.causal, call.mask_type, call.window_size)
        names.append(shorthand.causal if is_causal else shorthand.other)
        values[shorthand.param] = value
    return tuple(names), values


def _no_score(x: Any) -> str:
    return (
        f"{arg('score')} is {shown(x)}; it must be the name of a score modification, a formula, or a list of "
        "these"
    )


def _type(value: Any) -> str:
    """The type in a formula of a parameter that has this value."""
    if type(value) is float:
        return "f32"
    if isinstance(value, numbers.Number):
        return "i32" if isinstance(value, numbers.Integral) else "f32"
    return _type_of_elements(getattr(value, "dtype", None))


@lru_cache(maxsize=64)
def _type_of_elements(dtype: Any) -> str:
    """The type in a formula of an array with elements of a library's dtype."""
    from flashgen.operators.scores import HALF_TYPES

    name = str(dtype).rpartition(".")[2]
    return "i32" if name.endswith("int32") else HALF_TYPES.get(name, "f32")


def _is_tensor(value: Any) -> bool:
    """Whether a value is an array of one element, which takes the place of a number."""
    if type(value) is float or getattr(value, "shape", None) not in ((), (1,)):
        return False
    return not isinstance(value, numbers.Number)


@lru_cache(maxsize=64)
def _with_tensors(score: Score, names: tuple[str, ...]) -> Score:
    return score.with_tensors(names)


@lru_cache(maxsize=256)
def _chain(folders: str, names: tuple[str, ...], types: tuple[tuple[str, str], ...]) -> Score:
    """The modifications of these names, one after another, as the value ``folders`` of FLASHGEN_SPECS has
    them, or formulas. ``types`` has the types of the parameters of formulas.
    """
    from flashgen.families.formulas import modification
    from flashgen.families.scores import load_scores
    from flashgen.operators.scores import ScoreSource, chained

    scores = load_scores(keywords=PLAN_KEYWORDS).by_name
    chain = []
    for name in names:
        score = modification(name, scores, dict(types), keywords=PLAN_KEYWORDS)
        if score is None:
            there = ", ".join(map(repr, sorted(scores)))
            raise BadParam(f"{arg('score')} is {name!r}; there are {there}, and formulas that read `score`")
        chain.append(score)
    return replace(chained(chain).with_types(dict(types)), source=ScoreSource(names, types))
