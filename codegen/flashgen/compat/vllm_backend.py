"""The classes of vLLM's interface of attention backends, ``vllm.v1.attention.backend`` of vLLM 0.30 and
later; see the module `vllm`. NEVER RUN in a vLLM server.

A layer appends its new keys and values to the pages of their sequences, and attends to all of them, by one
call. Where a token goes follows from the lengths and the pages of its sequence, as vLLM's slots do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from flashgen.api.attention import attention
from flashgen.call.kvcache import KVCache
from flashgen.operators.arguments import Expected
from flashgen.operators.contract import MAX_HEAD_DIM

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 16
_CACHE_DTYPES = ("auto", "float16", "bfloat16")
# Elements of 16 bits of which rows are whole multiples.
_ROW = 8
_OLDEST = 80  # compute capability 8.0


class FlashgenBackend(AttentionBackend):
    """Decoder attention on pages of 16 keys or a multiple, in fp16 and bf16."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up among its own

    @staticmethod
    def get_impl_cls() -> type[FlashgenImpl]:
        return FlashgenImpl

    @staticmethod
    def get_builder_cls() -> type[FlashgenBuilder]:
        return FlashgenBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(_BLOCK)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % _ROW == 0 and head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.to_int() >= _OLDEST


@dataclass
class FlashgenMetadata:
    """A batch: ``lengths`` are the keys of each sequence before this step, ``seq_lens`` with its new ones."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    lengths: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool


class FlashgenBuilder(AttentionMetadataBuilder[FlashgenMetadata]):
    """Makes the metadata of a batch. ``lengths`` are in memory that stays, for CUDA graphs."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._lengths = torch.zeros(0, dtype=torch.int32, device=device)
        self._most = vllm_config.scheduler_config.max_num_seqs

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashgenMetadata:
        batch = common_attn_metadata
        starts, seq_lens = batch.query_start_loc, batch.seq_lens
        count = len(seq_lens)
        if count > len(self._lengths):
            self._lengths = self._lengths.new_zeros(max(count, self._most))
        lengths = self._lengths[:count]
        torch.sub(seq_lens, starts[1:] - starts[:-1], out=lengths)
        return FlashgenMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=starts,
            seq_lens=seq_lens,
            lengths=lengths,
            block_table=batch.block_table_tensor,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            causal=batch.causal,
        )


class FlashgenImpl(AttentionImpl[FlashgenMetadata]):
    """The attention of one layer. Raises NotImplementedError for what flashgen does not serve."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type is {attn_type!r}; flashgen serves the layers of decoders")
        if kv_cache_dtype not in _CACHE_DTYPES:
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype!r}; flashgen serves {', '.join(_CACHE_DTYPES)}"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._shares_cache = kv_sharing_target_layer_name is not None
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._left = -1 if sliding_window is None else sliding_window - 1
        self._softcap = logits_soft_cap or None
        self._sinks = sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: FlashgenMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the result for query, (tokens, heads, head_size), into ``output``; key and value, (tokens,
        kv_heads, head_size), go into kv_cache, (blocks, kv_heads, block size, 2 * head_size) of any strides,
        which has a token's key and then its value.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale was given; flashgen does not quantise the output")
        batch = attn_metadata
        if batch is None:  # vLLM measures its memory
            return output.fill_(0)
        if not isinstance(batch.causal, bool):
            raise NotImplementedError("causal differs between the sequences of a batch; flashgen takes one")
        if self._slopes is not None and self._slopes.device != query.device:
            self._slopes = self._slopes.to(query.device)
        tokens = batch.num_actual_tokens
        appends = not self._shares_cache and key is not None and value is not None
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        cache = KVCache(keys, values, batch.lengths if appends else batch.seq_lens, pages=batch.block_table)
        attention(
            query[:tokens],
            cache,
            append=(key[:tokens], value[:tokens]) if appends else None,
            cu_seqlens_q=batch.query_start_loc,
            # Powers of two: each number is a plan, and steps of a generation differ by one key.
            max_seqlen_q=Expected(_rounded(batch.max_query_len)),
            max_seqlen_kv=Expected(_rounded(batch.max_seq_len)),
            causal=batch.causal,
            window_size=(self._left, 0 if batch.causal and self._left >= 0 else -1),
            softmax_scale=self.scale,
            softcap=self._softcap,
            alibi_slopes=self._slopes,
            sinks=self._sinks,
            out=output.view(-1, self.num_heads, self.head_size)[:tokens],
        )
        return output


def _rounded(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
