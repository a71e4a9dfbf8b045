"""``merge``: one result of attention over several parts of the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.call.compute import compute
from flashgen.call.record import MergeCall
from flashgen.call.request import Request
from flashgen.call.signature import public
from flashgen.errors import BadParam, FlashgenError, arg, naming
from flashgen.operators.merge import MERGE, check_parts, normalise
from flashgen.operators.overlaps import check_memory
from flashgen.runtime import arrays, dlpack

if TYPE_CHECKING:
    from flashgen.call.record import Call


def _merge(call: Call) -> tuple[Any, Any]:
    """Merge results of attention over disjoint parts of the keys into the result over all keys.

    parts: a list of (o, lse), as ``attention(..., return_lse=True)`` returns them. o: (batch, seqlen_q,
        num_heads_q, head_dim_v), or without batch; fp16, bf16 or fp32; any strides, but the last dimension is
        contiguous and rows are 16-byte aligned. lse: (batch, num_heads_q, seqlen_q), or without batch; fp32,
        contiguous, natural logarithm. All parts are of one shape, dtype, device and library. A row of a part
        that saw no key has lse -inf or, as in flash-attn, +inf; its o is ignored.
    out, lse_out: the results are written here; of the shape and dtype of an o and an lse, in memory that no
        other argument uses.
    stream, backend: as in ``attention``.

    Returns (out, lse) of the kind of the first o: new arrays, or the arrays passed. A row without keys in all
    parts is 0, with an LSE of -inf. More than two parts are merged one after another in order, each result
    rounded to the dtype: parts[0] with parts[1], then with parts[2], ... For one part its two arrays are
    returned.

    Raises, before anything is queued or written, BadParam for an empty list, for a part that is not a pair,
    and for a tensor that requires a gradient; and what ``attention`` raises for arrays that do not fit.
    Messages name arrays, for example, o of parts[0] and lse of parts[1].
    """
    out, lse_out, stream = call.out, call.lse_out, call.stream
    pairs = _pairs(call.parts, "(o, lse)")
    o, lse = pairs[0]
    kind = arrays.kind_of(o)
    traced = kind is not None and kind.watched(o)
    if len(pairs) == 1:
        for name, x in (("out", out), ("lse_out", lse_out)):
            if x is not None:
                raise BadParam(
                    f"{arg(name)} was given with one part, which is returned as it is; leave it out"
                )
    try:
        if traced:
            from flashgen.call import compiled

            named = {
                f"{name} of parts[{index}]": x
                for index, pair in enumerate(pairs)
                for name, x in zip(("o", "lse"), pair, strict=True)
            }
            results = {"out": out, "lse_out": lse_out}
            compiled.check(named | results, stream, "merge()", {*results})
        elif len(pairs) != 2:  # two are checked on the way to the kernel
            _check_merge(pairs, out, lse_out, stream)
        for number, part in enumerate(pairs[1:], 2):
            into = (out, lse_out) if number == len(pairs) else (None, None)
            request = Request(MERGE, (o, lse, *part, *into), (), (), stream, call.backend)
            o, lse = compiled.merge(request) if traced else compute(request, kind)
        return o, lse
    except dlpack.Traced:
        pass  # below, so that its errors are not chained to this one
    except FlashgenError as error:
        if traced:  # named already
            raise
        error.raise_as(_names(len(pairs)), "merge()")
    return _traced(pairs, out, lse_out, stream, call.backend)


merge = public("merge", MergeCall, _merge, __name__)


def _traced(
    pairs: list[tuple[Any, Any]], out: Any, lse_out: Any, stream: Any, backend: str | None
) -> tuple[Any, Any]:
    """The merge inside a program that JAX traces."""
    from flashgen.call.xla import traced

    o, lse = pairs[0]
    for index, part in enumerate(pairs[1:], 1):
        names = _names(2) | {f"{name}2": f"{name} of parts[{index}]" for name in ("o", "lse")}
        into = (out, lse_out) if index == len(pairs) - 1 else (None, None)
        with naming(names):
            o, lse = traced.merge(Request(MERGE, (o, lse, *part, *into), (), (), stream, backend))
    return o, lse


def _names(count: int) -> dict[str, str]:
    """What a caller calls the arrays that messages count from 1, for `errors.rename`."""
    return {f"{name}{i + 1}": f"{name} of parts[{i}]" for i in range(count) for name in ("o", "lse")}


def _pairs(parts: Any, what: str) -> list[tuple[Any, Any]]:
    check_list(parts, what)
    for index, pair in enumerate(parts):
        check_pair(index, pair, what)
    return [tuple(pair) for pair in parts]


def check_list(parts: Any, what: str) -> None:
    """That there are parts. Raises BadParam; ``what`` says of what the list should be."""
    if not isinstance(parts, (list, tuple)) or not parts:
        raise BadParam(f"parts is {_short(parts)}; expected a list of {what}, at least one")


def check_pair(index: int, pair: Any, what: str) -> None:
    """That a part is two arrays. Raises BadParam; ``what`` says what it should be."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise BadParam(f"parts[{index}] is {_short(pair)}; expected {what}")


def _short(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else f"of type {type(x).__name__}"


def _check_merge(pairs: list[tuple[Any, Any]], out: Any, lse_out: Any, stream: Any) -> None:
    """Check all arrays of a merge of one part, or of three or more, before its first step."""
    given = [x for pair in pairs for x in pair]
    names = [f"{word}{number}" for number in range(1, len(pairs) + 1) for word in ("o", "lse")]
    results = {"out": out, "lse_out": lse_out}
    for name, x in results.items():
        if x is not None and dlpack.immutable(x):
            raise BadParam(f"{arg(name)} has type {type(x).__name__}, whose memory cannot be written to")
    dlpack.check_libraries(dict(zip(names, given, strict=True)) | results)
    views = [arrays.view(dlpack.adopt(x, name, stream), name) for x, name in zip(given, names, strict=True)]
    written = {
        name: None if x is None else arrays.view(dlpack.adopt(x, name, stream), name)
        for name, x in results.items()
    }
    with naming(dlpack.own_libraries(dict(zip(names, given, strict=True)) | results)):
        arrays.check_libraries(dict(zip(names, views, strict=True)) | written)
    parts = list(zip(views[::2], views[1::2], strict=True))
    check_parts(parts)
    for number, part in enumerate(parts[1:], 2):
        all_views = (*parts[0], *part, *written.values())
        problem = normalise(*all_views)
        pointers = tuple(0 if view is None else view.pointer for view in all_views)
        given_results = [position for position in problem.results if pointers[position]]
        # An array that the caller does not pass is allocated later and has no address yet.
        spans = tuple(
            (0, 0) if view is None else span for view, span in zip(all_views, problem.spans(), strict=True)
        )
        with naming({"o2": f"o{number}", "lse2": f"lse{number}"}):
            check_memory(MERGE.arguments, spans, pointers, given_results, problem.array_layouts())
