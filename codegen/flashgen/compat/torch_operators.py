"""PyTorch's own operators of flash attention, forward and backward, by flashgen: functions of the operators'
arguments. They are called below autograd, with tensors in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashgen.api.attention import attention
from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.request import Request, gradients_of, request_of
from flashgen.call.shortcuts import Shortcuts
from flashgen.compat.flash_attn_arguments import contiguous, pages_of_packed, splits_of, with_dropout
from flashgen.compat.refusals import refuse_dropout
from flashgen.compat.widths import (
    attention_of_any_width,
    gradients_of_any_width,
    kernels_write,
    missing,
    readable_rows,
)
from flashgen.operators.arguments import Expected

if TYPE_CHECKING:
    from torch import Tensor

_SDPA = Shortcuts("q", "k", "v", "out")
_SDPA_BACKWARD = Shortcuts("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")


def _refuse(return_debug_mask: bool, alibi_slopes: Tensor | None = None) -> None:
    """Raise NotImplementedError for options of the operators that flashgen does not serve."""
    if return_debug_mask:
        raise NotImplementedError(
            "return_debug_mask is True; this call has no dropout, whose mask it is: pass False"
        )
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes was given, for which PyTorch's operator has no gradient; call flashgen.attention"
        )


def _options(
    scale: float | None,
    is_causal: bool,
    window: tuple[int | None, int | None] = (None, None),
    cum_seq_q: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
) -> dict[str, Any]:
    """The options of both passes; causal is aligned bottom right."""
    left, right = (-1 if side is None else max(side, -1) for side in window)
    options = {"softmax_scale": scale, "causal": is_causal, "window_size": (left, 0 if is_causal else right)}
    if cum_seq_q is not None:
        options |= {"max_seqlen_q": Expected(max_q), "max_seqlen_kv": Expected(max_k)}
    return options


def _ends(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> dict[str, Tensor]:
    """The options with the ends of packed sequences."""
    ends = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_kv": cum_seq_k}
    return {name: contiguous(x) for name, x in ends.items() if x is not None}


def _attend(out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Write the result into ``out``, in any layout; returns the LSE."""
    if missing(query) or missing(value) or not kernels_write(out):
        result, lse = attention_of_any_width(query, key, value, return_lse=True, **options)
        out.copy_(result)
        return lse
    return attention_of_any_width(query, key, value, out=out, return_lse=True, **options)[1]


def attend_varlen(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    rng_state: Tensor | None = None,
) -> Tensor:
    """``_flash_attention_forward_no_dropout_inplace``: (batch, seqlen, heads, head_dim), or packed. Dropout
    needs the ``rng_state`` that `flash_attention_forward` passes.

    Keys are packed (cum_seq_k), in pages (block_table and seqused_k), or padded (seqused_k alone). With
    cum_seq_k and seqused_k a sequence has the first seqused_k keys of its part: they are read as pages of
    one key.
    """
    _refuse(return_debug_mask, alibi_slopes)
    if rng_state is None:
        refuse_dropout(dropout_p)
    window = window_size_left, window_size_right
    options = _options(scale, is_causal, window, cum_seq_q, max_q, max_k)
    if rng_state is not None:
        if seqused_k is not None:
            raise NotImplementedError(
                f"dropout_p is {dropout_p} and seqused_k was given; flashgen has no dropout with parts of "
                "keys: leave one of the two out"
            )
        options |= {"dropout_p": dropout_p, "dropout_seed": rng_state}
    options |= _ends(cum_seq_q, cum_seq_k if seqused_k is None else None)
    if num_splits is not None:
        options["splits"] = splits_of(num_splits)
    if block_table is not None and seqused_k is None:
        raise NotImplementedError(
            "block_table was given without seqused_k; pass the number of keys of each sequence there"
        )
    if seqused_k is None:
        return _attend(out, query, key, value, **options)
    pages, lengths = block_table, contiguous(seqused_k)
    if pages is None and cum_seq_k is not None:
        pages = pages_of_packed(cum_seq_k, max_k)
        key, value = readable_rows(key).unsqueeze(1), readable_rows(value).unsqueeze(1)
        options["max_seqlen_kv"] = None  # no key is past the table
    cache = KVCache(key, value, lengths, pages=contiguous(pages))
    query = readable_rows(query)
    if kernels_write(out):
        return attention(query, cache, out=out, return_lse=True, **options)[1]
    result, lse = attention(query, cache, return_lse=True, **options)
    out.copy_(result)
    return lse


