"""Groups of query heads, split among thread blocks: into how many parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.schedule.grid import blocks_at_a_time, tiles

if TYPE_CHECKING:
    from flashgen.arch import Device
    from flashgen.operators.operator import Problem
    from flashgen.spec.variant import Variant


def group_parts(problem: Problem, variant: Variant, device: Device) -> int:
    """Into how many parts of equally many heads the query heads of each kv head are split: the fewest with
    which the thread blocks make ``group_waves`` waves, the last one perhaps not full; where none are enough,
    as many as heads. 1 where the spec does not ask for waves.

    Each part leaves gradients of its keys in the workspace. So there are no more parts than are of use.
    """
    if not variant.grid.group_waves:
        return 1
    group = problem.sizes["num_heads_q"] // problem.sizes["num_heads_kv"]
    count, running = tiles(problem, variant), blocks_at_a_time(variant, device)
    if not count:
        return 1  # not launched
    divisors = (parts for parts in range(1, group) if group % parts == 0)
    return next((p for p in divisors if -(-count * p // running) >= variant.grid.group_waves), group)
