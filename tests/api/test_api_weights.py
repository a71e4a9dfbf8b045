"""attention(return_weights=True) on the CPU path: the weights, their place among results, plans, autograd,
torch.compile, and what is refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

import flashgen
from flashgen.errors import BadParam, BadTensorDtype
from flashgen.operators.weights_reference import judge

DTYPES = {"fp16": np.float16, "bf16": bfloat16, "fp32": np.float32}
RNG = np.random.default_rng()
MASKS = {
    "none": {},
    "causal": {"causal": True},
    "top_left": {"mask_type": "causal_top_left"},
    "window": {"window_size": (6, 2)},
    "dense": {"mask": RNG.random((33, 50)) < 0.3},
    "dense_window": {"mask": RNG.random((4, 33, 50)) < 0.3, "window_size": (20, 3)},
}
BIAS = RNG.standard_normal((4, 33, 50), np.float32)
SCORES = {
    "softcap": {"softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32)},
    "formula": {"score": "score + bias[h, q, kv]", "params": {"bias": BIAS}},
}


def inputs(dtype=np.float32, batch=2, rows=33, keys=50, heads=4, kv_heads=2):
    shapes = (batch, rows, heads, 40), (batch, keys, kv_heads, 40), (batch, keys, kv_heads, 24)
    return tuple(RNG.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)


def assert_right(q, k, weights, dtype, **options):
    plan = flashgen.plan(q, k, k, return_weights=True, **options)
    problem = plan.weights.problem
    named = {"q": q, "k": k, "mask": options.get("mask"), "weights": weights}
    for param in problem.score.arrays if problem.score else ():
        named[param.name] = options.get("alibi_slopes", options.get("params", {}).get(param.name))
    verdict = judge(problem, named)
    assert verdict.ok, verdict


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_the_bound(dtype, mask):
    q, k, v = inputs(DTYPES[dtype])
    out, weights = flashgen.attention(q, k, v, return_weights=True, **MASKS[mask])
    assert weights.dtype == np.float32
    assert weights.shape == (2, 4, 33, 50)
    assert_right(q, k, weights, dtype, **MASKS[mask])
    np.testing.assert_array_equal(out, flashgen.attention(q, k, v, **MASKS[mask]))


@pytest.mark.parametrize("score", SCORES)
def test_score_modifications(score):
    q, k, v = inputs(np.float16)
    _, weights = flashgen.attention(q, k, v, return_weights=True, **SCORES[score])
    assert_right(q, k, weights, "fp16", **SCORES[score])


def test_results_come_in_order():
    q, k, v = inputs()
    out, lse, weights = flashgen.attention(q, k, v, return_lse=True, return_weights=True)
    alone = flashgen.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(out, alone[0])
    np.testing.assert_array_equal(lse, alone[1])
    assert flashgen.attention(q, k, v, return_weights=True)[1].shape == weights.shape
    assert isinstance(flashgen.attention(q, k, v, return_weights=False), np.ndarray)
    assert isinstance(flashgen.attention(q, k, v, return_weights=np.bool_(False)), np.ndarray)


def test_without_batch():
    q, k, v = (x[0] for x in inputs())
    assert flashgen.attention(q, k, v, return_weights=True)[1].shape == (4, 33, 50)


def test_rows_that_see_nothing_weigh_nothing():
    q, k, v = inputs(rows=20, keys=5)
    _, weights = flashgen.attention(q, k, v, causal=True, return_weights=True)
    assert (weights[:, :, :15] == 0).all()
    np.testing.assert_allclose(weights[:, :, 15:].sum(axis=-1), 1, rtol=1e-5)
    assert flashgen.attention(q, k[:, :0], v[:, :0], return_weights=True)[1].shape == (2, 4, 20, 0)


def test_a_hidden_key_has_no_effect_even_as_nan():
    q, k, v = inputs(rows=8, keys=8)
    k[:, 6:] = np.nan
    v[:, 6:] = np.nan
    _, weights = flashgen.attention(q, k, v, mask_type="causal_top_left", return_weights=True)
    assert (weights[:, :, :6, 6:] == 0).all()
    assert np.isfinite(weights[:, :, :6]).all()


def test_large_scores_give_weights_of_1_at_most():
    q, k, v = inputs()
    _, weights = flashgen.attention(q * 1e3, k * 1e3, v, return_weights=True)
    assert weights.max() <= 1
    assert np.isfinite(weights).all()


def test_an_out_is_written_and_returned():
    q, k, v = inputs()
    out = np.empty((2, 33, 4, 24), np.float32)
    assert flashgen.attention(q, k, v, out=out, return_weights=True)[0] is out


@pytest.mark.parametrize("algorithm", ["v2", "v3"])
def test_any_algorithm_may_compute_the_result(algorithm):
    q, k, v = inputs(np.float16)
    _, weights = flashgen.attention(q, k, v, algorithm=algorithm, return_weights=True)
    np.testing.assert_array_equal(weights, flashgen.attention(q, k, v, return_weights=True)[1])


def test_a_plan_computes_both():
    q, k, v = inputs()
    mask = MASKS["dense"]["mask"]
    plan = flashgen.plan(q, k, v, mask=mask, softcap=3.0, return_lse=True, return_weights=True)
    assert isinstance(plan, flashgen.WeightsPlan)
    assert plan.variant is None
    assert plan.steps == ()
    assert plan.source == ""
    assert plan.workspace_bytes == 0
    assert repr(plan).startswith("<flashgen.WeightsPlan <flashgen.Plan cpu")
    into = np.empty((2, 4, 33, 50), np.float32)
    for cap in (3.0, 7.0):
        out, lse, weights = plan(q, k, v, mask=mask, cap=cap, weights=into)
        assert weights is into
        right = flashgen.attention(q, k, v, mask=mask, softcap=cap, return_lse=True, return_weights=True)
        for x, y in zip((out, lse, weights), right, strict=True):
            np.testing.assert_array_equal(x, y)
    assert len(flashgen.plan(q, k, v, return_weights=True)(q, k, v)) == 2


def test_a_plan_refuses_weights_that_do_not_fit():
    q, k, v = inputs()
    plan = flashgen.plan(q, k, v, return_weights=True)
    with pytest.raises(BadTensorDtype, match="weights"):
        plan(q, k, v, weights=np.empty((2, 4, 33, 50), np.float16))


LENGTHS = np.array([3, 7], np.int32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_lengths": LENGTHS}, "return_weights is True and kv_lengths was given"),
        ({"cu_seqlens_q": LENGTHS}, "return_weights is True and cu_seqlens_q was given"),
        ({"cu_seqlens_kv": LENGTHS}, "return_weights is True and cu_seqlens_kv was given"),
        ({"append": (None, None)}, "return_weights is True and append was given"),
        ({"return_weights": 2}, "return_weights is 2; expected True or False"),
        ({"return_weights": "all"}, "return_weights is 'all'"),
        ({"return_weights": None}, "return_weights is None"),
    ],
)
@pytest.mark.parametrize("function", [flashgen.attention, flashgen.plan])
def test_refused_by_name(function, options, words):
    with pytest.raises(BadParam, match=words):
        function(*inputs(), **({"return_weights": True} | options))


@pytest.mark.parametrize("function", [flashgen.attention, flashgen.plan])
def test_a_cache_is_refused(function):
    q, k, v = inputs()
    with pytest.raises(BadParam, match="return_weights is True and k is a KVCache"):
        function(q, flashgen.KVCache(k, v, LENGTHS), return_weights=True)


def test_explain_and_its_advice():
    explained = flashgen.explain(
        (1, 4096, 16, 128), causal=True, dtype="bf16", arch="sm_90", operator="attention_weights"
    )
    assert explained.variant.name == "attention_weights_hdim256_bf16_causal_sm80"
    grouped = flashgen.explain((1, 64, 8, 40), (1, 99, 2, 40), arch="sm_80", operator="attention_weights")
    assert grouped.variant.name == "attention_weights_hdim256_fp16_gqa_sm80"
    with pytest.raises(BadParam, match="operator 'attention_weights'"):
        flashgen.explain((1, 64, 8, 64), arch="sm_90", return_weights=True)


class TestTorch:
    """Tensors, recorded and traced."""

    @pytest.fixture
    def tensors(self):
        torch = pytest.importorskip("torch")
        return [torch.from_numpy(x).requires_grad_() for x in inputs()]

    def test_weights_have_no_gradient_and_the_result_has(self, tensors):
        out, lse, weights = flashgen.attention(*tensors, causal=True, return_lse=True, return_weights=True)
        assert out.requires_grad
        assert lse.requires_grad
        assert not weights.requires_grad
        (out.sum() + lse.sum()).backward()
        gradients = [x.grad.clone() for x in tensors]
        for x in tensors:
            x.grad = None
        out, lse = flashgen.attention(*tensors, causal=True, return_lse=True)
        (out.sum() + lse.sum()).backward()
        assert all(bool((x.grad == y).all()) for x, y in zip(tensors, gradients, strict=True))
        plain = flashgen.attention(*(x.detach().numpy() for x in tensors), causal=True, return_weights=True)
        np.testing.assert_array_equal(weights.numpy(), plain[1])

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiled(self, tensors, dynamic):
        import torch

        slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])

        def call(q, k, v):
            return flashgen.attention(q, k, v, causal=True, alibi_slopes=slopes, return_weights=True)

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        out, weights = compiled(*tensors)
        right = call(*tensors)
        assert torch.equal(weights, right[1])
        assert not weights.requires_grad
        out.sum().backward()
        assert tensors[0].grad is not None

    def test_compiled_with_out(self, tensors):
        import torch

        q, k, v = (x.detach() for x in tensors)
        out = torch.empty(2, 33, 4, 24)

        def call(q, k, v, out):
            return flashgen.attention(q, k, v, out=out, return_lse=True, return_weights=True)

        results = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v, out)
        for x, y in zip(results, call(q, k, v, torch.empty_like(out)), strict=True):
            assert torch.equal(x, y)

    def test_the_operator_is_as_its_fake(self, tensors):
        import torch

        from flashgen.call.codec import encode
        from flashgen.call.record import AttentionCall, call_of

        q, k, v = (x.detach() for x in tensors)
        _, lse = flashgen.attention(q, k, v, return_lse=True)
        score_arrays, entries = encode(call_of(AttentionCall, q=q, k=k, v=v, causal=True))
        operator = torch.ops.flashgen.attention_weights.default
        torch.library.opcheck(operator, (q, k, None, lse, score_arrays, *entries))

    def test_meta(self, tensors):
        q, k, v = (x.detach().to("meta") for x in tensors)
        out, weights = flashgen.attention(q, k, v, return_weights=True)
        assert out.is_meta
        assert weights.is_meta
        assert weights.shape == (2, 4, 33, 50)

    def test_a_plan_refuses_tensors_that_require_a_gradient(self, tensors):
        with pytest.raises(BadParam, match="There are no gradients of plans"):
            flashgen.plan(*tensors, return_weights=True)


def test_a_sink_takes_its_share_of_a_row():
    q, k, v = inputs()
    sinks = RNG.standard_normal(q.shape[2], np.float32)
    out, lse, weights = flashgen.attention(
        q, k, v, causal=True, sinks=sinks, return_lse=True, return_weights=True
    )
    share = np.exp(sinks[:, None] - lse)
    np.testing.assert_allclose(weights.sum(axis=-1) + share, 1, rtol=0, atol=1e-5)
    heads = np.arange(q.shape[2]) // (q.shape[2] // k.shape[2])
    np.testing.assert_allclose(out, np.einsum("bhij,bjhd->bihd", weights, v[:, :, heads]), atol=1e-5)


def test_jax():
    jax = pytest.importorskip("jax")
    arrays = inputs()
    results = flashgen.attention(*map(jax.numpy.asarray, arrays), return_lse=True, return_weights=True)
    right = flashgen.attention(*arrays, return_lse=True, return_weights=True)
    assert all(isinstance(x, jax.Array) for x in results)
    for x, y in zip(results, right, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)
    plan = flashgen.plan(*map(jax.numpy.asarray, arrays), return_weights=True)
    np.testing.assert_array_equal(np.asarray(plan(*map(jax.numpy.asarray, arrays))[1]), right[2])
