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

from flashgen.distributed.heads import HeadShares, head_shares
from flashgen.distributed.layouts import TILE_ROWS, cuts_whole_tiles, shards_of, tokens_of, unit_of
from flashgen.distributed.parts import parts_of
from flashgen.distributed.segments import by_rows, launches_of, pairs_of, pieces_of, visibility, whole_run
from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.distributed.layouts import Runs
    from flashgen.distributed.parts import Part
    from flashgen.distributed.segments import Visibility

METHODS = ("auto", "gather", "ulysses")
# The backward pass has five matrix products, the forward pass two.
_BACKWARD_WORK = 2.5
# How much faster than gather another method has to be to be chosen: gather gives the bits of one GPU.
_WORTH = 1.05
_MULTIPROCESSORS = 132
# The rows of a tile, and how long a tile takes to begin, in keys.
_TILE, _START = 192, 240
# What a step costs, of both passes together: the gathers and the reduction of its heads, in gathers, and its
# last tiles, in times of a tile of the forward pass: eight steps took 29 ms longer than one on two H200.
_EXPOSED, _TAIL = 4.0, 2.5
# The most bytes of K and V that one step gathers.
_MOST_BYTES = 2 << 30


class Rates(NamedTuple):
    """Rates of one GPU in bf16, and of its links in a direction. The defaults were measured on H200: causal
    attention of 131,072 tokens, heads 32 and 8 of 128, and collectives of 256 MiB on two GPUs. A GPU that is
    not yet at its power limit computes at up to the ``cool`` rates, which fade with ``cool_ms``. ``host_us``
    is how long a GPU waits for the host at the begin of a call, in a row of calls.
    """

    forward_tflops: float = 690.0
    backward_tflops: float = 605.0
    inside_gbps: float = 250.0
    between_gbps: float = 50.0
    ranks_per_node: int = 8
    collective_us: float = 30.0
    cool_forward_tflops: float = 840.0
    cool_backward_tflops: float = 730.0
    cool_ms: float = 40.0
    memory_gbps: float = 3000.0
    host_us: float = 100.0

    def forward_ms(self, flops: float) -> float:
        """How long forward kernels compute."""
        return self._ms(flops, self.forward_tflops, self.cool_forward_tflops)

    def backward_ms(self, flops: float) -> float:
        """How long backward kernels compute, of the flops of the forward pass."""
        return self._ms(_BACKWARD_WORK * flops, self.backward_tflops, self.cool_backward_tflops)

    def _ms(self, flops: float, tflops: float, cool_tflops: float) -> float:
        ms = flops / tflops / 1e9
        return ms / (1 + max(0.0, cool_tflops / tflops - 1) * math.exp(-ms / self.cool_ms))


H200 = Rates()


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
        head_dims=(head_dim, head_dim if head_dim_v is None else head_dim_v),
        batch=batch,
        dtype_bytes=dtype_bytes,
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
    head_dims: tuple[int, int]
    batch: int
    dtype_bytes: int
    layout: str
    causal: bool
    window_size: tuple[int, int]
    kv_heads_per_step: int | None


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
    return ulysses if _WORTH * _both(ulysses) < _both(gather) else gather


def _both(part: Partition) -> float:
    return part.forward.total + part.backward.total


