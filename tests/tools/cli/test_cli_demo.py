import json

import numpy as np
import pytest

from flashgen.errors import NoCompilerError, SimulationError
from flashgen.families.arch import Device
from flashgen.simulator import hostcompiler
from flashgen.toolchain.build import Built


@pytest.fixture
def no_gpu(tmp_path, monkeypatch):
    """Neither a GPU nor a C++ compiler."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("flashgen.simulator.hostcompiler.why_unavailable", lambda: "install another")
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: False)
    monkeypatch.setattr("flashgen.runtime.device.why_unavailable", lambda: "there is none")


@pytest.fixture
def no_compiler(monkeypatch):
    def missing():
        raise NoCompilerError("install one")

    monkeypatch.setattr("flashgen.toolchain.compile.nvrtc", missing)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("flashgen.tools.cli.demo._CPU_TOKENS", 300)


def test_without_a_gpu_the_cpu_computes_and_kernels_compile(no_gpu, short, flashgen):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    found = json.loads(flashgen("demo", "--json").stdout)
    assert (found["place"], found["why"]) == ("CPU", "there is none")
    assert [kernel["registers"] > 0 for kernel in found["kernels"]] == [True] * 3
    assert all(kernel["variant"].startswith("flash_fwd_") for kernel in found["kernels"])
    assert found["sources"].keys() == {kernel["variant"] for kernel in found["kernels"]}
    for result in found["results"]:
        assert 0 < result["error"] <= result["bound"] < 0.1
        assert 0 < result["share"] <= 1
        assert result["milliseconds"] > 0


def test_without_a_compiler_attention_still_runs(no_gpu, no_compiler, short, flashgen):
    result = flashgen("demo")
    assert result.exit_code == 0
    assert "kernels were not compiled: install one" in result.stdout
    assert result.stdout.count("the CPU path") == 3
    assert "the CUDA was not simulated: install another" in result.stdout


def test_without_a_terminal_each_kernel_that_is_compiled_has_a_line(no_gpu, short, flashgen, monkeypatch):
    built = []

    def build(wanted, on_done):
        for at, (variant, arch) in enumerate(wanted):
            monkeypatch.setattr("flashgen.tools.cli.progress.time.monotonic", lambda now=1e9 + 10.0 * at: now)
            built.append(f"{variant.name} {arch}")
            on_done(Built(variant, arch, seconds=10.0, error="not tried"))
        return []

    monkeypatch.setattr("flashgen.toolchain.build.build", build)
    said = flashgen("demo").stderr.splitlines()
    for count, kernel in enumerate(built, 1):
        assert f"compiling 3 kernels: {count} of 3 done, {kernel} the last" in said


def test_a_wrong_result_is_a_failure(no_gpu, no_compiler, short, flashgen, monkeypatch):
    import flashgen as package

    right = package.attention

    def wrong(q, k, v, *, out, **options):
        right(q, k, v, out=out, **options)
        out[0, -1, 0, 0] += np.float16(0.1)

    monkeypatch.setattr(package, "attention", wrong)
    result = flashgen("demo")
    assert result.exit_code == 1
    assert result.stdout.count(" ! ") == 3


def test_a_result_that_was_never_written_is_a_failure(no_gpu, no_compiler, short, flashgen, monkeypatch):
    monkeypatch.setattr("flashgen.attention", lambda *arrays, **options: None)
    result = flashgen("demo")
    assert result.exit_code == 1
    assert result.stdout.count("NaN !") == 3
    assert [each["error"] for each in json.loads(flashgen("demo", "--json").stdout)["results"]] == [None] * 3


@pytest.mark.parametrize("reason", ["no kernel runs on", "install one"])
def test_a_gpu_that_cannot_be_used_leaves_the_cpu(no_gpu, short, flashgen, monkeypatch, reason, request):
    turing = Device(0, "sm_75", (7, 5), 40, 65536, 65536, 4 << 20, 320, "Tesla T4")
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: True)
    monkeypatch.setattr("flashgen.runtime.device.device", lambda ordinal: turing)
    monkeypatch.setattr("flashgen.toolchain.compile.nvrtc", lambda: None)
    if reason == "install one":
        request.getfixturevalue("no_compiler")
    monkeypatch.setattr("flashgen.toolchain.build.build", lambda wanted, **_: [])
    result = flashgen("demo", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["place"] == "CPU"
    assert reason in found["why"]


@pytest.fixture
def simulating(no_compiler, short, monkeypatch):
    """A machine with a C++ compiler only; what it compiles is kept for the next run of the tests."""
    reason = hostcompiler.why_unavailable()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: False)
    monkeypatch.setattr("flashgen.runtime.device.why_unavailable", lambda: "there is none")


def test_with_a_host_compiler_the_cuda_is_simulated(simulating, flashgen):
    result = flashgen("demo", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)["simulated"]
    assert found["variant"].startswith("flash_fwd_hdim64_fp16_causal")
    assert 0 < found["error"] <= found["bound"] < 0.1
    assert f"the CUDA of {found['variant']}, simulated" in flashgen("demo").stdout


def test_a_kernel_that_the_simulator_faults_is_a_failure(simulating, flashgen, monkeypatch):
    def fault(*arguments, **options):
        raise SimulationError("two threads race", check="race")

    monkeypatch.setattr("flashgen.simulator.backend.simulate", fault)
    result = flashgen("demo")
    assert result.exit_code == 1
    assert "two threads race !" in result.stdout


def test_what_the_simulator_computes_is_said_to_be_simulated(simulating, flashgen, monkeypatch):
    monkeypatch.setattr("flashgen.tools.cli.demo._SIMULATOR_TOKENS", 64)
    result = flashgen("demo", FLASHGEN_BACKEND="simulator")
    assert result.exit_code == 0
    assert "the CPU path" not in result.stdout
    assert result.stdout.count(", simulated\n") == 3
