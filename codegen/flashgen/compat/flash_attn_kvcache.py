"""``flash_attn_with_kvcache``: flash-attn's attention over caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.api.attention import attention
from flashgen.call.kvcache import Rotary
from flashgen.compat.flash_attn_arguments import (
    OPTIONS,
    cache_of,
    check_leftpad,
    check_new,
    check_rank,
    leftpad_positions,
    options_of,
    splits_of,
)
from flashgen.compat.refusals import refuse_gradients
from flashgen.compat.widths import readable_rows
from flashgen.errors import naming
from flashgen.operators.maskoptions import window_of

_CACHES = OPTIONS | {
    "return_lse": "return_softmax_lse",
    "lengths": "cache_seqlens",
    "starts": "cache_leftpad",
    "kv_starts": "cache_leftpad",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "pages": "block_table",
    "index": "cache_batch_idx",
    "k": "k_cache",
    "v": "v_cache",
    "k_new": "k",
    "v_new": "v",
    "cos": "rotary_cos",
    "sin": "rotary_sin",
    "interleaved": "rotary_interleaved",
    "splits": "num_splits",
    "one split": "1, or 0 to let flashgen choose",
}


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Any = None,
    sm_margin: int = 0,
    k_descale: Any = None,
    v_descale: Any = None,
) -> Any:
    """Attention of q, (batch, seqlen_q, nheads, headdim), on the first ``cache_seqlens`` keys of k_cache and
    v_cache, (batch_cache, seqlen_cache, nheads_k, headdim); if k and v are passed, they are written after the
    cached keys first.

    Caches are read and written in place, never copied, so their rows start at multiples of 16 bytes.
    k, v: (batch, seqlen_new, nheads_k, headdim): written to positions cache_seqlens to
        cache_seqlens + seqlen_new - 1 of their sequences. Attention includes them. On a GPU a token that has
        no place there is left out; in host memory, or where cache_seqlens is an int, it is an error.
    rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), of the dtype of q or fp32; only with k and v. They
        rotate k from position cache_seqlens on; so they do q if causal or with a window, and else all of q to
        position cache_seqlens. rotary_dim is a multiple of 16. q itself is not changed. The tables are not
        copied either: their rows are contiguous and start at multiples of 16 bytes.
    cache_seqlens: int32, (batch,), on the device of q: the keys in the cache, without the new keys of k; the
        host does not read it. Or an int, for all sequences. None, without k: the whole cache.
    cache_batch_idx: int32, (batch,): the entry of each sequence in the cache; by default its own number.
        Two sequences must not write to one.
    cache_leftpad: int32, (batch,), on the device of q: the first key of each sequence in its row of the
        cache. cache_seqlens counts what is before it, positions of rotary_cos do not. It goes with
        block_table, which flash-attn lacks.
    block_table: int32, (batch, max_num_blocks_per_seq): the caches are (num_blocks, page_block_size,
        nheads_k, headdim), and block block_table[b, j] has the keys of sequence b from j page_block_size. A
        block has any size; entries after the last key are not read. Not with cache_batch_idx.
    causal, window_size, softcap, alibi_slopes, softmax_scale, s_aux: as in ``flash_attn_func``, with the
        keys of each sequence, the new keys of k included, for seqlen_k.
    sm_margin: how many multiprocessors the kernel leaves to others.
    k_descale, v_descale: fp32, (batch, nheads_k), of caches of float8_e4m3fn, under q of fp16 or bf16: what a
        code of 1 stands for; by default 1. New keys are quantised by them. Other shapes are as in a KVCache.
    rotary_interleaved: whether elements 2i and 2i + 1 are a pair, instead of i and i + rotary_dim / 2.
    num_splits: 0: flashgen chooses, by sizes that the host knows. n: into n splits, as by ``splits=n`` of
        ``flashgen.attention``; above 1 for up to 64 rows of a kv head (seqlen_q times its query heads).

    Returns out, (batch, seqlen_q, nheads, headdim), or, with return_softmax_lse, (out, softmax_lse) with the
    LSE in fp32, (batch, nheads, seqlen_q).

    Raises NotImplementedError for arrays that require a gradient. With rotary_cos it also raises it for
    another number of queries than new tokens, if the call is causal, has a window, or has a cache_leftpad;
    and for several queries with a cache_leftpad that are not causal. Raises BadTensorShape for rows of a
    cache that are no multiple of 16 bytes, BadParam for an int beyond the cache and for splits that no kernel
    can make, and what ``flashgen.append`` and ``flashgen.attention`` raise. An error that the host can tell
    without reading elements is raised before the cache is written to.
    """
    refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    refuse_gradients(rotary_cos=rotary_cos, rotary_sin=rotary_sin, s_aux=s_aux, alibi_slopes=alibi_slopes)
    check_rank("q", q, "batch, seqlen_q, nheads, headdim")
    check_new(k, v, rotary_cos, rotary_sin, cache_seqlens)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes) | {
        "return_lse": return_softmax_lse,
        "splits": splits_of(num_splits),
        "sinks": s_aux,
        "sm_margin": sm_margin,
    }
    q, seqlen_new = readable_rows(q), 0 if k is None else k.shape[1]
    codes = getattr(getattr(k_cache, "dtype", None), "itemsize", 2) == 1
    for name, x in () if codes else (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None:
            raise NotImplementedError(f"{name} was given, and k_cache is not float8_e4m3fn; leave it out")
    if codes and cache_seqlens is None and block_table is None:
        cache_seqlens = k_cache.shape[1]  # only calls with lengths read codes
    cache = cache_of(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table, seqlen_new)
    moves = options["causal"] or window_of(options["window_size"]) != (-1, -1)
    if rotary_cos is not None and moves and q.shape[1] != seqlen_new:
        raise NotImplementedError(
            f"q has seqlen_q {q.shape[1]} but k has {seqlen_new} new tokens; with "
            f"rotary_cos, and causal or with a window, flashgen takes as many: pass q and "
            f"k rotated, and no rotary_cos"
        )
    if cache_leftpad is not None and rotary_cos is not None:
        check_leftpad(q, seqlen_new, options)
    with naming(_CACHES):
        if cache.lengths is None:
            return attention(q, cache.k, cache.v, kv_starts=cache_leftpad, **options)
        cache = replace(cache, starts=cache_leftpad, k_scale=k_descale, v_scale=v_descale)
        if k is not None:
            options["append"] = readable_rows(k), readable_rows(v)
            if rotary_cos is not None:
                positions = leftpad_positions(cache, seqlen_new)
                options["rotary"] = Rotary(rotary_cos, rotary_sin, rotary_interleaved, positions)
        return attention(q, cache, **options)
