"""Shards: cutting a tensor over ranks, putting it together again, and the positions of a rank's tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from flashgen.distributed.exchange import gathered, padded
from flashgen.distributed.gather import Units, token_rows
from flashgen.distributed.groups import check_device, flat_ranks, names_of
from flashgen.distributed.layouts import runs_of, tokens_of
from flashgen.distributed.model import bounds_of
from flashgen.distributed.segments import pieces_of
from flashgen.errors import BadParam, BadTensorShape, arg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from flashgen.distributed.layouts import Runs


def shard(
    x: Tensor,
    dim: int = 1,
    *,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's part of the dimension ``dim`` of a tensor that all ranks have whole. Nothing is sent.

    layout: "contiguous": one run of tokens. "zigzag": of 2 P chunks of P ranks, rank r has r and 2 P - 1 - r,
        which is even work under a causal mask; shards differ by one token at most. "documents": the same
        within each document of cu_seqlens, in tiles of 128 tokens, which is even work for packed documents;
        shards differ by about a tile. "whole_documents": the same within the longest documents alone. Each
        of the others is whole on one rank, so that work and tokens are even; such documents follow those
        that are cut. Otherwise the tokens of a shard ascend.
    """
    ranks = flat_ranks(names_of(group, mesh))
    runs = runs_of(layout, _bounds(cu_seqlens, x.shape[dim]), ranks.world)[ranks.rank]
    parts = [x.narrow(dim, run.begin, run.tokens) for run in runs]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def unshard(
    x: Tensor,
    dim: int = 1,
    *,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
) -> Tensor:
    """The whole tensor, on every rank, of shards: the way back of `shard`. All ranks have to call it.

    seqlen: how many tokens there are, where ranks do not have equally many and there is no cu_seqlens.

    Raises BadParam for a tensor that requires a gradient: each rank would have one of the whole.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise BadParam(f"{arg('x')} requires a gradient, which unshard does not record; pass x.detach()")
    ranks = flat_ranks(names_of(group, mesh))
    check_device(ranks, x, "x")
    if seqlen is None and cu_seqlens is None:
        seqlen = ranks.world * x.shape[dim]
    bounds = _bounds(cu_seqlens, seqlen)
    shards = runs_of(layout, bounds, ranks.world)
    if x.shape[dim] != tokens_of(shards[ranks.rank]):
        raise BadTensorShape(
            f"{arg('x')} has {x.shape[dim]} tokens in dimension {dim}; layout {layout!r} gives rank "
            f"{ranks.rank} of {ranks.world} {tokens_of(shards[ranks.rank])} of {bounds[-1]}"
        )
    units = _units(shards)
    rows = gathered(padded(x.movedim(dim, 0), units.most), ranks)
    return rows.index_select(0, token_rows(units, x.device)).movedim(0, dim)


@lru_cache(maxsize=4)
def _units(shards: tuple[Runs, ...]) -> Units:
    """The same units for the same shards, as caches look them up."""
    return Units(shards, 0)


def positions(
    seqlen: int | None = None,
    *,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: Any = None,
) -> Tensor:
    """The position of each token of this rank in its document, int64: what RoPE and position embeddings take.

    seqlen: the number of tokens of all ranks, one document; or cu_seqlens.
    """
    ranks = flat_ranks(names_of(group, mesh))
    cu = _bounds(cu_seqlens, seqlen)
    return torch.cat(
        [torch.empty(0, dtype=torch.int64, device=device)]
        + [
            torch.arange(piece.begin, piece.end, device=device)
            for piece in pieces_of(runs_of(layout, cu, ranks.world)[ranks.rank], cu)
        ]
    )


def _bounds(cu_seqlens: Any, seqlen: int | None) -> tuple[int, ...]:
    """The bounds of documents. Raises BadParam where they are missing, or contradict the length."""
    if cu_seqlens is None:
        if seqlen is None:
            raise BadParam(f"{arg('seqlen')} and {arg('cu_seqlens')} are None; pass one of them")
        return bounds_of(int(seqlen))
    bounds = bounds_of(cu_seqlens)
    if seqlen is not None and bounds[-1] != seqlen:
        raise BadParam(
            f"{arg('cu_seqlens')} ends at {bounds[-1]}, but there are {seqlen} tokens; make padding a "
            "document"
        )
    return bounds
