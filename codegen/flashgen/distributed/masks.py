"""Masks by a line for the rows of a part: queries whose positions are not 0, 1, 2 and so on.

A launch has the rows of a part as one sequence, and all keys of its documents. `mask_of` writes a new line
for it. The line reads from arrays the position of each query, and the first and last key that causal, a
window and documents let it see. An array that the caller's line reads by a query becomes an array with an
element for each row. So the ordinary kernels of masks by a line compute it.

In a line q counts from the first key, so an array with an element for each row is as long as the keys, and
the elements of the rows are its last ones.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from flashgen.call.mask import Mask, rule_of
from flashgen.distributed.segments import pieces_of
from flashgen.errors import BadParam, BadTensorShape, arg
from flashgen.operators.formula import Node, evaluate, number, text
from flashgen.operators.rules import TOKEN

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.distributed.parts import Part
    from flashgen.distributed.segments import Visibility
    from flashgen.operators.rules import Rule, RuleParam

_Q, _KV, _H = (Node("name", (), name, "int") for name in ("q", "kv", "h"))
# The index of the token of a row among all tokens of the call, which no line has.
_TOKEN_OF_ROW = Node("name", (), "token of row", "int")


# Keeps products with a head below 64 bits.
_MOST_HEADS = 1 << 20


class Rows(NamedTuple):
    """Where the queries of a part are, int64, (rows,): the position in the document, its number in the call,
    its first key and its number of tokens. ``tokens`` has the token in the call of each key of the part.
    """

    position: np.ndarray
    document: np.ndarray
    first_key: np.ndarray
    length: np.ndarray
    tokens: np.ndarray

    # Caches look it up by identity.
    __hash__ = object.__hash__


@lru_cache(maxsize=16)
def rows_of(part: Part, cu_seqlens: tuple[int, ...]) -> Rows:
    """The rows of a part of the call with these bounds of documents."""
    begins, firsts = np.array(part.cu_seqlens[:-1]), np.array(part.documents)
    tokens = np.arange(part.cu_seqlens[-1]) + np.repeat(firsts - begins, np.diff(part.cu_seqlens))
    rows = [np.empty((4, 0), np.int64)]
    for piece in pieces_of(part.own, part.cu_seqlens):
        of_piece = np.empty((4, piece.end - piece.begin), np.int64)
        of_piece[0] = np.arange(piece.begin, piece.end)
        of_piece[1] = bisect_right(cu_seqlens, int(tokens[piece.first])) - 1
        of_piece[2], of_piece[3] = piece.first, piece.length
        rows.append(of_piece)
    return Rows(*np.concatenate(rows, 1), tokens)


class _Use(NamedTuple):
    """An array of a new line, made of the caller's array ``source``. Its axes are ``kept``, then ``keys``,
    then one axis of rows instead of the axes ``rows``, which have ``indices``. The axis of rows comes before
    the axis of keys if it is not ``padded`` to the number of keys. ``heads`` is the axis of query heads, and
    ``by_token`` whether ``keys`` has an element for each token of packed documents.
    """

    source: str
    kept: tuple[int, ...]
    keys: tuple[int, ...]
    rows: tuple[int, ...]
    indices: tuple[Node, ...]
    heads: int | None
    by_token: bool
    padded: bool


class _Line(NamedTuple):
    """A line for rows, as text. ``uses`` are its arrays by name; ``facts`` the names of arrays of what it
    knows of rows, by what they are; ``first_head`` the integer that has the first query head, or None.
    """

    text: str
    uses: tuple[tuple[str, _Use], ...]
    facts: tuple[tuple[str, str], ...]
    numbers: tuple[str, ...]
    first_head: str | None


@lru_cache(maxsize=256)
def _line_of(rule: Rule, packed: bool, moved: bool, left: bool, right: bool) -> _Line:
    """The line of rows that are ``moved``, or that are all tokens of one sequence; with bounds of the keys
    that a query sees on the left and on the right. Raises BadParam for what no line of rows has.
    """
    rewriting = _Rewriting(rule, packed, moved)
    tree = rule.tree.replaced(rewriting.change)
    for fact, is_bound in (("first", left), ("last", right)):
        if is_bound:
            of_row = rewriting.fact(fact)
            order = (of_row, _KV) if fact == "first" else (_KV, of_row)
            tree = Node("and", (Node("<=", order, None, "bool"), tree), None, "bool")
    return _Line(
        text(tree),
        tuple(rewriting.uses.items()),
        tuple(rewriting.facts.items()),
        tuple(param.name for param in rule.scalars if param.name in tree.reads()),
        rewriting.first_head,
    )


class _Rewriting:
    """Makes the tree of a line for rows."""

    def __init__(self, rule: Rule, packed: bool, moved: bool) -> None:
        self._rule, self._packed, self._moved = rule, packed, moved
        self._params = {param.name: param for param in rule.params}
        self._taken = set(self._params)
        self.uses: dict[str, _Use] = {}
        self.facts: dict[str, str] = {}
        self.first_head: str | None = None

    def _fresh(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def fact(self, fact: str) -> Node:
        """An element of what the line knows of rows."""
        if fact not in self.facts:
            self.facts[fact] = self._fresh(f"row_{fact}")
        return Node("load", (_Q,), self.facts[fact], "int")

    def change(self, node: Node) -> Node | None:
        """What takes the place of a node; None to go on below it."""
        if node.op == "load":
            return self._load(node)
        if node.op != "name":
            return None
        if node.value == "h":
            if self.first_head is None:
                self.first_head = self._fresh("first_head")
            first = Node("min", (Node("name", (), self.first_head, "int"), number(_MOST_HEADS)), None, "int")
            return Node("+", (_H, Node("max", (first, number(0)), None, "int")), None, "int")
        if self._moved and node.value == "q":
            return self.fact("position")
        if self._packed and node.value == "kv":
            return Node("-", (_KV, self.fact("first_key")), None, "int")
        if self._packed and node.value == "b":
            return self.fact("document")
        return None

    def _load(self, node: Node) -> Node:
        param = self._params[str(node.value)]
        kept, keys, rows, heads = [], [], [], None
        indices, args = list(node.args), list(node.args)
        per_token = self._packed and param.per_token is not None
        if per_token and node.args[1] == _Q:
            indices[1] = _TOKEN_OF_ROW
        elif per_token and node.args[1] != _KV:
            self._refuse(node, f"the index {text(node.args[1])} of tokens of packed documents")
        for axis, index in enumerate(indices):
            reads = index.reads() & {"q", "kv", "b", "h"}
            by_row = (self._moved and "q" in reads) or (self._packed and "b" in reads)
            if per_token and axis == 0:
                continue
            if index == _TOKEN_OF_ROW or (by_row and reads <= ({"q", "b"} if self._packed else {"q"})):
                rows.append(axis)
            elif by_row or (self._packed and "kv" in reads and not per_token):
                self._refuse(node, f"the index {text(index)}")
            elif self._moved and "kv" in reads:
                keys.append(axis)
            else:
                kept.append(axis)
                if index == _H and param.dimensions[axis] == "h":
                    heads = axis
                else:
                    args[axis] = index.replaced(self.change)
        padded = [args[axis] for axis in keys] != [_KV]
        use = _Use(
            param.name,
            *map(tuple, (kept, keys, rows)),
            tuple(indices[axis] for axis in rows),
            heads,
            per_token,
            padded,
        )
        places = [_Q] if rows else []
        order = [args[axis] for axis in keys]
        order = order + places if padded else places + order
        return Node("load", (*(args[axis] for axis in kept), *order), self._named(param, use), node.type)

    def _named(self, param: RuleParam, use: _Use) -> str:
        for name, other in self.uses.items():
            if other == use:
                return name
        name = self._fresh(f"{param.name}_of_{'rows' if use.rows else 'keys'}")
        self.uses[name] = use
        return name

    def _refuse(self, node: Node, what: str) -> NoReturn:
        raise BadParam(
            f"{arg('mask')} is {self._rule.title}, which reads {text(node)}: no rank has {what}, which "
            "depends on other positions; read an array by q and kv themselves, or by b, h and numbers"
        )


def check_mask(mask: Mask, tokens: int, packed: bool, heads: int, moved: bool) -> None:
    """Raise BadTensorShape for arrays of a mask that are not of all tokens, or of all query heads; BadParam
    for a line that ranks cannot compute.
    """
    rule = mask.rule.rule
    for param in rule.arrays:
        shape = tuple(mask.arrays[param.name].shape)
        for axis, dimension in enumerate(reversed(param.dimensions), 1):
            size = shape[-axis] if axis <= len(shape) else 1
            of_tokens = dimension in (TOKEN, "q", "kv") and (not packed or param.per_token is not None)
            if (of_tokens and size != tokens) or (dimension == "h" and size not in (1, heads)):
                count = f"{tokens} tokens of all ranks" if of_tokens else f"{heads} query heads"
                raise BadTensorShape(
                    f"{arg(param.name)} of the mask {rule.title} has shape {shape}; expected an element for "
                    f"each of the {count}"
                )
    line = _line_of(rule, packed, moved, packed, packed)
    try:
        rule_of(line.text)
    except BadParam as error:
        raise BadParam(
            f"{arg('mask')} is {rule.title}, and the line that ranks compute for it cannot be: {error}"
        ) from error


def mask_of(
    mask: Mask, rows: Rows | None, visible: Visibility, packed: bool, heads: slice, device: torch.device
) -> Mask:
    """The mask of a launch with these rows, which hides what ``visible`` and documents hide as well; without
    ``rows`` of a launch of all tokens, whose options hide that. ``heads`` are its query heads.
    """
    rule = mask.rule.rule
    if rows is None:
        if "h" not in rule.tree.reads():
            return mask
        line = _line_of(rule, False, False, False, False)
    else:
        bounded = (packed or side is not None for side in visible)
        line = _line_of(rule, packed, True, *bounded)
    params: dict[str, Any] = {name: mask.numbers[name] for name in line.numbers}
    if line.first_head is not None:
        params[line.first_head] = heads.start
    for name, use in line.uses:
        params[name] = _array(mask, use, rows, heads)
    for fact, name in line.facts:
        params[name] = _fact(rows, visible, fact, device)
    return Mask(line.text, **params)


def _array(mask: Mask, use: _Use, rows: Rows | None, heads: slice) -> Tensor:
    """An array of a new line, of the caller's."""
    x = mask.arrays[use.source]
    axes = max(use.kept + use.keys + use.rows, default=0) + 1
    x = x.reshape((1,) * (axes - x.ndim) + tuple(x.shape))
    if use.heads is not None and x.shape[use.heads] > 1:
        x = x.narrow(use.heads, heads.start, heads.stop - heads.start)
    if rows is None:
        return x
    dropped = tuple({*range(axes)} - {*use.kept, *use.keys, *use.rows})
    x = x.permute(dropped + use.kept + use.keys + use.rows)[(0,) * len(dropped)]
    if use.by_token and use.keys:
        x = x.index_select(-1, _index(rows, None, (), x.shape[-1], x.device))
    if not use.rows:
        return x.contiguous()
    numbers = tuple(mask.numbers.items())
    extents = x.shape[len(x.shape) - len(use.rows) :]
    places = [
        _index(rows, index, numbers, extent, x.device)
        for index, extent in zip(use.indices, extents, strict=True)
    ]
    x = x.index_select(-1, places[0]) if len(places) == 1 else x[(..., *places)]
    return _padded(x, len(rows.tokens)) if use.padded else x.movedim(-1, -2).contiguous()


