"""Masks by a line beside caches on a GPU: within the bound in rows, pages and splits; replayed graphs."""

import numpy as np
import pytest

import flashgen
from flashgen.call.mask import mask_of
from flashgen.operators import reference
from flashgen.operators.masks import Band
from flashgen.operators.visibility import Visibility

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Queries, room for keys, heads, kv heads, head_dim: clusters; split-KV; chunks of rows; wide heads.
SHAPES = ((1, 5000, 8, 2, 128), (16, 3000, 8, 2, 64), (300, 4096, 32, 8, 128), (33, 700, 4, 2, 256))
SHARES = (1.0, 0.7, 0.3, 0.03, 0.0)
LINES = {
    "documents": "doc[b, q] == doc[b, kv] and kv <= q",
    "ranges": "kv <= q and kv >= q - far[h] or kv < first[b]",
    "holes": "kv <= q and (q - kv < 40 or kv < first[b])",
    "chunks": "q // 700 == kv // 700 and kv <= q",
    "all": "(doc[b, q] == doc[b, kv] or kv < first[b] + far[h]) and kv // 3 <= q + b",
}


def line_of(name, shape, seed):
    rng = np.random.default_rng(seed)
    arrays = {
        "doc": np.sort(rng.integers(0, 9, (len(SHARES), shape[1]))),
        "first": rng.integers(0, 100, len(SHARES)),
        "far": rng.integers(1, 400, shape[2]),
    }
    on_gpu = {key: torch.from_numpy(x.astype(np.int32)).cuda() for key, x in arrays.items()}
    return mask_of(LINES[name], {key: x for key, x in on_gpu.items() if key in LINES[name]}, {})


def inputs(shape, dtype, paged):
    """q and a cache; keys past a length are NaN in rows, and pages are in random order."""
    queries, room, heads, kv_heads, width = shape
    room = room // 16 * 16
    q, k, v = (
        torch.randn(len(SHARES), rows, count, width, device="cuda").to(DTYPES[dtype])
        for rows, count in ((queries, heads), (room, kv_heads), (room, kv_heads))
    )
    lengths = [max(queries, int(room * share)) for share in SHARES]
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = torch.nan
    lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if not paged:
        return q, k, v, flashgen.KVCache(k, v, lengths)
    order = torch.randperm(len(SHARES) * room // 16, device="cuda").reshape(len(SHARES), -1)
    pools = [torch.empty(order.numel(), 16, kv_heads, width, device="cuda", dtype=x.dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[order] = x.reshape(len(SHARES), -1, 16, kv_heads, width)
    return q, k, v, flashgen.KVCache(*pools, lengths, order.int())


@pytest.mark.parametrize("kind", ["rows", "pages", "splits"])
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_within_the_bound(shape, dtype, line, kind):
    if kind == "splits" and (shape[0] * shape[2] // shape[3] > 64 or dtype == "fp32"):
        pytest.skip("splits are of few rows of 16 bits")
    room = shape[1] // 16 * 16
    mask = line_of(line, (shape[0], room, *shape[2:]), 5)
    q, k, v, cache = inputs(shape, dtype, kind == "pages")
    options = {"splits": flashgen.SplitEvery(512)} if kind == "splits" else {}
    out, lse = flashgen.attention(q, cache, mask=mask, return_lse=True, **options)
    symbols = {param.name: param.symbols for param in mask.rule.rule.arrays}
    for b, end in enumerate(cache.lengths.tolist()):
        arrays = {
            key: (x if symbols[key] == ("num_heads_q",) else x[b : b + 1]).long()
            for key, x in mask.arrays.items()
        }
        rule = Visibility(mask.rule.rule, {}, arrays, end - shape[0], first_batch=b)
        rows = (x.double() for x in (q[b : b + 1], k[b : b + 1, :end], v[b : b + 1, :end]))
        right = reference.attention(*rows, dtype, shape[-1] ** -0.5, Band(end - shape[0]), rule=rule)
        assert reference.largest(out[b : b + 1].double(), right.out, right.out_bound).share <= 1
        assert reference.largest(lse[b : b + 1].double(), right.lse, right.lse_bound).share <= 1
    again = flashgen.attention(q, cache, mask=mask, return_lse=True, **options)
    assert torch.equal(out, again[0])


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hidden_blocks_are_not_read(shape, paged):
    """KV blocks of at most 256 keys that the line hides from all queries may hold anything."""
    shape = (shape[0], shape[1] // 16 * 16, *shape[2:])
    first, last = 300, max(300, shape[1] * 7 // 10 - shape[0] - 300)
    far = torch.zeros(shape[1], dtype=torch.int32, device="cuda")
    far[first:last] = 10**6
    q, _, _, cache = inputs(shape, "bf16", paged)
    lines = (
        flashgen.Mask("kv <= q and (kv < first or kv >= last)", first=first, last=last),
        flashgen.Mask("kv <= q and far[kv] <= q", far=far),
    )
    right = [flashgen.attention(q, cache, mask=mask) for mask in lines]
    hole = slice(first + 255, max(first + 255, last - 255))
    if paged:
        pages = cache.pages[:, hole.start // 16 + 1 : hole.stop // 16].long()
        cache.k[pages] = cache.v[pages] = torch.nan
    else:
        cache.k[:, hole] = cache.v[:, hole] = torch.nan
    for mask, out in zip(lines, right, strict=True):
        assert torch.equal(flashgen.attention(q, cache, mask=mask), out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_graph_takes_other_lengths_pages_and_arrays(shape):
    shape = (shape[0], shape[1] // 16 * 16, *shape[2:])
    mask, other = (line_of("documents", shape, seed) for seed in (1, 2))
    q, _, _, cache = inputs(shape, "bf16", True)
    for pool in (cache.k, cache.v):
        pool.nan_to_num_()
    flashgen.attention(q, cache, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, cache, mask=mask)
    mask.arrays["doc"].copy_(other.arrays["doc"])
    cache.lengths.sub_(9).clamp_(min=shape[0])
    cache.pages.copy_(cache.pages.flip(1))
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, cache, mask=mask))
