"""The functions of flash-attn 2 (https://github.com/Dao-AILab/flash-attention), under its signatures.

>>> from flashgen.compat.flash_attn import flash_attn_func

Arrays are as in ``flashgen.attention``: PyTorch, CuPy, NumPy, JAX and others; fp16, bf16, and fp32, which
flash-attn itself lacks. NotImplementedError names an argument that flashgen does not compute: gradients of
caches and blocks, and dropout. Other errors are as in
``flashgen.attention`` and ``flashgen.append``, with this module's names of arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.api.attention import attention
from flashgen.call.kvcache import KVCache, Rotary
from flashgen.compat.flash_attn_arguments import (
    cache_of,
    check_cache,
    check_leftpad,
    check_new,
    check_rank,
    contiguous,
    leftpad_positions,
    options_of,
    splits_of,
    unpacked,
)
from flashgen.compat.refusals import refuse_gradients, refuse_probabilities
from flashgen.compat.widths import attention_of_any_width, readable_rows
from flashgen.errors import BadTensorDtype, NullPointer, arg, naming
from flashgen.operators.arguments import Expected
from flashgen.operators.maskoptions import window_of

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# What errors of ``attention`` call arguments, and advise, in the words of here.
_OPTIONS = {"return_lse": "return_attn_probs", "cap": "softcap", "no softcap": "0", "sinks": "s_aux"}
_SEQUENCES = _OPTIONS | {"cu_seqlens_kv": "cu_seqlens_k", "max_seqlen_kv": "max_seqlen_k"}
# The lengths of a cache, made of cu_seqlens_k.
_BLOCKS = _SEQUENCES | {"lengths": "diff(cu_seqlens_k)", "pages": "block_table"}
_CACHES = _OPTIONS | {
    "return_lse": "return_softmax_lse",
    "lengths": "cache_seqlens",
    "starts": "cache_leftpad",
    "kv_starts": "cache_leftpad",
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
_KV = {"k": "kv", "v": "kv"}
_QKV = _KV | {"q": "qkv"}
_QKV_SEQUENCES = _QKV | {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
) -> Any:
    """Attention of q, (batch, seqlen_q, nheads, headdim), on k and v, (batch, seqlen_k, nheads_k, headdim).

    nheads_k divides nheads; v may have a head dim of its own. A head dim whose row is no multiple of 16 bytes
    is padded with zeros, which copies the array. Rows that are not contiguous, or do not start at multiples
    of 16 bytes, are copied, too.
    dropout_p: the probability that a score is dropped, as in ``flashgen.attention``, of seeds from torch's
        generator. flash-attn drops the same scores for the same seed and offset, but takes others from a
        generator.
    softmax_scale: by default 1 / sqrt(headdim), of the head dim without padding.
    causal: the last query sees the last key; hides key j from query i unless j <= i + seqlen_k - seqlen_q.
    window_size: (left, right): the keys from p - left to p + right, p = i + seqlen_k - seqlen_q; below 0 is
        no bound. With causal, right is 0, whatever was given.
    softcap: each scaled score s becomes softcap tanh(s / softcap); 0 and below is no cap.
    alibi_slopes: fp32, (nheads,) or (batch, nheads): subtract slope |p - j|. The LSE is of these very scores.
        flash-attn, when causal, adds slope j instead: the same result, with an LSE that is slope p larger.
    deterministic: gradients are the same bits each time; the result always is.
    return_attn_probs: return (out, softmax_lse, None): the LSE in fp32, (batch, nheads, seqlen_q), and no
        probabilities, which flash-attn has for dropout alone: not with a dropout_p above 0.
        ``flashgen.attention(return_weights=True)`` returns the attention weights.
    s_aux: sinks, fp32 or bf16, (nheads,), as flash-attn 3 calls them: a logit of each head that joins the
        denominator of its softmax; the ``sinks`` of ``flashgen.attention``. The LSE counts it in.

    Returns out, (batch, seqlen_q, nheads, headdim of v); a query that sees no key is 0, with an LSE of -inf
    (in flash-attn inf), or of its s_aux.

    PyTorch's autograd gets the gradients of q, k, v and s_aux.

    Raises NotImplementedError for return_attn_probs with dropout, and what
    ``flashgen.attention`` raises.
    """
    refuse_probabilities(return_attn_probs, dropout_p)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, "batch, seqlen, nheads, headdim")
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"return_lse": return_attn_probs, "deterministic": deterministic}
    options |= {"sinks": s_aux, "dropout_p": dropout_p}
    with naming(_OPTIONS):
        result = attention_of_any_width(q, k, v, **options)
    return (*result, None) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of q, k and v in one array: qkv is (batch, seqlen, 3, nheads, headdim), read by its
    strides. Everything else is as there.
    """
    q, k, v = unpacked("qkv", qkv, "batch, seqlen, 3, nheads, headdim")
    with naming(_QKV):
        return flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of k and v in one array: kv is (batch, seqlen_k, 2, nheads_k, headdim), read by its
    strides. Everything else is as there.
    """
    k, v = unpacked("kv", kv, "batch, seqlen_k, 2, nheads_k, headdim")
    with naming(_KV):
        return flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    s_aux: Any = None,
) -> Any:
    """Attention of packed sequences, one after another: q is (total_q, nheads, headdim), k and v are
    (total_k, nheads_k, headdim).

    cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), on the device of q: sequence b has the queries from
        cu_seqlens_q[b] to cu_seqlens_q[b + 1], and keys in the same way. Nothing on the host reads them; any
        length may be 0.
    max_seqlen_q, max_seqlen_k: the lengths of the longest sequences, by which kernels are chosen. No key is
        lost where max_seqlen_k is too small. Queries past max_seqlen_q may be left out on a GPU, as in
        flash-attn, and are an error in host memory; where q has more rows than batch max_seqlen_q, all are
        computed.
    block_table: int32, (batch, max_num_blocks_per_seq): k and v are (num_blocks, page_block_size, nheads_k,
        headdim), and block block_table[b, j] has the keys of sequence b from j page_block_size. Only the
        differences of cu_seqlens_k count, the lengths of keys. A block has any size; entries after the last
        key are not read.
    The others are as in ``flash_attn_func``, with the lengths of each sequence for seqlen_q and seqlen_k.
    alibi_slopes is (nheads,) or (batch, nheads). A head dim is padded as there, except in blocks.

    Returns out, (total_q, nheads, headdim of v), or with return_attn_probs (out, softmax_lse, None) with the
    LSE in fp32, (nheads, total_q). PyTorch's autograd gets the gradients of q, k, v and s_aux. Rows after
    cu_seqlens_q[-1] are not written, and may be anything, NaN included: clear them before a layer whose
    weights have gradients.

    Raises what ``flash_attn_func`` does, NotImplementedError for slopes that require a gradient, and with
    block_table for such q, k, v or s_aux, NullPointer without cu_seqlens, and BadTensorShape for blocks
    whose rows are no multiple of 16 bytes.
    """
    refuse_probabilities(return_attn_probs, dropout_p)
    refuse_gradients(alibi_slopes=alibi_slopes)
    if block_table is not None:
        refuse_gradients(q=q, k=k, v=v, s_aux=s_aux)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is None:
            raise NullPointer(f"{arg(name)} is None; expected an int32 array, (batch + 1,)")
        check_rank(name, x, "batch + 1")
    check_rank("q", q, "total_q, nheads, headdim")
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes) | {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": Expected(max_seqlen_q),
        "max_seqlen_kv": Expected(max_seqlen_k),
        "return_lse": return_attn_probs,
        "deterministic": deterministic,
        "sinks": s_aux,
        "dropout_p": dropout_p,
    }
    if block_table is None:
        for name, x in (("k", k), ("v", v)):
            check_rank(name, x, "total_k, nheads_k, headdim")
        with naming(_SEQUENCES):
            result = attention_of_any_width(q, k, v, cu_seqlens_kv=cu_seqlens_k, **options)
    else:
        for name, x in (("k", k), ("v", v)):
            check_cache(name, x, "num_blocks, page_block_size, nheads_k, headdim")
        dtype = str(cu_seqlens_k.dtype).rpartition(".")[2]
        if dtype != "int32":
            raise BadTensorDtype(f"cu_seqlens_k has dtype {dtype}; expected int32")
        check_rank("block_table", block_table, "batch, max_num_blocks_per_seq")
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cache = KVCache(k, v, lengths, pages=contiguous(block_table))
        with naming(_BLOCKS):
            result = attention(readable_rows(q), cache, **options)
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` of q, k and v in one array: qkv is (total, 3, nheads, headdim), read by its
    strides; cu_seqlens and max_seqlen count both queries and keys. Everything else is as there.
    """
    q, k, v = unpacked("qkv", qkv, "total, 3, nheads, headdim")
    with naming(_QKV_SEQUENCES):
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` of k and v in one array: kv is (total_k, 2, nheads_k, headdim), read by its
    strides. Everything else is as there.
    """
    k, v = unpacked("kv", kv, "total_k, 2, nheads_k, headdim")
    with naming(_KV):
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )


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
    rotary_interleaved: whether elements 2i and 2i + 1 are a pair, instead of i and i + rotary_dim / 2.
    num_splits: 0: flashgen chooses, by sizes that the host knows. n: into n splits, as by ``splits=n`` of
        ``flashgen.attention``; above 1 for up to 64 rows of a kv head (seqlen_q times its query heads).

    Returns out, (batch, seqlen_q, nheads, headdim), or, with return_softmax_lse, (out, softmax_lse) with the
    LSE in fp32, (batch, nheads, seqlen_q).

    Raises NotImplementedError for arrays that require a gradient; for another number of queries than new
    tokens where both are rotated and causal, in a window, or with a cache_leftpad, and there for several that
    are not causal; BadTensorShape
    for a cache of another row; BadParam for an int beyond the cache, and splits that no kernel can make; and
    what ``flashgen.append`` and ``flashgen.attention`` raise, of which nothing that the host can tell without
    reading elements is raised after the cache was written to.
    """
    refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    refuse_gradients(rotary_cos=rotary_cos, rotary_sin=rotary_sin, s_aux=s_aux, alibi_slopes=alibi_slopes)
    check_rank("q", q, "batch, seqlen_q, nheads, headdim")
    check_new(k, v, rotary_cos, rotary_sin, cache_seqlens)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes) | {
        "return_lse": return_softmax_lse,
        "splits": splits_of(num_splits),
        "sinks": s_aux,
    }
    q, seqlen_new = readable_rows(q), 0 if k is None else k.shape[1]
    cache = cache_of(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table, seqlen_new)
    if rotary_cos is not None and window_of(options["window_size"]) != (-1, -1) and q.shape[1] != seqlen_new:
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
        cache = replace(cache, starts=cache_leftpad)
        if k is not None:
            options["append"] = readable_rows(k), readable_rows(v)
            if rotary_cos is not None:
                positions = leftpad_positions(cache, seqlen_new)
                options["rotary"] = Rotary(rotary_cos, rotary_sin, rotary_interleaved, positions)
        return attention(q, cache, **options)


def __getattr__(name: str) -> Any:
    # These need PyTorch, and its import takes seconds.
    if name in (
        "_flash_attn_forward",
        "_flash_attn_backward",
        "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward",
    ):
        from flashgen.compat import flash_attn_passes

        return getattr(flash_attn_passes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
