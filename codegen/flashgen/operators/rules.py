"""Masks by one line: conditions that say which keys a query sees.

A rule is one condition over the positions ``q`` and ``kv``, the query head ``h``, the batch entry ``b``, and
parameters: integers, and arrays of int32. It is true where a key is **visible**; an array of bools as a mask
is true where a key is hidden. q counts from the first key, aligned so that the last query is at the last key:
query i has q = i + seqlen_kv - seqlen_q.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import Argument, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.formula import Node

# The types of the names that every rule may use.
NAMES = {"q": "int", "kv": "int", "h": "int", "b": "int"}
# The dimension of an array that has an element for each token; its index is a position, as q and kv are.
TOKEN = "token"
# The dimensions of an array that have a size of the call; any other is as long as the caller's array.
DIMENSIONS = {"b": "batch", "h": "num_heads_q", "q": "seqlen_q", "kv": "seqlen_kv", TOKEN: "seqlen_kv"}
# Where sequences are packed, tokens follow one another without a batch: b and one of these are one dimension,
# of all tokens of q or of k. These are the symbols of both.
_PACKED = {"q": ("token_batch_q", "tokens_q"), "kv": ("token_batch_kv", "tokens_kv")}
_PACKED[TOKEN] = _PACKED["kv"]
# How the names begin of rules that a call has without a file; a digest of the line follows.
LINE = "line_"
# How the arguments of operators begin that are arrays of a rule.
PREFIX = "mask_"


@dataclass(frozen=True, slots=True)
class RuleParam:
    """A parameter of a rule, an integer, or an array of int32 where it has dimensions."""

    name: str
    dimensions: tuple[str, ...] = ()

    @property
    def per_token(self) -> str | None:
        """Which dimension is packed, and b with it, where sequences are; None if none is."""
        packs = len(self.dimensions) == 2 and self.dimensions[0] == "b"
        return self.dimensions[1] if packs and self.dimensions[1] in _PACKED else None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of the dimensions: one of the operator's, or one of its own."""
        if self.per_token is not None:
            return _PACKED[self.per_token]
        return tuple(
            DIMENSIONS.get(dimension, f"{PREFIX}{self.name}_{dimension}") for dimension in self.dimensions
        )

    def argument(self) -> Argument:
        """The array as an argument of the operator."""
        name = PREFIX + self.name
        return Argument(name, "input", " ".join(self.symbols), ("int32",), "broadcast", alignment=4)


@dataclass(frozen=True)
class Rule:
    """A mask: its line as ``text`` and as a tree, and its parameters."""

    name: str
    text: str
    params: tuple[RuleParam, ...]
    tree: Node = field(compare=False, repr=False)

    @property
    def title(self) -> str:
        """What a message calls it: its name, or the line of one without a file."""
        return f"`{self.text}`" if self.name.startswith(LINE) else self.name

    def __hash__(self) -> int:  # of every call
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.text))

    @cached_property
    def arrays(self) -> tuple[RuleParam, ...]:
        return tuple(param for param in self.params if param.dimensions)

    @cached_property
    def scalars(self) -> tuple[RuleParam, ...]:
        return tuple(param for param in self.params if not param.dimensions)

    @cached_property
    def divisors(self) -> frozenset[str]:
        """The parameters that divide, and so are above 0."""
        divided = (node.args[1] for node in self.tree.walk() if node.op in ("//", "%"))
        return frozenset(str(node.value) for node in divided if node.op == "name")

    def number(self, param: RuleParam, value: Any) -> int:
        """An integer parameter of a mask, checked. Raises BadParam."""
        from flashgen.operators.formula import ELEMENTS  # calls without a mask by a line need no parser

        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            what = f"has type {type(value).__name__}" if hasattr(value, "shape") else f"is {shown(value)}"
            raise BadParam(f"{arg(param.name)} {what}; the mask {self.title} needs an integer")
        least = 1 if param.name in self.divisors else ELEMENTS.low
        if not least <= value <= ELEMENTS.high:
            why = ", as it divides" if least == 1 else ""
            raise BadParam(
                f"{arg(param.name)} is {shown(value)}; the mask {self.title} needs {least} to "
                f"{ELEMENTS.high}{why}"
            )
        return int(value)


class RuleOfCall(NamedTuple):
    """A rule with the integers of a call, in the order of its scalars: an option of the operators."""

    rule: Rule
    numbers: tuple[int, ...] = ()

    def by_name(self) -> dict[str, int]:
        """The integers by name."""
        return dict(zip((param.name for param in self.rule.scalars), self.numbers, strict=True))


class PackedTokens(NamedTuple):
    """How many tokens q and k have where sequences are packed; None where they are not."""

    of_q: int | None = None
    of_k: int | None = None


NOT_PACKED = PackedTokens()


def named_by_caller(shape: str, packed: PackedTokens) -> str:
    """The shape of an array with an element for each token, as a caller calls its dimensions."""
    if shape == " ".join(_PACKED["q"]):
        return "batch seqlen_q" if packed.of_q is None else "tokens_of_q"
    if shape == " ".join(_PACKED["kv"]):
        return "batch seqlen_kv" if packed.of_k is None else "tokens_of_k"
    return shape


def sizes_of_tokens(sizes: Mapping[str, int], packed: PackedTokens = NOT_PACKED) -> dict[str, int]:
    """The sizes of the symbols of arrays with an element for each token, for a call of these sizes."""
    tokens = {}
    for dimension, length, count in (("q", "seqlen_q", packed.of_q), ("kv", "seqlen_kv", packed.of_k)):
        of_batch, of_tokens = _PACKED[dimension]
        tokens[of_batch] = sizes["batch"] if count is None else 1
        tokens[of_tokens] = sizes[length] if count is None else count
    return tokens
