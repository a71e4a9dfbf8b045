"""Arrays of NumPy, CuPy and PyTorch, read as they are: a pointer with a layout.

Those of any other library are first adopted (`flashgen.runtime.dlpack`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable
from itertools import compress
from typing import TYPE_CHECKING, Any

from flashgen import installing
from flashgen.errors import BadParam, BadTensorDtype, DeviceTypeNotSupported, NoCompilerError, NullPointer
from flashgen.operators.arguments import ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashgen.operators.operator import Problem

# One for each argument of the operator, in its order; 0 and None for what is absent. Where there is a
# workspace, its pointer comes last.
Pointers = tuple[int, ...]
Arrays = tuple[Any, ...]
Work = Callable[[Arrays, int], None]  # queues the steps of a call on the stream of a CUDA handle

# A key over the layouts of a call's arrays, and their pointers; None and 0 for an array that is absent.
Read = tuple[tuple, tuple[int, ...]]

# Pointers of arrays, or None where one does not lie as expected.
Expecting = Callable[[tuple[Any, ...]], tuple[int, ...] | None]


INSIDE_TORCH_FUNC = (
    "a tensor inside torch.func (vmap, grad, jvp, functionalize) was given; call flashgen outside of it. In "
    "place of vmap make the mapped dimension part of the batch"
)
WITHOUT_GRADIENT = (
    "a tensor requires a gradient, which this call does not compute; call it under torch.no_grad() or pass "
    "tensor.detach()"
)

WITH_TANGENT = (
    "a tensor has a tangent of forward-mode AD, which flashgen does not compute; "
    "pass torch.autograd.forward_ad.unpack_dual(tensor).primal"
)


class RequiresGradient(BadParam):
    """A tensor requires a gradient; a caller that can have it recorded catches this, others say what they
    have none of.
    """

    def of(self, what: str) -> BadParam:
        return without_gradients(str(self), what)


def without_gradients(message: str, what: str) -> BadParam:
    """The error of a call that records nothing. Of a message: in a graph of Dynamo an error in a message is
    its repr.
    """
    return BadParam(f"{message}. There are no gradients of {what}")


class NumpyKind:
    """Arrays in host memory."""

    name = "numpy"
    expecting = None  # nothing is quicker than `read`

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
        return _element_strides(x)

    def view(self, x: Any) -> ArrayView:
        strides = _element_strides(x)
        return ArrayView("numpy", self.pointer(x), x.shape, strides, _numpy_dtype(x.dtype), None)

    def empty(self, shape: tuple[int, ...], like: Any, stream: Any, dtype: str | None = None) -> Any:
        """A new contiguous array on the device of ``like``, for use on ``stream`` or the current one.

        ``dtype`` is "fp32", "uint8", "int32", or None for that of ``like``.
        """
        import numpy as np

        return np.empty(shape, like.dtype if dtype is None else _NUMPY_NAMES[dtype])

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
        """Whether the elements of ``x`` lie in host memory."""
        return True

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


class CupyKind:
    """Arrays on a GPU."""

    name = "cupy"
    expecting = None

    def __init__(self, cupy: Any) -> None:
        self.types = {cupy.ndarray, type(None)}
        self._ndarray = cupy.ndarray
        self._cuda = cupy.cuda
        self._get_device = cupy.cuda.runtime.getDevice
        self._get_stream = cupy.cuda.get_current_stream
        self._dtypes = {name: _dtype(known) for name, known in _NUMPY_NAMES.items()}

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
        return _element_strides(x)

    def view(self, x: Any) -> ArrayView:
        strides = _element_strides(x)
        dtype = _numpy_dtype(x.dtype)
        return ArrayView("cupy", x.data.ptr, x.shape, strides, dtype, x.data.device_id)

    def empty(self, shape: tuple[int, ...], like: Any, stream: Any, dtype: str | None = None) -> Any:
        device = like.data.device_id
        numpy_dtype = like.dtype if dtype is None else self._dtypes[dtype]
        if stream is None and self._get_device() == device:
            return self._ndarray(shape, numpy_dtype)
        # CuPy's pool keeps memory per stream: what is allocated for a stream is only reused on it.
        with self._cuda.Device(device), self.use(stream):
            return self._ndarray(shape, numpy_dtype)

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

    def current_stream(self, device: int | None) -> int:
        return self._get_stream(device).ptr

    def records(self, q: Any, k: Any, v: Any) -> bool:
        return False

    def watched(self, x: Any) -> bool:
        return False

    def nbytes(self, x: Any) -> int:
        return x.nbytes

    def use(self, stream: Any) -> contextlib.AbstractContextManager:
        """Makes ``stream``, one of the current device, the current one; None changes nothing."""
        if stream is None:
            return contextlib.nullcontext()
        if isinstance(stream, self._cuda.Stream):
            return stream
        return self._cuda.Stream.from_external(_StreamHandle(stream_pointer(stream)))


class TorchKind:
    """PyTorch tensors, in host memory or on a GPU."""

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.types = {torch.Tensor, type(None)}
        self._torch = torch
        self._is_grad_enabled = torch.is_grad_enabled
        self._is_compiling = torch.compiler.is_compiling
        self._is_transforming = torch._C._are_functorch_transforms_active
        self._dispatch_modes = torch._C._len_torch_dispatch_stack
        self._is_tracing = torch._C._is_tracing
        self._no_dispatch = torch.Tensor.__torch_dispatch__
        self._forward_ad = torch.autograd.forward_ad
        # The handle alone: a Stream object costs 2 µs.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._get_stream = raw_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)
        self._made = {"fp32": torch.float32, "uint8": torch.uint8, "int32": torch.int32}
        self._dtypes = {
            torch.float16: "fp16",
            torch.bfloat16: "bf16",
            torch.float32: "fp32",
            torch.bool: "bool",
            torch.uint8: "uint8",
            torch.int32: "int32",
        }

    def layout(self, x: Any) -> tuple:
        return self.read((x,))[0][0]

    def read(self, arrays: Iterable[Any]) -> Read:
        """As in `NumpyKind`. Raises RuntimeError for a tensor without memory of its own; ``view`` says what
        is wrong with it.

        The last member of a layout is true for a tensor that ``view`` refuses, so no plan is found for it.
        """
        layouts: list[tuple | None] = []
        pointers: list[int] = []
        grad = self._is_grad_enabled()
        dual = self._forward_ad._current_level >= 0
        for x in arrays:
            if x is None:
                layouts.append(None)
                pointers.append(0)
            else:
                refused = (grad and x.requires_grad) or x.is_neg() or (dual and self._has_tangent(x))
                strides = x.is_contiguous() or x.stride()  # as for CuPy
                layouts.append((x.shape, strides, x.dtype, x.device, refused))
                pointers.append(x.data_ptr())
        return tuple(layouts), tuple(pointers)

    @functools.cached_property
    def expecting(self) -> Callable[[tuple[Any, ...]], Expecting | None] | None:
        # Not in __init__: torch.compile, where it traces the first call of a process, cannot trace guards.
        self._guards = _guards_of(self._torch)
        return None if self._guards is None else self._expecting

    def _expecting(self, arrays: tuple[Any, ...]) -> Expecting | None:
        """What gives the pointers of as many arrays that lie as these, and None for any others; None where
        there is nothing quicker than `read`.
        """
        tensors = [x for x in arrays if x is not None]
        if len(set(map(id, tensors))) < len(tensors):
            return None  # a guard refuses a tensor that comes twice
        # One call in place of seven for each tensor.
        fit = self._guards(*tensors, **_ALL_FIXED).check
        given = [x is not None for x in arrays]
        absent = [place for place, x in enumerate(arrays) if x is None]
        differentiable = any(x.requires_grad for x in tensors)
        is_grad_enabled, forward_ad = self._is_grad_enabled, self._forward_ad

        def pointers(arrays: tuple[Any, ...]) -> tuple[int, ...] | None:
            for place in absent:
                if arrays[place] is not None:
                    return None
            if not fit(*compress(arrays, given)):
                return None
            # What a guard does not look at: derivatives that would be lost.
            if (differentiable and is_grad_enabled()) or forward_ad._current_level >= 0:
                return None
            return tuple([0 if x is None else x.data_ptr() for x in arrays])

        return pointers

    def pointer(self, x: Any) -> int:
        return x.data_ptr()

    def strides(self, x: Any) -> tuple[int, ...]:
        return x.stride()

    def view(self, x: Any) -> ArrayView:
        self._refuse(x)
        device = self._device(x)
        dtype = self._dtypes.get(x.dtype, str(x.dtype))
        return ArrayView("torch", x.data_ptr(), tuple(x.shape), x.stride(), dtype, device)

    def _refuse(self, x: Any) -> None:
        """Raise BadParam for a tensor whose elements do not lie in memory as its shape and strides say, or
        whose derivatives would be lost.
        """
        torch = self._torch
        if x.is_nested:
            raise BadParam(
                "a nested tensor was given; expected a dense one, such as torch.nested.to_padded_tensor makes"
            )
        if x.layout != torch.strided:
            raise BadParam(
                f"a tensor of layout {x.layout} was given; expected a dense one: tensor.to_dense()"
            )
        if _is_wrapped(torch, x):
            raise BadParam(INSIDE_TORCH_FUNC)
        if x.is_neg():
            raise BadParam(
                "a tensor with a pending negation was given; pass tensor.resolve_neg(), which is a copy"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise RequiresGradient(WITHOUT_GRADIENT)
        if self._forward_ad._current_level >= 0 and self._has_tangent(x):
            raise BadParam(WITH_TANGENT)

    def _has_tangent(self, x: Any) -> bool:
        return self._forward_ad.unpack_dual(x).tangent is not None

    def _device(self, x: Any) -> int | None:
        if x.device.type == "cpu":
            return None
        if x.device.type != "cuda" or self._torch.version.hip:
            raise DeviceTypeNotSupported(
                f"a tensor is on {x.device}; supported are NVIDIA GPUs and host memory"
            )
        return x.device.index

    def empty(self, shape: tuple[int, ...], like: Any, stream: Any, dtype: str | None = None) -> Any:
        torch = self._torch
        torch_dtype = like.dtype if dtype is None else self._made[dtype]
        if stream is None:
            return like.new_empty(shape, dtype=torch_dtype, requires_grad=False)
        # The caching allocator reuses memory in the order of the stream it was allocated under.
        with torch.cuda.stream(self._stream(stream_pointer(stream), like.device)):
            return torch.empty(shape, dtype=torch_dtype, device=like.device)

    def contiguous(self, x: Any, stream: Any) -> Any:
        if stream is None or x.is_contiguous():
            return x.contiguous()
        with self._torch.cuda.stream(self._stream(stream_pointer(stream), x.device)):
            return x.contiguous()

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.expand(shape)

    def nbytes(self, x: Any) -> int:
        return x.numel() * x.element_size()

    def _stream(self, handle: int, device: Any) -> Any:
        cuda = self._torch.cuda
        # 0 and 1 both name the legacy default stream; PyTorch knows it only as its own default.
        return cuda.default_stream(device) if handle in (0, 1) else cuda.ExternalStream(handle, device=device)

    def on_host(self, x: Any) -> bool:
        return not x.is_cuda

    def current_stream(self, device: int | None) -> int:
        return 0 if device is None else self._get_stream(device)

    def records(self, q: Any, k: Any, v: Any) -> bool:
        if self._is_grad_enabled():
            for x in (q, k, v):
                if getattr(x, "requires_grad", False):
                    # Other calls refuse these two by name.
                    return self._is_compiling() or not (self._is_transforming() or x.is_nested)
        return self.watched(q) or self.dispatches(k) or self.dispatches(v)

    def watched(self, x: Any) -> bool:
        # A mode, a tracer or a subclass would see how the result is allocated, but not what writes to it.
        if self._is_compiling() or self._is_tracing() or self._dispatch_modes() or self.dispatches(x):
            return True
        return x.is_meta and not x.is_nested and x.layout == self._torch.strided  # others are refused

    def dispatches(self, x: Any) -> bool:
        """Whether a tensor is of a subclass that computes its operators itself; nested ones are refused."""
        if type(x) in self.types or not isinstance(x, self._torch.Tensor):
            return False
        return type(x).__torch_dispatch__ is not self._no_dispatch and not x.is_nested


_ALL_FIXED = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}


def _guards_of(torch: Any) -> Any:
    """What Dynamo recognises tensors by: type, dispatch keys, dtype, device, shape and strides. No public
    class, so None where this PyTorch has none that works as expected.
    """
    x = torch.empty(2, 2, device="cpu")
    others = x.view(torch.int32), x[:1], x.T, torch._neg_view(x)
    try:
        guard = torch._C._dynamo.guards.TensorGuards
        seen = [guard(x, **_ALL_FIXED).check(each) for each in (x, x.detach(), *others)]
    except (AttributeError, TypeError):
        return None
    return guard if seen == [True, True] + [False] * len(others) else None


def _is_wrapped(torch: Any, x: Any) -> bool:
    """Whether ``x`` is what torch.func hands to a function that it transforms."""
    functorch = getattr(torch._C, "_functorch", None)
    asks = ("is_functorch_wrapped_tensor", "is_functionaltensor")
    return any(ask(x) for ask in (getattr(functorch, name, None) for name in asks) if ask is not None)


Kind = NumpyKind | CupyKind | TorchKind


_KINDS: dict[str, Kind] = {}
_KIND_BY_TYPE: dict[type, Kind | None] = {}


def kind_of(x: Any) -> Kind | None:
    """How to read ``x``, or None if it is of no native library and must be adopted."""
    try:
        return _KIND_BY_TYPE[type(x)]
    except KeyError:
        return _resolve(x)


def _resolve(x: Any) -> Kind | None:
    if is_masked(x):
        return None
    # A library that is not imported cannot have made the array, so nothing is imported here.
    for library, array, make in (
        ("numpy", "ndarray", NumpyKind),
        ("cupy", "ndarray", CupyKind),
        ("torch", "Tensor", TorchKind),
    ):
        module = sys.modules.get(library)
        if module is not None and isinstance(x, getattr(module, array, ())):
            kind = _KINDS.get(library)
            if kind is None:
                kind = _KINDS[library] = make(module)
            _KIND_BY_TYPE[type(x)] = kind
            return kind
    return None


def _know_tensors() -> None:
    """Resolve the types of PyTorch, if it is imported, ahead of a first call that torch.compile traces: what
    changed meanwhile would have it traced again.
    """
    if sys.modules.get("torch") is None:
        return
    import torch  # another thread may still be at it

    if hasattr(torch, "Tensor"):
        kind = _KINDS["torch"] = TorchKind(torch)
        _KIND_BY_TYPE.update({torch.Tensor: kind, torch.nn.Parameter: kind})


_know_tensors()


def view(x: Any, name: str) -> ArrayView:
    """The view of a native array. ``name`` is the argument's name in messages.

    Raises NullPointer for None, BadTensorDtype for what is no native array (see `dlpack.adopt`).
    """
    if x is None:
        raise NullPointer(f"{name} is None; expected an array")
    kind = kind_of(x)
    if kind is None:
        raise BadTensorDtype(f"{name} has type {type(x).__name__}; expected a NumPy, CuPy or PyTorch array")
    try:
        return kind.view(x)
    except (BadParam, BadTensorDtype, DeviceTypeNotSupported) as error:
        raise type(error)(f"{name}: {error}") from None


def check_libraries(views: Mapping[str, ArrayView | None]) -> None:
    """That arrays on one device are of one library: each library has its own current stream, so work on
    arrays of two of them would be in no order. Raises BadParam.
    """
    (name_of_first, first), *others = views.items()
    for name, view in others:
        if view is not None and view.kind != first.kind and view.device == first.device:
            raise BadParam(
                f"{name} is a {view.kind} array but {name_of_first} is a {first.kind} one; convert it; "
                "DLPack does so without a copy"
            )


def stream_pointer(stream: Any) -> int:
    """The CUDA handle of a stream of CuPy, of PyTorch, or with ``__cuda_stream__``; or of a handle itself."""
    for attribute in ("ptr", "cuda_stream"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    try:
        return operator.index(stream)
    except TypeError:
        raise BadParam(
            f"stream is {stream!r}; expected None, a CuPy or PyTorch stream, or the handle of a CUDA stream"
        ) from None


class _StreamHandle:
    """The handle of a CUDA stream in the form of the stream protocol. Who made the stream keeps it alive."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def host_array(x: Any) -> Any:
    """A NumPy array over the memory of a native host array; bfloat16 is seen as its bits in uint16."""
    import numpy as np

    if not isinstance(x, np.ndarray):
        import torch

        x = x.detach()
        return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def check_writable(problem: Problem, arrays: Sequence[Any]) -> None:
    """That the outputs of a call in host memory can be written to. Raises BadParam."""
    for argument, array in zip(problem.operator.arguments, arrays, strict=True):
        if argument.is_output and array is not None and not host_array(array).flags.writeable:
            raise BadParam(f"{argument.name} is read-only; pass an array that can be written to")


