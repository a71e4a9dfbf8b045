"""``MHA`` of ``flash_attn.modules.mha``, with its projections, rotary embedding and cache of keys.

Names of parameters are flash-attn's, so its checkpoints load. Attention is always flashgen's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashgen.compat.flash_attn import flash_attn_with_kvcache
from flashgen.compat.flash_attn_layers import FlashCrossAttention, apply_rotary_emb
from flashgen.errors import BadParam, NullPointer
from flashgen.operators.append_sizes import ROTARY_STEP

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MHA", "InferenceParams", "get_alibi_slopes"]


@dataclass
class InferenceParams:
    """How far a generation is: ``flash_attn.utils.generation.InferenceParams``. ``lengths_per_sample``, int32
    (batch,), is for sequences of several lengths.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slopes of ALiBi's paper: 2^(-8 i / n) for n heads, a power of two. For another number, the slopes
    of the power below, and every second one of the power above.
    """
    power = 1 << nheads.bit_length() - 1
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return slopes + between[: nheads - power]


class _Rotary:
    """Tables of RoPE in fp32, whatever the dtype of the module, as long as a call needs."""

    def __init__(self, dim: int, base: float, interleaved: bool) -> None:
        self.dim, self.base, self.interleaved = dim, base, interleaved
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, (at least ``positions``, dim / 2)."""
        if self._tables is None or len(self._tables[0]) < positions or self._tables[0].device != device:
            exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
            angles = torch.outer(torch.arange(positions, device=device).float(), self.base**-exponents)
            self._tables = angles.cos(), angles.sin()
        return self._tables


class MHA(nn.Module):
    """Attention of x, (batch, seqlen, embed_dim), or packed, (total, embed_dim), with cu_seqlens, between
    projections. Arguments are flash-attn's; ``use_flash_attn`` has no effect.

    Raises NotImplementedError for dwconv, fused_bias_fc, rotary_emb_scale_base and, in a call, for
    key_padding_mask; BadParam and NullPointer for arguments that do not go together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        for name, value in (
            ("dwconv", dwconv),
            ("fused_bias_fc", fused_bias_fc),
            ("rotary_emb_scale_base", rotary_emb_scale_base),
        ):
            if value:
                raise NotImplementedError(f"{name} is {value}; flashgen's MHA has none: leave it out")
        if embed_dim % num_heads or num_heads % num_heads_kv:
            raise BadParam(
                f"embed_dim is {embed_dim}, num_heads {num_heads} and num_heads_kv {num_heads_kv}; expected "
                "multiples, each of the next one"
            )
        if cross_attn and rotary_emb_dim:
            raise BadParam(f"rotary_emb_dim is {rotary_emb_dim} with cross_attn; expected 0")
        self.num_heads, self.num_heads_kv, self.head_dim = num_heads, num_heads_kv, embed_dim // num_heads
        self.cross_attn, self.layer_idx, self.rotary_emb_dim = cross_attn, layer_idx, rotary_emb_dim
        self.return_residual, self.checkpointing = return_residual, checkpointing
        linear = {"device": device, "dtype": dtype}
        kv_width = 2 * self.head_dim * num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **linear)
            self.Wkv = nn.Linear(embed_dim, kv_width, bias=qkv_proj_bias, **linear)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_width, bias=qkv_proj_bias, **linear)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **linear)
        if rotary_emb_dim:
            self.rotary_emb = _Rotary(rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved)
        slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
        self.inner_cross_attn = FlashCrossAttention(causal, softmax_scale, dropout, window_size, slopes)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Memory for keys and values: (batch_size, max_seqlen, 2, num_heads_kv, head_dim)."""
        shape = batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim
        return self.out_proj.weight.new_empty(shape, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        x_kv: with cross_attn, what keys are of; None: x. mixer_subset: the rows of x that queries are of.
        cu_seqlens, max_seqlen: of packed sequences. ``kwargs`` go to the attention: with cross_attn
            cu_seqlens_k and max_seqlen_k.
        inference_params: an `InferenceParams`, or flash-attn's. Keys and values go into its cache.
        """
        if key_padding_mask is not None:
            raise NotImplementedError(
                "key_padding_mask was given; flashgen's MHA takes packed sequences: unpad_input() of "
                "flashgen.compat.flash_attn_layers makes them and cu_seqlens"
            )
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise BadParam("x_kv or mixer_subset was given without cross_attn; leave it out")
        if inference_params is not None and cu_seqlens is not None:
            raise BadParam("cu_seqlens and inference_params were given; expected one of them at most")
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            width = self.num_heads * self.head_dim
            qkv = self.Wqkv(x)
            q, kv = qkv[..., :width], qkv[..., width:]
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        kv = kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        if inference_params is not None:
            out = self._with_cache(q, kv, inference_params)
        else:
            if self.rotary_emb_dim:
                q, kv = self._rotated(q, kv, 0, cu_seqlens, max_seqlen)
            packed = {}
            if cu_seqlens is not None:
                packed = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
                packed |= {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen}
            attend, options = self.inner_cross_attn, packed | kwargs
            if self.checkpointing:
                out = checkpoint(attend, q, kv, use_reentrant=False, **options)
            else:
                out = attend(q, kv, **options)
        out = self.out_proj(out.flatten(-2))
        return (out, x) if self.return_residual else out

    def _rotated(
        self, q: Tensor, kv: Tensor, offset: int | Tensor, cu_seqlens: Tensor | None, most: int | None
    ) -> tuple[Tensor, Tensor]:
        """q and kv with rotated keys; ``most`` positions at most."""
        rotary = self.rotary_emb
        tables = rotary.tables(q.shape[1] if most is None else most, q.device)
        q, k = (
            apply_rotary_emb(x, *tables, rotary.interleaved, False, offset, cu_seqlens)
            for x in (q, kv.select(-3, 0))
        )
        return q, torch.stack((k, kv.select(-3, 1)), -3)

    def _with_cache(self, q: Tensor, kv: Tensor, state: Any) -> Tensor:
        """Attention on all keys of the cache so far, which kv becomes part of."""
        if self.layer_idx is None:
            raise NullPointer("layer_idx is None with inference_params; expected the number of the layer")
        lengths, offset = state.lengths_per_sample, state.seqlen_offset
        memory = state.key_value_memory_dict
        if self.layer_idx not in memory:
            memory[self.layer_idx] = self.allocate_inference_cache(
                state.max_batch_size, state.max_seqlen, kv.dtype
            )
        first = state.batch_size_offset
        cache = memory[self.layer_idx][first : first + len(q)]
        options: dict[str, Any] = {
            "cache_seqlens": offset if lengths is None else lengths[first : first + len(q)],
            "softmax_scale": self.inner_cross_attn.softmax_scale,
            "causal": self.inner_cross_attn.causal,
            "window_size": self.inner_cross_attn.window_size,
            "alibi_slopes": self.inner_cross_attn.alibi_slopes,
        }
        if self.rotary_emb_dim % ROTARY_STEP:
            q, kv = self._rotated(q, kv, options["cache_seqlens"], None, state.max_seqlen)
        elif self.rotary_emb_dim:
            cos, sin = self.rotary_emb.tables(state.max_seqlen, q.device)
            options |= {"rotary_cos": cos, "rotary_sin": sin}
            options |= {"rotary_interleaved": self.rotary_emb.interleaved}
        return flash_attn_with_kvcache(q, *cache.unbind(2), *kv.unbind(2), **options)
