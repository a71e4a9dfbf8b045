"""The functions of FlashAttention-3 (``flash_attn_interface``), under its signatures, of PyTorch tensors.

>>> from flashgen.compat.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

They are the functions of ``flashgen.compat.flash_attn`` where both libraries agree. NotImplementedError names
what flashgen does not compute: qv, descales but of ``flash_attn_func`` and of a cache, attention_chunk,
scheduler_metadata, dropout. ``pack_gqa`` says how FlashAttention-3 computes, not what; here it is checked and
has no effect.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.api.attention import attention
from flashgen.api.merge import merge
from flashgen.call.kvcache import KVCache
from flashgen.compat.flash_attn import flash_attn_with_kvcache as _with_kvcache
from flashgen.compat.flash_attn_arguments import (
    check_rank,
    contiguous,
    options_of,
    pages_of_packed,
    splits_of,
    unpacked,
)
from flashgen.compat.refusals import refuse_gradients
from flashgen.compat.widths import attention_of_any_width, readable_rows
from flashgen.errors import BadParam, BadTensorShape, NullPointer, naming
from flashgen.operators.arguments import Expected, shown
from flashgen.operators.splits import AUTO

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_NAMES = {
    "return_lse": "return_attn_probs",
    "cap": "softcap",
    "no softcap": "0",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
    "kv_lengths": "seqused_k",
    "lengths": "seqused_k",
    "splits": "num_splits",
    "one split": "1, or 0 to let flashgen choose",
    "sinks": "s_aux",
}

_OF_CODES = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale"}


def _refuse(pack_gqa: bool | None, attention_chunk: int = 0, **absent: Any) -> None:
    """Raise BadParam for hints of another type, NotImplementedError for what flashgen does not compute."""
    if pack_gqa not in (None, True, False):
        raise BadParam(f"pack_gqa is {shown(pack_gqa)}; expected True, False or None")
    if attention_chunk:
        raise NotImplementedError(
            f"attention_chunk is {shown(attention_chunk)}; flashgen has no chunks: pass 0, and a window_size"
        )
    for name, x in absent.items():
        if x is not None:
            raise NotImplementedError(f"{name} was given, which flashgen does not compute; leave it out")


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Any = None,
) -> Any:
    """``flashgen.compat.flash_attn.flash_attn_func``, with these differences.

    num_splits: as ``splits`` of ``flashgen.attention``, 0 lets flashgen choose. With 1, the default, the keys
        of a row are never split.
    return_attn_probs: return (out, softmax_lse).
    s_aux: fp32 or bf16, (nheads,): sinks.
    q_descale, k_descale, v_descale: fp32, (batch, nheads_k), of e4m3 q, k and v; the result is bfloat16.
    """
    _refuse(pack_gqa, attention_chunk, qv=qv)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, "batch, seqlen, nheads, headdim")
    options = _options(
        softmax_scale, causal, window_size, softcap, num_splits, s_aux, return_attn_probs, sm_margin
    )
    of_codes = _of_codes(q, q_descale, k_descale, v_descale)
    with naming(_NAMES | _OF_CODES):
        if of_codes is not None:
            return attention(q, k, v, **(options | of_codes))
        return attention_of_any_width(q, k, v, deterministic=deterministic, **options)


def _of_codes(q: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> dict[str, Any] | None:
    """What a call of e4m3 codes says beside the options of any call, None for 16 bits. No kernel of codes
    splits keys.
    """
    scales = {"q_scale": q_descale, "k_scale": k_descale, "v_scale": v_descale}
    if q.dtype != torch.float8_e4m3fn and all(x is None for x in scales.values()):
        return None
    return scales | {"dtype": "e4m3", "splits": AUTO}


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    s_aux: Any,
    return_lse: bool,
    sm_margin: int,
) -> dict[str, Any]:
    options = options_of(softmax_scale, causal, window_size, softcap, None)
    options |= {"splits": splits_of(num_splits), "sinks": s_aux, "return_lse": return_lse}
    return options | {"sm_margin": sm_margin}


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of q, k and v in one array: (batch, seqlen, 3, nheads, headdim); with num_heads_q
    (batch, seqlen, num_heads_q + 2 nheads_k, headdim).
    """
    if num_heads_q is None:
        q, k, v = unpacked("qkv", qkv, "batch, seqlen, 3, nheads, headdim")
    else:
        check_rank("qkv", qkv, "batch, seqlen, nheads, headdim")
        kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if kv_heads < 1 or rest:
            raise BadTensorShape(
                f"qkv has {qkv.shape[2]} heads with num_heads_q={num_heads_q}; expected num_heads_q and "
                "twice the heads of k"
            )
        q, k, v = qkv.split((num_heads_q, kv_heads, kv_heads), 2)
    scales = q_descale, k_descale, v_descale
    options = window_size, attention_chunk, softcap
    named = {"deterministic": deterministic, "sm_margin": sm_margin, "return_attn_probs": return_attn_probs}
    with naming({"q": "qkv", "k": "qkv", "v": "qkv"}):
        return flash_attn_func(q, k, v, softmax_scale, causal, None, *scales, *options, **named)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Any = None,
) -> Any:
    """Attention of packed sequences as in ``flashgen.compat.flash_attn.flash_attn_varlen_func``; or of padded
    ones: q, (batch, seqlen_q, nheads, headdim), without cu_seqlens_q, k and v without cu_seqlens_k.

    seqused_k: int32, (batch,): only the first seqused_k[b] keys of sequence b count. With cu_seqlens_k they
        are read as pages of one key, which have no gradients.
    seqused_q: the same for queries. Masks align with the last one that counts, and rows after it are 0. q is
        copied, twice.
    q_descale, k_descale, v_descale: as in `flash_attn_func`, without seqused_q, and without seqused_k of
        packed keys.
    """
    _refuse(pack_gqa, attention_chunk, qv=qv)
    of_codes = _of_codes(q, q_descale, k_descale, v_descale)
    if of_codes is not None:
        _refuse(None, seqused_q=seqused_q, seqused_k=None if cu_seqlens_k is None else seqused_k)
    options = _options(
        softmax_scale, causal, window_size, softcap, num_splits, s_aux, return_attn_probs, sm_margin
    )
    check_rank(
        "q", q, "batch, seqlen_q, nheads, headdim" if cu_seqlens_q is None else "total_q, nheads, headdim"
    )
    for name, x in (("k", k), ("v", v)):
        packed = cu_seqlens_k is not None
        check_rank(name, x, "total_k, nheads_k, headdim" if packed else "batch, seqlen_k, nheads_k, headdim")
    for name, ends, longest in (
        ("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
        ("max_seqlen_k", cu_seqlens_k, max_seqlen_k),
    ):
        if ends is not None and longest is None:
            raise NullPointer(f"{name} is None with packed rows; expected the length of the longest sequence")
    source = None
    if seqused_q is not None:
        source = _rows_with_used_last(q, cu_seqlens_q, seqused_q)
        q = q.flatten(0, -3)[source].view(q.shape)
    if cu_seqlens_q is not None:
        options |= {"cu_seqlens_q": contiguous(cu_seqlens_q), "max_seqlen_q": Expected(max_seqlen_q)}
    with naming(_NAMES | _OF_CODES):
        if seqused_k is not None and cu_seqlens_k is not None:
            refuse_gradients(q=q, k=k, v=v)
            pages = pages_of_packed(cu_seqlens_k, max_seqlen_k)
            cache = KVCache(
                readable_rows(k).unsqueeze(1),
                readable_rows(v).unsqueeze(1),
                contiguous(seqused_k),
                pages=pages,
            )
            result = attention(readable_rows(q), cache, **options)
        else:
            if cu_seqlens_k is not None:
                options |= {
                    "cu_seqlens_kv": contiguous(cu_seqlens_k),
                    "max_seqlen_kv": Expected(max_seqlen_k),
                }
            elif seqused_k is not None:
                options |= {"kv_lengths": contiguous(seqused_k)}
            elif cu_seqlens_q is not None:  # padded keys, all of which count
                options |= {
                    "kv_lengths": torch.full((len(k),), k.shape[1], dtype=torch.int32, device=q.device)
                }
            if of_codes is not None:
                return attention(q, k, v, **(options | of_codes))
            result = attention_of_any_width(q, k, v, deterministic=deterministic, **options)
    if source is None:
        return result
    return _in_order(result, source, cu_seqlens_q, seqused_q)


def _parts(rows: int, q: Any, cu_seqlens_q: Any) -> tuple[Any, Any, Any]:
    """For each row of q, without batch: its sequence, its place there, and the rows of the sequence."""
    row = torch.arange(rows, device=q.device)
    if cu_seqlens_q is None:
        return row // q.shape[1], row % q.shape[1], torch.full_like(row, q.shape[1])
    last = len(cu_seqlens_q) - 2
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True).clamp_(max=last)
    begin, length = cu_seqlens_q[sequence], cu_seqlens_q.diff()[sequence]
    return sequence, row - begin, length


