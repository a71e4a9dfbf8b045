"""Attention over keys in several parts: ``merge`` and ``cascade``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from flashgen.api import attention, call
from flashgen.errors import BadParam, FlashgenError
from flashgen.operators.arguments import check_memory, flag
from flashgen.operators.attention import normalise as normalise_attention
from flashgen.operators.merge import MERGE, check_parts, normalise
from flashgen.runtime import arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.arguments import ArrayView

# Options of attention() that speak of positions or of the keys of one call.
_NOT_IN_PARTS = ("mask", "mask_type", "window_size", "alibi_slopes", "score", "params")


def merge(
    parts: Sequence[tuple[Any, Any]],
    *,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
    backend: str | None = None,
) -> tuple[Any, Any]:
    """What attention gives over all keys, from what it gave over disjoint parts of them.

    parts: a list of (o, lse), as ``attention(..., return_lse=True)`` returns them. o: (batch, seqlen_q,
        num_heads_q, head_dim_v), or without batch; fp16, bf16 or fp32; any strides, but the last dimension is
        contiguous and rows are 16-byte aligned. lse: (batch, num_heads_q, seqlen_q), or without batch; fp32,
        contiguous, natural logarithm. All parts are of one shape, dtype, device and library. A row of a part
        that saw no key has lse -inf; its o is not looked at.
    out, lse_out: receive the results; of the shape and dtype of an o and an lse, in memory of their own.
    stream, backend: as in ``attention``.

    Returns (out, lse) of the kind of the first o: new arrays, or those given. A row that no part saw a key
    for is 0, with an LSE of -inf. More than two parts are merged one after another in order, each result
    rounded to the dtype: ((1, 2), 3), ... A list of one part returns its two arrays themselves.

    Raises, before anything is queued or written, BadParam for a list that is empty or no list of pairs, and
    what ``attention`` raises for arrays that do not fit; messages count parts from 1: o1, lse1, o2, ...
    """
    pairs = _pairs(parts, "(o, lse)")
    given = [x for pair in pairs for x in pair]
    names = [f"{word}{number}" for number in range(1, len(pairs) + 1) for word in ("o", "lse")]
    native = [arrays.adopt(x, name, stream) for x, name in zip(given, names, strict=True)]
    views = [arrays.view(x, name) for x, name in zip(native, names, strict=True)]
    for view, name in zip(views[1:], names[1:], strict=True):
        if view.kind != views[0].kind and view.device == views[0].device:
            raise BadParam(
                f"{name} is a {view.kind} array but o1 is a {views[0].kind} one; convert it, which by DLPack "
                "costs no copy"
            )
    of_parts = list(zip(views[::2], views[1::2], strict=True))
    check_parts(of_parts)
    if len(pairs) == 1:
        for name, x in (("out", out), ("lse_out", lse_out)):
            if x is not None:
                raise BadParam(f"{name} was given with one part, which is returned as it is; leave it out")
        return pairs[0]
    if len(pairs) > 2:
        _check_results(of_parts, out, lse_out)
    o, lse = pairs[0]
    for number, (next_o, next_lse) in enumerate(pairs[1:], 2):
        results = (out, lse_out) if number == len(pairs) else (None, None)
        o, lse = call(MERGE, (o, lse, next_o, next_lse, *results), stream=stream, backend=backend)
    return o, lse


def cascade(
    q: Any,
    parts: Sequence[tuple[Any, Any]],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    backend: str | None = None,
    **refused: Any,
) -> Any:
    """Attention over keys that lie in several arrays, such as a prefix that all sequences of a batch share
    and what each has of its own.

    q: (batch, seqlen_q, num_heads_q, head_dim), or without batch, as in ``attention``.
    parts: a list of (k, v), from the first keys to the last. k: (batch, seqlen_kv, num_heads_kv, head_dim),
        v: (batch, seqlen_kv, num_heads_kv, head_dim_v), as in ``attention``; seqlen_kv and num_heads_kv may
        differ between parts. A part of batch 1 is shared by all batch entries of q: it is read once for all,
        as the queries of all entries become those of one long sequence. That copies q, once, where its batch
        and sequence strides are not those of one sequence.
    causal: in the last part hide key j from query i unless j <= i + seqlen_kv - seqlen_q, with the seqlen_kv
        of that part; all queries see all keys of the others. This is causal attention over all keys where the
        last part has seqlen_q keys or more.
    softmax_scale, softcap, out, return_lse, stream, backend: as in ``attention``.

    Returns ``out``, or ``(out, lse)``, as ``attention``. Parts are merged as by ``merge``, each result rounded
    to the dtype.

    Raises what ``attention`` raises, with ``parts[i]`` in front for what is wrong with a part; BadParam for a
    list that is empty or no list of pairs, and for window_size, mask, mask_type, alibi_slopes, score and
    params: their positions would count from the beginning of a part.
    """
    for name in refused:
        if name not in _NOT_IN_PARTS:
            raise TypeError(f"cascade() got an unexpected keyword argument {name!r}")
        raise BadParam(
            f"{name} was given; cascade takes none, as its positions would count from the beginning of a part"
        )
    pairs = _pairs(parts, "(k, v)")
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    if arrays.kind_of(q) is None:
        return _cascade_adopted(q, pairs, out, stream, causal, softmax_scale, softcap, return_lse, backend)
    _check_cascade(q, pairs, causal, softmax_scale)
    common = {"softmax_scale": softmax_scale, "softcap": softcap, "stream": stream, "backend": backend}
    folded, results = None, []
    for number, (k, v) in enumerate(pairs, 1):
        diagonal = causal and number == len(pairs)
        if len(pairs) == 1 and not _is_shared(q, k):
            return attention(q, k, v, causal=causal, out=out, return_lse=return_lse, **common)
        if not _is_shared(q, k):
            results.append(attention(q, k, v, causal=diagonal, return_lse=True, **common))
        elif _hides(q, diagonal) or len(pairs) == 1:
            # Its queries are of one sequence no more, or its results go straight to ``out``.
            kind, batch = arrays.kind_of(k), q.shape[0]
            k, v = (kind.broadcast(x, (batch, *x.shape[1:])) for x in (k, v))
            if len(pairs) == 1:
                return attention(q, k, v, causal=causal, out=out, return_lse=return_lse, **common)
            results.append(attention(q, k, v, causal=diagonal, return_lse=True, **common))
        else:
            folded = _folded(q, stream) if folded is None else folded
            results.append(_unfolded(attention(folded, k, v, return_lse=True, **common), q, stream))
    merged, lse = merge(results, out=out, stream=stream, backend=backend)
    return (merged, lse) if return_lse else merged


def _pairs(parts: Any, what: str) -> list[tuple[Any, Any]]:
    if not isinstance(parts, (list, tuple)) or not parts:
        raise BadParam(f"parts is {_short(parts)}; expected a list of {what}, with one at least")
    for index, pair in enumerate(parts):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadParam(f"parts[{index}] is {_short(pair)}; expected {what}")
    return [tuple(pair) for pair in parts]


def _short(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else f"of type {type(x).__name__}"


def _check_results(parts: list[tuple[ArrayView, ArrayView]], out: Any, lse_out: Any) -> None:
    """That the last of several merges can write into ``out`` and ``lse_out``, ahead of the first one."""
    results = [
        None if x is None else arrays.view(x, name) for name, x in (("out", out), ("lse_out", lse_out))
    ]
    for name, view in zip(("out", "lse_out"), results, strict=True):
        if view is not None and view.kind != parts[0][0].kind:
            raise BadParam(f"{name} is a {view.kind} array but o1 is a {parts[0][0].kind} one")
    for part in parts[1:]:
        views = (*parts[0], *part, *results)
        problem = normalise(*views)
        pointers = tuple(0 if view is None else view.pointer for view in views)
        written = [position for position in problem.results if pointers[position]]
        check_memory(MERGE.arguments, problem.spans(), pointers, written)


def _check_cascade(q: Any, pairs: list[tuple[Any, Any]], causal: bool, softmax_scale: float | None) -> None:
    """That each part is one that attention takes, ahead of the first call; messages name the part."""
    view = arrays.view(q, "q")
    for index, (k, v) in enumerate(pairs):
        try:
            views = [arrays.view(x, name) for x, name in ((k, "k"), (v, "v"))]
            for name, other in zip(("k", "v"), views, strict=True):
                if other.kind != view.kind:
                    raise BadParam(f"{name} is a {other.kind} array but q is a {view.kind} one")
            first = view
            if _is_shared(q, k):
                first = dataclasses.replace(view, shape=(1, *view.shape[1:]))
            normalise_attention(first, *views, causal=causal).with_scalars((softmax_scale,))
            if index and v.shape[-1] != pairs[0][1].shape[-1]:
                raise BadParam(
                    f"v has head_dim_v {v.shape[-1]} but that of parts[0] is {pairs[0][1].shape[-1]}"
                )
        except FlashgenError as error:
            raise type(error)(f"parts[{index}]: {error}") from None


def _is_shared(q: Any, k: Any) -> bool:
    """Whether a part of batch 1 serves several batch entries of q."""
    return len(q.shape) == len(k.shape) == 4 and k.shape[0] == 1 and q.shape[0] != 1


def _hides(q: Any, causal: bool) -> bool:
    """Whether queries of a sequence differ in what they see; one query sees all keys."""
    return causal and q.shape[1] > 1


def _folded(q: Any, stream: Any) -> Any:
    """q of all batch entries as one sequence of batch 1; a copy where its strides are not of one."""
    kind = arrays.kind_of(q)
    batch, seqlen_q = q.shape[:2]
    batch_stride, row_stride = kind.view(q).strides[:2]
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
    pairs: list[tuple[Any, Any]],
    out: Any,
    stream: Any,
    causal: bool,
    softmax_scale: float | None,
    softcap: float | None,
    return_lse: bool,
    backend: str | None,
) -> Any:
    """`cascade` for arrays that flashgen does not read directly: adopt them, and hand the results back."""
    if out is not None and arrays.immutable(out):
        raise BadParam(
            f"out has type {type(out).__name__}, whose memory cannot be written to; call without out"
        )
    native_q = arrays.adopt(q, "q", stream)
    native = [
        tuple(
            arrays.adopt(x, f"parts[{index}]: {name}", stream)
            for x, name in zip(pair, ("k", "v"), strict=True)
        )
        for index, pair in enumerate(pairs)
    ]
    results = cascade(
        native_q,
        native,
        causal=causal,
        softmax_scale=softmax_scale,
        softcap=softcap,
        out=None if out is None else arrays.adopt(out, "out", stream),
        return_lse=True,
        stream=stream,
        backend=backend,
    )
    inputs = (native_q, *(x for pair in native for x in pair))
    lse = arrays.hand_back(results[1], q, inputs, stream)
    result = arrays.hand_back(results[0], q, inputs, stream) if out is None else out
    return (result, lse) if return_lse else result
