"""Gather: keys and values of all ranks, some kv heads at a time, while the kernels compute the step before;
and back, the gradients of keys and values, summed over ranks in fp32.

A row of a gathered buffer has K and V of one token beside each other, so a step is one collective. Rows are
in the order of ranks; indices take them in the order of tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.distributed.exchange import Pending, rank_major, start_gather, start_reduction
from flashgen.distributed.layouts import Runs, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from flashgen.distributed.exchange import Reduction
    from flashgen.distributed.segments import Launch


class Units(NamedTuple):
    """The runs of the units that gather, in order, and which of them this rank is in."""

    runs: tuple[Runs, ...]
    place: int

    # Caches look it up by identity: a hash of all members would take long.
    __hash__ = object.__hash__

    @property
    def most(self) -> int:
        """The rows of the largest unit, to which all are padded."""
        return max(map(tokens_of, self.runs))

    @property
    def tokens(self) -> int:
        return sum(map(tokens_of, self.runs))


class KeyRows(NamedTuple):
    """Where the keys of a launch are. ``order`` has the gathered row of each key, None where gathered rows
    are these keys already. ``layers`` has, for each layer of segments, the slice or the indices of the keys
    of the launch, and of their gathered rows.
    """

    order: Tensor | None
    layers: tuple[tuple[Any, Tensor], ...]


# An index has 8 bytes for each token, so these caches are small: the layers of a model share an entry.
@lru_cache(maxsize=4)
def token_rows(units: Units, device: torch.device) -> Tensor:
    """The row of each token in a gathered buffer."""
    most = units.most
    places = torch.empty(units.tokens, dtype=torch.int64, device=device)
    for unit, runs in enumerate(units.runs):
        row = unit * most
        for run in runs:
            places[run.begin : run.end] = torch.arange(row, row + run.tokens, device=device)
            row += run.tokens
    return places


@lru_cache(maxsize=8)
def key_rows(launch: Launch, units: Units, device: torch.device) -> KeyRows:
    """Where the keys of a launch are in a gathered buffer."""
    rows = token_rows(units, device)
    bounds = [(x.k_begin, x.k_end) for x in launch.segments]
    alone = len(units.runs) == 1
    if len(bounds) == 1:
        order = rows[slice(*bounds[0])]
        return KeyRows(None if alone and order.shape[0] == rows.shape[0] else order, ((slice(None), order),))
    order = rows[rank_major(bounds, device)]
    if launch.layers == 1:
        layers = ((slice(None), order),)
    else:
        starts = [0]
        for begin, end in bounds:
            starts.append(starts[-1] + end - begin)
        keys = [
            rank_major(
                [
                    (start, after)
                    for x, start, after in zip(launch.segments, starts, starts[1:], strict=False)
                    if x.layer == layer
                ],
                device,
            )
            for layer in range(launch.layers)
        ]
        layers = tuple((some, order[some]) for some in keys)
    return KeyRows(None if alone and _is_range(bounds, rows.shape[0]) else order, layers)


def _is_range(bounds: list[tuple[int, int]], count: int) -> bool:
    """Whether these ranges, one after another, are 0 to ``count``."""
    ends = [end for _, end in bounds]
    return [begin for begin, _ in bounds] == [0, *ends[:-1]] and ends[-1] == count


@lru_cache(maxsize=64)
def cu_seqlens_of(launch: Launch, device: torch.device) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_kv of the segments of a launch."""
    sizes = torch.tensor([[x.q_end - x.q_begin, x.k_end - x.k_begin] for x in launch.segments])
    bounds = torch.zeros((2, len(launch.segments) + 1), dtype=torch.int32)
    bounds[:, 1:] = sizes.T.cumsum(1)
    of_q, of_kv = bounds.to(device)
    return of_q.clone(), of_kv.clone()  # each in memory of its own, as arrays of lengths are


class SegmentTable(NamedTuple):
    """The segments of a launch as arrays of a cache of one row, whose keys are in the order of tokens. Ranges
    of keys may overlap.
    """

    cu_seqlens_q: Tensor
    starts: Tensor
    lengths: Tensor
    index: Tensor


@lru_cache(maxsize=64)
def table_of(launch: Launch, device: torch.device) -> SegmentTable:
    """The table of a launch."""
    first = launch.rows.start
    rows = [0, *(x.q_end - first for x in launch.segments)]
    starts, lengths = [x.k_begin for x in launch.segments], [x.k_end for x in launch.segments]
    arrays = rows, starts, lengths, [0] * len(starts)
    return SegmentTable(*(torch.tensor(x, dtype=torch.int32, device=device) for x in arrays))


@lru_cache(maxsize=64)
def kv_lengths_of(batch: int, keys: int, device: torch.device) -> Tensor:
    """kv_lengths of segments that all have this number of keys."""
    return torch.full((batch,), keys, dtype=torch.int32, device=device)


@lru_cache(maxsize=4)
def row_tokens(units: Units, device: torch.device) -> Tensor:
    """The token of each row in a gathered buffer; 0 for rows that only pad."""
    tokens = torch.zeros(units.most * len(units.runs), dtype=torch.int64, device=device)
    tokens[token_rows(units, device)] = torch.arange(units.tokens, device=device)
    return tokens


