"""The setting of a call: what its ranks, layout, documents, heads and mask mean for this rank. Made from the
arguments of an operator, with all checks of its contract; see `checks` for agreement between ranks.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.call.mask import Mask, rule_of
from flashgen.distributed.checks import agreed
from flashgen.distributed.costs import RowSizes, heads_per_step
from flashgen.distributed.gather import Units
from flashgen.distributed.groups import Ranks, check_device, ranks_of
from flashgen.distributed.heads import HeadShares, head_shares
from flashgen.distributed.kernels import Whole
from flashgen.distributed.layouts import check_layout, runs_of, shards_of, tokens_of, unit_of
from flashgen.distributed.masks import Rows, check_mask, rows_of
from flashgen.distributed.model import bounds_of
from flashgen.distributed.parts import Part, numbers_of, parts_of
from flashgen.distributed.segments import Launch, Segment, launches_of, visibility
from flashgen.distributed.ulysses import Members
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, DeviceTypeNotSupported, arg
from flashgen.operators.dropout import NO_DROPOUT, check_bias
from flashgen.operators.maskoptions import window_of
from flashgen.runtime.check import enabled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Options(NamedTuple):
    """What a call says beside its arrays, as the schema of the operator has it. ``outer`` and ``inner`` are
    names of groups, empty for a dimension of one rank.
    """

    outer: str
    inner: str
    layout: str
    causal: bool
    window_left: int
    window_right: int
    softmax_scale: float | None
    softcap: float | None
    seqlen: int | None
    deterministic: bool
    kv_heads_per_step: int | None
    dropout_p: float
    sm_margin: int
    mask_line: str
    mask_numbers: Sequence[int]

    def mask(self, arrays: Sequence[Tensor]) -> Mask | None:
        """The mask of the call, which has these arrays; None without a line."""
        if not self.mask_line:
            return None
        rule = rule_of(self.mask_line)
        named = zip((param.name for param in rule.arrays), arrays, strict=True)
        numbers = zip((param.name for param in rule.scalars), self.mask_numbers, strict=True)
        return Mask(self.mask_line, **dict(named), **dict(numbers))

    @property
    def window(self) -> tuple[int, int]:
        return self.window_left, self.window_right


class PartOfCall(NamedTuple):
    """Some ``rows`` of this rank's unit, and the launches that compute them.

    ``group`` gathers their keys, ``per_step`` kv heads at a time; None if the unit has the keys. ``packed``
    is whether ``launches`` are of packed sequences. ``tables`` are the forward launches with tables of
    segments, for one batch entry whose keys are gathered. With a mask all rows are one launch, and its line
    reads their positions from ``places``; None if the rows are all tokens. ``numbers`` has the number of each
    document by its first token, see `parts.numbers_of`.
    """

    rows: slice
    group: Any
    units: Units
    packed: bool
    launches: tuple[Launch, ...]
    tables: tuple[Launch, ...]
    per_step: int
    places: Rows | None
    numbers: dict[int, int]


class Setting(NamedTuple):
    """``parts`` are of this rank's unit, first what gathers. ``cu_seqlens`` has the bounds of documents,
    (0, N) for one sequence, which is not ``packed``.
    """

    ranks: Ranks
    members: Members
    split: HeadShares
    cu_seqlens: tuple[int, ...]
    packed: bool
    parts: tuple[PartOfCall, ...]
    whole: Whole

    @property
    def q_heads(self) -> slice:
        """The query heads that this rank computes."""
        first = self.ranks.inner_rank * self.split.q_heads
        return slice(first, first + self.split.q_heads)


# Options that are the same on all ranks; the method and the window are compared by their meaning.
_AGREED_OPTIONS = (
    *("layout", "causal", "softmax_scale", "softcap", "deterministic", "kv_heads_per_step", "dropout_p"),
)


def setting_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens: Tensor | None,
    dropout_seed: Tensor | None,
    mask: Mask | None,
    options: Options,
    agree: bool = True,
) -> Setting:
    """The setting of a call. Raises what is wrong with it; with ``agree`` also BadParam where FLASHGEN_CHECK
    finds that ranks differ.
    """
    ranks, packed = ranks_of(options.outer, options.inner), cu_seqlens is not None

    def facts() -> dict[str, Any]:
        """What ranks have to agree on, once it is checked."""
        check_arrays(q, k, v, packed)
        check_device(ranks, q, "q")
        check_options(options, alibi_slopes is not None, packed, ranks)
        cu = documents_of(q, cu_seqlens, options, ranks)
        if mask is not None:
            check_mask(mask, cu[-1], packed, q.shape[-2], moved=packed or ranks.outer_size > 1)
        check_shard(q, cu, options.layout, ranks)
        head_shares(q.shape[-2], k.shape[-2], ranks.inner_size)
        return {
            "batch": 1 if packed else q.shape[0],
            "heads": (q.shape[-2], k.shape[-2]),
            "head_dim": (q.shape[-1], v.shape[-1]),
            "dtype": q.dtype,
            "device": q.device.type,
            "method": (ranks.outer_size, ranks.inner_size),
            "window_size": options.window,
            "sinks": sinks is not None,
            "alibi_slopes": alibi_slopes is not None,
            "cu_seqlens": cu,
            "mask": mask and (mask.line, options.mask_numbers, [x.shape for x in mask.arrays.values()]),
            "dropout_seed": dropout_seed.tolist() if dropout_seed is not None and enabled() else None,
        } | {name: getattr(options, name) for name in _AGREED_OPTIONS}

    values = agreed(ranks, facts) if agree else facts()
    cu = values["cu_seqlens"]
    split = head_shares(*values["heads"], ranks.inner_size)
    places = places_of(options.layout, cu, *ranks[2:])
    sizes = RowSizes(*values["head_dim"], values["batch"], q.dtype.itemsize)

    def per_step(part: Part) -> int:
        if options.kv_heads_per_step is not None:
            return options.kv_heads_per_step
        # Where memory is the host's, collectives and kernels do not overlap.
        if not part.gathers or q.device.type == "cpu":
            return split.kv_heads
        most = max(map(tokens_of, part.runs))
        return heads_per_step(part.cu_seqlens, most, split, sizes, ranks.world)

    visible = visibility(options.causal, options.window)
    has_tables = values["batch"] == 1 and mask is None and options.dropout_p == NO_DROPOUT

    def part_of_call(part: Part, units: Units) -> PartOfCall:
        launches, tables = (), ()
        if mask is None:
            launches = launches_of(part.own, part.cu_seqlens, visible, packed)
        if part.gathers and has_tables:
            tables = launches_of(part.own, part.cu_seqlens, visible, packed=True)
        return PartOfCall(
            rows=part.rows,
            group=ranks.outer if part.gathers else None,
            units=units,
            packed=packed and mask is None,
            launches=launches if mask is None else one_launch(part),
            tables=tables,
            per_step=per_step(part),
            places=rows_of(part, cu) if mask is not None and (packed or part.gathers) else None,
            numbers=numbers_of(part, cu),
        )

    return Setting(
        ranks=ranks,
        members=places.members,
        split=split,
        cu_seqlens=cu,
        packed=packed,
        parts=tuple(map(part_of_call, places.parts, places.units)),
        whole=Whole(
            batch=values["batch"],
            tokens=cu[-1],
            documents=len(cu) - 1 if packed else 0,
            longest=max(y - x for x, y in pairwise(cu)),
            heads_q=split.q_heads,
            heads_kv=split.kv_heads,
            window=options.window,
        ),
    )


@lru_cache(maxsize=64)
def one_launch(part: Part) -> tuple[Launch, ...]:
    """All rows of a part on all keys of its documents; no launch without rows."""
    rows = part.rows.stop - part.rows.start
    return (Launch((Segment(0, rows, 0, part.cu_seqlens[-1]),), 0),) if rows else ()


class Places(NamedTuple):
    """Where the tokens of a call are: the parts of this rank's unit, each with the units that have its
    documents; and the ranks of the unit.
    """

    parts: tuple[Part, ...]
    units: tuple[Units, ...]
    members: Members


@lru_cache(maxsize=64)
def places_of(
    layout: str, cu: tuple[int, ...], outer: int, inner: int, outer_rank: int, inner_rank: int
) -> Places:
    """The places of tokens: ``outer`` units of ``inner`` ranks, of which this rank is one."""
    shards = shards_of(layout, cu, outer * inner)
    of_units = [shards[unit * inner : (unit + 1) * inner] for unit in range(outer)]
    units = tuple(unit_of(members, outer == 1) for members in of_units)
    parts = parts_of(units, outer_rank, cu)
    members = tuple(shard.runs for shard in of_units[outer_rank])
    return Places(
        parts,
        tuple(Units(part.runs, part.place) for part in parts),
        Members(members, inner_rank, units[outer_rank].runs),
    )


def check_arrays(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Raise for shapes, dtypes and devices of a shard that no call has."""
    shape = "(batch, tokens, heads, head_dim)"
    if packed:
        shape = "(tokens, heads, head_dim), as cu_seqlens packs sequences"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != (3 if packed else 4):
            raise BadTensorShape(f"{arg(name)} has shape {tuple(x.shape)}; expected {shape}")
        if x.dtype != q.dtype:
            raise BadTensorDtype(f"{arg(name)} has dtype {x.dtype} and {arg('q')} {q.dtype}; pass one dtype")
        if x.device != q.device:
            raise DeviceTypeNotSupported(
                f"{arg(name)} is on {x.device} and {arg('q')} on {q.device}; all arrays must be on one device"
            )
        if x.shape[:-2] != q.shape[:-2]:
            raise BadTensorShape(
                f"{arg(name)} has shape {tuple(x.shape)} and {arg('q')} {tuple(q.shape)}; a shard "
                "has as many keys as queries"
            )
    if k.shape[-1] != q.shape[-1]:
        raise BadTensorShape(f"{arg('k')} has head_dim {k.shape[-1]} and {arg('q')} {q.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise BadTensorShape(f"{arg('v')} has {v.shape[-2]} heads and {arg('k')} {k.shape[-2]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise BadTensorShape(
            f"{arg('q')} has {q.shape[-2]} heads, which is not a multiple of the {k.shape[-2]} heads of k"
        )


def check_options(options: Options, has_slopes: bool, packed: bool, ranks: Ranks) -> None:
    """Raise BadParam for options that no call has, or that the method of this one lacks."""
    check_layout(options.layout)
    left, right = window_of(options.window)
    if options.causal and right > 0:
        raise BadParam(
            f"{arg('window_size')} is {(left, right)}, but causal hides every later key: right must be 0 or "
            "-1"
        )
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise BadParam(f"{arg('softcap')} is {options.softcap}; it must be a number above 0, or None")
    check_bias(options.dropout_p)
    per_step = options.kv_heads_per_step
    if per_step is not None and per_step < 1:
        raise BadParam(f"{arg('kv_heads_per_step')} is {per_step}; expected 1 or more, or None")
    if options.mask_line and options.dropout_p != NO_DROPOUT:
        raise BadParam(
            f"{arg('dropout_p')} is {options.dropout_p:g} and {arg('mask')} was given, whose kernels have no "
            "dropout; leave one out"
        )
    if options.mask_line and has_slopes and (packed or ranks.outer_size > 1):
        raise BadParam(
            f"{arg('alibi_slopes')} and {arg('mask')} were given; a launch with a mask does not know how far "
            "a key is: 'ulysses' without cu_seqlens can compute this call"
        )
    if has_slopes and ranks.outer_size > 1 and not (options.causal or right == 0):
        raise BadParam(
            f"{arg('alibi_slopes')} without causal: {arg('method')} 'gather' aligns positions with the last "
            "key that a shard sees, which is not its last row; 'ulysses' can compute this call"
        )


def documents_of(q: Tensor, cu_seqlens: Tensor | None, options: Options, ranks: Ranks) -> tuple[int, ...]:
    """The bounds of the documents of all ranks. Raises BadParam."""
    if cu_seqlens is None:
        total = ranks.world * q.shape[-3] if options.seqlen is None else options.seqlen
        return bounds_of(int(total))
    bounds = _bounds(cu_seqlens.numpy().tobytes(), cu_seqlens.dtype)
    if options.seqlen is not None and options.seqlen != bounds[-1]:
        raise BadParam(
            f"{arg('seqlen')} is {options.seqlen} and {arg('cu_seqlens')} ends at {bounds[-1]}; make padding "
            "a document"
        )
    return bounds


@lru_cache(maxsize=16)
def _bounds(values: bytes, dtype: torch.dtype) -> tuple[int, ...]:
    return bounds_of(torch.frombuffer(bytearray(values), dtype=dtype) if values else ())


def check_shard(q: Tensor, cu: tuple[int, ...], layout: str, ranks: Ranks) -> None:
    """Raise BadTensorShape where a shard has another length than its layout says."""
    runs = runs_of(layout, cu, ranks.world)[ranks.rank]
    if q.shape[-3] != tokens_of(runs):
        raise BadTensorShape(
            f"{arg('q')} has {q.shape[-3]} tokens; of {cu[-1]} tokens in {len(cu) - 1} "
            f"document{'s' * (len(cu) > 2)}, layout {layout!r} gives rank {ranks.rank} of {ranks.world} "
            f"{tokens_of(runs)}. {arg('seqlen')} says how many there are where shards differ in length, and "
            "flashgen.distributed.shard() cuts them"
        )
