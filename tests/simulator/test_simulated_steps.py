"""Plans of several steps in the simulator: what one step wrote another may read, and nothing else."""

import numpy as np
import pytest

import family_of_steps
from family_of_steps import plan_of
from flashgen.errors import SimulationError
from flashgen.simulator import hardware
from flashgen.simulator.backend import Runner

SHAPE = (2, 70, 3, 64)


@pytest.fixture
def plan(compiler):
    q = np.zeros(SHAPE, np.float32)
    return plan_of((q, q, q), Runner, hardware.pretend("sm_90"))


def test_steps_hand_on_what_they_wrote(plan, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q = rng.standard_normal(SHAPE, np.float32)
    for options in ({}, {"softmax_scale": 0.75}, {"out": np.full(SHAPE, np.nan, np.float32)}):
        scale = options.get("softmax_scale", 64**-0.5)
        expected = 2 * scale * q.sum(axis=-1, keepdims=True, dtype=np.float64)
        out = plan(q, q, q, **options)
        np.testing.assert_allclose(out, np.broadcast_to(expected, SHAPE), rtol=1e-4, atol=1e-5)


def test_a_workspace_of_the_caller_is_used(plan):
    memory = np.full(plan.workspace_bytes + 256, 0xFF, np.uint8)
    start = -memory.ctypes.data % 256
    given = memory[start : start + plan.workspace_bytes]
    q = np.ones(SHAPE, np.float32)
    out = plan(q, q, q, workspace=given)
    np.testing.assert_allclose(out, 2 * 64 * 64**-0.5, rtol=1e-5)
    sums = given[256:].view(np.float32).reshape(2, 3, 128)
    np.testing.assert_allclose(sums[..., :70], 64 * 64**-0.5, rtol=1e-5)


def test_a_step_that_reads_what_no_step_wrote_is_found(plan, monkeypatch):
    """Left out of the call, the first step leaves its slice as it was."""
    runner = plan._runner
    runner._planned = runner._planned._replace(steps=runner._planned.steps[1:])
    runner._libraries = runner._libraries[1:]
    with pytest.raises(SimulationError, match="sums") as caught:
        plan(*(np.ones(SHAPE, np.float32) for _ in "qkv"))
    assert caught.value.check == "uninitialised global memory"
    assert caught.value.kernel == family_of_steps.MAIN.name
