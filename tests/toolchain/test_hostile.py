"""Files and folders that are not what they should be: typed errors, soon, in little memory."""

from __future__ import annotations

import functools
import json
import os
import resource
import warnings
import zipfile

import pytest
from click.testing import CliRunner

from flashgen import __version__
from flashgen.errors import (
    BadParam,
    CacheWarning,
    CompileError,
    InternalError,
    NoHostCompilerError,
    SpecError,
    TunedWarning,
)
from flashgen.families.load import load_spec
from flashgen.families.scores import read_scores
from flashgen.families.tuned import find, path_for
from flashgen.host import paths
from flashgen.simulator import library
from flashgen.toolchain import cache as caches
from flashgen.toolchain import disassemble, obtain
from flashgen.toolchain.bundle import MAX_ENTRY, MAX_MANIFEST, Bundle
from flashgen.toolchain.cache import CacheReport, CubinCache
from flashgen.toolchain.compile import Compiled

KEY = "ab" * 32
LISTED = {"kernels": [{"variant": "v", "arch": "sm_90", "key": KEY}], "specs": []}
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


def bundle(path, entries=(), **manifest):
    manifest = {"format": 2, "flashgen": __version__, "compiler": "x", "kernels": [], "specs": []} | manifest
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", json.dumps(manifest))
        for key, data in entries:
            file.writestr(f"entries/{key}", data)
    return path


@pytest.fixture
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KB


def understated(path):
    """The zip says of each large member that it has few bytes."""
    data = path.read_bytes()
    sizes = {info.file_size for info in zipfile.ZipFile(path).infolist() if info.file_size > MAX_MANIFEST}
    for size in sizes:
        data = data.replace(size.to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("honest", [True, False])
def test_an_entry_of_a_bundle_that_unpacks_to_gigabytes(honest, tmp_path, little_memory):
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr(
            "manifest.json", json.dumps({"format": 2, "flashgen": __version__} | {"compiler": "x"} | LISTED)
        )
        with file.open(f"entries/{KEY}", "w") as member:
            for _ in range(16):
                member.write(bytes(1 << 26))
    if not honest:
        understated(path)
    with pytest.raises(BadParam, match=r"damaged"):
        Bundle(path).get(KEY)
    with pytest.raises(BadParam, match=r"damaged"):
        Bundle(path).verify()
    assert MAX_ENTRY < 1 << 30


def test_a_manifest_that_is_too_large_or_deep_or_of_other_types(tmp_path, little_memory):
    with pytest.raises(BadParam, match=r"is not a bundle, or is damaged \(manifest.json has more than"):
        Bundle(bundle(tmp_path / "a.zip", more="x" * (MAX_MANIFEST + 1)))
    for wrong in (
        {"compiler": 3},
        {"kernels": 3},
        {"kernels": [3]},
        {"kernels": [{"variant": 1, "arch": "sm_90", "key": KEY}]},
        {"kernels": [{"variant": "v", "arch": None, "key": KEY}]},
        {"specs": [{"spec": 1, "key": KEY}]},
    ):
        with pytest.raises(BadParam, match="is not a bundle, or is damaged"):
            Bundle(bundle(tmp_path / "b.zip", **wrong))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as file:
        file.writestr("manifest.json", "[" * 100_000)
    with pytest.raises(BadParam, match="is not a bundle, or is damaged"):
        Bundle(tmp_path / "c.zip")


@needs_pipes
def test_pipes_and_devices_are_no_files(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, paths.Path("/dev/zero")):
        with pytest.raises(OSError, match="a pipe or a device, not a file"):
            paths.read_file(path, 1000)
        with pytest.raises(BadParam, match="a pipe or a device, not a file"):
            Bundle(path)
        with pytest.raises(SpecError, match="a pipe or a device, not a file"):
            load_spec(path)
    with pytest.raises(IsADirectoryError):
        paths.read_file(tmp_path, 1000)


@needs_pipes
@pytest.mark.parametrize("device", [False, True])
def test_a_pipe_or_a_device_as_entry_of_the_cache(device, tmp_path):
    cache = CubinCache(tmp_path)
    cache._folder.try_to_write()
    path = cache._folder.path(KEY)
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/zero") if device else os.mkfifo(path)
    with pytest.warns(CacheWarning, match="cannot read the kernel cache"):
        assert cache.get_or_build(KEY, lambda: b"built") == b"built"
    path.unlink()
    os.mkfifo(path)
    assert cache.verify() == CacheReport(0, ())  # it is not the cache's, and stays
    assert path.is_fifo()
    assert cache.clear(lambda payload: True).removed == 0


def sparse(path, size=1 << 40):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
    return path


def test_files_of_a_terabyte_are_not_read(tmp_path, monkeypatch, little_memory):
    cache = CubinCache(tmp_path / "cache")
    cache.put(KEY, b"x")
    entry = sparse(cache._folder.path(KEY))
    with pytest.warns(CacheWarning, match=r"it has 1,099,511,627,776 bytes; at most 67,108,864 are read"):
        assert cache.get(KEY) is None
    ((path, why),) = cache.verify().unreadable
    assert path == entry
    assert "at most 67,108,864" in why
    assert not cache.keeps(KEY)
    assert cache.get_or_build(KEY, lambda: b"built") == b"built"
    assert CubinCache(cache.root).get(KEY) == b"built"
    with pytest.raises(
        BadParam, match=r"big\.zip is not a bundle, or is damaged .*at most 1,073,741,824 are read"
    ):
        Bundle(sparse(tmp_path / "big.zip"))
    for name in ("x.yaml", "scores.yaml"):
        path = sparse(tmp_path / "specs" / name)
        read = functools.partial(read_scores, keywords=()) if name == "scores.yaml" else load_spec
        with pytest.raises(SpecError, match=rf"{name}: cannot be read: .*at most 1,000,000 are read"):
            read(path)
    small = tmp_path / "specs" / "small.yaml"
    small.write_text("extends: x\n")
    with pytest.raises(SpecError, match=r"small.yaml:1: extends: no spec x in"):
        load_spec(small)
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / "tuned"))
    sparse(path_for("x", "A GPU"))
    with pytest.warns(TunedWarning, match="at most 1,000,000 are read"):
        assert find("x", "A GPU") is None


