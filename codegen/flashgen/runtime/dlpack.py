"""Arrays of any other library, such as JAX: of whatever speaks DLPack or ``__cuda_array_interface__``.

One is adopted, which is to see it, without a copy, as a NumPy array in host memory or a CuPy array on a GPU,
and the result is handed back to its library. DLPack also orders the streams of both sides.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, BadTensorDtype, DeviceTypeNotSupported, NullPointer, arg
from flashgen.runtime import device
from flashgen.runtime.arrays import cupy_kind, is_masked, is_of, kind_of, mixed
from flashgen.runtime.cupykind import import_cupy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

# DLPack's device types and type codes: https://dmlc.github.io/dlpack/latest/c_api.html
_DL_HOST = (1, 3)
_DL_CUDA = (2, 13)
_DL_UINT, _DL_BFLOAT = 1, 4
# Dtypes that are read as unsigned integers of their bits. CuPy keeps codes of e4m3 as these.
_E4M3 = "float8_e4m3fn"
_AS_BITS = ("bfloat16", _E4M3)


def adopt(x: Any, name: str, stream: Any = None) -> Any:
    """A native array over the memory of ``x``, ready for work on ``stream`` (None: CuPy's current one).

    A native array is returned as it is. Raises NullPointer for None and for a deleted array of JAX,
    BadTensorDtype for anything but an array and for a dtype that DLPack does not carry,
    DeviceTypeNotSupported for an array on a device that is neither a CUDA GPU nor the host, NoCompilerError
    for an array on a GPU where CuPy is missing, BadParam for a masked array, Traced for a tracer of JAX.
    """
    if x is None:
        raise NullPointer(f"{arg(name)} is None; expected an array")
    if kind_of(x) is not None:
        return x
    if is_masked(x):
        raise BadParam(
            f"{arg(name)} is a masked array of numpy.ma, whose mask would be ignored; pass its "
            f"elements, {arg(name)}.data, and hide keys with the argument {arg('mask')} (nonzero is hidden "
            "there, too)"
        )
    refuse_tracer(x, name)
    if _is_jax(x) and x.is_deleted():
        raise NullPointer(
            f"{arg(name)} is an array of jax that was deleted or donated; expected one with memory"
        )
    dtype = getattr(x, "dtype", "")
    bits = next((name for name in _AS_BITS if name in str(dtype)), None)
    if bits is None and getattr(dtype, "kind", "") == "V":  # fp8, fp4 and int4 of ml_dtypes
        raise BadTensorDtype(
            f"{arg(name)} has dtype {dtype}, which cannot be read through DLPack; convert it"
        )
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        try:
            device_type, ordinal = x.__dlpack_device__()
        except (BufferError, ValueError, NotImplementedError) as error:
            raise DeviceTypeNotSupported(f"{arg(name)} is not on one device: {error}") from error
        source = x if bits is None else _Recoded(x, _DL_UINT)
        if device_type in _DL_HOST:
            import numpy as np

            return _from_dlpack(np.from_dlpack, source, name, bits)
        if device_type in _DL_CUDA:
            _check_gpu(name)
            kind = cupy_kind()
            with import_cupy().cuda.Device(ordinal), kind.use(stream):
                return _from_dlpack(import_cupy().from_dlpack, source, name, None if bits == _E4M3 else bits)
        raise DeviceTypeNotSupported(
            f"{arg(name)} is on a device of DLPack type {int(device_type)}; supported are CUDA GPUs and "
            "host memory"
        )
    if hasattr(x, "__cuda_array_interface__"):
        # CuPy waits for the stream that the interface names.
        _check_gpu(name)
        try:
            return import_cupy().asarray(x)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise BadTensorDtype(
                f"{arg(name)} cannot be read by __cuda_array_interface__: {error}"
            ) from error
    raise BadTensorDtype(
        f"{arg(name)} has type {type(x).__name__}; expected an array (CuPy, NumPy, PyTorch, JAX or DLPack)"
    )


def is_array(x: Any) -> bool:
    """Whether ``x`` is native, or one that `adopt` may take."""
    return kind_of(x) is not None or hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")


def hand_back(result: Any, like: Any, inputs: tuple[Any, ...], stream: Any = None) -> Any:
    """``result``, a native array, as an array of the library of ``like``, which was adopted.

    Work on ``result`` was queued on ``stream``; DLPack makes the library wait for it. ``inputs`` live as long
    as the result: a library that orders its memory by its own streams must not reuse them while a kernel
    still reads them, and a user of the result waits for that kernel. A library without ``from_dlpack`` gets
    the native array.
    """
    import numpy as np

    if kind_of(like) is not None:
        return result
    host = isinstance(result, np.ndarray)
    if _is_jax(like):
        import jax

        if host:
            return jax.device_put(result, next(iter(like.devices())))
        importer = jax.dlpack.from_dlpack
    elif hasattr(like, "__array_namespace__") and hasattr(like.__array_namespace__(), "from_dlpack"):
        importer = like.__array_namespace__().from_dlpack
    else:
        return result
    if host:
        return importer(result)
    device = result.data.device_id
    source = _held(result, inputs)
    if result.dtype.name == "bfloat16":
        source = _Recoded(source.view(np.uint16), _DL_BFLOAT)
    with import_cupy().cuda.Device(device), cupy_kind().use(stream):
        return importer(source)


def check_libraries(arguments: Mapping[str, Any], of_cache: Collection[str] = ()) -> None:
    """Raise BadParam if a call has an array that must be adopted together with arrays of another library:
    adopted, it would look like a NumPy or CuPy array. ``arguments`` has arrays by name; other values are
    ignored. With JAX arrays, which cannot be written to, the arrays ``of_cache``, of a KV cache, may belong
    to another library.
    """
    # A call makes the seed of dropout from two integers, with NumPy or CuPy: by default JAX has no int64.
    arrays = {
        name: x for name, x in arguments.items() if x is not None and is_array(x) and name != "dropout_seed"
    }
    if all(kind_of(x) is not None for x in arrays.values()):
        return
    others = {name: x for name, x in arrays.items() if name not in of_cache}
    if others and all(map(immutable, others.values())):
        groups = others, {name: x for name, x in arrays.items() if name in of_cache}
    else:
        groups = (arrays,)
    for group in groups:
        libraries = [(name, library_of(x)) for name, x in group.items()]
        for name, library in libraries[1:]:
            if library != libraries[0][1]:
                raise BadParam(mixed(name, library, *libraries[0]))


def own_libraries(arguments: Mapping[str, Any]) -> dict[str, str]:
    """For `errors.naming`: the libraries of adopted arrays, which errors see as arrays of NumPy or CuPy."""
    return {
        f"library of {name}": library_of(x)
        for name, x in arguments.items()
        if x is not None and kind_of(x) is None
    }


def immutable(x: Any) -> bool:
    """Whether the library of ``x`` promises that its arrays never change."""
    return _is_jax(x)


class _Recoded:
    """An array whose DLPack capsules carry another type code: NumPy and CuPy take bfloat16 as uint16."""

    def __init__(self, array: Any, code: int) -> None:
        self._array, self._code = array, code

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        # The DLTensor opens the unversioned struct; the other has version, context, deleter and flags first.
        # Within it the type code follows data (8 bytes), device (8) and ndim (4).
        for name, start in ((b"dltensor", 0), (b"dltensor_versioned", 32)):
            if _capsule_is_valid(capsule, name):
                ctypes.c_uint8.from_address(_capsule_pointer(capsule, name) + start + 20).value = self._code
                return capsule
        raise BufferError("not a DLPack capsule")


_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes, _capsule_is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


def _from_dlpack(importer: Callable[[Any], Any], source: Any, name: str, bits: str | None) -> Any:
    try:
        array = importer(source)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise BadTensorDtype(f"{arg(name)} cannot be read through DLPack: {error}") from error
    if bits is None:
        return array
    import ml_dtypes  # takes 9 ms, which calls with other arrays need not wait for

    return array.view(getattr(ml_dtypes, bits))


def _check_gpu(name: str) -> None:
    """Check that there is a GPU for an array which says that it is on one. Raises DeviceTypeNotSupported, and
    NoCompilerError without CuPy.
    """
    import_cupy()
    why = device.why_unavailable()
    if why:
        raise DeviceTypeNotSupported(f"{arg(name)} says that it is on a GPU, but {why}")


def _held(array: Any, owners: tuple[Any, ...]) -> Any:
    """``array``, a CuPy one, over memory that keeps ``owners`` alive."""
    cuda = import_cupy().cuda
    memory = cuda.UnownedMemory(array.data.ptr, array.nbytes, (array, owners), array.data.device_id)
    return import_cupy().ndarray(array.shape, array.dtype, cuda.MemoryPointer(memory, 0))


class Traced(BadParam):
    """An array has no memory yet: JAX traces the call. A function that has an operator for XLA catches it."""


def refuse_tracer(x: Any, name: str) -> None:
    """Raise Traced for an array that JAX traces."""
    if is_of(type(x), "jax", "Tracer"):
        raise Traced(f"{arg(name)} is traced by JAX, so it has no memory yet; call this outside jax.jit")


def library_of(x: Any) -> str:
    """The name of the library of an array."""
    kind = kind_of(x)
    if kind is not None:
        return kind.name
    # What JAX's arrays are of is the module that implements them.
    return "jax" if _is_jax(x) else type(x).__module__.partition(".")[0]


def _is_jax(x: Any) -> bool:
    return is_of(type(x), "jaxlib", "ArrayImpl") or is_of(type(x), "jax", "Array")
