"""Masks by a line on the GPU: results and gradients of both families within the bound, the same bits each
time, in a captured graph, and through PyTorch's autograd and compiler.
"""

import itertools

import numpy as np
import pytest

import flashgen
from flashgen.call.mask import rule_of
from flashgen.operators import gradients, reference
from flashgen.operators.masks import Band
from flashgen.operators.visibility import visibility_of
from operators import lines

torch = pytest.importorskip("torch")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# batch, queries, keys, query heads, kv heads, head dim, causal
SHAPES = (
    (2, 1000, 1000, 8, 2, 128, False),
    (1, 129, 1000, 4, 4, 64, True),
    (2, 127, 127, 4, 2, 64, False),
    (1, 1, 129, 4, 1, 128, False),
    (2, 300, 300, 2, 2, 256, False),
    (1, 400, 500, 4, 2, 80, True),
)
LINES = (
    "documents",
    "document_starts",
    "prefix_lm",
    "window_global",
    "chunks",
    "neighbourhood",
    "kv <= q + far[h] and doc[b, q] == doc[b, kv]",
)
NUMBERS = {"reach": 60, "size": 96, "width": 25}


def mask_of(line, shape, rng):
    """A mask with random arrays."""
    batch, _, keys, heads, *_ = shape
    doc = np.sort(rng.integers(0, 5, (batch, keys)), 1)
    values = {
        "doc": doc,
        "start": np.stack([np.searchsorted(of_entry, of_entry) for of_entry in doc]),
        "prefix": rng.integers(0, keys + 1, batch),
        "is_global": (rng.random((batch, keys)) < 0.02).astype(np.int32),
        "far": rng.integers(-9, keys, heads),
    }
    return on_gpu(line, values | NUMBERS)


def on_gpu(line, values):
    """A mask with arrays and integers of its parameters, out of ``values``."""
    params = {param.name: values[param.name] for param in rule_of(line).params}
    return flashgen.Mask(
        line,
        **{
            name: torch.from_numpy(x if x.itemsize == 1 else x.astype(np.int32)).cuda()
            if hasattr(x, "shape")
            else x
            for name, x in params.items()
        },
    )


def inputs(shape, dtype, seed):
    batch, queries, keys, heads, kv_heads, width, _ = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(batch, rows, count, width, device="cuda", generator=generator).to(DTYPES[dtype])
        for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    ]


def hidden_of(mask, arrays, shape):
    """The mask as an array, True where a key is hidden."""
    batch, queries, keys, heads, *_ = shape
    problem = flashgen.plan(*arrays, mask=mask).problem
    visibility = visibility_of(problem, mask.arguments, torch)
    at = [torch.arange(extent, device="cuda") for extent in (batch, heads, queries, keys)]
    at = [x.reshape([-1 if place == axis else 1 for place in range(4)]) for axis, x in enumerate(at)]
    return visibility.hides(*at, torch).expand(batch, heads, queries, keys)


