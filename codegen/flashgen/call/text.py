"""The codec of a request: JSON with a version. A program of XLA carries it as an attribute, and the file of
`record` has one for each call. The string in the schemas of PyTorch's operators has its version and the same
words for options that are records.

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
from flashgen.call.request import Request
from flashgen.call.scores import score_from
from flashgen.errors import BadParam, arg
from flashgen.operators import operator_for
from flashgen.operators.arguments import Expected, shown
from flashgen.operators.packedrules import packed
from flashgen.operators.rules import LINE, RuleOfCall
from flashgen.operators.scores import ScoreSource
from flashgen.operators.splits import SplitEvery

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.operator import Problem
    from flashgen.operators.scores import Score

VERSION = 2
Shapes = list[tuple[str, tuple[int, ...]]]
# What makes options that are records, by the words that JSON has for them.
_RECORDS = {
    "every": SplitEvery,
    "expected": Expected,
    "mask": lambda members: RuleOfCall(rule_of(members[0]), members[1]),
    "packed_mask": lambda members: RuleOfCall(packed(rule_of(members[0]), *members[2]), members[1]),
}


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A decoded text: a request without its arrays, the names of the arrays that it has, and the caller's
    names of the operator's arguments, for `errors.naming`.
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


def members(request: Request) -> dict[str, Any]:
    """A request without its arrays and its backend, as JSON holds it. Raises BadParam for what JSON cannot
    hold, for example an option that JAX traces.
    """
    operator = request.operator
    options = dict(zip(operator.options, request.options, strict=True))
    score: Score | None = options.pop("score", None)
    if score is not None and score.source is None:
        raise BadParam(f"{arg('score')} {score.title} has neither a name nor a formula")
    return {
        "version": VERSION,
        "operator": operator.name,
        "lengths": "kv_lengths" in operator.positions,
        "score": None if score is None else score.source,
        "by": None if score is None or score.wrt == "score" else score.wrt,
        "options": {name: _option(name, value) for name, value in options.items()},
        "scalars": [_number(name, x) for name, x in zip(operator.scalars, request.scalars, strict=True)],
        "algorithm": _option("algorithm", request.algorithm),
    }


def request_from(values: Mapping[str, Any]) -> Request:
    """The request that `members` wrote. Raises BadParam for members of another version."""
    if values.get("version") != VERSION:
        raise BadParam(f"this is of version {values.get('version')}; this flashgen reads version {VERSION}")
    options = {name: option_of(value) for name, value in values["options"].items()}
    if values["score"] is not None:
        names, types, tensors = values["score"]
        score = score_from(ScoreSource(tuple(names), tuple(map(tuple, types)), tuple(tensors)))
        options["score"] = score if values["by"] is None else score.with_respect_to(values["by"])
    rule = options.get("rule")
    operator = operator_for(
        values["operator"], options.get("score"), values["lengths"], None if rule is None else rule.rule
    )
    return Request(
        operator,
        (None,) * len(operator.arguments),
        tuple(options.get(name) for name in operator.options),
        tuple(values["scalars"]),
        algorithm=values["algorithm"],
    )


def encode(request: Request, names: Mapping[str, str]) -> str:
    """The text of a request; ``names`` is what the caller calls arguments of the operator. Raises as
    `members`.
    """
    return json.dumps(
        members(request)
        | {
            "backend": _option("backend", request.backend) or os.environ.get("FLASHGEN_BACKEND") or None,
            "arrays": [name for name, x in request.by_name().items() if x is not None],
            "names": dict(names),
        }
    )


@lru_cache(maxsize=1024)
def decode(text: str | bytes) -> Described:
    """What a text says. Raises BadParam for a text of another version."""
    values = json.loads(text)
    try:
        request = request_from(values)
    except BadParam as error:
        if values.get("version") == VERSION:
            raise
        raise BadParam(f"a program of XLA has a request: {error.message}; export the program anew") from None
    request.backend = values["backend"]
    return Described(request, tuple(values["arrays"]), values["names"])


def with_shapes(text: str, shapes: Shapes) -> bytes:
    """A text that also has the dtype and the shape of each array, in the order of their names."""
    return json.dumps(json.loads(text) | {"shapes": shapes}).encode()


def shapes_of(text: bytes) -> Shapes:
    """The dtype and the shape of each array, of a text that `with_shapes` gave."""
    return [(dtype, tuple(shape)) for dtype, shape in json.loads(text)["shapes"]]


def _option(name: str, value: Any) -> Any:
    """A value in JSON. Raises BadParam."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Expected):
        return {"expected": _option(name, value.bound)}
    if isinstance(value, SplitEvery):
        return {"every": value.keys}
    if isinstance(value, RuleOfCall):
        rule = value.rule if value.rule.pack is None else value.rule.pack.rule
        members: list[Any] = [rule.text if rule.name.startswith(LINE) else rule.name, list(value.numbers)]
        if value.rule.pack is None:
            return {"mask": members}
        return {"packed_mask": [*members, list(value.rule.pack[1:])]}
    if isinstance(value, (tuple, list)):
        return [_option(name, x) for x in value]
    return _number(name, value)


def option_of(value: Any) -> Any:
    """The value of an option from JSON."""
    if isinstance(value, list):
        return tuple(map(option_of, value))
    if isinstance(value, dict):
        ((word, content),) = value.items()
        return _RECORDS[word](option_of(content))
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
