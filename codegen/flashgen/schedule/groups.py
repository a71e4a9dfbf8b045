"""Tiles of keys, each of which goes through the query heads of a kv head: the time that they take by the
model, and into how many parts the query heads are split among thread blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashgen.operators.masks import Band
from flashgen.schedule.grid import (
    blocks_of_kinds,
    expected_tiles,
    lengths_differ,
    row_blocks,
    tiles,
    tiles_beside,
)
from flashgen.schedule.visited import visited_beside, visited_queries

if TYPE_CHECKING:
    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.schedule.visited import VisitedRows

# If tiles differ in length, a grid ends this many mean tiles after an equal share of them. In turns tiles
# wait for longer ones, so it ends later. (Fitted: docs/tuning.md.)
_LAST, _LAST_IN_TURNS = 0.6, 1.5
# In turns, if a head has at least this many tiles, they wait for this share of the time of a head.
_MANY, _WAITING = 5, 0.7
# More parts are more memory: the fewest are taken that come so near to the least time.
_NEAR = 1.05


def group_parts(problem: Problem, variant: Variant, device: Device) -> int:
    """Into how many parts of equally many heads the query heads of each kv head are split, for the least
    `rows_of_tiles`, or nearly so. 1 where the spec does not say what a part takes besides: ``part_time``.

    Each part leaves gradients of its keys in the workspace. So there are no more parts than are of use.
    """
    if not variant.grid.part_time or not tiles(problem, variant):
        return 1
    group = problem.sizes["num_heads_q"] // problem.sizes["num_heads_kv"]
    if variant.rule is not None and "h" in variant.rule.tree.reads():
        return group  # a thread block goes through the list of one head
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    visited = visited_queries(problem, variant)
    times = {parts: _rows(problem, variant, device.num_sms, parts, visited) for parts in divisors}
    return next(parts for parts in divisors if times[parts] <= _NEAR * min(times.values()))


def rows_of_tiles(problem: Problem, variant: Variant, num_sms: int, parts: int = 1) -> float:
    """The modelled time of a grid of tiles of keys, in query rows that one tile goes through: the longest
    tile; with several waves, these, or what a multiprocessor has of all tiles and then the end of the grid.

    A tile visits the query rows of all heads of its part, and takes the time of ``start`` times as many as
    it has keys besides, times the tiles that a multiprocessor has room for. With only a share x of these it
    reaches x ** ``fill`` of its rate, which they share; at 0 ``fill`` counts as having all of them. What
    parts leave is written and read at the rate of memory: ``part_time`` a tile. If a grid also has tiles of
    queries, these visit keys. In several waves a thread block with a tile of each kind takes
    the time of the longer one, and ``start`` counts twice, as nothing else on its multiprocessor hides it.
    Sequences whose lengths differ have as many tiles as are to be expected. Where many tiles of a head, of
    different lengths, take turns, they wait in each of their heads but one.
    """
    return _rows(problem, variant, num_sms, parts, visited_queries(problem, variant))


def _rows(problem: Problem, variant: Variant, num_sms: int, parts: int, visited: VisitedRows) -> float:
    """`rows_of_tiles`, if each tile ``visited`` this many query rows of a head."""
    grid, bounded = variant.grid, Band.of(problem).bounded
    heads = problem.sizes["num_heads_q"] // problem.sizes["num_heads_kv"] // parts
    count = expected_tiles(problem, variant) * parts
    left = count * grid.part_time / num_sms if parts > 1 else 0
    times = heads
    if grid.in_turns and bounded and row_blocks(problem, variant) >= _MANY:
        times += _WAITING * (heads - 1)
    mean, most, starts = (
        visited.mean * times,
        visited.most * times,
        variant.dispatch.start * grid.covers[0][1],
    )
    blocks = count
    if beside := tiles_beside(problem, variant):
        of_queries = visited_beside(problem, variant)
        blocks, most = blocks_of_kinds(variant, count, beside), max(most, of_queries.most)
        mean_of_all = (count * mean + beside * of_queries.mean) / (count + beside)
        mean = max(mean, of_queries.mean) if grid.kinds == 2 else mean_of_all
        count += beside
    waves = blocks / (num_sms * grid.blocks_per_sm)
    room = grid.blocks_per_sm * grid.kinds  # tiles of a multiprocessor
    at_work = min(room, max(grid.kinds, math.ceil(count / num_sms))) if variant.dispatch.fill else room
    longest = at_work / (at_work / room) ** variant.dispatch.fill * (most + starts)
    if waves <= 1:
        return longest + left
    if not bounded and not lengths_differ(problem, variant):
        waves = math.ceil(waves)
    else:
        waves += _LAST_IN_TURNS if grid.in_turns else _LAST
    return max(longest, waves * room * (mean + grid.kinds * starts)) + left
