"""What flash-attn has around its attention, by PyTorch's own operations: ``flash_attn.bert_padding``,
``flash_attn.layers.rotary`` and the attention of ``flash_attn.modules.mha``.

All of it is differentiable, and runs on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flashgen.compat.flash_attn import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashgen.errors import BadParam, BadTensorShape, NullPointer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FlashCrossAttention",
    "FlashSelfAttention",
    "apply_rotary_emb",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` of x, (rows, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...): zeros, and ``values`` in the rows ``indices``, which differ."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of hidden_states, (batch, seqlen, ...), that attention_mask, (batch, seqlen), has.

    unused_mask: tokens that are packed as well, but are not counted in the last result.
    Returns the tokens, (total, ...), their indices in batch times seqlen, cu_seqlens, int32, the most tokens
    of a sequence, and the tokens of each sequence that attention_mask counts, int32. Waits for the device.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The opposite of ``unpad_input``: (batch, seqlen, ...), with zeros where there was no token."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x, (batch, seqlen, nheads, headdim), rotated by cos and sin, (seqlen_rotary, rotary_dim / 2); packed,
    (total, nheads, headdim), with cu_seqlens.

    interleaved: elements 2i and 2i + 1 are a pair, else i and i + rotary_dim / 2.
    inplace: write into x.
    seqlen_offsets: the position of the first token: an int, or an integer tensor, (batch,).
    max_seqlen: of no use here; flash-attn needs it.

    Raises BadTensorShape where the shapes do not go together, BadParam for an int offset beyond the tables.
    """
    width = 2 * cos.shape[-1]
    if cos.shape != sin.shape or cos.ndim != 2 or width > x.shape[-1]:
        raise BadTensorShape(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; expected (seqlen_rotary, "
            f"rotary_dim / 2) of both, with a rotary_dim of at most {x.shape[-1]}, the headdim of x"
        )
    rank = 4 if cu_seqlens is None else 3
    if x.ndim != rank:
        expected = (
            "(batch, seqlen, nheads, headdim)" if rank == 4 else "(total, nheads, headdim) with cu_seqlens"
        )
        raise BadTensorShape(f"x has shape {tuple(x.shape)}; expected {expected}")
    if cu_seqlens is None:
        _check_tables(seqlen_offsets, x.shape[1], cos)
        offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
        positions = torch.arange(x.shape[1], device=x.device) + offsets
    else:
        rows = torch.arange(len(x), device=x.device)
        batch = len(cu_seqlens) - 1
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp_(
            max=max(batch - 1, 0)
        )
        offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(batch)
        positions = rows - cu_seqlens[sequence] + offsets[sequence]
        positions = torch.where(rows < cu_seqlens[-1], positions, 0)  # rows after the last sequence
    cos, sin = (table[positions].unsqueeze(-2) for table in (cos, sin))
    rotated, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    pair = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    turned = turned.to(x.dtype)
    if inplace:
        rotated.copy_(turned)
        return x
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _check_tables(offset: int | Tensor, seqlen: int, cos: Tensor) -> None:
    """Raise BadParam for an int offset beyond the tables; the host does not read a tensor."""
    if isinstance(offset, int) and not 0 <= offset <= len(cos) - seqlen:
        raise BadParam(
            f"seqlen_offsets is {offset} for {seqlen} tokens; cos and sin have {len(cos)} positions"
        )


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate q and k of qkv, (batch, seqlen, 3, nheads, headdim), in place."""
    apply_rotary_emb(qkv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    tables = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(qkv[:, :, 1], *tables, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of kv, (batch, seqlen, 2, nheads, headdim), in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class _FlashAttention(nn.Module):
    """The options of both modules."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.deterministic = deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": self.alibi_slopes,
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    """Attention of qkv, (batch, seqlen, 3, nheads, headdim), or packed with cu_seqlens and max_seqlen."""

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        if max_seqlen is None:
            raise NullPointer(
                "max_seqlen is None with cu_seqlens; expected the length of the longest sequence"
            )
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_FlashAttention):
    """Attention of q, (batch, seqlen_q, nheads, headdim), on kv, (batch, seqlen_k, 2, nheads_k, headdim); or
    packed, with cu_seqlens and max_seqlen of q and of kv.
    """

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **options)
        for name, value in (("max_seqlen", max_seqlen), ("max_seqlen_k", max_seqlen_k)):
            if value is None:
                raise NullPointer(
                    f"{name} is None with cu_seqlens; expected the length of the longest sequence"
                )
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options
        )
