"""Shortcuts of drop-ins: calls like an earlier one have its results, without its checks; others take the long
way. Tensors in host memory stand in for a GPU's.
"""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

import flashgen  # noqa: E402
from flashgen.api import append_and_attend  # noqa: E402
from flashgen.call import compute  # noqa: E402
from flashgen.compat import flash_attn, torch_operators, torch_registry  # noqa: E402
from flashgen.errors import FlashgenError  # noqa: E402
from flashgen.runtime.plans import Plan  # noqa: E402
from flashgen.runtime.torchkind import TorchKind  # noqa: E402

SHAPE = (2, 24, 4, 32)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch, forget_plans):
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)
    monkeypatch.setattr(TorchKind, "on_host", lambda kind, x: False)
    for shortcuts in (
        flash_attn._FUNC,
        flash_attn._VARLEN,
        torch_operators._SDPA,
        torch_operators._SDPA_BACKWARD,
    ):
        monkeypatch.setattr(shortcuts, "_copying", set())


def tensors(count=3, shape=SHAPE, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for _ in range(count)]


def close(found, right):
    torch.testing.assert_close(found.float(), right.float(), atol=2e-3, rtol=2e-3)


def sdpa(q, k, v, **options):
    turned = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*turned, **options).transpose(1, 2)


@pytest.fixture
def long_way(monkeypatch):
    """How many calls came to ``attention`` through each drop-in."""
    calls = []
    for module in (flash_attn, torch_operators):
        name = "attention_of_any_width"
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, **o: calls.append(1) or real(*a, **o))
    return calls


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_has_the_results_of_each_call(causal, long_way):
    for _ in range(5):
        q, k, v = tensors()
        close(flash_attn.flash_attn_func(q, k, v, causal=causal), sdpa(q, k, v, is_causal=causal))
    assert len(long_way) == 2  # a guard is made for two calls in a row
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    close(out, sdpa(q, k, v, is_causal=causal))
    assert lse.shape == (2, 4, 24)
    assert len(long_way) == 3


def test_options_that_are_equal_and_not_alike_are_checked(long_way):
    q, k, v = tensors()
    for _ in range(3):
        flash_attn.flash_attn_func(q, k, v, causal=True)
    assert len(long_way) == 2
    with pytest.raises(FlashgenError, match="causal"):
        flash_attn.flash_attn_func(q, k, v, causal=1.5)
    with pytest.raises(FlashgenError, match=r"return_lse|return_attn_probs"):
        flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=2)


def test_other_layouts_and_widths_take_the_long_way(long_way):
    for _ in range(3):
        q, k, v = tensors()
        flash_attn.flash_attn_func(q, k, v)
    wide = [torch.randn(2, 24, 4, 64)[..., ::2] for _ in range(3)]  # rows that are copied
    close(flash_attn.flash_attn_func(*wide), sdpa(*wide))
    for _ in range(4):
        narrow = tensors(shape=(2, 24, 4, 5))
        close(flash_attn.flash_attn_func(*narrow), sdpa(*narrow))
    shifted = [torch.randn(2 * 24 * 4 * 32 + 1)[1:].view(SHAPE) for _ in range(3)]
    close(flash_attn.flash_attn_func(*shifted), sdpa(*shifted))


def test_gradients_are_recorded_after_calls_that_need_none():
    for _ in range(3):
        q, k, v = tensors()
        flash_attn.flash_attn_func(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(3):
        gradients = torch.autograd.grad(flash_attn.flash_attn_func(*leaves).sum(), leaves)
        for found, right in zip(gradients, torch.autograd.grad(sdpa(*leaves).sum(), leaves), strict=True):
            close(found, right)
        with torch.no_grad():
            assert not flash_attn.flash_attn_func(*leaves).requires_grad


def test_packed_sequences_have_their_own_lengths(long_way):
    for ends in ([0, 9, 24], [0, 24, 24], [0, 3, 24], [0, 12, 24]):
        q, k, v = tensors(shape=(24, 4, 32))
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        found = flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 24, 24, causal=True)
        for begin, end in pairwise(ends):
            parts = (x[None, begin:end] for x in (q, k, v))
            close(found[begin:end], sdpa(*parts, is_causal=True)[0])
    assert len(long_way) == 2


def test_the_registry_has_both_passes(long_way, monkeypatch):
    real = Plan.run

    def run(plan, arrays, *others):
        """The CPU path reads arrays, where kernels have pointers: these are the same for transposed views."""
        if plan.kind.read(arrays)[0] != plan._layouts:
            views = [x.transpose(1, 2) if x is not None and x.ndim == 4 else x for x in arrays]
            return real(plan, tuple(views), *others)
        return real(plan, arrays, *others)

    monkeypatch.setattr(Plan, "run", run)
    names = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
    forward, backward = (torch_registry._KERNELS[name] for name in names)
    for _ in range(5):
        q, k, v, dout = (x.transpose(1, 2) for x in tensors(4, dtype=torch.float32))
        out, lse, *_, seed, offset, _ = forward(q, k, v, 0.0, True, False, scale=None)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        right = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        close(out, right)
        state = None, None, 24, 24, 0.0, True, seed, offset
        found = backward(dout, q, k, v, out, lse, *state, scale=None)
        for one, other in zip(found, torch.autograd.grad(right, leaves, dout), strict=True):
            close(one, other)
    assert len(long_way) == 2


def test_appends_write_and_attend_each_time(monkeypatch):
    requested = []
    real = append_and_attend.requested_append
    monkeypatch.setattr(append_and_attend, "requested_append", lambda c: requested.append(1) or real(c))
    k, v = torch.zeros(2, 16, 2, 32), torch.zeros(2, 16, 2, 32)
    cos, sin = torch.ones(16, 16), torch.zeros(16, 16)
    kept: list = []
    for step in range(5):
        lengths = torch.full((2,), step, dtype=torch.int32)
        cache = flashgen.KVCache(k, v, lengths)
        q, new = torch.randn(2, 1, 4, 32), (torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32))
        kept.append(new)
        found = flashgen.attention(q, cache, append=new, rotary=flashgen.Rotary(cos, sin), causal=True)
        keys, values = (torch.cat(x, 1).repeat_interleave(2, 2) for x in zip(*kept, strict=True))
        close(found, sdpa(q, keys, values))
        assert torch.equal(k[:, step], new[0][:, 0])
    assert len(requested) == 2
    with pytest.raises(FlashgenError, match="v_new"):
        flashgen.attention(q, cache, append=(new[0], new[1][..., :16]), rotary=flashgen.Rotary(cos, sin))


def test_forget_drops_shortcuts(long_way):
    q, k, v = tensors()
    for _ in range(3):
        flash_attn.flash_attn_func(q, k, v)
    compute.forget()
    flash_attn.flash_attn_func(q, k, v)
    assert len(long_way) == 3
