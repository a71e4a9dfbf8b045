"""PyTorch tensors, in host memory or on a GPU, and which of them have derivatives that would be lost."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from flashgen import errors
from flashgen.errors import BadParam, DeviceTypeNotSupported
from flashgen.operators.arguments import DTYPE_BYTES, DTYPE_NAMES, ArrayView, dtype_name
from flashgen.runtime.streams import stream_pointer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashgen.runtime.numpykind import Read

# Pointers of arrays, or None if one has another layout.
Expecting = Callable[[tuple[Any, ...]], tuple[int, ...] | None]

INSIDE_TORCH_FUNC = (
    "a tensor inside torch.func (vmap, grad, jvp, functionalize) was given, or would be the result; call "
    "flashgen outside of it. Instead of vmap make the mapped dimension part of the batch"
)
WITHOUT_GRADIENT = (
    "a tensor requires a gradient, which this call does not compute; call it under torch.no_grad() or pass "
    "tensor.detach()"
)

NESTED = "a nested tensor was given; expected a dense one, such as torch.nested.to_padded_tensor makes"

WITH_TANGENT = (
    "a tensor has a tangent of forward-mode AD, which flashgen does not compute; "
    "pass torch.autograd.forward_ad.unpack_dual(tensor).primal"
)


class RequiresGradient(BadParam):
    """A tensor requires a gradient; a caller that can have it recorded catches this, others say what they
    have none of.
    """

    def of(self, what: str) -> BadParam:
        return without_gradients(self.message, what)

    def raise_as(self, names: Mapping[str, str], of: str) -> NoReturn:
        refused = self.of(of)
        refused.rename(names)
        raise refused from None


def inside_compile(what: str) -> BadParam:
    """The error of ``what``, which torch.compile cannot trace."""
    return BadParam(
        f"{what} was called inside torch.compile; call attention() there, an operator of its graph, or use "
        "plans outside of it"
    )


def without_gradients(message: str, what: str) -> BadParam:
    """The error of a call that records nothing. Of a message: in a graph of Dynamo an error in a message is
    its repr.
    """
    return BadParam(f"{message}. There are no gradients of {what}")


class TorchKind:
    """PyTorch tensors, in host memory or on a GPU."""

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.types = {torch.Tensor, type(None)}
        self.torch = torch
        self._is_grad_enabled = torch.is_grad_enabled
        self.is_compiling = torch.compiler.is_compiling
        errors.is_traced = torch.compiler.is_dynamo_compiling
        self._is_transforming = torch._C._are_functorch_transforms_active
        self._dispatch_modes = torch._C._len_torch_dispatch_stack
        self._is_tracing = torch._C._is_tracing
        self._no_dispatch = torch.Tensor.__torch_dispatch__
        self._forward_ad = torch.autograd.forward_ad
        self._increment_version = torch.autograd.graph.increment_version
        # The handle alone: a Stream object costs 2 µs.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._get_stream = raw_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)
        self._made = {"fp32": torch.float32, "uint8": torch.uint8, "int32": torch.int32}
        self._made |= {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
        names = (name for name in (*DTYPE_NAMES, *DTYPE_BYTES) if hasattr(torch, name))
        self._dtypes = {getattr(torch, name): dtype_name(name) for name in names}

    def layout(self, x: Any) -> tuple:
        return self.read((x,))[0][0]

    def read(self, arrays: Iterable[Any]) -> Read:
        """As in `NumpyKind`. Raises RuntimeError for a tensor without memory of its own; ``view`` says what
        is wrong with it.

        The last member of a layout is true for a tensor that ``view`` refuses, so no plan is found for it.
        """
        if self.is_compiling():  # no pointers yet; what becomes an operator of the graph does not come here
            raise inside_compile("a plan")
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
        self._guards = _guards_of(self.torch)
        return None if self._guards is None else self._expecting

    def _expecting(self, arrays: tuple[Any, ...]) -> Expecting | None:
        """What gives the pointers of as many arrays that lie as these, and None for any others; None where
        there is nothing quicker than `read`.
        """
        # A guard refuses a tensor that comes twice: the second one must be the first one.
        places: dict[int, int] = {}
        again = [
            (place, places[id(x)])
            for place, x in enumerate(arrays)
            if x is not None and places.setdefault(id(x), place) != place
        ]
        distinct = [*places.values()]
        tensors_of = picking(distinct)
        in_order = picking([len(distinct) if x is None else distinct.index(places[id(x)]) for x in arrays])
        tensors = tensors_of(arrays)
        # One call instead of seven for each tensor.
        fit = self._guards(*tensors, **_ALL_FIXED).check
        absent = [place for place, x in enumerate(arrays) if x is None]
        differentiable = any(x.requires_grad for x in tensors)
        is_grad_enabled, forward_ad = self._is_grad_enabled, self._forward_ad

        def pointers(arrays: tuple[Any, ...]) -> tuple[int, ...] | None:
            for place in absent:
                if arrays[place] is not None:
                    return None
            for place, first in again:
                if arrays[place] is not arrays[first]:
                    return None
            tensors = tensors_of(arrays)
            try:
                for x in tensors:
                    if x is None or x.is_nested:  # at which a guard aborts
                        return None
            except AttributeError:  # of another library
                return None
            if not fit(*tensors):
                return None
            # What a guard does not look at: derivatives that would be lost.
            if (differentiable and is_grad_enabled()) or forward_ad._current_level >= 0:
                return None
            return in_order((*[x.data_ptr() for x in tensors], 0))

        return pointers

    def wrote(self, x: Any) -> None:
        """Tell autograd that a tensor was written to: it then refuses what needs the values before."""
        if not x.is_inference():  # which autograd does not know
            self._increment_version(x)

    def pointer(self, x: Any) -> int:
        try:
            return x.data_ptr()
        except RuntimeError:
            if _is_wrapped(self.torch, x):  # also what is made there, of tensors that are not
                raise BadParam(INSIDE_TORCH_FUNC) from None
            raise

    def strides(self, x: Any) -> tuple[int, ...]:
        return x.stride()

    def view(self, x: Any) -> ArrayView:
        self._refuse(x)
        device = self._device(x)
        dtype = self._dtypes.get(x.dtype, str(x.dtype))
        return ArrayView("torch", x.data_ptr(), tuple(x.shape), x.stride(), dtype, device)

    def _refuse(self, x: Any) -> None:
        """Raise BadParam for a tensor whose elements are not in memory as its shape and strides say, or
        whose derivatives would be lost.
        """
        torch = self.torch
        if x.is_nested:
            raise BadParam(NESTED)
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
        if x.device.type != "cuda" or self.torch.version.hip:
            raise DeviceTypeNotSupported(
                f"a tensor is on {x.device}; supported are NVIDIA GPUs and host memory"
            )
        return x.device.index

    def empty(self, shape: tuple[int, ...], like: Any, stream: Any, dtype: str | None = None) -> Any:
        torch = self.torch
        torch_dtype = like.dtype if dtype is None else self._made[dtype]
        if stream is None:
            if type(like) not in self.types:  # a subclass has results of its own type
                return like.new_empty(shape, dtype=torch_dtype, requires_grad=False)
            # Half as long as torch.empty or new_empty.
            return torch.empty_strided(
                shape, _contiguous_strides(shape), dtype=torch_dtype, device=like.device
            )
        # The caching allocator reuses memory in the order of the stream it was allocated under.
        with torch.cuda.stream(self._stream(stream_pointer(stream), like.device)):
            return torch.empty(shape, dtype=torch_dtype, device=like.device)

    def maker(self, shape: tuple[int, ...], like: Any, dtype: str | None) -> Callable[[], Any]:
        """What makes tensors as `empty` does on the current stream, beside plain tensors as ``like``."""
        options = {"dtype": like.dtype if dtype is None else self._made[dtype], "device": like.device}
        return functools.partial(self.torch.empty_strided, shape, _contiguous_strides(shape), **options)

    def integers(self, values: Sequence[int], like: Any, stream: Any) -> Any:
        torch = self.torch
        with self._use(stream, like.device):
            return torch.tensor(values, dtype=torch.int64, device=like.device)

    def random_integers(self, count: int, like: Any, stream: Any) -> Any:
        """As `integers`, of the generator of the device of ``like``: as for PyTorch's own random numbers, a
        captured graph draws others in each replay.
        """
        torch = self.torch
        with self._use(stream, like.device):
            return torch.randint(0, 2**63 - 1, (count,), dtype=torch.int64, device=like.device)

    def _use(self, stream: Any, device: Any) -> contextlib.AbstractContextManager:
        """Makes ``stream`` the current one; None changes nothing."""
        if stream is None:
            return contextlib.nullcontext()
        return self.torch.cuda.stream(self._stream(stream_pointer(stream), device))

    def contiguous(self, x: Any, stream: Any) -> Any:
        if stream is None or x.is_contiguous():
            return x.contiguous()
        with self.torch.cuda.stream(self._stream(stream_pointer(stream), x.device)):
            return x.contiguous()

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.expand(shape)

    def nbytes(self, x: Any) -> int:
        return x.numel() * x.element_size()

    def _stream(self, handle: int, device: Any) -> Any:
        cuda = self.torch.cuda
        # 0 and 1 both name the legacy default stream; PyTorch knows it only as its own default.
        return cuda.default_stream(device) if handle in (0, 1) else cuda.ExternalStream(handle, device=device)

    def on_host(self, x: Any) -> bool:
        return not x.is_cuda

    def stream_of(self, x: Any) -> int:
        return self._get_stream(x.device.index)

    def is_capturing(self) -> bool:
        return self.torch.cuda.is_current_stream_capturing()

    def current_stream(self, device: int | None) -> int:
        return 0 if device is None else self._get_stream(device)

    def records(self, q: Any, k: Any, v: Any) -> bool:
        if self._is_grad_enabled():
            for x in (q, k, v):
                if getattr(x, "requires_grad", False):
                    # Other calls refuse these two by name.
                    return self.is_compiling() or not (self._is_transforming() or x.is_nested)
        return self.watched(q) or self.dispatches(k) or self.dispatches(v)

    def watched(self, x: Any) -> bool:
        # A mode, a tracer or a subclass would see how the result is allocated, but not what writes to it.
        if self.is_compiling() or self._is_tracing() or self._dispatch_modes() or self.dispatches(x):
            return True
        return x.is_meta and not x.is_nested and x.layout == self.torch.strided  # others are refused

    def wants_same_bits(self) -> bool:
        return self.torch.are_deterministic_algorithms_enabled()

    def dispatches(self, x: Any) -> bool:
        """Whether a tensor is of a subclass that computes its operators itself; nested ones are refused."""
        if type(x) in self.types or not isinstance(x, self.torch.Tensor):
            return False
        return type(x).__torch_dispatch__ is not self._no_dispatch and not x.is_nested


def picking(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What gives the elements at these places, as a tuple."""
    if len(places) == 1:
        return lambda values: (values[places[0]],)
    return operator.itemgetter(*places)


@functools.lru_cache(maxsize=1024)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of PyTorch's contiguous tensors, also of those without elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


_ALL_FIXED = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}


def _guards_of(torch: Any) -> Any:
    """What Dynamo recognises tensors by: type, dispatch keys, dtype, device, shape and strides. No public
    class, so None where this PyTorch has none that works as expected.
    """
    x = torch.empty(2, 2, device="cpu")
    others = x.view(torch.int32), x[:1], x.T, torch._neg_view(x)
    try:
        guard = torch._C._dynamo.guards.TensorGuards
        seen = [guard(x, **_ALL_FIXED).check(tensor) for tensor in (x, x.detach(), *others)]
    except (AttributeError, TypeError):
        return None
    return guard if seen == [True, True] + [False] * len(others) else None


def _is_wrapped(torch: Any, x: Any) -> bool:
    """Whether ``x`` is what torch.func hands to a function that it transforms."""
    functorch = getattr(torch._C, "_functorch", None)
    asks = ("is_functorch_wrapped_tensor", "is_functionaltensor")
    return any(ask(x) for ask in (getattr(functorch, name, None) for name in asks) if ask is not None)
