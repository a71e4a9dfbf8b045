"""``attention(append=)`` and ``plan(append=)``: an append, and then the attention over the cache."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from flashgen.api import append_again
from flashgen.api.append import adopted_arrays, arrays_in_order, interleaved, requested
from flashgen.api.pair_of_plans import PairOfPlans
from flashgen.api.queue_both import queue_both
from flashgen.call.compute import are_all, make_plan, ready
from flashgen.call.features import refuse_features
from flashgen.call.kvcache import FIELDS, KVCache, Rotary
from flashgen.call.record import AppendCall
from flashgen.call.request import Request, refuse_beside_codes, request_of
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, FlashgenError, NullPointer, arg
from flashgen.operators.append import APPEND
from flashgen.operators.arguments import flag, length_bound, shown
from flashgen.operators.kvcodes import SCALES_OUT
from flashgen.operators.maskoptions import NO_WINDOW, mask_type_name, window_of
from flashgen.runtime import arrays, dlpack
from flashgen.runtime.adopted import adopted, cache_arrays
from flashgen.runtime.plans import TAKES

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.call.record import Call
    from flashgen.runtime.arrays import Arrays
    from flashgen.runtime.plans import Plan, Ready

_TOTAL, _ROTATED = APPEND.position("total_lengths"), APPEND.position("q_rotated")
# The arrays of an append that the attention after it takes as well.
_HANDED_ON = itemgetter(
    *(APPEND.position(name) for name in ("k_cache", "v_cache", "cu_seqlens_new", "total_lengths")),
    *(APPEND.position(name) for name in ("index", "pages", "k_scale", "v_scale", *SCALES_OUT)),
)
# The fields of a KVCache after its lengths.
_AFTER_LENGTHS = attrgetter(*[field.name for field in fields(KVCache)][3:])
# Arguments of that attention which its caller does not name: they are of the append, or not there.
_OF_APPEND = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "kv_lengths", "kv_starts", "index", "pages"}
_OF_APPEND |= {"k_scale", "v_scale"}


class AppendPlan(PairOfPlans):
    """``append`` and then ``attention``, for calls of one layout; made by ``flashgen.plan(append=)``.

    ``append`` and ``attention`` are the plans of the two. ``steps`` are the launches of both in order,
    ``variant`` is the main kernel of the attention and ``source`` its CUDA, ``workspace_bytes`` the memory
    that a call needs beyond inputs and outputs. May be called from many threads.
    """

    __slots__ = ("_head_dim_v", "_interleaved", "_named", "append")

    def __init__(self, append: Plan, attention: Plan, interleaved: bool | None) -> None:
        super().__init__((append, attention), attention)
        self.append = append
        self._interleaved = interleaved
        operator = attention.problem.operator
        # Of a latent cache.
        self._head_dim_v = None if "v" in operator.positions else attention.problem.head_dim_v
        # What the attention alone takes, in order.
        names = (*operator.positions, *operator.scalars)
        self._named = {name: None for name in names if name not in _OF_APPEND}

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
            given = arrays_in_order(cache, *_pair(append), rotary, q, cu_seqlens_q, total_lengths, q_rotated)
            if self._interleaved != interleaved(rotary):
                mode = self._interleaved
                made_with = "none; pass None" if mode is None else f"interleaved={mode}; pass such a Rotary"
                raise BadParam(f"rotary is {rotary}; the plan was made with {made_with}")
            if cache.head_dim_v != self._head_dim_v:
                raise BadParam(
                    f"{arg('head_dim_v')} of the KVCache is {shown(cache.head_dim_v)}; the plan was made "
                    f"with {self._head_dim_v}"
                )
            for name in ("k", "v") if self._head_dim_v is None else ("k",):
                if getattr(cache, name) is None:  # an output of the operator, which it would allocate
                    raise NullPointer(f"{name} is None; expected an array")
            own = {**dict(zip(APPEND.positions, given, strict=True)), **named, "q": q}
            dlpack.check_libraries(own, cache_arrays(own))
            native_q, appended = dlpack.adopt(q, "q", stream), adopted_arrays(given, stream)
            first = self.append.ready(appended, self.append.pointers(appended), (), stream)
            starts = None if cache.starts is None else dlpack.adopt(cache.starts, "starts", stream)
            second, given = self._attending(native_q, first[1], starts, named, stream, workspace)
            queue_both(self.append, first, self.attention, second, (*given, workspace), appended)
        except FlashgenError as error:
            own = dlpack.own_libraries({"q": q, **named})
            names = {"cu_seqlens_new": "cu_seqlens_q", TAKES: self._takes(), **own, **FIELDS}
            error.raise_as(names, "plans")
        return _handed(self.attention, second, q, stream)

    def _attending(
        self,
        q: Any,
        appended: tuple[Any, ...],
        starts: Any,
        named: dict[str, Any],
        stream: Any,
        workspace: Any,
    ) -> tuple[Ready, Arrays]:
        """The call of the attention, of q and the arrays of the append, and what it was given. Raises what is
        wrong with that.
        """
        k, v, cu_seqlens, total, index, pages, *scales = _HANDED_ON(appended)
        read, written = scales[:2], scales[2:]
        scales = read if written[0] is None else written
        rotated = appended[_ROTATED]
        seen = q if rotated is None else rotated
        of_cache = {"kv_starts": starts, **dict(zip(("k_scale", "v_scale"), scales, strict=True))}
        named = {**named, **{name: x for name, x in of_cache.items() if x is not None}}
        try:
            inputs = (seen, k, v) if self._head_dim_v is None else (seen, k)
            given, scalars = self.attention.bound((*inputs, cu_seqlens, None, total, index, pages), named)
            pointers = self.attention.pointers(given)
            if pointers is None:  # a named one is of another library
                operator = self.attention.problem.operator
                by_name = {argument.name: x for argument, x in zip(operator.arguments, given, strict=True)}
                given = tuple(adopted(operator, by_name, stream).values())
                pointers = self.attention.pointers(given)
            return self.attention.ready(given, pointers, scalars, stream, workspace), given
        except FlashgenError as error:
            names = {"kv_lengths": "total_lengths", "kv_starts": "starts", TAKES: self._takes()}
            if rotated is not None:
                names["q"] = "q_rotated"
            error.rename(names)
            raise

    def _misnamed(self, named: dict[str, Any]) -> BadParam:
        """The error of a call that names what the plan does not take."""
        wrong = next(name for name in named if name not in self._named)
        others = ("q", "cache", "append", "rotary", "cu_seqlens_q", "total_lengths", "q_rotated")
        known = ", ".join((*others, *self._named, "stream", "workspace"))
        return BadParam(f"{wrong} is not an argument; the arguments are {known}")

    def _takes(self) -> str:
        """Which inputs a call has to give, for a message."""
        given = [name for plan in (self.append, self.attention) for name in plan.inputs()]
        given += ["starts"] if "kv_starts" in given else []
        cache, rotary = (
            " and ".join(name for name in names if name in given)
            for names in (("lengths", "starts", "pages", "index"), ("cos", "sin", "positions"))
        )
        rotary = [f"rotary with {rotary}"] if rotary else []
        lengths = ["cu_seqlens_q"] if "cu_seqlens_q" in given else []
        alone = [name for name in self._named if name in given]
        taken = ["q", f"a KVCache with {cache}", "append=(k_new, v_new)", *rotary, *lengths, *alone]
        return f"the plan takes {', '.join(taken)}"


def requested_append(call: Call) -> Request:
    """What ``attention(append=, rotary=)`` requests of the operator ``append``, with native arrays. Raises as
    `append_call`.
    """
    return requested(append_call(call))


def append_call(call: Call) -> Call:
    """The call of ``append`` in a call of ``attention(append=, rotary=)``. Raises BadParam, also for a bound
    below the number of new tokens; and BadTensorShape where it is not said to which positions queries are to
    be rotated, and for packed queries that are not as many as the new tokens.
    """
    q, cache, rotary, cu_seqlens_q = call.q, call.k, call.rotary, call.cu_seqlens_q
    if call.has_codes():
        refuse_beside_codes(call)
    if call.q_rope is not None and rotary is not None:
        refuse_features(call)
    if call.append is None:
        raise BadParam(
            f"{arg('rotary')} was given without append; pass append=(k_new, v_new), the new tokens"
        )
    if not isinstance(cache, KVCache):
        raise BadParam(
            f"{arg('append')} was given, and {arg('k')} has type {type(cache).__name__}; append writes into "
            f"a cache, so it needs {arg('k')} to be a flashgen.KVCache, and no {arg('v')}"
        )
    moves = flag("causal", call.causal) or mask_type_name(call.mask_type) == "causal_bottom_right"
    has_no_window = type(call.window_size) is tuple and call.window_size == NO_WINDOW  # as most calls have
    has_window = not has_no_window and window_of(call.window_size) != NO_WINDOW
    positions = "each" if moves or has_window else "first"
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
    record = AppendCall.of_defaults()
    record.cache, record.rotary, record.q, record.q_positions = cache, rotary, q, positions
    (record.k_new, record.v_new), record.cu_seqlens_new = new, cu_seqlens_q
    record.stream, record.backend = call.stream, call.backend
    return record


def _check_bound(max_seqlen_kv: Any, k_new: Any) -> None:
    """That the bound, which is for the keys with the new ones, is not below these alone."""
    shape = getattr(k_new, "shape", ())
    most = length_bound("max_seqlen_kv", max_seqlen_kv)
    if len(shape) > 2 and most < shape[-3]:
        raise BadParam(
            f"{arg('max_seqlen_kv')} is {most} but {arg('k_new')} has {shape[-3]} tokens of each sequence; "
            "it includes the new keys"
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
    """That padded queries are at positions which the call says. Raises what `requested_append` does."""
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
            f"{arg('window_size')} with the {arg('mask')}"
        )


def append_and_attend(call: Call) -> Any:
    """``attention(append=)``. Raises what is wrong with the append or the attention before anything is
    queued.
    """
    found = append_again.again(call)
    if found is not None:
        return found[0].results_of(found[1])
    append_request = requested_append(call)
    append, first = ready(append_request)
    request = _attention_after(call, first)
    attention, second = _attending(ready, request, call)
    queue_both(append, first, attention, second, (*request.arrays, None), append_request.arrays)
    append_again.keep(call, append, append_request, attention, request, first[1])
    return _handed(attention, second, call.q, call.stream)


def append_plan(call: Call, append_request: Request) -> AppendPlan:
    """``plan(append=)``; arguments as in `append_and_attend`."""
    append = make_plan(append_request)
    first = append.ready(append_request.arrays, append.pointers(append_request.arrays), (), None)
    attention = _attending(make_plan, _attention_after(call, first), call)
    return AppendPlan(append, attention, interleaved(call.rotary))


def _attention_after(call: Call, first: Ready) -> Request:
    """What a call requests of attention, of the rotated q over the cache as its append will leave it."""
    written = first[1]
    rotated = written[_ROTATED]
    cache: KVCache = call.k
    # dataclasses.replace takes four times as long.
    cache = KVCache(cache.k, cache.v, written[_TOTAL], *_AFTER_LENGTHS(cache))
    return request_of(call.replace(q=call.q if rotated is None else rotated, k=cache))


def _attending(make: Callable[[Request], Any], request: Request, call: Call) -> Any:
    """What ``make``, `ready` or `make_plan`, makes of the attention after an append.

    Raises as it does, but that dtypes have to be the cache's, where for attention alone q's is the norm.
    """
    if not are_all(arrays.kind_of(call.q), request.arrays):
        named = request.by_name()
        alone = {name: x for name, x in named.items() if name not in _OF_APPEND}
        dlpack.check_libraries({"q": call.q} | alone)
        if any(x is not None and arrays.kind_of(x) is None for x in request.arrays):  # others are appended
            stream = request.stream if make is ready else None
            request.arrays = tuple(adopted(request.operator, named, stream).values())
    try:
        return make(request)
    except BadTensorDtype:
        named = request.by_name()
        of_q, of_k = (arrays.view(named[name], name).dtype for name in ("q", "k"))
        if of_q == of_k:
            raise
        raise BadTensorDtype(
            f"{arg('q')} has dtype {of_q}; expected {of_k}, as the cache has dtype {of_k}"
        ) from None


def _handed(attention: Plan, second: Ready, q: Any, stream: Any) -> Any:
    """What the call returns, of the library of q."""
    given = second[1]
    found = attention.results_of(given)
    if arrays.kind_of(q) is not None:
        return found
    if isinstance(found, tuple):
        return tuple(dlpack.hand_back(x, q, given, stream) for x in found)
    return dlpack.hand_back(found, q, given, stream)


def _pair(new: Any) -> tuple[Any, Any]:
    """(k_new, v_new). Raises BadParam."""
    if not isinstance(new, (tuple, list)):
        raise BadParam(f"append has type {type(new).__name__}; expected ({arg('k_new')}, {arg('v_new')})")
    if len(new) != 2:
        raise BadParam(
            f"append is a {type(new).__name__} of {len(new)}; expected ({arg('k_new')}, {arg('v_new')})"
        )
    return tuple(new)
