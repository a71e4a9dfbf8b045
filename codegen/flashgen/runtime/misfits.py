"""What is wrong with arrays that do not fit a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    DeviceTypeNotSupported,
    InsufficientWorkspace,
    NullPointer,
    arg,
)
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    WORKSPACE_ALIGNMENT,
    Argument,
    check_array,
    check_strides,
    is_contiguous,
    on_device,
    place,
)
from flashgen.runtime import arrays as libraries

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.operator import Problem
    from flashgen.runtime.arrays import Arrays, Kind

# The dtypes of codes.
_BYTES = {"e4m3", "uint8"}


def check_fit(
    problem: Problem, kind: Kind, examples: tuple[Any, ...], takes: Callable[[], str], arrays: Arrays
) -> None:
    """Raise the error of arrays that do not fit a plan of ``problem`` for arrays of ``kind``. ``examples``
    has the layouts that the plan was made for, None for an output that was missing. ``takes`` says which
    arrays the plan takes.
    """
    sizes = problem.sizes
    for position, (argument, array) in enumerate(zip(problem.operator.arguments, arrays, strict=True)):
        name, planned = argument.name, problem.strides[position]
        if array is None:
            if not argument.is_output and planned is not None:
                why = ", but the plan was made with one" if argument.optional else "; expected an array"
                raise NullPointer(f"{arg(name)} is None{why}; {takes()}")
            continue
        view = libraries.view(array, name)
        if view.kind != kind.name:
            raise BadParam(
                f"{arg(name)} is a {arg(f'library of {name}', view.kind)} array, but the plan was made "
                f"for {kind.name} arrays"
            )
        if planned is None:
            without = "return_lse=True" if name == "lse" else f"one; {takes()}"
            raise BadParam(f"{arg(name)} was given to a plan made without {without}")
        example = examples[position]
        if example is not None:
            if kind.layout(array) != example:
                _check_like(argument, view, problem, tuple(example[0]))
        else:
            _check_new(problem, view, position, sizes)


def _check_new(problem: Problem, view: ArrayView, position: int, sizes: dict[str, int]) -> None:
    """An output that was not there when the plan was made: contiguous, as the plan would allocate it."""
    argument = problem.operator.arguments[position]
    if view.device != problem.device:
        raise DeviceTypeNotSupported(
            f"{arg(argument.name)} is {on_device(view.device)}; the plan was made for arrays "
            f"{on_device(problem.device)}"
        )
    check_array(argument, view, sizes, problem.dtype)
    dtype = problem.new_dtype(argument)
    if dtype is not None and view.dtype != dtype and {view.dtype, dtype} != _BYTES:
        raise BadTensorDtype(f"{arg(argument.name)} has dtype {view.dtype}; the plan was made for {dtype}")
    expected = problem.shape(position)
    if view.shape != expected:  # a batch more or less, which `check_array` lets pass
        raise BadTensorShape(f"{arg(argument.name)} has shape {view.shape}; the plan was made for {expected}")
    if not is_contiguous(view):
        raise BadTensorStrides(
            f"{arg(argument.name)} has strides {view.strides} (in elements); the plan was made without "
            f"{arg(argument.name)}, so it must be contiguous"
        )


def _check_like(argument: Argument, view: ArrayView, problem: Problem, shape: tuple[int, ...]) -> None:
    """Raise for an array whose dtype, device or layout differs from the plan's, which has this shape.

    A stride along a dimension of one element is never used, so it may differ.
    """
    name, layout = argument.name, problem.array_layouts()[problem.operator.position(argument.name)]
    # Kernels read these in the same way, and no other two dtypes.
    alike = {view.dtype, layout.dtype} in ({"bool", "uint8"}, _BYTES)
    if view.dtype != layout.dtype and not alike:
        raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; the plan was made for {layout.dtype}")
    if view.device != problem.device:
        raise DeviceTypeNotSupported(
            f"{arg(name)} is {on_device(view.device)}; the plan was made for arrays "
            f"{on_device(problem.device)}"
        )
    if view.shape != shape:
        symbols = argument.symbols[len(argument.symbols) - len(shape) :]
        if argument.layout != "broadcast" and len(view.shape) == len(shape):
            for symbol, size, expected in zip(symbols, view.shape, shape, strict=True):
                if size != expected:
                    what = problem.symbol_name(symbol)
                    raise BadTensorShape(f"{arg(name)} has {what} {size}; the plan was made for {expected}")
        raise BadTensorShape(f"{arg(name)} has shape {view.shape}; the plan was made for {shape}")
    check_strides(argument, view, DTYPE_BYTES[view.dtype])
    strides = place(argument, view, problem.sizes, problem.dtype).strides
    if strides != layout.strides:
        ahead = len(strides) + 1 - len(shape)
        raise BadTensorStrides(
            f"{arg(name)} has strides {(*strides[ahead:], 1)} (in elements); the plan was made for "
            f"{(*layout.strides[ahead:], 1)}"
        )


def check_workspace(workspace: Any, view: ArrayView, kind: Kind, device: int | None, needed: int) -> None:
    """Raise the error of a workspace, with this view, that a plan for arrays of ``kind`` cannot use."""
    if view.kind != kind.name:  # whose streams know nothing of each other
        raise BadParam(
            f"{arg('workspace')} is a {view.kind} array, but the plan was made for {kind.name} arrays"
        )
    if view.device != device or not is_contiguous(view):
        raise BadParam(f"{arg('workspace')} must be a contiguous array on the device of the plan")
    size = kind.nbytes(workspace)
    if size < needed:
        raise InsufficientWorkspace(f"{arg('workspace')} has {size} bytes; the plan needs {needed}")
    if needed and view.pointer % WORKSPACE_ALIGNMENT:
        raise BadTensorStrides(
            f"{arg('workspace')} starts at address {view.pointer:#x}; it must be a multiple of "
            f"{WORKSPACE_ALIGNMENT} bytes"
        )
