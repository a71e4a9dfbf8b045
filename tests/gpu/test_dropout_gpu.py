"""Dropout on the GPU: forward, sequences, gradients, graphs; the scores that flash-attn drops."""

import itertools

import numpy as np
import pytest

import flashgen
from flashgen.call.compute import compute
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.request import gradients_of, request_of
from flashgen.operators import gradients, reference
from flashgen.operators.dropout import Dropout, keep_scale, keep_threshold
from flashgen.operators.masks import Band
from flashgen.runtime.arrays import kind_of

torch = pytest.importorskip("torch")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SEED = (2**61 + 12345, 2**32 - 77)
# Batch, queries, keys, heads, kv heads, head_dim, causal.
SHAPES = (
    (2, 1000, 1000, 8, 2, 128, True),
    (1, 300, 200, 4, 4, 64, True),
    (2, 500, 777, 4, 4, 96, False),
    (1, 700, 700, 4, 2, 256, False),
    (1, 257, 513, 6, 2, 32, False),
)


def inputs(shape, dtype, seed=0):
    batch, queries, keys, heads, kv_heads, width, _ = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return tuple(
        torch.randn(batch, rows, count, width, device="cuda", generator=generator).to(DTYPES[dtype])
        for rows, count in sizes
    )


def band_of(shape):
    _, queries, keys, *_, causal = shape
    return Band(keys - queries, right=0) if causal else Band()


def drawn(dropout_p, heads, seed=SEED):
    return Dropout(*seed, keep_threshold(dropout_p), keep_scale(dropout_p), heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_within_the_bound(shape, dtype):
    if dtype == "fp32" and shape[5] > 192 and torch.cuda.get_device_capability()[1]:
        pytest.skip("no fp32 gradients at this head dim on such GPUs")
    q, k, v = inputs(shape, dtype)
    options = {"causal": shape[-1], "dropout_p": 0.1, "dropout_seed": SEED}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    of_call = dtype, shape[5] ** -0.5, band_of(shape), None
    exact = [x.double() for x in (q, k, v)]
    right = reference.attention(*exact, *of_call, dropout=drawn(0.1, shape[3]))
    assert reference.largest(out.double(), right.out, right.out_bound).share <= 1
    assert reference.largest(lse.double(), right.lse, right.lse_bound).share <= 1
    expected = gradients.gradients(
        dout.double(), *exact, *of_call, dlse.double(), dropout=drawn(0.1, shape[3])
    )
    for deterministic in (False, True):
        found = flashgen.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options
        )
        for x, (name, gradient) in zip(found, expected.items(), strict=True):
            assert gradients.largest(x.double(), *gradient).share <= 1, name
    again = flashgen.attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=True, **options)
    assert all(map(torch.equal, found, again))
    assert torch.equal(out, flashgen.attention(q, k, v, **options))


