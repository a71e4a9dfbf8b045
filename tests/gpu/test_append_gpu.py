"""append on a GPU: within the bound, nothing else touched, in a graph with other lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="arrays lie on the GPU by PyTorch")

import flashgen  # noqa: E402
from flashgen.families.load import load_specs  # noqa: E402
from flashgen.operators.append_rows import queries  # noqa: E402
from flashgen.operators.kvcodes import SCALES, SCALES_OUT, TOKEN  # noqa: E402
from flashgen.operators.latentrows import LAYOUT  # noqa: E402
from flashgen.simulator.append_example import Choices, make  # noqa: E402
from flashgen.simulator.example import Shape  # noqa: E402
from gpu.cases import new_seed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

VARIANTS = [v for spec in load_specs() if spec.operator == "append" for v in spec.variants()]
# Decode, a ragged step, a prompt, more sequences than a thread block has threads, no new token.
SHAPES = (
    Shape(1, 300, heads=32, kv_heads=8, batch=32, head_dim=128),
    Shape(5, 30, heads=6, kv_heads=3, batch=4, head_dim=104, head_dim_v=40, gap=48),
    Shape(600, 90, heads=8, kv_heads=2, batch=3, head_dim=256),
    Shape(1, 9, heads=1, kv_heads=1, batch=300, head_dim=32),
    Shape(0, 9, heads=2, kv_heads=1, batch=5, head_dim=64),
)


def shapes_for(variant):
    """SHAPES; of codes head dims are multiples of 16."""
    if variant.axis("kv_dtype") == "none":
        return SHAPES
    ragged = dataclasses.replace(SHAPES[1], head_dim=112, head_dim_v=48)
    return (SHAPES[0], ragged, *SHAPES[2:])


KINDS = {"float16": torch.float16, "uint16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32}
KINDS["uint8"] = torch.float8_e4m3fn


def on_device(x):
    """A tensor that lies on the GPU as an array does in host memory; and the memory of both from the first
    element to the last, as integers.
    """
    extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) // x.itemsize + 1
    flat = np.lib.stride_tricks.as_strided(x, (extent if x.size else 0,), (x.itemsize,)).view(
        f"i{x.itemsize}"
    )
    there = torch.from_numpy(flat.copy()).cuda()
    strides = [stride // x.itemsize for stride in x.strides]
    return there.view(KINDS[x.dtype.name]).as_strided(x.shape, strides), flat, there


def scales_of(tensors):
    """The scales of a cache: of its tokens, which are written, or of heads without their last dimension."""
    if SCALES_OUT[0] in tensors:
        return {name: tensors[of_tokens] for name, of_tokens in zip(SCALES, SCALES_OUT, strict=True)}
    return {name: tensors[name][..., 0] for name in SCALES if name in tensors}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_within_the_bound_and_nothing_else_touched(variant):
    examples = [make(variant, shape, new_seed()) for shape in shapes_for(variant)]
    is_whole = variant.axis("kv_dtype") != "fp8dsmla" and variant.axis("kv_scales") != TOKEN
    if variant.axis("rotary") == "none" and is_whole:  # it takes latent rows as well
        latent = Choices(page_size=3, rotary_dim=32, packed=True, head_dim_v=48)
        examples.append(make(variant, SHAPES[1], new_seed(), latent))
    for example in examples:
        named, problem = example.named, example.problem
        placed = {name: on_device(x) for name, x in named.items() if x is not None}
        tensors = {name: tensor for name, (tensor, _, _) in placed.items()}
        cache = flashgen.KVCache(
            *(tensors.get(name) for name in ("k_cache", "v_cache", "lengths", "pages", "index")),
            **scales_of(tensors),
            head_dim_v=example.head_dim_v,
            kv_dtype=LAYOUT if problem.has_packed_rows else None,
        )
        rotary = None
        if problem.pairs != "none":
            interleaved, positions = problem.pairs == "interleaved", tensors.get("positions")
            rotary = flashgen.Rotary(tensors["cos"], tensors["sin"], interleaved, positions)
        total, q_rotated = flashgen.append(
            cache,
            tensors["k_new"],
            tensors.get("v_new"),
            rotary=rotary,
            q=tensors.get("q"),
            q_positions=problem.q_positions if "q" in tensors and "positions" not in tensors else "each",
            cu_seqlens_new=tensors.get("cu_seqlens_new"),
        )
        for name in {"k_cache", "v_cache", *SCALES_OUT} & placed.keys():
            _, flat, there = placed[name]
            flat[...] = there.cpu().numpy()
        named["total_lengths"] = total.cpu().numpy()
        if q_rotated is not None:
            # What is left out stays as it was, which of a new tensor nobody knows.
            row = queries(problem, named)
            left_out = ~(row.real & (row.row >= 0) & (row.row < problem.num_positions))
            found = q_rotated.view({2: torch.int16, 4: torch.int32}[q_rotated.element_size()]).cpu().numpy()
            found = found.view(named["q_rotated"].dtype)
            left_out = left_out if problem.batched else left_out[0]
            found[left_out] = example.before["q_rotated"][left_out]
            named["q_rotated"] = found
        assert example.judge().ok, (problem, example.judge())


def test_a_graph_replays_with_other_lengths():
    random = torch.Generator("cuda").manual_seed(new_seed())
    k, v = (torch.zeros(4, 64, 2, 32, device="cuda") for _ in "kv")
    lengths = torch.tensor([0, 5, 20, 60], dtype=torch.int32, device="cuda")
    new = torch.randn(4, 3, 2, 32, generator=random, device="cuda")
    cache = flashgen.KVCache(k, v, lengths)
    flashgen.append(cache, new, new)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, _ = flashgen.append(cache, new, new)
    k.zero_()
    lengths.copy_(torch.tensor([61, 1, 62, 30], dtype=torch.int32))
    graph.replay()
    assert total.tolist() == [64, 4, 64, 33]
    expected = torch.zeros_like(k)
    for b, length in enumerate(lengths.tolist()):
        count = min(3, 64 - length)
        expected[b, length : length + count] = new[b, :count]
    assert torch.equal(k, expected)


def test_a_held_plan_of_append_and_attention_replays_with_other_lengths():
    """In a graph, with all memory the caller's: as `attention(append=)` with the lengths of the replay."""
    random = torch.Generator("cuda").manual_seed(new_seed())

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda").half()

    q, new = normal(5, 1, 8, 128), (normal(5, 1, 2, 128), normal(5, 1, 2, 128))
    k, v = normal(60, 16, 2, 128), normal(60, 16, 2, 128)
    pages = torch.randperm(60, generator=random, device="cuda").int().view(5, 12)
    lengths = torch.tensor([0, 7, 100, 15, 191], dtype=torch.int32, device="cuda")
    angles = torch.rand(192, 32, generator=random, device="cuda")
    cache, rotary = flashgen.KVCache(k, v, lengths, pages=pages), flashgen.Rotary(angles.cos(), angles.sin())
    plan = flashgen.plan(q, cache, append=new, rotary=rotary)
    out, q_rotated, total = torch.empty_like(q), torch.empty_like(q), torch.empty_like(lengths)
    workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    written = {"out": out, "q_rotated": q_rotated, "total_lengths": total, "workspace": workspace}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(q, cache, new, rotary=rotary, **written)
    for numbers in ([0, 7, 100, 15, 191], [31, 0, 16, 190, 1]):
        lengths.copy_(torch.tensor(numbers, dtype=torch.int32))
        other = flashgen.KVCache(k.clone(), v.clone(), lengths, pages=pages)
        expected = flashgen.attention(q, other, append=new, rotary=rotary)
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(k, other.k)
        assert torch.equal(v, other.v)
        assert total.tolist() == [number + 1 for number in numbers]
