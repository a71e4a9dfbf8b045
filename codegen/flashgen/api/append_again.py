"""``attention(append=)`` of tensors that are like an earlier call's: straight to both plans, as in
`call.shortcuts`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flashgen.api.queue_both import queue_both
from flashgen.call import compute, shortcuts
from flashgen.call.kvcache import KVCache, Rotary
from flashgen.call.record import AttentionCall
from flashgen.errors import FlashgenError
from flashgen.operators.append import APPEND
from flashgen.runtime.arrays import tensor_kind

if TYPE_CHECKING:
    from flashgen.call.record import Call
    from flashgen.call.request import Request
    from flashgen.runtime.plans import Plan

_OF_CACHE = ("k", "v", "lengths", "pages", "index", "starts", "k_scale", "v_scale")
_of_cache, _of_rotary = attrgetter(*_OF_CACHE), attrgetter("cos", "sin", "positions")
_GIVEN = ("q", "cu_seqlens_q", "out")
_of_call = attrgetter(*_GIVEN)
_BESIDE = (*_GIVEN, "k", "append", "rotary")
_KINDS = {x.name: x.kind for x in AttentionCall.fields if x.name not in _BESIDE}
_other_arrays = attrgetter(*(name for name, kind in _KINDS.items() if kind == "array"))
_options = attrgetter(*(name for name, kind in _KINDS.items() if kind != "array"))
_NOTHING = {type(None)}
# Where the tuple of a call's arrays goes on: with nothing, and then with what the append has written.
_ABSENT = len(_GIVEN) + len(_OF_CACHE) + len(("k_new", "v_new", "cos", "sin", "positions"))
_WRITTEN = APPEND.position("total_lengths"), APPEND.position("q_rotated")


def again(call: Call) -> tuple[Plan, Any] | None:
    """The plan of the attention and the arrays of its queued call; None where no earlier call was like it."""
    described = _of(call)
    if described is None:
        return None
    key, arrays = described
    try:
        way, pointers = compute.recent(key, arrays)
    except TypeError:  # an option is not hashable
        return None
    if pointers is None:
        return None
    append, attention = way
    given = append.in_order((*arrays, None))
    try:
        first = append.plan.ready(given, append.in_order((*pointers, 0)), (), None)
        _, written, addresses, _, _ = first
        total, rotated = _WRITTEN
        given_next = attention.in_order((*arrays, None, written[total], written[rotated]))
        its_pointers = attention.in_order((*pointers, 0, addresses[total], addresses[rotated]))
        second = attention.plan.ready(given_next, its_pointers, attention.scalars, None)
        queue_both(append.plan, first, attention.plan, second, (*given_next, None), given)
    except FlashgenError:  # before anything is queued; the way of a first call raises it by the right names
        return None
    return attention.plan, second[1]


def keep(
    call: Call, append: Plan, requested: Request, attention: Plan, request: Request, written: tuple[Any, ...]
) -> None:
    """After a call: keep its plans for calls like it. ``requested`` was for the append, whose arrays became
    ``written``.
    """
    described = _of(call)
    if described is None or (kind := tensor_kind(call.q)).expecting is None:
        return
    key, arrays = described
    places = {id(None): _ABSENT}
    for place, x in enumerate((*arrays, None, *(written[place] for place in _WRITTEN))):
        if x is not None:
            places.setdefault(id(x), place)
    try:
        of_append, of_attention = (tuple(places[id(x)] for x in of.arrays) for of in (requested, request))
    except KeyError:  # an array was adopted
        return
    shortcuts.keep(key, arrays, kind, (append, of_append, ()), (attention, of_attention, request.scalars))


def _of(call: Call) -> tuple[Any, tuple[Any, ...]] | None:
    """The key of a call, and its arrays; None for a call that is not plain."""
    cache, rotary, new = call.k, call.rotary, call.append
    kind = tensor_kind(call.q)
    if kind is None or kind.is_compiling() or kind.on_host(call.q) or not call.is_plain():
        return None
    if type(cache) is not KVCache or type(new) is not tuple or len(new) != 2 or call.stream is not None:
        return None
    if type(rotary) is Rotary:
        interleaved, tables = rotary.interleaved, _of_rotary(rotary)
    elif rotary is None:
        interleaved, tables = None, (None, None, None)
    else:
        return None
    if not _NOTHING.issuperset(map(type, _other_arrays(call))):
        return None
    options = interleaved, cache.head_dim_v, cache.kv_dtype, *_options(call)
    arrays = *_of_call(call), *_of_cache(cache), *new, *tables
    # 1, 1.0 and True are equal, and not each is a flag.
    return ("append", options, *map(type, options)), arrays
