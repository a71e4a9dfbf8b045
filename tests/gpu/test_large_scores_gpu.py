"""Scores as large as a float holds, on a GPU: finite masks in place of -inf, large inputs; both passes."""

from __future__ import annotations

import pytest

import flashgen

torch = pytest.importorskip("torch")
DTYPES = ("float16", "bfloat16", "float32")
# Queries, keys, heads, head_dim: prefill, decode, gradients with one kernel and with several.
SHAPES = ((300, 300, 2, 64), (2, 3000, 8, 128), (1000, 1000, 2, 128), (200, 260, 2, 256))


def sdpa(q, k, v, mask):
    from flashgen.compat.torch import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, mask)


def tensors(generator, dtype, shape):
    queries, keys, heads, width = shape
    sizes = ((1, heads, queries, width), (1, heads, keys, width), (1, heads, keys, width))
    make = (torch.randn(size, generator=generator, device="cuda") for size in sizes)
    return [x.to(getattr(torch, dtype)).requires_grad_() for x in make]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_finite_mask_hides_like_an_infinite_one(dtype, shape, fresh_seed):
    """Rows of the constant alone are finite, and so are all gradients."""
    q, k, v = tensors(torch.Generator("cuda").manual_seed(fresh_seed), dtype, shape)
    mask = torch.zeros(shape[0], shape[1], device="cuda")
    mask[:, 10:] = -torch.inf
    right = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask.double()
    )
    rights = torch.autograd.grad(right.sum(), (q, k, v))
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}[dtype]
    for constant in (-1e9, -1e10, -1e20, -1e30, torch.finfo(torch.float32).min):
        mask[:, 10:] = constant
        out = sdpa(q, k, v, mask)
        found = out, *torch.autograd.grad(out.sum(), (q, k, v))
        for one, expected in zip(found, (right, *rights), strict=True):
            largest = float(expected.abs().max())
            torch.testing.assert_close(
                one.double(), expected.double(), atol=tolerance * max(1, largest), rtol=0
            )
        hides_all = mask.clone()
        hides_all[::3] = constant
        out = sdpa(q, k, v, hides_all)
        for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
            assert x.isfinite().all(), constant


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30.0, 3000.0, 20000.0])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_p_stays_within_1(dtype, size, width):
    """dv sums up P where dout is 1: over all keys no more than 1 for each row."""
    x = torch.full((1, 50, 1, width), size, dtype=getattr(torch, dtype), device="cuda").requires_grad_()
    v = torch.ones_like(x).requires_grad_()
    out = flashgen.attention(x, x, v)
    dx, dv = torch.autograd.grad(out.sum(), (x, v))
    assert dx.isfinite().all()
    assert (dv >= 0).all()
    assert float(dv.double().sum(1).max()) <= 50 * (1 + 2.0**-7)
