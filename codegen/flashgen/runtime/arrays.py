"""Arrays of NumPy, CuPy and PyTorch, read as they are: a pointer with a layout.

Arrays of any other library are first adopted (`flashgen.runtime.dlpack`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam, BadTensorDtype, DeviceTypeNotSupported, NullPointer, arg
from flashgen.runtime.cupykind import CupyKind, import_cupy
from flashgen.runtime.numpykind import NumpyKind
from flashgen.runtime.torchkind import TorchKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.arguments import ArrayView

__all__ = ["view"]

# One for each argument of the operator, in its order; 0 and None for what is absent. Where there is a
# workspace, its pointer comes last.
Pointers = tuple[int, ...]
Arrays = tuple[Any, ...]
Work = Callable[[Arrays, int], None]  # queues the steps of a call on the stream of a CUDA handle

Kind = NumpyKind | CupyKind | TorchKind


_KINDS: dict[str, Kind] = {}
# PyTorch's tensors, and how to read them, once it is imported. What torch.compile traces reads these names,
# and no dictionary that may change meanwhile.
_tensor: Any = ()
_tensor_kind: TorchKind | None = None


def kind_of(x: Any) -> Kind | None:
    """How to read ``x``, or None if it is of no native library and must be adopted."""
    return _tensor_kind if isinstance(x, _tensor) else _kind_of_type(type(x))


def runs_kernels(x: Any, backend: str | None) -> bool:
    """Whether a call whose first array is ``x`` runs kernels, on a GPU or in the simulator."""
    kind = kind_of(x)
    if kind is None:  # adopted later
        return hasattr(x, "__cuda_array_interface__")
    return not kind.on_host(x) or (backend or os.environ.get("FLASHGEN_BACKEND")) == "simulator"


def on_host(x: Any) -> Any:
    """An array as one of NumPy: of a GPU a copy, which waits for it."""
    if hasattr(x, "detach"):
        return x.detach().cpu().numpy()
    return x.get() if hasattr(x, "get") else np.asarray(x)


def tensor_kind(x: Any) -> TorchKind | None:
    """How to read ``x`` if it is a tensor of PyTorch, else None."""
    return _tensor_kind if isinstance(x, _tensor) else None


@cache
def _kind_of_type(cls: type) -> Kind | None:
    if is_of(cls, "numpy.ma", "MaskedArray"):
        return None
    # A library that is not imported cannot have made the array, so nothing is imported here.
    for library, array, make in (
        ("numpy", "ndarray", NumpyKind),
        ("cupy", "ndarray", CupyKind),
        ("torch", "Tensor", TorchKind),
    ):
        if is_of(cls, library, array):
            kind = _KINDS.get(library)
            if kind is None:  # one for all threads that come first
                kind = _KINDS.setdefault(library, make(importlib.import_module(library)))
            return kind
    return None


def is_of(cls: type, library: str, name: str) -> bool:
    """Whether a class is this one of a library or derives from it. It need not be imported to tell."""
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith(f"{library}.") for base in cls.__mro__
    )


def know_tensors() -> None:
    """Know the tensors of PyTorch, if it is imported, before a first call that torch.compile traces."""
    global _tensor, _tensor_kind
    if sys.modules.get("torch") is None:
        return
    import torch  # another thread may still be at it

    if hasattr(torch, "Tensor"):
        _tensor_kind = _KINDS.setdefault("torch", TorchKind(torch))
        _tensor = torch.Tensor


know_tensors()


def view(x: Any, name: str) -> ArrayView:
    """The view of a native array. ``name`` is the argument's name in messages.

    Raises NullPointer for None, BadTensorDtype for anything but a native array (see `dlpack.adopt`).
    """
    if x is None:
        raise NullPointer(f"{arg(name)} is None; expected an array")
    kind = kind_of(x)
    if kind is None:
        raise BadTensorDtype(
            f"{arg(name)} has type {type(x).__name__}; expected a NumPy, CuPy or PyTorch array"
        )
    try:
        return kind.view(x)
    except (BadParam, BadTensorDtype, DeviceTypeNotSupported) as error:
        raise type(error)(f"{arg(name)}: {error.message}") from None


def shape_if_any(x: Any, name: str, default: Any = ()) -> Any:
    """The shape of an array, or ``default`` of what has none. Raises what `view` does where the library does
    not say, as of a nested tensor.
    """
    try:
        return getattr(x, "shape", default)
    except RuntimeError:
        view(x, name)
        raise


def check_libraries(views: Mapping[str, ArrayView | None]) -> None:
    """That arrays on one device are of one library: each library has its own current stream, so work on
    arrays of two of them would be in no order. Raises BadParam.
    """
    (name_of_first, first), *others = views.items()
    for name, view in others:
        if view is not None and view.kind != first.kind and view.device == first.device:
            raise BadParam(mixed(name, view.kind, name_of_first, first.kind))


def mixed(name: str, library: str, other: str, other_library: str) -> str:
    """What to say of arrays of two libraries."""
    libraries = arg(f"library of {name}", library), arg(f"library of {other}", other_library)
    return (
        f"{arg(name)} is a {libraries[0]} array but {arg(other)} is a {libraries[1]} one; convert it; DLPack "
        "does so without a copy"
    )


def is_masked(x: Any) -> bool:
    """Whether ``x`` is an array of numpy.ma, whose mask no kernel reads."""
    return is_of(type(x), "numpy.ma", "MaskedArray")


def cupy_kind() -> CupyKind:
    """How to read CuPy arrays, whether or not one has been seen. Raises what `import_cupy` does."""
    kind = _KINDS.get("cupy")
    return _KINDS.setdefault("cupy", CupyKind(import_cupy())) if kind is None else kind
