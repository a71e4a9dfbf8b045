"""Calls on arrays that JAX traces: attention with its gradients, attention's weights, append and merge."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from flashgen.call import blockmask
from flashgen.call.blockmask import BlockMask
from flashgen.call.fields import DIFFERENTIABLE, SHORTHANDS
from flashgen.call.kvcache import FIELDS, KVCache
from flashgen.call.mask import Mask, mask_of
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.request import (
    check_features,
    check_gradient,
    gradients_of,
    names_of,
    request_of,
    score_gradient_of,
    weights_of,
)
from flashgen.call.xla.primitive import bind, operand, varying
from flashgen.errors import BadParam, FlashgenError, arg, naming
from flashgen.operators.arguments import flag
from flashgen.operators.rules import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.call.record import Call
    from flashgen.call.request import Request

# The options of both passes.
_SHARED = [
    x.name for x in GradientCall.fields if x in AttentionCall.fields and x.kind not in ("array", "host")
]
_FIELDS = {x.name for x in GradientCall.fields}


def attention(call: Call, append: Request | None = None) -> Any:
    """A call of ``attention``, without weights. With ``append``, its request of that operator, the cache is
    the last result. Raises the errors of the contract.
    """
    _refuse_out(call)
    return_lse = flag("return_lse", call.return_lse)
    flag("deterministic", call.deterministic)
    cache = None
    if append is not None:
        total, rotated, cache = append_to(append, call.k)
        call = call.replace(
            q=call.q if rotated is None else rotated, k=dataclasses.replace(cache, lengths=total)
        )
    if isinstance(call.mask, BlockMask):
        call = blockmask.with_arrays(call)
    request = request_of(call.replace(return_lse=True))
    named = {name: operand(name, x) for name, x in request.by_name().items() if x is not None}
    learned = {}
    for name, x in named.items():
        if name in DIFFERENTIABLE and not isinstance(call.k, KVCache):
            continue
        # An array that is not traced is not differentiated either.
        if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating):
            shown_name = names_of(call).get(name, name)
            why = _why_no_gradient(shown_name, call)
            if why:
                named[name] = _constant(shown_name, x, why)
            else:
                learned[name] = shown_name
    # Also here, not only in `bind`, so that the gradient of an array that devices share is summed over them.
    results = _differentiable(call, request, return_lse, learned)(varying(named))
    results = (*results, *(() if cache is None else (cache,)))
    return results[0] if len(results) == 1 else results


def _differentiable(call: Call, request: Request, return_lse: bool, learned: Mapping[str, str]) -> Any:
    """The call as a function of its arrays by name, with the gradients that there are. It gives out, and lse
    with ``return_lse``. ``learned`` are the arrays of a score modification that have a gradient, with what
    the caller calls them.
    """
    # Arrays come as arguments, so that nothing here outlives the trace that made it.
    options = {name: getattr(call, name) for name in _SHARED}
    mask = call.mask
    line = (mask.line, tuple(mask.arrays), mask.numbers) if isinstance(mask, Mask) else None
    names = names_of(call)

    def attend(arrays: dict[str, Any]) -> tuple[Any, ...]:
        in_order = request.operator.in_order(**arrays)
        results = bind(request.with_arrays(in_order, request.stream), names)
        return results["out"], results["lse"]

    def forward(arrays: dict[str, Any]) -> Any:
        out, lse = attend(arrays)
        return (out, lse) if return_lse else (out,), (arrays, out, lse)

    def backward(kept: Any, cotangents: Any) -> Any:
        values, out, lse = kept
        dout, *dlse = cotangents
        gradients = call_of(GradientCall, **_with_score(options, values))
        gradients = gradients.replace(
            **{name: x for name, x in values.items() if name in _FIELDS},
            **({} if line is None else {"mask": _mask(*line, values)}),
            dout=dout,
            out=out,
            lse=lse,
            dlse=dlse[0] if dlse else None,
        )
        with naming(names):
            gradient_request = gradients_of(gradients)
        results = bind(gradient_request, names)
        by_name = {name: results.get(f"d{name}") for name in values}
        for name, shown_name in learned.items():
            # XLA drops the operation if nothing reads its result.
            with naming(names):
                gradient_request = score_gradient_of(gradients, shown_name)
            (gradient,) = bind(gradient_request, names).values()
            by_name[name] = gradient.reshape(values[name].shape)
        return ({n: None if x is None else x.astype(values[n].dtype) for n, x in by_name.items()},)

    differentiable = jax.custom_vjp(lambda arrays: forward(arrays)[0])
    differentiable.defvjp(forward, backward)
    return differentiable


def _mask(line: str, names: tuple[str, ...], numbers: Mapping[str, int], values: dict[str, Any]) -> Mask:
    """A mask by a line with the arrays among these."""
    return mask_of(line, {name: values[PREFIX + name] for name in names}, numbers)


def _why_no_gradient(name: str, call: Call) -> str:
    """Why flashgen has no gradient of an array which the caller calls ``name``; empty if it has one."""
    if isinstance(call.k, KVCache):
        return "a call with a KVCache has no gradients; pass k and v, with kv_lengths if need be"
    try:
        check_features(call, name)
        check_gradient(call, name)
    except FlashgenError as error:
        return error.message
    return ""


def _constant(name: str, x: Any, why: str) -> Any:
    """``x``, of which a derivative raises BadParam that says why there is none."""

    @jax.custom_jvp
    def identity(x: Any) -> Any:
        return x

    @identity.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise BadParam(f"{arg(name)} is differentiated: {why}. Or use jax.lax.stop_gradient({name})")

    return identity(x)


def _with_score(options: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Options whose score modification has these arrays."""
    if options["score"] is None:
        of_shorthands = {name: shorthand.param for name, shorthand in SHORTHANDS}
        return options | {name: values[x] for name, x in of_shorthands.items() if x in values}
    params = options["params"] or {}
    return options | {"params": {name: values.get(name, x) for name, x in params.items()}}


