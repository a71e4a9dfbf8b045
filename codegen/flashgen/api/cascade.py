"""``cascade``: attention over keys in several arrays and caches."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from flashgen.api.attention import attention
from flashgen.api.merge import check_list, check_pair, merge
from flashgen.call.compute import are_all, ready
from flashgen.call.keywords import unexpected
from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import names_of, request_of
from flashgen.errors import (
    BadParam,
    BadTensorShape,
    BadTensorStrides,
    FlashgenError,
    NullPointer,
    arg,
    naming,
)
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ArrayLayout,
    check_devices,
    check_memory,
    check_strides,
    flag,
    normal_strides,
    overlapping,
    shown,
)
from flashgen.operators.attention import ATTENTION
from flashgen.operators.attention import normalise as normalise_attention
from flashgen.operators.contract import MAX_SEQLEN, check_beside_q, check_dtypes, check_out, check_rank
from flashgen.operators.maskoptions import NO_WINDOW, mask_type_name, window_of
from flashgen.runtime import arrays, check, dlpack, torchkind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.operator import Operator
    from flashgen.runtime.plans import Plan, Ready

# Options of attention() that speak of positions or of the keys of one call.
_POSITIONAL = ("mask", "mask_type", "window_size", "alibi_slopes", "score", "params")
# Arguments that are no part's.
_OF_CALL = ("softmax_scale", "softcap", "sinks", "stream", "backend")
# Layouts of cascades that were found to fit, so that later calls need not look again, with the bytes from the
# pointer of each array that it touches, and its layout.
_MAX_SOUND = 1024
_Memory = tuple[tuple[tuple[int, int], ...], tuple[ArrayLayout | None, ...]]
_sound: dict[Any, _Memory] = {}


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
    causal: in the last part hide key j from query i unless j <= i + seqlen_kv - seqlen_q, with the seqlen_kv
        of that part, in a KVCache of each sequence; all queries see all keys of the other parts. If the last
        part has seqlen_q keys or more, this is causal attention over all keys. With several queries the last
        part must not be a KVCache that the batch shares.
    sinks: as in ``attention``. They join the last part alone, so that they count once.
    softmax_scale, softcap, out, return_lse, stream, backend: as in ``attention``.
    mask, mask_type, window_size, alibi_slopes, score, params: only values that have no effect: their
        positions would count from the beginning of a part.

    Returns ``out``, or ``(out, lse)``, as ``attention``. Parts are merged as by ``merge``, each result
    rounded to the dtype.

    Raises what ``attention`` raises, with ``parts[i]`` in front of an error about a part; BadParam for an
    empty list, for a part that is neither a pair nor a KVCache, for a KVCache of one length that the batch
    cannot share, for a mask, a window, slopes or a score, and for a tensor that requires a gradient, which
    cascade does not compute.
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
    parts = _parts(parts)
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    if q is None:
        raise NullPointer(f"{arg('q')} is None; expected an array")
    of_parts = {f"parts[{i}]: {name}": x for i, part in enumerate(parts) for name, x in _named(part).items()}
    if any(x is not None and arrays.kind_of(x) is None for x in (q, *of_parts.values())):
        in_caches = [
            f"parts[{i}]: {name}"
            for i, part in enumerate(parts)
            if isinstance(part, KVCache)
            for name in _named(part)
        ]
        beside = {"sinks": sinks, "out": out}
        dlpack.check_libraries({"q": q} | of_parts | beside, in_caches)
        with naming(dlpack.own_libraries({"q": q} | beside | of_parts)):
            options = {"softmax_scale": softmax_scale, "softcap": softcap, "backend": backend}
            with contextlib.suppress(dlpack.Traced):
                return _cascade_adopted(
                    q, parts, sinks, out, stream, causal, softmax_scale, softcap, return_lse, backend
                )
            return _traced(q, parts, sinks, out, causal, return_lse, options | {"stream": stream})
    traced = arrays.kind_of(q).watched(q)
    check_rank(arrays.shape_if_any(q, "q"))
    try:
        if traced:
            from flashgen.call import compiled

            compiled.check(
                {"q": q, "sinks": sinks, "out": out} | of_parts, stream, "cascade()", {"out", "sinks"}
            )
        else:
            _check_cascade(q, parts, out, causal)
            _check_sinks(q, sinks)
        folded, calls = None, []
        with_diagonal = len(parts) - 1 if causal and q.shape[-3] > 1 else None
        for index, part in enumerate(parts):
            diagonal = index == with_diagonal
            if (
                _is_shared(q, part)
                and not diagonal
                and len(parts) > 1
                and q.shape[0] * q.shape[1] <= MAX_SEQLEN
            ):
                folded = _folded(q, stream) if folded is None else folded
                calls.append((folded, part, False))
            else:
                calls.append((q, _in_batch(q, part, index), diagonal))
        of_caches: dict[int, tuple[Plan, Ready]] = {}
        if not traced and len(parts) > 1:  # a single call checks itself
            of_caches = _ready_caches(calls, softmax_scale, softcap, sinks, out, stream, backend)
    except torchkind.RequiresGradient as error:
        raise error.of("cascade()") from None
    common = {"softmax_scale": softmax_scale, "softcap": softcap, "stream": stream, "backend": backend}
    if len(parts) == 1:
        (_, part, _) = calls[0]
        return attention(
            q, *_keys(part), causal=causal, sinks=sinks, out=out, return_lse=return_lse, **common
        )
    results = []
    for index, (seen, part, diagonal) in enumerate(calls):
        if index in of_caches:
            plan, (work, given, _, handle, _) = of_caches[index]
            work(given, handle)
            found = plan.results_of(given)
        else:
            joined = sinks if index == len(calls) - 1 else None
            found = attention(seen, *_keys(part), causal=diagonal, sinks=joined, return_lse=True, **common)
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
        diagonal, seen, keys = causal and is_last, q, _keys(part)
        folds = _is_shared(q, part) and len(parts) > 1 and not (diagonal and q.shape[1] > 1)
        if folds and q.shape[0] * q.shape[1] <= MAX_SEQLEN:
            seen = q.reshape(1, -1, *q.shape[2:])
        elif _is_shared(q, part) and not isinstance(part, KVCache):
            keys = tuple(jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in part)
        elif _is_shared(q, part):
            raise _unshared(q, index)
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
            if error.subject in _OF_CALL:
                raise
            raise type(error)(f"parts[{index}]: {error.message}") from None
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


def _parts(parts: Any) -> list[tuple[Any, Any] | KVCache]:
    """The parts of a cascade. Raises BadParam."""
    what = "(k, v) or a KVCache"
    check_list(parts, f"parts, each {what}")
    for index, part in enumerate(parts):
        if not isinstance(part, KVCache):
            check_pair(index, part, what)
            if any(type(x) is KVCache for x in part):
                raise BadParam(f"parts[{index}] is a pair with a KVCache; pass the KVCache alone")
    return [part if isinstance(part, KVCache) else tuple(part) for part in parts]


def _named(part: tuple[Any, Any] | KVCache) -> dict[str, Any]:
    """The arrays of a part, without the optional arrays that a KVCache lacks."""
    if isinstance(part, KVCache):
        given = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
        optional = ("pages", "index", "starts")
        return {name: x for name, x in given.items() if x is not None or name not in optional}
    return dict(zip("kv", part, strict=True))


def _keys(part: tuple[Any, Any] | KVCache) -> tuple[Any, ...]:
    """A part as arguments of ``attention``."""
    return (part,) if isinstance(part, KVCache) else part


def _ready_caches(
    calls: list[tuple[Any, Any, bool]],
    softmax_scale: Any,
    softcap: Any,
    sinks: Any,
    out: Any,
    stream: Any,
    backend: str | None,
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
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks if index == len(calls) - 1 else None,
            return_lse=True,
            stream=stream,
            backend=backend,
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
                _check_apart(out, plan.problem.operator, given)
        except FlashgenError as error:
            if error.subject in _OF_CALL:
                raise
            raise type(error)(f"parts[{index}]: {error.message}") from None
    return found_ready


def _check_sinks(q: Any, sinks: Any) -> None:
    """That sinks belong to q. Raises as ``attention``."""
    if sinks is None:
        return
    argument = ATTENTION.arguments[ATTENTION.position("sinks")]
    of_q, view = arrays.view(q, "q"), arrays.view(sinks, "sinks")
    arrays.check_libraries({"q": of_q, "sinks": view})
    check_devices({"q": of_q, "sinks": view})
    check_beside_q(argument, view, {"num_heads_q": of_q.shape[-2]}, of_q.dtype, 0)


def _check_apart(out: Any, operator: Operator, given: Sequence[Any]) -> None:
    """That out touches no lengths or table of a KVCache. Raises BadTensorStrides."""
    names = {"kv_lengths": "lengths", "kv_starts": "starts", "pages": "pages", "index": "index"}
    tables = {names[x]: given[operator.position(x)] for x in names if given[operator.position(x)] is not None}
    views = [arrays.view(out, "out"), *(arrays.view(x, name) for name, x in tables.items())]
    spans, placed = _memory(views)
    for place in overlapping(0, spans, [x.pointer for x in views], placed):
        raise BadTensorStrides(
            f"{arg('out')} overlaps {[*tables][place - 1]} in memory; pass memory of its own"
        )


def _check_cascade(q: Any, parts: list[tuple[Any, Any] | KVCache], out: Any, causal: bool) -> None:
    """Check, before the first call, that attention takes each pair; messages name the part. Of a KVCache only
    k and v are checked here; `_ready_caches` checks the rest.
    """
    kind = arrays.kind_of(q)
    is_cache = tuple(isinstance(part, KVCache) for part in parts)
    pairs = [(part.k, part.v) if isinstance(part, KVCache) else part for part in parts]
    given = (q, out, *(x for pair in pairs for x in pair))
    key = None
    if are_all(kind, given):
        try:
            layouts, pointers = kind.read(given)
            key = (kind.name, layouts, causal, is_cache)
        except RuntimeError:  # an array without memory: its view says so
            key = None
        memory = _sound.get(key)
        if memory is not None:
            _check_memory(pointers, *memory)
            return
    view, out_view = arrays.view(q, "q"), None if out is None else arrays.view(out, "out")
    arrays.check_libraries({"q": view, "out": out_view})
    for index, pair in enumerate(pairs):
        try:
            views = [arrays.view(x, name) for x, name in zip(pair, ("k", "v"), strict=True)]
            arrays.check_libraries({"q": view, "k": views[0], "v": views[1]})
            if not is_cache[index] and views[0].shape[:-1] != views[1].shape[:-1]:  # batch 1 would hide it
                raise BadTensorShape(
                    f"{arg('v')} has shape {views[1].shape} but {arg('k')} has {views[0].shape}; all but the "
                    "last dimension must be the same"
                )
            if not views[1].shape:
                raise BadTensorShape(f"{arg('v')} has no dimensions; its last one is head_dim_v")
            width, first = views[1].shape[-1:], pairs[0][1].shape[-1:]
            if width != first:
                raise BadTensorShape(f"{arg('v')} has head_dim_v {width[0]} but v of parts[0] has {first[0]}")
            if is_cache[index]:
                element = check_dtypes({"q": view, "k": views[0], "v": views[1]}, double=False)
                for name, each in zip(("k", "v"), views, strict=True):
                    check_strides(ATTENTION.arguments[ATTENTION.position(name)], each, DTYPE_BYTES[element])
                check_out(out_view, view, views[1])
            else:
                normalise_attention(view, *_views_in_batch(view, *views), out=out_view, causal=causal)
        except FlashgenError as error:
            raise type(error)(f"parts[{index}]: {error.message}") from None
    if key is not None:
        if len(_sound) >= _MAX_SOUND:
            _sound.clear()
        memory = _sound[key] = _memory([None if x is None else kind.view(x) for x in given])
        _check_memory(pointers, *memory)


def _memory(views: Sequence[ArrayView | None]) -> _Memory:
    """The address ranges of arrays from their pointers, in the caller's shapes."""
    argument = ATTENTION.arguments[0]  # the same for all: nothing but their layout is looked at
    placed = tuple(
        None
        if x is None
        else ArrayLayout(argument, x.shape, normal_strides(x.shape, x.strides or ()), x.dtype)
        for x in views
    )
    return tuple((0, 0) if each is None else each.span() for each in placed), placed


