"""Arrays in host memory, as NumPy's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, arg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.operator import Problem


def host_array(x: Any) -> Any:
    """A NumPy array over the memory of a native host array; bfloat16 is seen as its bits in uint16, e4m3
    as its codes in uint8.
    """
    import numpy as np

    if not isinstance(x, np.ndarray):
        import torch

        x = x.detach()
        if x.dtype == torch.float8_e4m3fn:
            return x.view(torch.uint8).numpy()
        return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    x = x.view(np.ndarray)  # a subclass may index and multiply in ways of its own, as numpy.matrix does
    if x.dtype.name == "float8_e4m3fn":
        return x.view(np.uint8)
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def check_writable(problem: Problem, arrays: Sequence[Any]) -> None:
    """That the outputs of a call in host memory can be written to. Raises BadParam."""
    for argument, array in zip(problem.operator.arguments, arrays, strict=True):
        if argument.is_output and array is not None and not host_array(array).flags.writeable:
            raise BadParam(f"{arg(argument.name)} is read-only; pass an array that can be written to")