def _modelled(method: str, outer: int, inner: int, work: _Work, rates: Rates) -> Partition:
    """The partition of one method: ``outer`` units of ``inner`` ranks."""
    cu, world, heads, head_dims, batch, dtype_bytes, layout, causal, window_size, kv_heads_per_step = work
    split = head_shares(*heads, inner)
    visible = visibility(causal, window_size)
    shards = shards_of(layout, cu, world)
    dim, dim_v = head_dims
    total, packed = cu[-1], len(cu) > 2
    units = tuple(unit_of(shards[i * inner : (i + 1) * inner], outer == 1) for i in range(outer))
    moved = sum(tokens_of(unit.cut) for unit in units)

    def per_step(part: Part) -> int:
        most = max(map(tokens_of, part.runs))
        return heads_per_step(part.cu_seqlens, most, split, head_dims, batch, dtype_bytes, world, rates)

    row = batch * split.kv_heads * (dim + dim_v)
    of_pair = 2.0 * batch * split.q_heads * (dim + dim_v)
    shares, steps = [], 1
    most = _Most()
    alone = math.inf
    for rank in range(world):
        unit = rank // inner
        runs, tokens, of_unit = units[unit].runs, tokens_of(shards[rank].runs), tokens_of(units[unit].runs)
        parts = parts_of(units, unit, cu)
        launches = [x for part in parts for x in launches_of(part.own, part.cu_seqlens, visible, packed)]
        pairs = pairs_of(runs, cu, visible)
        cut = tokens_of(units[unit].cut)
        gathered = (moved - cut) * row * dtype_bytes
        reduced = (outer - 1) * cut * row * 4
        local = [0, 0]
        if moved:
            steps = math.ceil(split.kv_heads / (kv_heads_per_step or per_step(parts[0])))
            local = copied_bytes(parts[0], visible, packed, row * dtype_bytes, row * 4)
        alone = min(alone, work_of(units[unit].whole, cu, visible))
        forward, backward = exchanged_bytes(
            split, heads[0], head_dims, batch, dtype_bytes, tokens, of_unit - tokens
        )
        work = work_of(runs, cu, visible)
        most = _Most(*map(max, most, (work, gathered, reduced, forward, backward, *local)))
        shares.append(
            Share(
                rank,
                tokens,
                len(launches),
                sum(len(x.segments) for x in launches),
                pairs,
                of_pair * pairs,
                gathered + forward,
                gathered + reduced + backward,
            )
        )
    outside = rates.between_gbps if world > rates.ranks_per_node else rates.inside_gbps
    inside = rates.between_gbps if inner > rates.ranks_per_node else rates.inside_gbps
    latency = 1e-3 * rates.collective_us
    gather, reduction = (
        size / outside / 1e6 + latency * steps * (moved > 0) for size in (most.gathered, most.reduced)
    )
    exchange = [size / inside / 1e6 + latency * (inner > 1) for size in (most.exchanged, most.exchanged_back)]
    passes = rates.forward_ms, rates.backward_ms
    compute, compute_back = (of_pass(of_pair * most.work) for of_pass in passes)
    # Of documents that no rank waits for.
    alone, alone_back = (of_pass(of_pair * alone) for of_pass in passes)
    first, last = gather / steps, reduction / steps
    host = 1e-3 * rates.host_us * (world > 1)
    exposed = host + max(0.0, first + most.copied / rates.memory_gbps / 1e6 - alone)
    exposed += max(0.0, gather - first - (compute - alone))
    exposed_back = host + most.copied_back / rates.memory_gbps / 1e6 + first + max(0.0, last - alone_back)
    exposed_back += max(0.0, gather - first + reduction - last - (compute_back - alone_back))
    one_gpu = 2.0 * work_of(whole_run(cu), cu, visible) * batch * heads[0] * (dim + dim_v)
    return Partition(
        method,
        layout,
        world,
        outer,
        inner,
        total,
        len(cu) - 1,
        steps,
        cuts_whole_tiles((unit.runs for unit in units), cu),
        tuple(shares),
        Times(compute, gather + exchange[0], exposed + exchange[0]),
        Times(compute_back, gather + reduction + exchange[1], exposed_back + exchange[1]),
        tuple(of_pass(one_gpu) for of_pass in passes),
    )


class _Most(NamedTuple):
    """The most of any rank: (query, key) pairs with what tiles add, and bytes that it receives or copies in
    its own memory.
    """

    work: float = 0.0
    gathered: int = 0
    reduced: int = 0
    exchanged: int = 0
    exchanged_back: int = 0
    copied: int = 0
    copied_back: int = 0