def is_masked(x: Any) -> bool:
    """Whether ``x`` is an array of numpy.ma, whose mask no kernel reads."""
    ma = sys.modules.get("numpy.ma")
    return ma is not None and isinstance(x, ma.MaskedArray)


def import_cupy() -> Any:
    """CuPy. Raises NoCompilerError where it cannot be imported."""
    try:
        import cupy
    except ImportError as error:
        raise NoCompilerError(
            f"arrays on a GPU need CuPy, which cannot be imported ({error}); {installing.compiler()}"
        ) from error
    return cupy


def cupy_kind() -> CupyKind:
    """How to read CuPy arrays, whether or not one has been seen. Raises what `import_cupy` does."""
    if "cupy" not in _KINDS:
        _KINDS["cupy"] = CupyKind(import_cupy())
    return _KINDS["cupy"]


def _dtype(name: Any) -> Any:
    import numpy as np

    return np.dtype(name)


_NUMPY_NAMES = {"fp32": "float32", "uint8": "uint8", "int32": "int32"}
_NUMPY_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "bool": "bool"}
_NUMPY_DTYPES |= {"uint8": "uint8", "int32": "int32"}


def _numpy_dtype(dtype: Any) -> str:
    return _NUMPY_DTYPES.get(dtype.name, dtype.name) if dtype.isnative else str(dtype)


def _element_strides(x: Any) -> tuple[int, ...] | None:
    """As `NumpyKind.strides`, of an array whose ``strides`` are in bytes."""
    if any(stride % x.itemsize for stride, extent in zip(x.strides, x.shape, strict=True) if extent > 1):
        return None
    return tuple(stride // x.itemsize for stride in x.strides)
