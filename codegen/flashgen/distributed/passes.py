"""Both passes of a unit: the launches of each step of kv heads, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from flashgen.call.compute import compute
from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.request import gradients_of, names_of, request_of
from flashgen.distributed.gather import (
    KeyGradients,
    cu_seqlens_of,
    key_rows,
    keys_and_values,
    kv_lengths_of,
    steps,
    table_of,
    token_rows,
)
from flashgen.distributed.heads import query_heads_of
from flashgen.distributed.kernels import attend
from flashgen.distributed.masks import mask_of
from flashgen.distributed.segments import (
    by_rows,
    launches_of_documents,
    longest_of,
    visibility,
    with_rows_before,
)
from flashgen.errors import naming
from flashgen.operators.dropout import LANES, NO_DROPOUT, QUERIES
from flashgen.runtime.arrays import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from flashgen.call.mask import Mask
    from flashgen.distributed.gather import Step, Units
    from flashgen.distributed.segments import Launch
    from flashgen.distributed.setting import Options, PartOfCall, Setting


class Inputs(NamedTuple):
    """The arrays of a unit: (batch, rows, heads, head_dim), and of its query heads sinks and slopes; the mask
    is of the call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    dropout_seed: Tensor | None
    mask: Mask | None

    def rows_of(self, part: PartOfCall) -> Inputs:
        """The inputs of a part's rows."""
        q, k, v = (x[:, part.rows] for x in self[:3])
        return self._replace(q=q, k=k, v=v)


class Gradients(NamedTuple):
    """dq, dk and dv of the unit's rows, and dsinks in fp32. dk and dv are summed over units; in fp32 where
    ranks of a unit have copies of a kv head, else in the dtype of q.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


class _Call(NamedTuple):
    """What the launches of a part need to know of the call."""

    setting: Setting
    options: Options
    part: PartOfCall


def forward(setting: Setting, options: Options, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Fill ``out``, (batch, rows, heads, head_dim_v), and ``lse``, (batch, heads, rows). A part that gathers
    no keys is computed while the first keys of the other part are gathered.
    """
    started = [_started(part, inputs) for part in setting.parts]
    for part, some, of_part in reversed(started):
        call = _Call(setting, options, part)
        for step in of_part:
            _forward_of_step(call, some, step, out[:, part.rows], lse[:, :, part.rows])


def _started(part: PartOfCall, inputs: Inputs) -> tuple[PartOfCall, Inputs, Iterator[Step]]:
    """A part, its inputs and its steps, of which the first one begins to be gathered."""
    some = inputs.rows_of(part)
    return part, some, steps(some.k, some.v, part.per_step, part.units, part.group)


def _forward_of_step(call: _Call, inputs: Inputs, step: Step, out: Tensor, lse: Tensor) -> None:
    """`forward` of one step of a part, of arrays of its rows."""
    setting, options, part = call
    q, k, v = inputs[:3]
    heads = query_heads_of(step.heads, q.shape[2], k.shape[2])
    if part.tables and _forward_of_tables(call, inputs, step, heads, out, lse):
        return
    whole = _Whole.of(call, step, k, v)
    for piece in _launches(call, q):
        launch, batch, before = piece.launch, piece.batch, piece.before
        keys, values = whole.keys_and_values(launch)
        rows = launch.rows
        of_rows = out[batch, rows, heads]
        arrays = _arrays(
            part,
            with_rows_before(launch, before) if before else launch,
            q=_after_rows(q[batch, rows, heads], before),
            k=keys[batch],
            v=values[batch],
            out=_after_rows(of_rows, before),
        )
        more = _options(call, piece, inputs, heads)
        more["sm_margin"] = options.sm_margin
        record = call_of(AttentionCall, **arrays, **more, return_lse=True)
        if inputs.mask is None:
            _, some = attend(record, setting.whole, launch.shift)
        else:
            with naming(names_of(record)):
                _, some = compute(request_of(record), kind_of(record.q))
        lse[batch, heads, rows] = some[..., before:]
        if before:
            of_rows[...] = arrays["out"][..., before:, :, :]


