"""``append``: new keys and values go into a KV cache; alone, or before the attention over it."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Never

from flashgen.call.compute import MAX_PLANS, are_all, compute, make_plan, ready
from flashgen.call.keywords import unexpected
from flashgen.call.kvcache import FIELDS, KVCache, Rotary
from flashgen.call.request import Request, request_of
from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    FlashgenError,
    NullPointer,
    arg,
    naming,
)
from flashgen.operators.append import APPEND
from flashgen.operators.arguments import flag, length_bound, overlapping
from flashgen.operators.maskoptions import NO_WINDOW, mask_type_name, window_of
from flashgen.runtime import arrays, check, dlpack, hostarrays, torchkind
from flashgen.runtime.adopted import adopted, cache_arrays
from flashgen.runtime.plans import TAKES, workspace_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashgen.call.record import Call
    from flashgen.families.variant import Variant
    from flashgen.operators.arguments import ArrayLayout
    from flashgen.runtime.arrays import Arrays
    from flashgen.runtime.plans import Plan, Ready
    from flashgen.schedule.plan import Step

_TOTAL, _ROTATED = APPEND.position("total_lengths"), APPEND.position("q_rotated")
# The arrays of an append that the attention after it takes as well.
_HANDED_ON = itemgetter(
    *map(APPEND.position, ("k_cache", "v_cache", "cu_seqlens_new", "total_lengths", "index", "pages"))
)
# Arguments of that attention which its caller does not name: they are of the append, or not there.
_OF_APPEND = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "kv_lengths", "index", "pages"}


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
    **unknown: Never,
) -> tuple[Any, Any]:
    """Write new keys and values into a cache, after the ones that each sequence has there.

    cache: a ``KVCache``. Its k and v are written to, its lengths are not. New token i of sequence b goes to
        position lengths[b] + i; all else in the cache stays as it is.
    k_new, v_new: (batch, seqlen_new, num_heads_kv, head_dim), for v_new with head_dim_v; strides as in
        ``attention``.
    rotary: rotates the new keys on the way, each to its position.
    q: (batch, seqlen_q, num_heads_q, head_dim), to be rotated as well; only with ``rotary``.
    q_positions: "each" rotates query i to position lengths[b] + i, as causal attention and windows want, or
        to where the ``positions`` of ``rotary`` have it; "first" rotates all queries of a sequence to
        lengths[b]. "first" needs q, and a ``rotary`` without positions.
    cu_seqlens_new: int32 (batch + 1,), for packed tokens: k_new, v_new and q are (tokens, heads, head_dim),
        and sequence b has those from cu_seqlens_new[b] to cu_seqlens_new[b + 1]; positions are (tokens,).
    stream, backend: as in ``attention``.

    Returns (total_lengths, q_rotated), new arrays of the kind of k_new: total_lengths, int32 (batch,), is
    lengths and the new tokens, at most the capacity; q_rotated is None without q.

    On a GPU nobody reads lengths on the host. A token whose position is at or past the capacity, or past the
    rows of cos, or whose page or row the cache does not have, is left out there, and so is such a query in
    q_rotated; a place of two tokens gets one of them, or parts of both. On the CPU all this is an error.

    Raises, before anything is queued or written, BadParam, NullPointer, BadTensorShape, BadTensorDtype,
    BadTensorStrides or DeviceTypeNotSupported for what does not fit; BadParam also for a tensor that requires
    a gradient, as there is none.
    """
    if unknown:
        raise unexpected(append, unknown)
    try:
        request = _request(cache, k_new, v_new, rotary, q, q_positions, cu_seqlens_new, stream, backend)
        first = request.arrays[0]
        kind = arrays.kind_of(first)
        if kind is not None and kind.watched(first):
            from flashgen.call import compiled

            return compiled.append(request)
        total, *rotated = compute(request, kind)[2:]
    except torchkind.RequiresGradient as error:
        refused = error.of("append()")
        refused.rename(FIELDS)
        raise refused from None
    except FlashgenError as error:
        error.rename(FIELDS)
        raise
    results = (total, rotated[0] if rotated else None)
    if arrays.kind_of(k_new) is None:
        return tuple(
            None if x is None else dlpack.hand_back(x, k_new, request.arrays, stream) for x in results
        )
    return results


class AppendPlan:
    """``append`` and then ``attention``, for calls of one layout; made by ``flashgen.plan(append=)``.

    ``append`` and ``attention`` are the plans of the two. ``steps`` are the launches of both in order,
    ``variant`` is the main kernel of the attention and ``source`` its CUDA, ``workspace_bytes`` the memory
    that a call needs beyond inputs and outputs. May be called from many threads.
    """

    __slots__ = ("_interleaved", "_named", "append", "attention")

    def __init__(self, append: Plan, attention: Plan, interleaved: bool | None) -> None:
        self.append, self.attention = append, attention
        self._interleaved = interleaved
        operator = attention.problem.operator
        # What the attention alone takes, in order.
        names = (*operator.positions, *operator.scalars)
        self._named = {name: None for name in names if name not in _OF_APPEND}

    @property
    def variant(self) -> Variant | None:
        return self.attention.variant

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.append.steps + self.attention.steps

    @property
    def source(self) -> str:
        return self.attention.source

    @property
    def workspace_bytes(self) -> int:
        return self.attention.workspace_bytes

    def __repr__(self) -> str:
        return f"<flashgen.AppendPlan {self.append!r}, {self.attention!r}>"

    def __call__(
        self,
        /,  # a parameter of a score may be called self
        q: Any,
        cache: KVCache,
        append: tuple[Any, Any],
        *,
        rotary: Rotary | None = None,
        cu_seqlens_q: Any = None,
        total_lengths: Any = None,
        q_rotated: Any = None,
        stream: Any = None,
        workspace: Any = None,
        **named: Any,
    ) -> Any:
        """``attention(q, cache, append=append, rotary=rotary)`` of arrays that have the layouts of the plan.

        total_lengths, q_rotated: receive what ``flashgen.append`` returns; contiguous, allocated where they
            are not given. In a CUDA graph they must live as long as the graph, as ``out`` and ``workspace``.
        named: ``out``, ``lse``, ``mask``, the arrays of a score modification, and scalars, as for a ``Plan``.

        Returns and raises what a call of a ``Plan`` does. All is checked before anything is queued.
        """
        if not named.keys() <= self._named.keys():
            raise self._misnamed(named)
        try:
            given = _arrays(cache, *_pair(append), rotary, q, cu_seqlens_q, total_lengths, q_rotated)
            if self._interleaved != _interleaved(rotary):
                mode = self._interleaved
                made_with = "none; pass None" if mode is None else f"interleaved={mode}; pass such a Rotary"
                raise BadParam(f"rotary is {rotary}; the plan was made with {made_with}")
            if cache.k is None or cache.v is None:  # outputs of the operator, which it would allocate
                raise NullPointer(f"{'k' if cache.k is None else 'v'} is None; expected an array")
            own = {**dict(zip(APPEND.positions, given, strict=True)), **named, "q": q}
            dlpack.check_libraries(own, cache_arrays(own))
            native_q, given = dlpack.adopt(q, "q", stream), _adopted(given, stream)
            first = self.append.ready(given, self.append.pointers(given), (), stream)
            second, given = self._attending(native_q, first[1], named, stream, workspace)
            _queue(self.append, first, self.attention, second, (*given, workspace))
        except FlashgenError as error:
            own = dlpack.own_libraries({"q": q, **named})
            error.rename({"cu_seqlens_new": "cu_seqlens_q", TAKES: self._takes(), **own, **FIELDS})
            if isinstance(error, torchkind.RequiresGradient):
                raise error.of("plans") from None
            raise
        return _handed(self.attention, second, q, stream)

    def _attending(
        self, q: Any, appended: tuple[Any, ...], named: dict[str, Any], stream: Any, workspace: Any
    ) -> tuple[Ready, Arrays]:
        """The call of the attention, of q and the arrays of the append, and what it was given. Raises what is
        wrong with that.
        """
        k, v, cu_seqlens, total, index, pages = _HANDED_ON(appended)
        rotated = appended[_ROTATED]
        seen = q if rotated is None else rotated
        try:
            given, scalars = self.attention.bound((seen, k, v, cu_seqlens, None, total, index, pages), named)
            pointers = self.attention.pointers(given)
            if pointers is None:  # a named one is of another library
                operator = self.attention.problem.operator
                by_name = {argument.name: x for argument, x in zip(operator.arguments, given, strict=True)}
                given = tuple(adopted(operator, by_name, stream).values())
                pointers = self.attention.pointers(given)
            return self.attention.ready(given, pointers, scalars, stream, workspace), given
        except FlashgenError as error:
            names = {"kv_lengths": "total_lengths", TAKES: self._takes()}
            if rotated is not None:
                names["q"] = "q_rotated"
            error.rename(names)
            raise

    def _misnamed(self, named: dict[str, Any]) -> BadParam:
        """The error of a call that names what the plan does not take."""
        wrong = next(name for name in named if name not in self._named)
        others = ("q", "cache", "append", "rotary", "cu_seqlens_q", "total_lengths", "q_rotated")
        known = ", ".join((*others, *self._named, "stream", "workspace"))
        return BadParam(f"{wrong} is no argument; the arguments are {known}")

    def _takes(self) -> str:
        """Which inputs a call has to give, for a message."""
        given = [name for plan in (self.append, self.attention) for name in plan.inputs()]
        cache, rotary = (
            " and ".join(name for name in names if name in given)
            for names in (("lengths", "pages", "index"), ("cos", "sin", "positions"))
        )
        rotary = [f"rotary with {rotary}"] if rotary else []
        lengths = ["cu_seqlens_q"] if "cu_seqlens_q" in given else []
        alone = [name for name in self._named if name in given]
        taken = ["q", f"a KVCache with {cache}", "append=(k_new, v_new)", *rotary, *lengths, *alone]
        return f"the plan takes {', '.join(taken)}"


def requested_append(call: Call) -> Request:
    """What ``attention(append=, rotary=)`` requests of the operator ``append``, with native arrays. Raises
    BadParam, also for a bound below the number of new tokens; and BadTensorShape where it is not said to
    which positions queries are to be rotated, and for packed queries that are not as many as the new tokens.
    """
    q, cache, rotary, cu_seqlens_q = call.q, call.k, call.rotary, call.cu_seqlens_q
    if call.append is None:
        raise BadParam(
            f"{arg('rotary')} was given without append; it rotates what goes into a cache, and the queries"
        )
    if not isinstance(cache, KVCache):
        raise BadParam(
            f"{arg('append')} was given, and {arg('k')} has type {type(cache).__name__}; append writes into "
            f"a cache, so it needs {arg('k')} to be a flashgen.KVCache, and no {arg('v')}"
        )
    moves = flag("causal", call.causal) or mask_type_name(call.mask_type) == "causal_bottom_right"
    positions = "each" if moves or window_of(call.window_size) != NO_WINDOW else "first"
    new = _pair(call.append)
    dlpack.check_libraries({"q": q, "k_new": new[0], "k": cache.k}, ("k",))
    if call.max_seqlen_kv is not None and cu_seqlens_q is None:
        _check_bound(call.max_seqlen_kv, new[0])
    if rotary is None and cu_seqlens_q is not None:
        _check_packed(q, new[0])
    if isinstance(rotary, Rotary) and rotary.positions is None and cu_seqlens_q is None:
        _check_rotated(q, new[0], positions, call.mask is not None)
    if rotary is None or getattr(rotary, "positions", None) is not None:
        positions = "each"  # nothing is rotated, or to the positions of rotary
    q = None if rotary is None else q
    return _request(cache, *new, rotary, q, positions, cu_seqlens_q, call.stream, call.backend)


def _check_bound(max_seqlen_kv: Any, k_new: Any) -> None:
    """That the bound, which is for the keys with the new ones, is not below these alone."""
    shape = getattr(k_new, "shape", ())
    most = length_bound("max_seqlen_kv", max_seqlen_kv)
    if len(shape) > 2 and most < shape[-3]:
        raise BadParam(
            f"{arg('max_seqlen_kv')} is {most} but {arg('k_new')} has {shape[-3]} tokens of each sequence; "
            "it counts the new keys as well"
        )


def _check_packed(q: Any, k_new: Any) -> None:
    """That packed queries and new tokens, which have one cu_seqlens, are as many; where queries are rotated
    the operator itself sees to it.
    """
    shapes = arrays.shape_if_any(q, "q"), arrays.shape_if_any(k_new, "k_new")
    queries, tokens = (shape[0] if len(shape) == 3 else None for shape in shapes)
    if None not in (queries, tokens) and queries != tokens:
        raise BadTensorShape(
            f"{arg('q')} has {queries} tokens but {arg('k_new')} has {tokens}; {arg('cu_seqlens_q')} counts "
            "the tokens of both, so their numbers must be equal"
        )


def _check_rotated(q: Any, k_new: Any, positions: str, is_masked: bool) -> None:
    """That padded queries are at positions which the call says. Raises what `asked_to_append` does."""
    shapes = arrays.shape_if_any(q, "q"), arrays.shape_if_any(k_new, "k_new")
    queries, tokens = (shape[-3] if len(shape) > 2 else None for shape in shapes)
    if None in (queries, tokens):
        return  # `append` says what is wrong
    if positions == "each" and queries != tokens:
        raise BadTensorShape(
            f"{arg('q')} has seqlen_q {queries} but {arg('k_new')} has seqlen_new {tokens}; with rotary, "
            "query i is rotated to the position of new token i, so pass as many, or call append() first and "
            f"rotate {arg('q')} yourself"
        )
    if positions == "first" and is_masked and queries > 1:
        raise BadParam(
            f"{arg('mask')} and rotary were given, with {queries} queries: a {arg('mask')} does not say at "
            "which positions they are; pass Rotary(..., positions=...), or causal=True or "
            f"{arg('window_size')} beside the {arg('mask')}"
        )


def append_and_attend(call: Call, append_request: Request) -> Any:
    """``attention(append=)``. Raises what is wrong with the append or the attention before anything is
    queued.
    """
    append, first = ready(append_request)
    request = _attention_after(call, first)
    attention, second = _attending(ready, request, call)
    _queue(append, first, attention, second, (*request.arrays, None))
    return _handed(attention, second, call.q, call.stream)


def append_plan(call: Call, append_request: Request) -> AppendPlan:
    """``plan(append=)``; arguments as in `append_and_attend`."""
    append = make_plan(append_request)
    first = append.ready(append_request.arrays, append.pointers(append_request.arrays), (), None)
    attention = _attending(make_plan, _attention_after(call, first), call)
    return AppendPlan(append, attention, _interleaved(call.rotary))


def _attention_after(call: Call, first: Ready) -> Request:
    """What a call requests of attention, of the rotated q over the cache as its append will leave it."""
    written = first[1]
    rotated = written[_ROTATED]
    return request_of(
        call.replace(
            q=call.q if rotated is None else rotated,
            k=dataclasses.replace(call.k, lengths=written[_TOTAL]),
        )
    )


def _attending(make: Callable[[Request], Any], request: Request, call: Call) -> Any:
    """What ``make``, `ready` or `make_plan`, makes of the attention after an append.

    Raises as it does, but that dtypes have to be the cache's, where for attention alone q's is the norm.
    """
    named = request.by_name()
    alone = {name: x for name, x in named.items() if name not in _OF_APPEND}
    dlpack.check_libraries({"q": call.q} | alone)
    if any(x is not None and arrays.kind_of(x) is None for x in request.arrays):  # others are of the append
        stream = request.stream if make is ready else None
        request.arrays = tuple(adopted(request.operator, named, stream).values())
    try:
        return make(request)
    except BadTensorDtype:
        of_q, of_k = (arrays.view(named[name], name).dtype for name in ("q", "k"))
        if of_q == of_k:
            raise
        raise BadTensorDtype(
            f"{arg('q')} has dtype {of_q}; expected {of_k}, as the cache has dtype {of_k}"
        ) from None


def _request(
    cache: Any,
    k_new: Any,
    v_new: Any,
    rotary: Any,
    q: Any,
    q_positions: str,
    cu_seqlens_new: Any,
    stream: Any,
    backend: str | None,
) -> Request:
    """What a call requests of the operator ``append``, with native arrays. Raises BadParam."""
    values, options = _given(cache, k_new, v_new, rotary, q, q_positions, cu_seqlens_new)
    return Request(APPEND, _adopted(values, stream), options, (), stream, backend)


def request_by_name(call: Mapping[str, Any]) -> Request:
    """What ``append`` requests, of all its parameters by name. Raises BadParam."""
    names = ("cache", "k_new", "v_new", "rotary", "q", "q_positions", "cu_seqlens_new")
    return Request(APPEND, *_given(*(call[name] for name in names)))


def _given(
    cache: Any, k_new: Any, v_new: Any, rotary: Any, q: Any, q_positions: str, cu_seqlens_new: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays of a call in the order of the operator, as they are, and its options. Raises BadParam."""
    if rotary is not None and not isinstance(rotary, Rotary):
        raise _no_rotary(rotary)
    if rotary is not None and rotary.cos is None and rotary.sin is None:
        raise NullPointer(f"{arg('cos')} is None and {arg('sin')} is None; rotation takes both")
    if q is not None and rotary is None:
        raise BadParam(f"{arg('q')} was given without rotary, which alone changes it; pass both, or neither")
    if isinstance(q_positions, str) and q_positions == "first":
        if q is None:
            raise BadParam(
                f"{arg('q_positions')} is 'first' and {arg('q')} is None, which it is about; pass "
                f"{arg('q')}, or leave {arg('q_positions')} out"
            )
        if rotary.positions is not None:
            raise BadParam(
                f"{arg('q_positions')} is 'first' and rotary has positions, which say where queries "
                f"are rotated to; leave one of them out"
            )
    given = _arrays(cache, k_new, v_new, rotary, q, cu_seqlens_new)
    # A key of plans, in which 1.0, which is refused, would find the plan of True.
    return given, (_interleaved(rotary) or False, q_positions)


