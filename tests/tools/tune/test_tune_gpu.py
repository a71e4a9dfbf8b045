"""The real bench without a GPU: kernels run in the simulator, on arrays of NumPy, and a clock counts."""

import shutil

import numpy as np
import pytest

from fake_gpu import H200
from flashgen.errors import InternalError
from flashgen.families.load import load_specs
from flashgen.simulator.backend import Runner
from flashgen.tools.bench.hosts import Inputs
from flashgen.tools.tune import gpu
from flashgen.tools.tune.shapes import cases

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="the simulator needs a C++ compiler"
)


class NumpyHost:
    """Arrays in host memory; each event is a millisecond after the one before it."""

    name, l2_bytes = "numpy", 0

    def __init__(self):
        self.now = 0

    def inputs(self, case, seed):
        rng = np.random.default_rng(seed)
        dtype = np.float32 if case.dtype == "fp32" else np.float16

        def normal(seqlen, heads):
            return rng.standard_normal((case.batch, seqlen, heads, case.head_dim), np.float32).astype(dtype)

        q = normal(case.seqlen_q, case.num_heads_q)
        k, v = (normal(case.seqlen_kv, case.num_heads_kv) for _ in "kv")
        return Inputs(q, k, v, np.empty_like(q), case.hidden(rng) if case.is_dense else None)

    def poison(self, array):
        array.fill(np.nan)

    def numpy(self, array):
        return array.astype(np.float64)

    def record(self):
        self.now += 1
        return self.now

    def elapsed_ms(self, start, end):
        return float(end - start)

    def synchronize(self):
        pass

    def capture(self, body):
        return body


@pytest.fixture
def bench(monkeypatch):
    """The bench, whose kernels ``bench.spoil`` may spoil: a function of the arrays after each run."""
    made = gpu.GpuBench(H200, NumpyHost(), rounds=2, sample_ms=0.5, seed=5)
    made.spoil = lambda arrays: None

    class Spoiling(Runner):
        def at(self, pointers, problem):
            work = super().at(pointers, problem)

            def spoiled(arrays, stream):
                work(arrays, stream)
                made.spoil(arrays)

            return spoiled

    def prepare(steps, device):
        return Spoiling(next(steps))

    monkeypatch.setattr(gpu, "prepare", prepare)
    monkeypatch.setattr(gpu, "_SEQLEN_Q", 70)
    monkeypatch.setattr(gpu, "_SEQLEN_KV", 90)
    monkeypatch.setattr(gpu, "_WINDOW", (30, 10))
    return made


def variant(**axes):
    (spec,) = (spec for spec in load_specs() if spec.name == "flash_fwd_sm80")
    wanted = {"head_dim": 32, "dtype": "fp16", "mask_type": "none", "gqa": "mha"} | axes
    return next(v for v in spec.select(target="sm86", **wanted) if not v.tile_name)


@pytest.mark.parametrize(
    "axes",
    [
        {"mask_type": "causal"},
        {"mask_type": "local", "gqa": "gqa"},
        {"mask_type": "dense"},
        {"gqa": "packed", "dtype": "fp32"},
    ],
    ids=str,
)
def test_a_right_kernel_passes(axes, bench):
    assert bench.wrong(variant(**axes)) == ""


def test_one_wrong_element_is_found(bench):
    def spoil(arrays):
        arrays[4][1, 69, 0, 23] += np.float16(0.1)

    bench.spoil = spoil
    assert bench.wrong(variant()).startswith("wrong result: error ")


def test_an_element_that_is_never_written_is_found(bench):
    def spoil(arrays):
        arrays[4][0, 3, 1, 0] = np.nan

    bench.spoil = spoil
    assert "error NaN or infinite" in bench.wrong(variant())


def test_a_wrong_lse_is_found(bench):
    def spoil(arrays):
        arrays[5][0, 0, 7] += 0.01

    bench.spoil = spoil
    assert "error of the LSE 1.0e-02" in bench.wrong(variant())


def test_runs_that_differ_in_a_bit_are_found(bench):
    runs = []

    def spoil(arrays):
        runs.append(1)
        if len(runs) == 3:
            bits = arrays[4].view(np.uint16)
            bits[0, 0, 0, 0] ^= 1

    bench.spoil = spoil
    assert bench.wrong(variant()) == "two runs on the same inputs differ"


def test_a_kernel_that_does_not_start_is_dropped_and_one_that_the_gpu_stops_ends_it_all(bench):
    def fail(*_):
        raise RuntimeError("CUDA_ERROR_SOMETHING")

    bench.spoil = fail
    assert bench.wrong(variant()) == "does not run: CUDA_ERROR_SOMETHING"
    bench._host.synchronize = fail  # after an illegal address, say, every call fails
    with pytest.raises(InternalError, match=r"block_m=128.*stopped by the GPU: CUDA_ERROR_SOMETHING"):
        bench.wrong(variant())


def test_right_tiles_are_timed_and_a_wrong_one_is_not(bench):
    (case,) = cases(variant(mask_type="causal"), ["1x70x70@1"])
    timed = bench.time([variant(mask_type="causal")] * 2, case)
    assert [timing.rounds for timing in timed] == [2, 2]
    calls = []

    def spoil(arrays):
        calls.append(1)
        if len(calls) == 2:
            arrays[4][:] = 0

    bench.spoil = spoil
    right, wrong = bench.time([variant(mask_type="causal")] * 2, case)
    assert right.median_ms > 0
    assert wrong.startswith("wrong result: error ")
