"""Ulysses: ranks exchange heads for tokens. Before attention a rank has some tokens of all heads, during it
all tokens of its unit and some heads, and after it its tokens again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.distributed.exchange import exchanged, rank_major
from flashgen.distributed.layouts import Runs, tokens_of

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.distributed.heads import HeadShares


class Members(NamedTuple):
    """The runs of the ranks of a unit, in order, and which of them this rank is. ``unit`` are the runs of
    the unit, in the order of its rows.
    """

    runs: tuple[Runs, ...]
    place: int
    unit: Runs

    # Caches look it up by identity: a hash of all members would take long.
    __hash__ = object.__hash__

    @property
    def lengths(self) -> list[int]:
        return [tokens_of(runs) for runs in self.runs]


@lru_cache(maxsize=4)
def unit_order(members: Members, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The indices that bring rows from the order of ranks into the order of the unit, and those that bring
    them back; None if both orders are the same.
    """
    tokens = rank_major([tuple(run) for runs in members.runs for run in runs], device)
    of_unit = rank_major([tuple(run) for run in members.unit], device)
    order = torch.argsort(tokens)[torch.argsort(torch.argsort(of_unit))]
    if bool((order[1:] > order[:-1]).all()):
        return None
    return order, torch.argsort(order)


def to_heads(x: Tensor, members: Members, group: Any) -> Tensor:
    """A rank's heads of all tokens of the unit: (tokens of the unit, batch, heads / ranks, head_dim), of
    (batch, tokens, heads, head_dim).
    """
    size, lengths = len(members.runs), members.lengths
    batch, rows, heads, width = x.shape
    split = x.view(batch, rows, size, heads // size, width).permute(2, 1, 0, 3, 4)
    send = split.reshape(size * rows, batch, heads // size, width)
    result = exchanged(send, [rows] * size, lengths, group)
    orders = unit_order(members, x.device)
    return result if orders is None else result.index_select(0, orders[0])


def to_tokens(x: Tensor, members: Members, group: Any) -> Tensor:
    """A rank's tokens of all heads, (batch, tokens, heads, head_dim): the way back of `to_heads`. Heads are
    in the order of ranks.
    """
    size, lengths = len(members.runs), members.lengths
    rows = lengths[members.place]
    orders = unit_order(members, x.device)
    send = x if orders is None else x.index_select(0, orders[1])
    result = exchanged(send.contiguous(), lengths, [rows] * size, group)
    batch, heads, width = result.shape[1:]
    whole = result.view(size, rows, batch, heads, width).permute(2, 1, 0, 3, 4)
    return whole.reshape(batch, rows, size * heads, width)


def for_ranks(x: Tensor, split: HeadShares) -> Tensor:
    """The kv heads that each rank needs, one rank after another, of (batch, tokens, kv heads, head_dim)."""
    if not split.replicated:
        return x
    return x.index_select(2, _kv_heads(split, x.device))


@lru_cache(maxsize=16)
def _kv_heads(split: HeadShares, device: torch.device) -> Tensor:
    return torch.tensor([head for kv in split.kv for head in kv], device=device)


def summed(gradient: Tensor, split: HeadShares, heads: int) -> Tensor:
    """The gradient of kv heads, of the fp32 gradients that ranks have of their copies; added in the order of
    ranks.
    """
    if not split.replicated:
        return gradient
    batch, rows, _, width = gradient.shape
    total = gradient.new_zeros((batch, rows, heads, width))
    for place, head in enumerate(head for kv in split.kv for head in kv):
        total[:, :, head] += gradient[:, :, place]
    return total
