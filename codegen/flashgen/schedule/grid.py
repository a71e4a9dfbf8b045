"""How a variant's grid cuts a problem: tiles, row blocks and heads, read from what its spec says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import BadTensorShape

if TYPE_CHECKING:
    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem

MAX_BLOCKS = 2**31 - 1
# Of a dimension of a grid: kernels count rows in 32 bits, the empty rows after the last row included.
MAX_EXTENT = 2**30 - 4096
ROWS, HEADS = "query_rows", "heads"
KEYS, KV_HEADS = "key_rows", "kv_heads"
# The rows of all sequences, for a dimension of the grid that is the rows of one.
_OF_SEQUENCES = {ROWS: "sequence_rows", KEYS: "sequence_keys"}


class Launch(NamedTuple):
    """A one-dimensional launch: blocks, threads of a block, dynamic shared memory of a block in bytes, and
    blocks of a cluster.
    """

    blocks: int
    threads: int
    smem_bytes: int
    cluster: int = 1

    def __str__(self) -> str:
        blocks = f"{self.blocks:,} thread block{'s' * (self.blocks != 1)} of {self.threads} threads"
        if self.cluster > 1:
            blocks += f" in clusters of {self.cluster}"
        return f"{blocks}, {self.smem_bytes:,} bytes of shared memory" if self.smem_bytes else blocks


def extents(problem: Problem, variant: Variant) -> dict[str, int]:
    """The size of each dimension that a grid of the variant may cover."""
    return problem.grid_extents(problem.operator.axis_values(dict(variant.axes)))


def rows(problem: Problem, variant: Variant) -> int:
    """Rows that the tiles of a (batch, head) cover: queries, in packed GQA once for each head of a group."""
    return extents(problem, variant)[ROWS]


def heads(problem: Problem, variant: Variant) -> int:
    """Heads of the grid: query heads, in packed GQA kv heads; 1 where the operator's grids have no heads."""
    return extents(problem, variant).get(HEADS, 1)


def all_heads(problem: Problem, variant: Variant, parts: int = 1) -> int:
    """Heads of the grid over the batch: kv heads where the grid covers these, each counted once for each of
    the ``parts`` into which its query heads are split.
    """
    sizes = extents(problem, variant)
    return parts * sizes["batch"] * sizes.get(KV_HEADS if variant.grid.tile(KV_HEADS) else HEADS, 1)


