"""Calls that write into arrays of the caller, in the graphs of PyTorch: attention with a KVCache or ``out``,
``attention_backward``, ``append`` and ``merge``, as operators for torch.compile, torch.export, and whatever
else looks at operators.

What such an operator writes to is among its arguments, allocated ahead of it where the caller gave none. None
has gradients.
"""

from __future__ import annotations

from operator import index as index_of
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.api.asked import asked, asked_backward
from flashgen.api.autograd import (
    LENGTHS_SCHEMA,
    SCHEMA,
    Options,
    check_meta,
    check_tensors,
    differentiate,
    options_of,
    refuse_transforms,
    with_rows,
)
from flashgen.api.calls import call
from flashgen.api.kvcache import FIELDS, KVCache
from flashgen.errors import BadParam, NullPointer, naming
from flashgen.operators.append import APPEND
from flashgen.operators.arguments import flag
from flashgen.operators.merge import MERGE
from flashgen.operators.splits import AUTO
from flashgen.runtime.torchkind import WITHOUT_GRADIENT, without_gradients

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.api.asked import Asked
    from flashgen.operators.splits import Splits


def attention(
    tensors: tuple[Any, Any, Any, Any, Any],
    masking: tuple[Any, ...],
    softmax_scale: float | None,
    of_score: tuple[Any, ...],
    lengths: tuple[Any, ...],
    of_append: Asked | None,
    what: str,
    *,
    return_lse: bool,
    splits: Splits,
    stream: Any,
    backend: str | None,
    algorithm: str | None,
) -> tuple[Tensor, Tensor | None]:
    """out and lse of q, k, v, mask and out, as `autograd.attention`. ``of_append`` is what the call asks of
    the operator ``append``; ``what`` are such calls, in messages. Raises BadParam or NullPointer.
    """
    q, k, v, mask, out = tensors
    # A score modification and bounds of lengths go in types that a graph can hold, below.
    on_device = *lengths[:3], None, None
    wanted = asked(q, k, v, mask, out, (*masking, return_lse, splits), softmax_scale, (None,) * 4, on_device)
    named = _checked(wanted, stream, what)
    arrays, options = options_of(
        q, masking, softmax_scale, of_score, lengths[3:], splits, False, backend, algorithm
    )
    if of_append is not None:
        named["kv_lengths"], rotated = append(of_append, stream, backend, ahead=True)
        q = q if rotated is None else rotated
    _fix_layout(out)
    if out is None:
        out = q.new_empty((*q.shape[:-1], named["v"].shape[-1]))
    lse = None
    if return_lse:
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    on_device = (
        named.get(name) for name in ("kv_lengths", "cu_seqlens_q", "cu_seqlens_kv", "index", "pages")
    )
    is_cache = isinstance(k, KVCache)
    _attend(q, named["k"], named["v"], mask, arrays, *on_device, is_cache, *options, out, lse)
    return out, lse


