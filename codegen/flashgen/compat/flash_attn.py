"""The functions of flash-attn 2 (https://github.com/Dao-AILab/flash-attention), under its signatures.

>>> from flashgen.compat.flash_attn import flash_attn_func

Arrays are as in ``flashgen.attention``: PyTorch, CuPy, NumPy, JAX and others; fp16, bf16, and fp32, which
flash-attn itself lacks. NotImplementedError names what flashgen does not compute, for example gradients of
caches and blocks. Other errors are as in ``flashgen.attention`` and ``flashgen.append``, with this module's
names of arguments.
"""

from __future__ import annotations

from typing import Any

from flashgen.api.attention import attention
from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import request_of
from flashgen.call.shortcuts import Shortcuts
from flashgen.compat.flash_attn_arguments import (
    OPTIONS,
    check_cache,
    check_rank,
    contiguous,
    options_of,
    unpacked,
)
from flashgen.compat.flash_attn_kvcache import flash_attn_with_kvcache
from flashgen.compat.refusals import refuse_gradients, refuse_probabilities
from flashgen.compat.widths import attention_of_any_width, readable_rows
from flashgen.errors import BadTensorDtype, NullPointer, arg, naming
from flashgen.operators.arguments import Expected

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_SEQUENCES = OPTIONS | {"cu_seqlens_kv": "cu_seqlens_k", "max_seqlen_kv": "max_seqlen_k"}
# The lengths of a cache, made of cu_seqlens_k.
_BLOCKS = _SEQUENCES | {"lengths": "diff(cu_seqlens_k)", "pages": "block_table"}
_KV = {"k": "kv", "v": "kv"}
_QKV = _KV | {"q": "qkv"}
_QKV_SEQUENCES = _QKV | {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}
_FUNC = Shortcuts("q", "k", "v", "sinks")
_VARLEN = Shortcuts("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_kv")


def _is_plain(dropout_p: Any, window_size: Any, alibi_slopes: Any) -> bool:
    """Whether a call may have a shortcut: without dropout, whose seeds differ, and alibi."""
    no_dropout = type(dropout_p) is float and dropout_p == 0.0
    return no_dropout and alibi_slopes is None and type(window_size) is tuple


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
    plain = _is_plain(dropout_p, window_size, alibi_slopes)
    way = softmax_scale, causal, softcap, deterministic, return_attn_probs, *(window_size if plain else ())
    arrays = q, k, v, s_aux
    result = _FUNC.run(way, arrays) if plain else None
    if result is not None:
        return (*result, None) if return_attn_probs else result
    refuse_probabilities(return_attn_probs, dropout_p)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, "batch, seqlen, nheads, headdim")
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"return_lse": return_attn_probs, "deterministic": deterministic}
    options |= {"sinks": s_aux, "dropout_p": dropout_p}
    with naming(OPTIONS):
        result = attention_of_any_width(q, k, v, **options)
    if plain:
        _FUNC.keep(way, arrays, lambda: request_of(call_of(AttentionCall, q=q, k=k, v=v, **options)))
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
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    with naming(_QKV):
        return flash_attn_func(q, k, v, *options, return_attn_probs)


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
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    with naming(_KV):
        return flash_attn_func(q, k, v, *options, return_attn_probs)


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
    plain = block_table is None and _is_plain(dropout_p, window_size, alibi_slopes)
    way = softmax_scale, causal, softcap, deterministic, return_attn_probs, max_seqlen_q, max_seqlen_k
    way += window_size if plain else ()
    arrays = q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k
    result = _VARLEN.run(way, arrays) if plain else None
    if result is not None:
        return (*result, None) if return_attn_probs else result
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
        if plain:
            options["cu_seqlens_kv"] = cu_seqlens_k
            _VARLEN.keep(way, arrays, lambda: request_of(call_of(AttentionCall, q=q, k=k, v=v, **options)))
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
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    with naming(_QKV_SEQUENCES):
        return flash_attn_varlen_func(q, k, v, *lengths, *options, return_attn_probs)


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
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    with naming(_KV):
        return flash_attn_varlen_func(q, k, v, *lengths, *options, return_attn_probs)


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
