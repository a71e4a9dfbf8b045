"""Both passes of a unit: the launches of each step of kv heads, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.call.compute import compute
from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.request import gradients_of, names_of
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
from flashgen.distributed.kernels import attend
from flashgen.distributed.segments import longest_of
from flashgen.errors import naming
from flashgen.operators.dropout import LANES, NO_DROPOUT
from flashgen.runtime.arrays import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from flashgen.distributed.gather import Step
    from flashgen.distributed.segments import Launch
    from flashgen.distributed.setting import Options, Setting


class Inputs(NamedTuple):
    """The arrays of a unit: (batch, rows, heads, head_dim), and of its query heads sinks and slopes."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    dropout_seed: Tensor | None


class Gradients(NamedTuple):
    """dq in the dtype of q, dk, dv and dsinks in fp32; dk and dv of the unit's rows, summed over units."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def forward(setting: Setting, options: Options, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Fill ``out``, (batch, rows, heads, head_dim_v), and ``lse``, (batch, heads, rows)."""
    q, k, v = inputs[:3]
    for step in steps(k, v, setting.per_step, setting.units, setting.ranks.outer):
        heads = _q_heads(step.heads, q, k)
        if setting.tables and _forward_of_tables(setting, options, inputs, step, heads, out, lse):
            continue
        whole = _Whole.of(setting, step, k, v)
        for launch, batch in _launches(setting, options, q):
            keys, values = whole.keys_and_values(launch)
            rows = launch.rows
            arrays = _arrays(
                setting,
                launch,
                q=q[batch, rows, heads],
                k=keys[batch],
                v=values[batch],
                out=out[batch, rows, heads],
            )
            more = _options(setting, options, launch, inputs, heads, batch)
            more["sm_margin"] = options.sm_margin
            call = call_of(AttentionCall, **arrays, **more, return_lse=True)
            _, some = attend(call, setting.whole, launch.shift)
            lse[batch, heads, rows] = some


def _forward_of_tables(
    setting: Setting,
    options: Options,
    inputs: Inputs,
    step: Step,
    heads: slice,
    out: Tensor,
    lse: Tensor,
) -> bool:
    """`forward` of a step whose launches take tables of segments: packed queries, and keys of a cache of one
    row. So a launch has all segments of one shift, and no key is copied for each segment. False if no kernel
    of such calls has the tile of the kernel of one GPU.
    """
    end = max(x.k_end for launch in setting.tables for x in launch.segments)
    order = token_rows(setting.units, inputs.k.device)[:end]
    keys, values = keys_and_values(step, inputs.k, inputs.v, order)
    for launch in setting.tables:
        table = table_of(launch, order.device)
        more = _options(setting, options, launch, inputs, heads, slice(None))
        more["sm_margin"] = options.sm_margin
        if more["alibi_slopes"] is not None:
            more["alibi_slopes"] = more["alibi_slopes"].reshape(-1)
        of_q = {"q": inputs.q[0, launch.rows, heads], "out": out[0, launch.rows, heads]}
        cache = KVCache(keys, values, table.lengths, index=table.index, starts=table.starts)
        bounds = {"cu_seqlens_q": table.cu_seqlens_q, "max_seqlen_q": longest_of(launch)[0]}
        call = call_of(AttentionCall, **of_q, k=cache, **bounds, **more, return_lse=True)
        arrays = of_q | {"k": keys[0], "v": values[0]}
        if setting.packed:
            arrays |= {f"cu_seqlens_{side}": table.cu_seqlens_q for side in ("q", "kv")}
        else:
            arrays = {name: x[None] for name, x in arrays.items()}
        like = call_of(AttentionCall, **arrays, **more, return_lse=True)
        result = attend(call, setting.whole, launch.shift, like)
        if result is None:
            return False
        lse[0, heads, launch.rows] = result[1]
    return True


