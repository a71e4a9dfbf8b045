"""Masks by one line: conditions that say which keys a query sees.

A rule is one condition over the positions ``q`` and ``kv``, the query head ``h``, the batch entry ``b``, and
parameters: integers, and arrays of int32 or bool. It is true where a key is **visible**; an array of bools as
a mask is true where a key is hidden. q counts from the first key, aligned so that the last query is at the
last key: query i has q = i + seqlen_kv - seqlen_q.
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
# The operator whose kernels make lists of the blocks of a mask by a line.
LISTING = "mask_lists"
# How the names begin of rules that a call has without a file; a digest of the line follows.
LINE = "line_"
# How the arguments of operators begin that are arrays of a rule.
PREFIX = "mask_"
# The arrays of a rule of packed sequences that say where each begins, and the last one ends.
ENDS = ("cu_seqlens_q", "cu_seqlens_kv")


@dataclass(frozen=True, slots=True)
class RuleParam:
    """A parameter of a rule: an integer, or an array where it has dimensions. The line reads elements of an
    array as numbers, int32, or as conditions, bool or uint8.
    """

    name: str
    dimensions: tuple[str, ...] = ()
    is_bool: bool = field(default=False, repr=False)  # a line says so: its digest has the names alone

    @property
    def argument_name(self) -> str:
        """The name of the array, or of the integer, among the arguments and parameters of kernels."""
        return self.name if self.name in ENDS else PREFIX + self.name

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
            DIMENSIONS.get(dimension, f"{self.argument_name}_{dimension}") for dimension in self.dimensions
        )

    def argument(self) -> Argument:
        """The array as an argument of the operator."""
        shape = " ".join(self.symbols)
        dtypes, alignment = (("bool", "uint8"), 1) if self.is_bool else (("int32",), 4)
        return Argument(self.argument_name, "input", shape, dtypes, "broadcast", alignment)


class Pack(NamedTuple):
    """What a rule of packed sequences was made of (`packedrules`): the rule of one sequence, and whether
    bounds of the keys on the left and on the right of a query go with it.
    """

    rule: Rule
    left: bool
    right: bool


@dataclass(frozen=True)
class Rule:
    """A mask: its line as ``text`` and as a tree, and its parameters. With ``pack`` a call has the queries
    and keys of several sequences, one after another. A query sees only keys of its own sequence; q and kv are
    positions in the sequence, and b is its number.
    """

    name: str
    text: str
    params: tuple[RuleParam, ...]
    tree: Node = field(compare=False, repr=False)
    pack: Pack | None = field(default=None, compare=False, repr=False)

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


def index_of_block(node: Node) -> str:
    """By which positions the elements of an array are that a block reads: "q" or "kv", "block" for both, ""
    where it reads one element, or "any" where that is not simply said.
    """
    words = [
        str(index.value)
        if index.op == "name" and index.value in ("q", "kv")
        else "any"
        if {"q", "kv"} & index.reads()
        else ""
        for index in node.args
    ]
    moving = [word for word in words if word]
    if sorted(moving) == ["kv", "q"]:
        return "block"
    if len(moving) > 1:
        return "any"
    return moving[0] if moving else ""


def loads_by(rule: Rule, position: str) -> tuple[Node, ...]:
    """The elements of arrays, each once, that `index_of_block` gives this position. Blocks of packed
    sequences have no bounds of "block".
    """
    if position == "block" and rule.pack is not None:
        return ()
    loads = dict.fromkeys(node for node in rule.tree.walk() if node.op == "load")
    return tuple(node for node in loads if index_of_block(node) == position)
