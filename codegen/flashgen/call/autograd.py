"""Attention in the graphs of PyTorch: recorded by autograd, and as the operators ``flashgen::attention`` and
``flashgen::attention_backward`` for torch.compile, torch.export, and whatever else looks at operators.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.call import packedmask
from flashgen.call.codec import INPUTS, INPUTS_SCHEMA, SCHEMA, decode, dtype_of_result, encode, encode_score
from flashgen.call.compute import compute
from flashgen.call.fields import DIFFERENTIABLE, LENGTHS
from flashgen.call.mask import Mask, mask_of
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.request import (
    NO_GRADIENTS_OF_TREES,
    WITHOUT_GRADIENTS,
    check_gradient,
    gradient_packing,
    gradients_of,
    names_of,
    refuse_parts_of_latent,
    request_of,
    score_gradient_of,
)
from flashgen.call.tensors import (
    IN_ROWS,
    OF_BACKWARD,
    arrays_of,
    arrays_of_mask,
    arrays_of_score,
    by_input,
    check_meta,
    check_tensors,
    new_gradient,
    readable,
    refuse_derivatives,
    refuse_tangents,
    refuse_transforms,
    with_rows,
)
from flashgen.errors import BadParam, FlashgenError, NullPointer, arg
from flashgen.host.torchimport import is_file_of
from flashgen.operators.combinations import Feature, refuse
from flashgen.operators.contract import check_rank
from flashgen.runtime.arrays import kind_of
from flashgen.runtime.torchkind import WITH_TANGENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashgen.call.record import Call
    from flashgen.call.request import Request

is_file_of(__file__, __name__)

# The types of tensors for which a call needs no operator.
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_COUNT, _GRADIENTS = len(INPUTS), len(DIFFERENTIABLE)
# The options of both passes.
_SHARED = [
    x.name
    for x in GradientCall.fields
    if x in AttentionCall.fields and x.name not in (*INPUTS, "out") and x.kind != "host"
]


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of a call, recorded. Raises BadParam."""
    arrays = arrays_of(call)
    check_tensors(arrays | arrays_of_mask(call))
    refuse_parts_of_latent(call)
    for name in ("k", "v"):
        if arrays[name] is None:
            raise NullPointer(f"{arg(name)} is None; expected an array")
    if call.q.dtype == torch.float8_e4m3fn and _differentiable(call):
        raise BadParam(WITHOUT_GRADIENTS)
    if call.q.is_meta:
        check_meta(arrays | arrays_of_score(call) | arrays_of_mask(call))
    lengths = [Feature(name) for name in LENGTHS if arrays[name] is not None]
    if arrays["tree"] is not None and _differentiable(call):
        raise BadParam(NO_GRADIENTS_OF_TREES)
    if lengths and isinstance(call.mask, Mask) and _differentiable(call):
        packedmask.check_gradients(call, call.mask)
    if lengths and arrays["mask"] is not None and _differentiable(call):
        refuse({"gradients_of_lengths": lengths[0], "mask_array": Feature("mask")})
    if torch.are_deterministic_algorithms_enabled():
        call = call.replace(deterministic=True)
    tensors = tuple(arrays.values())
    learned: dict[str, Tensor] = {}
    if call.has_score():
        learned = _tensors_of_score(call)
        refuse_tangents(learned)
        if lengths:
            refuse_derivatives(call)
    if _is_eager(tensors):
        check_gradients(call, learned)
        return _Modified.apply(*tensors[:_GRADIENTS], *learned.values(), tuple(learned), call)
    score_arrays, entries = encode(call)
    refuse_transforms()
    return _forward(*tensors, score_arrays, *entries)