def _check_memory(
    pointers: Sequence[int], spans: Sequence[tuple[int, int]], placed: Sequence[ArrayLayout | None]
) -> None:
    """That each of q, out, and k and v of each part begins where attention takes it, and that out touches no
    other one: several calls read these. Raises NullPointer, BadTensorStrides.
    """
    q, k, v, out = (ATTENTION.arguments[ATTENTION.positions[name]] for name in ("q", "k", "v", "out"))
    check_memory((q, out), spans[:2], pointers[:2], ())
    for index, first in enumerate(range(2, len(spans), 2)):
        part = slice(first, first + 2)
        with naming({name: f"parts[{index}]: {name}" for name in "kv"}):
            check_memory((k, v), spans[part], pointers[part], ())
    if spans[1] == (0, 0):
        return
    for place in overlapping(1, spans, pointers, placed):
        name = "q" if place == 0 else f"{'kv'[place % 2]} of parts[{place // 2 - 1}]"
        raise BadTensorStrides(f"{arg('out')} overlaps {name} in memory; pass memory of its own")


def _views_in_batch(q: ArrayView, k: ArrayView, v: ArrayView) -> Sequence[ArrayView]:
    """The views of k and v with the batch of q, where a shared part has batch 1."""
    if not _is_shared(q, (k, v)):
        return k, v
    return [
        dataclasses.replace(x, shape=(q.shape[0], *x.shape[1:]), strides=x.strides and (0, *x.strides[1:]))
        for x in (k, v)
    ]


