"""A call of three kernels on a GPU: in order, with one workspace, captured and replayed."""

import numpy as np
import pytest

cp = pytest.importorskip("cupy")

from family_of_steps import MAIN, plan_of  # noqa: E402
from flashgen.runtime import kernel  # noqa: E402
from flashgen.runtime.device import device  # noqa: E402
from flashgen.runtime.launch import Runner  # noqa: E402

SHAPE = (3, 1000, 5, 64)


@pytest.fixture
def plan():
    gpu = device(0)
    if gpu.arch != "sm_90":
        pytest.skip("the family is for sm_90a")
    q = cp.zeros(SHAPE, cp.float32)
    kernels = [kernel.load(variant, gpu) for variant in MAIN.steps]
    return plan_of((q, q, q), lambda planned: Runner(planned, gpu, kernels), gpu)


def random():
    return cp.asarray(np.random.default_rng().standard_normal(SHAPE, np.float32))


def expected(q, scale=64**-0.5):
    sums = cp.asnumpy(q).sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.broadcast_to(2 * scale * sums, SHAPE)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_with_memory_of_the_librarys_own(plan, scale):
    q, options = random(), {} if scale is None else {"softmax_scale": scale}
    for _ in range(3):
        out = plan(q, q, q, **options)
        wanted = expected(q, **({} if scale is None else {"scale": scale}))
        np.testing.assert_allclose(cp.asnumpy(out), wanted, rtol=1e-4, atol=1e-4)


def test_in_a_graph_with_memory_of_the_callers(plan):
    q, out = random(), cp.full(SHAPE, cp.nan, cp.float32)
    workspace = cp.full(plan.workspace_bytes, 0xFF, cp.uint8)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        plan(q, q, q, out=out, workspace=workspace)
        stream.synchronize()
        stream.begin_capture()
        plan(q, q, q, out=out, workspace=workspace)
        graph = stream.end_capture()
        for _ in range(3):
            q[...] = random()
            out.fill(cp.nan)
            workspace.fill(0xFF)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_allclose(cp.asnumpy(out), expected(q), rtol=1e-4, atol=1e-4)