def check(shape, dtype, mask, seed, algorithm=None):
    """That results and gradients are within the bound, and repeat."""
    arrays = inputs(shape, dtype, seed)
    queries, keys, width = shape[1], shape[2], shape[5]
    band = Band(keys - queries, right=0) if shape[-1] else Band()
    hidden = hidden_of(mask, arrays, shape)
    options = {"mask": mask, "causal": shape[-1]}
    out = torch.full_like(arrays[0], float("nan"))
    out, lse = flashgen.attention(*arrays, out=out, return_lse=True, algorithm=algorithm, **options)
    doubles = [x.double() for x in arrays]
    right = reference.attention(*doubles, dtype, width**-0.5, band, hidden)
    assert reference.largest(out.double(), right.out, right.out_bound).share <= 1
    assert reference.largest(lse.double(), right.lse, right.lse_bound).share <= 1
    assert torch.equal(out, flashgen.attention(*arrays, algorithm=algorithm, **options))
    dout = torch.randn_like(out)
    expected = gradients.gradients(dout.double(), *doubles, dtype, width**-0.5, band, hidden)
    for deterministic in (False, True):
        call = (dout, *arrays, out, lse)
        results = flashgen.attention_backward(*call, deterministic=deterministic, **options)
        for name, result in zip(("dq", "dk", "dv"), results, strict=True):
            gradient = expected[name]
            assert reference.largest(result.double(), gradient.value, gradient.bound).share <= 1, name
        if deterministic:
            again = flashgen.attention_backward(*call, deterministic=True, **options)
            assert all(map(torch.equal, results, again))


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("line", LINES)
def test_a_line_is_within_the_bound(line, dtype, algorithm, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    check(SHAPES[0], dtype, mask_of(line, SHAPES[0], rng), fresh_seed, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("line", [LINES[0], LINES[-1]])
def test_a_shape_is_within_the_bound(line, shape, algorithm, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    check(shape, "bf16", mask_of(line, shape, rng), fresh_seed, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["v2", None])
def test_documents_whose_numbers_rise_and_then_do_not(algorithm, fresh_seed):
    # Twelve documents have less than a quarter of all blocks. The same arrays hold other numbers later.
    rng, shape = np.random.default_rng(fresh_seed), (2, 3000, 3000, 2, 1, 128, False)
    rising = np.sort(rng.integers(0, 12, shape[:2]), 1)
    padded = np.where(np.arange(3000) < 2700, rising, -1)
    shuffled = rng.permutation(12)[rising]
    mask = on_gpu("documents", {"doc": rising})
    for doc in (rising, padded, shuffled, rising):
        mask.arrays["doc"].copy_(torch.from_numpy(doc.astype(np.int32)))
        check(shape, "bf16", mask, fresh_seed, algorithm=algorithm)


def test_fp32_is_within_the_bound(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    check(SHAPES[2], "fp32", mask_of("documents", SHAPES[2], rng), fresh_seed)


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (127, 129), (129, 127), (1000, 1000)])
def test_random_lines_are_within_the_bound(queries, keys, algorithm, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    values = lines.arrays(rng, keys) | {"n": int(rng.integers(1, 9))}
    mask = on_gpu(lines.random_line(rng, max(keys, 4)), values)
    shape = (lines.BATCH, queries, keys, lines.HEADS, lines.HEADS, 64, False)
    check(shape, "bf16", mask, fresh_seed, algorithm=algorithm)


def test_score_and_sinks_go_with_a_line(fresh_seed):
    """Against the same as a mask array."""
    shape = (2, 500, 700, 4, 2, 64, True)
    rng = np.random.default_rng(fresh_seed)
    arrays, mask = inputs(shape, "bf16", fresh_seed), mask_of("documents", shape, rng)
    hidden = hidden_of(mask, arrays, shape)
    sinks = torch.randn(4, device="cuda")
    leaves = [x.requires_grad_() for x in (*arrays, sinks)]
    results = []
    for one in (mask, hidden):
        out = flashgen.attention(*leaves[:3], mask=one, causal=True, softcap=20.0, sinks=leaves[3])
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append([out.float(), *(x.float() for x in grads)])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 0.03 * other.abs().max()


def test_a_captured_graph_takes_the_arrays_of_its_replay(fresh_seed):
    shape = SHAPES[0]
    arrays, rng = inputs(shape, "bf16", fresh_seed), np.random.default_rng(fresh_seed)
    mask = mask_of("documents", shape, rng)

    def both():
        out, lse = flashgen.attention(*arrays, mask=mask, return_lse=True)
        dout = torch.ones_like(out)
        return out, *flashgen.attention_backward(dout, *arrays, out, lse, mask=mask, deterministic=True)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        mask.arrays["doc"].copy_(mask_of("documents", shape, rng).arrays["doc"])
        graph.replay()
        results = [x.clone() for x in captured]
        assert all(map(torch.equal, results, both()))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_are_handed_out_in_each_call_and_replay(head_dim, fresh_seed):
    shape = (4, 4000, 4000, 8, 4, head_dim, False)  # more tiles than multiprocessors
    arrays, rng = inputs(shape, "bf16", fresh_seed), np.random.default_rng(fresh_seed)
    mask = mask_of("documents", shape, rng)
    out, kept = flashgen.attention(*arrays, mask=mask), mask.keep_lists()
    for _ in range(4):
        assert torch.equal(flashgen.attention(*arrays, mask=kept), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashgen.attention(*arrays, mask=mask)
    for _ in range(4):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, out)


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("line", ["documents", "prefix_lm", "kv <= q + far[h] and doc[b, q] == doc[b, kv]"])
def test_packed_sequences_are_within_the_bound(line, algorithm, fresh_seed):
    """Against the masks of the sequences by themselves, as one array over all tokens."""
    rng = np.random.default_rng(fresh_seed)
    ends = np.concatenate([[0], np.sort(rng.integers(0, 1990, 9)), [1990]])  # of 2,000 tokens
    shape = (1, 2000, 2000, 4, 2, 128, False)
    doc = np.sort(rng.integers(0, 5, 2000))
    values = {"doc": doc, "prefix": rng.integers(0, 200, 10), "far": rng.integers(-9, 200, 4)}
    mask, arrays = on_gpu(line, values), [x[0] for x in inputs(shape, "bf16", fresh_seed)]
    hidden = torch.ones(4, 2000, 2000, dtype=torch.bool, device="cuda")
    for b, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < end:
            of_one = values | {"doc": doc[None, begin:end], "prefix": values["prefix"][b : b + 1]}
            part = 1, end - begin, end - begin, 4, 2, 128, False
            own = hidden_of(on_gpu(line, of_one), [x[None, begin:end] for x in arrays], part)[0]
            row, key = (torch.arange(end - begin, device="cuda") for _ in range(2))
            hidden[:, begin:end, begin:end] = own | (key > row[:, None])
    on_device = torch.from_numpy(ends.astype(np.int32)).cuda()
    options = {"mask": mask, "causal": True, "cu_seqlens_q": on_device, "cu_seqlens_kv": on_device}
    out, lse = flashgen.attention(*arrays, return_lse=True, algorithm=algorithm, **options)
    doubles = [x[None].double() for x in arrays]
    right = reference.attention(*doubles, "bf16", 128**-0.5, Band(), hidden[None])
    assert reference.largest(out[None].double(), right.out, right.out_bound).share <= 1
    assert reference.largest(lse[None].double(), right.lse, right.lse_bound).share <= 1
    dout = torch.randn_like(out)
    expected = gradients.gradients(dout[None].double(), *doubles, "bf16", 128**-0.5, Band(), hidden[None])
    for deterministic in (False, True):
        results = flashgen.attention_backward(dout, *arrays, out, lse, deterministic=deterministic, **options)
        for name, result in zip(("dq", "dk", "dv"), results, strict=True):
            gradient = expected[name]
            assert reference.largest(result[None].double(), gradient.value, gradient.bound).share <= 1, name
    leaves = [x.requires_grad_() for x in arrays]
    recorded = torch.autograd.grad(
        flashgen.attention(*leaves, deterministic=True, algorithm=algorithm, **options), leaves, dout
    )
    assert all(map(torch.equal, recorded, results))


def test_layers_share_kept_lists(fresh_seed):
    """The bits of calls that list blocks themselves, in both passes, on two streams, after a write, and in a
    graph.
    """
    shape, rng = SHAPES[0], np.random.default_rng(fresh_seed)
    leaves = [x.requires_grad_() for x in inputs(shape, "bf16", fresh_seed)]
    mask = mask_of("documents", shape, rng)
    keeping = mask.keep_lists()

    def both(mask):
        out = flashgen.attention(*leaves, mask=mask, deterministic=True)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    stream = torch.cuda.Stream()
    for _ in range(3):
        right = both(mask)
        assert all(map(torch.equal, both(keeping), right))
        assert all(map(torch.equal, both(keeping), right))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            elsewhere = both(keeping)
        torch.cuda.current_stream().wait_stream(stream)
        assert all(map(torch.equal, elsewhere, right))
        keeping.check()
        mask.arrays["doc"].copy_(mask_of("documents", shape, rng).arrays["doc"])
    arrays = [x.detach() for x in leaves]
    graph = torch.cuda.CUDAGraph()
    flashgen.attention(*arrays, mask=mask)
    with torch.cuda.graph(graph):
        captured = flashgen.attention(*arrays, mask=keeping)
    mask.arrays["doc"].copy_(mask_of("documents", shape, rng).arrays["doc"])
    graph.replay()
    assert torch.equal(captured, flashgen.attention(*arrays, mask=mask))


def test_autograd_and_compiled_calls_agree(fresh_seed):
    shape = SHAPES[0]
    leaves = [x.requires_grad_() for x in inputs(shape, "bf16", fresh_seed)]
    mask = mask_of("documents", shape, np.random.default_rng(fresh_seed))

    def attend(q, k, v, mask):
        return flashgen.attention(q, k, v, mask=mask, deterministic=True)

    results = [
        torch.autograd.grad(function(*leaves, mask).float().square().sum(), leaves)
        for function in (attend, torch.compile(attend, fullgraph=True))
    ]
    assert all(map(torch.equal, *results))


def test_hopper_takes_kernels_of_its_own():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    arrays = inputs(SHAPES[0], "bf16", 0)
    mask = mask_of("documents", SHAPES[0], np.random.default_rng(0))
    assert (
        flashgen.plan(*arrays, mask=mask).variant.name == "flash_fwd_hdim128_bf16_blocks_documents_gqa_sm90"
    )
