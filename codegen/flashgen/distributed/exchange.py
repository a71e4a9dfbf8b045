"""Exchanges of rows between the ranks of a group: the collectives of PyTorch, on shards of unequal length.

Rows are the first dimension of contiguous tensors. Every rank knows from the layout how many rows any rank
has, so ranks exchange no sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flashgen.distributed.groups import Ranks

# PyTorch 2.13 has new names for these two.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(NamedTuple):
    """A running collective and its result. ``source`` is the tensor that it reads, which must stay alive."""

    work: Any
    result: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        """The result, once the current stream may read it."""
        self.work.wait()
        return self.result


def padded(rows: Tensor, count: int) -> Tensor:
    """The rows, with zeros after them up to ``count``."""
    if rows.shape[0] == count:
        return rows.contiguous()
    result = rows.new_zeros((count, *rows.shape[1:]))
    result[: rows.shape[0]] = rows
    return result


def start_gather(rows: Tensor, most: int, group: Any, size: int) -> Pending:
    """Begin to gather the rows of all ranks in the order of ranks, each padded to ``most`` rows."""
    source = padded(rows, most)
    result = rows.new_empty((size * most, *rows.shape[1:]))
    return Pending(_gather(result, source, group=group, async_op=True), result, source)


def gathered(rows: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks, equally many of each, in the order of ranks."""
    # The inner dimension first: the ranks of a unit follow one another.
    for group, size in ((ranks.inner, ranks.inner_size), (ranks.outer, ranks.outer_size)):
        if group is not None:
            rows = start_gather(rows, rows.shape[0], group, size).wait()
    return rows


class Reduction(NamedTuple):
    """A sum over ranks that runs; ``ordered`` is whether the parts are still to be added up."""

    pending: Pending
    ordered: bool

    def wait(self) -> Tensor:
        """This rank's rows of the sum."""
        result = self.pending.wait()
        if not self.ordered:
            return result
        total = result[0].clone()
        for part in result[1:]:
            total += part
        return total


def start_reduction(rows: Tensor, group: Any, size: int, deterministic: bool) -> Reduction:
    """Begin to sum rows over ranks: each rank gets its equal share of them. If ``deterministic``, the parts
    are added in the order of ranks.
    """
    most = rows.shape[0] // size
    if deterministic:
        result = rows.new_empty((size, most, *rows.shape[1:]))
        work = dist.all_to_all_single(result.view(rows.shape), rows, group=group, async_op=True)
    else:
        result = rows.new_empty((most, *rows.shape[1:]))
        work = _reduce_scatter(result, rows, group=group, async_op=True)
    return Reduction(Pending(work, result, rows), deterministic)


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """The rows that all ranks send to this one, in the order of ranks; ``sent`` and ``received`` count rows
    for each rank.
    """
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    width = rows[0].numel() if rows.shape[0] else result[0].numel() if result.shape[0] else 0
    dist.all_to_all_single(
        result.view(-1),
        rows.contiguous().view(-1),
        [width * count for count in received],
        [width * count for count in sent],
        group=group,
    )
    return result


def rank_major(bounds: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The integers of these ranges, one range after another."""
    ranges = [torch.arange(begin, end, device=device) for begin, end in bounds]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)
