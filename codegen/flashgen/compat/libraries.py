"""The libraries of arrays, for what a drop-in makes itself."""

from __future__ import annotations

import importlib
from typing import Any

from flashgen.errors import BadTensorDtype, arg
from flashgen.runtime.arrays import kind_of, tensor_kind, view
from flashgen.runtime.dlpack import adopt


def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a dense tensor of PyTorch."""
    kind = tensor_kind(x)
    return kind is not None and x.layout == kind.torch.strided and not x.is_nested


def module_of(x: Any) -> Any:
    """The module of NumPy, CuPy or JAX whose functions take the array; None for anything else."""
    package = type(x).__module__.partition(".")[0]
    if package in ("numpy", "cupy"):  # not every CuPy has __array_namespace__
        return importlib.import_module(package)
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else None


def shape_of(name: str, x: Any) -> tuple[int, ...]:
    """The shape of the array ``name``. Raises what ``attention`` raises for None, for anything but an array,
    and for a nested or a sparse tensor; BadTensorDtype for a DLPack array that has no shape itself.
    """
    if not is_tensor(x) and module_of(x) is None:
        view(adopt(x, name), name)
        if not hasattr(x, "shape"):
            raise BadTensorDtype(
                f"{arg(name)} has type {type(x).__name__}, which has no shape; pass an array made of it, "
                "such as numpy.from_dlpack makes"
            )
    return tuple(x.shape)


def int32s(count: int, value: int, like: Any) -> Any:
    """``count`` times ``value``, on the device of ``like`` and of its library; None where that is unknown."""
    if is_tensor(like):
        return like.new_full((count,), value, dtype=kind_of(like).torch.int32)
    return _made(like, "full", (count,), value)


def counted(count: int, like: Any) -> Any:
    """0 to ``count`` - 1, int32, on the device of ``like`` and of its library; None where that is unknown."""
    if is_tensor(like):
        return kind_of(like).torch.arange(count, dtype=kind_of(like).torch.int32, device=like.device)
    return _made(like, "arange", count)


def _made(like: Any, function: str, *args: Any) -> Any:
    """An int32 array by a function of the library of ``like``, on its device; None for other libraries."""
    xp = module_of(like)
    if xp is None:
        return None
    make = getattr(xp, function)
    if xp.__name__ == "cupy":
        with like.device:
            return make(*args, dtype=xp.int32)
    # An array inside ``jax.jit`` has no device: JAX itself places what is made.
    return make(*args, dtype=xp.int32, device=getattr(like, "device", None))
