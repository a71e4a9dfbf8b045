"""What a kernel author wants to know before there is a GPU: how much of the masked work is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.masks import visible_keys
from flashgen.schedule.grid import WARPGROUP_ROWS, heads, rows, rows_together, tiles

if TYPE_CHECKING:
    from flashgen.operators.attention import Problem
    from flashgen.simulator.execute import Report
    from flashgen.spec.variant import Variant

# Matrix instructions of a warp that one product takes, and the depth of one.
_PRODUCTS = {"fp16": (1, 16), "bf16": (1, 16), "fp32": (3, 8)}
# Of a warpgroup, one instruction takes the whole width of a product.
_WARPGROUP_DEPTH = 16


@dataclass(frozen=True, slots=True)
class MaskedTiles:
    """Tiles of the rows that a warp, or a warpgroup, has in one place and a block of keys: all, those of
    which every key is hidden, and those that were multiplied. Rows past the last one count as the last one.
    """

    total: int
    masked: int
    multiplied: float

    @property
    def skipped_share(self) -> float | None:
        """Skipped tiles as a share of the masked ones; None where nothing is masked."""
        return (self.total - self.multiplied) / self.masked if self.masked else None


def masked_tiles(problem: Problem, variant: Variant, mask: np.ndarray | None, report: Report) -> MaskedTiles:
    """What ``report`` says about the tiles of a forward kernel."""
    block_m, block_n = variant.tile_value("block_m"), variant.tile_value("block_n")
    if "warps" not in dict(variant.tile):
        parts, part_rows = block_m // WARPGROUP_ROWS, WARPGROUP_ROWS
        each = (variant.head_dim + block_n) // _WARPGROUP_DEPTH
    else:
        parts, part_rows = variant.tile_value("warps"), block_m // variant.tile_value("warps")
        if rows_together(variant) < block_m:  # a warp's rows lie in two places
            parts, part_rows = 2 * parts, part_rows // 2
        products, depth = _PRODUCTS[variant.dtype]
        # Q K^T and P V differ in size only as the head dims do.
        width = variant.head_dim + variant.head_dim_v
        each = products * (part_rows // 16) * (block_n // 8) * (width // depth)
    key_blocks = -(-problem.seqlen_kv // block_n)
    total = tiles(problem, variant) * parts * key_blocks
    seen = _seen(problem, variant, mask)
    row_count, keys = -(-seen.shape[1] // block_m) * block_m, key_blocks * block_n
    padded = np.zeros((seen.shape[0], row_count, keys), bool)
    padded[:, : seen.shape[1], : seen.shape[2]] = seen
    padded[:, seen.shape[1] :] = padded[:, seen.shape[1] - 1, None]
    by_tile = padded.reshape(seen.shape[0], row_count // part_rows, part_rows, key_blocks, block_n)
    visible = int(by_tile.any(axis=(2, 4)).sum())
    return MaskedTiles(total, total - visible, report.mma / each)


def _seen(problem: Problem, variant: Variant, mask: np.ndarray | None) -> np.ndarray:
    """Which keys each row of the grid's heads sees, bool (batch * heads, rows, seqlen_kv)."""
    shape = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
    visible = np.broadcast_to(visible_keys(problem, mask), shape)
    if variant.gqa == "packed":
        folded = visible.reshape(
            problem.batch, problem.num_heads_kv, problem.group_size, problem.seqlen_q, problem.seqlen_kv
        )
        visible = folded.swapaxes(2, 3)  # heads fastest
    return visible.reshape(problem.batch * heads(problem, variant), rows(problem, variant), problem.seqlen_kv)
