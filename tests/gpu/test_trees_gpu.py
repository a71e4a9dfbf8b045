"""Trees of drafts on a GPU: within the bound in rows, pages and splits; replayed graphs."""

import numpy as np
import pytest

import flashgen
from flashgen.operators import reference
from flashgen.operators.masks import Band
from flashgen.operators.trees import hidden_by_tree

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Drafts, room for keys, heads, kv heads, head_dim: clusters; split-KV; chunks of rows; wide heads.
SHAPES = ((4, 5000, 8, 2, 128), (16, 3000, 8, 2, 64), (64, 4096, 32, 8, 128), (33, 700, 4, 2, 256))
SHARES = (1.0, 0.7, 0.3, 0.03, 0.0)


def random_tree(rng, drafts):
    """The words of a tree in which each draft continues a random earlier one, or none."""
    words = []
    for draft in range(drafts):
        parent = int(rng.integers(-1, draft))
        words.append((words[parent] if parent >= 0 else 0) | 1 << draft)
    return np.array(words, np.uint64).view(np.int64)


def trees(drafts):
    rng = np.random.default_rng()
    return torch.from_numpy(np.stack([random_tree(rng, drafts) for _ in SHARES])).cuda()


def inputs(shape, dtype):
    """q, k, v and lengths; keys past a length are NaN."""
    drafts, room, heads, kv_heads, width = shape
    q, k, v = (
        torch.randn(len(SHARES), rows, count, width, device="cuda").to(DTYPES[dtype])
        for rows, count in ((drafts, heads), (room, kv_heads), (room, kv_heads))
    )
    lengths = [max(drafts, int(room * share)) for share in SHARES]
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = torch.nan
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def cache_of(k, v, lengths, kind, size=16):
    if kind != "pages":
        return flashgen.KVCache(k, v, lengths)
    pools = (x[:, : x.shape[1] // size * size].reshape(-1, size, *x.shape[2:]) for x in (k, v))
    pages = torch.arange(len(k) * (k.shape[1] // size), dtype=torch.int32, device="cuda").reshape(len(k), -1)
    lengths = torch.minimum(lengths, torch.tensor(pages.shape[1] * size, device="cuda", dtype=torch.int32))
    return flashgen.KVCache(*pools, lengths, pages)


@pytest.mark.parametrize("kind", ["rows", "pages", "splits"])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_within_the_bound(shape, dtype, window, kind):
    if kind == "splits" and (shape[0] * shape[2] // shape[3] > 64 or dtype == "fp32"):
        pytest.skip("splits are of few rows of 16 bits")
    q, k, v, lengths = inputs(shape, dtype)
    tree, cache = trees(shape[0]), cache_of(k, v, lengths, kind)
    options = {"window_size": (-1 if window is None else window, 0), "return_lse": True}
    options |= {"splits": flashgen.SplitEvery(512)} if kind == "splits" else {}
    out, lse = flashgen.attention(q, cache, tree=tree, **options)
    for b, end in enumerate(cache.lengths.tolist()):
        side = {} if window is None else {"left": window}
        band = Band(end - shape[0], right=0, **side)
        rows = (x.double() for x in (q[b : b + 1], k[b : b + 1, :end], v[b : b + 1, :end]))
        dense = torch.from_numpy(hidden_by_tree(tree[b : b + 1].cpu().numpy(), end)).cuda()
        right = reference.attention(*rows, dtype, shape[-1] ** -0.5, band, dense)
        assert reference.largest(out[b : b + 1].double(), right.out, right.out_bound).share <= 1
        assert reference.largest(lse[b : b + 1].double(), right.lse, right.lse_bound).share <= 1
    assert torch.equal(out, flashgen.attention(q, cache, tree=tree, **options)[0])


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_graph_takes_other_trees_lengths_and_pages(shape):
    q, k, v, lengths = inputs(shape, "bf16")
    tree, cache = trees(shape[0]), cache_of(k.nan_to_num(), v.nan_to_num(), lengths, "pages")
    flashgen.attention(q, cache, tree=tree)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, cache, tree=tree)
    tree.copy_(trees(shape[0]))
    cache.lengths.sub_(9).clamp_(min=shape[0])
    cache.pages.copy_(cache.pages.flip(1))
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, cache, tree=tree))
