"""flashgen as an attention implementation of the transformers library.

>>> flashgen.compat.transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fgen")

transformers calls two functions of an implementation. `mask` sees the padding, the caches and the pattern of
a forward pass, once for all layers that share them. `attention_forward` computes a layer. What the first one
tells the second one is a tensor of four dimensions, as ``generate()`` passes no other one through:

- int32, (batch, 1, width, n): a causal pattern. ``width`` is the number of keys that a query sees at most,
  its own included, 1 for any number. ``mask[:, 0, 0]`` has n numbers for each sequence. 0: none, the last
  query sees the last key; 1: the end of its keys; 2: its first key, and the end; 3: its first key, three
  times, and keys end where the array does. Width and n are sizes so that the host knows them, also in a
  graph. All entries along the width are one in memory.
- bool, (batch, 1, seqlen_q, seqlen_kv): any other pattern, True where visible, as for ``sdpa``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from flashgen.compat.flash_attn_arguments import contiguous
from flashgen.compat.torch import autocast
from flashgen.compat.widths import attention_of_any_width
from flashgen.errors import BadParam, BadTensorShape, naming
from flashgen.operators.arguments import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["attention_forward", "mask", "register"]

NAME = "fgen"
# What errors of ``attention`` call arguments, in the words of transformers.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attention_mask",
    "kv_starts": "attention_mask",
    "bias": "attention_mask",
    "softmax_scale": "scaling",
    "dropout_p": "dropout",
    "sinks": "s_aux",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_kv": "cu_seq_lens_k",
    "return_weights": "output_attentions",
    "max_seqlen_q": "max_length_q",
    "max_seqlen_kv": "max_length_k",
}
_ANY_WIDTH = 1
_END, _FIRST_AND_END, _FIRST_ALONE = 1, 2, 3


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` compute attention with flashgen, in all models of this process.

    Raises BadParam for a name with "flash", which transformers takes for a package of kernels.
    """
    if not isinstance(name, str) or "flash" in name.lower():
        raise BadParam(
            f"name is {shown(name)}; expected a string without 'flash', of which transformers expects a "
            f"package of kernels, for example {NAME!r}"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """What the layers of a forward pass see, as `attention_forward` takes it.

    Query i has the position q_offset + i, key j kv_offset + j. ``attention_mask``, (batch, positions), is
    true where a token is no padding. If it is there, the host reads whether there is padding, as it does for
    transformers' own implementations. Padding on the right is after all tokens that count, so that a causal
    pattern hides it; rows of padding have any result.

    Dense masks are made for padding between tokens, for other patterns than causal ones and sliding windows,
    and in traced or captured functions for padding and sliding windows.
    """
    end = q_offset + q_length - kv_offset
    if mask_function is causal_mask_function and attention_mask is None:
        return _ranges(batch_size, kv_length, end, _ANY_WIDTH, None, device)
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not traced and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        width = _width(mask_function)
        first, is_range = None, True
        if width is not None and attention_mask is not None:
            first, is_range = _first_keys(attention_mask, kv_offset, kv_length)
        if width is not None and is_range:
            return _ranges(batch_size, kv_length, end, width, first, device)
    options["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **options,
    )


def _ranges(
    batch_size: int, kv_length: int, end: int | Tensor, width: int, first: Tensor | None, device: Any
) -> Tensor:
    """The tensor of a causal pattern; ``first``, (batch,), may be None for 0."""
    if isinstance(end, torch.Tensor) or end != kv_length:
        ends = torch.as_tensor(end, dtype=torch.int32, device=device).expand(batch_size)
        numbers = [ends] if first is None else [first, ends]
    else:
        numbers = [] if first is None else [first] * _FIRST_ALONE
    # One after another in memory, as kernels read them.
    ranges = torch.empty(len(numbers), batch_size, dtype=torch.int32, device=device)
    for row, values in zip(ranges, numbers, strict=True):
        row.copy_(values)
    return ranges.t()[:, None, None].expand(batch_size, 1, width, len(numbers))


def _width(mask_function: Callable[..., Any]) -> int | None:
    """How many keys a causal pattern lets a query see, `_ANY_WIDTH` for any number; None for another pattern,
    and for a window that is no number above 1.
    """
    if mask_function is causal_mask_function:
        return _ANY_WIDTH
    parts = _closure(mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    width = _closure(parts[0]).get("sliding_window")
    if not isinstance(width, int) or width <= _ANY_WIDTH:
        return None
    like = _closure(sliding_window_causal_mask_function(width))["mask_functions"][0]
    return width if parts[0].__code__ is like.__code__ else None


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function has of the function around it."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _first_keys(attention_mask: Tensor, kv_offset: int, kv_length: int) -> tuple[Tensor | None, bool]:
    """The first token of each sequence among the keys, (batch,), None if it is 0 for all; and whether there
    is no padding between tokens. Waits for the device once.
    """
    lacking = kv_offset + kv_length - attention_mask.shape[-1]
    visible = torch.nn.functional.pad(attention_mask.bool(), (0, max(lacking, 0)))
    visible = visible[:, kv_offset : kv_offset + kv_length]
    keys = torch.arange(kv_length, device=visible.device)
    count = visible.sum(-1)
    first = torch.where(visible, keys, kv_length).amin(-1)
    end = torch.where(visible, keys + 1, 0).amax(-1)
    first = torch.where(count > 0, first, 0)  # a sequence of padding alone has any result
    holes = (end - first > count).any()
    left, has_holes = torch.stack(((first > 0).any(), holes)).tolist()
    return (first if left else None), not has_holes


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool = False,
    block_table: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """A layer of query, (batch, heads, seqlen_q, head_dim), key and value, (batch, kv_heads, seqlen_kv, ...).

    attention_mask: of `mask`; or of the caller, as for ``sdpa``: bool, True where visible, or float, added to
        the scores. None: causal, aligned bottom right, if is_causal (None: module.is_causal), in a window of
        ``sliding_window`` keys.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of packed sequences, in a batch of 1; they
        replace attention_mask, and sliding_window is the window.
    s_aux: a sink of each query head.
    output_attentions: also return the weights, (batch, heads, seqlen_q, seqlen_kv), which have no gradient;
        without dropout and packed sequences.
    unused: arguments that other implementations take, for example position_ids.

    dropout: the probability that a score is dropped, in training; not with padding on the left.

    Returns (batch, seqlen_q, heads, head_dim), and the weights or None. Raises NotImplementedError for
    position_bias and block_table, and what ``flashgen.attention`` raises.
    """
    for name, x in (("position_bias", position_bias), ("block_table", block_table)):
        if x is not None:
            raise NotImplementedError(
                f"{name} was given, which attn_implementation={NAME!r} does not serve; use 'sdpa'"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2) for x in autocast(query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or None,
        "dropout_p": dropout,
        "sinks": s_aux.float() if s_aux is not None and s_aux.dtype == torch.float16 else s_aux,
    }
    packed = cu_seq_lens_q is not None
    with naming(_NAMES):
        if packed:
            options |= _causal(sliding_window) if causal else {}
            options |= {"cu_seqlens_q": _int32(cu_seq_lens_q), "cu_seqlens_kv": _int32(cu_seq_lens_k)}
            options |= {"max_seqlen_q": max_length_q, "max_seqlen_kv": max_length_k}
            if q.shape[0] != 1:
                raise BadTensorShape(
                    f"query has a batch of {q.shape[0]} with cu_seq_lens_q; packed sequences are a batch of 1"
                )
            q, k, v = q[0], k[0], v[0]
        elif attention_mask is None:
            options |= _causal(sliding_window) if causal else {}
        elif attention_mask.dtype == torch.int32 and not output_attentions:
            options |= _of_ranges(attention_mask)
        elif attention_mask.dtype == torch.int32:
            options["mask"] = _hidden_by_ranges(attention_mask, q.shape[1], k.shape[1])
        else:
            options |= _of_dense(attention_mask, k)
        if output_attentions:
            out, weights = attention_of_any_width(q, k, v, return_weights=True, **options)
            return out, weights
        out = attention_of_any_width(q, k, v, **options)
    return (out[None] if packed else out), None


def _causal(width: int | None) -> dict[str, Any]:
    """The options of a causal pattern in which a query sees ``width`` keys, None for any number."""
    return {"causal": True, "window_size": (-1 if width is None else width - 1, -1)}


def _of_ranges(ranges: Tensor) -> dict[str, Any]:
    """The options for what `mask` says of a causal pattern."""
    width, numbers = ranges.shape[2:]
    options = _causal(None if width == _ANY_WIDTH else width)
    if not numbers:
        return options
    ranges = ranges[:, 0, 0]
    if numbers in (_FIRST_AND_END, _FIRST_ALONE):
        options["kv_starts"] = ranges[:, 0].contiguous()
    if numbers in (_END, _FIRST_AND_END):
        options["kv_lengths"] = ranges[:, -1].contiguous()
    return options


def _hidden_by_ranges(ranges: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
    """The dense mask of what `mask` says of a causal pattern, (batch, 1, seqlen_q, seqlen_kv)."""
    width, numbers = ranges.shape[2:]
    ranges = ranges[:, 0, 0, :, None, None, None]
    end = ranges[:, -1] if numbers in (_END, _FIRST_AND_END) else seqlen_kv
    keys = torch.arange(seqlen_kv, device=ranges.device)
    position = end - seqlen_q + torch.arange(seqlen_q, device=ranges.device)[:, None]
    hidden = keys > position
    if width != _ANY_WIDTH:
        hidden = hidden | (keys <= position - width)
    if numbers in (_FIRST_AND_END, _FIRST_ALONE):
        hidden = hidden | (keys < ranges[:, 0])
    return hidden.expand(ranges.shape[0], 1, seqlen_q, seqlen_kv)


def _of_dense(attention_mask: Tensor, k: Tensor) -> dict[str, Any]:
    """The options for a mask as of ``sdpa``. Raises NotImplementedError for another one."""
    if attention_mask.ndim != 4:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; a layer takes (batch, heads or 1, "
            "seqlen_q, seqlen_kv)"
        )
    dense = attention_mask[..., : k.shape[1]]
    if dense.shape[-1] == 1:
        dense = dense.expand(*dense.shape[:-1], k.shape[1])
    if dense.stride(-1) != 1:
        dense = dense.contiguous()
    if dense.dtype == torch.bool:
        return {"mask": ~dense}
    if dense.is_floating_point():
        return {"score": "bias", "params": {"bias": dense.float()}}
    raise NotImplementedError(
        f"attention_mask has dtype {attention_mask.dtype}; a layer takes bool, True where visible, or floats "
        "that are added to the scores"
    )


def _int32(ends: Tensor) -> Tensor:
    return contiguous(ends.to(torch.int32))
