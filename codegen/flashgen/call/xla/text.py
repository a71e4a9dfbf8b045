"""A request as text: JSON with a version, which a program of XLA carries as an attribute.

So a program that another process has compiled or exported says by itself what it computes. Arrays are
operands of the program; the text has their names.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from flashgen.call.mask import rule_of
from flashgen.call.request import Request, score_of_key
from flashgen.errors import BadParam, arg
from flashgen.operators import modified_operator, operator_of
from flashgen.operators.arguments import Expected, shown
from flashgen.operators.operator import lined
from flashgen.operators.rules import LINE, RuleOfCall
from flashgen.operators.splits import SplitEvery

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.call.request import ScoreKey
    from flashgen.operators.operator import Problem

VERSION = 1
Shapes = list[tuple[str, tuple[int, ...]]]
# What makes options that are records, by the names that the text has for them.
_RECORDS = {
    "SplitEvery": SplitEvery,
    "Expected": Expected,
    "Mask": lambda line, numbers: RuleOfCall(rule_of(line), numbers),
}


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """What a text says: a request without its arrays, the names of the arrays that it has, and what the
    caller calls arguments of the operator, for `errors.naming`.
    """

    request: Request
    names: tuple[str, ...]
    renamed: dict[str, str]

    @property
    def written(self) -> tuple[str, ...]:
        """The arrays that receive a result in their place."""
        operator = self.request.operator
        return tuple(name for name in self.names if operator.arguments[operator.position(name)].is_output)

    def problem(self, views: Sequence[Any]) -> Problem:
        """The problem of arrays with these views, in the order of ``names``. Raises the errors of the
        operator's contract.
        """
        request = self.request
        in_order = request.operator.in_order(**dict(zip(self.names, views, strict=True)))
        problem = request.operator.normalise(in_order, request.options, (None,) * len(request.scalars))
        return problem.with_scalars(request.scalars)


def encode(request: Request, score: ScoreKey | None, names: Mapping[str, str]) -> str:
    """The text of a request; ``score`` says which score modification its operator has, ``names`` what the
    caller calls arguments of the operator. Raises BadParam for an
    option that no text holds, for example one that JAX traces.
    """
    operator = request.operator
    options = {
        name: None if name == "score" else _option(name, value)
        for name, value in zip(operator.options, request.options, strict=True)
    }
    scalars = [_number(name, x) for name, x in zip(operator.scalars, request.scalars, strict=True)]
    return json.dumps(
        {
            "version": VERSION,
            "operator": operator.name,
            "lengths": "kv_lengths" in operator.positions,
            "score": score,
            "by": _differentiated(request),
            "options": options,
            "scalars": scalars,
            "backend": _option("backend", request.backend) or os.environ.get("FLASHGEN_BACKEND") or None,
            "algorithm": _option("algorithm", request.algorithm),
            "arrays": [name for name, x in request.by_name().items() if x is not None],
            "names": dict(names),
        }
    )


@lru_cache(maxsize=1024)
def decode(text: str | bytes) -> Described:
    """What a text says. Raises BadParam for a text of another version."""
    values = json.loads(text)
    if values.get("version") != VERSION:
        raise BadParam(
            f"a call of flashgen in this program has version {values.get('version')}; this flashgen reads "
            f"version {VERSION}: compile or export the program anew"
        )
    name, has_lengths, score = values["operator"], values["lengths"], None
    operator = operator_of(name, has_lengths)
    if values["score"] is not None:
        names, types, tensors = values["score"]
        score = score_of_key((tuple(names), tuple(tuple(x) for x in types), tuple(tensors)))
        if values["by"] is not None:
            score = score.with_respect_to(values["by"])
        operator = modified_operator(name, has_lengths, score)
    options = {name: _option_of(value) for name, value in values["options"].items()}
    if options.get("rule") is not None:
        operator = lined(operator, options["rule"].rule)
    options = tuple(score if name == "score" else options[name] for name in operator.options)
    request = Request(
        operator,
        (None,) * len(operator.arguments),
        options,
        tuple(values["scalars"]),
        None,
        values["backend"],
        values["algorithm"],
    )
    return Described(request, tuple(values["arrays"]), values["names"])


def with_shapes(text: str, shapes: Shapes) -> bytes:
    """A text that also has the dtype and the shape of each array, in the order of their names."""
    return json.dumps(json.loads(text) | {"shapes": shapes}).encode()


def shapes_of(text: bytes) -> Shapes:
    """The dtype and the shape of each array, of a text that `with_shapes` gave."""
    return [(dtype, tuple(shape)) for dtype, shape in json.loads(text)["shapes"]]


def _differentiated(request: Request) -> str | None:
    """The array of a score modification that an operator differentiates by."""
    score = dict(zip(request.operator.options, request.options, strict=True)).get("score")
    return None if score is None or score.wrt == "score" else score.wrt


def _option(name: str, value: Any) -> Any:
    """A value in JSON. Raises BadParam."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Expected):
        return {"Expected": [_option(name, value.bound)]}
    if isinstance(value, SplitEvery):
        return {"SplitEvery": [value.keys]}
    if isinstance(value, RuleOfCall):
        rule = value.rule
        line = rule.text if rule.name.startswith(LINE) else rule.name
        return {"Mask": [line, list(value.numbers)]}
    if isinstance(value, (tuple, list)):
        return [_option(name, x) for x in value]
    return _number(name, value)


def _option_of(value: Any) -> Any:
    """The value of an option from JSON."""
    if isinstance(value, list):
        return tuple(_option_of(x) for x in value)
    if isinstance(value, dict):
        ((kind, members),) = value.items()
        return _RECORDS[kind](*_option_of(members))
    return value


def _number(name: str, value: Any) -> int | float | None:
    if value is None:
        return None
    if not isinstance(value, Real):
        what = f"has type {type(value).__name__}" if hasattr(value, "shape") else f"is {shown(value)}"
        raise BadParam(
            f"{arg(name)} {what}; inside a program that JAX traces it must be a number or another constant, "
            "not a traced array (static_argnames of jax.jit keeps an argument constant)"
        )
    return int(value) if isinstance(value, Integral) else float(value)
