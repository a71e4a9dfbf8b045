"""How much of the scores a variant's tiles visit: the model behind the choice among tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.tiling import row_blocks, rows, rows_ahead, rows_together, shifts

if TYPE_CHECKING:
    from flashgen.problem import Problem
    from flashgen.variant import Variant

# Row blocks that are looked at; of more, as many at even distances.
_SAMPLES = 32


def visited_keys(problem: Problem, variant: Variant) -> tuple[float, int]:
    """Keys that a tile of the variant visits, in whole blocks: the mean over the row blocks of a head, and
    the most. Where parts of a tile pass over blocks, the mean is over what each of them visits. A dense mask
    counts as one that hides nothing.
    """
    block_m = variant.tile_value("block_m")
    block_n = dict(variant.tile).get("block_n", 1)
    everything = -(-problem.seqlen_kv // block_n) * block_n
    blocks = row_blocks(problem, variant)
    if problem.mask_type not in ("causal", "local") or not blocks:
        return everything, everything
    count = min(blocks, _SAMPLES)
    ahead = rows_ahead(problem, variant)
    part = rows_together(variant)
    # A half of which no row is there visits what the other one does, unless the mask has windows.
    idles = shifts(variant) or problem.mask_type == "local"
    total, most = 0, 0
    for sample in range(count):
        first_row = (2 * sample + 1) * blocks // (2 * count) * block_m - ahead
        keys = 0
        for row in range(first_row, first_row + block_m, part):
            if idles or row < rows(problem, variant):
                keys = _keys_of(problem, variant, row, part, block_n)
            total += keys * part
        skipped = max(0, -first_row)
        most = max(most, _keys_of(problem, variant, first_row + skipped, block_m - skipped, block_n))
    return total / (count * block_m), most


def _keys_of(problem: Problem, variant: Variant, first_row: int, count: int, block_n: int) -> int:
    """Those of ``count`` rows that visit the same blocks; 0 for rows that there are none of."""
    end_row = min(first_row + count, rows(problem, variant))
    if first_row < 0 or end_row <= first_row:
        return 0
    group = problem.group_size if variant.gqa == "packed" else 1
    left, right = (problem.window_left, problem.window_right) if problem.mask_type == "local" else (None, 0)
    first = first_row // group + problem.diagonal_offset
    last = (end_row - 1) // group + problem.diagonal_offset
    begin = 0 if left is None else max(0, first - left) // block_n
    end = -(-min(problem.seqlen_kv, last + right + 1) // block_n)
    return max(0, end - begin) * block_n
