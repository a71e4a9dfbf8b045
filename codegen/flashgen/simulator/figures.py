"""What a kernel author wants to know before there is a GPU: how much of the masked work is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.masks import visible_keys
from flashgen.schedule.grid import ROWS, heads, row_blocks, rows, rows_ahead
from flashgen.schedule.visited import idles

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.simulator.execute import Report


@dataclass(frozen=True, slots=True)
class MaskedTiles:
    """Tiles of a warp's or a warpgroup's adjacent rows and a block of keys: all tiles, tiles whose every key
    is hidden, and tiles that were multiplied. A row past the last one sees the keys of the last row, but
    nothing under a dense mask and in parts of a tile that idle.
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
    key_blocks = -(-problem.seqlen_kv // visits.keys)
    seen = _seen(problem, variant, mask)
    # The row of each place in the tiles of a head: the first tile may begin before row 0.
    places = np.arange(row_blocks(problem, variant) * block_m) - rows_ahead(problem, variant)
    padded = np.zeros((seen.shape[0], len(places), key_blocks * visits.keys), bool)
    padded[:, :, : seen.shape[2]] = seen[:, places.clip(0, seen.shape[1] - 1)]
    there = ((places >= 0) & (places < seen.shape[1])).reshape(-1, visits.rows).any(axis=1)
    if idles(problem, variant):
        padded[:, ~there.repeat(visits.rows)] = False
    if mask is not None:
        padded[:, places >= seen.shape[1]] = False
    parts = len(places) // visits.mma_rows
    by_tile = padded.reshape(seen.shape[0], parts, visits.mma_rows, key_blocks, visits.keys)
    total = seen.shape[0] * parts * key_blocks
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
