"""The modelled time of a call with a variant, by which dispatch compares variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.operators.masks import UNBOUNDED
from flashgen.schedule.grid import (
    KEYS,
    ROWS,
    expected_tiles,
    lengths_differ,
    row_blocks,
    tiles,
)
from flashgen.schedule.groups import group_parts, rows_of_tiles
from flashgen.schedule.shares import shares_of
from flashgen.schedule.visited import visited_keys

if TYPE_CHECKING:
    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem

# Fitted to measured calls (docs/tuning.md). With a share x of its parts at work, a tile takes x ** _IDLE of
# its time. If tiles differ in length, a grid ends _LAST of a mean tile after an equal share of them.
_IDLE, _LAST = 1 / 3, 0.35
# The part of the longest sequence's time by itself that is added to the time of equal sequences, if only the
# device knows how they differ.
_LONGEST = 0.5
# The multiprocessors of each GPC. A cluster is within one GPC, so 31, 15 and 7 clusters of 4, 8 and 16 thread
# blocks fit beside each other, as measured on an H100.
_GPCS = (18, 18, 18, 16, 16, 16, 16, 14)
# The rate of packed rows over the rate of others: each packed row finds its query and its head by a division.
_PACKED = 0.97
# The rate of a kernel without room to stage the array of a score modification over the rate of one that
# stages it: its scores wait for their elements.
_UNSTAGED = 0.5


class OneSm(NamedTuple):
    """As much of a device as `cost` reads, with one multiprocessor."""

    num_sms: int
    smem_per_sm: int


def cost(problem: Problem, device: Device | OneSm, variant: Variant) -> float:
    """Modelled time of a problem, comparable between variants for one problem only.

    A tile takes the time of ``start`` * block_m keys more than it visits, where block_m is its extent in the
    first dimension of the grid. With only a share x of the thread blocks that a multiprocessor has room for,
    it reaches x ** ``fill`` of its full rate, which the blocks on it share; at 0 it counts as having room for
    one. A persistent grid also has a last wave, in which some multiprocessors may be idle. Packed rows have
    ``_PACKED`` of the rate.

    Sequences whose lengths differ have as many tiles as are to be expected. The longest come first, so
    multiprocessors end together: no wave is counted whole.

    Kernels before it that have tiles of keys take the time of ``passes`` query rows for each key, and of one
    more tile to begin.

    A grid of tiles of keys takes the time of its `rows_of_tiles`. The kernels before and after it take the
    time of ``passes`` keys for each query row, in whole tiles of the kernel before.

    In a grid of shares, the busiest multiprocessor visits the KV blocks of its shares, each of which is of
    one tile or several, and ``split_gain`` more where tiles are split and have to be combined.

    Where a cluster shares a tile, each of its thread blocks takes ``start``, too. Memory is the limit, but in
    the last round, one thread block to a multiprocessor that clusters do not leave idle, each reads its part
    at ``alone_gbps`` at most.
    Where only the device knows how sequences differ, ``_LONGEST`` of the time of the longest part, read so,
    comes on top.
    """
    if variant.grid.shares:
        return _cost_of_shares(problem, device, variant)
    if variant.grid.shared_tiles:
        return _cost_of_clusters(problem, device, variant)
    if variant.grid.tile(KEYS):
        return _cost_of_keys(problem, device, variant)
    block_m, room = variant.grid.covers[0][1], variant.grid.blocks_per_sm if variant.dispatch.fill else 1
    visited, start = visited_keys(problem, variant), variant.dispatch.start * block_m
    of_tile, longest = visited.mean + start, visited.most + start
    mean = visited.mean * (visited.mean_of_parts / max(1, visited.mean)) ** _IDLE + start
    count, differ = expected_tiles(problem, variant), lengths_differ(problem, variant)
    if mean == longest and not differ:
        rounds, rest = divmod(-(-count // device.num_sms), room)
        keys = (rounds * room + (rest / (rest / room) ** variant.dispatch.fill if rest else 0)) * longest
    else:
        # Tiles of different lengths are handed out so that multiprocessors have about the same work.
        beside = min(room, max(1, count / device.num_sms))
        waves = count / device.num_sms
        equal = (waves + _LAST * (waves > 1)) * mean
        keys = max(equal, beside * longest) / (beside / room) ** variant.dispatch.fill
        if (
            variant.grid.persistent
            and not differ
            and problem.window_left >= UNBOUNDED
            and row_blocks(problem, variant) > 1
        ):
            # Some multiprocessor has a tile of the last wave. Lengths fall about linearly from tile to tile.
            whole = (count - 1) // device.num_sms
            last = longest - 2 * (longest - of_tile) * whole * device.num_sms / count
            keys = max(keys, whole * mean + last)
    return keys * block_m / _rate(variant) + _before_rows(problem, variant, device.num_sms)


def _before_rows(problem: Problem, variant: Variant, num_sms: int) -> float:
    """Scores in whose time the kernels before a grid of rows prepare blocks of keys, and begin."""
    steps = [step for step in variant.before if step.grid.tile(KEYS)] if variant.dispatch.passes else []
    return variant.dispatch.passes * sum(
        step.grid.tile(KEYS) * (1 + tiles(problem, step) / num_sms) for step in steps
    )


def _rate(variant: Variant) -> float:
    """Scores in a time, on the scale of ``efficiency``."""
    packed = dict(variant.axes).get("gqa") == "packed"  # not every operator has groups of heads
    stages = variant.score is None or not variant.score.streamed or variant.staged is not None
    efficiency = variant.dispatch.efficiency
    if variant.streams:
        efficiency = variant.dispatch.streaming or efficiency
        if variant.staged.type == "f32":
            efficiency = variant.dispatch.streaming_fp32 or efficiency
    return efficiency * (_PACKED if packed else 1) * (1 if stages else _UNSTAGED)


def _cost_of_clusters(problem: Problem, device: Device, variant: Variant) -> float:
    block_m, of_block, cluster = variant.grid.covers[0][1], variant.visits.keys, variant.grid.cluster
    longest, count = visited_keys(problem, variant).most, tiles(problem, variant)
    blocks, start = count * cluster, variant.dispatch.start * block_m
    of_one = -(-longest // (cluster * of_block)) * of_block + start
    alone = of_one * device.memory_gbps / (variant.dispatch.alone_gbps * device.num_sms)
    equal = (count * longest + blocks * start) / device.num_sms
    busy = sum(gpc // cluster * cluster for gpc in _GPCS) / sum(_GPCS)
    room = max(cluster, device.num_sms * busy)
    last = blocks % room or room  # thread blocks of the last round
    keys = equal + max(0, alone - last * of_one / device.num_sms)
    if problem.lengths_on_device and problem.sizes["batch"] > 1:
        keys += _LONGEST * alone
    return keys * block_m / _rate(variant)


def _cost_of_shares(problem: Problem, device: Device, variant: Variant) -> float:
    shares, block_m = shares_of(problem, variant, device), variant.grid.covers[0][1]
    blocks = shares.kv_blocks_of_largest
    starts = max(1, blocks / shares.per_tile) * variant.dispatch.start * block_m
    keys = -(-shares.count // device.num_sms) * (blocks * variant.visits.keys + starts)
    combining = variant.grid.split_gain * variant.visits.keys if shares.split else 0
    return (keys + combining) * block_m / _rate(variant)


def _cost_of_keys(problem: Problem, device: Device | OneSm, variant: Variant) -> float:
    block_n, parts = variant.grid.covers[0][1], group_parts(problem, variant, device)
    scores = rows_of_tiles(problem, variant, device.num_sms, parts) * block_n / _rate(variant)
    beside = variant.dispatch.passes * sum(
        tiles(problem, step) * step.grid.tile(ROWS) for step in variant.before if step.grid.tile(ROWS)
    )
    return scores + beside / device.num_sms
