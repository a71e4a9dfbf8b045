"""The front door on a GPU: kinds of arrays, streams, graphs, threads and devices."""

import gc
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen import errors

cupy = pytest.importorskip("cupy")

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
SHAPE, KV = (2, 300, 8, 64), (2, 500, 4, 64)


def on_host(*shapes, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def on_gpu(*shapes, dtype=np.float16, seed=0):
    return [cupy.asarray(x) for x in on_host(*shapes, dtype=dtype, seed=seed)]


def poison(like, shape=None, dtype=None):
    out = cupy.empty(shape or like.shape, dtype or like.dtype)
    out.view(np.uint8)[...] = 0xFF
    return out


def to_torch(x):
    torch = pytest.importorskip("torch")
    bf16 = x.dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(x.view(np.uint16) if bf16 else x).cuda()
    return tensor.view(torch.bfloat16) if bf16 else tensor


def from_torch(tensor):
    torch = pytest.importorskip("torch")
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


@pytest.fixture
def jax():
    module = pytest.importorskip("jax")
    if module.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    return module


@pytest.mark.parametrize("dtype", DTYPES)
class TestKinds:
    def test_cupy(self, dtype, check):
        host = on_host(SHAPE, KV, KV, dtype=DTYPES[dtype])
        q, k, v = map(cupy.asarray, host)
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        assert isinstance(out, cupy.ndarray)
        assert out.flags.c_contiguous
        check(out.get(), *host, lse=lse.get(), causal=True)

    def test_torch(self, dtype, check):
        torch = pytest.importorskip("torch")
        host = on_host(SHAPE, KV, KV, dtype=DTYPES[dtype])
        q, k, v = map(to_torch, host)
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        assert (type(out), out.dtype, out.device, lse.dtype) == (
            torch.Tensor,
            q.dtype,
            q.device,
            torch.float32,
        )
        check(from_torch(out), *host, lse=lse.cpu().numpy(), causal=True)

    def test_jax(self, dtype, check, jax):
        host = on_host(SHAPE, KV, KV, dtype=DTYPES[dtype])
        q, k, v = map(jax.numpy.asarray, host)
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        assert isinstance(out, jax.Array)
        assert (out.dtype, out.device) == (q.dtype, q.device)
        check(np.asarray(out), *host, lse=np.asarray(lse), causal=True)

    def test_a_library_with_dlpack_alone(self, dtype, check):
        host = on_host(SHAPE, KV, KV, dtype=DTYPES[dtype])
        if dtype == "bf16":
            pytest.skip("CuPy's own export has no bfloat16")

        def wrapped(x):
            return SimpleNamespace(
                __dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__, dtype=x.dtype, shape=x.shape
            )

        out = flashgen.attention(*(wrapped(cupy.asarray(x)) for x in host))
        assert isinstance(out, cupy.ndarray)
        check(out.get(), *host)

    def test_a_library_with_the_cuda_array_interface_alone(self, dtype, check):
        host = on_host(SHAPE, KV, KV, dtype=DTYPES[dtype])
        if dtype == "bf16":
            pytest.skip("the interface has no bfloat16")
        kept = [cupy.asarray(x) for x in host]
        wrapped = [SimpleNamespace(__cuda_array_interface__=x.__cuda_array_interface__) for x in kept]
        check(flashgen.attention(*wrapped).get(), *host)


def test_masks_without_batch_and_into_out(check):
    host = on_host((300, 8, 64), (500, 4, 64), (500, 4, 64))
    mask = np.random.default_rng(1).random((8, 1, 500)) < 0.5
    q, k, v = map(cupy.asarray, host)
    out = poison(q)
    got, lse = flashgen.attention(q, k, v, mask=cupy.asarray(mask), out=out, return_lse=True)
    assert got is out
    assert lse.shape == (8, 300)
    check(out.get(), *host, lse=lse.get(), mask=mask)


def test_empty_arrays():
    for shape, kv in (((0, 5, 2, 64),) * 2, ((2, 0, 2, 64), (2, 5, 2, 64)), ((2, 5, 2, 64), (2, 0, 2, 64))):
        q, k = cupy.ones(shape, np.float16), cupy.ones(kv, np.float16)
        out, lse = flashgen.attention(q, k, k, out=poison(q), causal=True, return_lse=True)
        assert out.shape == shape
        assert not out.get().any()
        assert np.all(np.isneginf(lse.get()))


def test_an_error_touches_no_output():
    q, k, v = on_gpu(SHAPE, KV, KV)
    out = cupy.full_like(q, 7)
    host_mask = np.zeros((300, 500), bool)
    for error, wrong in (
        (errors.BadTensorDtype, {"k": k.astype(np.float32)}),
        (errors.BadTensorStrides, {"q": cupy.zeros(q.size + 1, q.dtype)[1:].reshape(q.shape)}),
        (errors.BadTensorStrides, {"q": cupy.zeros((2, 8, 64, 300), q.dtype).transpose(0, 3, 1, 2)}),
        (errors.DeviceTypeNotSupported, {"mask": host_mask}),
        (errors.DeviceTypeNotSupported, {"v": v.get()}),
        (errors.BadParam, {"softmax_scale": float("nan")}),
        (errors.BadParam, {"stream": "fast"}),
    ):
        with pytest.raises(error):
            flashgen.attention(**({"q": q, "k": k, "v": v, "out": out} | wrong))
    with pytest.raises(errors.BadTensorStrides, match="overlaps"):
        flashgen.attention(out, k, v, out=out)
    assert bool((out == 7).all())


def test_a_pending_negation_of_torch_is_refused():
    torch = pytest.importorskip("torch")
    q, k, v = map(to_torch, on_host(SHAPE, KV, KV))
    flashgen.attention(q, k, v)  # a plan for such layouts is there
    with pytest.raises(errors.BadParam, match="resolve_neg"):
        flashgen.attention(torch._neg_view(q), k, v)


def test_after_a_warmup_the_first_call_compiles_and_loads_nothing(check, monkeypatch):
    host = on_host((1, 77, 6, 72), (1, 99, 3, 72), (1, 99, 3, 72))
    call = {"q": host[0].shape, "k": host[1].shape, "causal": True}
    (name,) = flashgen.warmup([call])
    q, k, v = map(cupy.asarray, host)
    monkeypatch.setattr("flashgen.runtime.kernel._load", None)
    assert flashgen.plan(q, k, v, causal=True).variant.name == name == flashgen.explain(**call).variant.name
    check(flashgen.attention(q, k, v, causal=True).get(), *host, causal=True)


def test_libraries_are_not_mixed():
    q, k, v = on_gpu(SHAPE, KV, KV)
    with pytest.raises(errors.BadParam, match="torch"):
        flashgen.attention(q, to_torch(k.get()), v)


def test_a_plan(check):
    host = on_host(SHAPE, KV, KV)
    q, k, v = map(cupy.asarray, host)
    plan = flashgen.plan(q, k, v, causal=True, return_lse=True)
    assert plan.variant.name in plan.source
    assert plan.workspace_bytes == 0
    for seed in (1, 2):
        host = on_host(SHAPE, KV, KV, seed=seed)
        q, k, v = map(cupy.asarray, host)
        out, lse = poison(q), poison(q, (2, 8, 300), np.float32)
        plan(q, k, v, out=out, lse=lse)
        check(out.get(), *host, lse=lse.get(), causal=True)


class TestStreams:
    """Inputs arrive late on a stream that waits for no other: another stream's kernel would read NaNs."""

    def late(self, busy, stream):
        host = on_host(SHAPE, KV, KV, seed=3)
        target = [poison(cupy.asarray(x)) for x in host]
        # Kept until the copies ran: CuPy gives freed memory at once to the next array of the stream that it
        # was allocated on, here the null stream, and what that writes would overtake the copies.
        self.source = [cupy.asarray(x) for x in host]
        cupy.cuda.Device().synchronize()
        busy(stream)
        with stream:
            for x, y in zip(target, self.source, strict=True):
                x[...] = y
        return host, target

    @pytest.fixture
    def stream(self):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:  # so that nothing is compiled, and no memory asked of CUDA, while the stream is busy
            flashgen.attention(*on_gpu(SHAPE, KV, KV))
        stream.synchronize()
        return stream

    def test_the_current_stream_of_cupy(self, busy, stream, check):
        host, (q, k, v) = self.late(busy, stream)
        with stream:
            out = flashgen.attention(q, k, v)
        assert not stream.done, "the call waited for the GPU"
        stream.synchronize()
        check(out.get(), *host)

    @pytest.mark.parametrize("form", ["cupy", "handle", "torch"])
    def test_a_stream_of_any_form(self, form, busy, stream, check):
        host, (q, k, v) = self.late(busy, stream)
        given = {"cupy": stream, "handle": stream.ptr}.get(form)
        if given is None:
            given = pytest.importorskip("torch").cuda.ExternalStream(stream.ptr)
        out = flashgen.attention(q, k, v, stream=given)
        assert not stream.done, "the call waited for the GPU"
        stream.synchronize()
        check(out.get(), *host)

    def test_a_plan_on_a_stream(self, busy, stream, check):
        out = poison(on_gpu(SHAPE, KV, KV)[0])  # ahead of the busy stream: it may compile
        host, (q, k, v) = self.late(busy, stream)
        flashgen.plan(q, k, v)(q, k, v, out=out, stream=stream)
        assert not stream.done, "the call waited for the GPU"
        stream.synchronize()
        check(out.get(), *host)

    @pytest.mark.parametrize("explicit", [True, False])
    def test_the_streams_of_torch(self, explicit, busy, check):
        torch = pytest.importorskip("torch")
        host = on_host(SHAPE, KV, KV, seed=4)
        source = [to_torch(x) for x in host]
        stream = torch.cuda.Stream()
        flashgen.attention(*source, stream=stream)
        q, k, v = (torch.full_like(x, torch.nan) for x in source)
        torch.cuda.synchronize()
        handle = SimpleNamespace(__cuda_stream__=lambda: (0, stream.cuda_stream))
        busy(cupy.cuda.Stream.from_external(handle))
        with torch.cuda.stream(stream):
            for x, y in zip((q, k, v), source, strict=True):
                x.copy_(y)
            if not explicit:
                out = flashgen.attention(q, k, v)
        if explicit:
            out = flashgen.attention(q, k, v, stream=stream)
        assert not stream.query(), "the call waited for the GPU"
        stream.synchronize()
        check(from_torch(out), *host)

    def test_memory_of_a_result_is_reused_on_its_own_stream_only(self, stream):
        torch = pytest.importorskip("torch")
        q, k, v = on_gpu(SHAPE, KV, KV)
        on_torch = [to_torch(x.get()) for x in (q, k, v)]
        flashgen.attention(*on_torch)
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
        pointer = flashgen.attention(q, k, v, stream=stream).data.ptr
        assert cupy.empty_like(q).data.ptr != pointer
        pointer = flashgen.attention(*on_torch, stream=stream).data_ptr()
        assert torch.empty_like(on_torch[0]).data_ptr() != pointer


def test_jax_waits_on_both_sides(jax, check):
    host = on_host((4, 1024, 8, 64), (4, 1024, 8, 64), (4, 1024, 8, 64), dtype=np.float32, seed=5)
    slow = jax.jit(lambda x, m: jax.lax.fori_loop(0, 200, lambda i, m: m @ m / 2048, m)[0, 0] * 0 + x)
    ones = jax.numpy.ones((2048, 2048))
    expected = None
    for _ in range(5):
        q, k, v = (slow(jax.numpy.asarray(x), ones) for x in host)
        out = flashgen.attention(q, k, v)
        after = jax.numpy.flip(out * 2, axis=1)
        del q, k, v, out
        gc.collect()
        junk = [jax.numpy.full((4, 1024, 8, 64), jax.numpy.nan) for _ in range(4)]
        result = np.flip(np.asarray(after) / 2, axis=1)
        check(result, *host)
        assert expected is None or np.array_equal(result, expected)
        expected = result
        del junk


class TestGraphs:
    def test_cupy(self, check):
        q, k, v = on_gpu(SHAPE, KV, KV)
        plan = flashgen.plan(q, k, v, causal=True)
        flashgen.attention(q, k, v, out=cupy.empty_like(q))
        by_plan, by_call = poison(q), poison(q)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            plan(q, k, v, out=by_plan)
            flashgen.attention(q, k, v, out=by_call)
            graph = stream.end_capture()
        cupy.cuda.Device().synchronize()
        assert bool(cupy.isnan(by_plan).all()), "capturing must not run anything"
        for seed in (7, 8):
            host = on_host(SHAPE, KV, KV, seed=seed)
            for x, y in zip((q, k, v), host, strict=True):
                x.set(y)
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            check(by_plan.get(), *host, causal=True)
            check(by_call.get(), *host)

    def test_torch(self, check):
        torch = pytest.importorskip("torch")
        q, k, v = (to_torch(x) for x in on_host(SHAPE, KV, KV))
        flashgen.attention(q, k, v, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flashgen.attention(q, k, v, causal=True)
        for seed in (7, 8):
            host = on_host(SHAPE, KV, KV, seed=seed)
            for x, y in zip((q, k, v), host, strict=True):
                x.copy_(to_torch(y))
            graph.replay()
            torch.cuda.synchronize()
            check(from_torch(out), *host, causal=True)


class TestThreads:
    def run(self, count, work):
        failures = []

        def guarded(n):
            try:
                work(n)
            except BaseException as error:  # noqa: BLE001 a thread must hand its failure to the test
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def test_many_calls_of_one_plan_on_many_streams(self):
        q, k, v = on_gpu(SHAPE, KV, KV)
        plan = flashgen.plan(q, k, v)
        inputs = [on_gpu(SHAPE, KV, KV, seed=seed) for seed in range(8)]
        expected = [plan(*arrays).get() for arrays in inputs]
        outs = [poison(q) for _ in range(8)]
        cupy.cuda.Device().synchronize()

        def work(n):
            stream = cupy.cuda.Stream(non_blocking=True)
            for _ in range(50):
                plan(*inputs[n], out=outs[n], stream=stream)
            stream.synchronize()

        self.run(8, work)
        for out, right in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(out.get(), right)

    def test_first_calls_of_several_variants_at_once(self, check):
        options = [{"window_size": (n // 2 * 10 + 5, 3)} for n in range(8)]
        host = [
            on_host((1, 90, 2, 96), (1, 90, 2, 96), (1, 90, 2, 96), dtype=d, seed=9)
            for d in (np.float16, np.float32)
        ]
        results = {}

        def work(n):
            results[n] = flashgen.attention(*map(cupy.asarray, host[n % 2]), **options[n]).get()

        self.run(8, work)
        for n in range(8):
            check(results[n], *host[n % 2], **options[n])

    def test_a_thread_that_has_not_used_cuda_yet(self, check):
        host = on_host(SHAPE, KV, KV)
        q, k, v = map(cupy.asarray, host)
        out = poison(q)
        plan = flashgen.plan(q, k, v)
        cupy.cuda.Device().synchronize()
        self.run(1, lambda n: plan(q, k, v, out=out, stream=0))
        cupy.cuda.Device().synchronize()
        check(out.get(), *host)


class TestDevices:
    @pytest.fixture(autouse=True)
    def two(self):
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("needs two GPUs")

    def test_arrays_decide_not_the_current_device(self, check):
        host = on_host(SHAPE, KV, KV)
        with cupy.cuda.Device(1):
            q, k, v = map(cupy.asarray, host)
        plan = flashgen.plan(q, k, v)
        for call in (flashgen.attention, plan):
            out = call(q, k, v)
            assert out.device.id == 1
            assert cupy.cuda.runtime.getDevice() == 0
            with cupy.cuda.Device(1):
                check(out.get(), *host)

    def test_one_shape_on_each_device(self, check):
        host = on_host(SHAPE, KV, KV)
        results = []
        for ordinal in (0, 1, 0, 1):
            with cupy.cuda.Device(ordinal):
                results.append(flashgen.attention(*map(cupy.asarray, host)).get())
        for result in results:
            np.testing.assert_array_equal(result, results[0])
        check(results[0], *host)

    def test_torch_on_the_second_device(self, check):
        host = on_host(SHAPE, KV, KV)
        q, k, v = (to_torch(x).to("cuda:1") for x in host)
        out = flashgen.attention(q, k, v)
        assert out.device == q.device
        check(from_torch(out), *host)

    def test_arrays_on_two_devices(self):
        q, k, v = on_gpu(SHAPE, KV, KV)
        with cupy.cuda.Device(1):
            k = k.copy()
        with pytest.raises(errors.DeviceTypeNotSupported, match="k is on GPU 1 but q is on GPU 0"):
            flashgen.attention(q, k, v)