def _in_batch(q: Any, part: tuple[Any, Any] | KVCache, index: int) -> tuple[Any, Any] | KVCache:
    """A part with the batch of q: of a shared one views that have its elements for each batch entry. Raises
    BadParam for a KVCache, whose lengths cannot be repeated.
    """
    if not _is_shared(q, part):
        return part
    if isinstance(part, KVCache):
        raise _unshared(q, index)
    return tuple(arrays.kind_of(x).broadcast(x, (q.shape[0], *x.shape[1:])) for x in part)


def _unshared(q: Any, index: int) -> BadParam:
    return BadParam(
        f"parts[{index}] is a KVCache of one length for {q.shape[0]} batch entries of {arg('q')}, which "
        "share it only beside another part, and with causal and several queries not as the last one; pass a "
        "length for each"
    )


def _is_shared(q: Any, part: tuple[Any, Any] | KVCache) -> bool:
    """Whether a part of batch 1 serves several batch entries of q."""
    if isinstance(part, KVCache):
        lengths = arrays.shape_if_any(part.lengths, "lengths")
        return len(q.shape) == 4 and tuple(lengths) == (1,) and q.shape[0] != 1
    k, v = part
    return len(q.shape) == len(k.shape) == len(v.shape) == 4 and k.shape[0] == v.shape[0] == 1 != q.shape[0]


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
    stream: Any,
    causal: bool,
    softmax_scale: float | None,
    softcap: float | None,
    return_lse: bool,
    backend: str | None,
) -> Any:
    """`cascade` for arrays that flashgen does not read directly: adopt them, and hand the results back."""
    if out is not None and dlpack.immutable(out):
        raise BadParam(
            f"{arg('out')} has type {type(out).__name__}, whose memory cannot be written to; call without "
            f"{arg('out')}"
        )
    native_q = dlpack.adopt(q, "q", stream)
    native = []
    for index, part in enumerate(parts):
        given = {name: dlpack.adopt(x, f"parts[{index}]: {name}", stream) for name, x in _named(part).items()}
        native.append(KVCache(**given) if isinstance(part, KVCache) else tuple(given.values()))
    results = cascade(
        native_q,
        native,
        causal=causal,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=None if sinks is None else dlpack.adopt(sinks, "sinks", stream),
        out=None if out is None else dlpack.adopt(out, "out", stream),
        return_lse=True,
        stream=stream,
        backend=backend,
    )
    inputs = (native_q, *(x for part in native for x in _named(part).values()))
    lse = dlpack.hand_back(results[1], q, inputs, stream)
    result = dlpack.hand_back(results[0], q, inputs, stream) if out is None else out
    return (result, lse) if return_lse else result
