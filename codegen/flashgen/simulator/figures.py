"""What a kernel author wants to know before there is a GPU: how much of the masked work is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.masks import visible_keys
from flashgen.schedule.grid import ROWS, heads, rows, tiles

if TYPE_CHECKING:
    from flashgen.operators.attention import AttentionProblem
    from flashgen.simulator.execute import Report
    from flashgen.spec.variant import Variant


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


def masked_tiles(
    problem: AttentionProblem, variant: Variant, mask: np.ndarray | None, report: Report
) -> MaskedTiles:
    """What ``report`` says about the tiles of a forward kernel."""
    visits, block_m = variant.visits, variant.grid.tile(ROWS)
    block_n, part_rows = visits.keys, visits.mma_rows
    key_blocks = -(-problem.seqlen_kv // block_n)
    total = tiles(problem, variant) * (block_m // part_rows) * key_blocks
    seen = _seen(problem, variant, mask)
    row_count, keys = -(-seen.shape[1] // block_m) * block_m, key_blocks * block_n
    padded = np.zeros((seen.shape[0], row_count, keys), bool)
    padded[:, : seen.shape[1], : seen.shape[2]] = seen
    padded[:, seen.shape[1] :] = padded[:, seen.shape[1] - 1, None]
    by_tile = padded.reshape(seen.shape[0], row_count // part_rows, part_rows, key_blocks, block_n)
    visible = int(by_tile.any(axis=(2, 4)).sum())
    return MaskedTiles(total, total - visible, report.mma / visits.mma)


def _seen(problem: AttentionProblem, variant: Variant, mask: np.ndarray | None) -> np.ndarray:
    """Which keys each row of the grid's heads sees, bool (batch * heads, rows, seqlen_kv)."""
    shape = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
    visible = np.broadcast_to(visible_keys(problem, mask), shape)
    if variant.gqa == "packed":
        folded = visible.reshape(
            problem.batch, problem.num_heads_kv, problem.group_size, problem.seqlen_q, problem.seqlen_kv
        )
        visible = folded.swapaxes(2, 3)  # heads fastest
    return visible.reshape(problem.batch * heads(problem, variant), rows(problem, variant), problem.seqlen_kv)
