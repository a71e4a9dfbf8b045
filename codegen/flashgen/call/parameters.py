"""The parameters of each public function: which fields it takes, in which order, with which defaults."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from flashgen.call.fields import BY_NAME, FIELDS

if TYPE_CHECKING:
    from flashgen.call.field import Field

# The arguments that come by position; the first ones there must be.
POSITIONAL = {
    "attention": ("q", "k", "v"),
    "plan": ("q", "k", "v"),
    "attention_backward": ("dout", "q", "k", "v", "out", "lse"),
    "plan_backward": ("dout", "q", "k", "v", "out", "lse"),
    "append": ("cache", "k_new", "v_new"),
    "merge": ("parts",),
    "quantize": ("x", "per"),
}
REQUIRED = {
    "attention": 2,
    "plan": 2,
    "attention_backward": 6,
    "plan_backward": 6,
    "append": 2,
    "merge": 1,
    "quantize": 1,
}


@cache
def parameters(function: str) -> tuple[Field, ...]:
    """The fields that a function takes, in the order of its signature: by position, then by name."""
    first = POSITIONAL[function]
    rest = (x for x in FIELDS if function in x.functions and x.name not in first)
    return (*(BY_NAME[name] for name in first), *rest)


@cache
def defaults(function: str) -> dict[str, Any]:
    """The parameters of a function by name, with their defaults; None where there is none."""
    return {field.name: field.default for field in parameters(function)}