def test_an_entry_that_is_too_large_to_be_read_is_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("flashgen.toolchain.cachefolder.MAX_BYTES", 1000)
    cache = CubinCache(tmp_path)
    with pytest.warns(CacheWarning, match=r"cannot write the kernel cache .*at most 1,000 are kept"):
        cache.put(KEY, bytes(1000))
    assert cache.get(KEY) == bytes(1000)
    assert cache.info().entries == 0


GARBAGE = {
    "empty": b"",
    "no json": b"\x04\0\0\0abcd",
    "a list": b"\x02\0\0\0[]",
    "no utf-8": b"\x02\0\0\0\xff\xff",
    "deep": (100_000).to_bytes(4, "little") + b"[" * 100_000,
    "of other types": None,
    "another kernel": None,
}


def compiled(name, **changed):
    made = Compiled(name, "sm_80", b"\x7fELF", "", 8, 0, 0, 0, 0, 0.5)
    return made._replace(**changed)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_key_of_a_kernel_is_built_anew(garbage, tmp_path, monkeypatch, tiny_variants):
    variant, cache = tiny_variants[0], CubinCache(tmp_path)
    payload = {
        "of other types": compiled(variant.name, registers="many").to_bytes(),
        "another kernel": compiled("another").to_bytes(),
    }.get(garbage, GARBAGE[garbage])
    monkeypatch.setattr(caches, "default", lambda: cache)
    monkeypatch.setattr(obtain, "cache_key", lambda *_: KEY)
    monkeypatch.setattr(obtain.compiler, "installed_version", lambda: "nvrtc 1")
    monkeypatch.setattr(obtain.compiler, "compile_cubin", lambda source, name, *_: compiled(name))
    cache.put(KEY, payload)
    with pytest.warns(CacheWarning, match=f"is not {variant.name} .*built again"):
        assert obtain.recall(variant, "sm_80") is None
    with pytest.warns(CacheWarning, match=f"is not {variant.name} .*built again"):
        made, cached = obtain.obtain(variant, "sm_80")
    assert made == compiled(variant.name)
    assert not cached
    assert obtain.recall(variant, "sm_80") == made
    assert obtain.obtain(variant, "sm_80") == (made, True)


