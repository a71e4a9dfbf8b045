"""``quantize``: e4m3 codes of numbers, and their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.call.compute import compute
from flashgen.call.record import QuantizeCall
from flashgen.call.request import Request
from flashgen.call.signature import public
from flashgen.errors import BadParam, FlashgenError, arg
from flashgen.operators.arguments import shown
from flashgen.operators.quantize import PER, QUANTIZE
from flashgen.runtime import arrays, dlpack

if TYPE_CHECKING:
    from flashgen.call.record import Call


def _quantize(call: Call) -> tuple[Any, Any]:
    """Round numbers to e4m3 codes times a scale, for example for a KV cache of half the size.

    x: (batch, seqlen, num_heads, head_dim), or without batch; fp16, bf16 or fp32; head_dim is a multiple of 8
        up to 256. Any strides, but the last dimension is contiguous and rows are 16-byte aligned.
    per: what shares a scale: "tensor", the whole of x; "head", all tokens of a head; "token", the row of a
        token and head. A scale is the largest finite |x| / 448, or 1 if that is 0.
    scale: your own scale instead of ``per``: fp32, contiguous, broadcasts from the right to (batch, seqlen,
        num_heads); normal numbers above 0.
    out: the codes are written here; of the shape of x, with rows that are 8-byte aligned.
    stream, backend: as in ``attention``.

    Returns (codes, scale); codes * scale[..., None] is x, rounded. codes are float8_e4m3fn, with CuPy uint8.
    scale is fp32, (batch, seqlen, num_heads), with extent 1 for each dimension that shares it, and without
    batch if x has none; or the scale of the caller. Each number is rounded to the nearest code, ties to even.
    Numbers above 448 times the scale, also infinity, become 448; NaN stays NaN.

    Raises, before anything is queued or written, BadParam for an unknown ``per``, for a tensor that requires
    a gradient, and on the CPU for a scale outside of 2^-126 to 2^126; and what ``attention`` raises for
    arrays that do not fit. FLASHGEN_CHECK=1 makes a GPU check the scale, too.
    """
    per, scale = call.per, call.scale
    if not isinstance(per, str) or per not in PER[1:]:
        raise BadParam(f"{arg('per')} is {shown(per)}; expected {' or '.join(map(repr, PER[1:]))}")
    if scale is not None:
        if per != "tensor":
            message = f"{arg('scale')} was given, whose shape says what shares a scale"
            raise BadParam(f"{arg('per')} is {per!r} but {message}; leave {arg('per')} out")
        per = "given"
    kind = arrays.kind_of(call.x)
    request = Request(QUANTIZE, (call.x, scale, call.out, None), (per,), (), call.stream, call.backend)
    try:
        if kind is not None and kind.watched(call.x):
            from flashgen.call import compiled

            return compiled.quantize(request)
        result = compute(request, kind)
    except FlashgenError as error:
        error.raise_as({"codes": "out"}, "quantize()")
    codes, scale = result if scale is None else (result, scale)
    if kind is None and codes.dtype == "uint8" and dlpack.library_of(call.x) == "jax":
        from ml_dtypes import float8_e4m3fn

        codes = codes.view(float8_e4m3fn)
    return codes, scale


quantize = public("quantize", QuantizeCall, _quantize, __name__)