def row_blocks(problem: Problem, variant: Variant) -> int:
    """Tiles of one (batch, head) along the first dimension that the grid covers; in whole clusters, where
    these have several tiles.
    """
    dimension, tile = variant.grid.covers[0]
    whole = 1 if variant.grid.shared_tiles or variant.grid.shares else variant.grid.cluster
    return -(-extents(problem, variant)[dimension] // (tile * whole)) * whole


def tiles(problem: Problem, variant: Variant) -> int:
    """Tiles of the grid, without those beside them. In a grid of sequences they are the most that there can
    be: each sequence has one that is not whole, or a cluster that is not.
    """
    sizes = extents(problem, variant)
    further = (-(-sizes[dimension] // tile) for dimension, tile in variant.grid.covers[1:])
    count = row_blocks(problem, variant) * math.prod(further)
    if variant.grid.of_sequences:
        (dimension, tile), (of_heads, _), (sequences, _) = variant.grid.covers
        cluster = variant.grid.cluster
        whole = sizes[_OF_SEQUENCES[dimension]] // (tile * cluster)
        count = min(count, (whole + sizes[sequences]) * cluster * sizes[of_heads])
    return count


def lengths_differ(problem: Problem, variant: Variant) -> bool:
    """Whether sequences, whose lengths are on the device, are to be expected to differ by more than a tile:
    where the longest one may be half a tile, or cluster, longer than the mean.
    """
    if not variant.grid.of_sequences:
        return False
    sizes = extents(problem, variant)
    dimension, tile = variant.grid.covers[0]
    spare = sizes["batch"] * sizes[dimension] - sizes[_OF_SEQUENCES[dimension]]
    return 2 * spare > sizes["batch"] * tile * variant.grid.cluster


def expected_tiles(problem: Problem, variant: Variant) -> float:
    """About how many tiles of the grid have work. Where lengths differ, the last tile of a sequence, or its
    last cluster, is taken to be half full.
    """
    count = tiles(problem, variant)
    if not lengths_differ(problem, variant):
        return count
    sizes = extents(problem, variant)
    (dimension, tile), (of_heads, _), _ = variant.grid.covers
    cluster, batch = variant.grid.cluster, sizes["batch"]
    clusters = max(batch, sizes[_OF_SEQUENCES[dimension]] / (tile * cluster) + batch / 2)
    return min(count, clusters * cluster * sizes[of_heads])


def tiles_beside(problem: Problem, variant: Variant) -> int:
    """Tiles of the second kind; 0 where the grid has none."""
    if not variant.grid.beside:
        return 0
    sizes = extents(problem, variant)
    return math.prod(-(-sizes[dimension] // tile) for dimension, tile in variant.grid.beside)


def blocks_of_kinds(variant: Variant, count: float, beside: float) -> float:
    """Thread blocks of ``count`` tiles and those ``beside`` them: one for each, or for one of each kind."""
    return max(count, beside) if variant.grid.kinds == 2 else count + beside


def row_blocks_beside(problem: Problem, variant: Variant) -> int:
    """`row_blocks` of the second kind of tiles; 0 where the grid has none."""
    if not variant.grid.beside:
        return 0
    dimension, tile = variant.grid.beside[0]
    return -(-extents(problem, variant)[dimension] // tile)


def rows_ahead(problem: Problem, variant: Variant) -> int:
    """Rows of a head's first tile that are before the head's first row, if tiles are counted from its last
    row.

    Tiles then end with the head's last unit of ``from_last_row`` rows, so the ragged tile is the first one,
    which has the fewest keys. 0 where units would split the rows of a query, as in packed GQA with a group
    size that does not divide them.
    """
    unit = variant.grid.from_last_row
    if not unit:
        return 0
    count, tile = rows(problem, variant), variant.grid.tile(ROWS)
    group = count // problem.sizes["seqlen_q"] if count else 1
    if unit % group:
        return 0
    return row_blocks(problem, variant) * tile - -(-count // unit) * unit


def blocks_at_a_time(variant: Variant, device: Device) -> int:
    """Thread blocks that run together on the GPU, the most of a persistent grid."""
    return device.num_sms * variant.grid.blocks_per_sm


def launchable(problem: Problem, variant: Variant) -> bool:
    """Whether one launch has room for the grid, as far as the call decides it: without parts of groups."""
    return variant.grid.shares or _blocks(problem, variant) <= MAX_BLOCKS


def launch_of(
    problem: Problem, variant: Variant, device: Device, num_shares: int = 0, parts: int = 1
) -> Launch:
    """One block for each tile, or for a tile of each kind, or, where clusters share tiles, one cluster. With
    a persistent schedule, no more than run at a time; in a grid of shares, one for each of ``num_shares``. A
    step that splits groups of query heads into ``parts`` has one for each tile and part.

    Raises BadTensorShape when there are more tiles, or thread blocks of clusters that share them, than a grid
    can have.
    """
    if variant.grid.shares:
        return Launch(num_shares, variant.threads, variant.smem_bytes, variant.grid.cluster)
    blocks = _blocks(problem, variant, parts)
    if blocks > MAX_BLOCKS:
        sizes = ", ".join(f"{name} {size}" for name, size in problem.sizes.items())
        unit = "thread blocks" if variant.grid.shared_tiles else "tiles"
        raise BadTensorShape(
            f"{sizes} make {blocks} {unit}, and one launch has at most {MAX_BLOCKS}; split the batch"
        )
    if variant.grid.persistent:
        blocks = min(blocks, blocks_at_a_time(variant, device))
    return Launch(blocks, variant.threads, variant.smem_bytes, variant.grid.cluster)


def _blocks(problem: Problem, variant: Variant, parts: int = 1) -> int:
    """Thread blocks of a grid that has one for each tile, for one tile of each kind, or a cluster."""
    blocks = tiles(problem, variant) * (parts if variant.grid.part_time else 1)
    blocks = int(blocks_of_kinds(variant, blocks, tiles_beside(problem, variant)))
    return blocks * variant.grid.cluster if variant.grid.shared_tiles else blocks
