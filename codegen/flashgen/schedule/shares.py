"""Which KV blocks each thread block of a grid of `shares` computes: an equal share of the KV blocks of all
tiles, or the splits of the call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import BadTensorShape
from flashgen.families.features import HEAD_SETS
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.splits import AUTO, SplitEvery
from flashgen.schedule.grid import heads, tiles
from flashgen.schedule.visited import kv_blocks

if TYPE_CHECKING:
    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem

# Kernels number KV blocks in 32 bits, up to the end of the last thread block's share, which may be past the
# last KV block by one for each thread block.
MAX_KV_BLOCKS = 2**31 - 2**17
# The most sets of heads of a kernel that knows them, a power of two. Head h is in set h modulo their number.
# All sets are cut into the same shares, so neighbouring thread blocks go through the same keys of adjacent
# heads, whose rows are adjacent as well. Reading a single short row is slow.
MOST_HEAD_SETS = 4
# Bytes of a multiprocessor's shared memory that the driver keeps for each thread block.
RESERVED_SMEM = 1024


class Shares(NamedTuple):
    """The KV blocks of all tiles, one tile after the other, cut into shares of ``per_share`` KV blocks. The
    last share may have fewer. With several ``head_sets`` each set of heads is cut by itself.

    Each of ``tiles`` tiles has ``per_tile`` KV blocks, from KV block ``first`` of its sequence on. With
    ``at_most`` both numbers are bounds: only the kernel knows how many there are.

    With ``splits`` the kernel cuts each tile into at most this many splits of at least ``per_split`` KV
    blocks. Then ``per_share`` counts splits, of all heads.
    """

    tiles: int
    first: int
    per_tile: int
    per_share: int
    at_most: bool = False
    splits: int = 0
    per_split: int = 1
    head_sets: int = 1

    @property
    def kv_blocks(self) -> int:
        return self.tiles * self.per_tile

    @property
    def count(self) -> int:
        """The number of shares: one for each thread block."""
        return self.head_sets * self.of_a_set

    @property
    def of_a_set(self) -> int:
        """The number of shares of one set of heads."""
        numbered = self.tiles // self.head_sets * (self.splits or self.per_tile)
        return -(-numbered // self.per_share)

    @property
    def kv_blocks_of_largest(self) -> int:
        """KV blocks of the largest share."""
        return self.per_share * (-(-self.per_tile // self.splits) if self.splits else 1)

    @property
    def split(self) -> bool:
        """Whether some tile is split, or may be."""
        if self.splits:
            return self.splits > 1
        return self.of_a_set > 1 and (self.at_most or self.per_share % self.per_tile != 0)

    @property
    def parts(self) -> int:
        """The number of slots for parts of tiles: one for each split, or two for each thread block, whose
        share may begin within one tile and end within another.
        """
        return (self.tiles * self.splits or 2 * self.count) if self.split else 0

    def __str__(self) -> str:
        """In words."""
        most = "at most " if self.at_most else ""
        if not self.split:
            return f"{self.count} thread blocks; no tile is split"
        if self.splits:
            return (
                f"{self.count} thread blocks; each of {most}{self.tiles} tiles in {most}{self.splits} splits"
            )
        return f"{self.count} thread blocks, each with {most}{self.per_share} KV blocks of {self.tiles} tiles"


def countable(problem: Problem, variant: Variant) -> bool:
    """Whether a kernel can number the KV blocks of all tiles, or need not. For a call that must be invariant
    the answer is yes, because no other kernel may take it: `shares_of` raises instead.
    """
    return not variant.grid.shares or problem.invariant or _numbered(problem, variant) <= MAX_KV_BLOCKS


def shares_of(problem: Problem, variant: Variant, device: Device) -> Shares:
    """The shares of a grid on a device. Each tile has the KV blocks that some row of its head sees; if no row
    sees a key, it has one KV block, which is hidden.

    There are as many shares as thread blocks run at a time. Tiles stay whole if the largest share then has at
    most ``split_gain`` KV blocks more. A kernel that knows sets of heads has up to MOST_HEAD_SETS sets, as
    many as divide both the heads and these thread blocks. The thread blocks of a cluster have the same share
    of different sets. If the call fixes its splits, each split is a share, and the last split of a tile may
    reach past its KV blocks. If also only the kernel knows the lengths, a share has several splits.

    Raises BadTensorShape if there are too many KV blocks.
    """
    numbered = _numbered(problem, variant)
    if numbered > MAX_KV_BLOCKS:
        raise BadTensorShape(
            f"there are {numbered} KV blocks of {variant.visits.keys} keys in all tiles, and one "
            f"launch has at most {MAX_KV_BLOCKS}; split the batch"
        )
    room = max(1, min(variant.grid.blocks_per_sm, device.smem_per_sm // (variant.smem_bytes + RESERVED_SMEM)))
    cluster = variant.grid.cluster
    at_a_time = max(1, device.num_sms * room // cluster) * cluster
    count, begin, per_tile = _tiles_of(problem, variant)
    sets = math.gcd(heads(problem, variant), at_a_time, MOST_HEAD_SETS) if _has_head_sets(variant) else 1
    if problem.splits != AUTO:
        per_split, splits = _splits(problem, variant)
        if not problem.lengths_on_device:
            return Shares(count, begin, per_split * splits, per_split, head_sets=sets)
        least = per_split if isinstance(problem.splits, SplitEvery) else 1
        per_share = max(1, -(-count * splits // at_a_time))
        most = _most_blocks(problem, variant)
        return Shares(count, begin, most, per_share, at_most=True, splits=splits, per_split=least)
    equal = max(1, -(-count * per_tile // at_a_time))
    whole = max(1, -(-count // at_a_time)) * per_tile
    if problem.lengths_on_device:
        return Shares(count, begin, per_tile, equal, at_most=True, head_sets=sets)
    per_share = whole if whole <= equal + variant.grid.split_gain else equal
    return Shares(count, begin, per_tile, per_share, head_sets=sets)


def _has_head_sets(variant: Variant) -> bool:
    return HEAD_SETS in variant.features


def _numbered(problem: Problem, variant: Variant) -> int:
    """How many KV blocks the kernel numbers, including those past the end of a tile's last split."""
    if problem.splits == AUTO:
        tiles_of = _tiles_of(problem, variant)
        return tiles_of.count * tiles_of.kv_blocks
    return tiles(problem, variant) * math.prod(_splits(problem, variant))


