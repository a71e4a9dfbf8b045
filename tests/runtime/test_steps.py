"""Plans of several steps, up to the launches, on a GPU that only keeps what it is asked to launch."""

import numpy as np
import pytest

from fake_gpu import H200, array
from family_of_steps import MAIN, plan_of
from flashgen import errors
from flashgen.runtime.launch import Runner

SHAPE = (2, 100, 3, 64)
Q, OUT, WORKSPACE = ((1 << 40) + place * (1 << 24) for place in range(3))


@pytest.fixture
def plan(fake_gpu):
    kernels = [fake_gpu.load(variant, H200) for variant in MAIN.steps]
    q = array(SHAPE, np.float32, Q)
    return plan_of((q, q, q), lambda planned: Runner(planned, H200, kernels), H200)


def memory(size, address=WORKSPACE, dtype=np.uint8):
    return array((size,), dtype, address)


def test_steps_run_in_order_on_the_stream_of_the_call_with_slices_of_one_workspace(plan, fake_gpu):
    q, out = array(SHAPE, np.float32, Q), array(SHAPE, np.float32, OUT)
    assert plan(q, q, q, out=out, workspace=memory(plan.workspace_bytes), stream=7, softmax_scale=3.0) is out
    assert [fake_gpu.variants[launch[0]] for launch in fake_gpu.launches] == list(MAIN.steps)
    assert {launch[2] for launch in fake_gpu.launches} == {7}
    first, second, third = (fake_gpu.members(index) for index in range(3))
    assert (int(first["q"]), int(first["sums"]), first["softmax_scale"]) == (Q, WORKSPACE + 256, 3.0)
    assert (int(second["sums"]), int(second["out"]), int(third["out"])) == (WORKSPACE + 256, OUT, OUT)


def test_a_plan_shows_its_steps_and_what_memory_they_need(plan):
    assert [step.variant.step for step in plan.steps] == ["sum", "fill", "double"]
    assert plan.variant is MAIN
    assert plan.workspace_bytes == 256 + 2 * 3 * 128 * 4
    assert all(step.variant.name in step.source for step in plan.steps)


def test_a_workspace_that_does_not_do_is_refused_before_anything_is_queued(plan, fake_gpu):
    q, out = array(SHAPE, np.float32, Q), array(SHAPE, np.float32, OUT)
    needed = plan.workspace_bytes
    for wrong, error, words in (
        (
            memory(needed - 1),
            errors.InsufficientWorkspace,
            rf"has {needed - 1} bytes; the plan needs {needed}",
        ),
        (memory(needed, WORKSPACE + 128), errors.BadTensorStrides, "multiple of 256 bytes"),
        (memory(needed)[::2], errors.BadParam, "contiguous"),
        (np.empty(needed, np.uint8), errors.BadParam, "a numpy array, but the plan was made for cupy arrays"),
        (memory(needed, Q - 256), errors.BadTensorStrides, "workspace overlaps q in memory"),
        (memory(needed, OUT + 256), errors.BadTensorStrides, "out overlaps workspace in memory"),
    ):
        with pytest.raises(error, match=words):
            plan(q, q, q, out=out, workspace=wrong)
    assert not fake_gpu.launches
    # Of whatever dtype, as long as there are bytes enough.
    plan(q, q, q, out=out, workspace=memory(-(-needed // 4), dtype=np.float32))


def test_memory_of_one_call_is_not_taken_for_that_of_another(plan, fake_gpu):
    q, out = array(SHAPE, np.float32, Q), array(SHAPE, np.float32, OUT)
    for address in (WORKSPACE, WORKSPACE + (1 << 20), WORKSPACE):
        plan(q, q, q, out=out, workspace=memory(plan.workspace_bytes, address))
        assert int(fake_gpu.members(-2)["sums"]) == address + 256