def _padded(x: Tensor, keys: int) -> Tensor:
    """An array of rows, as long as the keys."""
    result = x.new_zeros((*x.shape[:-1], keys))
    result[..., keys - x.shape[-1] :] = x
    return result


# An index has 8 bytes for each row: the layers of a model share these entries.
@lru_cache(maxsize=16)
def _index(
    rows: Rows, index: Node | None, numbers: tuple[Any, ...], extent: int, device: torch.device
) -> Tensor:
    """The elements that rows read by an index, or the tokens of keys; an index past an end is clamped."""
    if index is None:
        return torch.from_numpy(rows.tokens).to(device)
    if index == _TOKEN_OF_ROW:
        places = rows.tokens[rows.first_key + rows.position]
    else:
        values = {**dict(numbers), "q": rows.position, "b": rows.document}
        places = np.broadcast_to(evaluate(index, values, np), rows.position.shape)
    return torch.from_numpy(np.ascontiguousarray(places).clip(0, max(extent - 1, 0))).to(device)


@lru_cache(maxsize=16)
def _fact(rows: Rows, visible: Visibility, fact: str, device: torch.device) -> Tensor:
    """What a line knows of rows, int32, as long as the keys."""
    if fact == "first":
        left = rows.position if visible.left is None else visible.left
        values = rows.first_key + (rows.position - left).clip(0)
    elif fact == "last":
        last = rows.length - 1
        right = last if visible.right is None else np.minimum(last, rows.position + visible.right)
        values = rows.first_key + right
    else:
        values = getattr(rows, fact)
    return _padded(torch.from_numpy(values.astype(np.int32)).to(device), len(rows.tokens))
