"""Both passes of a unit: the launches of each step of kv heads, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.call.compute import compute
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.request import gradients_of, names_of
from flashgen.distributed.gather import KeyGradients, cu_seqlens_of, key_rows, keys_and_values, steps
from flashgen.distributed.kernels import attend
from flashgen.errors import naming
from flashgen.runtime.arrays import kind_of

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.distributed.segments import Launch
    from flashgen.distributed.setting import Options, Setting


class Inputs(NamedTuple):
    """The arrays of a unit: (batch, rows, heads, head_dim), and of its query heads sinks and slopes."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None


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
        whole = _Whole.of(setting, step, k, v)
        for launch in setting.launches:
            keys, values = whole.keys_and_values(launch)
            arrays = _arrays(setting, launch, q=q[:, launch.rows, heads], k=keys, v=values)
            arrays["out"] = _of_launch(setting, out[:, launch.rows, heads])
            call = call_of(
                AttentionCall, **arrays, **_options(setting, options, launch, inputs, heads), return_lse=True
            )
            _, some = attend(call, setting.whole, launch.shift)
            lse[:, heads, launch.rows] = some


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
        for launch in setting.launches:
            keys, values = whole.keys_and_values(launch)
            rows = launch.rows
            arrays = _arrays(
                setting,
                launch,
                q=q[:, rows, heads],
                k=keys,
                v=values,
                out=out[:, rows, heads],
                dout=dout[:, rows, heads],
                dq=dq[:, rows, heads],
            )
            for name, x in (("lse", lse), ("dlse", dlse)):
                if x is not None:
                    arrays[name] = _of_launch(setting, x[:, heads, rows]).contiguous()
            call = call_of(
                GradientCall,
                **arrays,
                **_options(setting, options, launch, inputs, heads),
                deterministic=options.deterministic,
            )
            with naming(names_of(call)):
                _, dk, dv, *more = compute(gradients_of(call), kind_of(call.q))
            if setting.packed:
                dk, dv = dk[None], dv[None]
            sums.add(total, dk, dv, launch)
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
        result |= {"max_seqlen_q": launch.longest_q, "max_seqlen_kv": launch.longest_kv}
    return result


def _options(
    setting: Setting, options: Options, launch: Launch, inputs: Inputs, heads: slice
) -> dict[str, Any]:
    """The options of a launch: a window is moved by its shift, and arrays of heads are of its heads."""
    left, right = options.window
    return {
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
