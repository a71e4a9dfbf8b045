"""Calls inside programs of JAX on a GPU: results, gradients, CUDA graphs, donated caches, host time, and the
example that trains.
"""

import functools
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

import flashgen

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from flashgen.call.xla import execution, primitive, structs  # noqa: E402

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


# Records custom calls, and nothing else, however few there are in a row.
RECORDED = {"xla_gpu_enable_command_buffer": "CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}


def thunks(program, *arrays, folder, **options):
    """What XLA runs for a program, as it dumps it: before it makes command buffers, and after. The HLO of a
    program does not show command buffers: XLA makes them of thunks.
    """
    options |= {"xla_dump_to": str(folder)}
    jax.jit(program, compiler_options=options).lower(*arrays).compile()
    (before,) = folder.glob("*.thunk_sequence.txt")
    after = [*folder.glob("*.thunk_sequence_after_thunk_passes*.txt"), before]  # written where it differs
    return before.read_text(), after[0].read_text()


@pytest.mark.parametrize("count", [1, 8])
def test_calls_are_in_a_command_buffer(count, tmp_path):
    q, k, v = arrays(3, 2, 256, 4, 64)

    def many(q, k, v):
        for _ in range(count):
            q = causal(q, k, v)
        return q

    before, after = thunks(many, q, k, v, folder=tmp_path, **RECORDED)
    assert "kCustomCall" in before, before
    assert "kCommandBuffer" not in before, before
    outermost = [line for line in after.splitlines() if line and not line[0].isspace()]
    assert "kCommandBuffer" in outermost[0], after
    assert not any("kCustomCall" in line for line in outermost[1:]), after
    # XLA's own options record operations where five or more are in a row.
    (default := tmp_path / "default").mkdir()
    _, after = thunks(many, q, k, v, folder=default)
    assert ("kCommandBuffer" in after) == (count >= 5), after


def replayed(program, *inputs, calls, times=40):
    """The results of executions, and how often the handler ran in each; ``calls`` counts them. Results are
    dropped at once, so that XLA soon gives the next ones memory that it has seen.
    """
    results, runs = [], []
    for _ in range(times):
        before = calls[0]
        results.append(jax.tree.map(np.float32, program(*inputs)))
        runs.append(calls[0] - before)
    return results, runs


@pytest.fixture
def calls(monkeypatch):
    """How often XLA has called the handler to execute."""
    count = [0]
    run = execution.Execution.run

    def counted(*args, **options):
        count[0] += 1
        return run(*args, **options)

    monkeypatch.setattr(execution.Execution, "run", counted)
    return count


@pytest.mark.parametrize("what", ["forward", "gradients", "packed", "split keys"])
def test_replays_run_no_python_and_have_the_bits_of_plain_calls(what, calls):
    q, k, v = arrays(3, 2, 300, 4, 64)
    if what == "packed":
        bounds = jnp.asarray([0, 250, 251, 600], jnp.int32)
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": 349, "max_seqlen_kv": 349}
        q, k, v = (x.reshape(600, 4, 64) for x in (q, k, v))
        attend = functools.partial(causal, **lengths)
    elif what == "split keys":
        (q,), (k, v) = arrays(1, 1, 1, 8, 64), arrays(2, 1, 8192, 8, 64)
        attend = functools.partial(flashgen.attention, splits=8)
    else:
        attend = functools.partial(causal, deterministic=True)

    def program(q, k, v):
        if what != "gradients":
            return attend(q, k, v)
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    plain = jax.jit(program, compiler_options={"xla_gpu_enable_command_buffer": ""})
    recorded = jax.jit(program, compiler_options=RECORDED)
    for seed in range(2):  # other elements at other addresses: XLA records anew
        inputs = [x + seed for x in (q, k, v)]
        expected, every = replayed(plain, *inputs, calls=calls, times=3)
        results, runs = replayed(recorded, *inputs, calls=calls)
        assert min(every) > 0, every
        assert runs.count(0) > len(runs) // 2, runs
        for result in results:
            jax.tree.map(np.testing.assert_array_equal, result, expected[0])


def test_a_replay_reads_the_elements_of_its_time(calls):
    """A donated buffer is updated in place, so a replay at the same addresses has other elements."""
    q, k, v = arrays(3, 2, 256, 4, 64)

    def step(q, k, v):
        return causal(q, k, v) + q

    recorded = jax.jit(step, donate_argnums=0, compiler_options=RECORDED)
    plain = jax.jit(step, compiler_options={"xla_gpu_enable_command_buffer": ""})
    expected, result, runs = q, q + 0, []
    for _ in range(12):
        expected, before = plain(expected, k, v).block_until_ready(), calls[0]
        result = recorded(result, k, v).block_until_ready()
        runs.append(calls[0] - before)
        np.testing.assert_array_equal(np.float32(result), np.float32(expected))
    assert 0 in runs, runs


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


def test_the_example_learns_alike_with_flashgen_and_with_jax():
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt_jax.py"))
    size = example["Size"](layers=2, width=256, heads=4, kv_heads=2, context=256, batch=8)
    curves = {name: example["train"](size, name, steps=30)[0] for name in example["ATTENTIONS"]}
    for curve in curves.values():  # rounding differs, and training makes a difference grow
        assert curve[:5] == pytest.approx(curves["jax"][:5], abs=5e-3)
        assert curve == pytest.approx(curves["jax"], abs=0.05)
        assert curve[-1] < curve[0] - 0.5


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
