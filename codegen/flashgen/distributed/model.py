"""Partition: which rank computes and moves what, and how long that should take. Needs no GPU and no process
group.

The model: a rank computes at the rate of one GPU, and waits for the bytes that it receives at the rate of the
link, unless it computes meanwhile. Rows cost some keys more than they see, since tiles are whole. A gather
runs while the kernels compute the step before, so only the first step is exposed, and in the backward pass
the last reduction. Documents that a rank has whole hide one of the two: their kernels run during the first
step of the forward pass, and during the last reduction of the backward pass. Exchanges of heads are exposed,
and so are a rank's own copies before, between and after its kernels, and what the host does before the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.distributed.costs import (
    Bytes,
    RowSizes,
    copied_bytes,
    exchanged_bytes,
    heads_per_step,
    work_of,
)
from flashgen.distributed.heads import head_shares
from flashgen.distributed.layouts import TILE_ROWS, cuts_whole_tiles, shards_of, tokens_of, unit_of
from flashgen.distributed.parts import parts_of
from flashgen.distributed.rates import H200
from flashgen.distributed.segments import launches_of, pairs_of, visibility, whole_run
from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.distributed.heads import HeadShares
    from flashgen.distributed.layouts import Shard
    from flashgen.distributed.parts import Part
    from flashgen.distributed.rates import Rates
    from flashgen.distributed.segments import Visibility

METHODS = ("auto", "gather", "ulysses")
# How much faster than gather another method has to be to be chosen: gather gives the bits of one GPU.
_WORTH = 1.05


class Share(NamedTuple):
    """What one rank has, computes and receives. ``pairs`` are (query, key) pairs of one head, ``flops`` of
    the forward pass.
    """

    rank: int
    tokens: int
    launches: int
    segments: int
    pairs: int
    flops: float
    forward_bytes: int
    backward_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.rank:4} {self.tokens:10,} {self.segments:9} {self.pairs:12,} {self.flops / 1e9:8,.0f} "
            f"{self.forward_bytes / 1e6:8,.1f} {self.backward_bytes / 1e6:8,.1f}"
        )


class Times(NamedTuple):
    """Milliseconds of the slowest rank: its kernels, all that it receives, what of that is exposed, and
    compute and exposed together.
    """

    compute: float
    moving: float
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed


@dataclass(frozen=True)
class Partition:
    """The partition of a call over ``world`` ranks: ``outer`` units that gather, of ``inner`` ranks that
    exchange heads. ``one_gpu`` are the milliseconds of one GPU for the forward and the backward pass.
    ``whole_tiles`` is whether all cuts are at whole tiles, so a gather has the bits of one GPU.
    """

    method: str
    layout: str
    world: int
    outer: int
    inner: int
    tokens: int
    documents: int
    steps: int
    whole_tiles: bool
    shares: tuple[Share, ...]
    forward: Times
    backward: Times
    one_gpu: tuple[float, float]

    @property
    def total(self) -> float:
        """Milliseconds of both passes."""
        return self.forward.total + self.backward.total

    @property
    def balance(self) -> float:
        """The mean work of a rank over the largest; 1 is even."""
        most = max(share.flops for share in self.shares)
        return sum(share.flops for share in self.shares) / (self.world * most) if most else 1.0

    def __str__(self) -> str:
        shape = f" ({self.outer} x {self.inner})" if min(self.outer, self.inner) > 1 else ""
        documents = f"{self.documents:,} document{'s' * (self.documents != 1)}"
        cuts = "at whole tiles" if self.whole_tiles else f"within tiles of {TILE_ROWS} rows"
        lines = [
            f"{self.method}, layout {self.layout}: {self.tokens:,} tokens in {documents} over {self.world} "
            f"ranks{shape}",
            f"balance {self.balance:.3f}; K and V in {self.steps} step{'s' * (self.steps != 1)}; cuts {cuts}",
            _line("forward", self.forward, self.one_gpu[0]),
            _line("backward", self.backward, self.one_gpu[1]),
            "rank     tokens  segments        pairs    GFLOP   MB fwd   MB bwd",
        ]
        few = self.shares if self.world <= 16 else (*self.shares[:8], None, *self.shares[-4:])
        lines.extend("..." if share is None else str(share) for share in few)
        return "\n".join(lines)


def _line(name: str, times: Times, one_gpu: float) -> str:
    if not times.total:
        return f"{name:8}  nothing to do"
    return (
        f"{name:8}  {times.total:9.3f} ms = {times.compute:.3f} compute + {times.exposed:.3f} exposed of "
        f"{times.moving:.3f} moving; one GPU {one_gpu:.3f}, {one_gpu / times.total:.2f} x"
    )


def partition(
    cu_seqlens: int | Sequence[int],
    *,
    world: int,
    heads: tuple[int, int],
    head_dim: int = 128,
    head_dim_v: int | None = None,
    batch: int = 1,
    dtype_bytes: int = 2,
    layout: str = "zigzag",
    method: str = "auto",
    inner: int | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    kv_heads_per_step: int | None = None,
    rates: Rates = H200,
) -> Partition:
    """Who computes and moves what, of a call of ``attention``; print it.

    cu_seqlens: the bounds of packed documents, from 0 on, or the length of one sequence.
    world: the number of ranks. inner: with two dimensions, the ranks of the inner one, which exchange heads.
    heads: (num_heads_q, num_heads_kv).
    rates: of the GPU and its links; `H200` by default.
    The other arguments are as in ``attention``. Raises BadParam.
    """
    # Numbers and tuples: the cache has no use for lists and tensors.
    work = _Work(
        cu=bounds_of(cu_seqlens),
        world=int(world),
        heads=_heads_of(heads),
        sizes=RowSizes(head_dim, head_dim if head_dim_v is None else head_dim_v, batch, dtype_bytes),
        layout=layout,
        causal=causal,
        window_size=tuple(window_size),
        kv_heads_per_step=kv_heads_per_step,
    )
    return _partition(work, method, inner, rates)


def _heads_of(heads: Sequence[int]) -> tuple[int, int]:
    try:
        of_q, of_kv = map(int, heads)
    except (TypeError, ValueError):
        raise BadParam(f"{arg('heads')} is {shown(heads)}; expected (num_heads_q, num_heads_kv)") from None
    if of_q < 1 or of_kv < 1 or of_q % of_kv:
        raise BadParam(
            f"{arg('heads')} is {(of_q, of_kv)}; num_heads_q must be a positive multiple of num_heads_kv"
        )
    return of_q, of_kv


class _Work(NamedTuple):
    """The work of all ranks of a call together."""

    cu: tuple[int, ...]
    world: int
    heads: tuple[int, int]
    sizes: RowSizes
    layout: str
    causal: bool
    window_size: tuple[int, int]
    kv_heads_per_step: int | None

    @property
    def packed(self) -> bool:
        return len(self.cu) > 2

    @property
    def visible(self) -> Visibility:
        return visibility(self.causal, self.window_size)

    def flops(self, heads: int, pairs: float) -> float:
        """Of the forward pass of this many query heads, each with these (query, key) pairs."""
        return 2.0 * heads * self.sizes.head_elements * pairs


@lru_cache(maxsize=128)
def _partition(work: _Work, method: str, inner: int | None, rates: Rates) -> Partition:
    check_method(method)
    world = work.world
    if world < 1:
        raise BadParam(f"{arg('world')} is {world}; expected the number of ranks, 1 or more")
    if inner is not None:
        if inner < 1 or world % inner:
            raise BadParam(f"{arg('inner')} is {inner}; it must divide the {world} ranks of {arg('world')}")
        name = "gather" if inner == 1 else "ulysses" if inner == world else "gather x ulysses"
        return _modelled(name, world // inner, inner, work, rates)
    if method != "auto":
        shape = (world, 1) if method == "gather" else (1, world)
        return _modelled(method, *shape, work, rates)
    gather = _modelled("gather", world, 1, work, rates)
    if world == 1 or work.heads[0] % world:
        return gather
    ulysses = _modelled("ulysses", 1, world, work, rates)
    return ulysses if _WORTH * ulysses.total < gather.total else gather


def _modelled(method: str, outer: int, inner: int, work: _Work, rates: Rates) -> Partition:
    """The partition of one method: ``outer`` units of ``inner`` ranks."""
    split = head_shares(*work.heads, inner)
    shards = shards_of(work.layout, work.cu, work.world)
    units = tuple(unit_of(shards[i * inner : (i + 1) * inner], outer == 1) for i in range(outer))
    steps = _steps(parts_of(units, 0, work.cu)[0], split, work, rates) if any(x.cut for x in units) else 1
    ranks = [_rank_of(rank, shards, units, split, work) for rank in range(work.world)]
    costs = [cost for _, cost in ranks]
    slowest = _Cost(*map(max, zip(*costs, strict=True)))._replace(alone=min(cost.alone for cost in costs))
    forward, backward = _times(slowest, steps, split, work, rates)
    one_gpu = work.flops(work.heads[0], work_of(whole_run(work.cu), work.cu, work.visible))
    return Partition(
        method=method,
        layout=work.layout,
        world=work.world,
        outer=outer,
        inner=inner,
        tokens=work.cu[-1],
        documents=len(work.cu) - 1,
        steps=steps,
        whole_tiles=cuts_whole_tiles((unit.runs for unit in units), work.cu),
        shares=tuple(share for share, _ in ranks),
        forward=forward,
        backward=backward,
        one_gpu=(rates.forward_ms(one_gpu), rates.backward_ms(one_gpu)),
    )


def _steps(part: Part, split: HeadShares, work: _Work, rates: Rates) -> int:
    """In how many steps units gather the kv heads of a part."""
    per_step = work.kv_heads_per_step
    if not per_step:
        most = max(map(tokens_of, part.runs))
        per_step = heads_per_step(part.cu_seqlens, most, split, work.sizes, work.world, rates)
    return math.ceil(split.kv_heads / per_step)


class _Cost(NamedTuple):
    """What a rank computes, (query, key) pairs with what tiles add; how many of these pairs are of documents
    that it has ``alone``; and the bytes that it receives, or copies in its own memory.
    """

    work: float
    alone: float
    gathered: int
    reduced: int
    exchanged: int
    exchanged_back: int
    copied: int
    copied_back: int


def _rank_of(
    rank: int, shards: tuple[Shard, ...], units: tuple[Shard, ...], split: HeadShares, work: _Work
) -> tuple[Share, _Cost]:
    """The share of a rank, and what it costs."""
    place = rank // split.inner
    unit, tokens = units[place], tokens_of(shards[rank].runs)
    parts = parts_of(units, place, work.cu)
    launches = [
        x for part in parts for x in launches_of(part.own, part.cu_seqlens, work.visible, work.packed)
    ]
    pairs = pairs_of(unit.runs, work.cu, work.visible)
    moved, cut = sum(tokens_of(x.cut) for x in units), tokens_of(unit.cut)
    row = split.kv_heads * work.sizes.head_elements
    row_bytes, sum_bytes = row * work.sizes.dtype_bytes, row * 4
    copied = copied_bytes(parts[0], work.visible, work.packed, row_bytes, sum_bytes) if moved else Bytes(0, 0)
    exchanged = exchanged_bytes(split, work.heads[0], work.sizes, tokens, tokens_of(unit.runs) - tokens)
    cost = _Cost(
        work=work_of(unit.runs, work.cu, work.visible),
        alone=work_of(unit.whole, work.cu, work.visible),
        gathered=(moved - cut) * row_bytes,
        reduced=(len(units) - 1) * cut * sum_bytes,
        exchanged=exchanged.forward,
        exchanged_back=exchanged.backward,
        copied=copied.forward,
        copied_back=copied.backward,
    )
    share = Share(
        rank=rank,
        tokens=tokens,
        launches=len(launches),
        segments=sum(len(x.segments) for x in launches),
        pairs=pairs,
        flops=work.flops(split.q_heads, pairs),
        forward_bytes=cost.gathered + cost.exchanged,
        backward_bytes=cost.gathered + cost.reduced + cost.exchanged_back,
    )
    return share, cost


def _times(slowest: _Cost, steps: int, split: HeadShares, work: _Work, rates: Rates) -> tuple[Times, Times]:
    """The times of both passes, of a rank with the largest cost of each kind."""
    latency = 1e-3 * rates.collective_us
    outside, inside = rates.link_gbps(work.world), rates.link_gbps(split.inner)
    moves = slowest.gathered > 0 or slowest.reduced > 0
    gather, reduction = (
        size / outside / 1e6 + latency * steps * moves for size in (slowest.gathered, slowest.reduced)
    )
    exchange, exchange_back = (
        size / inside / 1e6 + latency * (split.inner > 1)
        for size in (slowest.exchanged, slowest.exchanged_back)
    )
    flops, alone = (work.flops(split.q_heads, pairs) for pairs in (slowest.work, slowest.alone))
    compute, compute_back = rates.forward_ms(flops), rates.backward_ms(flops)
    alone, alone_back = rates.forward_ms(alone), rates.backward_ms(alone)
    copied, copied_back = (x / rates.memory_gbps / 1e6 for x in (slowest.copied, slowest.copied_back))
    first, last = gather / steps, reduction / steps
    host = 1e-3 * rates.host_us * (work.world > 1)
    exposed = host + max(0.0, first + copied - alone) + max(0.0, gather - first - (compute - alone))
    exposed_back = host + copied_back + first + max(0.0, last - alone_back)
    exposed_back += max(0.0, gather - first + reduction - last - (compute_back - alone_back))
    return (
        Times(compute, gather + exchange, exposed + exchange),
        Times(compute_back, gather + reduction + exchange_back, exposed_back + exchange_back),
    )


def check_method(method: Any) -> None:
    """Raise BadParam for a method that does not exist."""
    if method == "ring":
        raise BadParam(
            f"{arg('method')} is 'ring', which flashgen lacks: partial results would be rounded at each hop; "
            "'gather' and 'ulysses' can compute all that it could"
        )
    if not isinstance(method, str) or method not in METHODS:
        raise BadParam(f"{arg('method')} is {shown(method)}; allowed are {', '.join(map(repr, METHODS))}")


def bounds_of(cu_seqlens: Any) -> tuple[int, ...]:
    """The bounds of documents, from a length, a list, or a tensor. Raises BadParam."""
    try:
        values = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
        bounds = (0, int(values)) if isinstance(values, int) else tuple(map(int, values))
    except (TypeError, ValueError):
        raise BadParam(
            f"{arg('cu_seqlens')} is {shown(cu_seqlens)}; expected the bounds of all documents, from 0 "
            "on, or a length"
        ) from None
    ascending = all(x <= y for x, y in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or not ascending:
        raise BadParam(
            f"{arg('cu_seqlens')} has {len(bounds)} bounds, from {bounds[0] if bounds else 'nothing'} on; "
            "expected 0, then the end of each document in ascending order"
        )
    return bounds
