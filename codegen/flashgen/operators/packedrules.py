"""Masks by a line of packed sequences, as kernels have them: one sequence of all tokens, whose rule says
which tokens are of one sequence.

The arrays `rules.ENDS` of such a rule are the cu_seqlens of the call. A query sees keys of its own sequence
alone, and among them those that the line shows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, DeviceTypeNotSupported, arg
from flashgen.operators.formula import Node
from flashgen.operators.rules import ENDS, Pack, Rule, RuleParam

if TYPE_CHECKING:
    from collections.abc import Mapping

# The dimension of an array that has an element for each sequence of a pack.
_SEQUENCE = "sequence"
# The integers that bound the keys of a query on its left and right.
_BOUNDS = ("pack_left", "pack_right")


@lru_cache(maxsize=256)
def packed(rule: Rule, left: bool, right: bool) -> Rule:
    """The rule of sequences that are packed, with bounds of the keys ``left`` and ``right`` of a query, whose
    integers come after the rule's. Raises DeviceTypeNotSupported for an array that has an element for each
    position of a sequence, and no dimension b before.
    """
    tree = rule.tree
    q, kv = (Node("name", (), name, "int") for name in ("q", "kv"))
    bounds = [
        (RuleParam(name), sign) for name, sign, has in zip(_BOUNDS, "-+", (left, right), strict=True) if has
    ]
    for param, sign in bounds:
        end = Node(sign, (q, Node("name", (), param.name, "int")), None, "int")
        order = (end, kv) if sign == "-" else (kv, end)
        tree = Node("and", (tree, Node("<=", order, None, "bool")), None, "bool")
    params = [*(_packed_param(rule, param) for param in rule.params), *(param for param, _ in bounds)]
    params += [RuleParam(name, ("ends",)) for name in ENDS]
    name = "_".join((rule.name, "packed", *(("left",) if left else ()), *(("right",) if right else ())))
    return Rule(name, rule.text, tuple(params), tree, Pack(rule, left, right))


def _packed_param(rule: Rule, param: RuleParam) -> RuleParam:
    if param.per_token is None and {"q", "kv", "token"} & {*param.dimensions}:
        raise DeviceTypeNotSupported(
            f"{arg(param.argument_name)} has an element for each position, and sequences are packed; kernels "
            f"read one for each token of the pack: give it the dimensions (b, token), as in "
            f"{param.name}[b, q], in the mask {rule.title}"
        )
    if param.per_token is not None:
        return param
    dimensions = tuple(_SEQUENCE if x == "b" else x for x in param.dimensions)
    return RuleParam(param.name, dimensions, param.is_bool)


def check_ends(arrays: Mapping[str, Any], *tokens: int) -> None:
    """Raise BadParam for ends that fall, or leave the ``tokens`` of q and k. ``arrays`` are on the host."""
    for name, count in zip(ENDS, tokens, strict=True):
        ends = arrays[name]
        if ends[0] < 0 or ends[-1] > count or (ends[1:] < ends[:-1]).any():
            raise BadParam(
                f"{arg(name)} is {ends.tolist()}; expected ends in ascending order, from 0 to at most {count}"
            )


class Places(NamedTuple):
    """Where queries of a pack are: the number of their sequence, the first of its keys and the one past its
    last, and their position there. A query of no sequence has no keys.
    """

    sequence: Any
    first_key: Any
    end_key: Any
    position: Any

    def tokens(self, positions: Any, count: int, xp: Any) -> Any:
        """The tokens at positions in sequences of keys: of one past an end the last one. There are ``count``
        tokens.
        """
        last = self.end_key - self.first_key - 1
        return (self.first_key + xp.minimum(positions, last).clip(0)).clip(0, max(count - 1, 0))


def places_of(queries: Any, ends: Mapping[str, Any], xp: Any) -> Places:
    """The places of queries, an array of integers; ``ends`` has the arrays ENDS."""
    ends_q, ends_kv = (ends[name] for name in ENDS)
    sequence = (queries[..., None] >= ends_q).sum(-1) - 1
    count = len(ends_q) - 1
    inside = (sequence >= 0) & (sequence < count)
    number = sequence.clip(0, max(count - 1, 0))
    after = (number + 1).clip(0, count)
    first_key, end_key = (xp.where(inside, ends_kv[at], 0) for at in (number, after))
    position = queries - ends_q[number] + end_key - first_key - (ends_q[after] - ends_q[number])
    return Places(sequence, first_key, end_key, xp.where(inside, position, 0))
