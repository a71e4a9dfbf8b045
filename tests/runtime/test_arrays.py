from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flashgen.errors import BadParam, BadTensorDtype, DeviceTypeNotSupported, NullPointer
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


class TestTorch:
    torch = property(lambda self: pytest.importorskip("torch"))

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "uint8", "bool"])
    def test_layout(self, name):
        x = self.torch.zeros(4, 6, 8, dtype=getattr(self.torch, name))[:, ::2]
        view = arrays.view(x, "x")
        assert (view.kind, view.shape, view.strides, view.device) == ("torch", (4, 3, 8), (48, 16, 1), None)
        assert view.pointer == x.data_ptr()
        assert view.dtype == {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(name, name)

    def test_host_array_shares_memory_and_bits(self):
        x = self.torch.tensor([1.5, -2.0], dtype=self.torch.bfloat16)
        bits = arrays.host_array(x)
        assert bits.view(ml_dtypes.bfloat16).tolist() == [1.5, -2.0]
        bits[0] = 0
        assert x[0] == 0

    def test_gradients_are_not_dropped_silently(self):
        torch = self.torch
        x = torch.zeros(2, 8, requires_grad=True)
        with pytest.raises(BadParam, match=r"^q: .*detach"):
            arrays.view(x, "q")
        kind = arrays.kind_of(x)
        tracked = kind.layout(x)
        with torch.no_grad():
            assert arrays.view(x, "q").dtype == "fp32"
            assert kind.layout(x) != tracked

    def test_devices_that_are_no_cuda_gpu(self):
        x = self.torch.zeros(2, 8, device="meta")
        with pytest.raises(DeviceTypeNotSupported, match="meta"):
            arrays.view(x, "q")

    def test_sparse(self):
        with pytest.raises(BadParam, match=r"q: a tensor of layout torch\.sparse_coo was given"):
            arrays.view(self.torch.zeros(2, 8).to_sparse(), "q")

    def test_parameters_are_tensors(self):
        x = self.torch.nn.Parameter(self.torch.zeros(2), requires_grad=False)
        assert arrays.kind_of(x) is arrays.kind_of(self.torch.zeros(2))

    def others(self):
        """Pairs of tensors and what else they might have been, by name."""
        torch = self.torch
        x, y = torch.zeros(3, 4, 8).half(), torch.ones(3, 4, 8).half()
        yield "missing", (x, None)
        yield "there", (x, y, y.clone())
        yield "dtype", (x, y.bfloat16())
        yield "shape", (x, y[:, :3].contiguous())
        yield "strides", (x, torch.zeros(3, 4, 16).half()[..., :8])
        yield "transposed", (torch.zeros(4, 3, 8).half().transpose(0, 1), y)
        yield "rank", (x, y[0])
        yield "device", (x, y.to("meta"))
        yield "negated", (x, torch._neg_view(y))
        yield "gradient", (x, y.clone().requires_grad_())
        yield "sparse", (x, y.to_sparse())
        yield "subclass", (x, torch.nn.Parameter(y, requires_grad=False))
        yield "library", (x, y.numpy())

    def test_expected_layouts(self):
        """Pointers of arrays that lie alike, and of no others."""
        torch = self.torch
        kind = arrays.TorchKind(torch)
        x, y, z = (torch.rand(3, 4, 8).half() for _ in range(3))
        expected = kind.expecting((x, None, y))
        assert expected((y, None, z)) == (y.data_ptr(), 0, z.data_ptr())
        assert kind.expecting((x, None, x)) is None
        for name, (first, *rest) in self.others():
            given = (first, rest[1], rest[0]) if name == "there" else (first, None, *rest)
            assert expected(given) is None, name

    def test_expected_layouts_where_derivatives_would_be_lost(self):
        torch = self.torch
        kind = arrays.TorchKind(torch)
        x, leaf = torch.rand(4, 8), torch.rand(4, 8, requires_grad=True)
        with torch.no_grad():
            of_leaf, of_plain = kind.expecting((leaf,)), kind.expecting((x,))
            assert of_leaf((leaf,)) == (leaf.data_ptr(),)
        assert of_leaf((leaf,)) is None
        assert of_plain((leaf,)) is None
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            assert of_plain((dual,)) is None

    def test_a_torch_without_guards_has_its_tensors_read(self, monkeypatch):
        monkeypatch.delattr(self.torch._C._dynamo.guards, "TensorGuards")
        assert arrays.TorchKind(self.torch).expecting is None


@pytest.mark.parametrize("x", [[1, 2], "q", 3.0, object()])
def test_what_is_no_array(x):
    for read in (arrays.view, dlpack.adopt):
        with pytest.raises(BadTensorDtype, match=f"^k has type {type(x).__name__};"):
            read(x, "k")


def test_none():
    for read in (arrays.view, dlpack.adopt):
        with pytest.raises(NullPointer, match=r"^v is None"):
            read(None, "v")


@pytest.mark.parametrize(
    "stream",
    [
        7,
        np.int64(7),
        SimpleNamespace(ptr=7),
        SimpleNamespace(cuda_stream=7),
        type("Stream", (), {"__cuda_stream__": lambda self: (0, 7)})(),
    ],
)
def test_streams(stream):
    assert arrays.stream_pointer(stream) == 7


def test_what_is_no_stream():
    with pytest.raises(BadParam, match="stream is 'fast'"):
        arrays.stream_pointer("fast")


def test_a_layout_is_a_key_without_the_pointer():
    a, b = np.zeros((2, 4, 8)), np.zeros((2, 4, 8))
    kind = arrays.kind_of(a)
    assert (
        len({kind.layout(a), kind.layout(b), kind.layout(a[:, ::2]), kind.layout(a.astype(np.float32))}) == 3
    )


def test_empty_is_contiguous_and_of_the_same_kind():
    x = np.zeros((3, 4, 8), np.float16)[:, ::2]
    kind = arrays.kind_of(x)
    out, lse = kind.empty((3, 2, 8), x, None), kind.empty((3, 2), x, None, "fp32")
    assert (out.dtype, lse.dtype, out.flags.c_contiguous) == (np.float16, np.float32, True)
