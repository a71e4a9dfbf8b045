"""``torch.nn.functional.scaled_dot_product_attention``, under its signature.

>>> from flashgen.compat.torch import scaled_dot_product_attention
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashgen.compat.refusals import refuse_dropout, refuse_gradients
from flashgen.compat.widths import attention_of_any_width
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape

if TYPE_CHECKING:
    from torch import Tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of query, (batch, heads, seqlen_q, E), on key, (batch, kv_heads, seqlen_kv, E), and value,
    (batch, kv_heads, seqlen_kv, Ev); or each without batch. fp16, bf16 or fp32, on a GPU or in host memory.

    They are read by their strides. One whose last dimension is not contiguous, or whose rows are no multiple
    of 16 bytes, is copied. A batch or a head of 1 of key and value serves all of query.
    attn_mask: broadcasts to (batch, heads, seqlen_q, seqlen_kv). bool: True where a key takes part; it is
        inverted, which copies it. fp32: added to the scaled scores, read where it lies; -inf hides a key.
        fp16, bf16: likewise, converted to fp32, which copies it. A query whose every key is hidden by the
        most negative float instead may get 0, too, where PyTorch gives it the mean of value.
    dropout_p: 0 alone.
    is_causal: query i sees the keys j <= i, aligned top left. Not with attn_mask.
    scale: by default 1 / sqrt(E). Not negative.
    enable_gqa: kv_heads may be a divisor of heads: head h reads kv head h // (heads // kv_heads).

    Under autocast query, key and value are cast, as PyTorch's own does. Autograd gets their gradients.

    Returns (batch, heads, seqlen_q, Ev), a transposed view of (batch, seqlen_q, heads, Ev), as PyTorch's own
    flash kernels do. A query that sees no key is 0.

    Raises NotImplementedError for a dropout_p above 0, for an attn_mask that requires a gradient or is of
    another dtype, and for any number of dimensions but 3 and 4; BadParam for is_causal with attn_mask;
    BadTensorShape for a number of heads that enable_gqa would allow; and what ``flashgen.attention`` raises,
    which calls the tensors q, k and v.
    """
    refuse_dropout(dropout_p)
    tensors = {"query": query, "key": key, "value": value}
    for name, x in (tensors if attn_mask is None else tensors | {"attn_mask": attn_mask}).items():
        if not isinstance(x, torch.Tensor):
            raise BadTensorDtype(f"{name} has type {type(x).__name__}; expected a torch.Tensor")
    refuse_gradients(attn_mask=attn_mask)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if x.dim() not in (3, 4):
            raise NotImplementedError(
                f"{name} has {x.dim()} dimensions; flashgen takes (batch, heads, seqlen, E), or that without "
                "batch"
            )
        if x.dim() != query.dim():
            raise BadTensorShape(
                f"{name} has shape {tuple(x.shape)} but query has {tuple(query.shape)}; expected as many "
                "dimensions"
            )
    if attn_mask is not None and is_causal:
        raise BadParam("is_causal is True and attn_mask was given; they are not allowed together")
    key, value = _broadcast("key", key, query, enable_gqa), _broadcast("value", value, query, enable_gqa)
    options: dict[str, Any] = {"mask_type": "causal_top_left"} if is_causal else _masked(attn_mask, key)
    q, k, v = (x.transpose(-3, -2) for x in (query, key, value))
    return attention_of_any_width(q, k, v, softmax_scale=scale, **options).transpose(-3, -2)


def _broadcast(name: str, x: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """key or value with the batch of query. One head serves all of query's, as it is."""
    heads, of_query = x.shape[-3], query.shape[-3]
    if heads not in (1, of_query) and not enable_gqa:
        raise BadTensorShape(
            f"{name} has {heads} heads but query has {of_query}; they must be the same, or enable_gqa=True"
        )
    if x.dim() == 4 and x.shape[0] == 1:
        return x.expand(query.shape[0], *x.shape[1:])
    return x


def _masked(attn_mask: Tensor | None, key: Tensor) -> dict[str, Any]:
    """The options of ``attention`` for a mask."""
    if attn_mask is None:
        return {}
    if attn_mask.dtype == torch.bool:
        return {"mask": _rows(~attn_mask, key.shape[-2])}
    if attn_mask.dtype in (torch.float16, torch.bfloat16):
        attn_mask = attn_mask.float()
    if attn_mask.dtype == torch.float32:
        return {"score": "bias", "params": {"bias": _rows(attn_mask, key.shape[-2])}}
    raise NotImplementedError(
        f"attn_mask has dtype {attn_mask.dtype}; flashgen takes bool, fp32, fp16 and bf16: pass "
        "attn_mask.float()"
    )


def _rows(mask: Tensor, seqlen_kv: int) -> Tensor:
    """``mask`` with a whole, contiguous row for each query. Nothing else is copied for broadcasting."""
    if mask.dim() and mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], seqlen_kv)
    return mask if mask.stride(-1) == 1 or mask.shape[-1] == 1 else mask.contiguous()