def work_of(runs: Runs, cu_seqlens: tuple[int, ...], visible: Visibility) -> float:
    """The (query, key) pairs of a rank with these runs, and those that whole tiles of `_TILE` rows add: on
    each diagonal half a tile, `_START` keys for a tile, and rows of the first tile that do not exist.
    """
    total = 0.0
    for x in pieces_of(runs, cu_seqlens):
        tiles = -(-(x.end - x.begin) // _TILE)
        beside = _START + _TILE / 2 * ((visible.left is not None) + (visible.right is not None))
        absent = tiles * _TILE - (x.end - x.begin)
        total += visible.pairs(x.begin, x.end, x.length) + tiles * _TILE * beside
        total += absent * visible.pairs(x.begin, x.begin + 1, x.length)
    return total


def copied_bytes(part: Part, visible: Visibility, packed: bool, of_row: int, of_sum: int) -> tuple[int, int]:
    """The bytes that a rank reads and writes in its own memory beside its kernels, forward and backward:
    ``of_row`` of K and V of a token, ``of_sum`` of its gradients in fp32.
    """
    launches = launches_of(part.own, part.cu_seqlens, visible, packed)
    tokens, own = part.cu_seqlens[-1], tokens_of(part.own)
    keys = sorted(x.k_end - x.k_begin for launch in launches for x in launch.segments)
    ordered = 2 * tokens * of_row
    added = 9 if by_rows(packed, launches) else 3
    sums = added * sum(keys if packed else keys[:-1]) + 3 * tokens + own
    of_keys = 2 * sum(keys) * of_row if packed else ordered
    return 2 * own * of_row + ordered, 2 * own * of_row + of_keys + sums * of_sum


def exchanged_bytes(
    split: HeadShares,
    heads_q: int,
    head_dims: tuple[int, int],
    batch: int,
    dtype_bytes: int,
    tokens: int,
    other_tokens: int,
) -> tuple[int, int]:
    """What exchanges of heads bring a rank in the forward and in the backward pass, in bytes. ``tokens`` are
    of the rank, ``other_tokens`` of the others in its unit.
    """
    dim, dim_v = head_dims
    other_heads = heads_q - split.q_heads
    others = split.inner - 1
    width = split.kv_heads * (dim + dim_v)
    sums = 4 if split.replicated else dtype_bytes
    forward = other_tokens * (split.q_heads * dim + width) + tokens * other_heads * dim_v
    backward = (other_tokens * split.q_heads * dim_v + tokens * other_heads * dim) * dtype_bytes
    return batch * forward * dtype_bytes, batch * (backward + tokens * others * width * sums)


def heads_per_step(
    cu_seqlens: tuple[int, ...],
    unit_tokens: int,
    split: HeadShares,
    head_dims: tuple[int, int],
    batch: int,
    dtype_bytes: int,
    world: int,
    rates: Rates = H200,
) -> int:
    """How many kv heads one step gathers. More steps expose less of the gather, and each one leaves
    multiprocessors idle while its last tiles run. ``unit_tokens`` are of the largest unit. The same on all
    ranks.
    """
    total, width = cu_seqlens[-1], sum(head_dims)
    head_bytes = batch * width * dtype_bytes
    link = rates.between_gbps if world > rates.ranks_per_node else rates.inside_gbps
    gather = (total - unit_tokens) * split.kv_heads * head_bytes / link / 1e6
    longest = max(end - begin for begin, end in pairwise(cu_seqlens))
    tile = 2.0 * TILE_ROWS * longest * width * _MULTIPROCESSORS / rates.forward_tflops / 1e9
    if not gather:
        return split.kv_heads

    def cost(count: int) -> float:
        steps = split.kv_heads / count
        return _EXPOSED * gather / steps + _TAIL * tile * steps

    counts = [count for count in range(1, split.kv_heads + 1) if split.kv_heads % count == 0]
    fitting = [count for count in counts if total * count * head_bytes <= _MOST_BYTES]
    return min(fitting or counts[:1], key=cost)


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
