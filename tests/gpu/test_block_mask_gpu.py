"""BlockMask on the GPU: results and gradients of both families within the bound, the same bits each time, in
a captured graph, and with lists that FLASHGEN_CHECK refuses.
"""

import numpy as np
import pytest

import flashgen
from flashgen.operators import gradients, reference
from flashgen.operators.masks import Band

torch = pytest.importorskip("torch")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# batch, queries, keys, query heads, kv heads, head dim, block, causal
SHAPES = (
    (2, 1000, 1000, 8, 2, 128, (128, 128), True),
    (1, 700, 1100, 4, 4, 64, (64, 64), False),
    (2, 500, 900, 4, 2, 64, (128, 128), False),
    (1, 640, 640, 4, 1, 128, (64, 128), True),
    (2, 300, 300, 2, 2, 256, (128, 64), False),
    (1, 400, 500, 4, 2, 80, (128, 128), False),
    (1, 36000, 300, 2, 1, 64, (128, 128), False),  # more tiles of a head than multiprocessors
)


def lists(listed):
    """A BlockMask's arrays of listed blocks, (batch, heads, blocks of queries, blocks of keys)."""
    rows = listed.shape[2]
    ends = np.concatenate([[0], np.cumsum(listed.sum(-1).reshape(-1))]).astype(np.int32)
    begins = np.arange(listed.shape[0] * listed.shape[1])[:, None] * rows + np.arange(rows + 1)
    indptr = ends[begins].reshape(*listed.shape[:2], rows + 1)
    indices = np.nonzero(listed)[3].astype(np.int32)
    return torch.from_numpy(indptr).cuda(), torch.from_numpy(indices).cuda()


def call_of(shape, dtype, seed, share=0.5):
    """q, k and v, the BlockMask, and the same as a dense mask."""
    batch, queries, keys, heads, kv_heads, width, block, _ = shape
    rng = np.random.default_rng(seed)
    listed = rng.random((batch, kv_heads, -(-queries // block[0]), -(-keys // block[1]))) < share
    listed[:, :, 0] = False
    hidden = (~listed).repeat(heads // kv_heads, 1).repeat(block[0], 2)[:, :, :queries]
    hidden = torch.from_numpy(np.ascontiguousarray(hidden.repeat(block[1], 3)[..., :keys])).cuda()
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(batch, rows, count, width, device="cuda", generator=generator).to(DTYPES[dtype])
        for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    return (q, k, v), flashgen.BlockMask(*lists(listed), block), hidden


def band_of(shape):
    return Band(shape[2] - shape[1], right=0) if shape[-1] else Band()


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_within_the_bound(shape, dtype, algorithm, fresh_seed):
    if dtype == "fp32" and shape[5] > 192 and torch.cuda.get_device_capability()[1]:
        pytest.skip("no fp32 gradients at this head dim on such GPUs")
    arrays, mask, hidden = call_of(shape, dtype, fresh_seed)
    options = {"mask": mask, "causal": shape[-1]}
    out, lse = flashgen.attention(*arrays, return_lse=True, algorithm=algorithm, **options)
    doubles = [x.double() for x in arrays]
    right = reference.attention(*doubles, dtype, shape[5] ** -0.5, band_of(shape), hidden)
    assert reference.largest(out.double(), right.out, right.out_bound).share <= 1
    assert reference.largest(lse.double(), right.lse, right.lse_bound).share <= 1
    assert torch.equal(out, flashgen.attention(*arrays, algorithm=algorithm, **options))
    dout = torch.randn_like(out)
    expected = gradients.gradients(dout.double(), *doubles, dtype, shape[5] ** -0.5, band_of(shape), hidden)
    for deterministic in (False, True):
        results = flashgen.attention_backward(dout, *arrays, out, lse, deterministic=deterministic, **options)
        for name, result in zip(("dq", "dk", "dv"), results, strict=True):
            gradient = expected[name]
            assert reference.largest(result.double(), gradient.value, gradient.bound).share <= 1, name
        if deterministic:
            again = flashgen.attention_backward(dout, *arrays, out, lse, deterministic=True, **options)
            assert all(map(torch.equal, results, again))


def test_hopper_takes_kernels_of_its_own():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    (q, k, v), mask, _ = call_of(SHAPES[0], "bf16", 0)
    assert flashgen.plan(q, k, v, mask=mask).variant.name == "flash_fwd_hdim128_bf16_blocks_gqa_sm90"
    out, lse = flashgen.attention(q, k, v, mask=mask, return_lse=True)
    plan = flashgen.plan_backward(out, q, k, v, out, lse, mask=mask)
    assert plan.variant.name == "flash_bwd_hdim128_bf16_blocks_gqa_sm90"


def test_a_captured_graph_takes_the_lists_of_its_replay(fresh_seed):
    arrays, mask, _ = call_of(SHAPES[2], "bf16", fresh_seed)
    others = [call_of(SHAPES[2], "bf16", seed, share)[1] for seed, share in ((1, 0.3), (2, 0.9), (3, 0.0))]
    room = torch.zeros(4 * 8 * 8, dtype=torch.int32, device="cuda")
    indptr = mask.indptr.clone()
    static = flashgen.BlockMask(indptr, room, mask.block)

    def set_lists(to):
        indptr.copy_(to.indptr)
        room[: len(to.indices)] = to.indices

    def both():
        out, lse = flashgen.attention(*arrays, mask=static, return_lse=True)
        return out, *flashgen.attention_backward(
            torch.ones_like(out), *arrays, out, lse, mask=static, deterministic=True
        )

    set_lists(mask)
    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for other in (mask, *others):
        set_lists(other)
        graph.replay()
        results = [x.clone() for x in captured]
        assert all(map(torch.equal, results, both()))


def test_autograd_and_compiled_calls_agree(fresh_seed):
    arrays, mask, _ = call_of(SHAPES[0], "bf16", fresh_seed)
    leaves = [x.requires_grad_() for x in arrays]

    def attend(q, k, v, mask):
        return flashgen.attention(q, k, v, mask=mask, causal=True, deterministic=True)

    results = [
        torch.autograd.grad(function(*leaves, mask).float().square().sum(), leaves)
        for function in (attend, torch.compile(attend, fullgraph=True))
    ]
    assert all(map(torch.equal, *results))


def test_check_refuses_lists_that_are_none(monkeypatch):
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    (q, k, v), mask, _ = call_of((1, 333, 777, 2, 2, 64, (128, 128), False), "fp16", 0)
    mask.indices[-1] = 7
    with pytest.raises(flashgen.BadParam, match="expected a block of keys, 0 to 6"):
        flashgen.attention(q, k, v, mask=mask)
