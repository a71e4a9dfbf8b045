"""``attention`` and its gradients at any head dim, and of arrays whose rows kernels could not read: padded or
copied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.api.attention import attention
from flashgen.api.backward import attention_backward
from flashgen.compat.libraries import is_tensor, module_of
from flashgen.errors import BadTensorShape, arg
from flashgen.operators.arguments import ROW_ALIGNMENT
from flashgen.operators.contract import MAX_HEAD_DIM
from flashgen.runtime.arrays import kind_of, tensor_kind

if TYPE_CHECKING:
    from collections.abc import Sequence


def attention_of_any_width(q: Any, k: Any, v: Any, *, softmax_scale: float | None, **options: Any) -> Any:
    """``attention``, where a head dim need not be a multiple of 16 bytes.

    Such an array is copied with zeros after each row, which add nothing to a score; the result is a view
    without the columns that the zeros of v made. An array whose rows are not contiguous, or do not start at
    multiples of 16 bytes, is copied, too.
    The default softmax_scale follows from the head dim without the zeros. Raises what ``attention`` raises.
    """
    if fit(q, k, v):
        return attention(q, k, v, softmax_scale=softmax_scale, **options)
    inputs = (q, k, v)
    padded = [_fitted(x) for x in inputs]
    unchanged = all(x is y for x, y in zip(inputs, padded, strict=True))
    if unchanged or not all(getattr(x, "shape", ()) for x in inputs):
        return attention(q, k, v, softmax_scale=softmax_scale, **options)
    if k.shape[-1] != q.shape[-1]:  # which the padding may have made equal
        raise BadTensorShape(
            f"{arg('k')} has head_dim {k.shape[-1]} but {arg('q')} has {q.shape[-1]}; they must be the same"
        )
    for name, x in zip("qkv", inputs, strict=True):
        if x.shape[-1] > MAX_HEAD_DIM:  # said of it without the zeros
            raise BadTensorShape(f"{arg(name)} has head_dim {x.shape[-1]}; the largest is {MAX_HEAD_DIM}")
    if softmax_scale is None and q.shape[-1]:  # a head dim of 0 is an error of attention
        softmax_scale = q.shape[-1] ** -0.5
    result = attention(*padded, softmax_scale=softmax_scale, **options)
    out, *lse = result if isinstance(result, tuple) else (result,)
    if v.shape[-1] != padded[2].shape[-1]:
        out = out[..., : v.shape[-1]]
    return (out, *lse) if lse else out


def gradients_of_any_width(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    into: Sequence[Any] = (None, None, None),
    softmax_scale: float | None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """dq, dk and dv of ``attention_of_any_width``, by ``attention_backward``.

    ``into`` receives them: tensors of the shapes of q, k and v in any layout. None: a new array, or a view of
    one without the columns that padding made. Raises what ``attention_backward`` raises.
    """
    if softmax_scale is None and q.shape[-1]:
        softmax_scale = q.shape[-1] ** -0.5
    direct = {
        name: x
        for name, x, of in zip(("dq", "dk", "dv"), into, (q, k, v), strict=True)
        if x is not None and not missing(of) and kernels_write(x)
    }
    inputs = [_fitted(x) for x in (dout, q, k, v, out)]
    gradients = attention_backward(*inputs, lse, softmax_scale=softmax_scale, **direct, **options)
    results = []
    for name, gradient, x, target in zip(("dq", "dk", "dv"), gradients, (q, k, v), into, strict=True):
        narrow = gradient if gradient.shape == x.shape else gradient[..., : x.shape[-1]]
        if target is not None and name not in direct:
            narrow = target.copy_(narrow)
        results.append(narrow)
    return tuple(results)


def fit(*arrays: Any) -> bool:
    """Whether all arrays are tensors that kernels can read as they are. It takes little time, and is False
    also where more would have to be looked at, as inside torch.compile.
    """
    kind = tensor_kind(arrays[0])
    if kind is None or kind.is_compiling():
        return False
    tensor = kind.torch.Tensor
    try:
        for x in arrays:
            if type(x) is not tensor or x.data_ptr() % ROW_ALIGNMENT:
                return False
            if not _layout_fits(x.shape, x.stride(), x.element_size()):
                return False
    except RuntimeError:  # inside torch.func, or of a tensor without strides
        return False
    return True


@lru_cache(maxsize=4096)
def _layout_fits(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """Whether rows of whole multiples of ROW_ALIGNMENT have elements side by side, and begin at such."""
    if not shape or strides[-1] != 1 or shape[-1] * size % ROW_ALIGNMENT:
        return False
    rows = zip(shape[:-1], strides[:-1], strict=True)
    return all(extent < 2 or stride * size % ROW_ALIGNMENT == 0 for extent, stride in rows)


def kernels_write(x: Any) -> bool:
    """Whether kernels can write into the tensor ``x`` as it is in memory."""
    return _has_rows(x, x.stride(), 1, x.element_size()) and _is_aligned(x)


def readable_rows(x: Any) -> Any:
    """``x``, or a copy if its rows are not contiguous, or do not start at multiples of ROW_ALIGNMENT.
    Anything but an array stays as it is: ``attention`` raises for it.
    """
    if is_tensor(x):
        return _readable_tensor(x)
    if module_of(x) is None:
        return x
    strides, kind = getattr(x, "strides", None), kind_of(x)
    if strides is None:  # an array of JAX has none, and is contiguous
        return x
    aligned = kind is None or kind.pointer(x) % ROW_ALIGNMENT == 0
    return x if aligned and _has_rows(x, strides, x.itemsize, 1) else x.copy()


def _readable_tensor(x: Any) -> Any:
    if kernels_write(x):  # then they can read it, too
        return x
    return x.clone(memory_format=kind_of(x).torch.contiguous_format)


def _is_aligned(x: Any) -> bool:
    """Whether a tensor starts at a multiple of ROW_ALIGNMENT; also true where that cannot be told."""
    # A traced and a fake tensor have no address yet: the operator checks it when it runs.
    kind = kind_of(x)
    if kind.is_compiling() or kind.dispatches(x):
        return True
    try:
        return x.data_ptr() % ROW_ALIGNMENT == 0
    except RuntimeError:  # inside torch.func, which attention refuses
        return True


def _has_rows(x: Any, strides: Sequence[int], contiguous: int, unit: int) -> bool:
    """Whether kernels can read the rows of an array whose strides are in units of ``unit`` bytes."""
    if not strides or strides[-1] != contiguous:
        return not strides
    for place, stride in enumerate(strides[:-1]):
        if stride * unit % ROW_ALIGNMENT and x.shape[place] > 1:
            return False
    return True


def missing(x: Any) -> int:
    """How many elements a row lacks to a whole number of ROW_ALIGNMENT."""
    return -x.shape[-1] % (ROW_ALIGNMENT // x.dtype.itemsize or 1)


def _fitted(x: Any) -> Any:
    """``x``, or a copy of it where kernels could not read its rows."""
    # Both functions that pad keep the order of dimensions that x has in memory.
    if is_tensor(x):
        if x.ndim and missing(x):
            x = kind_of(x).torch.nn.functional.pad(x, (0, missing(x)))
        return _readable_tensor(x)
    xp = module_of(x)
    if xp is None or x.ndim == 0 or not missing(x):
        return readable_rows(x)
    zeros = xp.broadcast_to(xp.zeros_like(x[..., :1]), (*x.shape[:-1], missing(x)))
    return readable_rows(xp.concatenate([x, zeros], axis=-1))
