"""The parts of a cascade: arrays and caches, and what must hold of them before the first call."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from flashgen.api.merge import check_list, check_pair
from flashgen.call.compute import are_all
from flashgen.call.kvcache import KVCache
from flashgen.errors import BadParam, BadTensorShape, BadTensorStrides, FlashgenError, arg, naming
from flashgen.operators.arguments import ArrayLayout, check_devices, check_layouts, normal_strides
from flashgen.operators.attention import ATTENTION
from flashgen.operators.attention import normalise as normalise_attention
from flashgen.operators.contract import check_beside_q, check_dtypes, check_out
from flashgen.operators.kvcodes import kv_dtype_of
from flashgen.operators.overlaps import check_memory, overlapping
from flashgen.runtime import arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.operator import Operator


# Layouts of cascades that were found to fit, so that later calls need not look again, with the bytes from the
# pointer of each array that it touches, and its layout.
_MAX_SOUND = 1024
_Memory = tuple[tuple[tuple[int, int], ...], tuple[ArrayLayout | None, ...]]
_sound: dict[Any, _Memory] = {}


def parts_of(parts: Any) -> list[tuple[Any, Any] | KVCache]:
    """The parts of a cascade. Raises BadParam."""
    what = "(k, v) or a KVCache"
    check_list(parts, f"parts, each {what}")
    for index, part in enumerate(parts):
        if not isinstance(part, KVCache):
            check_pair(index, part, what)
            if any(type(x) is KVCache for x in part):
                raise BadParam(f"parts[{index}] is a pair with a KVCache; pass the KVCache alone")
    return [part if isinstance(part, KVCache) else tuple(part) for part in parts]


# The fields of a KVCache that are no arrays.
OF_HOST = ("head_dim_v", "kv_dtype")


def arrays_by_name(part: tuple[Any, Any] | KVCache) -> dict[str, Any]:
    """The arrays of a part, without the optional arrays that a KVCache lacks."""
    if isinstance(part, KVCache):
        names = [each.name for each in dataclasses.fields(part) if each.name not in OF_HOST]
        given = {name: getattr(part, name) for name in names}
        optional = ("pages", "index", "starts", "k_scale", "v_scale")
        return {name: x for name, x in given.items() if x is not None or name not in optional}
    return dict(zip("kv", part, strict=True))


def keys_of(part: tuple[Any, Any] | KVCache) -> tuple[Any, ...]:
    """A part as arguments of ``attention``."""
    return (part,) if isinstance(part, KVCache) else part


def check_sinks(q: Any, sinks: Any) -> None:
    """That sinks belong to q. Raises as ``attention``."""
    if sinks is None:
        return
    argument = ATTENTION.arguments[ATTENTION.position("sinks")]
    of_q, view = arrays.view(q, "q"), arrays.view(sinks, "sinks")
    arrays.check_libraries({"q": of_q, "sinks": view})
    check_devices({"q": of_q, "sinks": view})
    check_beside_q(argument, view, {"num_heads_q": of_q.shape[-2]}, of_q.dtype, 0)


def check_apart(out: Any, operator: Operator, given: Sequence[Any]) -> None:
    """That out touches no lengths or table of a KVCache. Raises BadTensorStrides."""
    names = {"kv_lengths": "lengths", "kv_starts": "starts", "pages": "pages", "index": "index"}
    tables = {names[x]: given[operator.position(x)] for x in names if given[operator.position(x)] is not None}
    views = [arrays.view(out, "out"), *(arrays.view(x, name) for name, x in tables.items())]
    spans, placed = _memory(views)
    for place in overlapping(0, spans, [x.pointer for x in views], placed):
        raise BadTensorStrides(
            f"{arg('out')} overlaps {[*tables][place - 1]} in memory; pass separate memory"
        )


def check_parts(q: Any, parts: list[tuple[Any, Any] | KVCache], out: Any, causal: bool) -> None:
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
            key = (kind.name, layouts, causal, tuple(getattr(part, "kv_dtype", False) for part in parts))
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
                of_part = {"q": view, "k": views[0], "v": views[1]}
                kv_dtype = kv_dtype_of(of_part, parts[index].kv_dtype, has_lengths=True)
                check_dtypes({"q": view} if kv_dtype else of_part, double=False)
                check_layouts(ATTENTION.arguments, {"k": views[0], "v": views[1]})
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
        raise BadTensorStrides(f"{arg('out')} overlaps {name} in memory; pass separate memory")


def _views_in_batch(q: ArrayView, k: ArrayView, v: ArrayView) -> Sequence[ArrayView]:
    """The views of k and v with the batch of q, where a shared part has batch 1."""
    if not is_shared(q, (k, v)):
        return k, v
    return [
        dataclasses.replace(x, shape=(q.shape[0], *x.shape[1:]), strides=x.strides and (0, *x.strides[1:]))
        for x in (k, v)
    ]


def in_batch(q: Any, part: tuple[Any, Any] | KVCache, index: int) -> tuple[Any, Any] | KVCache:
    """A part with the batch of q: of a shared one views that have its elements for each batch entry. Raises
    BadParam for a KVCache, whose lengths cannot be repeated.
    """
    if not is_shared(q, part):
        return part
    if isinstance(part, KVCache):
        raise unshared(q, index)
    return tuple(arrays.kind_of(x).broadcast(x, (q.shape[0], *x.shape[1:])) for x in part)


def unshared(q: Any, index: int) -> BadParam:
    return BadParam(
        f"parts[{index}] is a KVCache of one length for {q.shape[0]} batch entries of {arg('q')}, which "
        "share it only beside another part, and with causal and several queries not as the last one; pass a "
        "length for each"
    )


def is_shared(q: Any, part: tuple[Any, Any] | KVCache) -> bool:
    """Whether a part of batch 1 serves several batch entries of q."""
    if isinstance(part, KVCache):
        lengths = arrays.shape_if_any(part.lengths, "lengths")
        return len(q.shape) == 4 and tuple(lengths) == (1,) and q.shape[0] != 1
    k, v = part
    return len(q.shape) == len(k.shape) == len(v.shape) == 4 and k.shape[0] == v.shape[0] == 1 != q.shape[0]
