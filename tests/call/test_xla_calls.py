"""Calls inside jax.jit, grad, vmap, scan, checkpoint and shard_map, on the CPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import flashgen  # noqa: E402
from flashgen import BadParam, BadTensorShape, KVCache, Mask, Rotary  # noqa: E402
from flashgen.call.record import AttentionCall, call_of  # noqa: E402
from flashgen.call.request import request_of  # noqa: E402
from flashgen.call.text import decode, encode  # noqa: E402
from flashgen.call.xla import primitive  # noqa: E402
from flashgen.operators.arguments import Expected  # noqa: E402

BATCH, ROWS, HEADS, WIDTH = 2, 24, 4, 16
causal = functools.partial(flashgen.attention, causal=True)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def x():
    """q, k, v and a cotangent."""
    return [normal(BATCH, ROWS, HEADS, WIDTH, seed=seed) for seed in range(4)]


def reference(q, k, v, *, sinks=None, bias=0.0):
    """Causal attention in plain JAX."""
    scores = jnp.einsum("...shd,...thd->...hst", q, k) / WIDTH**0.5 + bias
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], -1)
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[-3]]
    return jnp.einsum("...hst,...thd->...shd", weights, v)


def close(result, expected, tolerance=3e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), result, expected)


def same(result, expected):
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def of_sum(function, cotangent):
    return lambda *arrays: (function(*arrays) * cotangent).sum()


def gradients(function, arrays, cotangent):
    return jax.grad(of_sum(function, cotangent), tuple(range(len(arrays))))(*arrays)


OPTIONS = {
    "plain": {},
    "window": {"window_size": (5, 0)},
    "lse": {"causal": True, "return_lse": True},
    "softcap": {"softcap": 3.0},
    "scale": {"softmax_scale": 0.3},
    "formula": {"score": "score * g - 1", "params": {"g": 2.0}},
    "backend": {"backend": "cpu"},
    "splits": {"splits": 1},
    "weights": {"causal": True, "return_weights": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_jitted_call_has_the_bits_of_a_plain_one(x, name):
    q, k, v, _ = x
    function = functools.partial(flashgen.attention, **OPTIONS[name])
    same(jax.jit(function)(q, k, v), function(q, k, v))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_jit_in_16_bits(x, dtype):
    q, k, v = (a.astype(dtype) for a in x[:3])
    result = jax.jit(causal)(q, k, v)
    assert result.dtype == dtype
    same(result.astype(jnp.float32), causal(q, k, v).astype(jnp.float32))


def test_only_one_array_need_be_traced(x):
    q, k, v, _ = x
    same(jax.jit(lambda v: causal(q, k, v))(v), causal(q, k, v))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(x, compiled):
    *arrays, cotangent = x
    sinks = normal(HEADS)

    def call(attend):
        return lambda q, k, v, sinks: attend(q, k, v, sinks=sinks)

    def result(*arrays):
        return gradients(call(causal), arrays, cotangent)

    expected = gradients(call(reference), (*arrays, sinks), cotangent)
    close((jax.jit(result) if compiled else result)(*arrays, sinks), expected)


def test_the_gradient_of_sinks_in_bf16_is_in_bf16(x):
    q, k, v, _ = x
    assert (
        jax.grad(lambda s: causal(q, k, v, sinks=s).sum())(jnp.zeros(HEADS, jnp.bfloat16)).dtype == "bfloat16"
    )


def test_the_gradient_of_the_lse(x):
    q, k, v, _ = x

    def lse(q):
        scores = jnp.einsum("...shd,...thd->...hst", q, k) / WIDTH**0.5
        return jax.nn.logsumexp(scores, -1).sum()

    close(jax.grad(lambda q: flashgen.attention(q, k, v, return_lse=True)[1].sum())(q), jax.grad(lse)(q))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_has_a_gradient(x, compiled):
    *arrays, cotangent = x
    arrays = *arrays, normal(HEADS, ROWS, ROWS)

    def biased(q, k, v, bias):
        return causal(q, k, v, score="score + bias[h, q, kv]", params={"bias": bias})

    def expected(q, k, v, bias):
        return reference(q, k, v, bias=bias)

    def result(*arrays):
        return gradients(biased, arrays, cotangent)

    close((jax.jit(result) if compiled else result)(*arrays), gradients(expected, arrays, cotangent))


def test_the_pass_for_a_bias_is_left_out_where_its_gradient_is(x):
    *arrays, cotangent = x

    def gradient(bias, *arrays):
        def biased(q, k, v):
            return causal(q, k, v, score="score + bias[h, q, kv]", params={"bias": bias})

        return gradients(biased, arrays, cotangent)

    program = jax.jit(gradient).lower(normal(HEADS, ROWS, ROWS), *arrays).compile().as_text()
    assert program.count('custom_call_target="flashgen"') == 2
    assert "score_gradient" not in program


def test_a_number_of_a_score_may_be_traced_and_has_a_gradient(x):
    q, k, v, cotangent = x

    def loss(temperature):
        scored = causal(q, k, v, score="score * t", params={"t": temperature})
        return (scored * cotangent).sum()

    def expected(temperature):
        return (reference(q * temperature, k, v) * cotangent).sum()

    t = jnp.asarray(1.5, jnp.float32)
    close(jax.jit(jax.value_and_grad(loss))(t), jax.value_and_grad(expected)(t), 1e-4)


def test_lists_of_blocks_in_both_passes_and_mapped():
    *arrays, cotangent = (normal(2, 256, 2, 64, seed=seed) for seed in range(4))
    indptr, indices = jnp.asarray([0, 1, 3], jnp.int32), jnp.asarray([0, 0, 1], jnp.int32)

    def listed(q, k, v, indptr, indices):
        return causal(q, k, v, mask=flashgen.BlockMask(indptr, indices))

    def call(q, k, v):
        return jax.jit(listed)(q, k, v, indptr, indices)

    close(call(*arrays), causal(*arrays))
    close(gradients(call, arrays, cotangent), gradients(causal, arrays, cotangent), 1e-5)
    for axes in ((0, 0, 0, None, None), (None, None, None, 0, None)):
        arguments = (*arrays, jnp.stack([indptr] * 2) if axes[3] == 0 else indptr, indices)
        result = jax.vmap(listed, axes)(*arguments)
        close(result[1] if axes[3] == 0 else result, causal(*arrays))


def test_slopes_have_a_gradient_also_mapped(x):
    q, k, v, cotangent = x
    slopes = abs(normal(HEADS))

    def loss(slopes):
        return (causal(q, k, v, alibi_slopes=slopes) * cotangent).sum()

    out, lse = causal(q, k, v, alibi_slopes=slopes, return_lse=True)
    options = {"causal": True, "alibi_slopes": slopes, "dparams": ("alibi_slopes",)}
    *_, expected = flashgen.attention_backward(cotangent, q, k, v, out, lse, **options)
    close(jax.jit(jax.grad(loss))(slopes), expected.reshape(HEADS), 1e-5)
    close(jax.vmap(jax.grad(loss))(jnp.stack([slopes, slopes]))[1], expected.reshape(HEADS), 1e-5)


def test_a_mask_by_a_line_in_both_passes_and_mapped(x):
    *arrays, cotangent = x
    prefix = jnp.asarray([3, 7], jnp.int32)

    def by_line(q, k, v, prefix):
        return flashgen.attention(q, k, v, mask=Mask("kv <= q or kv < prefix[b] + n", prefix=prefix, n=1))

    rows, keys = jnp.arange(ROWS)[:, None], jnp.arange(ROWS)
    visible = (keys <= rows) | (keys < prefix[:, None, None] + 1)

    def by_array(q, k, v):
        return flashgen.attention(q, k, v, mask=~visible[:, None])

    same(jax.jit(by_line)(*arrays, prefix), by_line(*arrays, prefix))
    result = jax.jit(lambda *arrays: gradients(lambda *x: by_line(*x, prefix), arrays, cotangent))(*arrays)
    close(result, gradients(by_array, arrays, cotangent))
    mapped = jax.jit(jax.vmap(by_line, (None, None, None, 0)))(*arrays, jnp.stack([prefix, prefix + 9]))
    close(mapped[1], by_line(*arrays, prefix + 9), 1e-6)
    documents = jnp.repeat(jnp.asarray([[0, 1, 2], [0, 0, 1]], jnp.int32), ROWS // 3, 1)

    def in_documents(q):
        return flashgen.attention(q, *arrays[1:], mask=Mask("documents", doc=documents))

    mapped = jax.vmap(in_documents)(jnp.stack([arrays[0], cotangent]))
    close(mapped[1], in_documents(cotangent), 1e-6)


def test_remat_and_scan_over_layers(x):
    *arrays, cotangent = x

    def layers(attend):
        def layer(q, k, v):
            return jax.lax.scan(lambda c, _: (jax.checkpoint(attend)(c, k, v), None), q, length=3)[0]

        return layer

    result = jax.jit(lambda *arrays: gradients(layers(causal), arrays, cotangent))(*arrays)
    close(result, gradients(layers(reference), arrays, cotangent))


class TestMapped:
    """vmap: as one call of a larger batch where that is possible, else one after another."""

    @pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, 2), (None, 3, None)])
    def test_any_axis_of_any_array(self, x, axes):
        arrays = [a if axis is None else jnp.stack([a, a + 1, 2 * a], axis) for a, axis in zip(x, axes)]  # noqa: B905
        result = jax.jit(jax.vmap(causal, axes))(*arrays)
        for place in range(3):
            one = [a if i is None else jnp.take(a, place, i) for a, i in zip(arrays, axes, strict=True)]
            close(result[place], causal(*one), 1e-6)

    def test_one_call_computes_all(self, x):
        text = str(jax.make_jaxpr(jax.vmap(causal))(*x[:3]))
        assert text.count("flashgen[") == 1
        assert "scan" not in text and "while" not in text  # noqa: PT018

    def test_gradients_of_a_mapped_call_and_a_map_of_gradients(self, x):
        *arrays, cotangent = x
        expected = gradients(reference, arrays, cotangent)
        close(gradients(jax.vmap(causal), arrays, cotangent), expected)
        mapped = jax.vmap(lambda *arrays: gradients(causal, arrays[:3], arrays[3]))
        close(jax.jit(mapped)(*arrays, cotangent), expected)

    def test_arrays_that_a_batch_shares(self, x):
        q, k, v, _ = x
        sinks, mask = normal(3, HEADS), normal(3, ROWS, ROWS) > 0
        slopes, lengths = abs(normal(3, HEADS)), jnp.asarray([[3, 9], [24, 1], [5, 5]], jnp.int32)
        for name, value in {"sinks": sinks, "mask": mask, "alibi_slopes": slopes}.items():
            result = jax.vmap(lambda y, name=name: causal(q, k, v, **{name: y}))(value)
            close(result[2], causal(q, k, v, **{name: value[2]}), 1e-6)
        result = jax.vmap(lambda y: causal(q, k, v, kv_lengths=y))(lengths)
        close(result[1], causal(q, k, v, kv_lengths=lengths[1]), 1e-6)
        result = jax.vmap(jax.grad(lambda s: causal(q, k, v, sinks=s).sum()))(sinks)
        close(result[1], jax.grad(lambda s: causal(q, k, v, sinks=s).sum())(sinks[1]))

    def test_packed_calls_come_one_after_another(self, x):
        q, k, v = (a.reshape(-1, HEADS, WIDTH) for a in x[:3])
        bounds = jnp.asarray([[0, 10, 48], [0, 30, 48]], jnp.int32)

        def packed(q, bounds):
            return causal(q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

        result = jax.jit(jax.vmap(packed))(jnp.stack([q, q]), bounds)
        same(result[1], packed(q, bounds[1]))


def test_packed_sequences_and_their_gradients(x):
    q, k, v, cotangent = (a.reshape(-1, HEADS, WIDTH) for a in x)
    bounds = jnp.asarray([0, 20, 48], jnp.int32)

    def packed(q, k, v):
        return causal(q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    def apart(q, k, v):
        return jnp.concatenate([reference(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 20), (20, 48))])

    close(jax.jit(packed)(q, k, v), apart(q, k, v))
    close(gradients(packed, (q, k, v), cotangent), gradients(apart, (q, k, v), cotangent))


def test_no_rows_and_no_keys(x):
    q, k, v, _ = x
    assert jax.jit(causal)(q[:0], k[:0], v[:0]).shape == (0, ROWS, HEADS, WIDTH)
    out, lse = jax.jit(functools.partial(flashgen.attention, return_lse=True))(q, k[:, :0], v[:, :0])
    assert not out.any()
    assert (lse == -jnp.inf).all()
    assert all(not g.any() for g in gradients(flashgen.attention, (q, k[:, :0], v[:, :0]), q))


def test_attention_backward_inside_jit(x):
    q, k, v, dout = x
    out, lse = causal(q, k, v, return_lse=True)
    backward = functools.partial(flashgen.attention_backward, causal=True)
    same(jax.jit(backward)(dout, q, k, v, out, lse), backward(dout, q, k, v, out, lse))


class TestCache:
    """A KVCache goes through JAX as its arrays."""

    @pytest.fixture
    def cache(self):
        k, v = normal(BATCH, 32, HEADS, WIDTH), normal(BATCH, 32, HEADS, WIDTH, seed=1)
        return KVCache(k, v, jnp.asarray([3, 9], jnp.int32))

    def on_host(self, tree):
        return jax.tree.map(np.array, tree)

    def test_append_gives_the_new_cache_last(self, cache):
        new = normal(BATCH, 2, HEADS, WIDTH), normal(BATCH, 2, HEADS, WIDTH, seed=5)
        written = self.on_host(cache)
        expected, _ = flashgen.append(written, *map(np.asarray, new))
        total, rotated, result = jax.jit(flashgen.append)(cache, *new)
        same((total, result.k, result.v, result.lengths), (expected, written.k, written.v, written.lengths))
        assert rotated is None

    def test_append_and_attend_in_a_donated_cache(self, cache):
        q, k, v = (normal(BATCH, 2, HEADS, WIDTH, seed=seed) for seed in range(3))
        rotary = Rotary(normal(64, 8), normal(64, 8, seed=1))
        written = self.on_host(cache)
        new = tuple(map(np.asarray, (k, v)))
        expected = causal(np.asarray(q), written, append=new, rotary=self.on_host(rotary))

        @functools.partial(jax.jit, donate_argnums=1)
        def step(q, cache, k, v, rotary):
            return causal(q, cache, append=(k, v), rotary=rotary)

        address = cache.k.unsafe_buffer_pointer()
        out, result = step(q, cache, k, v, rotary)
        same((out, result.k, result.v), (expected, written.k, written.v))
        assert result.k.unsafe_buffer_pointer() == address  # nothing was copied

    def test_a_cache_that_is_still_in_use_is_copied(self, cache):
        new = normal(BATCH, 2, HEADS, WIDTH)
        before = np.array(cache.k)
        *_, result = jax.jit(flashgen.append)(cache, new, new)
        same(cache.k, before)
        assert (result.k != before).any()

    def test_pages_mapped_over_queries(self):
        k, v = normal(4, 16, HEADS, WIDTH), normal(4, 16, HEADS, WIDTH, seed=1)
        pages, q = jnp.asarray([[0, 1], [3, 2]], jnp.int32), normal(3, BATCH, 2, HEADS, WIDTH)
        lengths = jnp.asarray([[3, 20], [32, 4], [2, 2]], jnp.int32)

        def decode(q, lengths):
            return causal(q, KVCache(k, v, lengths, pages=pages))

        result = jax.jit(jax.vmap(decode))(q, lengths)
        close(result[1], decode(q[1], lengths[1]), 1e-6)

    def test_errors_call_arrays_as_the_cache_does(self, cache):
        wrong = KVCache(cache.k, cache.v, jnp.asarray([3, 99], jnp.int32))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"flashgen: BadParam: lengths\[1\] is 99"):
            jax.jit(causal)(normal(BATCH, 2, HEADS, WIDTH), wrong).block_until_ready()
        with pytest.raises(BadParam, match="q is differentiated: a call with a KVCache"):
            jax.grad(lambda q: causal(q, cache).sum())(normal(BATCH, 2, HEADS, WIDTH))


def test_merge_and_cascade(x):
    q, k, v, _ = x
    parts = [(k[:1], v[:1]), (k, v)]
    for arguments in (parts, parts[:1], parts[1:]):
        call = functools.partial(flashgen.cascade, causal=True, return_lse=True)
        same(jax.jit(lambda q, arguments=arguments, call=call: call(q, arguments))(q), call(q, arguments))
    pairs = [flashgen.attention(q, part, part, return_lse=True) for part in (k[:, :9], k[:, 9:12], k[:, 12:])]
    same(jax.jit(flashgen.merge)(pairs), flashgen.merge(pairs))


class TestErrors:
    def test_contract_errors_come_while_tracing(self, x):
        q, k, v, _ = x
        with pytest.raises(BadTensorShape, match=r"v has shape \(2, 24, 4, 16\) but k has \(2, 24, 3, 16\)"):
            jax.jit(flashgen.attention)(q, k[:, :, :3], v)

    @pytest.mark.parametrize(
        ("message", "options"),
        [
            ("out has type", {"out": 0}),
            ("stream was given", {"stream": 7}),
            ("softmax_scale has type .*Tracer; .* must be a number", {"softmax_scale": 0}),
            ("softcap is", {"softcap": -1}),
        ],
    )
    def test_what_a_program_cannot_have(self, x, message, options):
        q, k, v, _ = x

        def call(q):
            arguments = {name: q[0, 0, 0, 0] if value == 0 else value for name, value in options.items()}
            return flashgen.attention(q, k, v, **arguments)

        with pytest.raises(BadParam, match=f"^{message}"):
            jax.jit(call)(q)

    def test_arrays_of_other_libraries(self, x):
        q, k, v, _ = x
        with pytest.raises(BadParam, match="k is a numpy array but q is a jax one"):
            jax.jit(lambda q: flashgen.attention(q, np.asarray(k), v))(q)

    def test_plans_are_for_arrays_with_memory(self, x):
        with pytest.raises(BadParam, match=r"q is traced by JAX.*outside jax\.jit"):
            jax.jit(flashgen.plan)(*x[:3])

    def test_forward_mode_is_a_type_error(self, x):
        q, k, v, _ = x
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda q: causal(q, k, v), (q,), (q,))

    def test_derivatives_that_there_are_not(self, x):
        q, k, v, _ = x

        def squared(q):
            return jax.grad(lambda q: causal(q, k, v).sum())(q).sum()

        with pytest.raises(TypeError, match=r"double backward"):
            jax.grad(squared)(q)
        with pytest.raises(TypeError, match="no derivative of merge"):
            jax.grad(lambda q: flashgen.merge([causal(q, k, v, return_lse=True)] * 2)[0].sum())(q)
        lengths = jnp.asarray([3, 9], jnp.int32)
        with pytest.raises(BadParam, match=r"^alibi_slopes is differentiated.*stop_gradient\(alibi_slopes\)"):
            jax.grad(lambda s: causal(q, k, v, kv_lengths=lengths, alibi_slopes=s).sum())(normal(HEADS))

    def test_a_size_that_is_a_symbol(self, x):
        (rows,) = jax.export.symbolic_shape("rows")
        q = jax.ShapeDtypeStruct((BATCH, rows, HEADS, WIDTH), jnp.float32)
        with pytest.raises(BadParam, match="export a program for each size"):
            jax.export.export(jax.jit(causal))(q, q, q)


def test_by_the_callback_of_jax_where_the_interface_has_another_version(x, monkeypatch):
    *arrays, cotangent = x
    monkeypatch.setattr(primitive, "WITH_FFI", False)
    jax.clear_caches()
    call = jax.jit(lambda *arrays: gradients(causal, arrays, cotangent))
    assert "xla_buffer_python" in call.lower(*arrays).as_text()
    close(call(*arrays), gradients(reference, arrays, cotangent))
    jax.clear_caches()


def test_the_workspace_of_a_backend_is_a_result_of_the_program(x):
    arrays = [normal(1, 128, 1, 64, seed=seed).astype(jnp.float16) for seed in range(3)]

    def call(*arrays):
        return gradients(functools.partial(causal, backend="simulator"), arrays, arrays[0])

    program = jax.jit(call)
    assert "xui8>" in program.lower(*arrays).as_text()
    expected = gradients(causal, arrays, arrays[0])
    close([g.astype(jnp.float32) for g in program(*arrays)], [g.astype(jnp.float32) for g in expected], 0.02)


def test_a_text_reads_back_as_its_request(x):
    q, k, v, _ = x
    call = call_of(
        AttentionCall,
        q=q,
        k=k,
        v=v,
        causal=True,
        kv_lengths=jnp.zeros(BATCH, jnp.int32),
        max_seqlen_kv=Expected(9),
        splits=flashgen.SplitEvery(256),
        score=("alibi", "score + t[kv]"),
        params={"slope": normal(HEADS), "t": normal(ROWS)},
    )
    request = request_of(call)
    read = decode(encode(request, {"q": "query"}))
    for name in ("operator", "options", "scalars"):
        assert getattr(read.request, name) == getattr(request, name), name
    assert read.names == ("q", "k", "v", "kv_lengths", "slope", "t")
    assert read.renamed == {"q": "query"}
    assert read.request.operator.positions.keys() >= {*read.names}


SHARDED = """
import functools, json, os, warnings
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np, flashgen
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
spec = P("data", None, "model")
random = np.random.default_rng(0)
arrays = [jnp.asarray(random.standard_normal((4, 16, 4, 16)), jnp.float32) for _ in range(4)]
sinks = jnp.asarray(random.standard_normal(4), jnp.float32)
*qkv, cotangent = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
causal = functools.partial(flashgen.attention, causal=True)