def attention_backward(
    tensors: tuple[Any, ...],
    masking: tuple[Any, ...],
    softmax_scale: float | None,
    of_score: tuple[Any, ...],
    lengths: tuple[Any, ...],
    deterministic: bool,
    *,
    workspace: Any,
    stream: Any,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv. ``tensors`` are dout, q, k, v, mask, out, lse, dlse, dq, dk and dv. Raises BadParam or
    NullPointer.
    """
    on_device = *lengths[:3], None, None  # as in `attention`
    wanted = asked_backward(tensors, masking, softmax_scale, (None,) * 4, on_device, deterministic)
    _checked(wanted, stream, "attention_backward()")
    if workspace is not None:
        raise BadParam(
            "workspace was given, but what is traced allocates its own when it runs; leave workspace out"
        )
    *given, dq, dk, dv = tensors
    q, k, v = given[1:4]
    deterministic = flag("deterministic", deterministic)
    arrays, options = options_of(
        q, masking, softmax_scale, of_score, lengths[3:], AUTO, deterministic, backend, None
    )
    for written in (dq, dk, dv):
        _fix_layout(written)
    dq, dk, dv = (x.new_empty(x.shape) if into is None else into for x, into in ((q, dq), (k, dk), (v, dv)))
    _differentiate(*given, arrays, *lengths[:3], *options, dq, dk, dv)
    return dq, dk, dv


def append(
    wanted: Asked, stream: Any, backend: str | None, *, ahead: bool = False
) -> tuple[Tensor, Tensor | None]:
    """total_lengths and q_rotated of what a call asks of the operator ``append``; ``ahead`` of attention, in
    one call. Raises BadParam or NullPointer.
    """
    _checked(wanted, stream, "append()")
    _, (*inputs, _, _), options, _ = wanted
    lengths, q = inputs[2:4]
    for cache in inputs[-2:]:
        _fix_layout(cache)
    total, rotated = torch.empty_like(lengths), None if q is None else q.new_empty(q.shape)
    _append(*inputs, total, rotated, *options, ahead, backend)
    return total, rotated


def merge(given: tuple[Any, ...], backend: str | None) -> tuple[Tensor, Tensor]:
    """One result of two parts: o1, lse1, o2, lse2, out and lse_out, which are checked."""
    o, lse, *_, out, lse_out = given
    _fix_layout(out)
    _fix_layout(lse_out)
    out = o.new_empty(o.shape) if out is None else out
    lse_out = lse.new_empty(lse.shape) if lse_out is None else lse_out
    _merge(*given[:4], out, lse_out, backend)
    return out, lse_out


def _checked(wanted: Asked, stream: Any, what: str) -> dict[str, Any]:
    """The arrays that a call asks for, by name. Raises what `check` does."""
    operator, given, _, _ = wanted
    named = {argument.name: x for argument, x in zip(operator.arguments, given, strict=True)}
    check(named, stream, what, {x.name for x in operator.arguments if x.optional or x.is_output})
    return named


def check(given: Mapping[str, Any], stream: Any, what: str, optional: set[str]) -> None:
    """Raise NullPointer for an array that is missing, BadParam for what no operator of this module has."""
    check_tensors(given)
    refuse_transforms()
    for name, x in given.items():
        if x is None and name not in optional:
            raise NullPointer(f"{name} is None; expected an array")
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise without_gradients(f"{name}: {WITHOUT_GRADIENT}", what)
    check_meta(given)
    if stream is not None:
        raise BadParam("stream was given, but what is traced has no stream yet; leave stream out")


def _fix_layout(written: Tensor | None) -> None:
    """Make constants of the sizes and strides of an array that is written to: where these place a part of an
    allocation and are symbolic, Inductor of PyTorch 2.13 writes to its begin.
    """
    if written is not None:
        for size in (*written.shape, *written.stride()):
            index_of(size)


@torch.library.custom_op(
    "flashgen::attention_into",
    mutates_args=("out", "lse"),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] arrays, {LENGTHS_SCHEMA}, Tensor? index, "
    f"Tensor? pages, bool is_cache, {SCHEMA}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    arrays: list[Tensor],
    kv_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    index: Tensor | None,
    pages: Tensor | None,
    is_cache: bool,
    *rest: Any,
) -> None:
    *given, out, lse = rest
    options = Options(*given)
    q = with_rows(q)  # Inductor drops a copy that a caller has made
    if is_cache:
        k, v, kv_lengths = KVCache(k, v, kv_lengths, pages, index), None, None
    else:
        k, v = with_rows(k), with_rows(v)
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv
    with naming(**options.names_given(k, arrays)):
        operator, tensors, *how = options.asked((q, k, v, mask, out), arrays, lengths, lse is not None)
        place = operator.position("lse")
        tensors = *tensors[:place], lse, *tensors[place + 1 :]
        call(operator, tensors, *how, stream=None, backend=options.backend, algorithm=options.algorithm)


@torch.library.custom_op(
    "flashgen::attention_backward_into",
    mutates_args=("dq", "dk", "dv"),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, Tensor? dlse, "
    f"Tensor[] arrays, {LENGTHS_SCHEMA}, {SCHEMA}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()",
)
def _differentiate(*given: Any) -> None:
    *tensors, arrays, kv_lengths, cu_seqlens_q, cu_seqlens_kv = given[:12]
    *rest, dq, dk, dv = given[12:]
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv
    differentiate((*tensors, dq, dk, dv), arrays, lengths, Options(*rest))


@torch.library.custom_op(
    "flashgen::append",
    mutates_args=("k_cache", "v_cache", "total_lengths", "q_rotated"),
    schema="(Tensor k_new, Tensor v_new, Tensor lengths, Tensor? q, Tensor? pages, Tensor? index, "
    "Tensor? cos, Tensor? sin, Tensor? positions, Tensor? cu_seqlens_new, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor(c!) total_lengths, Tensor(d!)? q_rotated, bool interleaved, str q_positions, "
    "bool ahead, str? backend) -> ()",
)
def _append(*given: Any) -> None:
    *arrays, interleaved, q_positions, ahead, backend = given
    for name in ("k_new", "v_new", "q"):
        place = APPEND.position(name)
        if arrays[place] is not None:
            arrays[place] = with_rows(arrays[place])
    of_attention = {"cu_seqlens_new": "cu_seqlens_q"} if ahead else {}
    with naming(**of_attention, **FIELDS):
        call(APPEND, tuple(arrays), (interleaved, q_positions), stream=None, backend=backend)


@torch.library.custom_op(
    "flashgen::merge",
    mutates_args=("out", "lse_out"),
    schema="(Tensor o1, Tensor lse1, Tensor o2, Tensor lse2, Tensor(a!) out, Tensor(b!) lse_out, "
    "str? backend) -> ()",
)
def _merge(*given: Any) -> None:
    *arrays, backend = given
    call(MERGE, tuple(arrays), stream=None, backend=backend)
