import pytest

from flashgen.errors import BadParam, DeviceTypeNotSupported
from flashgen.runtime import arrays
from flashgen.runtime.torchkind import TorchKind


class TestTorch:
    torch = property(lambda self: pytest.importorskip("torch"))

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "uint8", "bool"])
    def test_layout(self, name):
        x = self.torch.zeros(4, 6, 8, dtype=getattr(self.torch, name))[:, ::2]
        view = arrays.view(x, "x")
        assert (view.kind, view.shape, view.strides, view.device) == ("torch", (4, 3, 8), (48, 16, 1), None)
        assert view.pointer == x.data_ptr()
        assert view.dtype == {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(name, name)

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
        yield "nested", (x, torch.nested.nested_tensor([y[0]]))

    def test_expected_layouts(self):
        """Pointers of arrays that lie alike, and of no others."""
        torch = self.torch
        kind = TorchKind(torch)
        x, y, z = (torch.rand(3, 4, 8).half() for _ in range(3))
        expected = kind.expecting((x, None, y))
        assert expected((y, None, z)) == (y.data_ptr(), 0, z.data_ptr())
        twice = kind.expecting((x, None, x))
        assert twice((y, None, y)) == (y.data_ptr(), 0, y.data_ptr())
        assert twice((y, None, z)) is None
        for name, (first, *rest) in self.others():
            given = (first, rest[1], rest[0]) if name == "there" else (first, None, *rest)
            assert expected(given) is None, name

    def test_expected_layouts_where_derivatives_would_be_lost(self):
        torch = self.torch
        kind = TorchKind(torch)
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
        assert TorchKind(self.torch).expecting is None
