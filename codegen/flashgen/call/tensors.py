"""The tensors of a call that PyTorch records: what must hold of them, and layouts that kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.call.codec import INPUTS
from flashgen.call.field import listed
from flashgen.call.fields import DIFFERENTIABLE, LENGTHS, OF_BLOCK_MASK, SHORTHANDS
from flashgen.call.mask import Mask
from flashgen.errors import BadParam, DeviceTypeNotSupported, arg
from flashgen.operators.arguments import ROW_ALIGNMENT
from flashgen.operators.backward import BACKWARD, INPUT_OF
from flashgen.runtime.torchkind import INSIDE_TORCH_FUNC, NESTED, WITH_TANGENT

if TYPE_CHECKING:
    from flashgen.call.record import Call


# The dtypes of gradients that do not have the dtype of their input.
_DTYPES = {
    of: torch.float32 for name, of in INPUT_OF.items() if BACKWARD.arguments[BACKWARD.position(name)].dtypes
}
# The arrays of the backward pass: the inputs of the forward pass, and others before and after them.
OF_BACKWARD = ("dout", *INPUTS, "out", "lse", "dlse")
# Of these the arrays whose rows are aligned, and the ones that are contiguous; lengths and lists of key
# blocks are as the caller has them.
IN_ROWS, _CONTIGUOUS = (
    tuple(
        x.name
        for x in BACKWARD.arguments
        if x.layout == layout and x.name in OF_BACKWARD and x.name not in (*LENGTHS, *OF_BLOCK_MASK)
    )
    for layout in ("rows", "contiguous")
)


def arrays_of(call: Call, names: tuple[str, ...] = INPUTS) -> dict[str, Any]:
    """The arrays of a call with these names; None for a mask by a line."""
    return {name: None if isinstance(x := getattr(call, name), Mask) else x for name in names}


def arrays_of_mask(call: Call) -> dict[str, Any]:
    """The arrays of a mask by a line, by the names of arguments."""
    return call.mask.arguments if isinstance(call.mask, Mask) else {}


def arrays_of_score(call: Call) -> dict[str, Any]:
    """The parameters of a score modification by name, which may be arrays."""
    params = dict(call.params) if isinstance(call.params, Mapping) else {}
    return {name: getattr(call, name) for name, _ in SHORTHANDS} | params


def check_tensors(arrays: Mapping[str, Any]) -> None:
    """That all arrays of a call that is recorded are tensors, and dense. Raises BadParam."""
    for name, x in arrays.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            leaves = [other for other, y in arrays.items() if isinstance(y, Tensor) and y.requires_grad]
            why = f"{arg(leaves[0])} requires a gradient" if leaves else "another array is traced"
            raise BadParam(
                f"{arg(name)} has type {type(x).__name__}, and {why}; pass a tensor, which torch.as_tensor "
                "makes"
            )
        if x.is_nested:
            raise BadParam(f"{arg(name)}: {NESTED}")


def check_meta(arrays: Mapping[str, Any]) -> None:
    """That no tensor has memory where the first one has none. Raises DeviceTypeNotSupported."""
    tensors = {name: x for name, x in arrays.items() if isinstance(x, Tensor)}
    first, *others = tensors
    if tensors[first].is_meta:
        for name in others:
            if not tensors[name].is_meta:
                raise DeviceTypeNotSupported(
                    f"{arg(first)} is on meta but {arg(name)} is on {tensors[name].device}; all arrays must "
                    "be on one device"
                )


def refuse_transforms() -> None:
    """Raise BadParam inside torch.func, where an operator would lose tangents. Dynamo cannot tell of a tensor
    whether it is wrapped.
    """
    if torch._C._are_functorch_transforms_active():
        raise BadParam(INSIDE_TORCH_FUNC)


def refuse_derivatives(call: Call) -> None:
    """Raise BadParam for an array of a score modification that requires a gradient or has a tangent, in a
    call that has no gradient of such arrays.
    """
    if not call.has_score():
        return
    tensors = {name: x for name, x in arrays_of_score(call).items() if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise BadParam(
                f"{arg(name)} requires a gradient; calls with lengths, a KVCache or out have gradients of "
                f"{listed(DIFFERENTIABLE)} alone, or none: pass {arg(name)}.detach()"
            )
    refuse_tangents(tensors)


def refuse_tangents(tensors: Mapping[str, Tensor]) -> None:
    """Raise BadParam for a tensor of forward-mode differentiation."""
    for name, x in tensors.items():
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise BadParam(f"{arg(name)}: {WITH_TANGENT}")


def new_gradient(name: str, x: Tensor) -> Tensor:
    """Memory for the gradient of an array ``x`` called ``name``."""
    return x.new_empty(x.shape, dtype=_DTYPES.get(name, x.dtype))


def single(gradient: Tensor) -> Tensor:
    """``gradient`` without a pending negation. Raises BadParam for a batch of several gradients."""
    gradient = gradient.resolve_neg()
    try:
        gradient.data_ptr()
    except RuntimeError:
        raise BadParam(
            "several gradients of one result were given at once (is_grads_batched, or vmap); pass one after "
            "another"
        ) from None
    return gradient


def with_rows(x: Tensor) -> Tensor:
    """``x``, or a copy if kernels cannot read its rows: their elements are not adjacent, as in the gradient
    of a sum, or they do not start at multiples of 16 bytes. Raises as `single`.
    """
    x = single(x)
    *strides, last = x.stride()
    size = x.element_size()
    rows = last == 1 and x.data_ptr() % ROW_ALIGNMENT == 0
    for stride, extent in zip(strides, x.shape, strict=False):
        rows = rows and (extent < 2 or stride * size % ROW_ALIGNMENT == 0)
    return x if rows else x.clone(memory_format=torch.contiguous_format)


def readable(arrays: tuple[Any, ...]) -> dict[str, Any]:
    """What the backward pass takes, by name, in layouts that kernels read."""
    values = dict(zip(OF_BACKWARD, arrays, strict=False))
    # Hooks of saved tensors may return them with other strides.
    for name in IN_ROWS:
        if values[name] is not None:
            values[name] = with_rows(values[name])
    for name in _CONTIGUOUS:
        if values[name] is not None:
            values[name] = single(values[name]).contiguous()
    return values


def by_input(gradients: tuple[Tensor, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A gradient for each of the differentiable inputs, None for one that the call lacks."""
    if len(gradients) == len(inputs):
        return gradients
    remaining = iter(gradients)
    return tuple([None if x is None else next(remaining) for x in inputs])