def _is_eager(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a call needs no operator: nothing watches the tensors, no transform of torch.func is active,
    and no tensor is of a subclass.
    """
    if not _PLAIN.issuperset(map(type, tensors)) or torch._C._are_functorch_transforms_active():
        return False
    return not kind_of(tensors[0]).watched(tensors[0])


def _differentiable(call: Call) -> bool:
    """Whether a result of the call gets a gradient."""
    return torch.is_grad_enabled() and any(
        getattr(getattr(call, name), "requires_grad", False) for name in DIFFERENTIABLE
    )


def check_gradients(call: Call, learned: Mapping[str, Tensor]) -> None:
    """That each array of the score modification that requires a gradient can have one. Raises BadParam."""
    if torch.is_grad_enabled():
        for name, x in learned.items():
            if x.requires_grad:
                check_gradient(call, name)


def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    """out and lse, where nothing is recorded."""
    arrays, score_arrays, *entries = args[:_COUNT], *args[_COUNT:]
    values = {**dict(zip(INPUTS, arrays, strict=True)), "return_lse": True}
    call = decode(AttentionCall, values, score_arrays, entries)
    return _computed(call, request_of, call.q)


def _computed(call: Call, requested: Callable[[Call], Request], x: Tensor) -> Any:
    """The results of what a call requests; ``x`` is one of its arrays. Errors name arguments as the caller
    does.
    """
    try:
        return compute(requested(call), kind_of(x))
    except FlashgenError as error:
        error.rename(names_of(call))
        raise


@torch.library.custom_op(
    "flashgen::attention",
    mutates_args=(),
    schema=f"({INPUTS_SCHEMA}, Tensor[] score_arrays, {SCHEMA}) -> (Tensor, Tensor)",
)
@torch.no_grad()
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    # Inductor drops copies that only align a tensor, so the copy is made here.
    pairs = zip(INPUTS, args, strict=False)
    inputs = (with_rows(x) if name in IN_ROWS and x is not None else x for name, x in pairs)
    return _attend(*inputs, *args[_COUNT:])


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    rows, heads = q.shape[-3], q.shape[-2]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype_of_result(q, options))
    return out, q.new_empty((*q.shape[:-3], heads, rows), dtype=torch.float32)


def _differentiate(*args: Any) -> tuple[Tensor, ...]:
    """The gradients, where nothing is recorded; an empty tensor for an array that the call lacks, since a
    result of an operator is a tensor.
    """
    score_arrays, *entries = args[len(OF_BACKWARD) :]
    gradients = differentiate(readable(args), score_arrays, tuple(entries))
    inputs = args[1 : 1 + _GRADIENTS]
    return tuple(args[0].new_empty(0) if x is None else x for x in by_input(gradients, inputs))


@torch.library.custom_op(
    "flashgen::score_gradient",
    mutates_args=(),
    schema=f"(Tensor dout, {INPUTS_SCHEMA}, Tensor out, Tensor lse, Tensor? dlse, Tensor[] score_arrays, "
    f"{SCHEMA}, int place) -> Tensor",
)
@torch.no_grad()
def score_gradient(*args: Any) -> Tensor:
    """The gradient of one of ``score_arrays``, at ``place``, as `attention_backward` has the others."""
    score_arrays, *entries, place = args[len(OF_BACKWARD) :]
    call = decode(GradientCall, readable(args), score_arrays, tuple(entries))
    return gradient_of_score(call, [*_tensors_of_score(call)][place])


@score_gradient.register_fake
def _(*args: Any) -> Tensor:
    x = args[len(OF_BACKWARD)][args[-1]]
    return x.new_empty(x.shape)


def gradient_of_score(call: Call, name: str) -> Tensor:
    """The gradient of an array ``name`` of the score modification of a `GradientCall`."""
    gradient = _computed(call, lambda call: score_gradient_of(call, name), call.dout)
    return gradient.reshape(arrays_of_score(call)[name].shape)


def differentiate(
    arrays: Mapping[str, Any], score_arrays: list[Tensor], entries: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """The gradients, of the arrays of a call by name."""
    return _gradients(decode(GradientCall, arrays, score_arrays, entries))


def _gradients(call: Call) -> tuple[Tensor, ...]:
    if torch.are_deterministic_algorithms_enabled():
        call = call.replace(deterministic=True)
    return _computed(call, gradients_of, call.dout)


@torch.library.custom_op(
    "flashgen::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {INPUTS_SCHEMA}, Tensor out, Tensor lse, Tensor? dlse, Tensor[] score_arrays, "
    f"{SCHEMA}) -> ({', '.join(['Tensor'] * _GRADIENTS)})",
)
@torch.no_grad()
def _backward(*args: Any) -> tuple[Tensor, ...]:
    return _differentiate(*args)


@_backward.register_fake
def _(dout: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    pairs = zip(DIFFERENTIABLE, rest, strict=False)
    return tuple(dout.new_empty(0) if x is None else new_gradient(name, x) for name, x in pairs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    score_arrays, *entries = inputs[_COUNT:]
    ctx.entries = entries
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_COUNT], *output, *score_arrays)


def _kept(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """What the backward pass of a call takes."""
    saved = ctx.saved_tensors
    out, lse, *score_arrays = saved[_COUNT:]
    if dout is None:
        dout = torch.zeros_like(out)
    return dout, *saved[:_COUNT], out, lse, dlse, score_arrays, *ctx.entries


def _tensors_of_score(call: Call) -> dict[str, Tensor]:
    """The arrays of a score modification, by name. Raises BadParam."""
    if not call.has_score():
        return {}
    encode_score(call)  # raises what is wrong with it
    return {name: x for name, x in arrays_of_score(call).items() if isinstance(x, Tensor)}


def _with_score(call: Call, arrays: Mapping[str, Tensor | None]) -> Call:
    """The call with other arrays of its score modification, by name."""
    if call.score is None:
        return call.replace(**arrays)
    return call.replace(params={**call.params, **arrays})


def _recorded(*args: Any) -> tuple[Tensor | None, ...]:
    """The gradients by the operator, None for an array that the call lacks."""
    pairs = zip(args[1:], _backward(*args), strict=False)
    return tuple(None if x is None else gradient for x, gradient in pairs)


# What the gradients of a call request, without and with lengths.
_GRADIENT_REQUESTS = gradient_packing(False, OF_BACKWARD), gradient_packing(True, OF_BACKWARD)
_inputs: Any = attrgetter(*INPUTS)


def plain(call: Call) -> Any:
    """The results of `attention`, or out alone without ``return_lse``, for most calls: eager tensors without
    a score modification or a mask by a line. None for any other call, which `attention` computes.
    """
    if torch.compiler.is_compiling():  # torch.compile does not trace the next line
        return None
    inputs, is_plain = _inputs(call), call.is_plain()
    if not _is_eager(inputs) or (not is_plain and call.has_score()):
        return None
    if call.q.dtype == torch.float8_e4m3fn:  # which has no gradients
        return None
    if call.tree is not None:
        return None
    if call.mask is not None and any(getattr(call, name) is not None for name in LENGTHS):
        return None
    if is_plain or call.is_normal():
        kept = call.copy()
    else:
        try:
            kept = call.normalised()
        except FlashgenError:
            return None
    return_lse, kept.return_lse = call.return_lse, True
    return _Attention.apply(*inputs[:_GRADIENTS], (inputs, return_lse, kept))


class _Attention(torch.autograd.Function):
    """`plain` in eager mode, where recording an operator takes ten times as long as queueing kernels. Takes
    the differentiable arrays, and (all arrays, whether to return the LSE, a record for this call alone).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        inputs, return_lse, call = args[_GRADIENTS]
        request = request_of(call)
        out, lse = compute(request, kind_of(call.q))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, lse)
        call.drop_arrays()  # autograd keeps the tensors: it detects changes and calls hooks
        ctx.of_call = call, "kv_lengths" in request.operator.positions
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[_COUNT])
        arrays, (call, has_lengths) = (dout, *saved, dlse), ctx.of_call
        # Where gradients are recorded themselves, the operator refuses to have its own.
        if torch.is_grad_enabled() or not _is_eager(arrays):
            _, entries = encode(call.replace(**dict(zip(INPUTS, saved, strict=False))))
            return *_recorded(*arrays, [], *entries), None
        if torch.are_deterministic_algorithms_enabled():
            call = call.replace(deterministic=True)
        if not dout.is_contiguous():
            arrays = (with_rows(dout), *arrays[1:])
        try:
            gradients = compute(_GRADIENT_REQUESTS[has_lengths](call, *arrays), kind_of(dout))
        except (FlashgenError, RuntimeError):  # an array needs a copy, or the call is wrong
            options = {name: getattr(call, name) for name in _SHARED}
            gradients = _gradients(call_of(GradientCall, **options, **readable(arrays)))
        return *by_input(gradients, saved[:_GRADIENTS]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise BadParam(WITH_TANGENT)


class _Modified(torch.autograd.Function):
    """Attention with a score modification or a mask by a line in eager mode. Takes the differentiable arrays,
    the tensors of the score modification, their names, and the record of the call.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *_, names, call = args
        check_rank(call.q.shape)
        score_arrays = args[_GRADIENTS:-2]
        output = compute(request_of(call.replace(return_lse=True)), kind_of(call.q))
        arrays = arrays_of(call).values()
        ctx.line, of_mask = None, arrays_of_mask(call)
        if isinstance(call.mask, Mask):
            ctx.line = call.mask.line, tuple(call.mask.arrays), call.mask.numbers, call.mask.kept
        ctx.set_materialize_grads(False)
        # Autograd keeps the tensors: it detects changes and calls hooks.
        ctx.call, ctx.score_names = call.replace(**dict.fromkeys(INPUTS)), names
        if names:
            ctx.call = _with_score(ctx.call, dict.fromkeys(names))
        ctx.save_for_backward(*arrays, *output, *score_arrays, *of_mask.values())
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        out, lse, *score_arrays = saved[_COUNT:]
        if dout is None:
            dout = torch.zeros_like(out)
        call = ctx.call
        score_arrays, of_mask = score_arrays[: len(ctx.score_names)], score_arrays[len(ctx.score_names) :]
        mask = saved[INPUTS.index("mask")]
        if ctx.line is not None:
            line, names, numbers, kept = ctx.line
            mask = mask_of(line, dict(zip(names, of_mask, strict=True)), numbers, kept)
        if score_arrays:
            call = _with_score(call, dict(zip(ctx.score_names, score_arrays, strict=True)))
        arrays = (dout, *saved[:_COUNT], out, lse, dlse)
        learned = list(zip(ctx.score_names, ctx.needs_input_grad[_GRADIENTS:-2], strict=True))
        # Where gradients are recorded themselves, the operator refuses to have its own.
        if not torch.is_grad_enabled() and _is_eager(arrays):
            gradients = call_of(GradientCall, **{name: getattr(call, name) for name in _SHARED})
            gradients = gradients.replace(**readable(arrays) | {"mask": mask})
            of_score = [gradient_of_score(gradients, name) if needed else None for name, needed in learned]
            return *by_input(_gradients(gradients), saved[:_GRADIENTS]), *of_score, None, None
        call = call.replace(**dict(zip(INPUTS, saved, strict=False)) | {"mask": mask})
        score_arrays, entries = encode(call)
        of_score = [
            score_gradient(*arrays, score_arrays, *entries, place) if needed else None
            for place, (_, needed) in enumerate(learned)
        ]
        return *_recorded(*arrays, score_arrays, *entries), *of_score, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise BadParam(WITH_TANGENT)


def _of_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    args = _kept(ctx, dout, dlse)
    entries = args[len(OF_BACKWARD) + 1 :]
    nothing = [None] * (_COUNT - _GRADIENTS)
    of_score = [
        score_gradient(*args, place) if needed else None
        for place, needed in enumerate(ctx.needs_input_grad[_COUNT])
    ]
    return (*_recorded(*args), *nothing, of_score, *[None] * len(entries))


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse_second_derivatives(ctx: Any, *gradients: Tensor) -> None:
    raise BadParam("flashgen does not compute a gradient of attention's gradients (double backward)")


_forward.register_autograd(_of_operator, setup_context=_keep)
for operator in (_backward, score_gradient):
    operator.register_autograd(_refuse_second_derivatives, setup_context=_keep_nothing)
