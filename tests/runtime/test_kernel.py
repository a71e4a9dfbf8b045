"""Loading kernels, with NVRTC and the disk cache real and the driver made up."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen.errors import CompileError, DeviceTypeNotSupported, InternalError
from flashgen.families.arch import Device
from flashgen.families.params import Param
from flashgen.families.variant import Variant
from flashgen.runtime import kernel
from flashgen.toolchain import cache as fcache
from flashgen.toolchain import compile as fc
from flashgen.toolchain import obtain

TEMPLATE = """${ header }

#include "flashgen/tiny.cuh"

extern "C" __global__ void ${ name }(float* x) { x[threadIdx.x] = tiny_value() * ${ block_m }; }
"""
GPU = Device(0, "sm_90", (9, 0), 132, 232448, 233472, 62914560, 4917, "H200")


def make_variant(folder, *, block_m=64, smem=1024, min_arch="sm_80", archs=("sm_80", "sm_90"), options=()):
    return Variant(
        family="tiny",
        spec="tiny_sm80",
        template="tiny.cu.j2",
        target="sm80",
        min_arch=min_arch,
        archs=archs,
        max_smem=166912,
        axes=(("head_dim", 64), ("dtype", "fp32"), ("mask_type", "none"), ("gqa", "mha")),
        tile=(("block_m", block_m),),
        tile_name=f"m{block_m}",
        threads=32,
        smem_bytes=smem,
        element_bytes=4,
        params=(Param("x", "float*", "the output"),),
        header="flashgen/tiny.cuh",
        options=options,
        spec_dir=str(folder / "specs"),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A spec folder with a template and a header, and an empty disk cache."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "templates" / "include" / "flashgen").mkdir(parents=True)
    (tmp_path / "templates" / "tiny.cu.j2").write_text(TEMPLATE)
    header = tmp_path / "templates" / "include" / "flashgen" / "tiny.cuh"
    header.write_text("#pragma once\n__device__ inline float tiny_value() { return 7; }\n")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


class FakeDriver:
    """Records modules that are loaded and attributes that are set, in place of CuPy's binding."""

    def __init__(self, monkeypatch):
        import cupy.cuda.function
        from cupy_backends.cuda.api import driver

        self.context, self.images, self.attributes, self.error = 1, [], {}, None
        fake = self

        class Module:
            def load(self, image):
                if fake.error:
                    raise driver.CUDADriverError(fake.error)
                fake.images.append(image)

            def get_function(self, name):
                return SimpleNamespace(ptr=4000 + len(fake.images), name=name, module=self)

        monkeypatch.setattr(cupy.cuda.function, "Module", Module)
        monkeypatch.setattr(driver, "funcSetAttribute", self.set_attribute)
        monkeypatch.setattr(driver, "funcGetAttribute", lambda attribute, _: 100 + attribute)
        monkeypatch.setattr(kernel, "activated", self.activated)
        monkeypatch.setattr(kernel, "_kernels", {})
        monkeypatch.setattr(kernel, "_loading", {})

    def set_attribute(self, function, attribute, value):
        self.attributes[function, attribute] = value

    @contextlib.contextmanager
    def activated(self, ordinal):
        yield (ordinal, self.context)


@pytest.fixture
def driver(monkeypatch):
    return FakeDriver(monkeypatch)


def test_a_kernel_is_loaded_once_and_may_use_its_shared_memory(folder, driver):
    from cupy_backends.cuda.api.driver import CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

    variant = make_variant(folder, smem=150_000)
    loaded = kernel.load(variant, GPU)
    assert kernel.load(variant, GPU) is loaded
    assert driver.images == [loaded.compiled.cubin]
    assert loaded.function_ptr == loaded.function.ptr
    assert loaded.function.name == variant.name
    assert driver.attributes == {
        (loaded.function_ptr, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES): 150_000
    }
    assert (loaded.compiled.arch, loaded.cached) == ("sm_90", False)


