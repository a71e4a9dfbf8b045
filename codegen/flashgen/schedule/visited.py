"""How much of the scores a variant's tiles visit: the model that chooses among tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.operators.masks import UNBOUNDED, Band
from flashgen.schedule.grid import KEYS, ROWS, row_blocks, rows, rows_ahead

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.attention_problem import AttentionProblem

# Row blocks that are looked at; of more, as many at even distances.
_SAMPLES = 32


class Visited(NamedTuple):
    """Keys that a tile visits, over the row blocks of a head: the mean of what each of its parts visits, and
    of what they visit together the mean, and the most.
    """

    mean_of_parts: float
    mean: float
    most: int


def visited_keys(problem: AttentionProblem, variant: Variant) -> Visited:
    """Keys that the tiles of the variant visit, in whole KV blocks. Parts of a tile may skip KV blocks of
    their own. A dense mask counts as one that hides nothing but what its band does. Without ``visits`` in the
    spec, a tile visits all keys; a problem without keys counts as having one.
    """
    visits = variant.visits
    if visits is None:
        keys = problem.sizes.get("seqlen_kv", 1)
        return Visited(keys, keys, keys)
    block_m, block_n, part = variant.grid.tile(ROWS), visits.keys, visits.rows
    everything = -(-problem.seqlen_kv // block_n) * block_n
    blocks = row_blocks(problem, variant)
    band = Band.of(problem)
    if not band.bounded or not blocks:
        return Visited(everything, everything, everything)
    count = min(blocks, _SAMPLES)
    ahead = rows_ahead(problem, variant)
    total, whole, most = 0, 0, 0
    for sample in range(count):
        first_row = (2 * sample + 1) * blocks // (2 * count) * block_m - ahead
        keys = 0
        for row in range(first_row, first_row + block_m, part):
            if idles(problem, variant) or row < rows(problem, variant):
                keys = _keys_of(problem, variant, row, part)
            total += keys * part
        skipped = max(0, -first_row)
        of_tile = _keys_of(problem, variant, first_row + skipped, block_m - skipped)
        whole, most = whole + of_tile, max(most, of_tile)
    return Visited(total / (count * block_m), whole / count, most)


class VisitedRows(NamedTuple):
    """Rows that a tile goes through in whole steps: the mean over the tiles of a head, and the most."""

    mean: float
    most: int


def visited_queries(problem: AttentionProblem, variant: Variant) -> VisitedRows:
    """Query rows of one head that a tile of keys visits."""
    band, extent = Band.of(problem), (problem.seqlen_kv, problem.seqlen_q)
    turned = Band(-band.diagonal_offset, band.right, band.left)  # which queries a key is seen by
    return _in_steps(turned, *extent, variant.grid.tile(KEYS), variant.grid.step_rows)


def visited_beside(problem: AttentionProblem, variant: Variant) -> VisitedRows:
    """Keys that a tile of queries beside the tiles of keys visits."""
    band, extent = Band.of(problem), (problem.seqlen_q, problem.seqlen_kv)
    return _in_steps(band, *extent, dict(variant.grid.beside)[ROWS], variant.grid.step_rows)


def _in_steps(band: Band, size: int, other: int, tile: int, step: int) -> VisitedRows:
    """What blocks of ``tile`` of ``size`` positions see of ``other`` ones, in steps."""
    blocks = -(-size // tile)
    if not band.bounded or not blocks:
        everything = -(-other // step) * step
        return VisitedRows(everything, everything)
    count = min(blocks, _SAMPLES)
    seen = []
    for sample in range(count):
        first = (2 * sample + 1) * blocks // (2 * count) * tile
        begin, end = band.keys_of_some(first, min(first + tile, size), other)
        seen.append((-(-end // step) - begin // step) * step if end > begin else 0)
    return VisitedRows(sum(seen) / count, max(seen))


def idles(problem: AttentionProblem, variant: Variant) -> bool:
    """Whether a part of a tile that has no row visits nothing; otherwise it visits what the part before it
    does.
    """
    return variant.grid.from_last_row > 0 or problem.window_left < UNBOUNDED


def _keys_of(problem: AttentionProblem, variant: Variant, first_row: int, count: int) -> int:
    """The keys of ``count`` rows that visit the same blocks; 0 for rows outside of the head."""
    block_n = variant.visits.keys
    end_row = min(first_row + count, rows(problem, variant))
    if first_row < 0 or end_row <= first_row:
        return 0
    group = problem.group_size if variant.gqa == "packed" else 1
    begin, end = kv_blocks(problem, block_n, first_row // group, (end_row - 1) // group)
    return max(0, end - begin) * block_n


def kv_blocks(problem: AttentionProblem, block_n: int, first_query: int, last_query: int) -> tuple[int, int]:
    """The KV blocks, of ``block_n`` keys each, with a key that some query of a range sees: the first, and one
    past the last, which is not above the first if there is none. A dense mask hides nothing here.
    """
    begin = max(0, first_query + problem.diagonal_offset - problem.window_left)
    end = min(problem.seqlen_kv, last_query + problem.diagonal_offset + problem.window_right + 1)
    return begin // block_n, -(-end // block_n)
