"""The primitive of JAX that stands for a request: how it is typed, lowered to XLA, and mapped over a batch.

Its one parameter is the text of the request (`text`), its operands are the arrays, in the text's order.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flashgen.call.text import decode, encode, with_shapes
from flashgen.call.xla import handler, pending, structs
from flashgen.call.xla.execution import execution
from flashgen.errors import BadParam, GatherWarning, NullPointer, arg, naming
from flashgen.operators.arguments import view_of_shape
from flashgen.runtime import arrays, dlpack
from flashgen.runtime.numpykind import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.call.request import Request
    from flashgen.operators.arguments import Argument
    from flashgen.operators.operator import Problem

_DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32, "int32": jnp.int32}
_DTYPES |= {"uint8": jnp.uint8, "bool": jnp.bool_, "e4m3": jnp.float8_e4m3fn}
# Symbols that count sequences: a batch of calls joins arrays along these dimensions. The last three are of
# masks by a line and of lists of blocks.
_BATCH = ("batch", "batch_q", "batch_kv", "token_batch_q", "token_batch_kv", "block_indptr_batch")
# Operators whose batch entries are independent, so several calls can be one call of a larger batch.
_FOLDED = ("attention", "attention_backward", "attention_weights", "merge")

call_p = Primitive("flashgen")
call_p.multiple_results = True
# Where the structs of jaxlib's FFI are of another version, calls are lowered to JAX's own callback.
WITH_FFI = structs.shipped_version(jax.ffi.include_dir()) in structs.SUPPORTED
if WITH_FFI:
    handler.register(jax)
pending.wait_at_exit(jax)


def bind(request: Request, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The results of a request on arrays of JAX, some of which are traced, by name. ``names`` is as in
    `text.encode`. Raises the errors of the contract.
    """
    with naming(names):
        return _bind(request, names)


def _bind(request: Request, names: Mapping[str, str]) -> dict[str, Any]:
    if request.stream is not None:
        raise BadParam(f"{arg('stream')} was given, but a program of XLA has its own stream; leave it out")
    named = {name: x for name, x in request.by_name().items() if x is not None}
    for argument in request.operator.arguments:
        if argument.name not in named and not (argument.optional or argument.is_output):
            raise NullPointer(f"{arg(argument.name)} is None; expected an array")
    operands = varying({name: operand(name, x) for name, x in named.items()})
    text = encode(request, names)
    problem = decode(text).problem(_views([jax.typeof(x) for x in operands.values()]))
    results = call_p.bind(*operands.values(), text=text)
    outputs = [request.operator.arguments[place].name for place in problem.results]
    return dict(zip(outputs, results, strict=True))


def operand(name: str, x: Any) -> jax.Array:
    """An array as an operand of a program. Raises BadParam for an array of another library than JAX and
    NumPy.
    """
    if not (isinstance(x, (jax.Array, np.ndarray))):
        if dlpack.is_array(x):
            raise BadParam(arrays.mixed(name, dlpack.library_of(x), "others", "jax"))
        raise BadParam(f"{arg(name)} has type {type(x).__name__}; expected an array of JAX")
    return jnp.asarray(x)


def varying(operands: dict[str, Any]) -> dict[str, Any]:
    """The operands, all of which differ between the devices of a `jax.shard_map` if one does."""
    axes = {name: jax.typeof(x).mat.varying for name, x in operands.items()}
    union = frozenset().union(*axes.values())
    return {
        name: jax.lax.pcast(x, tuple(union - axes[name]), to="varying") if union - axes[name] else x
        for name, x in operands.items()
    }


def _views(avals: Sequence[Any], device: int | None = None) -> list[Any]:
    return [view_of_shape(shape, dtype, device) for dtype, shape in _shapes(avals)]


