"""How much of the scores a variant's tiles visit: the model behind the choice among tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.operators.masks import UNBOUNDED, Band
from flashgen.schedule.grid import ROWS, row_blocks, rows, rows_ahead

if TYPE_CHECKING:
    from flashgen.operators.attention import AttentionProblem
    from flashgen.spec.variant import Variant

# Row blocks that are looked at; of more, as many at even distances.
_SAMPLES = 32


def visited_keys(problem: AttentionProblem, variant: Variant) -> tuple[float, int]:
    """Keys that a tile of the variant visits, in whole KV blocks: the mean over the row blocks of a head, and
    the most. Where parts of a tile skip KV blocks of their own, the mean is over what each of them visits. A
    dense mask counts as one that hides nothing but what its band does. Without ``visits`` in the spec, a tile
    visits all keys.
    """
    visits = variant.visits
    if visits is None:
        return problem.seqlen_kv, problem.seqlen_kv
    block_m, block_n, part = variant.grid.tile(ROWS), visits.keys, visits.rows
    everything = -(-problem.seqlen_kv // block_n) * block_n
    blocks = row_blocks(problem, variant)
    band = Band.of(problem)
    if not band.bounded or not blocks:
        return everything, everything
    count = min(blocks, _SAMPLES)
    ahead = rows_ahead(problem, variant)
    total, most = 0, 0
    for sample in range(count):
        first_row = (2 * sample + 1) * blocks // (2 * count) * block_m - ahead
        keys = 0
        for row in range(first_row, first_row + block_m, part):
            if idles(problem, variant) or row < rows(problem, variant):
                keys = _keys_of(problem, variant, row, part)
            total += keys * part
        skipped = max(0, -first_row)
        most = max(most, _keys_of(problem, variant, first_row + skipped, block_m - skipped))
    return total / (count * block_m), most


def idles(problem: AttentionProblem, variant: Variant) -> bool:
    """Whether a part of a tile that has no row visits nothing; otherwise it visits what the part before it
    does.
    """
    return variant.grid.from_last_row > 0 or problem.window_left < UNBOUNDED


def _keys_of(problem: AttentionProblem, variant: Variant, first_row: int, count: int) -> int:
    """Those of ``count`` rows that visit the same blocks; 0 for rows that there are none of."""
    block_n = variant.visits.keys
    end_row = min(first_row + count, rows(problem, variant))
    if first_row < 0 or end_row <= first_row:
        return 0
    group = problem.group_size if variant.gqa == "packed" else 1
    first = first_row // group + problem.diagonal_offset
    last = (end_row - 1) // group + problem.diagonal_offset
    begin = max(0, first - problem.window_left) // block_n
    end = -(-min(problem.seqlen_kv, last + problem.window_right + 1) // block_n)
    return max(0, end - begin) * block_n
