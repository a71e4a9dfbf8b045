"""What the GPU tests share: the criterion of correctness, and work that keeps a stream busy."""

import os
import sys

import numpy as np
import pytest

from flashgen.host.paths import specs_dir
from flashgen.operators.attention import normalise
from flashgen.operators.reference import judge
from flashgen.runtime import device
from flashgen.runtime.arrays import view
from named import by_name

# JAX would keep three quarters of the GPU's memory from the other libraries.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# What a worker may keep allocated from test to test: 16 of them share a GPU of 80 GB.
KEPT_BYTES = 1 << 30


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """A GPU is what these tests are for: asked for by name and without one, they fail."""
    if not device.available():
        pytest.fail(device.why_unavailable())


@pytest.fixture(autouse=True)
def memory_goes_back():
    """What CuPy and PyTorch keep of a large test's memory is given back to the other workers."""
    yield
    import cupy

    pool, torch = cupy.get_default_memory_pool(), sys.modules.get("torch")
    if pool.free_bytes() > KEPT_BYTES:
        pool.free_all_blocks()
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def check():
    """``check(out, q, k, v, lse=None, **options)``: host arrays of one dtype, options of ``attention``.

    AssertionError unless every element is within its bound of float64; see ``flashgen.operators.reference``.
    """
    return _check


def _check(out, q, k, v, lse=None, mask=None, **options):
    views = {} if mask is None else {"mask": view(mask, "mask")}
    problem = normalise(view(q, "q"), view(k, "k"), view(v, "v"), **views, **options)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert lse is None or lse.dtype == np.float32
    verdict = judge(problem, by_name(problem, q, k, v, mask, out, lse))
    assert verdict.ok, verdict


@pytest.fixture(scope="session")
def folder_of_mma(tmp_path_factory):
    """A folder of specs with which no call takes the kernels for Hopper of latent caches."""
    folder = tmp_path_factory.mktemp("specs")
    for path in specs_dir().glob("flash_mla*_sm90.yaml"):
        text = path.read_text().replace("prefer: least_time", "prefer: on_request")
        (folder / path.name).write_text(text)
    return folder


@pytest.fixture
def latent_family(request, folder_of_mma, monkeypatch, forget_plans):
    """The family of kernels that calls with latent caches take in a test, "sm90" or "sm80". Kept plans know
    nothing of FLASHGEN_SPECS, so none is kept from test to test.
    """
    if request.param == "sm80":
        monkeypatch.setenv("FLASHGEN_SPECS", str(folder_of_mma))
    return request.param


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