def _arrays(
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
    new, places = (k_new, v_new, cache.lengths, q), (cache.pages, cache.index)
    written = cache.k, cache.v, total_lengths, q_rotated
    return *new, *places, cos, sin, positions, cu_seqlens_new, *written


def _no_rotary(x: Any) -> BadParam:
    return BadParam(f"rotary has type {type(x).__name__}; expected a flashgen.Rotary, or None")


def _interleaved(rotary: Rotary | None) -> bool | None:
    """How a plan with this rotary pairs elements. Raises BadParam."""
    return None if rotary is None else flag("interleaved", rotary.interleaved)


def _adopted(given: tuple[Any, ...], stream: Any) -> tuple[Any, ...]:
    """Native arrays over the memory of these. Raises what `dlpack.adopt` does, and BadParam for a cache that
    cannot be written to, and for arrays of several libraries.
    """
    kind = arrays.kind_of(given[0])
    if are_all(kind, given):
        return given
    for name in ("k", "v"):
        x = given[APPEND.position(f"{name}_cache")]
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


def _pair(new: Any) -> tuple[Any, Any]:
    """(k_new, v_new). Raises BadParam."""
    if not isinstance(new, (tuple, list)):
        raise BadParam(f"append has type {type(new).__name__}; expected ({arg('k_new')}, {arg('v_new')})")
    if len(new) != 2:
        raise BadParam(
            f"append is a {type(new).__name__} of {len(new)}; expected ({arg('k_new')}, {arg('v_new')})"
        )
    return tuple(new)


def _handed(attention: Plan, second: Ready, q: Any, stream: Any) -> Any:
    """What the call returns, of the library of q."""
    given = second[1]
    found = attention.results_of(given)
    if arrays.kind_of(q) is not None:
        return found
    if isinstance(found, tuple):
        return tuple(dlpack.hand_back(x, q, given, stream) for x in found)
    return dlpack.hand_back(found, q, given, stream)


def _queue(append: Plan, first: Ready, attention: Plan, second: Ready, own: tuple[Any, ...]) -> None:
    """Queue both calls, in order. If lengths are checked, both calls' lengths are checked before the first is
    queued. ``own``: the arrays that the caller passed for the second call, and after them its workspace.
    """
    work, given, pointers, stream, _ = first
    next_work, next_given, next_pointers, _, _ = second
    _check_apart(append, first, attention, next_pointers, own)
    if attention.problem.device is None:  # where the second call itself would look after the first
        hostarrays.check_writable(attention.problem, next_given)
    if attention.checks_elements:
        _check_elements(append, pointers, given, attention, stream)
    work(given, stream)
    next_work(next_given, stream)
    append.tell_written(given)
    attention.tell_written(next_given)


class _Memory(NamedTuple):
    """Where the memory of two calls could overlap, as positions of arguments. ``behind`` are inputs of the
    attention alone. ``written`` are its arguments that the append writes to. ``results`` are the arrays that
    it writes itself. ``ahead`` are inputs of the append alone. ``spans`` and ``placed`` belong to the
    attention, with its workspace at the end.
    """

    behind: tuple[int, ...]
    written: dict[int, str]
    results: tuple[int, ...]
    ahead: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    placed: tuple[ArrayLayout | None, ...]
    spans_ahead: tuple[tuple[int, int], ...]
    placed_ahead: tuple[ArrayLayout, ...]


def _check_apart(
    append: Plan, first: Ready, attention: Plan, pointers: tuple[int, ...], own: tuple[Any, ...]
) -> None:
    """That neither call writes to what only the other one reads. What a call has itself its plan has looked
    at. Raises BadTensorStrides.
    """
    memory = _memory(append, attention, first[1][_ROTATED] is not None)
    arguments, count = attention.problem.operator.arguments, len(attention.problem.operator.arguments)
    for place in memory.behind:
        for other in overlapping(place, memory.spans[:count], pointers[:count], memory.placed):
            if other in memory.written:
                raise _overlap(memory.written[other], arguments[place].name)
    for place in memory.results:
        if own[place] is not None:
            pointers_ahead = pointers[place], *(first[2][other] for other in memory.ahead)
            spans_ahead = memory.spans[place], *memory.spans_ahead
            placed_ahead = memory.placed[place], *memory.placed_ahead
            for other in overlapping(0, spans_ahead, pointers_ahead, placed_ahead):
                name = "workspace" if place == count else arguments[place].name
                raise _overlap(name, APPEND.arguments[memory.ahead[other - 1]].name)


def _overlap(written: str, read: str) -> BadTensorStrides:
    return BadTensorStrides(f"{arg(written)} overlaps {arg(read)} in memory; pass memory of its own")


@lru_cache(maxsize=MAX_PLANS)
def _memory(append: Plan, attention: Plan, rotates: bool) -> _Memory:
    """The `_Memory` of the calls of two plans. A rotated q of the attention is not the caller's array."""
    problem, positions = attention.problem, attention.problem.operator.positions
    written = {"k": "k", "v": "v", "kv_lengths": "total_lengths"} | ({"q": "q_rotated"} if rotates else {})
    both = {"cu_seqlens_q", "cu_seqlens_new", "index", "pages"}
    behind = (positions[name] for name in attention.inputs() if name not in both | written.keys())
    ahead = [APPEND.position(name) for name in append.inputs() if name not in both]
    placed = append.problem.array_layouts()
    placed_ahead = tuple(placed[place] for place in ahead)
    size = attention.workspace_bytes
    return _Memory(
        tuple(behind),
        {positions[name]: seen for name, seen in written.items()},
        (*problem.results, *([len(positions)] if size else [])),
        tuple(ahead),
        (*problem.spans(), (0, size)),
        (*problem.array_layouts(), workspace_layout(size)),
        tuple(each.span() for each in placed_ahead),
        placed_ahead,
    )


def _check_elements(
    append: Plan, pointers: tuple[int, ...], given: tuple[Any, ...], attention: Plan, stream: int
) -> None:
    """Raise what the lengths and tables of both calls contradict."""
    from flashgen.operators.append_rows import total_lengths

    found = check.elements(append.problem, pointers, given, stream)
    if found is None:  # a captured graph, which may find others
        return
    APPEND.check_elements(append.problem, found)
    after = {name: found.get(name) for name in attention.problem.operator.elements_checked}
    after["cu_seqlens_q"] = found["cu_seqlens_new"]
    after["kv_lengths"] = total_lengths(append.problem, found)
    attention.problem.operator.check_elements(attention.problem, after)
