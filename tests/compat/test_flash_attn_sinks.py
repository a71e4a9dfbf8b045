"""s_aux, the sinks of flash-attn 3, in the functions of flash-attn 2."""

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def qkv(width=32):
    rng = np.random.default_rng()
    q, k, v = (rng.standard_normal((2, 23, heads, width), np.float32) for heads in (4, 2, 2))
    return q, k, v, rng.standard_normal(4, np.float32)


@pytest.mark.parametrize("width", [32, 20])
def test_s_aux_joins_the_denominator_at_any_head_dim(width):
    q, k, v, sinks = qkv(width)
    plain, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out, with_sink, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=sinks)
    np.testing.assert_allclose(with_sink, np.logaddexp(lse, sinks[:, None]), rtol=1e-5, atol=1e-6)
    share = np.exp(lse - with_sink).transpose(0, 2, 1)[..., None]
    np.testing.assert_allclose(out, plain * share, rtol=1e-4, atol=1e-5)


def test_packed_and_cached_calls_take_s_aux():
    q, k, v, sinks = qkv()
    right = flashgen.attention(q, k, v, causal=True, sinks=sinks)
    ends = np.array([0, 23, 46], np.int32)
    packed = [x.reshape(46, *x.shape[2:]) for x in (q, k, v)]
    out = flash_attn_varlen_func(*packed, ends, ends, 23, 23, causal=True, s_aux=sinks)
    np.testing.assert_allclose(out.reshape(right.shape), right, rtol=1e-5, atol=1e-6)
    cached = flash_attn_with_kvcache(q[:, -1:], k, v, causal=True, s_aux=sinks)
    np.testing.assert_allclose(cached, right[:, -1:], rtol=1e-5, atol=1e-6)
    lengths = np.full(2, 22, np.int32)
    caches = [np.where(np.arange(23)[:, None, None] < 22, x, np.nan) for x in (k, v)]
    new = [x[:, -1:] for x in (k, v)]
    cached = flash_attn_with_kvcache(q[:, -1:], *caches, *new, cache_seqlens=lengths, s_aux=sinks)
    np.testing.assert_allclose(cached, right[:, -1:], rtol=1e-5, atol=1e-6)


def test_autograd_gets_the_gradient_of_s_aux():
    torch = pytest.importorskip("torch")
    *arrays, sinks = (torch.from_numpy(x).requires_grad_() for x in qkv())
    of_drop_in = torch.autograd.grad(flash_attn_func(*arrays, s_aux=sinks).square().sum(), sinks)
    right = torch.autograd.grad(flashgen.attention(*arrays, sinks=sinks).square().sum(), sinks)
    assert torch.equal(of_drop_in[0], right[0])
    with pytest.raises(NotImplementedError, match="s_aux"):
        flash_attn_with_kvcache(*(x.detach() for x in arrays), s_aux=sinks)


def test_errors_say_s_aux():
    q, k, v, sinks = qkv()
    with pytest.raises(errors.BadTensorShape, match=r"^s_aux has shape"):
        flash_attn_func(q, k, v, s_aux=sinks[:3])
    with pytest.raises(errors.BadTensorDtype, match=r"^s_aux has dtype"):
        flash_attn_func(q, k, v, s_aux=sinks.astype(np.float16))