def _forward_of_tables(
    call: _Call, inputs: Inputs, step: Step, heads: slice, out: Tensor, lse: Tensor
) -> bool:
    """`forward` of a step whose launches take tables of segments: packed queries, and keys of a cache of one
    row. So a launch has all segments of one shift, and no key is copied for each segment. False if no kernel
    of such calls has the tile of the kernel of one GPU.
    """
    setting, options, part = call
    end = max(x.k_end for launch in part.tables for x in launch.segments)
    order = token_rows(part.units, inputs.k.device)[:end]
    keys, values = keys_and_values(step, inputs.k, inputs.v, order)
    for launch in part.tables:
        table = table_of(launch, keys.device)
        more = _options(call, _Piece(launch), inputs, heads)
        more["sm_margin"] = options.sm_margin
        if more["alibi_slopes"] is not None:
            more["alibi_slopes"] = more["alibi_slopes"].reshape(-1)
        of_q = {"q": inputs.q[0, launch.rows, heads], "out": out[0, launch.rows, heads]}
        cache = KVCache(keys, values, table.lengths, index=table.index, starts=table.starts)
        bounds = {"cu_seqlens_q": table.cu_seqlens_q, "max_seqlen_q": longest_of(launch)[0]}
        of_table = call_of(AttentionCall, **of_q, k=cache, **bounds, **more, return_lse=True)
        arrays = of_q | {"k": keys[0], "v": values[0]}
        like = partial(_like_one_gpu, arrays, more, table.cu_seqlens_q if setting.packed else None)
        result = attend(of_table, setting.whole, launch.shift, like)
        if result is None:
            return False
        lse[0, heads, launch.rows] = result[1]
    return True


def _like_one_gpu(
    arrays: dict[str, Any], options: dict[str, Any], cu_seqlens: Tensor | None
) -> AttentionCall:
    """The call of a table with the arrays that the call of one GPU has."""
    if cu_seqlens is None:
        arrays = {name: x[None] for name, x in arrays.items()}
    else:
        arrays = arrays | {f"cu_seqlens_{side}": cu_seqlens for side in ("q", "kv")}
    return call_of(AttentionCall, **arrays, **options, return_lse=True)


def backward(
    setting: Setting,
    options: Options,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """The gradients of a unit; arrays as in `forward`. A part that gathers no keys is computed last, while
    the last gradients of the other part are summed over ranks.
    """
    q, k, v = inputs[:3]
    dtype = torch.float32 if setting.split.replicated else q.dtype
    dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks, dtype=torch.float32)
    gradients = Gradients(torch.empty_like(q), dk, dv, dsinks)
    started = [_started(part, inputs) for part in setting.parts]
    sums = []
    for part, some, of_part in started:
        rows = part.rows
        arrays = out[:, rows], lse[:, :, rows], dout[:, rows], None if dlse is None else dlse[:, :, rows]
        of_rows = Gradients(gradients.dq[:, rows], dk[:, rows], dv[:, rows], dsinks)
        call = _Call(setting, options, part)
        if part.group is None and _writes_results(call, q):
            for step in of_part:
                _backward_of_step(call, some, step, arrays, of_rows, None)
            continue
        sums.append(
            KeyGradients(
                *of_rows[1:3],
                part.units,
                part.group,
                by_rows=by_rows(part.packed, part.launches),
                deterministic=options.deterministic,
            )
        )
        for step in of_part:
            _backward_of_step(call, some, step, arrays, of_rows, sums[-1])
    for of_part in sums:
        of_part.end()
    return gradients


