"""Calls that write into arrays of the caller, in the graphs of PyTorch: attention with a KVCache or ``out``,
``attention_backward``, ``append``, ``merge`` and ``quantize``, as operators for torch.compile, torch.export,
and whatever else looks at operators.

Such an operator writes to some of its arguments; an array that the caller leaves out is allocated before the
operator. These operators have no gradients.
"""

from __future__ import annotations

import dataclasses
from operator import index as index_of
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.call.autograd import OF_BACKWARD, differentiate, score_gradient
from flashgen.call.codec import (
    GRADIENTS_SCHEMA,
    INPUTS,
    INPUTS_SCHEMA,
    SCHEMA,
    arguments_schema,
    decode,
    dtype_of_result,
    encode,
)
from flashgen.call.compute import compute
from flashgen.call.fields import DIFFERENTIABLE, GRADIENTS
from flashgen.call.kvcache import FIELDS, KVCache
from flashgen.call.mask import Mask
from flashgen.call.record import AttentionCall
from flashgen.call.request import (
    Request,
    gradients_of,
    load_operators,
    names_of,
    request_of,
    weights_of,
)
from flashgen.call.tensors import (
    arrays_of,
    arrays_of_mask,
    arrays_of_score,
    check_meta,
    check_tensors,
    new_gradient,
    refuse_derivatives,
    refuse_transforms,
    with_rows,
)
from flashgen.errors import BadParam, NullPointer, arg, naming
from flashgen.host.torchimport import is_file_of
from flashgen.operators.append import APPEND
from flashgen.operators.kvcodes import E4M3, SCALES_OUT
from flashgen.operators.merge import MERGE
from flashgen.operators.quantize import QUANTIZE, scale_shape
from flashgen.runtime.arrays import kind_of
from flashgen.runtime.torchkind import WITHOUT_GRADIENT, without_gradients

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flashgen.call.record import Call
    from flashgen.runtime.torchkind import TorchKind

is_file_of(__file__, __name__)

load_operators()

# The arrays that only calls with a KVCache have.
_OF_CACHE = ("index", "pages", "indices", "q_rope")


def attention(call: Call, append_request: Request | None, what: str) -> tuple[Tensor, Tensor | None]:
    """out and lse of a call. ``append_request`` is its request of the operator ``append``, if any; ``what``
    is the name of such calls in messages. Raises BadParam or NullPointer.
    """
    if isinstance(call.k, KVCache):
        call = call.replace(k=_with_codes(call.k))
    named = _checked(request_of(_without_numbers(call)), call.stream, what)
    check_tensors({"q": call.q, **arrays_of_mask(call)})
    refuse_derivatives(call)
    if isinstance(call.k, KVCache) and call.k.head_dim_v is not None:
        call = call.replace(head_dim_v=call.k.head_dim_v, kv_dtype=call.k.kv_dtype)
        named["v"] = named["k"][..., : call.head_dim_v]
    score_arrays, entries = encode(call)
    q, out, lse = call.q, call.out, None
    if append_request is not None:
        named["kv_lengths"], rotated = append(append_request, before_attention=True)
        q = q if rotated is None else rotated
    _fix_layout(out)
    if out is None:
        out = q.new_empty((*q.shape[:-1], named["v"].shape[-1]), dtype=dtype_of_result(q, entries))
    if call.return_lse:
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    inputs = (q if name == "q" else named.get(name) for name in INPUTS)
    is_cache = isinstance(call.k, KVCache)
    of_cache = (named.get(name) for name in _OF_CACHE)
    _attend(*inputs, *of_cache, score_arrays, is_cache, *entries, out, lse)
    return out, lse


def _with_codes(cache: KVCache) -> KVCache:
    """The cache with codes of PyTorch's dtype instead of uint8, because the schema has no entry that says
    what uint8 holds. Rows of a latent cache that carry their scales stay as they are.
    """
    if cache.kv_dtype != E4M3 or cache.k.dtype != torch.uint8:
        return cache
    k, v = (x if x is None else x.view(torch.float8_e4m3fn) for x in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v, kv_dtype=None)


def attention_weights(call: Call, lse: Tensor, kind: TorchKind) -> Tensor:
    """The weights of a call without lengths, whose LSE is ``lse``. They have no gradient. Raises BadParam."""
    arrays = {name: getattr(call, name) for name in ("q", "k", "mask")} | {"lse": lse}
    arrays = {name: x.detach() if isinstance(x, Tensor) else x for name, x in arrays.items()}
    lse = arrays.pop("lse")
    call = call.replace(**arrays)
    if not kind.records(call.q, call.k, lse):
        return compute(weights_of(call, lse), kind)
    score_arrays, entries = encode(call)
    return _weigh(*arrays.values(), lse, score_arrays, *entries)