@pytest.mark.parametrize("algorithm", ["v2", "v3"])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_the_kept_scores_show_one_by_one(algorithm, dropout_p):
    """With q = 0 and V the identity a result is P of a key, 0 where it is dropped."""
    if algorithm == "v3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for Hopper")
    batch, heads, queries, keys = 3, 5, 1000, 128
    q = torch.zeros(batch, queries, heads, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, keys, heads, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(keys, device="cuda", dtype=torch.bfloat16)[None, :, None].expand(batch, keys, heads, keys)
    out = flashgen.attention(
        q, k, v.contiguous(), dropout_p=dropout_p, dropout_seed=SEED, algorithm=algorithm
    )
    pairs = np.arange(batch).repeat(heads), np.tile(np.arange(heads), batch)
    kept = drawn(dropout_p, heads).kept(*pairs, np.arange(queries), np.arange(keys))
    kept = torch.tensor(kept.reshape(batch, heads, queries, keys).swapaxes(1, 2), device="cuda")
    assert torch.equal(out != 0, kept)
    assert float(out[kept].float().mean()) == pytest.approx(1 / keys / (1 - dropout_p), rel=5e-3)


def masked_by_line(shape, seed):
    """A mask by a line, documents, and the same as an array."""
    batch, _, keys, *_ = shape
    doc = np.sort(np.random.default_rng(seed).integers(0, 6, (batch, keys)))
    doc = torch.from_numpy(doc.astype(np.int32)).cuda()
    rows = doc[:, keys - shape[1] :]
    hidden = (rows[:, :, None] != doc[:, None]) | ~torch.ones(shape[1:3], dtype=torch.bool).tril(
        keys - shape[1]
    ).cuda()
    return flashgen.Mask("documents", doc=doc), hidden[:, None]


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], (2, 300, 500, 4, 2, 64, True)], ids=str)
def test_a_mask_by_a_line_is_within_the_bound(shape, dtype, algorithm, fresh_seed):
    q, k, v = inputs(shape, dtype, fresh_seed)
    mask, hidden = masked_by_line(shape, fresh_seed)
    options = {"mask": mask, "dropout_p": 0.1, "dropout_seed": SEED}
    out, lse = flashgen.attention(q, k, v, return_lse=True, algorithm=algorithm, **options)
    dout = torch.randn_like(out)
    of_call = dtype, shape[5] ** -0.5, Band(), hidden
    exact = [x.double() for x in (q, k, v)]
    right = reference.attention(*exact, *of_call, dropout=drawn(0.1, shape[3]))
    assert reference.largest(out.double(), right.out, right.out_bound).share <= 1
    assert reference.largest(lse.double(), right.lse, right.lse_bound).share <= 1
    expected = gradients.gradients(dout.double(), *exact, *of_call, dropout=drawn(0.1, shape[3]))
    for deterministic in (False, True):
        found = flashgen.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
        for x, name in zip(found, ("dq", "dk", "dv"), strict=True):
            assert gradients.largest(x.double(), *expected[name]).share <= 1, name


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("kind", ["line", "blocks"])
def test_masks_drop_the_scores_of_a_mask_array(kind, algorithm):
    """With q = 0 and V the identity a result is P of a key, 0 where it is hidden or dropped."""
    shape = (2, 512, 128, 4, 4, 128, False)
    q, k, _ = inputs(shape, "bf16")
    q.zero_()
    v = torch.eye(128, device="cuda", dtype=torch.bfloat16)[None, :, None].expand_as(k).contiguous()
    if kind == "line":
        mask, hidden = flashgen.Mask("kv // 48 <= q // 96"), None
        at = torch.arange(512, device="cuda")[:, None] - 384, torch.arange(128, device="cuda")
        hidden = at[1] // 48 > at[0] // 96
    else:
        ends = torch.tensor([0, 1, 1, 2, 4], dtype=torch.int32, device="cuda")
        blocks = torch.tensor([0, 1, 0, 1], dtype=torch.int32, device="cuda")
        mask = flashgen.BlockMask(ends, blocks, block=(128, 64))
        hidden = torch.ones(512, 128, dtype=torch.bool, device="cuda")
        hidden[:128, :64] = hidden[256:384, 64:] = hidden[384:] = False
    options = {"dropout_p": 0.3, "dropout_seed": SEED}
    out = flashgen.attention(q, k, v, mask=mask, algorithm=algorithm, **options)
    right = flashgen.attention(q, k, v, mask=hidden, **options)
    assert torch.equal(out != 0, right != 0)
    assert (out != 0).any()


def test_autograd_records_a_mask_by_a_line(fresh_seed):
    shape = (2, 500, 500, 4, 2, 64, True)
    tensors = [x.requires_grad_() for x in inputs(shape, "bf16", fresh_seed)]
    mask, hidden = masked_by_line(shape, fresh_seed)
    results = []
    for x in (mask, mask.keep_lists(), hidden):
        torch.manual_seed(fresh_seed % 2**31)
        out = flashgen.attention(*tensors, mask=x, dropout_p=0.2)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    for found in results[:2]:
        for x, y in zip(found, results[2], strict=True):
            torch.testing.assert_close(x, y, atol=6e-2, rtol=5e-2)


def test_flash_attn_drops_the_same_scores():
    flash_attn = pytest.importorskip("flash_attn.flash_attn_interface")
    q, k, v = inputs(SHAPES[0], "bf16")
    out, _, _, state = flash_attn._flash_attn_forward(q, k, v, 0.1, 128**-0.5, True, -1, -1, 0.0, None, False)
    ours = flashgen.attention(q, k, v, causal=True, dropout_p=0.1, dropout_seed=state)
    assert (ours.float() - out.float()).abs().max() < 0.05
    other = flashgen.attention(q, k, v, causal=True, dropout_p=0.1, dropout_seed=SEED)
    assert (other.float() - out.float()).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_packed_sequences_are_calls_of_their_own(dtype):
    ends = torch.tensor([0, 700, 700, 703, 2000], dtype=torch.int32, device="cuda")
    q, k, v = (x[0].requires_grad_() for x in inputs((1, 2000, 2000, 8, 2, 128, True), dtype))
    options = {"causal": True, "dropout_p": 0.2}
    seed = torch.tensor(SEED, device="cuda")
    out = flashgen.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, dropout_seed=seed, **options)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    for b, (first, last) in enumerate(((0, 700), (700, 700), (700, 703), (703, 2000))):
        seed = torch.tensor((SEED[0], SEED[1] + 32 * 8 * b), device="cuda")
        part = [x[None, first:last].detach().requires_grad_() for x in (q, k, v)]
        alone = flashgen.attention(*part, dropout_seed=seed, **options)
        torch.testing.assert_close(out[None, first:last], alone, atol=2e-2, rtol=2e-2)
        for x, y in zip(found, torch.autograd.grad(alone, part, dout[None, first:last]), strict=True):
            torch.testing.assert_close(x[None, first:last], y, atol=5e-2, rtol=5e-2)