def call(q, k, v, sinks):
    return causal(q, k, v, sinks=sinks)

def loss(function):
    return lambda cotangent, *arrays: (function(*arrays) * cotangent).sum()

inside = jax.shard_map(call, mesh=mesh, in_specs=(spec, spec, spec, P("model")), out_specs=spec)
results = {}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    gradients = jax.jit(jax.grad(loss(inside), (1, 2, 3, 4)))
    text = gradients.lower(cotangent, *qkv, sinks).compile().as_text()
    result = gradients(cotangent, *qkv, sinks)
expected = jax.grad(loss(call), (1, 2, 3, 4))(arrays[3], *arrays[:3], sinks)
results["errors"] = [float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(result, expected)]
results["inside gathers"] = "all-gather" in text
results["sinks are summed"] = "all-reduce" in text
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bare = jax.jit(causal)
    text = bare.lower(*qkv).compile().as_text()
    results["bare error"] = float(abs(np.asarray(bare(*qkv)) - np.asarray(causal(*arrays[:3]))).max())
results["bare gathers"] = "all-gather" in text
results["warnings"] = [f"{x.category.__name__}: {x.message}" for x in caught]
print(json.dumps(results))
# The interpreter ends while programs run in other threads.
inside(*[jnp.concatenate([x] * 8, 1) for x in qkv], sinks)
"""


def run(code):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shard_map_over_batch_and_heads_gathers_nothing_and_a_bare_call_warns():
    results = json.loads(run(SHARDED))
    assert max(results["errors"]) < 3e-6
    assert not results["inside gathers"]
    assert results["sinks are summed"]
    assert results["bare gathers"]
    assert results["bare error"] == 0
    (warning,) = {*results["warnings"]}
    assert warning.startswith(
        "GatherWarning: flashgen.attention is in a program of 4 devices outside of jax.s"
    )


def test_a_cache_is_a_pytree_whichever_is_imported_first():
    for first, second in (("jax", "flashgen"), ("flashgen; flashgen.KVCache", "jax")):
        code = f"import {first}\nimport {second}, flashgen\ncache = flashgen.KVCache(1, 2, 3)"
        assert run(f"{code}\nprint(len(jax.tree.leaves(cache)))") == "3\n"


def test_no_warning_on_one_device(x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda q, k, v: causal(q, k, v) + 1).lower(*x[:3])
