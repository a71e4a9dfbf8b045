"""``cascade``: attention over keys in several arrays and caches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

from flashgen.api.attention import attention
from flashgen.api.merge import merge
from flashgen.api.parts import (
    OF_HOST,
    arrays_by_name,
    check_apart,
    check_parts,
    check_sinks,
    in_batch,
    is_shared,
    keys_of,
    parts_of,
    unshared,
)
from flashgen.call.compute import ready
from flashgen.call.keywords import unexpected
from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import names_of, request_of
from flashgen.errors import BadParam, FlashgenError, NullPointer, arg, naming
from flashgen.operators.arguments import flag, shown
from flashgen.operators.contract import MAX_SEQLEN, check_rank
from flashgen.operators.maskoptions import NO_WINDOW, mask_type_name, window_of
from flashgen.runtime import arrays, check, dlpack, torchkind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.runtime.plans import Plan, Ready

# Options of attention() that speak of positions or of the keys of one call.
_POSITIONAL = ("mask", "mask_type", "window_size", "alibi_slopes", "score", "params")
# Arguments that are no part's.
_OF_CALL = ("softmax_scale", "softcap", "sinks", "stream", "backend")


def cascade(
    q: Any,
    parts: Sequence[tuple[Any, Any] | KVCache],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    backend: str | None = None,
    **positional: Any,
) -> Any:
    """Attention over keys in several arrays, for example a prefix that all sequences of a batch share and the
    other keys of each sequence.

    q: (batch, seqlen_q, num_heads_q, head_dim), or without batch, as in ``attention``.
    parts: a list of (k, v) or ``KVCache``, from the first keys to the last. k: (batch, seqlen_kv,
        num_heads_kv, head_dim), v: (batch, seqlen_kv, num_heads_kv, head_dim_v), as in ``attention``;
        seqlen_kv and num_heads_kv may differ between parts. A part of batch 1, or beside another part a
        KVCache with one length, is shared by all batch entries of q: it is read once, because the queries of
        all entries form one long sequence. This copies q once, unless its strides already describe one
        sequence.
    causal: in the last part hide key j from query i unless j <= i + seqlen_kv - seqlen_q, where seqlen_kv is
        the number of keys of that part, in a KVCache of each sequence. All queries see all keys of the other
        parts. If the last part has seqlen_q keys or more, this is causal attention over all keys. With
        several queries the last part must not be a KVCache that the batch shares.
    sinks: as in ``attention``. Only the last part includes them, so they count once.
    softmax_scale, softcap, out, return_lse, stream, backend: as in ``attention``.
    mask, mask_type, window_size, alibi_slopes, score, params: must have no effect, because positions count
        from the beginning of a part.

    Returns ``out``, or ``(out, lse)``, as ``attention``. Parts are merged as by ``merge``, each result
    rounded to the dtype.

    Raises what ``attention`` raises; an error about a part begins with ``parts[i]``. Raises BadParam for an
    empty list, for a part that is neither a pair nor a KVCache, for a KVCache of one length that the batch
    cannot share, for a mask, a window, slopes or a score, and for a tensor that requires a gradient.
    """
    for name, value in positional.items():
        if name not in _POSITIONAL:
            raise unexpected(cascade, {name: value})
        if not _does_nothing(name, value):
            if name == "mask_type" and mask_type_name(value) == "causal_bottom_right":
                raise BadParam(f"{arg('mask_type')} is {shown(value)}; cascade takes none: pass causal=True")
            raise BadParam(
                f"{arg(name)} was given; cascade takes none, as its positions would count from the "
                "beginning of a part"
            )
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "stream": stream, "backend": backend}
    parts = parts_of(parts)
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    if q is None:
        raise NullPointer(f"{arg('q')} is None; expected an array")
    of_parts = {
        f"parts[{i}]: {name}": x for i, part in enumerate(parts) for name, x in arrays_by_name(part).items()
    }
    if any(x is not None and arrays.kind_of(x) is None for x in (q, *of_parts.values())):
        in_caches = [
            f"parts[{i}]: {name}"
            for i, part in enumerate(parts)
            if isinstance(part, KVCache)
            for name in arrays_by_name(part)
        ]
        beside = {"sinks": sinks, "out": out}
        dlpack.check_libraries({"q": q} | of_parts | beside, in_caches)
        with naming(dlpack.own_libraries({"q": q} | beside | of_parts)):
            with contextlib.suppress(dlpack.Traced):
                return _cascade_adopted(q, parts, sinks, out, causal, return_lse, options)
            return _traced(q, parts, sinks, out, causal, return_lse, options)
    traced = arrays.kind_of(q).watched(q)
    check_rank(arrays.shape_if_any(q, "q"))
    try:
        if traced:
            from flashgen.call import compiled

            compiled.check(
                {"q": q, "sinks": sinks, "out": out} | of_parts, stream, "cascade()", {"out", "sinks"}
            )
        else:
            check_parts(q, parts, out, causal)
            check_sinks(q, sinks)
        folded, calls = None, []
        with_diagonal = len(parts) - 1 if causal and q.shape[-3] > 1 else None
        for index, part in enumerate(parts):
            diagonal = index == with_diagonal
            if (
                is_shared(q, part)
                and not diagonal
                and len(parts) > 1
                and q.shape[0] * q.shape[1] <= MAX_SEQLEN
            ):
                folded = _folded(q, stream) if folded is None else folded
                calls.append((folded, part, False))
            else:
                calls.append((q, in_batch(q, part, index), diagonal))
        of_caches: dict[int, tuple[Plan, Ready]] = {}
        if not traced and len(parts) > 1:  # a single call checks itself
            of_caches = _ready_caches(calls, sinks, out, options)
    except torchkind.RequiresGradient as error:
        raise error.of("cascade()") from None
    if len(parts) == 1:
        (_, part, _) = calls[0]
        return attention(
            q, *keys_of(part), causal=causal, sinks=sinks, out=out, return_lse=return_lse, **options
        )
    results = []
    for index, (seen, part, diagonal) in enumerate(calls):
        if index in of_caches:
            plan, (work, given, _, handle, _) = of_caches[index]
            work(given, handle)
            found = plan.results_of(given)
        else:
            joined = sinks if index == len(calls) - 1 else None
            found = attention(seen, *keys_of(part), causal=diagonal, sinks=joined, return_lse=True, **options)
        results.append(found if seen is q else _unfolded(found, q, stream))
    merged, lse = merge(results, out=out, stream=stream, backend=backend)
    return (merged, lse) if return_lse else merged


def _traced(
    q: Any,
    parts: list[tuple[Any, Any] | KVCache],
    sinks: Any,
    out: Any,
    causal: bool,
    return_lse: bool,
    options: dict[str, Any],
) -> Any:
    """The cascade inside a program that JAX traces."""
    import jax.numpy as jnp

    if out is not None:
        raise BadParam(f"{arg('out')} was given, but JAX arrays cannot be written to; leave {arg('out')} out")
    check_rank(q.shape)
    results = []
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        diagonal, seen, keys = causal and is_last, q, keys_of(part)
        folds = is_shared(q, part) and len(parts) > 1 and not (diagonal and q.shape[1] > 1)
        if folds and q.shape[0] * q.shape[1] <= MAX_SEQLEN:
            seen = q.reshape(1, -1, *q.shape[2:])
        elif is_shared(q, part) and not isinstance(part, KVCache):
            keys = tuple(jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in part)
        elif is_shared(q, part):
            raise unshared(q, index)
        try:
            o, lse = attention(
                seen,
                *keys,
                causal=diagonal and seen is q,
                sinks=sinks if is_last else None,
                return_lse=True,
                **options,
            )
        except FlashgenError as error:
            _raise_of_part(error, index)
        if seen is not q:
            batch, rows, heads = q.shape[:3]
            o, lse = o.reshape(batch, rows, heads, -1), lse.reshape(heads, batch, rows).swapaxes(0, 1)
        results.append((o, lse))
    o, lse = merge(results, stream=options["stream"], backend=options["backend"])
    return (o, lse) if return_lse else o


def _does_nothing(name: str, value: Any) -> bool:
    """Whether one of `_POSITIONAL` is as if it were not given. Raises BadParam."""
    if name == "window_size":
        return window_of(value) == NO_WINDOW
    if name == "mask_type":
        return mask_type_name(value) in (None, "none")
    return value is None or (name == "params" and isinstance(value, dict) and not value)


def _raise_of_part(error: FlashgenError, index: int) -> NoReturn:
    """Raise an error about a part with its number, and one about an argument of the call as it is."""
    if error.subject in _OF_CALL:
        raise error
    raise type(error)(f"parts[{index}]: {error.message}") from None


def _ready_caches(
    calls: list[tuple[Any, Any, bool]], sinks: Any, out: Any, options: dict[str, Any]
) -> dict[int, tuple[Plan, Ready]]:
    """The calls over KVCaches, by index: checked before the first call, with memory for their results, not
    yet queued. ``calls`` are q, a part, and whether it is causal. Messages name the part.
    """
    found_ready = {}
    for index, (q, part, diagonal) in enumerate(calls):
        if not isinstance(part, KVCache):
            continue
        call = call_of(
            AttentionCall,
            q=q,
            k=part,
            causal=diagonal,
            sinks=sinks if index == len(calls) - 1 else None,
            return_lse=True,
            **options,
        )
        try:
            with naming(names_of(call)):
                plan, calling = ready(request_of(call))
                _, given, pointers, handle, _ = calling
                found = (
                    check.elements(plan.problem, pointers, given, handle) if plan.checks_elements else None
                )
                if found is not None:
                    plan.problem.operator.check_elements(plan.problem, found)
            found_ready[index] = plan, calling
            if out is not None:
                check_apart(out, plan.problem.operator, given)
        except FlashgenError as error:
            _raise_of_part(error, index)
    return found_ready


def _folded(q: Any, stream: Any) -> Any:
    """q of all batch entries as one sequence of batch 1; a copy where its strides are not of one."""
    kind = arrays.kind_of(q)
    batch, seqlen_q = q.shape[:2]
    batch_stride, row_stride = kind.strides(q)[:2]
    if batch > 1 and seqlen_q > 1 and batch_stride != seqlen_q * row_stride:
        q = kind.contiguous(q, stream)
    return q.reshape(1, batch * seqlen_q, *q.shape[2:])


def _unfolded(results: tuple[Any, Any], q: Any, stream: Any) -> tuple[Any, Any]:
    """The o and the lse of a folded q for each batch entry; the lse is a copy."""
    o, lse = results
    batch, seqlen_q, heads = q.shape[:3]
    lse = lse.reshape(heads, batch, seqlen_q).swapaxes(0, 1)
    return o.reshape(batch, seqlen_q, heads, o.shape[-1]), arrays.kind_of(lse).contiguous(lse, stream)


def _cascade_adopted(
    q: Any,
    parts: list[tuple[Any, Any] | KVCache],
    sinks: Any,
    out: Any,
    causal: bool,
    return_lse: bool,
    options: dict[str, Any],
) -> Any:
    """`cascade` for arrays that flashgen does not read directly: adopt them, and hand the results back."""
    if out is not None and dlpack.immutable(out):
        raise BadParam(
            f"{arg('out')} has type {type(out).__name__}, whose memory cannot be written to; call without "
            f"{arg('out')}"
        )
    stream = options["stream"]
    native_q = dlpack.adopt(q, "q", stream)
    native = []
    for index, part in enumerate(parts):
        given = {
            name: dlpack.adopt(x, f"parts[{index}]: {name}", stream)
            for name, x in arrays_by_name(part).items()
        }
        is_cache = isinstance(part, KVCache)
        others = {name: getattr(part, name) for name in OF_HOST} if is_cache else {}
        native.append(KVCache(**given, **others) if is_cache else tuple(given.values()))
    results = cascade(
        native_q,
        native,
        causal=causal,
        sinks=None if sinks is None else dlpack.adopt(sinks, "sinks", stream),
        out=None if out is None else dlpack.adopt(out, "out", stream),
        return_lse=True,
        **options,
    )
    inputs = (native_q, *(x for part in native for x in arrays_by_name(part).values()))
    lse = dlpack.hand_back(results[1], q, inputs, stream)
    result = dlpack.hand_back(results[0], q, inputs, stream) if out is None else out
    return (result, lse) if return_lse else result
