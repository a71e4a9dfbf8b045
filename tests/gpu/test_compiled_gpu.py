"""Calls compiled into one graph, on a GPU."""

import pytest

import flashgen

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
from flashgen.compat.torch import scaled_dot_product_attention  # noqa: E402 - behind PyTorch


@pytest.mark.parametrize("rows", [1, 100])
def test_a_step_writes_into_its_cache(rows):
    """With k and v of one allocation, and lengths that move on in the graph."""
    pages = torch.randperm(80, dtype=torch.int32, device="cuda").reshape(4, 20)
    start = torch.tensor([100, 7, 0, 33], dtype=torch.int32, device="cuda")
    kv = torch.randn(80, 2, 16, 2, 64, device="cuda").half()
    angles = torch.rand(320, 32, device="cuda")
    rotary = flashgen.Rotary(angles.cos(), angles.sin())
    qkv = [torch.randn(4, rows, 12, 64, device="cuda").half() for _ in range(2)]

    def step(kv, lengths, qkv):
        q, *new = qkv.split((8, 2, 2), dim=-2)
        cache = flashgen.KVCache(*kv.unbind(1), lengths, pages=pages)
        out = flashgen.attention(q, cache, append=new, rotary=rotary, causal=True)
        lengths += rows
        return out.sigmoid()

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        cache, lengths = kv.clone(), start.clone()
        with torch.no_grad():
            results.append([*(function(cache, lengths, x) for x in qkv), cache, lengths])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_cuda_graphs_of_inductor_train_and_serve_the_drop_in():
    """Each call of a graph follows others, whose memory it takes again."""

    def loss(attends, q, k, v):
        return (attends(q, k, v, is_causal=True).float() * 3).sigmoid().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        leaves = [torch.randn(2, 4, 300, 64, device="cuda").half().requires_grad_() for _ in "qkv"]
        torch.compiler.cudagraph_mark_step_begin()
        given = [
            (compiled, scaled_dot_product_attention),
            (loss, torch.nn.functional.scaled_dot_product_attention),
        ]
        found, right = ([x.clone() for x in torch.autograd.grad(f(to, *leaves), leaves)] for f, to in given)
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * y.abs().max().item())