def _shapes(avals: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
    for aval in avals:
        if not all(isinstance(extent, int) for extent in aval.shape):
            raise BadParam(
                f"an array has the shape {aval.shape}; flashgen chooses kernels by the sizes of arrays, so "
                "export a program for each size"
            )
    return [(numpy_dtype(np.dtype(aval.dtype)), tuple(aval.shape)) for aval in avals]


def _problem(text: str, avals: Sequence[Any]) -> Problem:
    return decode(text).problem(_views(avals))


@call_p.def_abstract_eval
def _typed(*avals: Any, text: str) -> list[Any]:
    problem, like, described = _problem(text, avals), avals[0], decode(text)
    # An array that is written to keeps its dtype: a cache of codes may be uint8.
    written = {name: avals[described.names.index(name)].dtype for name in described.written}
    layouts, typed = problem.array_layouts(), []
    for place in problem.results:
        name = problem.operator.arguments[place].name
        shape, dtype = problem.shape(place), written.get(name, _DTYPES[layouts[place].dtype])
        mesh = like.sharding.mesh
        sharding = None if mesh.empty else jax.sharding.NamedSharding(mesh, _replicated(len(shape)))
        typed.append(like.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding))
    return typed


def _replicated(rank: int) -> Any:
    return jax.sharding.PartitionSpec(*[None] * rank)


@cache
def _compiled(text: str) -> Any:
    return jax.jit(partial(call_p.bind, text=text))


@call_p.def_impl
def _run(*operands: Any, text: str) -> Any:
    return _compiled(text)(*operands)


def _lower(on_gpu: bool, context: Any, *operands: Any, text: str) -> Any:
    pending.expect("cuda" if on_gpu else "cpu")
    shapes = _shapes(context.avals_in)
    _warn_of_gathers(context, text)
    whole = with_shapes(text, shapes)
    described = decode(text)
    results = [
        described.request.operator.arguments[place].name
        for place in execution(whole, None if not on_gpu else _gpus()[0]).problem.results
    ]
    aliases = {described.names.index(name): results.index(name) for name in described.written}
    sizes = [execution(whole, device).workspace_bytes for device in (_gpus() if on_gpu else (None,))]
    outputs = list(context.avals_out)
    if max(sizes):
        outputs.append(jax.core.ShapedArray((max(sizes),), np.dtype(np.uint8)))
    if not WITH_FFI:
        callback = partial(handler.call_back, whole, on_gpu)
        return _lower_to_callback(context, operands, outputs, callback, aliases)
    rule = jax.ffi.ffi_lowering(handler.TARGET, operand_output_aliases=aliases)
    values = rule(context.replace(avals_out=outputs), *operands, **{handler.ATTRIBUTE: whole.decode()})
    return list(values)[: len(context.avals_out)]


def _lower_to_callback(
    context: Any, operands: Sequence[Any], outputs: Sequence[Any], callback: Any, aliases: dict[int, int]
) -> Any:
    """The call by `jax.experimental.buffer_callback`, where the structs of the FFI are of another version."""
    from jax.experimental.buffer_callback import buffer_callback

    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in outputs]

    def computed(*values: Any) -> Any:
        call = buffer_callback(
            callback,
            types,
            input_output_aliases=aliases or None,
            command_buffer_compatible=True,
        )
        return call(*values)[: len(context.avals_out)]

    return mlir.lower_fun(computed, multiple_results=True)(context, *operands)


@lru_cache(maxsize=1)
def _gpus() -> tuple[int, ...]:
    """One GPU of each kind that this process may run programs on, by CUDA's ordinals. Raises
    DeviceTypeNotSupported.
    """
    from flashgen.runtime import device

    first: dict[str, int] = {}
    try:
        ordinals = [x.local_hardware_id for x in jax.local_devices(backend="cuda")]
    except RuntimeError:
        ordinals = [0]  # a program for a machine with a GPU, lowered where JAX has none: CUDA says why
    for ordinal in ordinals:
        first.setdefault(device.device(ordinal).name, ordinal)
    return tuple(first.values())


def _warn_of_gathers(context: Any, text: str) -> None:
    """Warn if the program runs on several devices, and the call is not inside `jax.shard_map`."""
    axes = context.module_context.axis_context
    devices = getattr(axes, "num_devices", None)
    mesh = getattr(axes, "mesh", None)
    if devices is None and mesh is not None:
        within = set(getattr(axes, "manual_axes", ()))
        outside = [size for name, size in dict(mesh.shape).items() if name not in within]
        devices = int(np.prod(outside)) if outside else 1
    if devices is not None and devices > 1:
        warnings.warn(
            f"flashgen.{decode(text).request.operator.name} is in a program of {devices} devices outside of "
            "jax.shard_map: XLA gathers arrays that are sharded over them, and each device computes all of "
            "the call. Put the call into jax.shard_map, with the batch or the heads in its specs",
            GatherWarning,
            stacklevel=2,
        )


