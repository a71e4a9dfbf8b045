"""``torch.nn.functional.scaled_dot_product_attention`` and ``flex_attention``, under their signatures; and
flashgen in PyTorch's registry, where the former itself finds it.

>>> from flashgen.compat.torch import flex_attention, scaled_dot_product_attention

>>> flashgen.compat.torch.register()
>>> torch.nn.attention.activate_flash_attention_impl("flashgen")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashgen.compat.libraries import is_tensor, shape_of
from flashgen.compat.torch_flex import flex_attention
from flashgen.compat.widths import attention_of_any_width
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, FlashgenError, arg
from flashgen.operators.arguments import flag
from flashgen.runtime.arrays import is_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["flex_attention", "register", "scaled_dot_product_attention"]

# What errors of ``attention`` call arguments, in the words of here.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attn_mask",
    "bias": "attn_mask",
    "softmax_scale": "scale",
    "the negated q": "negate query",
}


def register(name: str = "flashgen", *, cpu: bool = False) -> None:
    """Add flashgen to PyTorch's implementations of flash attention, under ``name``; PyTorch 2.11 and later.

    ``torch.nn.attention.activate_flash_attention_impl(name)`` then replaces PyTorch's flash attention in this
    process, and ``restore_flash_attention_impl()`` brings it back. What PyTorch does not give to flash
    attention, for example calls with a mask on a GPU, stays with PyTorch.
    cpu: also replace flash attention for tensors in host memory, masks included; for tests.

    Raises NotImplementedError if PyTorch has no registry. An active flashgen raises NotImplementedError for
    alibi_slopes, for dropout in host memory or with seqused_k, and what ``flashgen.attention`` raises, before
    anything runs.
    """
    from torch.nn import attention as registry

    cpu = flag("cpu", cpu)
    if not hasattr(registry, "register_flash_attention_impl"):
        raise NotImplementedError(
            f"PyTorch {torch.__version__} has no registry of flash attention, which comes with 2.11; call "
            "flashgen.compat.torch.scaled_dot_product_attention"
        )

    def activate() -> Any:
        from flashgen.compat.torch_registry import library

        return library(cpu)

    registry.register_flash_attention_impl(name, register_fn=activate)


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

    They are read by their strides. One whose rows are not contiguous, are no multiple of 16 bytes long, or do
    not start at multiples of 16 bytes, is copied. A batch or a head of 1 serves all of the other tensors.
    attn_mask: broadcasts to (batch, heads, seqlen_q, seqlen_kv). bool: True where a key takes part; it is
        inverted, which copies it. fp32, fp16 or bf16: added to the scaled scores, read in place; -inf hides a
        key. Such a mask may require a gradient. If the most negative float instead of -inf
        hides every key of a query, the query may get 0, too; PyTorch gives it the mean of value. A
        ``CausalBias`` of torch.nn.attention.bias is the causal mask of its alignment; no element is read.
    dropout_p: as in ``flashgen.attention``, of seeds from torch's generator; PyTorch's own kernels drop other
        scores.
    is_causal: query i sees the keys j <= i, aligned top left. Not with attn_mask.
    scale: by default 1 / sqrt(E). Not negative.
    enable_gqa: kv_heads may be a divisor of heads: head h reads kv head h // (heads // kv_heads). key and
        value may have different numbers of heads. Then the array with fewer heads is copied with its heads
        repeated; both arrays, if neither number divides the other.

    Under autocast query, key and value are cast, as PyTorch's own does, which leaves fp64 as it is. Autograd
    gets their gradients.

    Returns (batch, heads, seqlen_q, Ev), a transposed view of (batch, seqlen_q, heads, Ev), as PyTorch's own
    flash kernels do. A query that sees no key is 0.

    Raises NotImplementedError for an attn_mask of another dtype, and for any number of dimensions but 3 and
    4; BadParam for is_causal with attn_mask, and for a nested or a sparse tensor; BadTensorShape for sizes
    that do not go together, such as a number of heads that enable_gqa would allow; BadTensorDtype for
    anything but a tensor; and what ``flashgen.attention`` raises, under the names that arguments have here.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, x in (tensors if attn_mask is None else tensors | {"attn_mask": attn_mask}).items():
        if not is_tensor(x):
            if not isinstance(x, torch.Tensor):
                raise BadTensorDtype(f"{arg(name)} has type {type(x).__name__}; expected a torch.Tensor")
            shape_of(name, x)  # raises for a nested or a sparse one
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise BadParam("is_causal is True and attn_mask was given; they are not allowed together")
    for name, x in tensors.items():
        if x.dim() not in (3, 4):
            raise NotImplementedError(
                f"{name} has {x.dim()} dimensions; flashgen takes (batch, heads, seqlen, E), or that "
                "without batch"
            )
        if x.dim() != query.dim():
            raise BadTensorShape(
                f"{arg(name)} has shape {tuple(x.shape)} but query has {tuple(query.shape)}; expected as "
                "many dimensions"
            )
    query, key, value = autocast(query, key, value)
    query, key, value = _broadcast(query, key, value, enable_gqa)
    options = {"mask_type": "causal_top_left"} if is_causal else _masked(attn_mask, query, key)
    q, k, v = (x.transpose(-3, -2) for x in (query, key, value))
    try:
        out = attention_of_any_width(q, k, v, softmax_scale=scale, dropout_p=dropout_p, **options)
    except FlashgenError as error:
        if attn_mask is not None and "mask_type" not in options:  # whose shape costs 3 µs to look at
            _check_mask(attn_mask, query, key)
        error.rename(_NAMES)
        raise
    return out.transpose(-3, -2)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast gives them to PyTorch's own attention."""
    device = tensors[0].device.type
    # Not torch.amp.is_autocast_available(), which torch.compile of PyTorch 2.11 does not trace.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, ...]:
    """The tensors with one batch, and key and value with as many heads. One head of both serves all of
    query's, as it is.
    """
    served = enable_gqa or key.shape[-3] in (1, query.shape[-3])
    if served and query.shape[:-3] == key.shape[:-3] and key.shape[:-1] == value.shape[:-1]:
        return query, key, value
    if key.shape[-2] != value.shape[-2]:
        raise BadTensorShape(
            f"value has shape {tuple(value.shape)} but key has {tuple(key.shape)}; expected as many keys"
        )
    tensors = {"query": query, "key": key, "value": value}
    batch = [_size(tensors, 0, "batch entries")] if query.dim() == 4 else []
    heads = query.shape[-3] if enable_gqa else _size(tensors, -3, "heads", ", or enable_gqa=True")
    if enable_gqa:
        key, value = _in_groups_alike(key, value, heads)
    kv_heads = _size({"key": key, "value": value}, -3, "heads")
    leading_shapes = (*batch, heads), (*batch, kv_heads), (*batch, kv_heads)
    return tuple(
        x if x.shape[:-2] == ahead else x.expand(*ahead, *x.shape[-2:])
        for x, ahead in zip((query, key, value), leading_shapes, strict=True)
    )