def attention_backward(call: Call) -> tuple[Tensor, ...]:
    """The gradients of a call, in order. Raises BadParam or NullPointer."""
    _checked(gradients_of(_without_numbers(call)), call.stream, "attention_backward()")
    check_tensors({"q": call.q, **arrays_of_mask(call)})
    if call.workspace is not None:
        raise BadParam(
            f"{arg('workspace')} was given, but a traced call allocates its own when it runs; leave "
            "workspace out"
        )
    refuse_derivatives(call)
    score_arrays, entries = encode(call)
    gradients = []
    for name, gradient in zip(DIFFERENTIABLE, GRADIENTS, strict=True):
        x, into = getattr(call, name), getattr(call, gradient)
        _fix_layout(into)
        gradients.append(new_gradient(name, x) if into is None and x is not None else into)
    arrays = tuple(arrays_of(call, OF_BACKWARD).values())
    names = [name for name, x in arrays_of_score(call).items() if isinstance(x, Tensor)]
    places = [place_of(name, names) for name in call.dparams or ()]
    of_score = [score_gradient(*arrays, score_arrays, *entries, place) for place in places]
    _differentiate(*arrays, score_arrays, *entries, *gradients)
    return tuple([x for x in gradients if x is not None] + of_score)


def place_of(name: str, names: Sequence[str]) -> int:
    """The place of an array among the arrays of a score modification. Raises BadParam."""
    if name not in names:
        raise BadParam(
            f"{arg('dparams')} has {name!r}; the score of the call has {', '.join(names) or 'none'}"
        )
    return names.index(name)


def _without_numbers(call: Call) -> Call:
    """The call without a score modification, bounds of lengths and a mask by a line, which a graph holds in
    other types.
    """
    names = [x.name for x in call.fields if x.kind in ("score", "bound")]
    if isinstance(call.mask, Mask):
        names.append("mask")
    return call.replace(**dict.fromkeys(names))


def append(request: Request, *, before_attention: bool = False) -> tuple[Tensor, Tensor | None]:
    """total_lengths and q_rotated of a request of the operator ``append``; ``before_attention`` is whether
    both are one call. Raises BadParam or NullPointer.
    """
    named = _checked(request, request.stream, "append()")
    for name in ("k_cache", "v_cache"):
        _fix_layout(named[name])
    named["total_lengths"] = torch.empty_like(named["lengths"])
    q = named["q"]
    named["q_rotated"] = None if q is None else q.new_empty(q.shape)
    _append(*named.values(), *request.options, before_attention, request.backend)
    return named["total_lengths"], named["q_rotated"]


def merge(request: Request) -> tuple[Tensor, Tensor]:
    """One result of two parts, of a request whose arrays are checked."""
    named = request.by_name()
    for name, like in (("out", "o1"), ("lse_out", "lse1")):
        _fix_layout(named[name])
        if named[name] is None:
            named[name] = named[like].new_empty(named[like].shape)
    _merge(*named.values(), request.backend)
    return named["out"], named["lse_out"]


def quantize(request: Request) -> tuple[Tensor, Tensor]:
    """The codes and the scale of a request of the operator ``quantize``. Raises BadParam or NullPointer."""
    named = _checked(request, request.stream, "quantize()")
    x, (per,) = named["x"], request.options
    _fix_layout(named["codes"])
    if named["codes"] is None:
        named["codes"] = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = named["scale"]
    if scale is None:
        scale = named["scale_out"] = x.new_empty(scale_shape(x.shape[:-1], per), dtype=torch.float32)
    _quantize(*named.values(), per, request.backend)
    return named["codes"], scale


def _checked(request: Request, stream: Any, what: str) -> dict[str, Any]:
    """The arrays of a request, by name. Raises what `check` does."""
    named = request.by_name()
    optional = {x.name for x in request.operator.arguments if x.optional or x.is_output}
    check(named, stream, what, optional)
    return named


def check(arrays: Mapping[str, Any], stream: Any, what: str, optional: Collection[str]) -> None:
    """Raise NullPointer for an array that is missing, BadParam for a gradient or a stream."""
    check_tensors(arrays)
    refuse_transforms()
    for name, x in arrays.items():
        if x is None and name not in optional:
            raise NullPointer(f"{arg(name)} is None; expected an array")
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise without_gradients(f"{arg(name)}: {WITHOUT_GRADIENT}", what)
    check_meta(arrays)
    if stream is not None:
        raise BadParam(f"{arg('stream')} was given, but a traced call has no stream yet; leave stream out")


def _fix_layout(written: Tensor | None) -> None:
    """Make constants of the sizes and strides of an array that is written to. If they are symbolic and the
    array is a part of an allocation, Inductor of PyTorch 2.13 writes to the allocation's first byte instead.
    """
    if written is not None:
        for size in (*written.shape, *written.stride()):
            index_of(size)


