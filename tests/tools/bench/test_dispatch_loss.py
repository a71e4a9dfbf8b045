"""What dispatch's choice loses is the time of its kernel over that of the fastest, on a pretended GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flashgen.tools.bench.cases import Case

_SPEC = importlib.util.spec_from_file_location(
    "dispatch_loss", Path(__file__).resolve().parents[3] / "benchmarks" / "dispatch_loss.py"
)
dispatch_loss = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(dispatch_loss)


def test_calls_repeat_by_their_seed_and_are_within_limits():
    found = list(dispatch_loss.calls(3, seed=5))
    assert found == list(dispatch_loss.calls(3, seed=5)) != list(dispatch_loss.calls(3, seed=6))
    kinds = [kind for kind, _ in found]
    assert all(kinds.count(kind) == 3 for kind in kinds)
    assert len(set(kinds)) == 8
    for _, case in found:
        assert case.flops <= dispatch_loss.MOST_FLOPS
        assert case.bytes_moved <= dispatch_loss.MOST_BYTES


class Host:
    """Time passes as kernels are launched, by the order in which their names were first seen."""

    l2_bytes = 0

    def __init__(self, gpu, inputs):
        self.gpu, self.make, self.order = gpu, inputs, []

    def inputs(self, case, seed):
        return self.make(case)

    def capture(self, body):
        return body

    def record(self):
        return len(self.gpu.launches)

    def us(self, name):
        if name not in self.order:
            self.order.append(name)
        return 10.0 * (1 + self.order.index(name))

    def elapsed_ms(self, start, end):
        names = (self.gpu.variants[function].name for function, *_ in self.gpu.launches[start:end])
        return sum(self.us(name) for name in names) / 1e3

    def synchronize(self):
        pass


@pytest.mark.parametrize(
    "sizes",
    [
        {"seqlen_q": 512, "seqlen_kv": 512},
        {"seqlen_q": 1, "seqlen_kv": 4096, "lengths": "cache"},
        {"seqlen_q": 300, "seqlen_kv": 300, "lengths": "packed"},
        {"seqlen_q": 200, "seqlen_kv": 200, "direction": "backward"},
    ],
)
def test_each_near_candidate_is_timed(sizes, fake_gpu, fake_arrays):
    case = Case("a call", batch=2, num_heads_q=8, num_heads_kv=2, head_dim=64, mask="causal", **sizes)
    host = Host(fake_gpu, fake_arrays)
    found = dispatch_loss.measure(case, host, near=3.0, rounds=2, sample_ms=0.01)
    assert found["taken"] in found["us"]
    assert len(found["us"]) >= 2
    launched = {fake_gpu.variants[function].name for function, *_ in fake_gpu.launches}
    assert found["us"].keys() <= launched
    # The time of a name is that of the call that launches it, with what other steps take.
    assert all(us > host.us(name) - 0.01 for name, us in found["us"].items())


def test_the_loss_is_to_the_fastest():
    assert dispatch_loss.loss({"taken": "a", "us": {"a": 30.0, "b": 20.0, "c": 90.0}}) == 1.5
    assert dispatch_loss.loss({"taken": "b", "us": {"a": 30.0, "b": 20.0}}) == 1.0


def test_the_mean_of_losses_is_geometric():
    text = dispatch_loss.summary([1.0, 1.21, 1.0, 1.21])
    assert text.split() == ["4", "calls", "mean", "1.100", "most", "1.21", "2", "over", "1.10"]