def test_another_device_or_context_loads_again_from_the_disk_cache(folder, driver):
    variant = make_variant(folder)
    first = kernel.load(variant, GPU)
    other = kernel.load(variant, Device(1, *[getattr(GPU, f) for f in Device.__slots__[1:]]))
    driver.context = 2
    again = kernel.load(variant, GPU)
    assert len(driver.images) == 3
    assert [first.cached, other.cached, again.cached] == [False, True, True]
    assert first.compiled == other.compiled == again.compiled


def test_many_threads_compile_each_variant_once_and_side_by_side(folder, driver, monkeypatch):
    variants = [make_variant(folder, block_m=block_m) for block_m in (16, 32)]
    real = fc.compile_cubin
    names, side_by_side = [], threading.Barrier(2, timeout=120)

    def compile_cubin(source, name, *rest):
        names.append(name)
        side_by_side.wait()
        time.sleep(0.2)  # so that others ask meanwhile
        return real(source, name, *rest)

    monkeypatch.setattr(fc, "compile_cubin", compile_cubin)
    barrier = threading.Barrier(16)

    def ask(n):
        barrier.wait()
        return kernel.load(variants[n % 2], GPU)

    with ThreadPoolExecutor(16) as pool:
        loaded = list(pool.map(ask, range(16)))
    assert sorted(names) == sorted(variant.name for variant in variants)
    assert len({id(one) for one in loaded}) == 2


def test_the_kernels_of_a_call_are_compiled_side_by_side_and_looked_for_once(folder, driver, monkeypatch):
    variants = [make_variant(folder, block_m=block_m) for block_m in (16, 32, 64)]
    real, meeting = fc.compile_cubin, threading.Barrier(2)
    present = kernel.load(variants[1], GPU)

    def compile_cubin(*given):
        meeting.wait(60)  # for the other one
        return real(*given)

    monkeypatch.setattr(fc, "compile_cubin", compile_cubin)
    loaded = kernel.load_all(variants, GPU)
    assert [each.variant for each in loaded] == variants
    assert not any(each.cached for each in loaded)
    assert loaded[1] is present
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(fc, "nvrtc", lambda: pytest.fail("loaded NVRTC"))
    looked_for, recall = [], kernel.recall
    monkeypatch.setattr(kernel, "recall", lambda *given: looked_for.append(given[0]) or recall(*given))
    again = kernel.load_all([variants[0], variants[2]], GPU)
    assert looked_for == [variants[0], variants[2]]
    assert [each.compiled for each in again] == [loaded[0].compiled, loaded[2].compiled]
    assert all(each.cached for each in again)


def test_a_kernel_on_disk_is_loaded_without_its_compiler(folder, driver, monkeypatch):
    variant = make_variant(folder)
    first = kernel.load(variant, GPU)
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(fc, "nvrtc", lambda: pytest.fail("loaded NVRTC"))
    fc.compiler_version.cache_clear()
    again = kernel.load(variant, GPU)
    assert again.cached
    assert again.compiled == first.compiled


FIRST_CALL = """
import sys
from types import SimpleNamespace
import cupy
before = set(sys.modules)
from flashgen.runtime import kernel
from flashgen.schedule import dispatch
from flashgen.families import load
from flashgen.toolchain import cache, obtain
from flashgen.operators.attention import normalise
from flashgen.operators.arguments import ArrayView
view = ArrayView("cupy", 4096, (1, 64, 2, 64), (8192, 128, 64, 1), "fp16", 0)
call = normalise(view, view, view, causal=True)
device = SimpleNamespace(compute_capability=(9, 0), smem_per_block=232448)
variant = dispatch.offers(call, device, load.load_specs(cache=cache.default()))[0]
compiles = len(sys.argv) > 1
assert obtain.obtain(variant, "sm_90") if compiles else obtain.recall(variant, "sm_90")
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(packages - set(sys.stdlib_module_names)))
if not compiles:
    others = {f"flashgen.operators.{name}" for name in ("append", "merge", "varlen", "formula", "lowering")}
    assert not (others | {"flashgen.source.scores"}) & set(sys.modules)
    with open("/proc/self/maps") as maps:
        assert "libnvrtc.so" not in maps.read()
"""


