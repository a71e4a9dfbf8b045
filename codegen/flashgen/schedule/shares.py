"""Equal shares of the KV blocks of all tiles: what the thread blocks of a grid of shares do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import BadTensorShape
from flashgen.schedule.grid import tiles
from flashgen.schedule.visited import kv_blocks

if TYPE_CHECKING:
    from flashgen.arch import Device
    from flashgen.operators.operator import Problem
    from flashgen.spec.variant import Variant

# Kernels number KV blocks in 32 bits.
MAX_KV_BLOCKS = 2**31 - 1
# Of a multiprocessor's shared memory, what the driver keeps for each thread block.
RESERVED_SMEM = 1024


class Shares(NamedTuple):
    """The KV blocks of all tiles, one tile after the other, cut into shares of ``per_share``, the last of
    which may have fewer. Each of ``tiles`` tiles has ``per_tile`` of them, from KV block ``first`` of its
    sequence on. Where ``at_most``, only the kernel knows how many there are: no more than these.
    """

    tiles: int
    first: int
    per_tile: int
    per_share: int
    at_most: bool = False

    @property
    def kv_blocks(self) -> int:
        return self.tiles * self.per_tile

    @property
    def count(self) -> int:
        """Shares, each a thread block's."""
        return -(-self.kv_blocks // self.per_share)

    @property
    def split(self) -> bool:
        """Whether some share begins within a tile, or may do so."""
        return self.count > 1 and (self.at_most or self.per_share % self.per_tile != 0)

    @property
    def parts(self) -> int:
        """Slots for parts of tiles: two for each thread block, as its share may begin and end in a tile."""
        return 2 * self.count if self.split else 0


def countable(problem: Problem, variant: Variant) -> bool:
    """Whether a kernel can number the KV blocks of all tiles, or has no need to."""
    return not variant.grid.shares or math.prod(_tiles_and_blocks(problem, variant)[::2]) <= MAX_KV_BLOCKS


def shares_of(problem: Problem, variant: Variant, device: Device) -> Shares:
    """The shares of a grid on a device. All tiles have the KV blocks that some row of their head sees, and
    one, all hidden, where there is none.

    There are as many shares as thread blocks run at a time, unless whole tiles give the largest share no more
    than ``split_gain`` KV blocks above that. Raises BadTensorShape where there are too many KV blocks.
    """
    count, begin, per_tile = _tiles_and_blocks(problem, variant)
    if not countable(problem, variant):
        raise BadTensorShape(
            f"there are {count * per_tile} KV blocks of {variant.visits.keys} keys in all tiles, and one "
            f"launch has at most {MAX_KV_BLOCKS}; split the batch"
        )
    room = max(1, min(variant.grid.blocks_per_sm, device.smem_per_sm // (variant.smem_bytes + RESERVED_SMEM)))
    at_a_time = device.num_sms * room
    equal = max(1, -(-count * per_tile // at_a_time))
    whole = max(1, -(-count // at_a_time)) * per_tile
    if problem.lengths_on_device:
        return Shares(count, begin, per_tile, equal, at_most=True)
    per_share = whole if whole <= equal + variant.grid.split_gain else equal
    return Shares(count, begin, per_tile, per_share)


def _tiles_and_blocks(problem: Problem, variant: Variant) -> tuple[int, int, int]:
    """Tiles, the KV block with which each begins, and the KV blocks of each."""
    begin, end = kv_blocks(problem, variant.visits.keys, 0, problem.sizes["seqlen_q"] - 1)
    return tiles(problem, variant), begin, max(1, end - begin)
