"""The order of a grid's tiles: heads are launched in sections, so that the tiles of a head, which share its
keys and values in L2, run at about the same time."""

from __future__ import annotations

import math
from functools import lru_cache
from heapq import heapreplace
from typing import TYPE_CHECKING, NamedTuple

from flashgen.operators.masks import UNBOUNDED, Band
from flashgen.schedule.grid import (
    KEYS,
    ROWS,
    all_heads,
    blocks_at_a_time,
    heads,
    row_blocks,
    tiles,
)
from flashgen.schedule.visited import visited_queries

if TYPE_CHECKING:
    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.attention_problem import AttentionProblem

# In a longer grid of tiles of keys, in waves, the end matters less than the sections' use of L2.
_FEW_WAVES = 16
# Sections of a wave are kept if their grid ends so near to the earliest end. Twice as many heads in a section
# cost this share of the time, since L2 holds less of their queries. (Measured: docs/log/flash_bwd_sm90.md.)
_NEAR_END, _DOUBLED = 1.03, 0.08


class Sections(NamedTuple):
    """``count`` sections of ``heads`` heads each, counted over the batch; the last one takes what is left."""

    heads: int
    count: int


def sections(problem: AttentionProblem, variant: Variant, device: Device, parts: int = 1) -> Sections:
    """How a variant's grid is cut. If groups of query heads are split, each of their ``parts`` counts as a
    head.

    A section of as many tiles as multiprocessors is enough to share keys and values. If tiles differ in
    length (causal or a window, also with a dense mask, or lists), they must also balance, so the section is
    larger. But with more heads than a third of the multiprocessors too few tiles of a head run at a time.
    Under causal, where lengths differ most, a section may have more heads, as long as L2 holds their keys and
    values and at least three tiles and 384 rows of each head run at a time.

    Tiles of keys ``in_turns`` add to dq one after the other. Their section has as many heads as fill the
    device, so that the previous tile of a head has a lead when a tile starts. A turn takes up to 1.8 steps
    from tile to tile. So at most half as many tiles of a head run at a time as it has steps; else the head
    would wait for turns. Only a quarter run, if a third of L2 holds q, dout and dq of these heads. Other
    tiles of keys: `_of_keys`.
    """
    total = all_heads(problem, variant, parts)
    if total == 0:
        return Sections(1, 1)  # not launched, but it has a struct
    tiles_of_head = max(1, row_blocks(problem, variant))
    if variant.grid.tile(KEYS):
        running = blocks_at_a_time(variant, device)
        query_heads = problem.num_heads_q // problem.num_heads_kv // parts
        if not variant.grid.in_turns:
            at_once = running * (2 if _in_order(variant) else 1) // tiles_of_head
            return _of_keys(
                problem, variant, total, max(1, min(at_once, running // 16)), query_heads, running
            )
        steps = max(1, query_heads * -(-problem.seqlen_q // variant.grid.step_rows))
        half = 2 * running // (variant.grid.cluster * steps)
        held = device.l2_bytes // 3 // max(1, query_heads * _query_bytes(problem, variant))
        heads_at_once = 2 * half if 2 * half <= held else half
        return _even(total, 1, max(-(-running // tiles_of_head), heads_at_once))
    group = heads(problem, variant) // problem.num_heads_kv
    band = Band.of(problem)
    uneven = _are_uneven(problem)
    if uneven and variant.grid.persistent:
        running = blocks_at_a_time(variant, device)
        if problem.rule is None and problem.block_lists is not None:
            return _in_l2(problem, variant, device, total, group)
        heads_at_once = max(1, running // 4)
        return _whole_rounds(total, heads_at_once * group, tiles_of_head, running)
    heads_at_once = -(-device.num_sms // tiles_of_head)
    if uneven:
        heads_at_once = max(heads_at_once, device.num_sms // 3)
    if uneven and band.left >= UNBOUNDED:
        together = max(3, -(-384 // variant.grid.tile(ROWS)))
        kept = device.l2_bytes // max(1, _key_bytes(problem, variant))
        heads_at_once = max(heads_at_once, min(blocks_at_a_time(variant, device) // together, kept))
    return _even(total, group, heads_at_once)


def _in_order(variant: Variant) -> bool:
    """Whether a table on the device has the order of tiles of keys: of a mask by a line."""
    return any(param.name == "key_order" for param in variant.params)


def _are_uneven(problem: AttentionProblem) -> bool:
    """Whether tiles may differ in how many keys, or queries, they visit."""
    return Band.of(problem).bounded or problem.block_lists is not None or problem.rule is not None


def _of_keys(
    problem: AttentionProblem,
    variant: Variant,
    total: int,
    heads_at_once: int,
    query_heads: int,
    running: int,
) -> Sections:
    """Sections of tiles of keys that add to dq in any order, each over ``query_heads`` query heads.

    Where tiles differ in length, a section has at most a wave of them, two if a table has the longest ones
    first, or one head, so that the grid ends with short ones. And it has at most a head for every 16 tiles
    that run at a time, as L2 holds the queries, dout and dq of few heads. Tiles of less than 2,048 query rows
    end close enough together. (Measured: docs/tuning.md.)

    A last section of few heads has too few tiles: some multiprocessors are idle while its longest tiles run.
    In a grid of few waves this may cost more than larger or smaller sections do.
    """
    if not _are_uneven(problem) or query_heads * problem.seqlen_q < 2048:
        return Sections(1, total)
    even = _even(total, 1, heads_at_once)
    of_head = max(1, row_blocks(problem, variant))
    if problem.block_lists is not None or even.count == 1 or total * of_head > _FEW_WAVES * running:
        return even
    visited = visited_queries(problem, variant)
    start = variant.dispatch.start * variant.grid.tile(KEYS) / query_heads
    longest, shortest = visited.most + start, max(0, 2 * visited.mean - visited.most) + start

    def time(size: int) -> float:
        doublings = max(0.0, math.log2(size / even.heads))
        return _end(total, of_head, running, size, longest, shortest) * (1 + _DOUBLED * doublings)

    times = {size: time(size) for size in range((heads_at_once + 1) // 2, min(total, 2 * heads_at_once) + 1)}
    best = min(times, key=times.__getitem__)
    if times[even.heads] <= _NEAR_END * times[best]:
        return even
    return Sections(best, -(-total // best))


@lru_cache(maxsize=4096)
def _end(total: int, of_head: int, running: int, size: int, longest: float, shortest: float) -> float:
    """When a grid ends whose sections have ``size`` of the ``total`` heads, if the lengths of a head's tiles
    fall evenly from ``longest`` to ``shortest`` and each tile starts where a tile has ended.
    """
    free = [0.0] * running
    for first in range(0, total, size):
        for number in range(of_head):
            length = longest - (longest - shortest) * number / max(1, of_head - 1)
            for _ in range(min(size, total - first)):
                heapreplace(free, free[0] + length)
    return max(free)


class KeyTiles(NamedTuple):
    """The tiles of keys of a main step, as all steps have to know them.

    Each head of the grid has ``of_head`` tiles. They clear dq of a head that comes ``clear_distance`` heads
    later. If sequences have lengths, the previous step finds each of the ``count`` tiles, and the tiles of a
    sequence are launched in sections of about ``together``: of one head, or of several where one has fewer.
    """

    clear_distance: int = 0
    of_head: int = 0
    count: int = 0
    together: int = 0


def key_tiles(problem: AttentionProblem, variant: Variant, device: Device, parts: int = 1) -> KeyTiles:
    """The tiles of keys of a main step."""
    if variant.grid.of_sequences:
        return KeyTiles(count=tiles(problem, variant), together=blocks_at_a_time(variant, device))
    return KeyTiles(clear_distance(problem, variant, device, parts), row_blocks(problem, variant))


def clear_distance(problem: AttentionProblem, variant: Variant, device: Device, parts: int = 1) -> int:
    """For tiles of keys: how many heads later in the grid the head comes whose dq a tile clears.

    More than a section: all tiles that clear a head are then launched before the tiles that wait for it. The
    heads beyond a section make 16 tiles. If a section is one head, there are 16 tiles between the last tile
    that clears and the first that waits. In larger sections the tiles of a head are apart, with about
    ``clear_distance`` tiles between them, and the first may wait a little. With more heads L2 would lose the
    zeros before dq is added to them. (Measured: docs/tuning.md.) If a table has the longest tiles first, long
    tiles of a section are launched a section early, so the tiles of the section two before it clear it.
    """
    if _in_order(variant):
        return 2 * sections(problem, variant, device, parts).heads
    tiles_ahead = min(16, blocks_at_a_time(variant, device))
    heads_ahead = -(-tiles_ahead // max(1, row_blocks(problem, variant)))
    return sections(problem, variant, device, parts).heads + heads_ahead


def _key_bytes(problem: AttentionProblem, variant: Variant) -> int:
    """Bytes of the keys and values of a head."""
    return problem.seqlen_kv * (problem.head_dim + problem.head_dim_v) * variant.element_bytes


def _query_bytes(problem: AttentionProblem, variant: Variant) -> int:
    """Bytes of q, dout and the fp32 sum of dq of a query head."""
    columns = problem.head_dim + problem.head_dim_v
    return problem.seqlen_q * (columns * variant.element_bytes + 4 * problem.head_dim)


def _even(total: int, group: int, heads_at_once: int) -> Sections:
    """Sections of equal sizes, of whole groups of heads that share keys.

    The hardware hands out tiles as multiprocessors become free; a small last section would leave some idle
    while its longest tiles run.
    """
    kv_heads = total // group
    count = -(-kv_heads // max(1, heads_at_once))
    size = -(-kv_heads // count) * group
    return Sections(size, -(-total // size))


def _in_l2(problem: AttentionProblem, variant: Variant, device: Device, total: int, group: int) -> Sections:
    """Sections of as many heads as half of L2 holds the keys and values of, one after another. Thread blocks
    take the next tile, the longest of a section first, and so no section leaves them idle. The last one has
    what is left over as well: in a small one the longest tiles would run alone.
    """
    kept = max(1, device.l2_bytes // 2 // max(1, _key_bytes(problem, variant)))
    size = min(total, kept * group)
    return Sections(size, total // size)


def _whole_rounds(total: int, heads_at_once: int, tiles_of_head: int, running: int) -> Sections:
    """Sections of about ``heads_at_once`` heads that a persistent grid of ``running`` blocks goes through in
    pairs of rounds, forth and back.

    A thread block then draws a tile as short as its other one was long, so that all have done the same work
    at the end of a section, wherever the lengths fall linearly. What is left over makes the last section, or
    joins it where it is less than half of one.
    """
    unit = 2 * running // math.gcd(2 * running, tiles_of_head)
    size = unit * max(1, round(heads_at_once / unit))
    count = max(1, (2 * total + size) // (2 * size))
    return Sections(min(size, total), count)
