"""Calls inside programs of JAX on a GPU: results, gradients, CUDA graphs, donated caches, host time."""

import functools
import time

import numpy as np
import pytest

import flashgen

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from flashgen.call.xla import primitive, structs  # noqa: E402

causal = functools.partial(flashgen.attention, causal=True)


@pytest.fixture(scope="module", autouse=True)
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")


def arrays(count, *shape, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(7), count)
    return [jax.random.normal(key, shape, dtype) for key in keys]


def close(result, expected, tolerance):
    def compare(a, b):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0, atol=tolerance)

    jax.tree.map(compare, result, expected)


def test_the_structs_are_of_a_version_that_is_served():
    assert structs.shipped_version(jax.ffi.include_dir()) in structs.SUPPORTED
    assert primitive.WITH_FFI


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("width", [64, 128])
def test_a_jitted_call_has_the_bits_of_a_plain_one(dtype, width):
    q, k, v = arrays(3, 2, 300, 4, width, dtype=dtype)
    call = functools.partial(causal, return_lse=True)
    result, expected = jax.jit(call)(q, k, v), call(q, k, v)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_are_those_of_attention_backward(dtype):
    q, k, v, dout = arrays(4, 2, 300, 4, 64, dtype=dtype)
    options = {"causal": True, "deterministic": True}
    _, vjp = jax.vjp(jax.jit(functools.partial(flashgen.attention, **options)), q, k, v)
    out, lse = causal(q, k, v, return_lse=True)
    expected = flashgen.attention_backward(dout, q, k, v, out, lse, **options)
    for a, b in zip(vjp(dout), expected, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_gradients_beside_those_of_jax():
    q, k, v, dout = arrays(4, 2, 256, 4, 64, dtype=jnp.float32)

    def by_jax(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def gradients(attend):
        return jax.jit(jax.grad(lambda *x: (attend(*x) * dout).sum(), (0, 1, 2)))(q, k, v)

    with jax.default_matmul_precision("highest"):
        close(gradients(causal), gradients(by_jax), 1e-4)


def test_vmap_remat_and_scan_over_layers():
    q, k, v = arrays(3, 2, 256, 4, 64, dtype=jnp.float16)

    def layers(attend):
        return lambda q: jax.lax.scan(lambda c, _: (jax.checkpoint(attend)(c, k, v), None), q, length=4)[0]

    def apart(q, k, v):
        return jnp.stack([causal(*x) for x in zip(q, k, v, strict=True)])

    for attend in (causal, jax.vmap(causal), apart):
        result = jax.jit(jax.grad(lambda q, attend=attend: layers(attend)(q).astype(jnp.float32).sum()))(q)
        close(result, jax.grad(lambda q: layers(causal)(q).astype(jnp.float32).sum())(q), 2e-2)


def test_split_keys_take_a_workspace():
    (q,), (k, v) = arrays(1, 1, 1, 8, 128), arrays(2, 1, 32768, 8, 128)
    call = functools.partial(flashgen.attention, splits=16)
    assert "xui8>" in jax.jit(call).lower(q, k, v).as_text()
    np.testing.assert_array_equal(np.float32(jax.jit(call)(q, k, v)), np.float32(call(q, k, v)))


def test_decoding_in_a_donated_cache():
    k, v = arrays(2, 4, 512, 4, 128)
    lengths = jnp.asarray([0, 3, 100, 511], jnp.int32)
    token = arrays(3, 4, 1, 4, 128)

    def host(x):
        return np.array(x)

    step = jax.jit(lambda cache, q, k, v: causal(q, cache, append=(k, v)), donate_argnums=0)
    expected = jax.jit(lambda cache, q, k, v: causal(q, cache, append=(k, v)))(
        flashgen.KVCache(k, v, lengths), *token
    )
    before = host(jnp.float32(k))
    cache = flashgen.KVCache(k, v, lengths)
    address = k.unsafe_buffer_pointer()
    out, result = step(cache, *token)
    np.testing.assert_array_equal(np.float32(out), np.float32(expected[0]))
    assert result.k.unsafe_buffer_pointer() == address
    assert (host(jnp.float32(result.k))[2, 100] == host(jnp.float32(token[1]))[2, 0]).all()
    assert (host(jnp.float32(result.k))[2, :100] == before[2, :100]).all()


def test_packed_sequences_with_gradients():
    q, k, v = arrays(3, 700, 4, 64)
    bounds = jnp.asarray([0, 300, 301, 700], jnp.int32)
    packed = functools.partial(
        causal, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=399, max_seqlen_kv=399
    )

    def apart(q, k, v):
        cuts = [slice(0, 300), slice(300, 301), slice(301, 700)]
        return jnp.concatenate([causal(q[c], k[c], v[c]) for c in cuts])

    def gradients(attend):
        return jax.jit(jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2)))(q, k, v)

    close(gradients(packed), gradients(apart), 0.1)


def test_a_loop_of_calls_is_in_a_command_buffer():
    """XLA records launches in CUDA graphs where a program has a few of them in a row."""
    q, k, v = arrays(3, 2, 256, 4, 64)

    def many(q):
        for _ in range(8):
            q = causal(q, k, v)
        return q

    program = jax.jit(many)
    text = program.lower(q).compile().as_text()
    assert "flashgen" in text
    expected = functools.reduce(lambda q, _: causal(q, k, v), range(8), q)
    for _ in range(4):  # the second execution records, later ones replay
        np.testing.assert_array_equal(np.float32(program(q)), np.float32(expected))
    options = {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUSTOM_CALL",
        "xla_gpu_graph_min_graph_size": 1,
    }
    recorded = jax.jit(many, compiler_options=options)
    assert "command_buffer" in recorded.lower(q).compile().as_text()
    for _ in range(4):
        np.testing.assert_array_equal(np.float32(recorded(q)), np.float32(expected))


def test_the_host_time_of_a_call_in_a_program():
    """A call adds at most 60 us, measured by programs of one and of many calls on little work."""
    q, k, v = arrays(3, 1, 1, 1, 64)

    def seconds(count):
        def many(q):
            for _ in range(count):
                q = causal(q, k, v)
            return q

        program = jax.jit(many, compiler_options={"xla_gpu_enable_command_buffer": ""})
        program(q).block_until_ready()
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            program(q).block_until_ready()
            times.append(time.perf_counter() - begin)
        return min(times)  # others may use the processors

    per_call = (seconds(65) - seconds(1)) / 64
    print(f"{1e6 * per_call:.1f} us a call")
    assert per_call < 60e-6


def test_an_error_of_lengths_is_raised_by_jax(monkeypatch):
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    q, k, v = arrays(3, 2, 256, 4, 64)
    lengths = jnp.asarray([3, 999], jnp.int32)
    options = {"compiler_options": {"xla_gpu_enable_command_buffer": ""}}
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"flashgen: BadParam: kv_lengths\[1\] is 999"):
        jax.jit(lambda n: causal(q, k, v, kv_lengths=n), **options)(lengths).block_until_ready()


def test_shard_map_over_two_gpus():
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    q, k, v = arrays(3, 4, 256, 4, 64)
    inside = jax.jit(jax.shard_map(causal, mesh=mesh, in_specs=spec, out_specs=spec))
    shards = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in (q, k, v)]
    assert "all-gather" not in inside.lower(*shards).compile().as_text()
    np.testing.assert_array_equal(np.float32(inside(*shards)), np.float32(causal(q, k, v)))
