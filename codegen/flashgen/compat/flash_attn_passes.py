"""flash-attn's passes below autograd, as other libraries call them, for example for context parallelism:
``_flash_attn_forward``, ``_flash_attn_backward`` and their varlen forms, under the signatures of 2.8.

``flashgen.compat.flash_attn`` has these names, too. Tensors are PyTorch's; nothing is recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashgen.compat.flash_attn_arguments import contiguous, options_of, with_dropout
from flashgen.compat.widths import attention_of_any_width, gradients_of_any_width, readable_rows
from flashgen.errors import naming
from flashgen.operators.arguments import Expected

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {
    "lse": "softmax_lse",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
    "cap": "softcap",
    "no softcap": "0",
    "dropout_seed": "rng_state",
}


def _refuse(return_softmax: bool, **absent: Any) -> None:
    """Raise NotImplementedError for the matrix of softmax, and arguments that are not None."""
    if return_softmax:
        raise NotImplementedError(
            "return_softmax is True; pass False, and see flashgen.attention(return_weights=True)"
        )
    for name, x in absent.items():
        if x is not None:
            raise NotImplementedError(
                f"{name} was given; flashgen takes it in flash_attn_varlen_func or flash_attn_with_kvcache"
            )


def _packed(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": contiguous(cu_q),
        "cu_seqlens_kv": contiguous(cu_k),
        "max_seqlen_q": Expected(max_q),
        "max_seqlen_kv": Expected(max_k),
    }


def _attend(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, options: dict[str, Any]
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    with torch.no_grad(), naming(_NAMES):
        options |= with_dropout(dropout_p, q)
        out, lse = attention_of_any_width(q, k, v, return_lse=True, **options)
    return out, lse, None, options.get("dropout_seed")


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """(out, softmax_lse, None, rng_state): there is no mask of dropout, and a state of it, seed and offset,
    where dropout_p is above 0. The LSE of a row without keys is -inf. Arguments are as in
    ``flash_attn_func``. Raises NotImplementedError for return_softmax.
    """
    _refuse(return_softmax)
    window = window_size_left, window_size_right
    return _attend(q, k, v, dropout_p, options_of(softmax_scale, causal, window, softcap, alibi_slopes))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """The same of packed sequences. Raises NotImplementedError also for block_table, leftpad_k and seqused_k.
    zero_tensors: clear the rows after the last sequence.
    """
    _refuse(return_softmax, block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k)
    window = window_size_left, window_size_right
    options = options_of(softmax_scale, causal, window, softcap, alibi_slopes)
    options |= _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse, *others = _attend(q, k, v, dropout_p, options)
    if zero_tensors:
        after = torch.arange(len(out), device=out.device) >= cu_seqlens_q[-1]
        out = out.masked_fill(after[:, None, None], 0)
    return out, lse, *others


def _differentiate(
    arrays: tuple[Tensor, ...],
    into: tuple[Tensor | None, ...],
    dropout_p: float,
    rng_state: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Write the gradients ``into`` tensors. Returns softmax_d, the sum of dout times out of each row."""
    *tensors, lse = arrays
    with torch.no_grad(), naming(_NAMES):
        options |= {"dropout_p": dropout_p}
        if dropout_p:
            options |= {"dropout_seed": rng_state}
        tensors = [readable_rows(x) for x in tensors]
        gradients_of_any_width(*tensors, lse.contiguous(), into=into, **options)
    dout, out = arrays[0], arrays[4]
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv, where they are not None; dropout needs the rng_state of the forward pass. Returns
    softmax_d: the sum of dout times out of each row, fp32, (batch, nheads, seqlen_q).
    """
    window = window_size_left, window_size_right
    options = options_of(softmax_scale, causal, window, softcap, alibi_slopes)
    options |= {"deterministic": deterministic}
    arrays = dout, q, k, v, out, softmax_lse
    return _differentiate(arrays, (dq, dk, dv), dropout_p, rng_state, options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The same of packed sequences; softmax_d is (nheads, total_q). Gradients of rows outside all sequences
    are 0, with zero_tensors and without.
    """
    window = window_size_left, window_size_right
    options = options_of(softmax_scale, causal, window, softcap, alibi_slopes)
    options |= _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options |= {"deterministic": deterministic}
    arrays = dout, q, k, v, out, softmax_lse
    return _differentiate(arrays, (dq, dk, dv), dropout_p, rng_state, options)