@pytest.mark.parametrize("garbage", ["the kernel", "the engine", "both"])
def test_garbage_under_the_keys_of_the_simulator_is_built_anew(garbage, tmp_path, monkeypatch):
    """The simulator loads it as a library, and links it."""
    source = 'extern "C" __global__ void kernel(const Params params) {}'

    def build(compiler, options, inputs, output, name):
        if output.suffix == ".so" and not inputs[1].read_bytes().startswith(b"\x7fELF"):
            raise CompileError("file not recognized")
        output.write_bytes(b"\x7fELF " + name.encode())

    def opened(path, name, digest):
        if path.read_bytes() != b"\x7fELF kernel":
            raise InternalError(f"{name} cannot be loaded")
        return path.read_bytes()

    compiler = library.hostcompiler.HostCompiler(("c++",), "1")
    monkeypatch.setattr(library.hostcompiler, "find", lambda: compiler)
    monkeypatch.setattr(library.hostcompiler, "build", build)
    monkeypatch.setattr(library, "Library", opened)
    cache = CubinCache(tmp_path)

    def load():
        monkeypatch.setattr(library, "_loaded", {})
        return library.load(source, "kernel", cache)

    expected = load()
    keys = [file.name for file in cache._folder.entries()]
    kernel, engine = sorted(keys, key=lambda key: cache.get(key) != expected)
    if garbage == "the engine":
        cache._folder.remove(kernel)
    else:
        cache.put(kernel, b"garbage")
    if garbage != "the kernel":
        cache.put(engine, b"garbage")
    with pytest.warns(
        CacheWarning, match=r"is not (kernel|the simulator's engine) \(.*\); it is built again"
    ):
        assert load() == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load() == expected
    assert cache.get(engine).startswith(b"\x7fELF")


def test_a_library_of_something_else_is_no_library_of_the_simulator():
    import _ctypes

    with pytest.raises(InternalError, match="k can be loaded but is not a library of the simulator"):
        library.Library(paths.Path(_ctypes.__file__), "k", "digest")


def doctor():
    from flashgen.tools.cli.app import main

    monkeypatched = CliRunner().invoke(main, ["doctor", "--json"])
    return json.loads(monkeypatched.stdout)


def test_no_temporary_folder(monkeypatch):
    import tempfile

    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "_get_default_tempdir", none)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with (
        pytest.raises(InternalError, match=r"no temporary folder can be made: .*TMPDIR names another folder"),
        paths.temporary_folder(),
    ):
        pass
    with pytest.raises(InternalError, match="no temporary folder can be made"):
        disassemble.sass(b"\x7fELF")
    assert any("no temporary folder can be made" in each for each in doctor()["problems"])


def test_a_full_temporary_folder(monkeypatch):
    import errno

    full = pytest.raises(InternalError, match=r"the temporary folder .* cannot be written: No space left")
    with full, paths.temporary_folder():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError), paths.temporary_folder() as folder:
        (folder / "none").read_bytes()
    assert not folder.exists()


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="this system does not say how a folder is mounted")
def test_a_temporary_folder_that_nothing_runs_in(monkeypatch):
    class Mounted:
        f_flag = os.ST_NOEXEC

    assert paths.temporary_problem() == ""
    monkeypatch.setattr(os, "statvfs", lambda path: Mounted)
    assert "is mounted noexec: no library in it loads; TMPDIR names another" in paths.temporary_problem()


@pytest.mark.parametrize("command", ["g++ 'unbalanced", 'c++ "', "g++ \\"])
def test_a_compiler_that_cannot_be_parsed(command, monkeypatch):
    from flashgen.simulator import hostcompiler

    monkeypatch.setenv("CXX", command)
    with pytest.raises(NoHostCompilerError, match=r"CXX is .*which is not a command: No "):
        hostcompiler.find()
    assert "which is not a command" in hostcompiler.why_unavailable()


def test_a_disassembler_that_does_not_end(tmp_path, monkeypatch):
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(disassemble, "_TIMEOUT", 0.2)
    monkeypatch.setattr(disassemble, "_installed", lambda: iter([tool]))
    with pytest.raises(InternalError, match=r"nvdisasm fails: .*timed out"):
        disassemble.sass(b"\x7fELF")


def test_a_driver_tool_that_does_not_end(tmp_path, monkeypatch):
    from flashgen.tools.bench import environment
    from flashgen.tools.cli import doctor as examined

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for module in (environment, examined):
        monkeypatch.setattr(module, "_TIMEOUT", 0.2)
    assert environment._output("nvidia-smi") is None
    report = examined.Report()
    assert examined._gpus(report) == []
    assert "nvidia-smi fails: " in report.problems[0]


def test_every_program_that_is_started_has_a_time_limit():
    import ast

    calls = 0
    for path in paths.Path(paths.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
                calls += 1
                assert "timeout" in {word.arg for word in node.keywords}, f"{path}:{node.lineno}"
    assert calls >= 5


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GB", "0"])
def test_a_size_of_the_cache_that_is_none(size, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", size)
    with pytest.raises(BadParam, match="expected a size"):
        caches.bound()
