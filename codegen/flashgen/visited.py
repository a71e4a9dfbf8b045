"""How much of the scores a variant's tiles visit: the model behind the choice among tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.problem import Problem
    from flashgen.variant import Variant

# Row blocks that are looked at; of more, as many at even distances.
_SAMPLES = 32


def visited_keys(problem: Problem, variant: Variant, rows: int) -> tuple[float, int]:
    """Keys that a tile of the variant visits, in whole blocks: the mean over the row blocks of a head, and
    the most. A head has ``rows`` rows. A dense mask counts as one that hides nothing.
    """
    block_m = variant.tile_value("block_m")
    block_n = dict(variant.tile).get("block_n", 1)
    everything = -(-problem.seqlen_kv // block_n) * block_n
    row_blocks = -(-rows // block_m)
    if problem.mask_type not in ("causal", "local") or not row_blocks:
        return everything, everything
    group = problem.group_size if variant.gqa == "packed" else 1
    left, right = (problem.window_left, problem.window_right) if problem.mask_type == "local" else (None, 0)
    count = min(row_blocks, _SAMPLES)
    lengths = []
    for sample in range(count):
        first_row = (2 * sample + 1) * row_blocks // (2 * count) * block_m
        first = first_row // group + problem.diagonal_offset
        last = (min(first_row + block_m, rows) - 1) // group + problem.diagonal_offset
        begin = 0 if left is None else max(0, first - left) // block_n
        end = -(-min(problem.seqlen_kv, last + right + 1) // block_n)
        lengths.append(max(0, end - begin) * block_n)
    return sum(lengths) / count, max(lengths)
