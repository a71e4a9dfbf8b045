"""Arrays that flashgen does not read directly: native arrays over their memory, and results handed back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, arg, naming
from flashgen.runtime import arrays as libraries
from flashgen.runtime import dlpack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.arguments import ArrayView
    from flashgen.runtime.arrays import Arrays


class Viewed(NamedTuple):
    """The arrays of a call, native and of one library, in the operator's order; and by name what an operator
    reads of each: dtype, shape, strides and address.
    """

    arrays: Arrays
    views: dict[str, ArrayView | None]


def viewed(operator: Any, arrays: Mapping[str, Any]) -> Viewed:
    """`Viewed` of arrays of any library, by the names of the operator's arguments. Raises what `dlpack.adopt`
    and `arrays.view` do, and BadParam for arrays of several libraries.
    """
    dlpack.check_libraries(arrays, cache_arrays(arrays))
    native = {
        argument.name: None
        if arrays[argument.name] is None and (argument.optional or argument.is_output)
        else dlpack.adopt(arrays[argument.name], argument.name)
        for argument in operator.arguments
    }
    views = {name: None if x is None else libraries.view(x, name) for name, x in native.items()}
    with naming(dlpack.own_libraries(arrays)):
        libraries.check_libraries(views)
    return Viewed(tuple(native.values()), views)


def adopted(operator: Any, arrays: dict[str, Any], stream: Any) -> dict[str, Any]:
    """Native arrays over the memory of ``arrays``, by the names of the operator's arguments. Raises what
    `dlpack.adopt` does, and BadParam for an output that cannot be written to.
    """
    for argument in operator.arguments:
        array = arrays[argument.name]
        if argument.is_output and array is not None and dlpack.immutable(array):
            raise BadParam(
                f"{arg(argument.name)} has type {type(array).__name__}, whose memory cannot be written to; "
                f"call without {arg(argument.name)} and use the result"
            )
    return {
        argument.name: None
        if arrays[argument.name] is None and (argument.is_output or argument.optional)
        else dlpack.adopt(arrays[argument.name], argument.name, stream)
        for argument in operator.arguments
    }


def cache_arrays(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of the arrays that an operator is given, by name, a KV cache may have."""
    if arrays.get("k_cache") is not None:
        return "k_cache", "v_cache", "lengths", "pages", "index", "k_scale_out", "v_scale_out"
    if arrays.get("kv_lengths") is None:
        return ()
    return "k", "v", "kv_lengths", "kv_starts", "pages", "index", "k_scale", "v_scale"


def run_adopted(call: Any, operator: Any, arrays: dict[str, Any], stream: Any, /, **rest: Any) -> Any:
    """``call`` for arrays that flashgen does not read directly: adopt them, call, hand the results back.

    ``arrays`` has an array or None for each argument of the operator.
    """
    first = arrays[operator.arguments[0].name]
    dlpack.check_libraries(arrays, cache_arrays(arrays))
    native = adopted(operator, arrays, stream)
    with naming(dlpack.own_libraries(arrays)):
        results = call(**native, stream=stream, **rest)
    outputs = [argument.name for argument in operator.arguments if argument.is_output]
    inputs = tuple(native[argument.name] for argument in operator.arguments if not argument.is_output)

    def handed(result: Any, name: str) -> Any:
        if arrays[name] is not None:
            return arrays[name]
        return dlpack.hand_back(result, first, inputs, stream)

    if isinstance(results, tuple):
        # Optional outputs come last.
        return tuple(handed(result, name) for result, name in zip(results, outputs, strict=False))
    return handed(results, outputs[0])
