"""What a kernel adds to a call is the difference of the calls with it and without it, on a pretended GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flashgen.tools.bench.grids import GRIDS
from flashgen.tools.bench.timing import Timing

_SPEC = importlib.util.spec_from_file_location(
    "step_times", Path(__file__).resolve().parents[3] / "benchmarks" / "step_times.py"
)
step_times = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(step_times)


def test_differences_add_up_to_the_whole():
    timings = {count: Timing(ms, ms, ms, 9, 1) for count, ms in ((1, 0.1), (2, 0.7), (3, 0.8))}
    found = step_times.added(["a", "b", "c"], timings)
    assert [each["added_us"] for each in found] == pytest.approx([100, 600, 100])
    assert [each["share"] for each in found] == pytest.approx([1 / 8, 6 / 8, 1 / 8])


class Host:
    """Time passes as kernels are launched: ``us`` of them by the name of their step."""

    l2_bytes = 0

    def __init__(self, gpu, inputs, us):
        self.gpu, self.make, self.us = gpu, inputs, us

    def inputs(self, case, seed):
        return self.make(case)

    def record(self):
        return len(self.gpu.launches)

    def elapsed_ms(self, start, end):
        steps = (self.gpu.variants[function].step for function, *_ in self.gpu.launches[start:end])
        return sum(self.us[step] for step in steps) / 1e3

    def synchronize(self):
        pass


@pytest.mark.parametrize("deterministic", ["False", "True"])
def test_each_kernel_of_the_backward_pass_is_found(deterministic, fake_gpu, fake_arrays):
    where = {"head_dim": [64], "mask": ["causal"], "seqlen_q": [4096], "deterministic": [deterministic]}
    case = GRIDS["backward"].choose(where=where).cases[-1]
    us = {"preprocess": 60.0, "main": 500.0, "convert": 40.0}
    found = step_times.measure(case, Host(fake_gpu, fake_arrays, us), rounds=2, sample_ms=0.5)
    times = {
        fake_gpu.variants[function].name: us[fake_gpu.variants[function].step]
        for function, *_ in fake_gpu.launches
        if fake_gpu.variants[function].operator == "attention_backward"
    }
    assert {kernel["variant"]: kernel["added_us"] for kernel in found["kernels"]} == pytest.approx(times)
    assert len(times) >= 2
