import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from flashgen.errors import BadTensorDtype, NullPointer
from flashgen.runtime import arrays, dlpack


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float16, "fp16"),
        (np.float32, "fp32"),
        (ml_dtypes.bfloat16, "bf16"),
        (np.bool_, "bool"),
        (np.uint8, "uint8"),
        (np.float64, "float64"),
        (">f4", ">f4"),
    ],
)
def test_numpy(dtype, name):
    base = np.zeros((4, 6, 8), dtype)
    x = base[::-2, 1:, :]
    view = arrays.view(x, "x")
    assert (view.kind, view.dtype, view.shape, view.device) == ("numpy", name, (2, 5, 8), None)
    assert view.strides == (-96, 8, 1)
    assert view.pointer == x.ctypes.data


def test_strides_that_are_no_whole_number_of_elements():
    raw = np.zeros(300, np.uint8)
    odd = np.ndarray((4, 8), np.float32, raw, strides=(33, 4))
    assert arrays.view(odd, "x").strides is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "bool", "uint8"])
def test_cupy_needs_no_gpu_to_be_read(dtype):
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 1 << 20, None, 3), 256)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = cupy.ndarray((4, 6, 8), dtype, memory)[:, ::2]
    view = arrays.view(x, "x")
    expected = arrays.view(np.zeros((4, 6, 8), dtype)[:, ::2], "x")
    assert (view.kind, view.pointer, view.device) == ("cupy", 4096 + 256, 3)
    assert (view.dtype, view.shape, view.strides) == (expected.dtype, expected.shape, expected.strides)


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_threads_that_meet_a_library_at_once_have_one_kind(library, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.setattr(arrays, "_KINDS", {})
    monkeypatch.setattr(arrays, "_kind_of_type", cache(arrays._kind_of_type.__wrapped__))
    name, find = {
        "numpy": ("NumpyKind", lambda: arrays.kind_of(np.empty(1))),
        "cupy": ("CupyKind", arrays.cupy_kind),
    }[library]
    make, both = getattr(arrays, name), threading.Barrier(2, timeout=120)

    def made(module):
        both.wait()
        return make(module)

    monkeypatch.setattr(arrays, name, made)
    with ThreadPoolExecutor(2) as pool:
        first, second = [future.result() for future in [pool.submit(find) for _ in range(2)]]
    assert first is second is find()


@pytest.mark.parametrize("x", [[1, 2], "q", 3.0, object()])
def test_what_is_no_array(x):
    for read in (arrays.view, dlpack.adopt):
        with pytest.raises(BadTensorDtype, match=f"^k has type {type(x).__name__};"):
            read(x, "k")


def test_none():
    for read in (arrays.view, dlpack.adopt):
        with pytest.raises(NullPointer, match=r"^v is None"):
            read(None, "v")
