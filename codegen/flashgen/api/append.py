"""``append``: new keys and values go into a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.call.compute import are_all, compute
from flashgen.call.kvcache import FIELDS, KVCache, Rotary, kv_dtype_of
from flashgen.call.latent import width_of_values
from flashgen.call.record import AppendCall, call_of
from flashgen.call.request import Request
from flashgen.call.signature import public
from flashgen.errors import BadParam, FlashgenError, NullPointer, arg, naming
from flashgen.operators.append import APPEND
from flashgen.operators.arguments import flag
from flashgen.runtime import arrays, dlpack
from flashgen.runtime.adopted import cache_arrays

if TYPE_CHECKING:
    from flashgen.call.record import Call


def _append(call: Call) -> tuple[Any, Any]:
    """Write new keys and values into a cache, after the keys of each sequence.

    cache: a ``KVCache``. The call writes to its k and v, and to scales of tokens, not to its lengths. New
        token i of sequence b goes to position lengths[b] + i. Other tokens of the cache do not change. Into
        rows of "fp8_ds_mla" it also writes their scales, the largest |x| of each 128 elements / 448.
    k_new, v_new: (batch, seqlen_new, num_heads_kv, head_dim), for v_new with head_dim_v; strides as in
        ``attention``. A latent cache has one row for each token and no values: v_new is None.
    rotary: rotates each new key to its position; in a latent cache the last elements of a row and of q.
    q: (batch, seqlen_q, num_heads_q, head_dim), to be rotated as well; only with ``rotary``.
    q_positions: "each" rotates query i to position lengths[b] + i, for causal attention and windows, or to
        its entry in the ``positions`` of ``rotary``. "first" rotates all queries of a sequence to lengths[b];
        it needs q, and a ``rotary`` without positions.
    cu_seqlens_new: int32 (batch + 1,), for packed tokens: k_new, v_new and q are (tokens, heads, head_dim),
        positions are (tokens,), and sequence b has the tokens cu_seqlens_new[b] to cu_seqlens_new[b + 1].
    stream, backend: as in ``attention``.

    Returns (total_lengths, q_rotated), new arrays of the kind of k_new: total_lengths, int32 (batch,), is
    lengths plus the new tokens, at most the capacity; q_rotated is None without q. Inside jax.jit, where
    arrays cannot be written to, the new KVCache is a third result.

    The host does not read the lengths on a GPU. So a GPU does not write a token, or its query in q_rotated,
    if its position is at or past the capacity or the rows of cos, or if its page or row does not exist. If
    two tokens go to the same slot, one of them is written, or parts of both. On the CPU all this is an error.

    Raises, before anything is queued or written, BadParam, NullPointer, BadTensorShape, BadTensorDtype,
    BadTensorStrides or DeviceTypeNotSupported for arguments that do not fit; BadParam also for a tensor that
    requires a gradient.
    """
    try:
        request = requested(call)
        first = request.arrays[0]
        kind = arrays.kind_of(first)
        if kind is not None and kind.watched(first):
            from flashgen.call import compiled

            return compiled.append(request)
        # After the cache itself: k, and v where there is one.
        total, *rotated = compute(request, kind)[2 if call.cache.head_dim_v is None else 1 :]
    except dlpack.Traced:
        request = None
    except FlashgenError as error:
        error.raise_as(FIELDS, "append()")
    if request is None:
        with naming(FIELDS):
            return _traced(call)
    results = (total, None if call.q is None else rotated[0])
    if arrays.kind_of(call.k_new) is None:
        return tuple(
            None if x is None else dlpack.hand_back(x, call.k_new, request.arrays, call.stream)
            for x in results
        )
    return results


def _traced(call: Call) -> tuple[Any, Any, KVCache]:
    from flashgen.call.xla.traced import append_to

    return append_to(traced_request(call), call.cache)


def traced_request(call: Call) -> Request:
    """What a call requests of the operator ``append``, with the arrays that JAX traces. Raises BadParam."""
    values, options = _arrays_and_options(call)
    return Request(APPEND, values, options, (), call.stream, call.backend)


append = public("append", AppendCall, _append, __name__)


def requested(call: Call) -> Request:
    """What a call requests of the operator ``append``, with native arrays. Raises BadParam."""
    values, options = _arrays_and_options(call)
    return Request(APPEND, adopted_arrays(values, call.stream), options, (), call.stream, call.backend)


def request_by_name(values: dict[str, Any]) -> Request:
    """What ``append`` requests, of its parameters by name. Raises BadParam."""
    return Request(APPEND, *_arrays_and_options(call_of(AppendCall, **values)))


def _arrays_and_options(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays of a call in the order of the operator, as they are, and its options. Raises BadParam."""
    rotary, q, q_positions = call.rotary, call.q, call.q_positions
    if rotary is not None and not isinstance(rotary, Rotary):
        raise _no_rotary(rotary)
    if rotary is not None and rotary.cos is None and rotary.sin is None:
        raise NullPointer(f"{arg('cos')} is None and {arg('sin')} is None; rotation takes both")
    if q is not None and rotary is None:
        raise BadParam(f"{arg('q')} was given without rotary; append only rotates q: pass both, or neither")
    if isinstance(q_positions, str) and q_positions == "first":
        if q is None:
            raise BadParam(
                f"{arg('q_positions')} is 'first' and {arg('q')} is None; pass "
                f"{arg('q')}, or leave {arg('q_positions')} out"
            )
        if rotary.positions is not None:
            raise BadParam(
                f"{arg('q_positions')} is 'first' and rotary has positions, which say where queries "
                f"are rotated to; leave one of them out"
            )
    values = arrays_in_order(call.cache, call.k_new, call.v_new, rotary, q, call.cu_seqlens_new)
    # A key of plans, in which 1.0, which is refused, would find the plan of True.
    cache = call.cache
    head_dim_v = None if cache.head_dim_v is None else width_of_values(cache)
    return values, (interleaved(rotary) or False, q_positions, kv_dtype_of(cache), head_dim_v)


