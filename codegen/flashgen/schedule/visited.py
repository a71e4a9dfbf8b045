"""How much of the scores a variant's tiles visit: the model behind the choice among tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.schedule.grid import joins_edges, row_blocks, rows, rows_ahead, rows_together, shifts

if TYPE_CHECKING:
    from flashgen.operators.attention import Problem
    from flashgen.spec.variant import Variant

# Row blocks that are looked at; of more, as many at even distances.
_SAMPLES = 32
# Keys that early and late blocks, visited together, leave over.
_SLICE = 16


def visited_keys(problem: Problem, variant: Variant) -> tuple[float, int]:
    """Keys that a tile of the variant visits, in whole blocks, and a slice where early and late keys are
    visited together: the mean over the row blocks of a head, and
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
        if joins_edges(variant):
            keys = _joined_keys(problem, first_row, block_m, block_n)
            total += keys * block_m
            most = max(most, keys)
            continue
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


def _joined_keys(problem: Problem, first_row: int, block_m: int, block_n: int) -> int:
    """Keys that a tile visits where the blocks in which windows begin are visited together with those in
    which they end: window_keys() of the template. Warps that pass over blocks behind all of their windows
    count as if they did not.
    """
    first = first_row + problem.diagonal_offset - problem.window_left
    last_row = min(first_row + block_m, problem.seqlen_q) - 1
    begin = max(0, first)
    end = min(problem.seqlen_kv, last_row + problem.diagonal_offset + problem.window_right + 1)
    if end <= begin:
        return 0
    has_early = first + block_m > 0
    end_in_blocks = -(-(end - first) // block_n) * block_n
    span = max(block_m, -(-(problem.window_left + problem.window_right) // block_n) * block_n)
    if not has_early:
        span = min(span, max(block_m, end_in_blocks - block_m))
    inner_begin = max(block_m, (begin - first) // block_n * block_n)
    inner_end = max(inner_begin, min(span, end_in_blocks))
    return inner_end - inner_begin + block_m + (_SLICE if has_early else 0)
