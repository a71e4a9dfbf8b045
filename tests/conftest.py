"""A tiny family of kernels (tests/fixtures) to load, change and render, apart from the shipped ones; and a
GPU that only keeps what it is asked to launch."""

import functools
import os
import random
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits

from draw import VARIABLE, draw, function_of, is_a_case, is_drawn, looks_for_a_fault, run_seed, seed_of
from fake_gpu import H200, Binding, Driver
from flashgen.families import tuned
from flashgen.families.load import load_spec
from flashgen.host.paths import specs_dir
from flashgen.toolchain.parallel import processors

# How long an example takes says more of the machine than of the code.
settings.register_profile("flashgen", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flashgen")

FIXTURES = Path(__file__).parent / "fixtures"
SHIPPED = specs_dir()
ON_A_GPU = Path(__file__).parent / "gpu"


def pytest_addoption(parser):
    parser.addoption(
        "--whole",
        action="store_true",
        help="run all tests: those that are drawn from, and those marked extra",
    )
    parser.addoption(
        "--faults",
        metavar="N",
        type=int,
        default=1,
        help="with --whole, of the tests that look for planted faults run one in N",
    )
    parser.addoption(
        "--cases",
        metavar="N",
        type=int,
        default=1,
        help="with --whole, run one in N of the cases of each test that a run draws from, with fresh seeds",
    )
    parser.addoption("--passed-to", metavar="FILE", help="write the tests that passed into FILE")
    parser.addoption(
        "--without-passed",
        metavar="FILE",
        help="leave out the tests that passed in FILE, which --passed-to wrote in an environment without "
        "PyTorch, JAX and transformers, if their modules name none of these or are marked once",
    )


class PassedTests:
    """Writes the ids of the tests that passed into a file."""

    def __init__(self, path):
        self.path = path
        self.passed = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_sessionfinish(self):
        self.path.write_text("\n".join(self.passed))


def pytest_configure(config):
    run_seed()  # before pytest-xdist starts its workers
    if config.option.markexpr == "gpu" and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        begin_with_a_gpu(int(worker.removeprefix("gw")))
    if config.option.passed_to and not hasattr(config, "workerinput"):
        config.pluginmanager.register(PassedTests(Path(config.option.passed_to)))


def begin_with_a_gpu(worker):
    """Each worker of pytest-xdist sees all GPUs, but another one first, so that they share the tests. Nothing
    has used CUDA before.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and (program := shutil.which("nvidia-smi")):
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False).stdout
        visible = ",".join(map(str, range(len(re.findall("^GPU ", listing, re.M)))))
    gpus = visible.split(",") if visible else []
    first = worker % max(1, len(gpus))
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def runs_once(item):
    return item.get_closest_marker("once") is not None or not names_a_library(item.path)


@functools.cache
def names_a_library(path):
    return re.search("torch|jax|transformers", path.read_text(encoding="utf-8")) is not None


def pytest_report_header(config):
    part = "all tests" if config.option.whole else "of many tests a part, all with --whole"
    return f"{VARIABLE}={run_seed()}: {part}"


def pytest_ignore_collect(collection_path, config):
    """A run without tests on a GPU does not import their modules, which choose among all kernels: that took
    each worker half of its time before the first test. tests/test_gpu_modules.py imports them.
    """
    return True if collection_path == ON_A_GPU and config.option.markexpr == "not gpu" else None


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    """Without --whole leave out tests that are marked extra, and most of those that a run draws from; but run
    all of a file that the command line names.
    """
    left_out = set()
    if config.option.whole:
        faults = [item for item in items if looks_for_a_fault(item)]
        cases = [item for item in items if is_a_case(item)]
        left_out |= set(faults) - draw(faults, run_seed(), config.option.faults)
        left_out |= set(cases) - draw(cases, run_seed(), config.option.cases, function_of)
    elif not any(".py" in argument for argument in config.args):
        many = [item for item in items if is_drawn(item)]
        left_out |= set(many) - draw(many, run_seed())
        left_out |= {item for item in items if item.get_closest_marker("extra")}
    if config.option.without_passed:
        passed = {*Path(config.option.without_passed).read_text().splitlines()}
        left_out |= {item for item in items if item.nodeid in passed and runs_once(item)}
    leave_out(config, items, left_out)


def leave_out(config, items, left_out):
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def blas_threads():
    """Workers of pytest-xdist share the processors: threads of BLAS that wait for one another took 25 times
    as long as one thread each.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with threadpool_limits(max(1, processors() // workers), "blas"):
        yield


@functools.cache
def shipped_spec(path):
    return load_spec(path)


def check_shipped_specs_once(path, patch):
    """For a test or a module of tests at ``path``. A check of the shipped specs takes more than a second. In
    tests/families, which tests loading, each load checks them, as a user's does.
    """

    def load(path, cache=None, gpu=None):
        if path.parent != SHIPPED or (gpu is not None and tuned.find(path.stem, gpu) is not None):
            return load_spec(path, cache, gpu)
        return shipped_spec(path)

    if "families" not in path.parts:
        patch.setattr("flashgen.families.load.load_spec", load)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Many modules of tests choose their variants when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        check_shipped_specs_once(collector.path, patch)
        return (yield)


@pytest.fixture(autouse=True)
def shipped_specs_are_checked_once(request, monkeypatch):
    check_shipped_specs_once(request.path, monkeypatch)


@pytest.fixture(autouse=True)
def nothing_tuned(tmp_path, monkeypatch):
    """What was tuned on this machine has no part in the tests."""
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / "tuned"))


@pytest.fixture
def fresh_seed(request):
    """A fresh seed, from that of the run, which pytest shows where a test fails."""
    print(f"{VARIABLE}={run_seed()}")
    return seed_of(request.node.nodeid)


@pytest.fixture(autouse=True)
def generators_repeat(request, monkeypatch):
    """The run's seed repeats the generators of NumPy that a test or its module makes without a seed."""
    default_rng, seeds = np.random.default_rng, np.random.SeedSequence(seed_of(request.node.nodeid))

    def generator(seed=None):
        return default_rng(seeds.spawn(1)[0] if seed is None else seed)

    for value in vars(request.module).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = generator().bit_generator.state
    monkeypatch.setattr(np.random, "default_rng", generator)


@pytest.fixture
def fixed_seed(request):
    """The same seed in every run, for a test that looks for a planted fault: it shows that a check finds the
    fault, and some inputs hide it.
    """
    return random.Random(request.node.nodeid).getrandbits(32)


@pytest.fixture
def tiny_folder(tmp_path):
    """A copy of the fixtures to change: ``specs/tiny.yaml`` and its ``templates/``."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "tiny"))


@pytest.fixture
def edit(tiny_folder):
    """``edit(file, old, new)`` replaces the only ``old`` in ``file`` and returns its path."""

    def replace(file, old, new):
        path = tiny_folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))
        return path

    return replace


@pytest.fixture
def edit_spec(edit):
    """``edit_spec(old, new)`` is ``edit`` for the tiny spec."""
    return lambda old, new: edit("specs/tiny.yaml", old, new)


@pytest.fixture(scope="session")
def tiny_spec():
    """The tiny spec as it is."""
    return load_spec(FIXTURES / "specs" / "tiny.yaml")


@pytest.fixture(scope="session")
def tiny_variants(tiny_spec):
    return tiny_spec.variants()


@pytest.fixture(scope="session")
def disassembler():
    """A test that takes it is skipped where nothing can be compiled, or there is no nvdisasm."""
    from flashgen.toolchain.disassemble import NoDisassemblerError, nvdisasm

    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    try:
        return nvdisasm()
    except NoDisassemblerError:
        pytest.skip("there is no nvdisasm")


@pytest.fixture
def driver(monkeypatch):
    """A `fake_gpu.Driver` in the place of CUDA's, under CuPy."""
    pytest.importorskip("cupy")
    from cupy.cuda import runtime
    from cupy_backends.cuda.api import driver as cuda

    from flashgen.runtime import dependent

    fake = Driver()
    monkeypatch.setattr(cuda, "launchKernel", fake.launch)
    monkeypatch.setattr(dependent, "driver_function", lambda: fake.launch_dependently)
    monkeypatch.setattr(dependent, "driver_version", lambda: fake.version)
    monkeypatch.setattr(cuda, "ctxGetCurrent", fake.context)
    monkeypatch.setattr(runtime, "getDevice", fake.get_device)
    monkeypatch.setattr(runtime, "setDevice", fake.set_device)
    return fake


@pytest.fixture
def fake_arrays():
    """``fake_arrays(case)``: the inputs of a case of `tools.bench` on `fake_gpu`, where every array has
    memory of its own, and so has a workspace.
    """
    pytest.importorskip("cupy")
    from fake_gpu import Memory
    from flashgen.tools.bench.hosts import filled

    with Memory() as memory:

        def arrays(case):
            def empty(shape):
                return memory.array(shape, case.dtype)

            return filled(case, 0, empty, empty, lambda array: memory.array(array.shape, array.dtype))

        yield arrays


@pytest.fixture
def forget_plans(monkeypatch):
    """No plan is kept of the tests before; ``forget_plans()``: nor of the calls before."""
    from flashgen.call import compute

    def forget():
        monkeypatch.setattr(compute, "_plans", {})
        monkeypatch.setattr(compute, "_recent", {})
        monkeypatch.setattr(compute, "_relatives", {})

    forget()
    return forget


@pytest.fixture
def fake_gpu(driver, monkeypatch, forget_plans):
    """`driver` as the only GPU of the machine, an H200, for the whole road from `flashgen.plan` to a launch.

    It has no memory: every call needs ``out``, and ``lse`` where the plan returns one.
    """
    import cupy

    from flashgen.runtime import arrays, device, kernel, tensormap

    monkeypatch.setattr(device, "device", lambda ordinal: H200)
    monkeypatch.setattr(kernel, "load", driver.load)
    monkeypatch.setattr(kernel, "load_all", lambda variants, gpu: [kernel.load(v, gpu) for v in variants])
    monkeypatch.setattr(tensormap, "binding", Binding)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device=-1: cupy.cuda.Stream.null)
    # These keep what they have bound or seen.
    monkeypatch.setattr(arrays, "_KINDS", {})
    monkeypatch.setattr(arrays, "_kind_of_type", cache(arrays._kind_of_type.__wrapped__))
    forget_plans()
    return driver