def _auxiliary(x: Tensor, rng_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The state of dropout, seed and offset, which both have 64 bits; and what stands for its mask."""
    # Without dropout nobody reads these elements: zeros would be two kernels.
    device = x.device
    state = (
        rng_state.view(torch.uint64)
        if rng_state is not None
        else torch.empty(2, dtype=torch.uint64, device=device)
    )
    return (
        state,
        torch.empty((), dtype=torch.uint64, device=device),
        torch.empty(0, dtype=x.dtype, device=device),
    )


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    out = torch.empty_like(query)
    state = with_dropout(dropout_p, query).get("dropout_seed")
    _refuse(return_debug_mask and state is None)
    ends, longest = (cum_seq_q, cum_seq_k), (max_q, max_k)
    lse = attend_varlen(
        out, query, key, value, *ends, *longest, dropout_p, is_causal, False, rng_state=state, **options
    )
    rng_state, unused, mask = _auxiliary(query, state)
    if return_debug_mask and state is not None:
        from flashgen.compat.torch_dropout import debug_mask  # calls without one need no module

        window = options.get("window_size_left"), options.get("window_size_right")
        way = _options(options.get("scale"), is_causal, window)
        mask = debug_mask(query, key, lse, state, dropout_p, way, ends, longest)
    return out, lse, rng_state, unused, mask


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    window = window_size_left, window_size_right
    options = _options(scale, is_causal, window, cum_seq_q, max_q, max_k)
    options |= with_dropout(dropout_p, query, rng_state.view(torch.int64))
    options |= _ends(cum_seq_q, cum_seq_k)
    into = [torch.empty_like(x) for x in (query, key, value)]
    return gradients_of_any_width(
        grad_out, query, key, value, out, logsumexp.contiguous(), into=into, **options
    )


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(batch, heads, seqlen, head_dim), and the result in the layout of query. What the operator calls the
    seed of Philox is seed and offset, as in PyTorch's own kernel.
    """
    _refuse(return_debug_mask and not dropout_p)
    out = torch.empty_like(query)
    arrays, way = (query, key, value, out), (dropout_p, is_causal, scale)
    results, dropout = None if dropout_p else _SDPA.run(way, arrays), {}
    if results is None:
        dropout = with_dropout(dropout_p, query)
        options = _options(scale, is_causal) | dropout
        q, k, v, into = (x.transpose(1, 2) for x in arrays)
        results = out, _attend(into, q, k, v, **options)
        if not dropout:
            options |= {"out": into, "return_lse": True}
            _SDPA.keep(way, arrays, lambda: request_of(call_of(AttentionCall, q=q, k=k, v=v, **options)))
    lse = results[1]
    state, offset, mask = _auxiliary(query, dropout.get("dropout_seed"))
    if return_debug_mask:
        from flashgen.compat.torch_dropout import debug_mask  # calls without one need no module

        mask = debug_mask(q, k, lse, dropout["dropout_seed"], dropout_p, options)
    return out, lse, None, None, query.shape[2], key.shape[2], state, offset, mask


def scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    gradients = [torch.empty_like(x) for x in (query, key, value)]
    arrays = query, key, value, grad_out, out, logsumexp, *gradients
    way = is_causal, scale, torch.are_deterministic_algorithms_enabled()
    if not dropout_p and _SDPA_BACKWARD.run(way, arrays) is not None:
        return tuple(gradients)
    options = _options(scale, is_causal) | with_dropout(dropout_p, query, philox_seed.view(torch.int64))
    _differentiate(gradients, grad_out, query, key, value, out, logsumexp.contiguous(), **options)
    if not dropout_p:
        _SDPA_BACKWARD.keep(way, arrays, lambda: _gradients_requested(arrays, options))
    return tuple(gradients)


def _gradients_requested(arrays: tuple[Tensor, ...], options: dict[str, Any]) -> Request:
    """What `_differentiate` requests where it copies nothing; ``arrays`` in the order of `_SDPA_BACKWARD`."""
    names, query = _SDPA_BACKWARD.names, arrays[0]
    named = {name: x if name == "lse" else x.transpose(1, 2) for name, x in zip(names, arrays, strict=True)}
    scale = query.shape[-1] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return gradients_of(
        call_of(GradientCall, **options | named | {"softmax_scale": scale, "deterministic": deterministic})
    )


def _differentiate(gradients: list[Tensor], *arrays: Any, **options: Any) -> None:
    """Write the gradients; tensors are (batch, heads, seqlen, head_dim), the last one is the LSE."""
    *tensors, lse = arrays
    tensors = [x.transpose(1, 2) for x in tensors]
    gradients_of_any_width(*tensors, lse, into=[x.transpose(1, 2) for x in gradients], **options)


def _of_codes(query: Tensor, *descales: Tensor | None) -> dict[str, Any]:
    """The options of `attention` for codes; none for tensors of 16 bits."""
    if query.dtype != torch.float8_e4m3fn and all(x is None for x in descales):
        return {}
    return {"dtype": "e4m3"} | dict(zip(("q_scale", "k_scale", "v_scale"), descales, strict=True))


def flash_attention_forward_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Codes of e4m3, and scales, fp32, (batch, kv heads); the result is bf16. Also 16 bits without scales."""
    window = window_size_left, window_size_right
    of_codes = _of_codes(query, q_descale, k_descale, v_descale)
    if not of_codes:
        arguments = cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask
        return flash_attention_forward(
            query,
            key,
            value,
            *arguments,
            scale=scale,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
            seqused_k=seqused_k,
            alibi_slopes=alibi_slopes,
        )
    _refuse(return_debug_mask, alibi_slopes)
    refuse_dropout(dropout_p)
    options = _options(scale, is_causal, window, cum_seq_q, max_q, max_k)
    if seqused_k is not None:
        if cum_seq_k is not None:
            raise NotImplementedError(
                "seqused_k and cum_seq_k were given with e4m3 codes, of which flashgen reads no parts: pass "
                "padded keys, (batch, seqlen, heads, head_dim), and no cum_seq_k"
            )
        options["kv_lengths"] = contiguous(seqused_k)
    options |= _ends(cum_seq_q, cum_seq_k)
    out = torch.empty_like(query, dtype=torch.bfloat16)
    lse = _attend(out, query, key, value, **options, **of_codes)
    return out, lse, *_auxiliary(out, None)


def scaled_dot_product_flash_attention_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As `flash_attention_forward_quantized`; (batch, heads, seqlen, head_dim)."""
    of_codes = _of_codes(query, q_descale, k_descale, v_descale)
    if not of_codes:
        return scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
        )
    _refuse(return_debug_mask)
    refuse_dropout(dropout_p)
    out = torch.empty_like(query, dtype=torch.bfloat16)
    into, q, k, v = (x.transpose(1, 2) for x in (out, query, key, value))
    lse = _attend(into, q, k, v, **_options(scale, is_causal), **of_codes)
    return out, lse, None, None, query.shape[2], key.shape[2], *_auxiliary(out, None)


def _options_on_cpu(scale: float | None, is_causal: bool, attn_mask: Tensor | None) -> dict[str, Any]:
    """On the CPU causal is aligned top left, and a mask, which PyTorch has made a float one, is added."""
    options: dict[str, Any] = {"softmax_scale": scale, "mask_type": 2 if is_causal else None}
    if attn_mask is not None:
        mask = attn_mask.float()
        mask = mask if mask.shape[-1] == 1 or mask.stride(-1) == 1 else mask.contiguous()
        options |= {"score": "bias", "params": {"bias": mask}}
    return options


def for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    refuse_dropout(dropout_p)  # there is no result for its state
    out = torch.empty_like(query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    lse = _attend(out.transpose(1, 2), q, k, v, **_options_on_cpu(scale, is_causal, attn_mask))
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # the layout of PyTorch's own kernel


def for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    refuse_dropout(dropout_p)  # there is no result for its state
    gradients = [x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])) for x in (query, key, value)]
    gradients = [x.transpose(1, 2) for x in gradients]
    options = _options_on_cpu(scale, is_causal, attn_mask)
    _differentiate(gradients, grad_out, query, key, value, out, logsumexp.contiguous(), **options)
    return tuple(gradients)
