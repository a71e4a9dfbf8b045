"""FLASHGEN_COMPILE and ``compiling``: what a call does that has to compile a kernel."""

from __future__ import annotations

import threading
import warnings

import pytest

import flashgen
from fake_gpu import H200
from flashgen import errors
from flashgen.runtime import device, kernel
from flashgen.toolchain import cache as caches
from flashgen.toolchain import obtain, policy


@pytest.fixture
def variant(tmp_path, monkeypatch):
    """A kernel that no cache has."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(policy.VARIABLE, raising=False)
    monkeypatch.setattr(caches, "_default", None, raising=False)
    return flashgen.explain((1, 64, 2, 32), arch="sm_90", algorithm="naive").variant


def load(variant):
    """What a call does to have its kernel."""
    return kernel._recalled(variant, H200) or kernel._obtained(variant, H200)


def test_an_error_comes_before_anything_is_compiled(variant, monkeypatch):
    compiled = []
    compile_cubin = obtain.compiler.compile_cubin
    monkeypatch.setattr(
        obtain.compiler, "compile_cubin", lambda *a: compiled.append(a[1]) or compile_cubin(*a)
    )
    monkeypatch.setenv(policy.VARIABLE, "error")
    with pytest.raises(errors.UnexpectedCompile, match=rf"a call compiles {variant.name} for sm_90a?, which"):
        load(variant)
    assert not compiled
    told = pytest.warns(errors.CompileWarning, match=r"beforehand, with flashgen\.warmup")
    with told, flashgen.compiling("warn"):
        load(variant)
    assert len(compiled) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(variant)  # it is in the cache now


def test_the_command_line_compiles_as_it_is_told(variant, monkeypatch):
    monkeypatch.setenv(policy.VARIABLE, "error")
    assert not obtain.obtain(variant, "sm_90")[1]


def test_warmup_is_allowed_to_compile(fake_gpu, monkeypatch):
    modes = []
    monkeypatch.setenv(policy.VARIABLE, "error")
    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr(
        kernel, "load", lambda variant, gpu: modes.append(policy.mode()) or fake_gpu.load(variant, gpu)
    )
    flashgen.warmup([{"q": (1, 64, 2, 64)}])
    assert set(modes) == {"allow"}
    assert policy.mode() == "error"


def test_the_innermost_mode_holds_in_all_threads(monkeypatch):
    monkeypatch.setenv(policy.VARIABLE, "error")
    seen = []
    with flashgen.compiling("warn"), flashgen.compiling("allow"):
        thread = threading.Thread(target=lambda: seen.append(policy.mode()))
        thread.start()
        thread.join()
    assert seen == ["allow"]
    outer, inner = flashgen.compiling("warn"), flashgen.compiling("allow")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # of another thread
    assert policy.mode() == "allow"
    inner.__exit__(None, None, None)
    assert policy.mode() == "error"


def test_another_mode_is_refused(monkeypatch):
    with pytest.raises(errors.BadParam, match=r"mode is 'loud'; allowed are 'allow', 'warn', 'error'"):
        flashgen.compiling("loud")
    monkeypatch.setenv(policy.VARIABLE, "loud")
    with pytest.raises(errors.BadParam, match="FLASHGEN_COMPILE is 'loud'; allowed are"):
        policy.mode()
