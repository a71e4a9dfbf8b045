import sys
from types import SimpleNamespace

import numpy as np
import pytest

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    DeviceTypeNotSupported,
    NoCompilerError,
    NullPointer,
)
from flashgen.runtime import arrays, dlpack


class Exporter:
    """A library that flashgen has never heard of, speaking DLPack for host memory."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device
        self.dtype = array.dtype

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda native: Exporter(np.from_dlpack(native)))


class TestJax:
    jax = property(lambda self: pytest.importorskip("jax"))

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "bool", "uint8"])
    def test_there_and_back(self, name):
        x = self.jax.numpy.arange(24).reshape(3, 8).astype(name)
        native = dlpack.adopt(x, "x")
        assert isinstance(native, np.ndarray)
        assert native.dtype.name == name
        np.testing.assert_array_equal(native, np.asarray(x))
        back = dlpack.hand_back(native.copy(), x, (native,))
        assert isinstance(back, self.jax.Array)
        assert back.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(back), np.asarray(x))
        assert dlpack.immutable(x)

    def test_no_copy_is_made(self):
        x = self.jax.numpy.zeros((3, 8))
        assert arrays.view(dlpack.adopt(x, "x"), "x").pointer == x.unsafe_buffer_pointer()

    @pytest.mark.parametrize("name", ["float8_e5m2", "int4"])
    def test_dtypes_that_dlpack_does_not_carry(self, name):
        with pytest.raises(BadTensorDtype, match=r"^k .*cannot be read through DLPack"):
            dlpack.adopt(self.jax.numpy.zeros((3, 8)).astype(name), "k")

    def test_an_array_without_memory(self):
        x = self.jax.numpy.zeros(3)
        x.delete()
        with pytest.raises(NullPointer, match=r"^k is an array of jax that was deleted"):
            dlpack.adopt(x, "k")

    def test_tracers(self):
        with pytest.raises(BadParam, match=r"k is traced by JAX.*jit"):
            self.jax.jit(lambda x: dlpack.adopt(x, "k"))(self.jax.numpy.zeros(3))


def test_a_library_that_was_adopted_is_called_by_its_own_name():
    given = {"q": np.zeros(3), "k": Exporter(np.zeros(3)), "v": None}
    views = {name: arrays.view(dlpack.adopt(given[name], name), name) for name in "qk"}
    error = BadParam(arrays.mixed("k", views["k"].kind, "q", views["q"].kind))
    error.rename(dlpack.own_libraries(given))
    assert str(error).startswith(f"k is a {__name__.partition('.')[0]} array but q is a numpy one; convert")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.bool_])
def test_an_unknown_library_with_dlpack(dtype):
    x = Exporter(np.arange(12).reshape(3, 4).astype(dtype)[:, ::2])
    native = dlpack.adopt(x, "x")
    assert np.shares_memory(native, x.array)
    assert native.strides == x.array.strides
    assert isinstance(dlpack.hand_back(native, x, ()), Exporter)


def test_devices_behind_dlpack_that_nobody_serves():
    with pytest.raises(DeviceTypeNotSupported, match="DLPack type 8"):
        dlpack.adopt(Exporter(np.zeros(4), (8, 0)), "x")


def test_a_gpu_array_without_cupy(monkeypatch):
    monkeypatch.setattr(arrays, "_KINDS", {})
    monkeypatch.setitem(sys.modules, "cupy", None)
    for x in (Exporter(np.zeros(4), (2, 0)), SimpleNamespace(__cuda_array_interface__={})):
        with pytest.raises(NoCompilerError, match="pip install"):
            dlpack.adopt(x, "x")


def test_native_arrays_are_not_adopted():
    x = np.zeros(3)
    assert dlpack.adopt(x, "x") is x
    assert dlpack.hand_back(x, x, ()) is x


@pytest.mark.parametrize("speaks", ["dlpack", "cuda_array_interface"])
def test_an_array_that_says_it_is_on_a_gpu_where_there_is_none(speaks, monkeypatch):
    """The pointer is not followed."""
    from flashgen.runtime import device

    class Array:
        shape, dtype = (1, 8, 2, 64), np.dtype(np.float16)

    if speaks == "dlpack":
        Array.__dlpack__ = lambda self, **_: None
        Array.__dlpack_device__ = lambda self: (2, 0)
    else:
        Array.__cuda_array_interface__ = {
            "shape": (1, 8, 2, 64), "typestr": "<f2", "data": (4096, False), "version": 3
        }  # fmt: skip
    monkeypatch.setattr(device, "why_unavailable", lambda: "there is no NVIDIA driver on this machine")
    with pytest.raises(
        DeviceTypeNotSupported, match="k says that it is on a GPU, but there is no NVIDIA driver"
    ):
        dlpack.adopt(Array(), "k")
