import errno
import json
import os
import tempfile

import pytest

from flashgen.toolchain import private
from flashgen.toolchain.cache import CubinCache

KEYS = [f"{n:064x}" for n in range(3)]


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A cache of three entries."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    cache = CubinCache()
    for key in KEYS:
        cache.put(key, b"machine code")
    return cache


@pytest.fixture
def read_only(filled, monkeypatch):
    """The same, as on a file system that is mounted read-only; temporary folders are on another one."""
    temporary = f"{tempfile.gettempdir()}/flashgen-"

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    def outside(does):
        def function(path, *args, **options):
            return (does if str(path).startswith(temporary) else refuse)(path, *args, **options)

        return function

    for name in ("mkdir", "unlink", "rename"):
        monkeypatch.setattr(os, name, outside(getattr(os, name)))
    monkeypatch.setattr(private, "write", refuse)
    return filled


def test_info(filled, flashgen):
    found = json.loads(flashgen("cache", "info", "--json").stdout)
    assert (found["root"], found["entries"], found["problem"]) == (str(filled.root), 3, "")
    text = flashgen("cache", "info").stdout
    assert str(filled.root) in text
    assert "writable  yes" in text


def test_an_unwritable_cache_is_a_failure(tmp_path, flashgen):
    (tmp_path / "file").write_text("")
    result = flashgen("cache", "info", FLASHGEN_CACHE_DIR=str(tmp_path / "file"))
    assert result.exit_code == 1
    assert "no: " in result.stdout


def test_verify_finds_and_removes_damage(filled, flashgen):
    sound = flashgen("cache", "verify")
    assert sound.exit_code == 0
    damaged = next(path for path in filled.root.rglob(KEYS[1]) if path.is_file())
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    found = flashgen("cache", "verify", "--json")
    assert found.exit_code == 1
    report = {"intact": 2, "damaged": [str(damaged)], "left": [], "unreadable": []}
    assert json.loads(found.stdout) == report
    assert flashgen("cache", "verify").exit_code == 0


def test_verify_leaves_what_it_cannot_read(filled, flashgen, monkeypatch):
    closed = next(path for path in filled.root.rglob(KEYS[1]) if path.is_file())
    read = private.read

    def refused(name, most, folder):
        if name == closed.name:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return read(name, most, folder)

    monkeypatch.setattr(private, "read", refused)
    found = flashgen("cache", "verify")
    assert found.exit_code == 1
    assert f"not used (Permission denied): {closed}" in found.stdout
    assert closed.is_file()


def test_a_cache_that_others_may_write_is_a_failure_of_each_command(filled, flashgen):
    filled.root.chmod(0o777)
    said = "every user may write to it (mode 777); make it yours alone"
    for command in (["info"], ["verify"], ["clear", "--yes"]):
        result = flashgen("cache", *command)
        assert result.exit_code == 1
        assert said in result.stdout + result.stderr
    doctor = flashgen("doctor")
    assert doctor.exit_code == 1
    assert said in " ".join(doctor.stdout.split())
    trusted = flashgen("cache", "verify", FLASHGEN_TRUST=str(filled.root))
    assert (trusted.exit_code, trusted.stdout) == (0, "3 entries are intact, 0 were damaged\n")


def test_clear_asks_first(filled, flashgen):
    assert flashgen("cache", "clear").exit_code == 1
    unanswered = flashgen("cache", "clear", "--json")
    assert (unanswered.exit_code, json.loads(unanswered.stdout)["kind"]) == (1, "Abort")
    assert filled.info().entries == 3
    assert json.loads(flashgen("cache", "clear", "--yes", "--json").stdout) == {
        "removed": 3,
        "left": 0,
        "problem": "",
    }
    assert filled.info().entries == 0


def test_a_read_only_cache_is_used_and_said_to_be(read_only, flashgen):
    result = flashgen("cache", "info")
    assert result.exit_code == 0
    assert "writable  no: Read-only file system; its entries are used" in result.stdout
    doctor = flashgen("doctor")
    assert "read-only (Read-only file system): these entries are used" in doctor.stdout
    assert "cannot be written" not in doctor.stdout
    assert doctor.exit_code == 0


def test_clearing_a_read_only_cache_fails(read_only, flashgen):
    result = flashgen("cache", "clear", "--yes")
    assert result.exit_code == 1
    assert "3 entries could not be removed: Read-only file system" in result.stderr
    assert read_only.info().entries == 3


def test_clear_some(tiny, flashgen):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    flashgen("build", "--select", "tiny_fwd_hdim64_fp16_*sm80", "--arch", "sm_90")
    built = CubinCache().info().entries
    names = [f"tiny_fwd_hdim64_fp16{suffix}_sm80" for suffix in ("_causal", "_packgqa")]
    assert json.loads(flashgen("cache", "clear", "-y", "--select", names[0], "--json").stdout)["removed"] == 1
    assert flashgen("cache", "clear", "--yes", "--older-than", "1h").stdout.startswith("0 entries")
    assert CubinCache().info().entries == built - 1
    assert flashgen("cache", "clear", "--yes", "--older-than", "soon").exit_code == 2
    result = flashgen("cache", "clear", "--yes", "--select", names[1])
    assert result.exit_code == 0
    assert CubinCache().info().entries == built - 2
