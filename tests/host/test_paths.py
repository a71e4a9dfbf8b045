import errno
import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen
from flashgen.errors import BadParam, InternalError
from flashgen.families import tuned
from flashgen.families.load import spec_folders
from flashgen.host import paths
from flashgen.toolchain import bundle

PACKAGE = Path(flashgen.__file__).parent


def test_a_checkout_uses_its_own_files():
    root = Path(__file__).parents[2]
    assert paths.checkout() == root
    assert (paths.specs_dir(), paths.templates_dir()) == (root / "specs", root / "templates")
    assert paths.generated_dir() == root / "generated"


def test_a_checkout_that_is_not_the_copy_in_use_is_found(tmp_path):
    root = Path(__file__).parents[2]
    for folder in (root, root / "specs", tmp_path):
        assert paths.unused_checkout(folder) is None
    other = tmp_path / "clone"
    for name in ("specs", "templates/lib", "codegen/flashgen/host"):
        (other / name).mkdir(parents=True)
    assert paths.unused_checkout(other) is None, "a folder that only looks like one"
    (other / "codegen" / "flashgen" / "host" / "paths.py").write_text("")
    for folder in (other, other / "templates" / "lib"):
        assert paths.unused_checkout(folder) == other


def test_a_wheel_uses_its_packaged_files(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "flashgen"
    (package / "_data" / "specs").mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", package)
    assert paths.checkout() is None
    assert paths.specs_dir() == package / "_data" / "specs"
    with pytest.raises(InternalError, match=r"_data.templates is missing.*reinstall"):
        paths.templates_dir()
    with pytest.raises(BadParam, match="--out"):
        paths.generated_dir()


def test_an_installed_copy_finds_specs_and_renders(tmp_path):
    """The package copied to where a wheel puts it, with nothing of the checkout in sight."""
    package = tmp_path / "flashgen"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("specs", "templates"):
        shutil.copytree(paths.data_dir(name), package / "_data" / name)
    code = (
        "from flashgen.families.load import load_specs\n"
        "from flashgen.source.render import render, source_digest\n"
        "v = load_specs()[0].select(dtype='fp16')[0]; print(v.spec_dir); print(source_digest(v)); render(v)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    spec_dir, digest = done.stdout.split()
    assert spec_dir == str(package / "_data" / "specs")
    from flashgen.families.load import load_specs
    from flashgen.source.render import source_digest

    assert digest == source_digest(load_specs()[0].select(dtype="fp16")[0]), "the digest depends on the place"


def test_cache_dir_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "here"))
    assert paths.cache_dir() == tmp_path / "here"
    assert not paths.cache_dir().exists()
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "")
    assert paths.cache_dir().is_absolute()
    assert paths.cache_dir().name == "flashgen"


@pytest.mark.parametrize(
    ("variable", "folder", "default"),
    [
        ("XDG_CACHE_HOME", paths.cache_dir, ".cache/flashgen"),
        ("XDG_CONFIG_HOME", paths.tuned_dir, ".config/flashgen/tuned"),
    ],
)
def test_folders_of_the_user(variable, folder, default, monkeypatch, tmp_path):
    for name in ("FLASHGEN_CACHE_DIR", "FLASHGEN_TUNED", variable):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / default
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine" / default.partition("/")[2]
    monkeypatch.setenv(variable, "not/absolute")
    assert folder() == tmp_path / default


def test_importing_flashgen_imports_nothing_heavy():
    code = (
        "import sys, flashgen, flashgen.families.load, flashgen.source.render, flashgen.source.generated\n"
        "print(*{'jinja2', 'click', 'rich', 'cupy', 'torch', 'numpy'} & set(sys.modules))"
    )
    source = str(Path(flashgen.__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["file", "file/tuned"])
def test_tiles_are_tuned_into_a_folder(name, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / name))
    said = f"FLASHGEN_TUNED is '{tmp_path / name}', but {tmp_path / 'file'} is not a folder; name a folder"
    for look in (paths.tuned_dir, tuned.present_gpu, lambda: tuned.find("flash_fwd_sm90", "NVIDIA H200")):
        with pytest.raises(BadParam, match=f"^{re.escape(said)}"):
            look()
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / "not" / "there"))
    assert paths.tuned_dir() == tmp_path / "not" / "there"
    assert tuned.find("flash_fwd_sm90", "NVIDIA H200") is None


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("FLASHGEN_CACHE_DIR", paths.cache_dir),
        ("FLASHGEN_TUNED", paths.tuned_dir),
        ("FLASHGEN_SPECS", spec_folders),
        ("FLASHGEN_BUNDLE", bundle.active),
    ],
)
def test_the_home_of_no_user_is_named(variable, folder, monkeypatch):
    monkeypatch.setenv(variable, "~flashgen_has_no_user/x")
    said = f"{variable} is '~flashgen_has_no_user/x', but ~flashgen_has_no_user is the home of no user; write"
    with pytest.raises(BadParam, match=f"^{said}"):
        folder()


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_folder_of_tuned_tiles_that_cannot_be_looked_at_is_named(code, monkeypatch):
    def stat(path, **options):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setenv("FLASHGEN_TUNED", "/a/folder")
    monkeypatch.setattr(Path, "stat", stat)
    said = f"FLASHGEN_TUNED is '/a/folder', but /a/folder cannot be looked at: {os.strerror(code)}; name a"
    with pytest.raises(BadParam, match=f"^{said}"):
        paths.tuned_dir()


def test_a_user_without_a_home(monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("FLASHGEN_CACHE_DIR", "FLASHGEN_TUNED", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for folder, name in ((paths.cache_dir, "FLASHGEN_CACHE_DIR"), (paths.tuned_dir, "FLASHGEN_TUNED")):
        with pytest.raises(BadParam, match=f"no home folder, .*; set {name} to a folder, or HOME"):
            folder()
    assert tuned.present_gpu() is None