def test_a_first_call_imports_nothing_but_flashgen_and_what_compiling_takes(tmp_path):
    env = {"FLASHGEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(kernel.__file__).parents[2])}
    command = [sys.executable, "-c", FIRST_CALL]
    found = [
        subprocess.run([*command, *mode], check=True, env=os.environ | env, capture_output=True, text=True)
        for mode in (["compile"], [])
    ]
    compiling, cached = (set(each.stdout.split()) for each in found)
    assert cached == {"flashgen"}
    # All of what else the first call of a new kernel waits for.
    needed = {"filelock", "flashgen", "jinja2", "markupsafe", "yaml"}
    assert {name for name in compiling if not name.startswith("_")} - {"typing_extensions"} == needed


@pytest.mark.parametrize("installed", ["nvrtc 99.0.1", None])
def test_a_kernel_of_the_loaded_compiler_is_found_whatever_is_installed(
    folder, driver, monkeypatch, installed
):
    variant = make_variant(folder)
    first = kernel.load(variant, GPU)
    monkeypatch.setattr(fc, "installed_version", lambda: installed)
    monkeypatch.setattr(kernel, "_kernels", {})
    again = kernel.load(variant, GPU)
    assert again.cached
    assert again.compiled == first.compiled
    assert obtain.recall(variant, "sm_90") is None


def test_a_failure_is_raised_again_and_can_be_mended(folder, driver):
    variant = make_variant(folder)
    header = folder / "templates" / "include" / "flashgen" / "tiny.cuh"
    good = header.read_text()
    header.write_text(good.replace("7", "seven"))
    for _ in range(2):
        with pytest.raises(CompileError, match=r'flashgen/tiny\.cuh\(2\): error: identifier "seven"'):
            kernel.load(variant, GPU)
    header.write_text(good)
    assert kernel.load(variant, GPU).compiled.name == variant.name


def test_what_the_machine_code_depends_on_decides_the_key(folder, monkeypatch):
    variant = make_variant(folder)
    keys = [obtain.cache_key(variant, "sm_90"), obtain.cache_key(variant, "sm_80")]
    keys.append(obtain.cache_key(make_variant(folder, options=("-lineinfo",)), "sm_90"))
    keys.append(obtain.cache_key(make_variant(folder, block_m=32), "sm_90"))
    header = folder / "templates" / "include" / "flashgen" / "tiny.cuh"
    header.write_text(header.read_text().replace("7", "8"))
    keys.append(obtain.cache_key(variant, "sm_90"))
    monkeypatch.setattr(fc, "compiler_version", lambda: "nvrtc 99.0")
    keys.append(obtain.cache_key(variant, "sm_90"))
    assert len(set(keys)) == len(keys)
    assert obtain.cache_key(make_variant(folder, archs=("sm_86",)), "sm_90") == keys[-1]


def test_what_is_compiled_is_logged_with_why_and_how_long(folder, caplog):
    variant = make_variant(folder)
    with caplog.at_level("DEBUG", logger="flashgen"):
        for _ in range(2):
            obtain.obtain(variant, "sm_90")
    compiled, found = (record.getMessage() for record in caplog.records)
    root = fcache.default().root
    assert re.fullmatch(rf"compiled {variant} for sm_90 in \d+\.\d\d s; it was not in {root}", compiled)
    assert found == f"{variant} for sm_90 came from {root}"


def test_a_damaged_entry_is_built_again(folder):
    variant = make_variant(folder)
    compiled, cached = obtain.obtain(variant, "sm_90")
    assert not cached
    (entry,) = fcache.default().root.rglob(obtain.cache_key(variant, "sm_90"))
    entry.write_bytes(entry.read_bytes()[:-100])
    with pytest.warns(fcache.CacheWarning, match="damaged"):
        again, cached = obtain.obtain(variant, "sm_90")
    assert not cached
    assert again.cubin == compiled.cubin
    assert obtain.obtain(variant, "sm_90") == (again, True)


def test_what_needs_one_architecture_is_compiled_for_it_whatever_the_spec_lists(folder):
    hopper = Device(0, "sm_90", (9, 0), 1, 1, 1, 1, 1, "GPU")
    variant = make_variant(folder, min_arch="sm_90a", archs=("sm_90",))
    assert obtain.arch_for(variant, hopper, (80, 90)) == "sm_90a"


@pytest.mark.parametrize(
    ("arch", "archs", "known", "expected"),
    [
        ("sm_90", ("sm_80", "sm_90"), (80, 90), "sm_90"),
        ("sm_90", ("sm_90a",), (80, 90), "sm_90a"),
        ("sm_89", ("sm_80",), (80, 89, 90), "sm_89"),
        ("sm_100", ("sm_90a", "sm_100f"), (90, 100), "sm_100f"),
        ("sm_130", ("sm_90",), (80, 90, 120), "compute_120"),
        ("sm_103", ("sm_90",), (80, 90, 100, 120), "compute_100"),
    ],
)
def test_target_architecture(folder, arch, archs, known, expected):
    gpu = Device(0, arch, (int(arch[3:-1]), int(arch[-1])), 1, 1, 1, 1, 1, "GPU")
    assert obtain.arch_for(make_variant(folder, archs=archs), gpu, known) == expected


@pytest.mark.parametrize(
    ("arch", "min_arch"),
    [("sm_75", "sm_80"), ("sm_95", "sm_91"), ("sm_100", "sm_90a"), ("sm_110", "sm_100f")],
)
def test_a_device_that_nothing_can_be_compiled_for(folder, arch, min_arch):
    gpu = Device(0, arch, (0, 0), 1, 1, 1, 1, 1, "Old")
    with pytest.raises(DeviceTypeNotSupported, match=rf"GPU 0 \(Old, {arch}\)"):
        obtain.arch_for(make_variant(folder, min_arch=min_arch), gpu, (80, 90, 100))


def test_a_newer_device_gets_ptx_and_the_drivers_word_on_resources(folder, driver):
    gpu = Device(0, "sm_199", (19, 9), 1, 100_000, 1, 1, 1, "Next")
    loaded = kernel.load(make_variant(folder), gpu)
    assert loaded.compiled.is_ptx
    assert driver.images[0].endswith(b"\0")
    assert b".target sm_" in driver.images[0]
    from cupy_backends.cuda.api.driver import CU_FUNC_ATTRIBUTE_NUM_REGS

    assert loaded.compiled.registers == 100 + CU_FUNC_ATTRIBUTE_NUM_REGS
    assert loaded.compiled.spill_stores is None


def test_too_much_shared_memory_is_refused_before_compiling(folder, driver):
    with pytest.raises(DeviceTypeNotSupported, match="needs 300000 bytes of shared memory a block and GPU 0"):
        kernel.load(make_variant(folder, smem=300_000), GPU)
    assert not fcache.default().root.exists()
    assert driver.images == []


@pytest.mark.parametrize(
    ("status", "advice"),
    [(900, "before the capture begins"), (222, "update it, or install"), (2, "CUDA_ERROR_OUT_OF_MEMORY")],
)
def test_a_failed_load_says_what_to_do(folder, driver, monkeypatch, status, advice):
    from cupy_backends.cuda.api import driver as real

    names = {900: "STREAM_CAPTURE_UNSUPPORTED", 222: "UNSUPPORTED_PTX_VERSION", 2: "OUT_OF_MEMORY"}

    class CUDADriverError(RuntimeError):
        pass

    monkeypatch.setattr(real, "CUDADriverError", CUDADriverError)
    driver.error = f"CUDA_ERROR_{names[status]}: no"
    with pytest.raises(InternalError, match=advice):
        kernel.load(make_variant(folder), GPU)
