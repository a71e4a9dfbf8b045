"""The argument table: what an operator states about its arrays, once.

Layout and overlap checks, the order of pointers, tensor maps, parameter structs, regions of the simulator,
example arrays and byte counts derive from it. A shape is written in symbols, as in einops:
``"batch seqlen_q num_heads_q head_dim"``; a problem gives each symbol a size.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    DeviceTypeNotSupported,
    arg,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DTYPE_BYTES = {
    "fp16": 2,
    "bf16": 2,
    "fp32": 4,
    "float64": 8,
    "e4m3": 1,
    "bool": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
# Usual names of dtypes, which specs do not use.
DTYPE_NAMES = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float8_e4m3fn": "e4m3",
}
# Bytes to which the address and the rows of an array of elements are aligned.
ROW_ALIGNMENT = 16
# Bytes at whose multiples the workspace of a call begins, and each slice of it.
WORKSPACE_ALIGNMENT = 256

# Arrays of numbers that are no elements, with any strides but the last, and contiguous ones.
INT32, FP32 = ({"dtypes": (dtype,), "alignment": 4} for dtype in ("int32", "fp32"))
WHOLE_INT32, WHOLE_FP32 = ({**numbers, "layout": "contiguous"} for numbers in (INT32, FP32))

Strides = tuple[int, ...]
# What a symbol is called in the name of a stride: q_row_stride, mask_head_stride.
_STRIDE_WORDS = {
    "batch": "batch",
    "seqlen": "row",
    "rows": "row",
    "kv_scale_batch": "batch",
    "kv_scale_rows": "row",
    "num_heads": "head",
    # Of a cache, of what goes into it, and of tables.
    "num_pages": "page",
    "page_size": "row",
    "seqlen_new": "row",
    # Of arrays with an element for each token.
    "token_batch": "batch",
    "tokens": "row",
    "num_positions": "row",
    "sequences": "sequence",
}


@dataclass(frozen=True, slots=True)
class ArrayView:
    """The memory of an array. ``strides`` are in elements, ``pointer`` is an address, ``device`` a CUDA
    ordinal or None for host memory, ``dtype`` one of fp16, bf16, fp32, float64, e4m3, bool, uint8, int32,
    int64, or else the library's own name of an unsupported type."""

    kind: str
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device: int | None


