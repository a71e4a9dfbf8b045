"""Attention of a sequence that is cut over the devices of a mesh of JAX, inside ``jax.shard_map``.
K and V of all devices are gathered. Their gradients are summed over devices in fp32.

>>> from flashgen.distributed.shardmap import attention, token_order

All devices run one program, so shapes do not depend on the device: each part of its rows sees the keys before
a length that the device computes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashgen.api.attention import attention as whole_attention
from flashgen.call.record import GradientCall, call_of
from flashgen.call.request import gradients_of, names_of
from flashgen.call.xla.primitive import bind
from flashgen.distributed.layouts import check_layout, runs_of
from flashgen.errors import BadParam, BadTensorShape, arg
from flashgen.operators.arguments import flag
from flashgen.operators.maskoptions import window_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["attention", "token_order"]

# The parts of ascending tokens that a device has.
_PARTS = {"contiguous": 1, "zigzag": 2}


class _Options(NamedTuple):
    """``left`` is the window before a query, -1 for none."""

    axis_name: str
    layout: str
    causal: bool
    left: int
    softmax_scale: float | None
    softcap: float | None

    @property
    def of_call(self) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "window_size": (self.left, -1),
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }


class _Part(NamedTuple):
    """Some rows of a device; ``lengths`` is how many keys the last of them sees, (batch,), None for all."""

    rows: slice
    lengths: Any

    def options(self) -> dict[str, Any]:
        return {} if self.lengths is None else {"kv_lengths": self.lengths}


def token_order(tokens: int, devices: int, layout: str = "zigzag") -> np.ndarray:
    """The tokens in the order of devices, int64: ``x[:, token_order(...)]``, sharded over the mesh axis, has
    this layout. Cut in the same way, it has the positions of a device's tokens. Raises BadParam if devices do
    not get equally many tokens.
    """
    parts = _parts_of(layout)
    if tokens % (parts * devices):
        raise BadParam(
            f"{arg('tokens')} is {tokens}; layout {layout!r} over {devices} devices needs a multiple of "
            f"{parts * devices}"
        )
    shards = runs_of(layout, (0, tokens), devices)
    return np.concatenate([np.arange(*run) for runs in shards for run in runs] or [np.zeros(0, np.int64)])


def _parts_of(layout: str) -> int:
    """The parts that a device has in this layout. Raises BadParam."""
    check_layout(layout)
    if layout not in _PARTS:
        raise BadParam(
            f"{arg('layout')} is {layout!r}; expected {' or '.join(map(repr, _PARTS))} inside jax.shard_map"
        )
    return _PARTS[layout]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: str,
    layout: str = "zigzag",
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """``flashgen.attention`` of a sequence whose tokens are cut over the mesh axis ``axis_name``; call it
    inside ``jax.shard_map``. Differentiable by ``jax.grad``.

    q, k, v: this device's tokens, (batch, tokens, heads, head_dim); all devices have equally many.
    layout: "zigzag", even work under a causal mask, or "contiguous"; see `token_order`.
    causal, window_size, softmax_scale, softcap: as in ``flashgen.attention``; a window is causal.
    return_lse: also return the log-sum-exp, fp32, (batch, heads, tokens).

    Raises BadParam for a window without causal, or that looks ahead, and what ``flashgen.attention`` raises.
    """
    left, right = window_of(window_size)
    causal = flag("causal", causal)
    if right > 0 or ((left, right) != (-1, -1) and not (causal or right == 0)):
        raise BadParam(
            f"{arg('window_size')} is {(left, right)}; inside jax.shard_map a window is causal: right must "
            f"be 0, or {arg('causal')} True"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[:2] != q.shape[:2]:
            raise BadTensorShape(
                f"{arg(name)} has shape {tuple(x.shape)}; expected (batch, tokens, heads, head_dim), with "
                "the batch and tokens of q"
            )
    parts = _parts_of(layout)
    options = _Options(axis_name, layout, causal or right == 0, left, softmax_scale, softcap)
    if q.shape[1] % parts:
        raise BadTensorShape(f"{arg('q')} has {q.shape[1]} tokens; layout {layout!r} needs an even number")
    out, lse = _attend(options, q, k, v)
    return (out, lse) if flag("return_lse", return_lse) else out


def _parts(options: _Options, batch: int, rows: int) -> Iterator[_Part]:
    """The parts of this device's rows, each with the keys that it sees."""
    if not options.causal:
        yield _Part(slice(0, rows), None)
        return
    devices, device = jax.lax.axis_size(options.axis_name), jax.lax.axis_index(options.axis_name)
    count = _PARTS[options.layout]
    size = rows // count
    places = (device,) if count == 1 else (device, 2 * devices - 1 - device)
    for part, place in enumerate(places):
        lengths = jnp.broadcast_to((place + 1) * size, (batch,)).astype(jnp.int32)
        yield _Part(slice(part * size, (part + 1) * size), lengths)


def _gathered(options: _Options, x: Any) -> Any:
    """x of all devices in the order of tokens, (batch, all tokens, ...)."""
    whole = jax.lax.all_gather(x, options.axis_name, axis=1, tiled=True)
    return whole[:, np.argsort(_order(options, x.shape[1]))]


def _order(options: _Options, rows: int) -> np.ndarray:
    devices = jax.lax.axis_size(options.axis_name)
    return token_order(rows * devices, devices, options.layout)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    keys, values = _gathered(options, k), _gathered(options, v)
    parts = [
        whole_attention(q[:, part.rows], keys, values, return_lse=True, **options.of_call, **part.options())
        for part in _parts(options, *q.shape[:2])
    ]
    outs, lses = zip(*parts, strict=True)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


def _forward(options: _Options, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    out, lse = _attend(options, q, k, v)
    return (out, lse), (q, k, v, out, lse)


def _backward(options: _Options, kept: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, out, lse = kept
    dout, dlse = cotangents
    keys, values = _gathered(options, k), _gathered(options, v)
    dqs, sums = [], [0.0, 0.0]
    for part in _parts(options, *q.shape[:2]):
        rows = part.rows
        call = call_of(
            GradientCall,
            dout=dout[:, rows],
            q=q[:, rows],
            k=keys,
            v=values,
            out=out[:, rows],
            lse=lse[:, :, rows],
            dlse=dlse[:, :, rows],
            kv_lengths=jnp.full(keys.shape[:1], keys.shape[1], jnp.int32),
            dkv_dtype="fp32",
        )
        call = call.replace(**options.of_call, **part.options())
        of_part = bind(gradients_of(call), names_of(call))
        dqs.append(of_part["dq"])
        sums = [
            total + of_part[name].astype(jnp.float32) for total, name in zip(sums, ("dk", "dv"), strict=True)
        ]
    order = _order(options, q.shape[1])
    dk, dv = (
        jax.lax.psum_scatter(x[:, order], options.axis_name, scatter_dimension=1, tiled=True) for x in sums
    )
    return jnp.concatenate(dqs, 1), dk.astype(k.dtype), dv.astype(v.dtype)


_attend.defvjp(_forward, _backward)
