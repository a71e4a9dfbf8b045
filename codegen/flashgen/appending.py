"""``append``: new keys and values go into a KV cache."""

from __future__ import annotations

from typing import Any

from flashgen.api import call
from flashgen.errors import BadParam
from flashgen.kvcache import KVCache, Rotary
from flashgen.operators.append import APPEND
from flashgen.runtime import arrays


def append(
    cache: KVCache,
    k_new: Any,
    v_new: Any,
    *,
    rotary: Rotary | None = None,
    q: Any = None,
    q_positions: str = "each",
    cu_seqlens_new: Any = None,
    stream: Any = None,
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Write new keys and values into a cache, behind those that each sequence has there.

    cache: a ``KVCache``. Its k and v are written to, its lengths are not. New token i of sequence b goes to
        position lengths[b] + i; all else in the cache stays as it is.
    k_new, v_new: (batch, seqlen_new, num_heads_kv, head_dim), for v_new with head_dim_v; strides as in
        ``attention``.
    rotary: rotates the new keys on the way, each to its position.
    q: (batch, seqlen_q, num_heads_q, head_dim), to be rotated as well; only with ``rotary``.
    q_positions: "each" rotates query i to position lengths[b] + i, as causal attention and windows want;
        "first" rotates all queries of a sequence to lengths[b].
    cu_seqlens_new: int32 (batch + 1,), for packed tokens: k_new, v_new and q are (tokens, heads, head_dim),
        and sequence b has those from cu_seqlens_new[b] to cu_seqlens_new[b + 1]; positions are (tokens,).
    stream, backend: as in ``attention``.

    Returns (total_lengths, q_rotated), new arrays of the kind of k_new: total_lengths, int32 (batch,), is
    lengths and the new tokens, at most the capacity; q_rotated is None without q.

    On a GPU nobody reads lengths on the host. A token whose position is at or past the capacity, or past the
    rows of cos, or whose page or row the cache does not have, is left out there, and so is such a query in
    q_rotated. On the CPU it is an error.

    Raises, before anything is queued or written, BadParam, NullPointer, BadTensorShape, BadTensorDtype,
    BadTensorStrides or DeviceTypeNotSupported for what does not fit.
    """
    if not isinstance(cache, KVCache):
        raise BadParam(f"cache has type {type(cache).__name__}; expected a flashgen.KVCache")
    if rotary is not None and not isinstance(rotary, Rotary):
        raise BadParam(f"rotary has type {type(rotary).__name__}; expected a flashgen.Rotary, or None")
    if q is not None and rotary is None:
        raise BadParam("q was given without rotary, which alone changes it; pass both, or neither")
    for name, x in (("k", cache.k), ("v", cache.v)):
        if arrays.immutable(x):
            raise BadParam(
                f"{name} of the cache has type {type(x).__name__}, whose memory cannot be written to; pass "
                "an array of another library"
            )
    angles = {}
    if rotary is not None:
        angles = {"cos": rotary.cos, "sin": rotary.sin, "positions": rotary.positions}
    given = APPEND.in_order(
        k_new=k_new,
        v_new=v_new,
        lengths=cache.lengths,
        q=q,
        pages=cache.pages,
        index=cache.index,
        cu_seqlens_new=cu_seqlens_new,
        k_cache=cache.k,
        v_cache=cache.v,
        **angles,
    )
    native = tuple(
        None if x is None else arrays.adopt(x, argument.name, stream)
        for argument, x in zip(APPEND.arguments, given, strict=True)
    )
    options = (rotary is not None and rotary.interleaved, q_positions)
    total, *rotated = call(APPEND, native, options, stream=stream, backend=backend)[2:]
    results = (total, rotated[0] if rotated else None)
    if arrays.kind_of(k_new) is None:
        return tuple(None if x is None else arrays.hand_back(x, k_new, native, stream) for x in results)
    return results