mlir.register_lowering(call_p, partial(_lower, False), platform="cpu")
mlir.register_lowering(call_p, partial(_lower, True), platform="cuda")


def _refuse_derivative(primals: Any, tangents: Any, *, text: str) -> Any:
    name = decode(text).request.operator.name
    if name in ("attention", "attention_backward"):  # `traced` has attention's first derivative
        raise TypeError("flashgen does not compute a gradient of attention's gradients (double backward)")
    raise TypeError(
        f"flashgen has no derivative of {name}; pass jax.lax.stop_gradient(x) for each array x of the call"
    )


ad.primitive_jvps[call_p] = _refuse_derivative


def _mapped(operands: Sequence[Any], axes: Sequence[int | None], *, text: str) -> Any:
    """A batch of calls: as one call whose batch holds them all, or one after another."""
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    mapped = [axis is not None for axis in axes]
    count = next(x.shape[0] for x, is_mapped in zip(moved, mapped, strict=True) if is_mapped)
    avals = [
        jax.typeof(x).update(shape=x.shape[1:], sharding=None) if is_mapped else jax.typeof(x)
        for x, is_mapped in zip(moved, mapped, strict=True)
    ]
    problem, described = _problem(text, avals), decode(text)
    folded = _folded(problem, described.names, moved, mapped, count)
    if folded is None:
        results = _one_after_another(moved, mapped, text)
    else:
        results = [
            x.reshape(count, *problem.shape(place))
            for x, place in zip(call_p.bind(*folded, text=text), problem.results, strict=True)
        ]
    return results, [0] * len(results)


batching.primitive_batchers[call_p] = _mapped


def _one_after_another(operands: Sequence[Any], mapped: Sequence[bool], text: str) -> Any:
    def one(values: Any) -> Any:
        rest = iter(values)
        one_call = [next(rest) if is_mapped else x for x, is_mapped in zip(operands, mapped, strict=True)]
        return call_p.bind(*one_call, text=text)

    return jax.lax.map(one, [x for x, is_mapped in zip(operands, mapped, strict=True) if is_mapped])


def _folded(
    problem: Problem, names: Sequence[str], operands: Sequence[Any], mapped: Sequence[bool], count: int
) -> list[Any] | None:
    """The operands of one call that stands for ``count`` calls; None if there is none: sequences are packed,
    or an array that all entries of a batch share differs between calls.
    """
    operator = problem.operator
    arguments = {argument.name: argument for argument in operator.arguments}
    # Packed sequences have no batch, and random numbers depend on the number of the batch entry.
    apart = {"cu_seqlens_q", "cu_seqlens_kv", "dropout_seed"} & {*names}
    if operator.name not in _FOLDED or apart:
        return None
    # Calls share the rows or pages of a cache that a table or an index names.
    in_cache = ("batch_kv",) if {"pages", "index"} & {*names} else ()
    leading = set(_BATCH).difference(in_cache)
    if any(argument.symbols[0] not in _BATCH for argument in _results(problem)):
        return None
    values = []
    for name, x, is_mapped in zip(names, operands, mapped, strict=True):
        argument = arguments[name]
        if argument.symbols and argument.symbols[0] in leading:
            values.append(_joined(argument, x, is_mapped, count, problem.sizes["batch"]))
        elif is_mapped:
            return None
        else:
            values.append(x)
    return values


def _results(problem: Problem) -> list[Argument]:
    return [problem.operator.arguments[place] for place in problem.results]


def _joined(argument: Argument, x: Any, is_mapped: bool, count: int, batch: int) -> Any:
    """An array of ``count`` calls of this batch as an array of one call."""
    rank = len(argument.symbols)
    shape = x.shape[1:] if is_mapped else x.shape
    whole = (1,) * (rank - len(shape)) + tuple(shape)
    may_be_shared = argument.layout == "broadcast" or argument.symbols[0] == "block_indptr_batch"
    if not is_mapped and may_be_shared and whole[0] == 1:
        return x
    x = jnp.broadcast_to(x.reshape((count if is_mapped else 1), *whole), (count, *whole))
    if whole[0] != batch:
        x = jnp.broadcast_to(x, (count, batch, *whole[1:]))
    return x.reshape(count * batch, *whole[1:])