def test_a_captured_graph_draws_others_in_each_replay():
    q, k, v = (x.requires_grad_() for x in inputs(SHAPES[0], "bf16"))

    def step():
        out = flashgen.attention(q, k, v, causal=True, dropout_p=0.1)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    replays = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        graph.replay()
        replays.append([x.clone() for x in results])
    assert torch.equal(replays[0][0], replays[1][0])
    assert not torch.equal(replays[0][0], replays[2][0])
    graph.replay()
    assert not torch.equal(replays[2][0], results[0])
    torch.cuda.manual_seed(1)
    for x, y in zip(replays[0], step(), strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


def test_checkpointing_computes_the_same_bits_again():
    tensors = [x.requires_grad_() for x in inputs(SHAPES[0], "bf16")]

    def attend(*args):
        return flashgen.attention(*args, causal=True, dropout_p=0.1, deterministic=True)

    torch.manual_seed(4)
    expected = torch.autograd.grad(attend(*tensors).float().square().sum(), tensors)
    torch.manual_seed(4)
    out = torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False)
    torch.rand(3, device="cuda")
    found = torch.autograd.grad(out.float().square().sum(), tensors)
    assert all(map(torch.equal, found, expected))


def parts_of_rows(tokens):
    """Rows of one call and the keys that a causal mask lets them see; all cuts are at blocks of 16."""
    cuts = (0, 128, 400, 416, 768, tokens)
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_of_a_part_have_the_numbers_of_the_whole_call(dtype, width, packed):
    """``dropout_row``, as ranks that have a part of a sequence pass it: out and dq of each part, and sums of
    dk and dv over parts.
    """
    shape = 1, 1000, 1000, 4, 2, width, True
    q, k, v = inputs(shape, dtype)
    options = {"causal": True, "dropout_p": 0.25}
    seed = torch.tensor(SEED, device="cuda")

    def of_call(q, k, v, **others):
        """The arrays of a call, of one packed document or of a batch of one."""
        arrays = {"q": q, "k": k, "v": v} | others
        if not packed:
            return arrays
        arrays = {name: x[0] for name, x in arrays.items()}
        for name, x in (("q", q), ("kv", k)):
            arrays[f"cu_seqlens_{name}"] = torch.tensor([0, x.shape[1]], device="cuda", dtype=torch.int32)
            arrays[f"max_seqlen_{name}"] = x.shape[1]
        return arrays

    options |= {"dropout_seed": seed}
    whole = of_call(q, k, v)
    out, lse = flashgen.attention(**whole, **options, return_lse=True)
    dout = torch.randn_like(out)
    right = flashgen.attention_backward(dout, out=out, lse=lse, **whole, **options)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in right[1:]]
    for begin, end in parts_of_rows(shape[1]):
        rows = slice(begin, end)
        some = (slice(None), rows) if not packed else (rows,)
        lines = (..., rows)
        arrays = of_call(q[:, rows], k[:, :end], v[:, :end])
        call = call_of(AttentionCall, **arrays, **options, dropout_row=begin, return_lse=True)
        found, of_rows = compute(request_of(call), kind_of(call.q))
        assert near(found, out[some]) < 2e-3
        assert near(of_rows, lse[lines]) < 1e-4
        arrays |= {"dout": dout[some].contiguous(), "out": out[some].contiguous()}
        arrays["lse"] = lse[lines].contiguous()
        call = call_of(GradientCall, **arrays, **options, dropout_row=begin)
        dq, *of_keys = compute(gradients_of(call), kind_of(call.q))
        assert near(dq, right[0][some]) < 0.02
        keys = (slice(None), slice(end)) if not packed else (slice(end),)
        for total, x in zip(sums, of_keys, strict=True):
            total[keys] += x.float()
    for total, x in zip(sums, right[1:], strict=True):
        assert near(total, x) < 0.02


def near(found, right):
    return float((found.double() - right.double()).norm() / right.double().norm())
