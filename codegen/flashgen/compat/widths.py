"""``attention`` at any head dim, and of arrays whose last dimension is not contiguous: padded or copied."""

from __future__ import annotations

import sys
from typing import Any

from flashgen.api.attention import attention
from flashgen.compat.libraries import is_tensor, module_of
from flashgen.errors import BadTensorShape

# Rows start at a multiple of so many bytes.
ROW_BYTES = 16


def attention_of_any_width(q: Any, k: Any, v: Any, *, softmax_scale: float | None, **options: Any) -> Any:
    """``attention``, where a head dim need not be a multiple of 16 bytes.

    Such an array is copied with zeros behind each row, which add nothing to a score; the result is a view
    without the columns that the zeros of v made. An array whose last dimension is not contiguous is copied,
    too.
    softmax_scale is by default that of the head dim without the zeros. Raises what ``attention`` raises.
    """
    given = (q, k, v)
    padded = [_fitted(x) for x in given]
    unchanged = all(x is y for x, y in zip(given, padded, strict=True))
    if unchanged or not all(getattr(x, "shape", ()) for x in given):
        return attention(q, k, v, softmax_scale=softmax_scale, **options)
    if k.shape[-1] != q.shape[-1]:  # which the padding may have made equal
        raise BadTensorShape(f"k has head_dim {k.shape[-1]} but q has {q.shape[-1]}; they must be the same")
    if softmax_scale is None and q.shape[-1]:  # a head dim of 0 is an error of attention
        softmax_scale = q.shape[-1] ** -0.5
    result = attention(*padded, softmax_scale=softmax_scale, **options)
    out, *lse = result if isinstance(result, tuple) else (result,)
    if v.shape[-1] != padded[2].shape[-1]:
        out = out[..., : v.shape[-1]]
    return (out, *lse) if lse else out


def contiguous_rows(x: Any) -> Any:
    """``x``, or a copy of it where its last dimension is not contiguous. Anything that is no array stays as
    it is, for ``attention`` to say what is wrong.
    """
    if is_tensor(x):
        return x if not x.ndim or x.stride(-1) == 1 else x.contiguous()
    if module_of(x) is None or x.ndim == 0:
        return x
    strides = getattr(x, "strides", None)  # an array of JAX has none, and is contiguous
    return x if strides is None or strides[-1] == x.itemsize else x.copy()


def missing(x: Any) -> int:
    """How many elements a row lacks to a whole number of ROW_BYTES."""
    return -x.shape[-1] % (ROW_BYTES // x.dtype.itemsize or 1)


def _fitted(x: Any) -> Any:
    """``x``, or a copy of it where kernels could not read its rows."""
    tensor, xp = is_tensor(x), module_of(x)
    if not (tensor or xp) or x.ndim == 0 or not missing(x):
        return contiguous_rows(x)
    # Both functions keep the order of dimensions that x has in memory.
    if tensor:
        return contiguous_rows(sys.modules["torch"].nn.functional.pad(x, (0, missing(x))))
    zeros = xp.broadcast_to(xp.zeros_like(x[..., :1]), (*x.shape[:-1], missing(x)))
    return contiguous_rows(xp.concatenate([x, zeros], axis=-1))
