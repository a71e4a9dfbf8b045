"""The functions of flash-attn 2 (https://github.com/Dao-AILab/flash-attention), under its signatures.

>>> from flashgen.compat.flash_attn import flash_attn_func

Arrays are those of ``flashgen.attention``: PyTorch, CuPy, NumPy, JAX and others; fp16, bf16, and fp32, which
flash-attn itself has not. What flashgen does not compute raises NotImplementedError with the name of the
argument: gradients, dropout, variable lengths, and caches that are appended to, paged, or filled to a length
that is known on the device alone. Other errors are those of ``flashgen.attention``.
"""

from __future__ import annotations

import numbers
from typing import Any

from flashgen.compat.refusals import refuse_dropout, refuse_gradients
from flashgen.compat.widths import attention_of_any_width
from flashgen.errors import BadParam, BadTensorShape


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
) -> Any:
    """Attention of q, (batch, seqlen_q, nheads, headdim), on k and v, (batch, seqlen_k, nheads_k, headdim).

    nheads_k divides nheads; v may have a head dim of its own. A head dim whose row is no multiple of 16 bytes
    is padded with zeros, which copies the array, as is one whose last dimension is not contiguous.
    dropout_p: 0 alone.
    softmax_scale: by default 1 / sqrt(headdim), of the head dim without padding.
    causal: the last query sees the last key; hides key j from query i unless j <= i + seqlen_k - seqlen_q.
    window_size: (left, right): the keys from p - left to p + right, p = i + seqlen_k - seqlen_q; below 0 is
        no bound. With causal, right is 0, whatever was given.
    softcap: each scaled score s becomes softcap tanh(s / softcap); 0 and below is no cap.
    alibi_slopes: fp32, (nheads,) or (batch, nheads): subtract slope |p - j|. The LSE is of these very scores.
        flash-attn, when causal, adds slope j instead: the same result, with an LSE that is slope p larger.
    deterministic: either way; it is about gradients, and the result is always repeatable.
    return_attn_probs: return (out, softmax_lse, None): the LSE in fp32, (batch, nheads, seqlen_q), and no
        probabilities, which flash-attn has for dropout alone.

    Returns out, (batch, seqlen_q, nheads, headdim of v); a query that sees no key is 0, with an LSE of -inf
    (in flash-attn inf).

    Raises NotImplementedError for a dropout_p above 0 and for q, k or v that require a gradient, and what
    ``flashgen.attention`` raises.
    """
    refuse_dropout(dropout_p)
    refuse_gradients(q=q, k=k, v=v)
    result = _attention(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
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
    refuse_gradients(qkv=qkv)
    _check_packed("qkv", qkv, 3, "nheads")
    q, k, v = (qkv[:, :, place] for place in range(3))
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
    refuse_gradients(kv=kv)
    _check_packed("kv", kv, 2, "nheads_k")
    return flash_attn_func(
        q,
        kv[:, :, 0],
        kv[:, :, 1],
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
) -> Any:
    """Not there yet: raises NotImplementedError.

    The lengths lie on the device. Even where all are equal, finding that out would wait for it.
    """
    raise NotImplementedError(
        "cu_seqlens_q and cu_seqlens_k were given; flashgen has no variable lengths: pad the batch and call "
        "flash_attn_func, or call it once for each sequence"
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
) -> Any:
    """Attention of q, (batch, seqlen_q, nheads, headdim), on the first ``cache_seqlens`` keys of k_cache and
    v_cache, (batch_cache, seqlen_cache, nheads_k, headdim).

    batch_cache may be larger than batch: sequence b is entry b of the cache, which is read where it lies. A
    head dim whose row is no multiple of 16 bytes copies the cache at each call, as in flash-attn.
    cache_seqlens: an int, the length of every sequence, or None: the whole cache.
    causal, window_size, softcap, alibi_slopes, softmax_scale: as in ``flash_attn_func``, with cache_seqlens
        for seqlen_k.
    rotary_interleaved: either way, for it only says how to rotate.
    num_splits: 0 alone: flashgen chooses.

    Returns out, (batch, seqlen_q, nheads, headdim), or, with return_softmax_lse, (out, softmax_lse) with the
    LSE in fp32, (batch, nheads, seqlen_q).

    Raises NotImplementedError for k and v (appending), rotary_cos and rotary_sin, cache_seqlens as an array,
    cache_batch_idx, cache_leftpad, block_table (pages), another num_splits, and arrays that require a
    gradient; BadParam for cache_seqlens beyond the cache; and what ``flashgen.attention`` raises.
    """
    absent = {
        "k": (k, "nothing is appended: write it to k_cache yourself"),
        "v": (v, "nothing is appended: write it to v_cache yourself"),
        "rotary_cos": (rotary_cos, "nothing is rotated: rotate q and k yourself"),
        "rotary_sin": (rotary_sin, "nothing is rotated: rotate q and k yourself"),
        "cache_batch_idx": (cache_batch_idx, "entries of the cache are read in their order"),
        "cache_leftpad": (cache_leftpad, "sequences begin where the cache does"),
        "block_table": (block_table, "the cache has no pages"),
    }
    for name, (value, why) in absent.items():
        if value is not None:
            raise NotImplementedError(f"{name} was given, which flashgen does not serve; {why}")
    if num_splits != 0:
        raise NotImplementedError(f"num_splits is {num_splits!r}; flashgen chooses the splits: pass 0")
    refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache)
    k, v = _filled(q, k_cache, v_cache, cache_seqlens)
    return _attention(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    return_lse: bool,
) -> Any:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rank(name, x, "batch, seqlen, nheads, headdim")
    uncapped = isinstance(softcap, numbers.Real) and softcap <= 0
    return attention_of_any_width(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=_window(window_size, causal),
        softcap=None if uncapped else softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
    )


def _window(window_size: Any, causal: bool) -> Any:
    """flash-attn's window as ``attention`` has it, which says what is wrong with one that is no pair."""
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(isinstance(side, int) for side in window_size):
        return window_size
    left, right = (max(side, -1) for side in window_size)
    return left, 0 if causal else right


def _filled(q: Any, k_cache: Any, v_cache: Any, length: Any) -> list[Any]:
    """The keys and values of the sequences of q in a cache, as views."""
    _check_rank("q", q, "batch, seqlen_q, nheads, headdim")
    if not (length is None or isinstance(length, numbers.Integral)):
        raise NotImplementedError(
            f"cache_seqlens is of type {type(length).__name__}; flashgen has no length for each sequence: "
            "pass an int, the length of all, or None"
        )
    filled = []
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_rank(name, x, "batch_cache, seqlen_cache, nheads_k, headdim")
        if x.shape[0] < q.shape[0]:
            raise BadTensorShape(f"{name} has {x.shape[0]} entries; q has {q.shape[0]}, and each needs one")
        if length is not None and not 0 <= length <= x.shape[1]:
            raise BadParam(f"cache_seqlens is {length}; {name} has room for {x.shape[1]} keys")
        filled.append(x[: q.shape[0]] if length is None else x[: q.shape[0], :length])
    return filled


def _check_packed(name: str, x: Any, parts: int, heads: str) -> None:
    _check_rank(name, x, f"batch, seqlen, {parts}, {heads}, headdim")
    if x.shape[2] != parts:
        raise BadTensorShape(
            f"{name} has shape {tuple(x.shape)}; expected (batch, seqlen, {parts}, {heads}, headdim)"
        )


def _check_rank(name: str, x: Any, expected: str) -> None:
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) != len(expected.split(",")):
        raise BadTensorShape(f"{name} has shape {shape}; expected ({expected})")
