"""Kernels on a real GPU: loaded, launched, captured, from many threads, and translated by the driver."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from flashgen.errors import DeviceTypeNotSupported
from flashgen.runtime import kernel
from flashgen.runtime.device import available, device, why_unavailable
from flashgen.toolchain import compile as fc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=why_unavailable())]

# Writes through the last word of the dynamic shared memory, so a launch with less of it cannot succeed.
TEMPLATE = """${ header }
extern __shared__ float shared[];

extern "C" __global__ void ${ name }(float* out) {
  const int last = ${ smem_bytes } / 4 - 1 - threadIdx.x;
  shared[last] = ${ block_m } + threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = shared[last];
}
"""
THREADS = 32


@pytest.fixture
def make(tmp_path, monkeypatch, tiny_variants):
    """``make(smem_bytes)`` is a variant of a kernel that fills 32 floats with block_m, block_m + 1, ..."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "fill.cu.j2").write_text(TEMPLATE)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_loading", {})

    def variant(smem_bytes=1024, block_m=None):
        base = tiny_variants[0]
        tile = dict(base.tile) | ({"block_m": block_m} if block_m else {})
        return dataclasses.replace(
            base,
            template="fill.cu.j2",
            spec_dir=str(tmp_path / "specs"),
            header="flashgen/sm80.cuh",
            smem_bytes=smem_bytes,
            tile=tuple(tile.items()),
        )

    return variant


def launch(loaded, out, stream=None):
    loaded.function((1,), (THREADS,), (out,), shared_mem=loaded.variant.smem_bytes, stream=stream)


def expected(variant):
    return [float(variant.tile_value("block_m") + n) for n in range(THREADS)]


def poisoned():
    import cupy

    return cupy.full(THREADS, cupy.nan, dtype=cupy.float32)


@pytest.mark.parametrize("smem_bytes", [1024, 48 * 1024 + 512, "all"])
def test_a_kernel_runs_with_its_shared_memory(make, smem_bytes):
    gpu = device(0)
    variant = make(gpu.smem_per_block if smem_bytes == "all" else smem_bytes)
    out = poisoned()
    loaded = kernel.load(variant, gpu)
    launch(loaded, out)
    assert out.tolist() == expected(variant)
    assert loaded.compiled.arch == gpu.arch


def test_more_shared_memory_than_there_is_fails_before_a_launch(make):
    gpu = device(0)
    with pytest.raises(DeviceTypeNotSupported, match="bytes of shared memory a block"):
        kernel.load(make(gpu.smem_per_block + 512), gpu)


def test_a_kernel_from_the_disk_cache_runs(make):
    variant = make()
    assert not kernel.load(variant, device(0)).cached
    kernel._kernels.clear()
    loaded = kernel.load(variant, device(0))
    assert loaded.cached
    out = poisoned()
    launch(loaded, out)
    assert out.tolist() == expected(variant)


def test_a_loaded_kernel_can_be_captured(make):
    import cupy

    variant = make(100 * 1024)
    kernel.load(variant, device(0))
    out = poisoned()
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        launch(kernel.load(variant, device(0)), out, stream)
        graph = stream.end_capture()
    assert cupy.isnan(out).all()
    graph.launch(stream)
    stream.synchronize()
    assert out.tolist() == expected(variant)


def test_threads_share_one_kernel_and_run_it_on_their_own_streams(make):
    import cupy

    variants = [make(block_m=block_m) for block_m in (16, 64)]
    outs = [poisoned() for _ in range(16)]
    cupy.cuda.runtime.deviceSynchronize()

    def work(n):
        stream = cupy.cuda.Stream(non_blocking=True)
        loaded = kernel.load(variants[n % 2], device(0))
        launch(loaded, outs[n], stream)
        stream.synchronize()
        return loaded

    with ThreadPoolExecutor(16) as pool:
        loaded = list(pool.map(work, range(16)))
    assert len({id(one) for one in loaded}) == 2
    for n, out in enumerate(outs):
        assert out.tolist() == expected(variants[n % 2])


def test_the_driver_translates_ptx_where_nvrtc_does_not_know_the_device(make, monkeypatch):
    monkeypatch.setattr(fc, "supported_archs", lambda: (80,))
    gpu = dataclasses.replace(device(0), arch="sm_999")
    variant = make(100 * 1024 if gpu.smem_per_block > 100 * 1024 else 1024)
    loaded = kernel.load(variant, gpu)
    assert loaded.compiled.arch == "compute_80"
    assert loaded.compiled.registers > 0
    out = poisoned()
    launch(loaded, out)
    assert out.tolist() == expected(variant)


def test_every_device_gets_its_own_kernel_and_the_current_one_stays(make):
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    variant = make()
    for ordinal in range(count):
        loaded = kernel.load(variant, device(ordinal))
        assert cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(ordinal):
            out = poisoned()
            launch(loaded, out)
            assert out.tolist() == expected(variant)
    assert len(kernel._kernels) == count


def test_a_device_is_described_as_cupy_sees_it():
    import cupy

    gpu = device(0)
    attributes = cupy.cuda.Device(0).attributes
    assert gpu.num_sms == attributes["MultiProcessorCount"]
    assert gpu.smem_per_block == attributes["MaxSharedMemoryPerBlockOptin"]
    assert gpu.smem_per_sm == attributes["MaxSharedMemoryPerMultiprocessor"]
    assert gpu.l2_bytes == attributes["L2CacheSize"]
    bits, khz = attributes["GlobalMemoryBusWidth"], attributes["MemoryClockRate"]
    assert gpu.memory_gbps == pytest.approx(bits / 8 * khz * 2 / 1e6)
    assert gpu.arch != "sm_90" or 1_900 < gpu.memory_gbps < 5_500  # H100 PCIe to GH200
    assert gpu.arch == f"sm_{cupy.cuda.Device(0).compute_capability}"
    assert gpu.smem_per_block <= gpu.smem_per_sm