@torch.library.custom_op(
    "flashgen::attention_into",
    mutates_args=("out", "lse"),
    schema=f"({INPUTS_SCHEMA}, {', '.join(f'Tensor? {name}' for name in _OF_CACHE)}, "
    f"Tensor[] score_arrays, bool is_cache, {SCHEMA}, "
    "Tensor(a!) out, Tensor(b!)? lse) -> ()",
)
def _attend(*args: Any) -> None:
    values = dict(zip((*INPUTS, *_OF_CACHE), args, strict=False))
    score_arrays, is_cache, *entries, out, lse = args[len(values) :]
    for name in ("q", "q_rope"):  # Inductor drops a copy that a caller has made
        values[name] = None if values[name] is None else with_rows(values[name])
    if is_cache:
        names = ("k", "v", "pages", "index", "k_scale", "v_scale")
        named = {name: values.pop(name) for name in names}
        lengths, starts = values.pop("kv_lengths"), values.pop("kv_starts")
        values["k"] = KVCache(**named, lengths=lengths, starts=starts)
    else:
        values |= {name: with_rows(values[name]) for name in ("k", "v")}
    values |= {"out": out, "return_lse": lse is not None}
    call = decode(AttentionCall, values, score_arrays, tuple(entries))
    if call.head_dim_v is not None:
        of_latent = {"v": None, "head_dim_v": call.head_dim_v, "kv_dtype": call.kv_dtype}
        call = call.replace(k=dataclasses.replace(call.k, **of_latent))
    with naming(names_of(call)):
        request = request_of(call)
        place = request.operator.position("lse")
        request.arrays = *request.arrays[:place], lse, *request.arrays[place + 1 :]
        compute(request, kind_of(call.q))


@torch.library.custom_op(
    "flashgen::attention_weights",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor? mask, Tensor lse, Tensor[] score_arrays, {SCHEMA}) -> Tensor",
)
def _weigh(*args: Any) -> Tensor:
    q, k, mask, lse, score_arrays, *entries = args
    values = {"q": with_rows(q), "k": with_rows(k), "mask": mask}
    call = decode(AttentionCall, values, score_arrays, tuple(entries))
    with naming(names_of(call)):
        return compute(weights_of(call, lse.contiguous()), kind_of(q))


@_weigh.register_fake
def _(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
    return q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(
    "flashgen::attention_backward_into",
    mutates_args=GRADIENTS,
    schema=f"(Tensor dout, {INPUTS_SCHEMA}, Tensor out, Tensor lse, Tensor? dlse, Tensor[] score_arrays, "
    f"{SCHEMA}, {GRADIENTS_SCHEMA}) -> ()",
)
def _differentiate(*args: Any) -> None:
    count = len(GRADIENTS)
    values = dict(zip(OF_BACKWARD, args, strict=False))
    score_arrays, *entries = args[len(OF_BACKWARD) : -count]
    values |= dict(zip(GRADIENTS, args[-count:], strict=True))
    differentiate(values, score_arrays, tuple(entries))


@torch.library.custom_op(
    "flashgen::append",
    mutates_args=("k_cache", "v_cache", "total_lengths", "q_rotated", *SCALES_OUT),
    schema=f"({arguments_schema(APPEND, ('v_cache', 'q_rotated', *SCALES_OUT))}, bool interleaved, "
    "str q_positions, str? kv_dtype, int? head_dim_v, bool before_attention, str? backend) -> ()",
)
def _append(*args: Any) -> None:
    *arrays, interleaved, q_positions, kv_dtype, head_dim_v, before_attention, backend = args
    named = dict(zip(APPEND.positions, arrays, strict=True))
    for name in ("k_new", "v_new", "q"):
        if named[name] is not None:
            named[name] = with_rows(named[name])
    names = FIELDS | ({"cu_seqlens_new": "cu_seqlens_q"} if before_attention else {})
    values = tuple(named.values())
    with naming(names):
        options = interleaved, q_positions, kv_dtype, head_dim_v
        compute(Request(APPEND, values, options, backend=backend), kind_of(values[0]))


@torch.library.custom_op(
    "flashgen::merge",
    mutates_args=("out", "lse_out"),
    schema=f"({arguments_schema(MERGE)}, str? backend) -> ()",
)
def _merge(*args: Any) -> None:
    *arrays, backend = args
    compute(Request(MERGE, tuple(arrays), backend=backend), kind_of(arrays[0]))


@torch.library.custom_op(
    "flashgen::quantize",
    mutates_args=("codes", "scale_out"),
    schema=f"({arguments_schema(QUANTIZE, ('scale_out',))}, str per, str? backend) -> ()",
)
def _quantize(*args: Any) -> None:
    x, *arrays, per, backend = args
    with naming({"codes": "out"}):
        compute(Request(QUANTIZE, (with_rows(x), *arrays), (per,), backend=backend), kind_of(x))
