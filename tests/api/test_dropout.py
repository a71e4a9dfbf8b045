"""Dropout on the CPU, in every function that takes it."""

import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer
from flashgen.operators.dropout import Dropout, keep_scale, keep_threshold

HEADS, KV_HEADS, SEED = 4, 2, (123, 45)
rng = np.random.default_rng()
EXPLAINED = {"dtype": "fp16", "arch": "sm_90"}


def arrays(queries=40, keys=70, batch=2):
    shapes = ((batch, queries, HEADS, 16), (batch, keys, KV_HEADS, 16), (batch, keys, KV_HEADS, 8))
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def dropped(q, k, v, dropout_p, seed=SEED, bias=0.0):
    """The result in float64, of scores that are all there."""
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    drawn = Dropout(*seed, keep_threshold(dropout_p), keep_scale(dropout_p), heads)
    pairs = np.arange(batch).repeat(heads), np.tile(np.arange(heads), batch)
    kept = drawn.kept(*pairs, np.arange(queries), np.arange(keys)).reshape(batch, heads, queries, keys)
    k, v = (np.repeat(x.astype(np.float64), heads // k.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) / width**0.5 + bias
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p *= kept / (1 - dropout_p) / p.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", p, v)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_scores_that_count_weigh_more(dropout_p):
    q, k, v = arrays()
    out, lse = flashgen.attention(q, k, v, dropout_p=dropout_p, dropout_seed=SEED, return_lse=True)
    np.testing.assert_allclose(out, dropped(q, k, v, dropout_p), 1e-5, 2e-6)
    plain, plain_lse = flashgen.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(lse, plain_lse)
    assert not np.allclose(out, plain, atol=1e-2)


def test_beside_a_mask_and_a_score():
    q, k, v = arrays()
    mask = rng.random((40, 70)) < 0.3
    bias = rng.standard_normal((HEADS, 40, 70), np.float32)
    out = flashgen.attention(
        q, k, v, mask=mask, score="bias", params={"bias": bias}, dropout_p=0.2, dropout_seed=SEED
    )
    expected = dropped(q, k, v, 0.2, bias=np.where(mask, -np.inf, bias))
    np.testing.assert_allclose(out, expected, 1e-5, 2e-6)


def test_the_mean_over_seeds_is_attention_without_dropout():
    q, k, v = arrays(queries=16, keys=32)
    seeds = np.stack([rng.integers(2**62, size=2) for _ in range(300)])
    outs = np.stack([flashgen.attention(q, k, v, dropout_p=0.5, dropout_seed=x) for x in seeds])
    error = outs.std(0) / np.sqrt(len(outs))
    # Of some thousand elements one is beyond six errors in a run of 100,000, and beyond eight in none.
    assert (np.abs(outs.mean(0) - flashgen.attention(q, k, v)) / error).max() < 8


def test_a_seed_is_two_integers_or_an_array_and_repeats():
    q, k, v = arrays()
    seeds = [(2**64 - 1, 5), [-1, 5], np.array([-1, 5])]
    outs = [flashgen.attention(q, k, v, dropout_p=0.1, dropout_seed=seed) for seed in seeds]
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
    other = flashgen.attention(q, k, v, dropout_p=0.1, dropout_seed=(-1, 6))
    assert not np.array_equal(outs[0], other)


def test_no_dropout_needs_no_seed():
    q, k, v = arrays()
    for nothing in (0, 0.0):
        np.testing.assert_array_equal(
            flashgen.attention(q, k, v, dropout_p=nothing), flashgen.attention(q, k, v)
        )


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_have_the_numbers_of_their_batch_entry(packed):
    lengths = [7, 0, 40]
    sequences = [arrays(n, n, 1) for n in lengths]
    options = {"dropout_p": 0.3, "causal": True, "return_lse": True}
    if packed:
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        q, k, v = (np.concatenate([x[i][0] for x in sequences]) for i in range(3))
        of_call = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    else:
        q, k, v = (np.zeros((3, 40, *x.shape[2:]), np.float32) for x in sequences[0])
        for b, (n, sequence) in enumerate(zip(lengths, sequences, strict=True)):
            for whole, part in zip((q, k, v), sequence, strict=True):
                whole[b, :n] = part[0]
        of_call = {"kv_lengths": np.array(lengths, np.int32)}
        options["causal"] = False
    out, lse = flashgen.attention(q, k, v, dropout_seed=SEED, **of_call, **options)
    dout = rng.standard_normal(out.shape, np.float32)
    backward = {x: y for x, y in options.items() if x != "return_lse"}
    of_q = flashgen.attention_backward(dout, q, k, v, out, lse, dropout_seed=SEED, **of_call, **backward)[0]
    for b, (n, sequence) in enumerate(zip(lengths, sequences, strict=True)):
        if not n:
            continue
        seed = (SEED[0], SEED[1] + 32 * HEADS * b)
        expected, its_lse = flashgen.attention(*sequence, dropout_seed=seed, **options)
        rows = slice(ends[b], ends[b] + n) if packed else (b, slice(n))
        np.testing.assert_allclose(out[rows], expected[0], 1e-5, 1e-6)
        gradient = flashgen.attention_backward(
            dout[rows][None], *sequence, expected, its_lse, dropout_seed=seed, **backward
        )[0]
        np.testing.assert_allclose(of_q[rows], gradient[0], 1e-4, 1e-5)


def test_plans_take_the_seed_of_each_call():
    q, k, v = arrays()
    plan = flashgen.plan(q, k, v, dropout_p=0.1, dropout_seed=SEED)
    for seed in (SEED, (9, 9)):
        expected = flashgen.attention(q, k, v, dropout_p=0.1, dropout_seed=seed)
        np.testing.assert_array_equal(plan(q, k, v, dropout_seed=np.array(seed)), expected)


def test_arrays_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    q, k, v = arrays()
    out = flashgen.attention(*map(jnp.asarray, (q, k, v)), dropout_p=0.1, dropout_seed=SEED)
    np.testing.assert_array_equal(
        np.asarray(out), flashgen.attention(q, k, v, dropout_p=0.1, dropout_seed=SEED)
    )


HALF, WITH = {"dropout_p": 0.1}, {"dropout_p": 0.1, "dropout_seed": SEED}
WRONG = (
    (WITH | {"dropout_p": 1.0}, BadParam, r"^dropout_p is 1\.0; expected a number from 0"),
    (WITH | {"dropout_p": 0.95}, BadParam, r"^dropout_p is 0\.95; a score has one random byte"),
    (HALF, NullPointer, r"^dropout_seed is None and dropout_p is 0\.1; expected \(seed, offset\)"),
    ({"dropout_seed": np.array(SEED)}, BadParam, "^dropout_seed was given without dropout_p"),
    (HALF | {"dropout_seed": (1, 2, 3)}, BadParam, r"^dropout_seed is \(1, 2, 3\); expected"),
    (HALF | {"dropout_seed": (1, 2**64)}, BadParam, r"^dropout_seed is \(1, 18446744073709551616\)"),
    (HALF | {"dropout_seed": np.zeros(3, np.int64)}, BadTensorShape, r"^dropout_seed has shape \(3,\)"),
    (HALF | {"dropout_seed": np.zeros(2, np.int32)}, BadTensorDtype, "^dropout_seed has dtype int32"),
    (WITH | {"splits": 2}, BadParam, r"^dropout_p is 0\.1 and splits is 2; dropout is for training"),
    (
        WITH | {"return_weights": True},
        BadParam,
        r"^return_weights is True and dropout_p is 0\.1; there are weights without dropout alone",
    ),
)


@pytest.mark.parametrize(("options", "error", "match"), WRONG)
def test_what_does_not_fit_is_refused_by_name(options, error, match):
    with pytest.raises(error, match=match):
        flashgen.attention(*arrays(), **options)


def test_serving_has_no_dropout():
    q, k, v = arrays(queries=1)
    cache = flashgen.KVCache(k, v, np.full(2, 70, np.int32))
    options = {"dropout_p": 0.1, "dropout_seed": SEED}
    for call in (flashgen.attention, flashgen.plan):
        with pytest.raises(BadParam, match=r"^dropout_p is 0\.1 and k is a KVCache; dropout is for training"):
            call(q, cache, **options)
    with pytest.raises(BadParam, match=r"^dropout_p is 0\.1 and k is a KVCache"):
        flashgen.attention(q, cache, append=(k[:, :1], v[:, :1]), **options)
    with pytest.raises(TypeError, match="dropout_p"):
        flashgen.cascade(q, [(k, v)], **options)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    with pytest.raises(NullPointer, match=r"^dropout_seed is None .*, as in the forward call"):
        flashgen.attention_backward(out, q, k, v, out, lse, dropout_p=0.1)


def test_kernels_that_have_none_are_not_chosen():
    q, k = (2, 300, 4, 64), (2, 300, 2, 64)
    for operator in ("attention", "attention_backward"):
        for lengths in ({}, {"kv_lengths": (2,)}):
            explained = flashgen.explain(q, k, dropout_p=0.1, operator=operator, **lengths, **EXPLAINED)
            assert dict(explained.variant.axes)["dropout"] == "dropout"
            assert explained.variant.gqa == "gqa"
            assert "_dropout" in explained.variant.name
    assert "_dropout" not in flashgen.explain(q, k, **EXPLAINED).variant.name
    x = np.zeros(q, np.float16)
    with pytest.raises(BadParam, match=r"algorithm is 'naive', which has no kernel for .* dropout"):
        flashgen.attention(x, x, x, dropout_p=0.1, dropout_seed=SEED, algorithm="naive", backend="simulator")


class TestTorch:
    torch = pytest.importorskip("torch")

    def tensors(self):
        return [self.torch.tensor(x, requires_grad=True) for x in arrays()]

    def test_seeds_are_of_torchs_generator(self):
        torch, tensors = self.torch, self.tensors()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            recorded = flashgen.attention(*tensors, dropout_p=0.2)
            torch.manual_seed(1)
            plain = flashgen.attention(*(x.detach() for x in tensors), dropout_p=0.2)
            other = flashgen.attention(*tensors, dropout_p=0.2)
        assert torch.equal(recorded, plain)
        assert not torch.equal(recorded, other)

    def test_gradients_drop_the_same_scores(self):
        torch, tensors = self.torch, self.tensors()
        seed = torch.tensor(SEED)
        out, lse = flashgen.attention(*tensors, dropout_p=0.2, dropout_seed=seed, return_lse=True)
        found = torch.autograd.grad(out.square().sum(), tensors)
        host = [x.detach().numpy() for x in (2 * out, *tensors, out, lse)]
        expected = flashgen.attention_backward(*host, dropout_p=0.2, dropout_seed=SEED)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x.numpy(), y, 1e-5, 1e-5)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_computes_the_same_bits_again(self, reentrant):
        torch, tensors = self.torch, self.tensors()

        def attend(*inputs):
            return flashgen.attention(*inputs, dropout_p=0.2)

        torch.manual_seed(4)
        expected = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
        torch.manual_seed(4)
        out = torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=reentrant)
        torch.rand(3)  # moves the generator on
        out.square().sum().backward()
        for x, gradient in zip(tensors, expected, strict=True):
            assert torch.equal(x.grad, gradient)

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_a_graph_draws_others_in_each_run(self, backend):
        torch, tensors = self.torch, self.tensors()
        compiled = torch.compile(
            lambda *inputs: flashgen.attention(*inputs, dropout_p=0.2), fullgraph=True, backend=backend
        )
        first, second = compiled(*tensors), compiled(*tensors)
        assert not torch.equal(first, second)
        share = ((second - flashgen.attention(*tensors)).abs() > 1e-3).double().mean()
        assert share > 0.5
        found = torch.autograd.grad(second.sum(), tensors)
        assert all(x.isfinite().all() and x.abs().sum() > 0 for x in found)

    def test_a_seed_in_a_graph(self):
        torch, tensors = self.torch, self.tensors()
        attend = torch.compile(
            lambda seed, *inputs: flashgen.attention(*inputs, dropout_p=0.2, dropout_seed=seed),
            fullgraph=True,
            backend="aot_eager",
        )
        for seed in (SEED, (4, 4)):
            out = attend(torch.tensor(seed), *tensors)
            expected = flashgen.attention(*tensors, dropout_p=0.2, dropout_seed=seed)
            assert torch.equal(out, expected)
            for x, y in zip(*(torch.autograd.grad(y.sum(), tensors) for y in (out, expected)), strict=True):
                assert torch.equal(x, y)