def _backward_of_step(
    call: _Call,
    inputs: Inputs,
    step: Step,
    arrays: tuple[Tensor, Tensor, Tensor, Tensor | None],
    gradients: Gradients,
    sums: KeyGradients | None,
) -> None:
    """`backward` of one step of a part, of arrays of its rows: out, lse, dout and dlse. Without ``sums`` the
    one launch of the part writes dk and dv.
    """
    _, options, part = call
    q, k, v = inputs[:3]
    heads = query_heads_of(step.heads, q.shape[2], k.shape[2])
    fp32 = _adds_up(call, q)
    pieces = list(_launches(call, q))
    furthest = 0
    if sums is not None and fp32 and not part.packed and pieces:
        # The launch with the most keys writes its gradients into the sums; the others are added to them.
        pieces.sort(key=lambda piece: -piece.launch.segments[0].k_end)
        furthest = pieces[0].launch.segments[0].k_end
    total = None if sums is None else sums.zeros(step, furthest)
    whole = _Whole.of(call, step, k, v)
    for number, piece in enumerate(pieces):
        launch, batch = piece.launch, piece.batch
        keys, values = (x[batch] for x in whole.keys_and_values(launch))
        of_launch = _arrays_of_gradients(part, piece, heads, inputs, keys, values, arrays, gradients.dq)
        if fp32 and not part.packed:  # kernels of sequences with lengths write fp32
            of_launch["kv_lengths"] = kv_lengths_of(*keys.shape[:2], q.device)
        begins_sums = furthest > 0 and number == 0
        of_keys = None
        if sums is None:
            for name, x in (("dk", gradients.dk), ("dv", gradients.dv)):
                of_launch[name] = _of_launch(part, x[batch, :, step.heads])
        else:
            if begins_sums:
                of_keys = total[:furthest].transpose(0, 1)
            else:
                of_keys = sums.of_launch(of_launch["k"], of_launch["v"], fp32)
            of_launch |= {"dk": of_keys[..., : k.shape[-1]], "dv": of_keys[..., k.shape[-1] :]}
        record = call_of(
            GradientCall,
            **of_launch,
            **_options(call, piece, inputs, heads),
            deterministic=options.deterministic,
        )
        with naming(names_of(record)):
            _, _, _, *more = compute(gradients_of(record), kind_of(record.q))
        if piece.before:
            gradients.dq[batch, launch.rows, heads] = of_launch["dq"][..., piece.before :, :, :]
        if sums is not None and not begins_sums:
            sums.add(total[:, batch], of_keys, launch)
        if gradients.dsinks is not None:
            gradients.dsinks[heads] += more[0]
    if sums is not None:
        sums.send(step, total)


def _arrays_of_gradients(
    part: PartOfCall,
    piece: _Piece,
    heads: slice,
    inputs: Inputs,
    keys: Tensor,
    values: Tensor,
    arrays: tuple[Tensor, Tensor, Tensor, Tensor | None],
    dq: Tensor,
) -> dict[str, Any]:
    """The arrays of a backward launch, without dk and dv; ``arrays`` as in `_backward_of_step`."""
    launch, before = piece.launch, piece.before
    out, lse, dout, dlse = arrays
    place = piece.batch, launch.rows, heads
    of_launch = _arrays(
        part,
        with_rows_before(launch, before) if before else launch,
        q=_after_rows(inputs.q[place], before),
        k=keys,
        v=values,
        out=_after_rows(out[place], before),
        dout=_after_rows(dout[place], before),
        dq=_after_rows(dq[place], before),
    )
    for name, x in (("lse", lse), ("dlse", dlse)):
        if x is not None:
            of_rows = x[piece.batch, heads, launch.rows]
            of_rows = pad(of_rows, (before, 0)) if before else of_rows
            of_launch[name] = _of_launch(part, of_rows).contiguous()
    return of_launch


class _Whole(NamedTuple):
    """Keys and values of a step. Where sequences are not packed, segments are ranges of tokens, so keys are
    put into the order of tokens once for all launches.
    """

    units: Units
    step: Step
    k: Tensor
    v: Tensor
    in_order: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, call: _Call, step: Step, k: Tensor, v: Tensor) -> _Whole:
        part, in_order = call.part, None
        if not part.packed and part.launches:
            furthest = max(part.launches, key=lambda launch: launch.segments[0].k_end)
            order = key_rows(furthest, part.units, k.device).order
            in_order = keys_and_values(step, k, v, order)
        return cls(part.units, step, k, v, in_order)

    def keys_and_values(self, launch: Launch) -> tuple[Tensor, Tensor]:
        if self.in_order is None:
            order = key_rows(launch, self.units, self.k.device).order
            return keys_and_values(self.step, self.k, self.v, order)
        segment = launch.segments[0]
        keys, values = self.in_order
        return keys[:, : segment.k_end], values[:, : segment.k_end]


def _adds_up(call: _Call, q: Tensor) -> bool:
    """Whether dk and dv of a launch are parts of sums, so that kernels write them in fp32."""
    several = call.part.group is not None or call.setting.split.replicated
    plain = call.options.dropout_p == NO_DROPOUT and not call.options.mask_line
    return several and q.dtype.itemsize == 2 and plain


