"""What an installation holds, and that the README, CI and the metadata agree."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# import name -> distribution, where they differ
DISTRIBUTIONS = {"yaml": "pyyaml", "ml_dtypes": "ml-dtypes"}
# Needed only where the caller already has them, or by an extra.
OPTIONAL = {
    "cupy",
    "cupy_backends",
    "torch",
    "transformers",
    "vllm",
    "jax",
    "matplotlib",
    "flash_attn",
    "cudnn",
    "flashinfer",
    "threadpoolctl",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def command_after(marker: str) -> str:
    """The fenced block of the README behind an HTML comment."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^<!-- {marker} -->\n```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return block.strip()


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_.-]+", each)[0].lower().replace("_", "-") for each in requirements}


def test_the_wheel_holds_every_spec_template_module_and_workload_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for source, target in (("codegen/flashgen", "flashgen"), ("specs", "flashgen/_data/specs")):
        expected |= {f"{target}/{p.relative_to(ROOT / source).as_posix()}" for p in files(ROOT / source)}
    expected |= {
        f"flashgen/_data/templates/{p.relative_to(ROOT / 'templates').as_posix()}"
        for p in files(ROOT / "templates")
    }
    expected.add("flashgen/_data/benchmarks/workloads.yaml")
    assert held == expected
    assert "flashgen/py.typed" in held
    assert wheel.stat().st_size < 1.9e6, "the README says that the wheel has about 1.8 MB"


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_the_source_archive_builds_the_same_wheel(wheel, tmp_path):
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    subprocess.run([*hatch, "sdist"], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    subprocess.run(
        [*hatch, "wheel"], cwd=tmp_path / archive.name[: -len(".tar.gz")], check=True, capture_output=True
    )
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_an_installed_flashgen_renders_from_its_own_data(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "from flashgen.host import paths\n"
        "from flashgen.source import render\n"
        "from flashgen.families.load import load_specs\n"
        "variant = next(v for s in load_specs() for v in s.variants())\n"
        "print(paths.checkout(), paths.specs_dir(), variant.name in render.render(variant), sep='\\n')\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHGEN_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    checkout, specs, rendered = done.stdout.splitlines()
    assert checkout == "None"
    assert Path(specs) == tmp_path / "flashgen" / "_data" / "specs"
    assert rendered == "True"


def test_the_source_archive_has_every_page_of_the_repository():
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    held = hatch["build"]["targets"]["sdist"]["include"]
    assert {f"/{page.name}" for page in ROOT.glob("*.md")} <= set(held)
    assert "/SECURITY.md" in held


def test_a_hint_names_packages_that_there_are(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = "from flashgen.host.pipcommand import command; print(command('cuda12')); print(command('no'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    command, unknown = done.stdout.splitlines()
    assert command.startswith("pip install ")
    assert names(shlex.split(command)[2:]) == names(METADATA["optional-dependencies"]["cuda12"])
    assert unknown == "reinstall flashgen with its extra no"


TYPED = """\
import warnings
from typing import Any, assert_type

import flashgen
from flashgen import distributed
from flashgen.compat import flash_attn


def use(q: Any, k: Any, v: Any) -> str:
    out = flashgen.attention(q, k, v, causal=True, window_size=(128, 0), softcap=30.0, dropout_p=0.1)
    plan: flashgen.Plan = flashgen.plan(q, k, v, causal=True)
    plan(q, k, v, softmax_scale=0.1)
    assert_type(plan.workspace_bytes, int)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    out, lse, weights = flashgen.attention(q, k, v, return_lse=True, return_weights=True)
    gradients = flashgen.attention_backward(out, q, k, v, out, lse, deterministic=True)
    cache = flashgen.KVCache(k, v, q, pages=q)
    flashgen.append(cache, k, v, rotary=flashgen.Rotary(q, q))
    flashgen.merge([(out, lse), (out, lse)])
    flashgen.cascade(q, [(k, v), cache])
    codes, scale = flashgen.quantize(k, per="head")
    mask = flashgen.Mask("documents", doc=q)
    flashgen.attention(q, k, v, mask=mask, splits=flashgen.SplitEvery(256))
    with flashgen.record("calls.json"), flashgen.compiling("error"):
        pass
    step: flashgen.AppendPlan = flashgen.plan(q, flashgen.KVCache(k, v, q), append=(k, v))
    assert_type(step.append, flashgen.Plan)
    names = flashgen.warmup([{"q": (1, 16, 2, 64), "causal": True}], arch="sm_90")
    assert_type(names, tuple[str, ...])
    found = flashgen.explain((1, 16, 2, 64), dtype="bf16", arch="sm_90")
    distributed.partition(1 << 17, world=8, heads=(32, 8))
    shard = distributed.attention(q, k, v, causal=True)
    print(shard.sum(), mask.blocks(128, 128).of_row(0), mask.keep_lists().update(doc=q).arguments)
    distributed.attention(q, k, v, casual=True)  # type: ignore[arg-type]
    flashgen.attention(q, k, v, casual=True)  # type: ignore[call-arg]
    answer: Any = flash_attn.flash_attn_func(q, k, v, causal=True)
    warnings.simplefilter("ignore", flashgen.CacheWarning)
    print(out, weights, gradients, codes, scale, answer, flashgen.__version__)
    return found.variant.name if found.variant else ""
"""


def test_code_that_uses_the_package_type_checks(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(TYPED)
    stub = ROOT / "codegen" / "flashgen" / "__init__.pyi"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--explicit-package-bases",
    ]
    command += ["snippet.py", str(stub)]
    environment = os.environ | {"MYPYPATH": str(ROOT / "codegen")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_s_command_is_importable(wheel):
    entry = zipfile.ZipFile(wheel).read(
        next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("entry_points.txt"))
    )
    module, _, attribute = re.search(rb"flashgen = ([\w.]+)(:)(\w+)", entry).groups()
    assert callable(getattr(__import__(module.decode(), fromlist=["_"]), attribute.decode()))


def test_the_version_is_said_once_in_effect():
    import flashgen

    assert flashgen.__version__ == METADATA["version"]


def test_every_import_is_the_standard_library_a_dependency_or_optional():
    wanted = names(METADATA["dependencies"])
    foreign = {}
    for path in (p for p in files(ROOT / "codegen" / "flashgen") if p.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            for module in {m.split(".")[0] for m in modules} - sys.stdlib_module_names - {"flashgen"}:
                foreign.setdefault(module, path.name)
    undeclared = {
        module: where
        for module, where in foreign.items()
        if module not in OPTIONAL and DISTRIBUTIONS.get(module, module) not in wanted
    }
    assert not undeclared
    assert names(METADATA["dependencies"]) <= {DISTRIBUTIONS.get(m, m) for m in foreign}, (
        "a dependency is not used"
    )


@pytest.mark.parametrize("major", ["12", "13"])
def test_a_cuda_extra_has_cupy_nvrtc_and_headers_but_no_toolkit(major):
    extra = names(METADATA["optional-dependencies"][f"cuda{major}"])
    suffix = "-cu12" if major == "12" else ""
    wheels = {f"nvidia-cuda-nvrtc{suffix}", f"nvidia-cuda-runtime{suffix}"}
    assert extra == {f"cupy-cuda{major}x", *wheels}


def test_importing_flashgen_imports_nothing_heavy():
    program = "import sys, flashgen; print(sorted(m for m in sys.modules if '.' not in m))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "codegen")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    heavy = {"numpy", "cupy", "torch", "jinja2", "click", "rich", "yaml", "matplotlib"}
    assert heavy.isdisjoint(ast.literal_eval(done.stdout))


def test_ci_runs_the_command_that_the_readme_shows():
    shown = subprocess.run([ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == command_after("install-and-test")


def test_both_commands_of_the_readme_set_up_from_nothing():
    demo, tests = command_after("install-and-demo"), command_after("install-and-test")
    assert demo.endswith("flashgen demo")
    assert "pytest" in tests.split("&&")[-1]
    for command in (demo, tests):
        assert "\n" not in command
        venv, install, _ = (part.strip() for part in command.split("&&"))
        assert venv == "python3 -m venv .venv"
        extras = re.fullmatch(r"\.venv/bin/pip install -e '\.\[([a-z0-9,]+)\]'", install)[1].split(",")
        assert set(extras) <= set(METADATA["optional-dependencies"])


LOCK = ROOT / ".ci" / "requirements.txt"
LIBRARIES = ROOT / ".ci" / "libraries.txt"
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def locked(lock: Path = LOCK) -> dict[str, list[tuple[Requirement, int]]]:
    """What a lock pins, by name, each with the number of its hashes; several where versions of Python
    differ.
    """
    found: dict[str, list[tuple[Requirement, int]]] = {}
    text = re.sub(r"^ *#.*\n", "", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = re.split(r" +--hash=sha256:(?=[0-9a-f]{64}\b)", line)
        pinned = Requirement(requirement)
        found.setdefault(canonicalize_name(pinned.name), []).append((pinned, len(hashes)))
    return found


@pytest.mark.parametrize("lock", [LOCK, LIBRARIES], ids=lambda path: path.name)
def test_every_line_of_the_lock_pins_a_version_and_its_hashes(lock):
    assert locked(lock)
    for name, pinned in locked(lock).items():
        for requirement, hashes in pinned:
            assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), name
            assert hashes > 0, name


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_lock_has_a_version_of_all_that_ci_installs(python, machine):
    extras = METADATA["optional-dependencies"]
    wanted = [*METADATA["dependencies"], *extras["cuda13"], *extras["test"]]
    here = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    for requirement in map(Requirement, wanted):
        pinned = [each for each, _ in locked().get(canonicalize_name(requirement.name), [])]
        fitting = [each for each in pinned if each.marker is None or each.marker.evaluate(here)]
        assert len(fitting) == 1, f"{requirement}: make the lock anew with the command at its top"
        version = str(fitting[0].specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"{requirement}: the lock has {version}"


def test_the_locks_agree_and_have_the_libraries():
    """pip takes both at once. What PyTorch requires beyond them is of one kind of machine alone."""
    tests, libraries = locked(), locked(LIBRARIES)
    for name in tests.keys() & libraries.keys():
        # Markers may differ: a package may be needed on Windows alone by one of the two.
        pinned = ({str(each.specifier) for each, _ in lock[name]} for lock in (tests, libraries))
        assert len({*map(frozenset, pinned)}) == 1, name
    wanted = (ROOT / ".ci" / "libraries.in").read_text(encoding="utf-8").splitlines()
    for requirement in (Requirement(line) for line in wanted if not line.startswith("#")):
        (pinned, _), *_ = libraries[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(str(pinned.specifier).removeprefix("=="))
    (torch,) = re.findall(r"^[^#\n]+", (ROOT / ".ci" / "torch.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(r"torch==[0-9.]+", torch)
    for command in re.findall(r"pip install.*\.ci/(?:requirements|libraries)\.txt", CI):
        assert "--require-hashes" in command


def test_no_version_of_filelock_that_follows_links_will_do():
    (filelock,) = (each for each in map(Requirement, METADATA["dependencies"]) if each.name == "filelock")
    assert not any(filelock.specifier.contains(old) for old in ("3.13.0", "3.20.0", "3.20.2"))
    assert filelock.specifier.contains("3.20.3")


def test_ci_installs_the_lock_before_the_command_of_the_readme():
    locked_install = CI.index(".venv/bin/pip install --require-hashes -r .ci/requirements.txt")
    assert locked_install < CI.index('step "README: install and test"')
    # What the README's command then asks for beyond the lock cannot be fetched.
    assert re.search(r"^readme_tests\(\) \{ PIP_NO_INDEX=1 ", CI, re.MULTILINE)


def test_no_file_that_installs_names_a_package_index():
    """Which one, pip is told by whoever installs."""
    index = re.compile(r"index-url|find-links|PIP_(?!NO_)|pypi\.org|pythonhosted|https?://")
    for path in (ROOT / "pyproject.toml", *(ROOT / ".ci").iterdir()):
        text = path.read_text(encoding="utf-8").replace("--no-emit-index-url", "")
        assert not index.search(text), path
    index = re.compile(r"index-url|find-links|PIP_|pypi\.org|pythonhosted")
    assert not index.search((ROOT / "README.md").read_text(encoding="utf-8"))
