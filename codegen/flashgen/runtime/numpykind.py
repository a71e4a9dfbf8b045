"""NumPy arrays, and what arrays of CuPy have in common with them: names of dtypes, strides in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.operators.arguments import ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A key over the layouts of a call's arrays, and their pointers; None and 0 for an array that is absent.
Read = tuple[tuple, tuple[int, ...]]

NUMPY_NAMES = {"fp16": "float16", "fp32": "float32", "uint8": "uint8", "int32": "int32"}
_NUMPY_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "bool": "bool"}
_NUMPY_DTYPES |= {"uint8": "uint8", "int32": "int32", "float8_e4m3fn": "e4m3"}


class NumpyKind:
    """Arrays in host memory."""

    name = "numpy"
    expecting = None  # nothing is quicker than `read`
    maker = None  # nothing is quicker than `empty`
    wrote = None  # no one keeps arrays for a backward pass

    def __init__(self, numpy: Any) -> None:
        # Of most calls all arrays are of these types; an array of a subclass takes a moment longer.
        self.types = {numpy.ndarray, type(None)}

    def layout(self, x: Any) -> tuple:
        """Everything about ``x`` but its pointer, cheap to make, to compare and to hash."""
        return x.shape, x.strides, x.dtype

    def read(self, arrays: Iterable[Any]) -> Read:
        """The layouts of a call's arrays, and their pointers. All at once, for most of a call's host time is
        spent here.
        """
        layout, pointer = self.layout, self.pointer
        return (
            tuple([None if x is None else layout(x) for x in arrays]),
            tuple([0 if x is None else pointer(x) for x in arrays]),
        )

    def pointer(self, x: Any) -> int:
        return x.__array_interface__["data"][0]

    def strides(self, x: Any) -> tuple[int, ...] | None:
        """In elements, or None where some step between elements is no whole number of them."""
        return element_strides(x)

    def view(self, x: Any) -> ArrayView:
        strides = element_strides(x)
        return ArrayView("numpy", self.pointer(x), x.shape, strides, numpy_dtype(x.dtype), None)

    def empty(self, shape: tuple[int, ...], like: Any, stream: Any, dtype: str | None = None) -> Any:
        """A new contiguous array on the device of ``like``, for use on ``stream`` or the current one.

        ``dtype`` is "fp16", "bf16", "fp32", "uint8", "int32", "e4m3", or None for the dtype of ``like``.
        """
        import numpy as np

        if dtype in ("bf16", "e4m3"):
            import ml_dtypes  # takes 9 ms, which calls with other arrays need not wait for

            return np.empty(shape, ml_dtypes.bfloat16 if dtype == "bf16" else ml_dtypes.float8_e4m3fn)
        return np.empty(shape, like.dtype if dtype is None else NUMPY_NAMES[dtype])

    def integers(self, values: Sequence[int], like: Any, stream: Any) -> Any:
        """A new int64 array of these values on the device of ``like``, for use on ``stream`` or the current
        one. Copied from the host, which a GPU cannot capture in a graph.
        """
        import numpy as np

        return np.array(values, np.int64)

    def contiguous(self, x: Any, stream: Any) -> Any:
        """``x`` itself where it is in C order, else a copy that is, made on ``stream`` or the current one."""
        import numpy as np

        return np.ascontiguousarray(x)

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        """A view of ``x`` that has its elements several times."""
        import numpy as np

        return np.broadcast_to(x, shape)

    def nbytes(self, x: Any) -> int:
        """Bytes of the elements of ``x``."""
        return x.nbytes

    def on_host(self, x: Any) -> bool:
        """Whether the elements of ``x`` are in host memory."""
        return True

    def stream_of(self, x: Any) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def current_stream(self, device: int | None) -> int:
        """Handle of the library's current stream of a GPU; 0 for host memory (None)."""
        return 0

    def records(self, q: Any, k: Any, v: Any) -> bool:
        """Whether the library records a call on these: for gradients, or as one that is watched."""
        return False

    def watched(self, x: Any) -> bool:
        """Whether only an operator will do for a call on ``x``: a compiler, a tracer or a dispatch mode looks
        at operators, ``x`` is of a subclass that computes them itself, or it has no memory.
        """
        return False

    def wants_same_bits(self) -> bool:
        """Whether the library is set to give the same bits each time."""
        return False


def numpy_dtype(dtype: Any) -> str:
    """flashgen's name of a dtype of NumPy, else NumPy's own."""
    return _NUMPY_DTYPES.get(dtype.name, dtype.name) if dtype.isnative else str(dtype)


def element_strides(x: Any) -> tuple[int, ...] | None:
    """As `NumpyKind.strides`, of an array whose ``strides`` are in bytes."""
    if any(stride % x.itemsize for stride, extent in zip(x.strides, x.shape, strict=True) if extent > 1):
        return None
    return tuple(stride // x.itemsize for stride in x.strides)