def attention_weights(call: Call, lse: Any) -> Any:
    """The weights of a call without lengths, whose LSE is ``lse``; they have no gradient."""
    stop = jax.lax.stop_gradient
    request = weights_of(call, lse)
    arrays = tuple(None if x is None else stop(operand("lse", x)) for x in request.arrays)
    (weights,) = bind(request.with_arrays(arrays, request.stream), names_of(call)).values()
    return weights


def attention_backward(call: Call) -> Any:
    """The gradients of a call, in order."""
    if call.workspace is not None:
        raise BadParam(f"{arg('workspace')} was given, but a program of XLA allocates its own; leave it out")
    if call.dparams is not None:
        raise BadParam(
            f"{arg('dparams')} was given, whose gradients flashgen does not compute inside a program of JAX; "
            f"call this outside jax.jit, or leave {arg('dparams')} out"
        )
    request = gradients_of(call)
    for argument, x in zip(request.operator.arguments, request.arrays, strict=True):
        if argument.is_output and x is not None:
            raise _immutable(argument.name, x)
    results = tuple(bind(request, names_of(call)).values())
    return results[0] if len(results) == 1 else results


def append_to(request: Request, cache: Any) -> tuple[Any, Any, Any]:
    """total_lengths, q_rotated (None without q) and the new cache, of what a call requests of ``append``."""
    results = bind(request, FIELDS)
    written = {name: results[argument] for argument, name in FIELDS.items() if argument in results}
    written = dataclasses.replace(cache, **written)
    return results["total_lengths"], results.get("q_rotated"), written


def merge(request: Request) -> tuple[Any, Any]:
    """out and lse of a request of ``merge``."""
    for name in ("out", "lse_out"):
        x = request.by_name()[name]
        if x is not None:
            raise _immutable(name, x)
    results = bind(request)
    return results["out"], results["lse_out"]


def _refuse_out(call: Call) -> None:
    if call.out is not None:
        raise _immutable("out", call.out)


def _immutable(name: str, x: Any) -> BadParam:
    return BadParam(
        f"{arg(name)} has type {type(x).__name__}, whose memory cannot be written to; call without "
        f"{arg(name)} and use the result"
    )
