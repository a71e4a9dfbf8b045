"""The road to the simulator: compiler, cache, parameters, backend, figures; test_faults has what it finds."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashgen
from flashgen.call.backends import backend_for
from flashgen.errors import CompileError
from flashgen.families.arch import KNOWN_ARCHS
from flashgen.host import paths
from flashgen.operators.reference import judge
from flashgen.simulator import hardware, hostcompiler, library
from flashgen.simulator.example import Shape, make, run
from flashgen.simulator.execute import CHECKS, SimulatedGrid, _runs
from flashgen.simulator.figures import masked_tiles
from flashgen.source.render import render
from flashgen.toolchain.cache import CubinCache
from named import by_name
from simulator.covering import VARIANTS

CAUSAL = VARIANTS["flash_fwd_hdim64_fp16_causal_m64_sm80"]
PLAIN = VARIANTS["flash_fwd_hdim64_fp16_m64_sm80"]


@pytest.fixture
def without_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def attended(backend=None, heads_kv=4, dtype=np.float16, shape=(2, 70, 4, 40), **options):
    """A call of ``attention`` on NumPy arrays: its results, and what they must be near to."""
    rng = np.random.default_rng()
    kv_shape = (*shape[:-3], 90, heads_kv, shape[-1])
    q, k, v = (rng.standard_normal(size, np.float32).astype(dtype) for size in (shape, kv_shape, kv_shape))
    out, lse = flashgen.attention(q, k, v, backend=backend, return_lse=True, **options)
    plan = flashgen.plan(q, k, v, backend="cpu", return_lse=True, **options)
    return judge(plan.problem, by_name(plan.problem, q, k, v, options.get("mask"), out, lse))


# The compiler.


def test_what_is_compiled_is_the_generated_file_byte_for_byte(compiler, tmp_path, monkeypatch):
    seen = {}
    build = hostcompiler.build

    def watched(compiler, options, inputs, output, name):
        for option in options:
            if match := re.fullmatch(r'-DFLASHGEN_SOURCE="(.*)"', option):
                seen[name] = hashlib.sha256(open(match[1], "rb").read()).hexdigest()  # noqa: PTH123, SIM115
        build(compiler, options, inputs, output, name)

    monkeypatch.setattr(hostcompiler, "build", watched)
    committed = paths.generated_dir() / PLAIN.filename
    loaded = library.load_in(tmp_path, render(PLAIN), PLAIN.name)
    expected = hashlib.sha256(committed.read_bytes()).hexdigest()
    assert seen == {PLAIN.name: expected}
    assert loaded.digest == expected
    assert (tmp_path / PLAIN.filename).read_bytes() == committed.read_bytes()


def test_a_kernel_in_the_cache_is_not_compiled_again(compiler, tmp_path, monkeypatch):
    source, cache = render(PLAIN), CubinCache(tmp_path)
    monkeypatch.setattr(library, "_loaded", {})  # whatever ran before in this process
    library.load(source, PLAIN.name, cache)
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(hostcompiler, "build", None)
    again = library.load(source, PLAIN.name, cache)
    assert again.digest == hashlib.sha256(source.encode()).hexdigest()
    with pytest.raises(TypeError):
        library.load(source + "// changed\n", PLAIN.name, cache)


def test_without_a_compiler_the_error_says_what_to_install_and_numpy_goes_on(without_compiler):
    with pytest.raises(flashgen.NoHostCompilerError, match=r"c\+\+, g\+\+, clang\+\+.*install"):
        attended("simulator")
    assert "install" in hostcompiler.why_unavailable()
    assert attended().ok


def test_cxx_names_the_compiler(monkeypatch, compiler):
    monkeypatch.setenv("CXX", f"{compiler.command[0]} -DUNUSED")
    assert hostcompiler.find().command == (compiler.command[0], "-DUNUSED")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(flashgen.NoHostCompilerError, match="CXX is 'no-such-compiler'"):
        hostcompiler.find()


def test_source_that_does_not_compile_is_shown_with_its_line(compiler):
    source = render(PLAIN).replace("const int warp =", "const int warp = nonsense +", 1)
    line = source[: source.index("nonsense")].count("\n") + 1
    with pytest.raises(flashgen.CompileError, match=rf"{PLAIN.name}.cu:{line}:.*nonsense"):
        library.load(source, PLAIN.name)


def test_source_without_the_kernel_is_refused(compiler):
    with pytest.raises(flashgen.InternalError, match="no __global__ function other"):
        library.load(render(PLAIN), "other")


def test_parameters_of_another_size_are_refused(compiler):
    loaded = library.load(render(PLAIN), PLAIN.name)
    with pytest.raises(flashgen.InternalError, match=f"{loaded.params_bytes} bytes, and 3 were given"):
        SimulatedGrid(loaded, b"abc", (1, 1, 1), (128, 1, 1), 0, [])


# The backend.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (20, 3), "heads_kv": 2},
        {"mask": np.arange(90) % 3 == 1},
        {"causal": True, "heads_kv": 1, "shape": (70, 4, 40)},
        {"dtype": np.float32, "mask_type": "causal_top_left"},
    ],
    ids=str,
)
def test_attention_runs_generated_cuda(options, compiler):
    assert attended("simulator", **options).ok


def test_bfloat16(compiler):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert attended("simulator", dtype=ml_dtypes.bfloat16, causal=True).ok


def test_the_variable_chooses_the_backend_and_the_architecture(compiler, monkeypatch):
    monkeypatch.setenv("FLASHGEN_BACKEND", "simulator")
    q = np.ones((1, 4096, 16, 128), np.float16)
    assert flashgen.plan(q, q, q).variant.target == "sm80"
    monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_86")
    plan = flashgen.plan(q, q, q)
    assert plan.variant.target == "sm86"
    assert plan.source == render(plan.variant)
    monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_75")
    with pytest.raises(flashgen.BadParam, match=r"sm_75.*sm_80, sm_86"):
        flashgen.plan(q, q, q)


def test_on_a_pretended_hopper_attention_takes_a_hopper_kernel(compiler, monkeypatch):
    monkeypatch.setenv("FLASHGEN_BACKEND", "simulator")
    monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_90")
    q = np.ones((1, 70, 4, 64), np.float16)
    assert flashgen.plan(q, q, q).variant.target == "sm90"
    assert attended(causal=True, shape=(2, 70, 4, 64)).ok
    assert attended(causal=True, shape=(2, 70, 4, 40), heads_kv=2).ok


def test_arrays_on_a_gpu_are_refused():
    with pytest.raises(flashgen.DeviceTypeNotSupported, match="'simulator' cannot compute arrays on GPU 0"):
        backend_for(0, "simulator")
    assert backend_for(None, "simulator") == "simulator"


def test_a_plan_is_called_again_and_writes_into_what_it_is_given(compiler):
    rng = np.random.default_rng()
    q, k, v = rng.standard_normal((3, 1, 66, 2, 32)).astype(np.float16)
    plan = flashgen.plan(q, k, v, backend="simulator")
    first = plan(q, k, v)
    out = np.full_like(q, np.nan)
    assert plan(q, k, v, out=out) is out
    assert np.array_equal(first, out)
    out.flags.writeable = False
    with pytest.raises(flashgen.BadParam, match="out is read-only"):
        plan(q, k, v, out=out)


def test_a_small_problem_is_a_matter_of_a_second(compiler):
    variant = VARIANTS["flash_fwd_hdim64_fp16_causal_sm80"]
    loaded, example = library.load(render(variant), variant.name), make(variant, Shape(256, 256), 0)
    begin = time.process_time()
    run(loaded, variant, example, threads=1)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", True),
        ("c++ (Debian 12.2.0-14+deb12u1) 12.2.0", False),
        ("Debian clang version 14.0.6", True),
        ("clang version 18.1.3 (1ubuntu1)", False),
        ("my compiler", False),
    ],
)
def test_only_an_old_compiler_is_blamed_for_a_kernel_that_does_not_compile(version, old, tmp_path):
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'kernel.cu:3: error: no such thing' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(CompileError, match="kernel does not compile for the simulator") as caught:
        hostcompiler.build(
            hostcompiler.HostCompiler((str(script),), version), (), (), tmp_path / "o", "kernel"
        )
    assert ("it needs GCC 12 or Clang 16" in str(caught.value)) == old
    assert "kernel.cu:3: error: no such thing" in str(caught.value)


# Memory and figures.


@given(
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.lists(st.integers(-9, 9), min_size=3, max_size=3),
    st.integers(0, 5),
)
def test_runs_are_the_bytes_of_all_rows(shape, strides, length):
    rows = [np.dot(index, strides) for index in np.ndindex(*shape)]
    touched = {row + at for row in rows for at in range(length)}
    runs = _runs(shape, strides, length)
    assert [at for start, stop in runs for at in range(start, stop)] == sorted(touched)
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs))


def test_counters_are_those_of_the_algorithm(compiler):
    rows, keys, blocks = 64, 64, 3
    example = make(PLAIN, Shape(rows, blocks * keys, heads=1), 0)
    report = run(library.load(render(PLAIN), PLAIN.name), PLAIN, example)
    counters = report.counters
    products = 2 * (rows // 16) * (blocks * keys // 8) * (64 // 16)
    assert report.mma == counters["mma_m16n8k16_f16"] == products
    assert counters["blocks"] == 1
    assert counters["global_bytes_read"] == (rows + 2 * blocks * keys) * 64 * 2
    assert counters["global_bytes_written"] == rows * 64 * 2 + rows * 4
    assert counters["cp_async"] == counters["global_bytes_read"] / 16 / 32
    written = [access for access in report.accesses if access.kind == "global store"]
    assert sum(access.bytes for access in written) == counters["global_bytes_written"]
    source = render(PLAIN).splitlines()
    assert all("store_global" in source[access.line - 1] for access in written)


@pytest.mark.parametrize(
    "name",
    [
        "flash_fwd_hdim64_fp16_causal_m64_sm80",
        "flash_fwd_hdim128_bf16_m64_packgqa_sm80",
        "flash_fwd_hdim96_fp16_causal_sm80",
        "flash_fwd_hdim64_fp32_m64_sm80",
        "flash_fwd_hdim80_fp16_m64_sm80",
        "flash_fwd_hdim112_bf16_causal_sm80",
        "flash_fwd_hdim160_fp16_sm80",
    ],
)
def test_swizzled_tiles_are_read_without_bank_conflicts(name, compiler):
    variant = VARIANTS[name]
    report = run(library.load(render(variant), name), variant, make(variant, Shape(100, 200), 0))
    found = {access.kind: access for access in report.accesses if access.kind == "ldmatrix"}
    assert found
    assert [access for access in report.accesses if access.kind == "ldmatrix" and access.conflicts] == []


def test_a_causal_kernel_skips_every_masked_tile(compiler):
    keys, length = 64, 512
    example = make(CAUSAL, Shape(length, length, heads=1), 0)
    report = run(library.load(render(CAUSAL), CAUSAL.name), CAUSAL, example)
    tiles = masked_tiles(example.problem, CAUSAL, None, report)
    blocks = length // keys
    assert tiles.total == 4 * blocks**2
    assert tiles.masked == 4 * blocks * (blocks - 1) / 2
    assert tiles.skipped_share == 1
    assert tiles.multiplied == tiles.total - tiles.masked


def test_halves_of_a_tile_skip_what_only_the_other_half_sees(compiler):
    keys, length = 64, 512
    variant = VARIANTS["flash_fwd_hdim64_fp16_local_sm80"]
    example = make(variant, Shape(length, length, heads=1, window=(127, 0)), 0)
    report = run(library.load(render(variant), variant.name), variant, example)
    tiles = masked_tiles(example.problem, variant, None, report)
    blocks = length // keys
    # Each warp has 16 rows in each half; 64 rows see their own block and two before it.
    assert tiles.total == 4 * blocks**2
    assert tiles.multiplied == tiles.total - tiles.masked == 4 * (3 * blocks - 3)


@pytest.mark.parametrize(
    ("name", "exactly"),
    [
        ("flash_fwd_hdim128_fp16_causal_sm90", True),
        ("flash_fwd_hdim64_fp16_local_sm90", True),
        ("flash_fwd_hdim64_fp16_dense_sm90", False),
        ("flash_fwd_hdim64_fp16_causal_sm80", True),
        ("flash_fwd_hdim64_fp16_local_sm80", False),
        ("flash_fwd_hdim64_fp16_dense_sm80", True),
    ],
)
@pytest.mark.parametrize("lengths", [(1, 128), (65, 200), (128, 128), (300, 60)])
def test_no_more_than_what_is_masked_is_skipped(name, exactly, lengths, compiler):
    """Also in the parts of a tile that have no row; kernels that skip each masked tile are known to."""
    variant = VARIANTS[name]
    example = make(variant, Shape(*lengths), 0)
    report = run(library.load(render(variant), name), variant, example)
    tiles = masked_tiles(example.problem, variant, example.mask, report)
    assert 0 <= tiles.multiplied <= tiles.total
    if tiles.masked:
        assert 0 <= tiles.skipped_share <= 1
        assert not exactly or tiles.skipped_share == 1
    else:
        assert tiles.multiplied == tiles.total


def test_masked_tiles_of_folded_heads():
    variant = VARIANTS["flash_fwd_hdim64_fp16_causal_m64_packgqa_sm80"]
    example = make(variant, Shape(16, 128, heads=8, kv_heads=1), 0)
    nothing = dataclasses.replace(example.problem, diagonal_offset=-16)
    report = type("Report", (), {"mma": 0})()
    assert masked_tiles(nothing, variant, None, report).masked == 2 * 4 * 2
    # Query 0 sees the first key block only, query 15 both.
    some = dataclasses.replace(example.problem, diagonal_offset=56)
    assert masked_tiles(some, variant, None, report).masked == 4


def test_every_check_has_a_name_of_its_own():
    assert len(set(CHECKS)) == len(CHECKS) == 19


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_a_pretended_device_is_one_that_kernels_run_on(arch):
    device = hardware.pretend(arch)
    assert device.arch == "sm_{}{}".format(*device.compute_capability)
    assert any(v.smem_bytes <= device.smem_per_block <= device.smem_per_sm for v in VARIANTS.values())


# What an example makes of its results.


def test_an_example_is_judged_by_its_own_arrays(fresh_seed):
    example = make(CAUSAL, Shape(9, 12, heads=2), fresh_seed)
    q, k, v = (x.astype(np.float64) for x in (example.q, example.k, example.v))
    for head in range(2):
        for i in range(9):
            scores = k[0, : i + 4, head] @ q[0, i, head] / 8
            weights = np.exp(scores)
            example.out[0, i, head] = weights @ v[0, : i + 4, head] / weights.sum()
            example.lse[0, head, i] = np.log(weights.sum())
    assert example.judge().ok
    example.lse[0, 1, 3] += 1e-4
    assert not example.judge().ok


@pytest.mark.parametrize("place", ["out", "lse"])
def test_an_example_refuses_what_was_never_written(place, fresh_seed):
    example = make(CAUSAL, Shape(9, 12, heads=2), fresh_seed)
    example.out[...], example.lse[...] = 0, 0
    getattr(example, place)[0, 1] = np.nan
    verdict = example.judge()
    assert not verdict.ok
    assert getattr(verdict, place).share == np.inf
