"""What is said of GPUs, on a machine that has none and with the runtime's answers made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from flashgen.errors import DeviceTypeNotSupported
from flashgen.families.arch import typical
from flashgen.host.paths import checkout
from flashgen.runtime import device as fd

PROPERTIES = {
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
    "l2CacheSize": 62914560,
    "name": b"NVIDIA H200",
}


@pytest.fixture(autouse=True)
def _forget():
    for function in (fd.device, fd.why_unavailable):
        function.cache_clear()
    yield
    for function in (fd.device, fd.why_unavailable):
        function.cache_clear()


class FakeRuntime(SimpleNamespace):
    """A CUDA runtime with two GPUs that remembers which one is current."""

    current = 0

    def getDevice(self):
        return self.current

    def setDevice(self, ordinal):
        self.current = ordinal

    def getDeviceProperties(self, _):
        return PROPERTIES

    def deviceGetAttribute(self, name, _):
        return self.attributes[name]


@pytest.fixture
def pretend(monkeypatch):
    import cupy.cuda

    def become(count=2, error=None, driver=13000, toolkit=13000, khz=3_201_000):
        def get_device_count():
            if error:
                raise RuntimeError(error)
            return count

        runtime = FakeRuntime(
            getDeviceCount=get_device_count,
            driverGetVersion=lambda: driver,
            cudaDevAttrMemoryClockRate="khz",
            cudaDevAttrGlobalMemoryBusWidth="bits",
            attributes={"khz": khz, "bits": 6144},
            runtimeGetVersion=lambda: toolkit,
        )
        monkeypatch.setattr(cupy.cuda, "runtime", runtime)
        return runtime

    return become


def test_properties_of_a_device(pretend):
    pretend()
    gpu = fd.device(1)
    assert gpu == fd.Device(1, "sm_90", (9, 0), 132, 232448, 233472, 62914560, 4916.736, "NVIDIA H200")
    assert str(gpu) == "GPU 1 (NVIDIA H200, sm_90)"
    assert fd.available()
    assert fd.why_unavailable() == ""


def test_memory_whose_clock_the_driver_does_not_tell_has_the_rate_of_a_known_gpu(pretend):
    pretend(khz=0)
    assert fd.device(1).memory_gbps == typical("sm_90").memory_gbps


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_device_that_is_not_there(pretend, ordinal):
    pretend()
    with pytest.raises(DeviceTypeNotSupported, match=rf"no GPU {ordinal}; the visible ones are 0 to 1"):
        fd.device(ordinal)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"count": 0}, "CUDA_VISIBLE_DEVICES"),
        ({"error": "cudaErrorNoDevice: none"}, "CUDA_VISIBLE_DEVICES"),
        ({"error": "cudaErrorInsufficientDriver: old", "driver": 0}, "no NVIDIA driver"),
        (
            {"error": "cudaErrorInsufficientDriver: old", "driver": 12040},
            "for CUDA 12.4 and CuPy for CUDA 13.0",
        ),
        ({"error": "cudaErrorSystemNotReady: x"}, "cudaErrorSystemNotReady"),
    ],
)
def test_why_there_is_no_gpu(pretend, machine, reason):
    pretend(**machine)
    assert reason in fd.why_unavailable()
    assert not fd.available()
    with pytest.raises(DeviceTypeNotSupported, match=reason.replace(".", r"\.")):
        fd.device(0)


def test_without_cupy_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert f"pip install -e '{checkout()}[cuda13]'" in fd.why_unavailable()


def test_activation_is_undone_also_by_an_exception(pretend, monkeypatch):
    from cupy_backends.cuda.api import driver

    runtime = pretend()
    monkeypatch.setattr(driver, "ctxGetCurrent", lambda: 1000 + runtime.current)
    seen = []

    def fail():
        with fd.activated(1) as context:
            seen.append((runtime.current, context))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [(1, 1001)]
    assert runtime.current == 0
