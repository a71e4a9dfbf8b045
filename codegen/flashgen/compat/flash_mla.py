"""FlashMLA's decoding over a latent cache, under its signatures.

>>> from flashgen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

Every GPU since Ampere computes them, and the CPU. A cache is read in fp16, in bf16 or in FP8, whole or by
lists of tokens. NotImplementedError names what flashgen does not compute: sinks, and a second cache.
"""

from __future__ import annotations

from typing import Any

from flashgen.api.attention import attention
from flashgen.call.kvcache import KVCache
from flashgen.compat.flash_attn_arguments import check_rank, contiguous
from flashgen.compat.libraries import counted, int32s, is_tensor, module_of
from flashgen.compat.refusals import refuse_gradients
from flashgen.compat.widths import readable_rows
from flashgen.errors import BadParam, BadTensorDtype, NullPointer, naming
from flashgen.operators import latentrows
from flashgen.operators.arguments import flag, shown
from flashgen.runtime.arrays import kind_of

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

_NAMES = {"k": "k_cache", "kv_lengths": "cache_seqlens", "lengths": "cache_seqlens", "pages": "block_table"}


class FlashMLASchedMeta:
    """What `get_mla_metadata` returns for `flash_mla_with_kvcache`. It is empty: flashgen schedules on the
    device, so one object serves calls of any shapes and lengths, also in CUDA graphs.
    """


def get_mla_metadata(*sizes: Any, **options: Any) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None), as FlashMLA returns it: the ``num_splits`` of earlier versions is None. Arguments of
    earlier versions have no effect.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
) -> tuple[Any, Any]:
    """Attention of q, (batch, seqlen_q, num_heads_q, head_dim), over a latent cache, whose rows are keys and
    whose first ``head_dim_v`` elements are values.

    k_cache: (num_blocks, page_block_size, 1, head_dim), fp16 or bf16, in blocks of any size; never copied.
        With is_fp8_kvcache (num_blocks, page_block_size, 1, 656), float8_e4m3fn, uint8 or int8: rows of 576
        elements that carry their scales, see `operators.latentrows`, under q of bf16.
    block_table: int32, (batch, max_num_blocks_per_seq).
    cache_seqlens: int32, (batch,), on the device of q; the host does not read it.
    tile_scheduler_metadata, num_splits: what `get_mla_metadata` returns.
    softmax_scale: by default head_dim ** -0.5, as in FlashMLA. No model of DeepSeek has this scale: pass its
        own, (128 + 64) ** -0.5 for DeepSeek-V3 without YaRN.
    causal: the last query sees the last key. Not with indices.
    indices: int32, (batch, seqlen_q, topk): the tokens that each query attends to, as slots of the whole
        cache, block * page_block_size + offset; -1 names none. The call reads no block_table and no
        cache_seqlens, which may be None.

    Returns (out, softmax_lse): out is (batch, seqlen_q, num_heads_q, head_dim_v), the LSE fp32 (batch,
    num_heads_q, seqlen_q), -inf in a row without keys.

    Raises NotImplementedError for attn_sink, the other arguments of sparse attention, and tensors that
    require a gradient; NullPointer without block_table or cache_seqlens where these are read; BadParam for
    metadata of something else; BadTensorDtype for a cache of bytes without is_fp8_kvcache; and what
    ``flashgen.attention`` raises.
    """
    is_fp8 = flag("is_fp8_kvcache", is_fp8_kvcache)
    for name, x in (
        ("attn_sink", attn_sink),
        ("extra_k_cache", extra_k_cache),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache),
        ("topk_length", topk_length),
        ("extra_topk_length", extra_topk_length),
    ):
        if x is not None:
            raise NotImplementedError(f"{name} was given, which flashgen does not compute; leave it out")
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta) or num_splits is not None:
        name, x = "tile_scheduler_metadata", tile_scheduler_metadata
        if isinstance(x, FlashMLASchedMeta):
            name, x = "num_splits", num_splits
        raise BadParam(f"{name} has type {type(x).__name__}; pass both results of get_mla_metadata()")
    for name, x in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if x is None and indices is None:
            raise NullPointer(f"{name} is None; expected an int32 array")
    refuse_gradients(q=q, k_cache=k_cache)
    check_rank("q", q, "batch, seqlen_q, num_heads_q, head_dim")
    check_rank("k_cache", k_cache, "num_blocks, page_block_size, 1, head_dim")
    dtype = getattr(k_cache, "dtype", None)
    if not is_fp8 and getattr(dtype, "itemsize", 2) == 1:
        raise BadTensorDtype(
            f"k_cache has dtype {str(dtype).removeprefix('torch.')}, and is_fp8_kvcache is False; "
            f"pass is_fp8_kvcache=True for rows of {latentrows.ROW_BYTES} bytes, or a cache of the dtype of q"
        )
    if head_dim_v is None:
        raise BadParam(f"head_dim_v is {shown(head_dim_v)}; expected an integer")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    rows, kv_dtype = (_bytes_of(k_cache), latentrows.LAYOUT) if is_fp8 else (k_cache, None)
    if indices is None:
        lengths, pages = contiguous(cache_seqlens), contiguous(block_table)
        cache = KVCache(rows, None, lengths, pages, head_dim_v=head_dim_v, kv_dtype=kv_dtype)
    else:
        check_rank("indices", indices, "batch, seqlen_q, topk")
        cache = _slots_of(q, rows, head_dim_v, kv_dtype)
        indices = contiguous(indices)
    with naming(_NAMES):
        return attention(
            readable_rows(q),
            cache,
            causal=causal,
            softmax_scale=softmax_scale,
            return_lse=True,
            indices=indices,
        )


def _bytes_of(k_cache: Any) -> Any:
    """A view of an int8 cache as uint8; any other object as it is."""
    if str(getattr(k_cache, "dtype", None)) not in ("int8", "torch.int8"):
        return k_cache
    if is_tensor(k_cache):
        return k_cache.view(kind_of(k_cache).torch.uint8)
    return k_cache.view("uint8") if hasattr(k_cache, "strides") else k_cache


def _slots_of(q: Any, k_cache: Any, head_dim_v: int, kv_dtype: str | None) -> KVCache:
    """The cache whose sequences all have all slots of ``k_cache``, in the order of their numbers. A view, or
    with a table of all blocks where these are not side by side in memory.
    """
    batch, (blocks, size) = q.shape[0], k_cache.shape[:2]
    lengths = int32s(batch, blocks * size, q)
    if lengths is None:
        raise NotImplementedError(
            f"indices was given and q has type {type(q).__name__}, of which flashgen cannot make an array of "
            "lengths: pass an array of NumPy, CuPy, PyTorch or JAX"
        )
    # An array of JAX has no strides, and its reshape copies.
    strides = k_cache.stride() if is_tensor(k_cache) else getattr(k_cache, "strides", None)
    if strides is not None and (min(blocks, size) < 2 or strides[0] == size * strides[1]):
        row = k_cache.reshape(1, blocks * size, *k_cache.shape[2:])
        return KVCache(_broadcast(row, batch), None, lengths, head_dim_v=head_dim_v, kv_dtype=kv_dtype)
    table = _broadcast(counted(blocks, q)[None], batch)
    return KVCache(k_cache, None, lengths, table, head_dim_v=head_dim_v, kv_dtype=kv_dtype)


def _broadcast(x: Any, batch: int) -> Any:
    shape = batch, *x.shape[1:]
    return x.expand(shape) if is_tensor(x) else module_of(x).broadcast_to(x, shape)