def arrays_in_order(
    cache: Any,
    k_new: Any,
    v_new: Any,
    rotary: Rotary | None,
    q: Any,
    cu_seqlens_new: Any,
    total_lengths: Any = None,
    q_rotated: Any = None,
) -> tuple[Any, ...]:
    """The arrays of a call in the order of the operator; q has a part in it where there is ``rotary``. Raises
    BadParam.
    """
    if not isinstance(cache, KVCache):
        raise BadParam(f"cache has type {type(cache).__name__}; expected a flashgen.KVCache")
    cos = sin = positions = None
    if rotary is None:
        q = None
    else:
        try:
            cos, sin, positions = rotary.cos, rotary.sin, rotary.positions
        except AttributeError:
            raise _no_rotary(rotary) from None
        if positions is None and cache.starts is not None:
            raise BadParam(
                "rotary has no positions, and the KVCache has starts: positions may count from the start of "
                "a sequence or of its row; pass Rotary(..., positions=...), for example lengths - starts"
            )
    new, places = (k_new, v_new, cache.lengths, q), (cache.pages, cache.index)
    written = cache.k, cache.v, total_lengths, q_rotated
    k_scale, v_scale = cache.k_scale, cache.v_scale
    # Scales of tokens are outputs.
    of_tokens = any(len(getattr(scale, "shape", ())) == 3 for scale in (k_scale, v_scale))
    scales = (None, None, k_scale, v_scale) if of_tokens else (k_scale, v_scale, None, None)
    return *new, *places, cos, sin, positions, cu_seqlens_new, *written, *scales


def _no_rotary(x: Any) -> BadParam:
    return BadParam(f"rotary has type {type(x).__name__}; expected a flashgen.Rotary, or None")


def interleaved(rotary: Rotary | None) -> bool | None:
    """How a plan with this rotary pairs elements. Raises BadParam."""
    return None if rotary is None else flag("interleaved", rotary.interleaved)


def adopted_arrays(given: tuple[Any, ...], stream: Any) -> tuple[Any, ...]:
    """Native arrays over the memory of these. Raises what `dlpack.adopt` does, and BadParam for a cache that
    cannot be written to, and for arrays of several libraries.
    """
    kind = arrays.kind_of(given[0])
    if are_all(kind, given):
        return given
    for name, x in zip(APPEND.positions, given, strict=True):
        dlpack.refuse_tracer(x, name)
    for argument, name in FIELDS.items():
        x = given[APPEND.position(argument)]
        if dlpack.immutable(x):
            raise BadParam(
                f"{arg(name)} of the cache has type {type(x).__name__}, whose memory cannot be written to; "
                "pass an array of another library"
            )
    named = dict(zip(APPEND.positions, given, strict=True))
    dlpack.check_libraries(named, cache_arrays(named))
    native = {name: None if x is None else dlpack.adopt(x, name, stream) for name, x in named.items()}
    own = dlpack.own_libraries(named)
    if own:  # while it is known of which library they were
        with naming(own):
            arrays.check_libraries(
                {name: arrays.view(x, name) for name, x in native.items() if x is not None}
            )
    return tuple(native.values())
