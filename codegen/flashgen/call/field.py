"""What the declaration of an argument of a call says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

FORWARD = ("attention", "plan")
BACKWARD = ("attention_backward", "plan_backward")
# What a value is, which decides how it is checked and how a schema of PyTorch holds it.
Kind = Literal[
    "array",  # of any library
    "flag",
    "number",  # that kernels take as a scalar
    "probability",
    "mask_type",  # one of `maskoptions.MASK_TYPES`
    "window",  # two integers
    "bound",  # of the lengths of sequences
    "splits",
    "margin",  # of multiprocessors
    "block_size",  # rows and keys of the blocks of a BlockMask
    "score",  # a score modification: its names, its parameters, or shorthand for one
    "name",  # a string that is looked up
    "host",  # only for the host: where to queue, which memory to use, what to do beforehand
]


@dataclass(frozen=True, slots=True)
class Shorthand:
    """What a field of the kind "score" stands for: the parameter ``param`` of the score modification
    ``causal``, if no query sees a key after its own position, else of ``other``. ``positive`` is whether it
    is a number above 0; ``without`` says in messages what None means.
    """

    param: str
    causal: str
    other: str
    positive: bool = False
    without: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One argument of a call.

    functions: which functions take it; none takes what a KVCache holds.
    type: for type checkers.
    gradient: whether the backward pass gives a gradient of the array, which has the field ``dNAME``.
    elsewhere: its names in other libraries.
    hint: what a message adds if a caller used one of these names.
    """

    name: str
    kind: Kind
    functions: tuple[str, ...] = FORWARD + BACKWARD
    default: Any = None
    type: str = "Any"
    gradient: bool = False
    elsewhere: tuple[str, ...] = ()
    hint: str = ""
    shorthand: Shorthand | None = None
    doc: str = ""


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "q, k and v"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