class Step(NamedTuple):
    """Some kv heads, and their rows (rows, batch, heads, head_dim + head_dim_v) of all ranks; None where the
    unit has all tokens itself.
    """

    heads: slice
    rows: Tensor | None


def steps(k: Tensor, v: Tensor, per_step: int, units: Units, group: Any) -> Iterator[Step]:
    """Gather kv heads, ``per_step`` at a time. The first step begins now, and each other one while the caller
    computes the step before it. k, v: (batch, rows of the unit, heads, head_dim).
    """
    heads = [slice(first, first + per_step) for first in range(0, k.shape[2], per_step)]
    if group is None:
        return iter([Step(some, None) for some in heads])
    size = len(units.runs)

    def start(some: slice) -> Pending:
        rows = torch.cat((k[:, :, some], v[:, :, some]), -1).transpose(0, 1)
        return start_gather(rows, units.most, group, size)

    def following(pending: Pending) -> Iterator[Step]:
        for some, later in zip(heads, [*heads[1:], None], strict=True):
            current = pending
            if later is not None:
                pending = start(later)
            yield Step(some, current.wait())

    return following(start(heads[0]))


def keys_and_values(step: Step, k: Tensor, v: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V of a step, in this order of rows: (batch, keys, heads, head_dim). ``k`` and ``v`` are K and V
    of the unit, from which they are taken if the step gathered nothing.
    """
    if step.rows is None:
        k, v = k[:, :, step.heads], v[:, :, step.heads]
        return (k, v) if order is None else (k.index_select(1, order), v.index_select(1, order))
    rows = step.rows if order is None else step.rows.index_select(0, order)
    whole = rows.transpose(0, 1)
    return whole[..., : k.shape[-1]], whole[..., k.shape[-1] :]


class KeyGradients:
    """The gradients of K and V of the steps of a backward pass, which fill ``dk`` and ``dv``. Each rank adds
    up the gradients of its launches, in fp32 and in order. Then these are summed over ranks, while the next
    step is computed.

    Sums have a row for each token, so the keys of a segment are a slice of them; or, where launches have many
    segments, for each row of a gathered buffer.
    """

    def __init__(
        self, dk: Tensor, dv: Tensor, units: Units, group: Any, *, by_rows: bool, deterministic: bool
    ) -> None:
        self._dk, self._dv, self._units, self._group = dk, dv, units, group
        self._by_rows, self._deterministic = by_rows, deterministic
        self._pending: tuple[slice, Reduction] | None = None

    def zeros(self, step: Step, after: int = 0) -> Tensor:
        """Memory for the gradients of a step: zeros from row ``after`` on."""
        heads = self._dk[:, :, step.heads].shape[2]
        rows = self._units.most * len(self._units.runs) if self._by_rows else self._units.tokens
        width = self._dk.shape[-1] + self._dv.shape[-1]
        total = self._dk.new_empty((rows, self._dk.shape[0], heads, width), dtype=torch.float32)
        total[after:].zero_()
        return total

    def of_launch(self, k: Tensor, v: Tensor, fp32: bool) -> Tensor:
        """Memory for the gradients of a launch with these keys: of k and v beside each other, in fp32 or in
        their dtype.
        """
        shape = (*k.shape[:-1], k.shape[-1] + v.shape[-1])
        return k.new_empty(shape, dtype=torch.float32 if fp32 else k.dtype)

    def add(self, total: Tensor, of_keys: Tensor, launch: Launch) -> None:
        """Add the gradients of a launch, as of `of_launch`, to their rows. Rows of one layer are distinct, so
        the order of additions is fixed.
        """
        if not self._by_rows:
            of_keys = of_keys[:, None] if of_keys.ndim < total.ndim else of_keys.transpose(0, 1)
            first = 0
            for segment in launch.segments:
                count = segment.k_end - segment.k_begin
                total[segment.k_begin : segment.k_end] += of_keys[first : first + count]
                first += count
            return
        for some, rows in key_rows(launch, self._units, total.device).layers:
            picked = total.index_select(0, rows)
            picked += of_keys[some][:, None]
            total.index_copy_(0, rows, picked)

    def send(self, step: Step, total: Tensor) -> None:
        """Begin to sum a step over ranks, and end the sum of the step before."""
        self.end()
        if self._group is None:
            self._keep(step.heads, total)
            return
        size = len(self._units.runs)
        if not self._by_rows:
            total = total.index_select(0, row_tokens(self._units, total.device))
        self._pending = step.heads, start_reduction(total, self._group, size, self._deterministic)

    def end(self) -> None:
        """End the sum of the last step that was sent."""
        if self._pending is not None:
            heads, reduction = self._pending
            self._keep(heads, reduction.wait())
            self._pending = None

    def _keep(self, heads: slice, total: Tensor) -> None:
        width, rows = self._dk.shape[-1], self._dk.shape[1]
        whole = total[:rows].transpose(0, 1)
        self._dk[:, :, heads], self._dv[:, :, heads] = whole[..., :width], whole[..., width:]
