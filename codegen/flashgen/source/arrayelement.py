"""The CUDA of the element of an array that a score reads, for kernels of the gradient of an array:

int64_t element_of(params, b, h, q, kv);
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.operators.reduction import indices_of, parameter
from flashgen.operators.scores import DIMENSIONS
from flashgen.source.cppcode import function
from flashgen.source.scores import integer

if TYPE_CHECKING:
    from flashgen.operators.scores import Score

_COMMENT = "// The element of the gradient that a score reads, by the positions of its query and its key."
_STEPS = {"b": "dscore_batch_step", "h": "dscore_head_step"}


def element_function(score: Score) -> str:
    """The function for the array that ``score`` is differentiated by; empty where nothing is gathered. No
    final newline.
    """
    if score.wrt == "score" or not (indices := indices_of(score)):
        return ""
    array = parameter(score)
    terms = [f"{name} * params.{_STEPS[name]}" for name in array.dimensions if name in DIMENSIONS]
    symbols = [
        symbol for name, symbol in zip(array.dimensions, array.symbols, strict=True) if name not in DIMENSIONS
    ]
    for place, (symbol, index) in enumerate(zip(symbols, indices, strict=True)):
        clamped = f"min(max({integer(score, index)}, 0), params.{symbol} - 1)"
        steps = [f"params.{later}" for later in symbols[place + 1 :]]
        terms.append(" * ".join((f"int64_t({clamped})" if steps else clamped, *steps)))
    body = " + ".join(terms)
    types = {"params": "const Params&"} | dict.fromkeys(("b", "h", "q", "kv"), "int")
    return f"{_COMMENT}\n{function('int64_t element_of', types, [f'return {body};'])}"
