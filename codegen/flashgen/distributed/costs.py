"""What a rank computes, moves and copies, in pairs of query and key and in bytes; and how many heads one step
gathers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from flashgen.distributed.layouts import TILE_ROWS, tokens_of
from flashgen.distributed.rates import H200
from flashgen.distributed.segments import by_rows, launches_of, pieces_of

if TYPE_CHECKING:
    from flashgen.distributed.heads import HeadShares
    from flashgen.distributed.layouts import Runs
    from flashgen.distributed.parts import Part
    from flashgen.distributed.rates import Rates
    from flashgen.distributed.segments import Visibility

_MULTIPROCESSORS = 132
# The rows of a tile, and how long a tile takes to begin, in keys.
_TILE, _START = 192, 240
# What a step costs, of both passes together: the gathers and the reduction of its heads, in gathers, and its
# last tiles, in times of a tile of the forward pass: eight steps took 29 ms longer than one on two H200.
_EXPOSED, _TAIL = 4.0, 2.5
# The most bytes of K and V that one step gathers.
_MOST_BYTES = 2 << 30


class RowSizes(NamedTuple):
    """The sizes of a token's rows of K and V: head dims, batch entries, and bytes of an element."""

    head_dim: int
    head_dim_v: int
    batch: int
    dtype_bytes: int

    @property
    def width(self) -> int:
        """Elements of K and V of one head."""
        return self.head_dim + self.head_dim_v

    @property
    def head_elements(self) -> int:
        """Elements of K and V of one head of all batch entries."""
        return self.batch * self.width


class Bytes(NamedTuple):
    """Bytes of the forward and of the backward pass."""

    forward: int
    backward: int


def work_of(runs: Runs, cu_seqlens: tuple[int, ...], visible: Visibility) -> float:
    """The (query, key) pairs of a rank with these runs, and the pairs that whole tiles of `_TILE` rows add:
    half a tile on each diagonal, `_START` keys for each tile, and rows of a tile that do not exist.
    """
    total = 0.0
    for x in pieces_of(runs, cu_seqlens):
        tiles = -(-(x.end - x.begin) // _TILE)
        beside = _START + _TILE / 2 * ((visible.left is not None) + (visible.right is not None))
        absent = tiles * _TILE - (x.end - x.begin)
        total += visible.pairs(x.begin, x.end, x.length) + tiles * _TILE * beside
        total += absent * visible.pairs(x.begin, x.begin + 1, x.length)
    return total


def copied_bytes(part: Part, visible: Visibility, packed: bool, of_row: int, of_sum: int) -> Bytes:
    """The bytes that a rank reads and writes in its own memory outside its kernels. K and V of a token have
    ``of_row`` bytes, their gradients in fp32 ``of_sum``.
    """
    launches = launches_of(part.own, part.cu_seqlens, visible, packed)
    tokens, own = part.cu_seqlens[-1], tokens_of(part.own)
    keys = sorted(x.k_end - x.k_begin for launch in launches for x in launch.segments)
    ordered = 2 * tokens * of_row
    added = 9 if by_rows(packed, launches) else 3
    sums = added * sum(keys if packed else keys[:-1]) + 3 * tokens + own
    of_keys = 2 * sum(keys) * of_row if packed else ordered
    return Bytes(2 * own * of_row + ordered, 2 * own * of_row + of_keys + sums * of_sum)


def exchanged_bytes(
    split: HeadShares, heads_q: int, sizes: RowSizes, tokens: int, other_tokens: int
) -> Bytes:
    """The bytes that exchanges of heads bring a rank. ``tokens`` are of the rank, ``other_tokens`` of the
    other ranks of its unit.
    """
    other_heads = heads_q - split.q_heads
    width = split.kv_heads * sizes.width
    sum_bytes = 4 if split.replicated else sizes.dtype_bytes
    forward = (
        other_tokens * (split.q_heads * sizes.head_dim + width) + tokens * other_heads * sizes.head_dim_v
    )
    backward = other_tokens * split.q_heads * sizes.head_dim_v + tokens * other_heads * sizes.head_dim
    of_sums = tokens * (split.inner - 1) * width * sum_bytes
    return Bytes(
        sizes.batch * forward * sizes.dtype_bytes, sizes.batch * (backward * sizes.dtype_bytes + of_sums)
    )


def heads_per_step(
    cu_seqlens: tuple[int, ...],
    unit_tokens: int,
    split: HeadShares,
    sizes: RowSizes,
    world: int,
    rates: Rates = H200,
) -> int:
    """How many kv heads one step gathers, the same on all ranks. More steps expose less of the gather, and
    each step leaves multiprocessors idle while its last tiles run. ``unit_tokens`` are of the largest unit.
    """
    total = cu_seqlens[-1]
    head_bytes = sizes.head_elements * sizes.dtype_bytes
    gather = (total - unit_tokens) * split.kv_heads * head_bytes / rates.link_gbps(world) / 1e6
    longest = max(end - begin for begin, end in pairwise(cu_seqlens))
    tile = 2.0 * TILE_ROWS * longest * sizes.width * _MULTIPROCESSORS / rates.forward_tflops / 1e9
    if not gather:
        return split.kv_heads

    def cost(count: int) -> float:
        steps = split.kv_heads / count
        return _EXPOSED * gather / steps + _TAIL * tile * steps

    counts = [count for count in range(1, split.kv_heads + 1) if split.kv_heads % count == 0]
    fitting = [count for count in counts if total * count * head_bytes <= _MOST_BYTES]
    return min(fitting or counts[:1], key=cost)
