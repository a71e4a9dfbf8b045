"""flex_attention on a GPU: results and gradients, beside PyTorch's autograd over all scores."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="flex_attention is of PyTorch")

from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask  # noqa: E402

from flashgen.compat.torch import flex_attention  # noqa: E402
from gpu.cases import new_seed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 1500, 64


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def masks():
    """Functions of masks by name; the tensors that they capture are on the GPU."""
    doc = torch.randint(0, 5, (BATCH, LENGTH), device="cuda").sort(-1).values
    prefix = torch.tensor([300, 900], device="cuda")
    return {
        "documents": and_masks(causal, lambda b, h, q, kv: doc[b, q] == doc[b, kv]),
        "prefix": lambda b, h, q, kv: (kv <= q) | (kv < prefix[b]),
        "window of a head": lambda b, h, q, kv: (q >= kv) & (q - kv <= 100 * (h + 1)),
    }


@pytest.mark.parametrize("name", ["documents", "prefix", "window of a head"])
@pytest.mark.parametrize("as_function", [True, False])
def test_results_and_gradients_are_right(name, as_function):
    torch.manual_seed(new_seed())
    mask_mod = masks()[name]
    slopes = torch.rand(HEADS, device="cuda")
    shape = (BATCH, HEADS, LENGTH, WIDTH)
    arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    mask = mask_mod
    if not as_function:
        mask = create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cuda")
    out = flex_attention(*arrays, alibi, mask)
    q, k, v = (x.float() for x in arrays)
    places = torch.arange(LENGTH, device="cuda")
    scores = q @ k.mT / WIDTH**0.5 - slopes[:, None, None] * (places[:, None] - places).abs()
    visible = create_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cuda")
    right = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
    dout = torch.randn_like(right)
    mine = torch.autograd.grad(out, arrays, dout.bfloat16())
    theirs = torch.autograd.grad(right, arrays, dout.bfloat16().float())
    torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=2e-2)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=6e-2, rtol=3e-2)
