"""What the GPU tests share: the criterion of correctness, and work that keeps a stream busy."""

import os

import numpy as np
import pytest

from flashgen.cpu.attention import attention as cpu
from flashgen.operators.attention import UNBOUNDED, normalise
from flashgen.runtime import device
from flashgen.runtime.arrays import view

# JAX would keep three quarters of the GPU's memory from the other libraries.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """A GPU is what these tests are for: asked for by name and without one, they fail."""
    if not device.available():
        pytest.fail(device.why_unavailable())


@pytest.fixture(scope="session")
def check():
    """``check(out, q, k, v, lse=None, **options)``: host arrays of one dtype, options of ``attention``.

    The largest error against float64 is at most twice that of the plain formula in the arrays' own dtype,
    plus 1e-5; for fp32 it is at most 1e-5 of the largest result.
    """
    return _check


def _check(out, q, k, v, lse=None, mask=None, **options):
    views = {} if mask is None else {"mask": view(mask, "mask")}
    problem = normalise(view(q, "q"), view(k, "k"), view(v, "v"), **views, **options)
    expected, expected_lse = cpu.attention(problem, q, k, v, mask, dtype=np.float64)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    error = np.abs(out.astype(np.float64) - expected).max(initial=0)
    if problem.dtype == "fp32":
        allowed = 1e-5 * np.abs(expected).max(initial=1)
    else:
        plain = _plain(problem, q, k, v, mask).astype(np.float64)
        allowed = 2 * np.abs(plain - expected).max(initial=0) + 1e-5
    assert error <= allowed  # a NaN compares false
    if lse is not None:
        assert lse.dtype == np.float32
        np.testing.assert_allclose(
            lse, expected_lse, rtol=1e-4, atol=1e-3 if problem.dtype != "fp32" else 1e-5
        )


def _plain(problem, q, k, v, mask):
    """softmax(q k^T * scale) v with every step rounded to the dtype of q."""
    dtype, group = q.dtype, problem.group_size
    q4, k4, v4 = (x.astype(np.float32) if problem.batched else x.astype(np.float32)[None] for x in (q, k, v))
    k4, v4 = np.repeat(k4, group, axis=2), np.repeat(v4, group, axis=2)
    scores = (np.einsum("bihd,bjhd->bhij", q4, k4) * problem.softmax_scale).astype(dtype).astype(np.float32)
    row = np.arange(problem.seqlen_q)[:, None] + problem.diagonal_offset
    key = np.arange(problem.seqlen_kv)
    hidden = np.zeros(scores.shape, bool) if mask is None else np.broadcast_to(mask != 0, scores.shape).copy()
    if problem.window_right < UNBOUNDED:
        hidden |= key > row + problem.window_right
    if problem.window_left < UNBOUNDED:
        hidden |= key < row - problem.window_left
    scores[hidden] = -np.inf
    highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(highest), 0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / np.where(total == 0, 1, total)).astype(dtype).astype(np.float32)
    out = np.einsum("bhij,bjhd->bihd", weights, v4).astype(dtype)
    return out if problem.batched else out[0]


@pytest.fixture(scope="session")
def busy():
    """``busy(stream)`` queues a kernel on a CuPy stream that runs for about a tenth of a second."""
    import cupy

    kernel = cupy.RawKernel(
        r"""
        extern "C" __global__ void spin(long long cycles) {
          const long long start = clock64();
          while (clock64() - start < cycles) {}
        }
        """,
        "spin",
    )

    def queue(stream):
        with stream:
            kernel((1,), (1,), (np.int64(200_000_000),))

    queue(cupy.cuda.Stream())
    cupy.cuda.Device().synchronize()
    return queue
