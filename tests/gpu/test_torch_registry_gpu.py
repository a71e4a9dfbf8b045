"""flashgen in PyTorch's registry of flash attention on a GPU, beside PyTorch's attention in float64."""

import pytest

torch = pytest.importorskip("torch")
from torch.nn import attention as registry  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

import flashgen  # noqa: E402
from flashgen.compat.torch import register  # noqa: E402

if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("PyTorch 2.11 and later have the registry", allow_module_level=True)

from torch.nn.attention.varlen import varlen_attn  # noqa: E402

from flashgen.compat import torch_operators  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """Activates flashgen, and lists the calls of its forward and backward passes."""
    seen = []
    for name in ("attention_of_any_width", "gradients_of_any_width"):
        function = getattr(torch_operators, name)

        def spy(*args, _name=name, _function=function, **options):
            seen.append("backward" if "gradients" in _name else "forward")
            return _function(*args, **options)

        monkeypatch.setattr(torch_operators, name, spy)
    register()
    registry.activate_flash_attention_impl("flashgen")
    yield seen
    registry.restore_flash_attention_impl()


def with_gradients(function, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    (out.float() * torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def near(found, right, tolerance=0.02):
    for x, y in zip(found, right, strict=True):
        assert (x.double() - y.double()).norm() < tolerance * y.double().norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sdpa_and_its_gradients_are_flashgens(dtype, is_causal, compiled, calls):
    inputs = [torch.randn(2, 8, 300, 100, device="cuda", dtype=dtype) for _ in "qkv"]

    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=is_causal)

    function = torch.compile(attend) if compiled else attend
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        found = with_gradients(function, inputs)
    assert calls == ["forward", "backward"]
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        near(found, with_gradients(attend, [x.double() for x in inputs]))


def test_packed_sequences_and_their_gradients(calls):
    ends = torch.tensor([0, 100, 100, 350], device="cuda", dtype=torch.int32)
    inputs = [torch.randn(350, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    found = with_gradients(lambda *x: varlen_attn(*x, ends, ends, 250, 250, window_size=(-1, 0)), inputs)
    assert calls == ["forward", "backward"]

    def one_by_one(q, k, v):
        sequences = [[x[rows].transpose(0, 1) for x in (q, k, v)] for rows in (slice(100), slice(100, 350))]
        return torch.cat([sdpa(*sequence, is_causal=True).transpose(0, 1) for sequence in sequences])

    near(found, with_gradients(one_by_one, [x.double() for x in inputs]))


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_by_the_state_that_the_operator_returns(compiled, calls):
    q, k, v = (torch.randn(2, 8, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    states = []

    def attend(*x):
        out, *others = (torch.compile(operator) if compiled else operator)(*x, 0.25, True)
        states.append(others[5].view(torch.int64))
        return out

    found = with_gradients(attend, (q, k, v))
    assert calls == ["forward", "backward"]

    def right(*x):
        x = [y.transpose(1, 2) for y in x]
        out = flashgen.attention(*x, causal=True, dropout_p=0.25, dropout_seed=states[0])
        return out.transpose(1, 2)

    near(found, with_gradients(right, (q, k, v)))


def test_a_graph_draws_other_scores_in_each_replay(calls):
    q, k, v = (torch.randn(2, 8, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")

    def attend():
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            return sdpa(q, k, v, dropout_p=0.25)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(*results)
    near(results[:1], results[1:], 0.9)


def test_nested_tensors_with_dropout_and_its_mask(calls):
    """PyTorch packs nested tensors, and calls the operator below `varlen_attn` with return_debug_mask."""
    lengths = [(100, 30), (7, 200), (129, 128)]
    sequences = [
        [torch.randn(8, n, 64, device="cuda", dtype=torch.float16) for n in (queries, keys, keys)]
        for queries, keys in lengths
    ]
    inputs = [torch.nested.as_nested_tensor(list(x)).requires_grad_() for x in zip(*sequences, strict=True)]
    out, *_, mask = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.25, False, True)
    assert calls == ["forward"]
    assert mask.shape == (3, 8, 256, 256)
    out.backward(torch.nested.as_nested_tensor([torch.ones_like(x) for x in out.detach().unbind()]))
    assert calls == ["forward", "backward"]
    found = zip(out.detach().unbind(), *(x.grad.unbind() for x in inputs), strict=True)
    for kept, sequence, results in zip(mask >= 0, sequences, found, strict=True):
        q, k, v = (x.double().requires_grad_() for x in sequence)
        p = (q @ k.mT / 8).softmax(-1) * kept[:, : q.shape[1], : k.shape[1]] / 0.75
        right = p @ v
        right.sum().backward()
        near(results, [right.detach(), q.grad, k.grad, v.grad])


@pytest.mark.parametrize("is_causal", [False, True])
def test_codes_of_e4m3_with_their_scales(is_causal, calls):
    module = "torch.nn.attention.experimental._scaled_dot_product_attention_quantized"
    experimental = pytest.importorskip(module)
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("attention of e4m3 codes needs sm_89 or later")
    found, scales, numbers = [], [], []
    for heads in (8, 2, 2):
        x = torch.randn(2, heads, 300, 128, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.rand(2, 2, device="cuda") + 0.5
        found.append(x)
        scales.append(scale)
        numbers.append(x.double() * scale.double().repeat_interleave(heads // 2, 1)[..., None, None])
    names = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out = experimental._scaled_dot_product_attention_quantized(*found, is_causal, **names)
    assert calls == ["forward"]
    assert out.dtype == torch.bfloat16
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        near([out], [sdpa(*numbers, is_causal=is_causal, enable_gqa=True)], 0.06)
