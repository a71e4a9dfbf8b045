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
    xp = module_of(like)
    if xp is None:
        return None
    if xp.__name__ == "cupy":
        with like.device:
            return xp.full((count,), value, dtype=xp.int32)
    return xp.full((count,), value, dtype=xp.int32, device=_device_of(like))


def counted(count: int, like: Any) -> Any:
    """0 to ``count`` - 1, int32, on the device of ``like`` and of its library; None where that is unknown."""
    if is_tensor(like):
        return kind_of(like).torch.arange(count, dtype=kind_of(like).torch.int32, device=like.device)
    xp = module_of(like)
    if xp is None:
        return None
    if xp.__name__ == "cupy":
        with like.device:
            return xp.arange(count, dtype=xp.int32)
    return xp.arange(count, dtype=xp.int32, device=_device_of(like))


def _device_of(x: Any) -> Any:
    """The device of an array of NumPy or JAX; None inside ``jax.jit``, which places arrays itself."""
    return getattr(x, "device", None)
