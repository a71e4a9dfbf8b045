"""A step of decoding, compiled into one graph, on a GPU."""

import pytest

import flashgen

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")


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