class Argument(NamedTuple):
    """One array of an operator.

    ``shape`` lists the symbols of its dimensions, or sizes that are fixed; a leading batch may be left out by
    the caller, an empty shape is a scalar in device memory. ``dtypes`` are those allowed; none means the
    element type of the call.
    ``layout`` is "rows" (any strides, but the last dimension is contiguous and rows are aligned),
    "contiguous", or "broadcast" (from the right, as in NumPy, but for the last dimension, which is
    contiguous). ``alignment`` is in bytes. A missing optional input is a null pointer; a missing output is
    allocated. ``differentiable`` is whether the operator of gradients has one in it.
    """

    name: str
    role: Literal["input", "output"]
    shape: str
    dtypes: tuple[str, ...] = ()
    layout: Literal["rows", "contiguous", "broadcast"] = "rows"
    alignment: int = ROW_ALIGNMENT
    optional: bool = False
    differentiable: bool = False

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of the dimensions, in order."""
        return tuple(self.shape.split())

    @property
    def leads_with_batch(self) -> bool:
        """Whether its first dimension is the batch, which a caller may leave out."""
        return self.symbols[:1] in (("batch",), ("batch_q",), ("batch_kv",))

    @property
    def is_output(self) -> bool:
        return self.role == "output"

    def dtype(self, element: str) -> str:
        """The dtype as kernels see it, where the call's elements are ``element``."""
        return self.dtypes[-1] if self.dtypes else element

    def stride_names(self) -> tuple[str, ...]:
        """The names of the parameters for its strides, in elements: one for each dimension but the last."""
        prefix = f"{self.name}_"
        words = (
            symbol.removesuffix("_q").removesuffix("_kv").removeprefix(prefix) for symbol in self.symbols[:-1]
        )
        return tuple(f"{self.name}_{_STRIDE_WORDS.get(word, word)}_stride" for word in words)

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The size of each dimension."""
        return tuple(int(x) if x.isdecimal() else sizes[x] for x in self.symbols)


class ArrayLayout(NamedTuple):
    """An argument as one call lays it out: the size of each dimension, and the strides of all but the last in
    elements, 0 where the extent is at most 1.
    """

    argument: Argument
    extents: tuple[int, ...]
    strides: Strides
    dtype: str

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: the last dimension."""
        return (self.extents[-1] if self.extents else 1) * self.element_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of its distinct elements; elements of a broadcast dimension count once."""
        rows = (
            1 if stride == 0 and self.argument.layout == "broadcast" else extent
            for extent, stride in zip(self.extents[:-1], self.strides, strict=True)
        )
        return math.prod(rows) * self.row_bytes

    def span(self) -> tuple[int, int]:
        """The first byte touched and the one past the last, from the pointer."""
        if 0 in self.extents:
            return 0, 0
        steps = [
            (extent - 1) * stride * self.element_bytes
            for extent, stride in zip(self.extents[:-1], self.strides, strict=True)
        ]
        below, above = (step for step in steps if step < 0), (step for step in steps if step > 0)
        return sum(below), sum(above) + self.row_bytes


def on_device(device: int | None) -> str:
    """Where an array is, for a message."""
    return "in host memory" if device is None else f"on GPU {device}"


def check_devices(views: Mapping[str, ArrayView]) -> None:
    """That all arrays are where the first one is. Raises DeviceTypeNotSupported."""
    first, *_ = views
    where = views[first].device
    for name, view in views.items():
        if view.device != where:
            raise DeviceTypeNotSupported(
                f"{arg(name)} is {on_device(view.device)} but {arg(first)} is {on_device(where)}; all arrays "
                "must be on one device"
            )


def shown(x: Any) -> str:
    """``x`` in a message; of a long integer, which Python may refuse to print, how many digits it has."""
    if isinstance(x, int) and x.bit_length() > 128:
        return f"an integer of {math.floor(math.log10(abs(x))) + 1} digits"
    if type(x) is tuple:
        return shown_shape(list(map(shown, x)))
    try:
        return repr(x)
    except ValueError:
        return f"a {type(x).__name__} with an integer of too many digits"


def shown_shape(symbols: Sequence[str]) -> str:
    """A shape in symbols for a message, as Python writes a tuple: "(batch, head_dim)", "(batch,)"."""
    return f"({', '.join(symbols)}{',' if len(symbols) == 1 else ''})"


def flag(name: str, value: Any) -> bool:
    """An option that is on or off. Raises BadParam for anything but a truth value: a word, an array, None."""
    # NumPy's own bool is no int.
    if (isinstance(value, int) or type(value).__name__ in ("bool", "bool_")) and value in (0, 1):
        return bool(value)
    raise BadParam(f"{arg(name)} is {shown(value)}; expected True or False")


class Expected(NamedTuple):
    """A bound of lengths that a caller may have wrong, as in flash-attn: it chooses the kernel. Longer
    sequences lose no key.
    """

    bound: Any


def length_bound(name: str, bound: Any) -> int | Expected | None:
    """A bound of lengths as an int, which the element of a tensor is not: it may change. Raises BadParam for
    what is neither an integer nor None, such as True.
    """
    if isinstance(bound, Expected):
        return Expected(length_bound(name, bound.bound))
    if bound is None:
        return None  # before the error, which Dynamo of PyTorch 2.11 does not catch
    if not isinstance(bound, bool):
        try:
            return operator.index(bound)
        except TypeError:
            pass
    raise BadParam(f"{arg(name)} is {shown(bound)}; expected an integer, or None")


def margin_of(name: str, margin: Any) -> int:
    """A number of multiprocessors that a call leaves to others. Raises BadParam."""
    if isinstance(margin, bool) or not isinstance(margin, numbers.Integral) or margin < 0:
        raise BadParam(f"{arg(name)} is {shown(margin)}; expected an integer of 0 or more")
    return int(margin)


def dtype_name(name: str) -> str:
    """A dtype as the specs call it: "fp16" for "float16" or "half". Other names stay as they are."""
    return DTYPE_NAMES.get(name, name)


def view_of_shape(shape: Sequence[int], dtype: str, device: int | None) -> ArrayView:
    """The view of a contiguous array of this shape that nobody has made: of a plan without arrays."""
    shape = tuple(shape)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return ArrayView("shape", 256, shape, strides, dtype, device)


def contiguous_strides(extents: Sequence[int]) -> Strides:
    """Strides in elements of all dimensions but the last, in C order; 0 for an extent of at most 1."""
    strides, step = [], math.prod(extents[-1:])
    for extent in reversed(extents[:-1]):
        strides.append(step)
        step *= extent
    return normal_strides(extents, tuple(reversed(strides)))


def normal_strides(extents: Sequence[int], strides: Sequence[int]) -> Strides:
    """``strides`` with 0 where the extent is at most 1 and no stride is ever used, so that equal layouts are
    equal.
    """
    if 0 in extents:
        return (0,) * (len(extents) - 1)
    return tuple(stride if extent > 1 else 0 for extent, stride in zip(extents[:-1], strides, strict=False))


def is_contiguous(view: ArrayView) -> bool:
    """Whether an array is in C order; strides of extents of at most 1 may be anything."""
    if 0 in view.shape or not view.shape:
        return True
    if view.strides is None:
        return False
    last = view.shape[-1] <= 1 or view.strides[-1] == 1
    return last and normal_strides(view.shape, view.strides) == contiguous_strides(view.shape)


def place(argument: Argument, view: ArrayView | None, sizes: Mapping[str, int], element: str) -> ArrayLayout:
    """The layout of ``view``, once it is known to fit; None: a new contiguous array. A missing batch is
    added.
    """
    extents = argument.extents(sizes)
    if view is None:
        strides = contiguous_strides(extents)
    elif 0 in view.shape or view.strides is None:
        strides = (0,) * max(0, len(extents) - 1)
    else:
        missing = len(extents) - len(view.shape)
        shape, steps = (1,) * missing + tuple(view.shape), (0,) * missing + tuple(view.strides)
        strides = normal_strides(shape, steps[:-1])
    return ArrayLayout(argument, extents, strides, argument.dtype(element))


def strides_of(
    arguments: Sequence[Argument],
    views: Mapping[str, ArrayView | None],
    sizes: Mapping[str, int],
    element: str,
) -> tuple[Strides | None, ...]:
    """The strides of each argument of a call, once its arrays are known to fit. An optional argument without
    an entry in ``views`` is absent. An entry of None, or a required argument without one, is a new contiguous
    array.
    """
    return tuple(
        place(argument, views.get(argument.name), sizes, element).strides
        if argument.name in views or not argument.optional
        else None
        for argument in arguments
    )


def total_bytes(arguments: Sequence[Argument], sizes: Mapping[str, int], element: str) -> int:
    """Bytes of contiguous arrays: what a call must read and write at least once."""
    layouts = (
        ArrayLayout(argument, extents, contiguous_strides(extents), argument.dtype(element))
        for argument in arguments
        for extents in [argument.extents(sizes)]
    )
    return sum(array.nbytes for array in layouts)


def check_array(argument: Argument, view: ArrayView, sizes: Mapping[str, int], element: str) -> None:
    """That an array has the dtype, the shape and the layout that its argument asks for.

    Raises BadTensorDtype, BadTensorShape or BadTensorStrides.
    """
    name, allowed = argument.name, argument.dtypes or (element,)
    if view.dtype not in allowed:
        raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; expected {' or '.join(allowed)}")
    expected = argument.extents(sizes)
    if argument.layout == "broadcast":
        check_broadcast(argument, view, expected)
        return
    if view.shape != expected and not (argument.leads_with_batch and view.shape == expected[1:]):
        raise BadTensorShape(f"{arg(name)} has shape {view.shape}; expected {expected}")
    check_strides(argument, view, DTYPE_BYTES[view.dtype])


def check_layouts(arguments: Sequence[Argument], views: Mapping[str, ArrayView | None]) -> None:
    """`check_strides` of each argument that has a view."""
    for argument in arguments:
        view = views.get(argument.name)
        if view is not None:
            check_strides(argument, view, DTYPE_BYTES[view.dtype])


def check_strides(argument: Argument, view: ArrayView, element_bytes: int) -> None:
    """That the last dimension is contiguous and rows are aligned, and that no two elements of an output share
    an address. Raises BadTensorStrides.
    """
    name = argument.name
    if 0 in view.shape or not view.shape:
        return
    if view.strides is None:
        raise BadTensorStrides(f"{arg(name)} has rows that do not start at a whole number of elements")
    if argument.layout == "contiguous":
        if not is_contiguous(view):
            raise BadTensorStrides(
                f"{arg(name)} has strides {view.strides} (in elements); it must be contiguous"
            )
        return
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise BadTensorStrides(
            f"{arg(name)} has strides {view.strides} (in elements); the last dimension must be contiguous"
        )
    for extent, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
        if extent > 1 and stride * element_bytes % argument.alignment:
            raise BadTensorStrides(
                f"{arg(name)} has strides {view.strides} (in elements); each row must start at a multiple of "
                f"{argument.alignment} bytes, that is {argument.alignment // element_bytes} elements"
            )
    if argument.is_output and _shares_elements(view):
        raise BadTensorStrides(
            f"{arg(name)} has shape {view.shape} and strides {view.strides}: several elements share one "
            "address"
        )


def check_broadcast(argument: Argument, view: ArrayView, expected: tuple[int, ...]) -> None:
    """That an array broadcasts, from the right, to ``expected``, and has its last dimension in full.

    Raises BadTensorShape or BadTensorStrides.
    """
    rank = len(view.shape)
    fits = 1 <= rank <= len(expected) and view.shape[-1] == expected[-1]
    for extent, full in zip(view.shape[:-1], expected[len(expected) - rank : -1], strict=False):
        fits = fits and extent in (1, full)
    if not fits:
        raise BadTensorShape(
            f"{arg(argument.name)} has shape {view.shape}; it must broadcast, from the right, to "
            f"{shown_shape(argument.symbols)} = {expected}, and its last dimension must be "
            f"{arg(f'columns of {argument.name}', f'{argument.symbols[-1]} itself')}"
        )
    if view.shape[-1] > 1 and 0 not in view.shape and (view.strides is None or view.strides[-1] != 1):
        raise BadTensorStrides(
            f"{arg(argument.name)} has strides {view.strides} (in elements); its last dimension must be "
            "contiguous"
        )


def _shares_elements(view: ArrayView) -> bool:
    reach = 0
    pairs = sorted((abs(stride), extent) for extent, stride in zip(view.shape, view.strides, strict=True))
    for stride, extent in pairs:
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False
