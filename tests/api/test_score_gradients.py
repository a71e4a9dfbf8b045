"""Gradients of arrays of a score modification on the CPU path: beside the reference and PyTorch, through
autograd, torch.compile and attention_backward(dparams=), and what is refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

import flashgen
from flashgen.call.record import GradientCall, call_of
from flashgen.call.request import score_gradient_of
from flashgen.errors import BadParam
from flashgen.operators.score_gradient_reference import judge
from flashgen.runtime.adopted import viewed

RNG = np.random.default_rng()
BATCH, ROWS, KEYS, HEADS, KV_HEADS = 2, 33, 50, 4, 2


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape, np.float32).astype(dtype)


def inputs(dtype=np.float32):
    rows, keys = (BATCH, ROWS, HEADS), (BATCH, KEYS, KV_HEADS)
    return tuple(normal(*shape, dtype=dtype) for shape in ((*rows, 40), (*keys, 40), (*keys, 24)))


BIAS = "score + a[b, h, q, kv]"
CASES = {
    "full": (BIAS, (BATCH, HEADS, ROWS, KEYS), {}),
    "of heads": (BIAS, (HEADS, ROWS, KEYS), {"causal": True}),
    "of entries": (BIAS, (BATCH, 1, ROWS, KEYS), {"window_size": (6, 2)}),
    "of pairs": (BIAS, (ROWS, KEYS), {"mask": RNG.random((ROWS, KEYS)) < 0.3}),
    "of keys": ("5 * tanh((score + a[b, h, q, kv]) / 5)", (BATCH, 1, 1, KEYS), {}),
    "rows": ("score * a[h, q]", (HEADS, ROWS), {"causal": True}),
    "turned": ("score + a[kv, h, q]", (KEYS, HEADS, ROWS), {}),
    "slope": ("score + a[b, h] * (kv - q)", (BATCH, HEADS), {"causal": True}),
    "table": ("score + a[h, min(abs(kv - q), 15)]", (HEADS, 16), {}),
    "own": ("where(kv < q, score * a[0], score)", (1,), {}),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_within_the_bound(case, dtype):
    formula, shape, options = CASES[case]
    q, k, v = inputs(dtype)
    options = options | {"score": formula, "params": {"a": normal(*shape)}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    dout, dlse = normal(*out.shape, dtype=dtype), normal(*lse.shape)
    *others, gradient = flashgen.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, dparams=("a",), **options
    )
    plain = flashgen.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for x, y in zip(others, plain, strict=True):
        np.testing.assert_array_equal(x, y)
    assert gradient.shape == shape
    call = call_of(GradientCall, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, **options)
    request = score_gradient_of(call, "a")
    _, views = viewed(request.operator, request.by_name())
    problem = request.operator.normalise(tuple(views.values()), request.options, request.scalars)
    named = request.by_name() | {"dscore": gradient}
    verdict = judge(problem, named)
    assert verdict.ok, verdict


def test_rows_that_see_nothing_add_nothing():
    q, k, v = inputs()
    options = {"causal": True, "score": "score + a[h]", "params": {"a": normal(HEADS)}}
    out, lse = flashgen.attention(q, k[:, :5], v[:, :5], return_lse=True, **options)
    dlse = np.where(np.isneginf(lse), np.float32(np.nan), np.float32(0))
    *_, gradient = flashgen.attention_backward(
        out, q, k[:, :5], v[:, :5], out, lse, dlse=dlse, dparams=["a"], **options
    )
    # A number added to all scores of a row has no effect.
    np.testing.assert_allclose(gradient, 0, atol=5e-5)
    empty = flashgen.attention_backward(
        out, q, k[:, :0], v[:, :0], 0 * out, np.full_like(lse, -np.inf), dparams=("a",), **options
    )[-1]
    assert (empty == 0).all()


def test_the_bits_repeat():
    q, k, v = inputs(np.float16)
    options = {"score": "score + a[h, min(kv, 9)]", "params": {"a": normal(HEADS, 10)}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    results = [
        flashgen.attention_backward(out, q, k, v, out, lse, dparams=("a",), **options)[-1] for _ in range(2)
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("array_dtype", [np.float16, bfloat16])
def test_arrays_of_16_bits_are_taken_as_they_are(array_dtype):
    q, k, v = inputs()
    for formula, name in (("bias", "bias"), ("score + exp(bias[h, q, kv])", "bias")):
        array = normal(HEADS, ROWS, KEYS, dtype=array_dtype)
        halves = {"score": formula, "params": {name: array}}
        floats = {"score": formula, "params": {name: array.astype(np.float32)}}
        out, lse = flashgen.attention(q, k, v, return_lse=True, **halves)
        np.testing.assert_array_equal(out, flashgen.attention(q, k, v, **floats))
        results = [
            flashgen.attention_backward(out, q, k, v, out, lse, dparams=(name,), **options)[-1]
            for options in (halves, floats)
        ]
        assert results[0].dtype == array_dtype
        np.testing.assert_array_equal(results[0], results[1].astype(array_dtype))


def test_an_array_takes_the_place_of_a_number():
    q, k, v = inputs()
    plain = flashgen.attention(q, k, v, softcap=2.0)
    for cap in (np.array(2.0, np.float32), np.array([2.0], np.float32)):
        options = {"score": "softcap", "params": {"cap": cap}}
        out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_allclose(out, plain, rtol=1e-6, atol=1e-6)
        gradient = flashgen.attention_backward(out, q, k, v, out, lse, dparams=("cap",), **options)[-1]
        assert gradient.shape == cap.shape
        # Beside a difference quotient.
        change = [
            (flashgen.attention(*(x.astype(np.float32) for x in (q, k, v)), softcap=at) * out).sum(
                dtype=np.float64
            )
            for at in (1.99, 2.01)
        ]
        assert float(gradient.reshape(())) == pytest.approx((change[1] - change[0]) / 0.02, rel=1e-2)


def test_what_has_no_gradient_is_refused_by_name():
    q, k, v = inputs()
    bias = {"score": "score * gain + a[h]", "params": {"a": normal(HEADS), "gain": 2.0}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **bias)

    def backward(*names, **options):
        return flashgen.attention_backward(out, q, k, v, out, lse, dparams=names, **options)

    for names, options, words in (
        (("b",), bias, "dparams has 'b'; the score of the call has the arrays of numbers a"),
        (("gain",), bias, "dparams has 'gain'"),
        (("a",), {}, "dparams has 'a'; the score of the call has no array of numbers"),
        (("a", "a"), bias, "dparams is .* each once"),
        (
            ("a",),
            bias | {"kv_lengths": np.full(BATCH, KEYS, np.int32)},
            "a is to have a gradient and kv_lengths was given",
        ),
    ):
        with pytest.raises(BadParam, match=words):
            backward(*names, **options)
    for wrong in ("a", 3, (1,)):
        with pytest.raises(BadParam, match="dparams is"):
            flashgen.attention_backward(out, q, k, v, out, lse, dparams=wrong, **bias)
    with pytest.raises(TypeError, match="dparams"):
        flashgen.plan_backward(out, q, k, v, out, lse, dparams=("a",), **bias)


class TestTorch:
    torch = pytest.importorskip("torch")

    def tensors(self, *shapes):
        return [self.torch.randn(shape, requires_grad=True) for shape in shapes]

    def qkv(self):
        rows, keys = (BATCH, ROWS, HEADS, 16), (BATCH, KEYS, KV_HEADS, 16)
        return self.tensors(rows, keys, keys)

    def plain(self, q, k, v, bias):
        heads = self.torch.arange(HEADS) // (HEADS // KV_HEADS)
        scores = self.torch.einsum("bihd,bjhd->bhij", q, k[:, :, heads]) / 4 + bias
        return self.torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v[:, :, heads])

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("shape", [(HEADS, ROWS, KEYS), (BATCH, 1, 1, KEYS), (KEYS,)])
    def test_autograd(self, shape, compiled):
        q, k, v = self.qkv()
        (bias,) = self.tensors(shape)

        def call(q, k, v, bias):
            return flashgen.attention(q, k, v, score="bias", params={"bias": bias})

        if compiled:
            self.torch.compiler.reset()
        out = (self.torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(
            q, k, v, bias
        )
        dout = self.torch.randn_like(out)
        results = self.torch.autograd.grad(out, (q, k, v, bias), dout)
        expected = self.torch.autograd.grad(self.plain(q, k, v, bias), (q, k, v, bias), dout)
        for x, y in zip(results, expected, strict=True):
            self.torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)

    def test_a_bias_alone(self):
        q, k, v = (x.detach() for x in self.qkv())
        bias, other = self.tensors((HEADS, ROWS, KEYS), (KEYS,))
        formula = "score + bias[h, q, kv] + other[kv]"
        params = {"other": other.detach(), "bias": bias}
        flashgen.attention(q, k, v, score=formula, params=params).square().sum().backward()
        assert bias.grad.abs().sum() > 0
        both = {"other": other, "bias": bias}
        bias.grad = None
        flashgen.attention(q, k, v, score=formula, params=both).square().sum().backward()
        self.torch.testing.assert_close(other.grad, bias.grad.sum((0, 1)))

    def test_slopes_by_their_keyword(self):
        q, k, v = self.qkv()
        slopes = self.torch.rand(HEADS, requires_grad=True)
        out, lse = flashgen.attention(q, k, v, alibi_slopes=slopes, causal=True, return_lse=True)
        (expected,) = self.torch.autograd.grad(out.sum(), slopes)
        with self.torch.no_grad():
            *_, result = flashgen.attention_backward(
                self.torch.ones_like(out),
                *(q, k, v, out, lse),
                alibi_slopes=slopes,
                causal=True,
                dparams=("alibi_slopes",),
            )
        self.torch.testing.assert_close(result, expected)

    def test_the_backward_pass_in_a_graph(self):
        q, k, v = (x.detach() for x in self.qkv())
        bias = self.torch.randn(HEADS, ROWS, KEYS)
        options = {"score": "bias", "params": {"bias": bias}}
        out, lse = flashgen.attention(q, k, v, return_lse=True, **options)

        def call(dout, q, k, v, out, lse, bias):
            params = {"bias": bias}
            return flashgen.attention_backward(
                dout, q, k, v, out, lse, score="bias", params=params, dparams=("bias",)
            )

        arrays = (out, q, k, v, out, lse, bias)
        self.torch.compiler.reset()
        graph = self.torch.compile(call, backend="aot_eager", fullgraph=True)
        for x, y in zip(graph(*arrays), call(*arrays), strict=True):
            assert self.torch.equal(x, y)

    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_number_that_is_a_tensor(self, compiled):
        q, k, v = self.qkv()
        gain = self.torch.tensor(1.5, requires_grad=True)

        def call(q, k, v, gain):
            return flashgen.attention(q, k, v, score="score * gain", params={"gain": gain})

        if compiled:
            self.torch.compiler.reset()
            call = self.torch.compile(call, backend="aot_eager", fullgraph=True)
        out = call(q, k, v, gain)
        (result,) = self.torch.autograd.grad(out.square().sum(), gain)
        (expected,) = self.torch.autograd.grad(self.plain(gain * q, k, v, 0).square().sum(), gain)
        self.torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)

    def test_no_second_derivative(self):
        q, k, v = self.qkv()
        (bias,) = self.tensors((HEADS, ROWS, KEYS))
        out = flashgen.attention(q, k, v, score="bias", params={"bias": bias})
        with pytest.raises(BadParam, match="double backward"):
            self.torch.autograd.grad(out.sum(), bias, create_graph=True)[0].sum().backward()

    def test_an_index_without_a_gradient_is_refused_before_the_forward_pass(self):
        q, k, v = self.qkv()
        (table,) = self.tensors((99,))
        with pytest.raises(BadParam, match="the index of table depends on q and kv"):
            flashgen.attention(q, k, v, score="score + table[q + kv]", params={"table": table})
        flashgen.attention(q, k, v, score="score + table[q + kv]", params={"table": table.detach()})