def _in_groups_alike(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """key and value with as many heads: heads are repeated, which copies them. Raises BadTensorShape."""
    key_heads, value_heads = key.shape[-3], value.shape[-3]
    if key_heads == value_heads or 1 in (key_heads, value_heads):  # one head is broadcast
        return key, value
    for name, count in (("key", key_heads), ("value", value_heads)):
        if not count or heads % count:
            raise BadTensorShape(
                f"query has {heads} heads, {arg(name)} has {count}; the heads of query must be a positive "
                f"multiple of the heads of {arg(name)}"
            )
    most = max(key_heads, value_heads)
    kv_heads = heads if most % min(key_heads, value_heads) else most
    return tuple(
        x if x.shape[-3] == kv_heads else x.repeat_interleave(kv_heads // x.shape[-3], -3)
        for x in (key, value)
    )


def _size(tensors: dict[str, Tensor], dimension: int, of_what: str, hint: str = "") -> int:
    """What the sizes of a dimension broadcast to. Raises BadTensorShape."""
    sizes = {name: x.shape[dimension] for name, x in tensors.items() if x.shape[dimension] != 1}
    first, size = [*sizes.items(), ("", 1)][0]
    for name, other in sizes.items():
        if other != size:
            raise BadTensorShape(
                f"{arg(name)} has {other} {of_what} but {first} has {size}; they must be the same, or 1{hint}"
            )
    return size


def _masked(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> dict[str, Any]:
    """The options of ``attention`` for a mask."""
    if attn_mask is None:
        return {}
    # A tensor without elements of its own, whose module takes seconds to import.
    if type(attn_mask) is not torch.Tensor and is_of(type(attn_mask), "torch.nn.attention", "CausalBias"):
        return {"mask_type": _causal(attn_mask, query, key)}
    if attn_mask.dim() > query.dim():  # which attention may take
        _check_mask(attn_mask, query, key)
    if attn_mask.dtype == torch.bool:
        return {"mask": _rows(~attn_mask, key.shape[-2])}
    if attn_mask.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return {"score": "bias", "params": {"bias": _rows(attn_mask, key.shape[-2])}}
    # As floats, integers that say which keys take part would be added to scores.
    dtype = "float" if attn_mask.is_floating_point() else "bool"
    raise NotImplementedError(
        f"attn_mask has dtype {attn_mask.dtype}; flashgen takes bool, fp32, fp16 and bf16: pass "
        f"attn_mask.{dtype}()"
    )


def _causal(bias: Any, query: Tensor, key: Tensor) -> str:
    """The mask type of a ``CausalBias``. Raises BadTensorShape."""
    queries, keys = query.shape[-2], key.shape[-2]
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise BadTensorShape(
            f"attn_mask is a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys but query has "
            f"{queries} and key has {keys}"
        )
    return "causal_top_left" if bias.variant.name == "UPPER_LEFT" else "causal_bottom_right"


def _check_mask(attn_mask: Tensor, query: Tensor, key: Tensor) -> None:
    """That a mask broadcasts to the scores. Raises BadTensorShape."""
    shape, scores = tuple(attn_mask.shape), (*query.shape[:-1], key.shape[-2])
    sizes = zip(reversed(shape), reversed(scores), strict=False)
    if len(shape) <= len(scores) and all(size in (1, full) for size, full in sizes):
        return
    names = ("batch", "heads", "seqlen_q", "seqlen_kv")[-len(scores) :]
    of_padding = len(scores) == 4 and shape == (scores[0], scores[-1])
    raise BadTensorShape(
        f"attn_mask has shape {shape}; it must broadcast to ({', '.join(names)}) = {scores}"
        + ("; one of padding goes in as attn_mask[:, None, None, :]" if of_padding else "")
    ) from None


def _rows(mask: Tensor, seqlen_kv: int) -> Tensor:
    """``mask`` with a whole, contiguous row for each query. Nothing else is copied for broadcasting."""
    if not mask.dim() or mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], seqlen_kv)
    return mask if mask.stride(-1) == 1 or mask.shape[-1] == 1 else mask.contiguous()
