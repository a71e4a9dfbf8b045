"""CuPy arrays, on a GPU."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from flashgen.errors import NoCompilerError
from flashgen.host import pipcommand
from flashgen.operators.arguments import ArrayView
from flashgen.runtime.numpykind import NUMPY_NAMES, element_strides, numpy_dtype
from flashgen.runtime.streams import StreamHandle, stream_pointer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashgen.runtime.numpykind import Read


class CupyKind:
    """Arrays on a GPU."""

    name = "cupy"
    expecting = None
    wrote = None
    maker = None

    def __init__(self, cupy: Any) -> None:
        self.types = {cupy.ndarray, type(None)}
        self._ndarray = cupy.ndarray
        self._cuda = cupy.cuda
        self._get_device = cupy.cuda.runtime.getDevice
        self._get_stream = cupy.cuda.get_current_stream
        self._dtypes = {name: cupy.dtype(numpy_name) for name, numpy_name in NUMPY_NAMES.items()}
        self._dtypes["e4m3"] = self._dtypes["uint8"]  # which CuPy lacks

    def layout(self, x: Any) -> tuple:
        return self.read((x,))[0][0]

    def read(self, arrays: Iterable[Any]) -> Read:
        layouts: list[tuple | None] = []
        pointers: list[int] = []
        for x in arrays:
            if x is None:
                layouts.append(None)
                pointers.append(0)
            else:
                memory = x.data
                # Strides are dear, and the shape of an array in C order says them.
                layouts.append((x.shape, x._c_contiguous or x.strides, x.dtype, memory.device_id))
                pointers.append(memory.ptr)
        return tuple(layouts), tuple(pointers)

    def pointer(self, x: Any) -> int:
        return x.data.ptr

    def strides(self, x: Any) -> tuple[int, ...] | None:
        return element_strides(x)

    def view(self, x: Any) -> ArrayView:
        strides = element_strides(x)
        dtype = numpy_dtype(x.dtype)
        return ArrayView("cupy", x.data.ptr, x.shape, strides, dtype, x.data.device_id)

    def empty(self, shape: tuple[int, ...], like: Any, stream: Any, dtype: str | None = None) -> Any:
        device = like.data.device_id
        cupy_dtype = like.dtype if dtype is None else self._dtypes.get(dtype, "bfloat16")
        if stream is None and self._get_device() == device:
            return self._ndarray(shape, cupy_dtype)
        # CuPy's pool keeps memory per stream: what is allocated for a stream is only reused on it.
        with self._cuda.Device(device), self.use(stream):
            return self._ndarray(shape, cupy_dtype)

    def integers(self, values: Sequence[int], like: Any, stream: Any) -> Any:
        with self._cuda.Device(like.data.device_id), self.use(stream):
            return import_cupy().array(values, "int64")

    def contiguous(self, x: Any, stream: Any) -> Any:
        if x.flags.c_contiguous:
            return x
        # CuPy copies bits, whatever it knows of bfloat16.
        bits = x.view("uint16") if x.dtype.itemsize == 2 else x
        with self._cuda.Device(x.data.device_id), self.use(stream):
            return bits.copy(order="C").view(x.dtype)

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        return import_cupy().broadcast_to(x, shape)

    def on_host(self, x: Any) -> bool:
        return False

    def stream_of(self, x: Any) -> int:
        """Handle of the current stream of the GPU of ``x``."""
        return self.current_stream(x.data.device_id)

    def is_capturing(self) -> bool:
        """Whether the current stream is captured in a graph."""
        return self._cuda.get_current_stream().is_capturing()

    def current_stream(self, device: int | None) -> int:
        return self._get_stream(device).ptr

    def records(self, q: Any, k: Any, v: Any) -> bool:
        return False

    def watched(self, x: Any) -> bool:
        return False

    def wants_same_bits(self) -> bool:
        return False

    def nbytes(self, x: Any) -> int:
        return x.nbytes

    def use(self, stream: Any) -> contextlib.AbstractContextManager:
        """Makes ``stream``, one of the current device, the current one; None changes nothing."""
        if stream is None:
            return contextlib.nullcontext()
        if isinstance(stream, self._cuda.Stream):
            return stream
        return self._cuda.Stream.from_external(StreamHandle(stream_pointer(stream)))


def import_cupy() -> Any:
    """CuPy. Raises NoCompilerError where it cannot be imported."""
    try:
        import cupy
    except ImportError as error:
        raise NoCompilerError(
            f"arrays on a GPU need CuPy, which cannot be imported ({error}); {pipcommand.compiler()}"
        ) from error
    return cupy