class _Tiles(NamedTuple):
    """The number of tiles, and the first KV block and the number of KV blocks of each."""

    count: int
    first: int
    kv_blocks: int


def _tiles_of(problem: Problem, variant: Variant) -> _Tiles:
    begin, end = kv_blocks(problem, variant.visits.keys, 0, problem.sizes["seqlen_q"] - 1)
    return _Tiles(tiles(problem, variant), begin, max(1, end - begin))


def _splits(problem: Problem, variant: Variant) -> tuple[int, int]:
    """The KV blocks of a split, and the splits of a tile, by ``splits`` of the call."""
    blocks = _most_blocks(problem, variant)
    if isinstance(problem.splits, SplitEvery):
        per_split = min(blocks, problem.splits.keys // variant.visits.keys)
    else:
        per_split = -(-blocks // problem.splits)
        if problem.lengths_on_device:
            # A shorter sequence may have more splits than the longest: 3 KV blocks in 3 splits, 4 in 2.
            return per_split, min(blocks, problem.splits)
    return per_split, -(-blocks // per_split)


def _most_blocks(problem: Problem, variant: Variant) -> int:
    """The KV blocks of a tile; with lengths on the device the most that a tile can have."""
    if not problem.lengths_on_device:
        return _tiles_of(problem, variant).kv_blocks
    keys, block = problem.sizes["seqlen_kv"], variant.visits.keys
    most = max(1, -(-keys // block))
    if problem.window_left >= UNBOUNDED:
        return most
    window = problem.window_left + problem.sizes["seqlen_q"] + min(problem.window_right, keys)
    return max(1, min(most, -(-(window - 1) // block) + 1))