def _rows_with_used_last(q: Any, cu_seqlens_q: Any, seqused_q: Any) -> Any:
    """Which row of q goes to each row, so that the rows that count are the last ones of their sequence."""
    rows = q.shape[:-2].numel()
    sequence, place, length = _parts(rows, q, cu_seqlens_q)
    from_place = (place + seqused_q[sequence]) % length.clamp(min=1)
    row = torch.arange(rows, device=q.device)
    return torch.where(place < length, row - place + from_place, row)


def _in_order(result: Any, source: Any, cu_seqlens_q: Any, seqused_q: Any) -> Any:
    """The results in the order of q, 0 in rows that do not count, where the LSE is -inf."""
    out, *lse = result if isinstance(result, tuple) else (result,)
    back = torch.argsort(source)
    flat = out.flatten(0, -3)
    sequence, place, _ = _parts(len(flat), out, cu_seqlens_q)
    unused = place >= seqused_q[sequence]
    out = flat[back].masked_fill(unused[:, None, None], 0).view(out.shape)
    if not lse:
        return out
    lse = lse[0]
    if cu_seqlens_q is not None:
        return out, lse[:, back].masked_fill(unused, -torch.inf)
    rows = lse.transpose(1, 2).flatten(0, 1)[back].masked_fill(unused[:, None], -torch.inf)
    return out, rows.view(*out.shape[:2], -1).transpose(1, 2).contiguous()


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Any = None,
) -> Any:
    """``flashgen.compat.flash_attn.flash_attn_with_kvcache``, whose block_table is the page_table here. A
    cache of float8_e4m3fn goes with q of fp16 or bf16, and k_descale and v_descale.

    Raises NotImplementedError also for cu_seqlens_q, cu_seqlens_k_new and rotary_seqlens: packed queries and
    new keys go to ``flashgen.attention(append=)``.
    """
    _refuse(
        pack_gqa,
        attention_chunk,
        qv=qv,
        q_descale=q_descale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens,
        scheduler_metadata=scheduler_metadata,
    )
    new = k, v, rotary_cos, rotary_sin
    places = cache_seqlens, cache_batch_idx, cache_leftpad, page_table
    options = softmax_scale, causal, window_size, softcap, rotary_interleaved
    named = {"num_splits": num_splits, "return_softmax_lse": return_softmax_lse, "s_aux": s_aux}
    named |= {"sm_margin": sm_margin, "k_descale": k_descale, "v_descale": v_descale}
    with naming({"block_table": "page_table"}):
        return _with_kvcache(q, k_cache, v_cache, *new, *places, *options, **named)


def flash_attn_combine(out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None) -> Any:
    """(out, softmax_lse) of parts of the keys: out_partial, (parts, batch, seqlen, nheads, headdim), and
    lse_partial, (parts, batch, seqlen, nheads), in any strides.
    """
    check_rank("out_partial", out_partial, "parts, batch, seqlen, nheads, headdim")
    check_rank("lse_partial", lse_partial, "parts, batch, seqlen, nheads")
    parts = [
        (readable_rows(x), lse.transpose(1, 2).contiguous())
        for x, lse in zip(out_partial, lse_partial, strict=True)
    ]
    with naming({"parts": "out_partial, lse_partial"}):
        result, lse = merge(parts)
    result = result if out_dtype is None else result.to(out_dtype)
    return result if out is None else out.copy_(result), lse.transpose(1, 2)


def get_scheduler_metadata(*sizes: Any, **options: Any) -> None:
    """None: flashgen needs nothing beforehand."""