def backward(
    setting: Setting,
    options: Options,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """The gradients of a unit, of arrays as in `forward`."""
    q, k, v = inputs[:3]
    dq = torch.empty_like(q)
    dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks, dtype=torch.float32)
    sums = KeyGradients(
        k,
        v,
        setting.units,
        setting.ranks.outer,
        packed=setting.packed,
        deterministic=options.deterministic,
    )
    for step in steps(k, v, setting.per_step, setting.units, setting.ranks.outer):
        heads = _q_heads(step.heads, q, k)
        total = sums.empty(step)
        whole = _Whole.of(setting, step, k, v)
        for launch, batch in _launches(setting, options, q):
            keys, values = whole.keys_and_values(launch)
            rows = launch.rows
            arrays = _arrays(
                setting,
                launch,
                q=q[batch, rows, heads],
                k=keys[batch],
                v=values[batch],
                out=out[batch, rows, heads],
                dout=dout[batch, rows, heads],
                dq=dq[batch, rows, heads],
            )
            for name, x in (("lse", lse), ("dlse", dlse)):
                if x is not None:
                    arrays[name] = _of_launch(setting, x[batch, heads, rows]).contiguous()
            fp32 = _adds_up(setting, options, q)
            if fp32 and not setting.packed:  # kernels of sequences with lengths write fp32
                arrays["kv_lengths"] = kv_lengths_of(*keys[batch].shape[:2], q.device)
            of_keys = sums.of_launch(arrays["k"], arrays["v"], fp32)
            arrays |= {"dk": of_keys[..., : k.shape[-1]], "dv": of_keys[..., k.shape[-1] :]}
            call = call_of(
                GradientCall,
                **arrays,
                **_options(setting, options, launch, inputs, heads, batch),
                deterministic=options.deterministic,
            )
            with naming(names_of(call)):
                _, _, _, *more = compute(gradients_of(call), kind_of(call.q))
            sums.add(total[:, batch], of_keys, launch)
            if dsinks is not None:
                dsinks[heads] += more[0]
        sums.send(step, total)
    return Gradients(dq, *sums.results(), dsinks)


class _Whole(NamedTuple):
    """Keys and values of a step. Where sequences are not packed, segments are ranges of tokens, so keys are
    put into the order of tokens once for all launches.
    """

    setting: Setting
    step: Any
    k: Tensor
    v: Tensor
    in_order: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, setting: Setting, step: Any, k: Tensor, v: Tensor) -> _Whole:
        in_order = None
        if not setting.packed and setting.launches:
            furthest = max(setting.launches, key=lambda launch: launch.segments[0].k_end)
            order = key_rows(furthest, setting.units, k.device).order
            in_order = keys_and_values(step, k, v, order)
        return cls(setting, step, k, v, in_order)

    def keys_and_values(self, launch: Launch) -> tuple[Tensor, Tensor]:
        if self.in_order is None:
            order = key_rows(launch, self.setting.units, self.k.device).order
            return keys_and_values(self.step, self.k, self.v, order)
        segment = launch.segments[0]
        keys, values = self.in_order
        return keys[:, : segment.k_end], values[:, : segment.k_end]


def _adds_up(setting: Setting, options: Options, q: Tensor) -> bool:
    """Whether dk and dv of a launch are parts of sums, so that kernels write them in fp32."""
    several = setting.ranks.outer is not None or setting.split.replicated
    return several and q.dtype.itemsize == 2 and options.dropout_p == NO_DROPOUT


def _launches(setting: Setting, options: Options, q: Tensor) -> Iterator[tuple[Launch, slice]]:
    """The launches of a step, each with its batch entries: with dropout one entry after another, since the
    random numbers of an entry depend on the heads of all ranks.
    """
    entries = [slice(None)]
    if options.dropout_p != NO_DROPOUT:
        entries = [slice(entry, entry + 1) for entry in range(q.shape[0])]
    yield from ((launch, batch) for launch in setting.launches for batch in entries)


def _dropout_seed(setting: Setting, seed: Tensor, heads: slice, batch: slice) -> Tensor:
    """Seed and offset with which a launch of some heads of one batch entry draws the random numbers of the
    whole call.
    """
    all_heads = setting.split.q_heads * setting.split.inner
    place = batch.start * all_heads + setting.q_heads.start + heads.start
    return torch.stack((seed[0], seed[1] + place * LANES))


def _q_heads(kv_heads: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads of some kv heads."""
    group = q.shape[2] // k.shape[2]
    return slice(kv_heads.start * group, min(kv_heads.stop, k.shape[2]) * group)


def _of_launch(setting: Setting, x: Tensor) -> Tensor:
    """An array as a launch has it: without batch where sequences are packed."""
    return x[0] if setting.packed else x


def _arrays(setting: Setting, launch: Launch, **arrays: Tensor) -> dict[str, Any]:
    """The arrays of a launch, with the lengths of its segments."""
    result: dict[str, Any] = {name: _of_launch(setting, x) for name, x in arrays.items()}
    if setting.packed:
        of_q, of_kv = cu_seqlens_of(launch, arrays["q"].device)
        result |= {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
        result |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest_of(launch), strict=True))
    return result


def _options(
    setting: Setting, options: Options, launch: Launch, inputs: Inputs, heads: slice, batch: slice
) -> dict[str, Any]:
    """The options of a launch: a window is moved by its shift, and arrays of heads are of its heads."""
    left, right = options.window
    dropout: dict[str, Any] = {}
    if inputs.dropout_seed is not None:
        seed = _dropout_seed(setting, inputs.dropout_seed, heads, batch)
        dropout = {"dropout_p": options.dropout_p, "dropout_seed": seed}
    return dropout | {
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
