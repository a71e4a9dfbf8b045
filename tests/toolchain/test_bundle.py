"""Bundles: written, checked, refused, and taken where there is no compiler."""

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashgen
from flashgen.errors import BadParam, CacheWarning
from flashgen.host import paths
from flashgen.toolchain import bundle, kernelwheel
from flashgen.toolchain import cache as caches
from flashgen.toolchain.cache import CubinCache, key_for
from flashgen.tools.cli import doctor

KEYS = [key_for(str(n), "sm_90", (), "nvrtc 13.0") for n in range(3)]
HELD = [bundle.Held(f"kernel{n}", "sm_90", KEYS[n]) for n in range(2)]
SPECS = [bundle.HeldSpec("tiny", KEYS[2])]


@pytest.fixture
def made(tmp_path):
    """A bundle of two kernels and a spec."""
    path = tmp_path / "kernels.zip"
    bundle.write(path, "nvrtc 13.0", {key: key.encode() * 9 for key in KEYS}, HELD, SPECS)
    return path


def rewritten(path, change):
    """The same bundle after ``change(name, data)`` of each member; None leaves it out."""
    with zipfile.ZipFile(path) as file:
        members = {name: change(name, file.read(name)) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            if data is not None:
                file.writestr(name, data)
    return path


def test_what_is_written_is_read(made):
    opened = bundle.Bundle(made)
    assert opened.kernels == tuple(HELD)
    assert opened.specs == tuple(SPECS)
    assert opened.compiler == "nvrtc 13.0"
    assert [opened.get(key) for key in KEYS] == [key.encode() * 9 for key in KEYS]
    assert opened.get("0" * 64) is None
    opened.verify()
    first = made.read_bytes()
    bundle.write(made, "nvrtc 13.0", {key: key.encode() * 9 for key in KEYS}, HELD, SPECS)
    assert made.read_bytes() == first, "equal kernels make equal files"


def what_is_said_of(path):
    try:
        bundle.Bundle(path).verify()
    except BadParam as error:
        return str(error)
    return str(path)  # damage that changes nothing of what is read


def test_damage_is_said_wherever_it_is(made):
    sound = made.read_bytes()
    for place in range(0, len(sound), 7):
        made.write_bytes(sound[:place] + bytes([sound[place] ^ 0xFF]) + sound[place + 1 :])
        assert str(made) in what_is_said_of(made)


def test_files_that_others_add_are_left_alone(made):
    with zipfile.ZipFile(made, "a") as file:
        file.writestr("README", "kernels of ours")
        file.writestr("entries/", "")
    bundle.Bundle(made).verify()


def test_it_is_a_layer_under_the_cache_that_is_never_written(made, tmp_path):
    before = made.read_bytes()
    cache = CubinCache(tmp_path / "cache", bundles=[bundle.Bundle(made)])
    assert cache.get_or_build(KEYS[0], None) == KEYS[0].encode() * 9
    assert cache.get_or_build("1" * 64, lambda: b"new") == b"new"
    assert cache.info().entries == 1
    assert cache.keeps(KEYS[0])
    assert made.read_bytes() == before


@pytest.mark.parametrize("change", [{"flashgen": "9.9"}, {"format": 99}])
def test_another_version_is_refused_with_a_sentence(made, change):
    rewritten(made, lambda name, data: json.dumps(json.loads(data) | change) if name[0] == "m" else data)
    other = next(iter(change.values()))
    with pytest.raises(
        BadParam, match=rf"kernels\.zip was made by flashgen .*{other}.*.*; this is"
    ) as caught:
        bundle.Bundle(made)
    assert flashgen.__version__ in str(caught.value)
    assert "make it anew with `flashgen bundle`" in str(caught.value)


def test_damage_is_found(made, tmp_path):
    whole = made.read_bytes()
    spoilt = rewritten(made, lambda name, data: data[:-1] + b"!" if KEYS[0] in name else data)
    opened = bundle.Bundle(spoilt)
    assert opened.get(KEYS[1]) == KEYS[1].encode() * 9
    for act in (lambda: opened.get(KEYS[0]), opened.verify):
        with pytest.raises(BadParam, match="is damaged: the SHA-256"):
            act()
    rewritten(made, lambda name, data: None if KEYS[1] in name else data)
    with pytest.raises(BadParam, match="lists kernel1 and does not hold it"):
        bundle.Bundle(made)
    for damaged in (whole[: len(whole) // 2], b"", whole[:40] + b"?" * 40 + whole[80:]):
        made.write_bytes(damaged)
        with pytest.raises(BadParam, match=r"kernels\.zip is"):
            bundle.Bundle(made).verify()
    with pytest.raises(BadParam, match=r"none\.zip does not exist"):
        bundle.Bundle(tmp_path / "none.zip")


def test_the_variable_names_several(made, monkeypatch, tmp_path):
    assert bundle.active("") == ()
    second = tmp_path / "second.zip"
    second.write_bytes(made.read_bytes())
    monkeypatch.setenv("FLASHGEN_BUNDLE", f"{made}{os.pathsep}{second}")
    assert [each.path for each in bundle.active()] == [made, second]


def installed(wheel, site):
    """Install a wheel into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
    return site


def test_a_wheel_of_kernels_is_a_layer_where_it_is_installed(made, tmp_path, monkeypatch):
    site = installed(kernelwheel.write(tmp_path, made.read_bytes()), tmp_path / "site")
    (kernels,) = site.rglob("kernels.zip")
    assert kernels.read_bytes() == made.read_bytes()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(paths, "kernels_bundle", paths.kernels_bundle.__wrapped__)
    monkeypatch.setattr(caches, "_at", caches._at.__wrapped__)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert caches.default().get(KEYS[0]) == KEYS[0].encode() * 9
    kernels.chmod(0o666)  # who may write here may write to flashgen as well
    assert caches.default().get(KEYS[0]) is not None
    (distribution,) = importlib.metadata.distributions(path=[str(site)])
    assert distribution.metadata["Name"] == "flashgen-kernels"
    assert distribution.requires == [f"flashgen=={flashgen.__version__}"]


def test_a_wheel_of_another_version_costs_a_warning(made, tmp_path, monkeypatch):
    rewritten(made, lambda name, data: data.replace(flashgen.__version__.encode(), b"9.9"))
    monkeypatch.setattr(paths, "kernels_bundle", lambda: made)
    monkeypatch.setattr(caches, "_at", caches._at.__wrapped__)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.warns(CacheWarning, match=r"flashgen 9\.9 .*pip install flashgen-kernels=="):
        assert caches.default().get(KEYS[0]) is None
    report = doctor.Report()
    assert doctor._bundles(report) == []
    assert "the installed flashgen-kernels is not used" in report.problems[0]


# A container: no NVRTC, neither as a module nor as a wheel; a disk cache that cannot be written.
CONTAINER = """
import sys
import warnings
warnings.simplefilter("error")
import types
import cupy.cuda
def absent():
    raise RuntimeError("no libnvrtc.so")
cupy.cuda.nvrtc = types.SimpleNamespace(getVersion=absent)
from flashgen.toolchain import compile
compile.installed_version = lambda: None
from flashgen.families.arch import typical
from flashgen.call.backends import specs_for
from flashgen.api.explain import _shaped
from flashgen.errors import NoCompilerError
from flashgen.runtime import kernel
from flashgen.schedule.dispatch import offers, select
from flashgen.toolchain.obtain import own_arch, recall

h100 = typical("sm_90")
specs = specs_for(h100)
problem = _shaped("attention", {"q": (1, 4096, 2, 64), "causal": True}, sys.argv[1])
variant = select(problem, h100, offers(problem, h100, specs))
compiled = recall(variant, own_arch(variant, h100))
print(variant.name, compiled and compiled.cubin[:4] == b"\\x7fELF", "yaml" in sys.modules)
if compiled is None:
    from flashgen.toolchain.obtain import arch_for
    import contextlib
    kernel.activated = lambda ordinal: contextlib.nullcontext(1)
    try:
        kernel.load(variant, h100)
    except NoCompilerError as error:
        print(error)
"""


def test_a_machine_without_a_compiler_takes_what_the_bundle_has(tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    environment = os.environ | {"PYTHONPATH": str(Path(flashgen.__file__).parents[1])}
    environment |= {"FLASHGEN_CACHE_DIR": str(tmp_path / "builder")}
    path = tmp_path / "kernels.zip"
    wanted = "spec=flash_fwd_sm90 head_dim=64 dtype=fp16 mask_type=causal gqa=mha"
    command = ["bundle", "--select", wanted, "--arch", "sm_90", "-o", path]
    subprocess.run([sys.executable, "-m", "flashgen", *command], check=True, env=environment)

    def container(dtype, **variables):
        done = subprocess.run(
            [sys.executable, "-c", CONTAINER, dtype],
            check=True,
            env=environment | {"FLASHGEN_CACHE_DIR": "/proc/nowhere", **variables},
            capture_output=True,
            text=True,
        )
        return done.stdout.splitlines()

    site = installed(kernelwheel.write(tmp_path, path.read_bytes()), tmp_path / "site")
    beside = os.pathsep.join([environment["PYTHONPATH"], str(site)])
    for bundled in ({"FLASHGEN_BUNDLE": str(path)}, {"PYTHONPATH": beside}):
        ((name, found, parsed),) = (line.split() for line in container("fp16", **bundled))
        assert name.startswith("flash_fwd_hdim64_fp16_causal")
        assert name.endswith("_sm90")
        assert (found, parsed) == ("True", "False"), "the specs, too, come from the bundle"
    first, error = container("bf16", FLASHGEN_BUNDLE=str(path))
    assert first.split()[1] == "None"
    assert error.startswith(
        f"{path} has no {first.split()[0]} for sm_90a, and NVRTC cannot be loaded (no libnvrtc"
    )