def _writes_results(call: _Call, q: Tensor) -> bool:
    """Whether a launch of a part that gathers nothing writes dk and dv as they are returned: each row once,
    and in its dtype.
    """
    fp32 = call.setting.split.replicated
    one = len(call.part.launches) == 1 and not (call.part.packed and call.options.dropout_p != NO_DROPOUT)
    return one and (not fp32 or q.dtype.itemsize == 4 or _adds_up(call, q))


class _Piece(NamedTuple):
    """A launch and its batch entries. With dropout ``number`` is of its one entry or document, and a block of
    random numbers has 16 rows: ``before`` are the rows of padding that complete the block of the first row.
    """

    launch: Launch
    batch: slice = slice(None)
    number: int = 0
    before: int = 0

    @property
    def first_row(self) -> int:
        """The first row, of padding or not, as random numbers count the rows of an entry or document."""
        return self.launch.segments[0].position - self.before


def _launches(call: _Call, q: Tensor) -> Iterator[_Piece]:
    """The launches of a step. With dropout it is one batch entry or document after another, since the random
    numbers of each depend on the heads of all ranks, and on where its rows begin.
    """
    for launch in call.part.launches:
        if call.options.dropout_p == NO_DROPOUT:
            yield _Piece(launch)
            continue
        for one in launches_of_documents(launch) if call.part.packed else (launch,):
            first = one.segments[0]
            before = first.position % QUERIES
            if call.part.packed:
                yield _Piece(one, number=call.part.numbers[first.k_begin], before=before)
            else:
                for entry in range(q.shape[0]):
                    yield _Piece(one, slice(entry, entry + 1), entry, before)


def _after_rows(x: Tensor, before: int) -> Tensor:
    """``x``, (batch, rows, heads, width), after this many rows of zeros."""
    return pad(x, (0, 0, 0, 0, before, 0)) if before else x


def _dropout_seed(setting: Setting, seed: Tensor, heads: slice, number: int) -> Tensor:
    """Seed and offset with which a launch of some heads of one batch entry or document draws the random
    numbers of the whole call.
    """
    all_heads = setting.split.q_heads * setting.split.inner
    place = number * all_heads + setting.q_heads.start + heads.start
    return torch.stack((seed[0], seed[1] + place * LANES))


def _of_launch(part: PartOfCall, x: Tensor) -> Tensor:
    """An array as a launch has it: without batch where sequences are packed."""
    return x[0] if part.packed else x


def _arrays(part: PartOfCall, launch: Launch, **arrays: Tensor) -> dict[str, Any]:
    """The arrays of a launch, with the lengths of its segments."""
    result: dict[str, Any] = {name: _of_launch(part, x) for name, x in arrays.items()}
    if part.packed:
        of_q, of_kv = cu_seqlens_of(launch, arrays["q"].device)
        result |= {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
        result |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest_of(launch), strict=True))
    return result


def _options(call: _Call, piece: _Piece, inputs: Inputs, heads: slice) -> dict[str, Any]:
    """The options of a launch: a window is moved by its shift, and arrays of heads are of its heads."""
    options, launch = call.options, piece.launch
    left, right = options.window
    dropout: dict[str, Any] = {}
    if inputs.dropout_seed is not None:
        seed = _dropout_seed(call.setting, inputs.dropout_seed, heads, piece.number)
        dropout = {"dropout_p": options.dropout_p, "dropout_seed": seed, "dropout_row": piece.first_row}
    result = dropout | {
        "causal": options.causal,
        "window_size": (
            left if left < 0 else left + launch.shift,
            right if right < 0 else right - launch.shift,
        ),
        "softmax_scale": options.softmax_scale,
        "softcap": options.softcap,
        "sinks": None if inputs.sinks is None else inputs.sinks[heads],
        "alibi_slopes": None if inputs.alibi_slopes is None else inputs.alibi_slopes[..., heads].contiguous(),
    }
    if inputs.mask is not None:
        setting, places = call.setting, call.part.places
        first = setting.q_heads.start
        of_launch = slice(first + heads.start, first + heads.stop)
        visible = visibility(options.causal, options.window)
        result["mask"] = mask_of(inputs.mask, places, visible, setting.packed, of_launch, inputs.q.device)
        if places is not None:  # its line hides what the options hide
            result |= {"causal": False, "window_size": (-1, -1)}
    return result
