import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen as flashgen_package
from flashgen.errors import NoCompilerError
from flashgen.families.arch import Device
from flashgen.toolchain import bundle
from flashgen.toolchain.cache import CubinCache
from flashgen.tools.cli import doctor

H100 = Device(0, "sm_90", (9, 0), 132, 232448, 233472, 50 << 20, 3352, "NVIDIA H100")
TURING = Device(0, "sm_75", (7, 5), 40, 65536, 65536, 4 << 20, 320, "Tesla T4")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(device, smi)` pretends that there is this GPU or none, and that nvidia-smi prints this."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))

    def pretend(device=None, smi=""):
        monkeypatch.setattr("flashgen.runtime.device.available", lambda: device is not None)
        monkeypatch.setattr(
            "flashgen.runtime.device.why_unavailable", lambda: "" if device else "no such luck"
        )
        monkeypatch.setattr("flashgen.runtime.device.device", lambda ordinal: device)
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{smi}'\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return pretend


def examined(flashgen, **env):
    result = flashgen("doctor", "--json", **env)
    return result.exit_code, json.loads(result.stdout)


def test_a_machine_with_nothing_is_healthy(tmp_path):
    code = """
import sys
sys.modules["cupy"] = sys.modules["torch"] = None
from flashgen.tools.cli import doctor, main
import flashgen.tools.cli.doctor as doctor
version_of = doctor._version_of
doctor._version_of = lambda name: None if name.startswith(("cupy", "nvidia", "torch")) else version_of(name)
doctor.shutil.which = lambda *_, **__: None
main(sys.argv[1:], prog_name="flashgen")
"""
    env = {"FLASHGEN_CACHE_DIR": str(tmp_path), "PATH": "/nowhere", "HOME": str(tmp_path)}
    env["PYTHONPATH"] = str(Path(flashgen_package.__file__).parents[1])

    def doctor(*args):
        return subprocess.run(
            [sys.executable, "-c", code, "doctor", *args], env=env, capture_output=True, text=True
        )

    plain = doctor()
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert "no problems found" in plain.stdout
    found = json.loads(doctor("--json").stdout)
    assert found["attention"]["host"]["path"] == "cpu"
    assert found["attention"]["gpu"]["path"] is None
    assert "pip install" in found["attention"]["gpu"]["why"]
    assert "pip install" in found["compiler"]["why"]
    assert found["problems"] == []


def test_a_gpu_that_works_gets_a_kernel(machine, flashgen):
    pytest.importorskip("cupy", reason="kernels need CuPy and NVRTC")
    machine(H100, "NVIDIA H100, 580.10, 9.0, 81559\\n")
    code, found = examined(flashgen)
    assert code == 0
    assert found["gpus"] == [
        {"name": "NVIDIA H100", "arch": "sm_90", "driver": "580.10", "memory_mib": 81559}
    ]
    assert found["attention"]["gpu"]["path"] == "kernel"
    assert found["attention"]["gpu"]["example"].startswith("flash_fwd_hdim128_fp16_causal")
    text = flashgen("doctor").stdout
    assert "NVIDIA H100, sm_90, 80 GB, driver 580.10" in text
    assert found["attention"]["gpu"]["example"] in text


@pytest.mark.parametrize(
    ("device", "line", "words"),
    [
        (None, "NVIDIA H100, 580.10, 9.0, 81559\\n", ["there is a GPU (NVIDIA H100)", "no such luck"]),
        (TURING, "Tesla T4, 580.10, 7.5, 15360\\n", ["Tesla T4 is sm_75", "sm_80"]),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_problem(machine, flashgen, device, line, words):
    machine(device, line)
    code, found = examined(flashgen)
    assert code == 1
    assert found["attention"]["gpu"]["path"] is None
    assert any(all(word in problem for word in words) for problem in found["problems"])


def test_shared_memory_gpus_have_no_memory_of_their_own(machine, flashgen):
    machine(H100, "NVIDIA GB10, 580.10, 12.1, [N/A]\\n")
    assert examined(flashgen)[1]["gpus"][0]["memory_mib"] is None
    assert "NVIDIA GB10, sm_121, driver 580.10" in flashgen("doctor").stdout


def test_an_unwritable_cache_and_a_wrong_spec_are_problems(machine, flashgen, tmp_path):
    machine()
    (tmp_path / "file").write_text("")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "mine.yaml").write_text("family: [")
    code, found = examined(
        flashgen, FLASHGEN_CACHE_DIR=str(tmp_path / "file"), FLASHGEN_SPECS=str(tmp_path / "specs")
    )
    assert code == 1
    assert any("cannot be written" in problem for problem in found["problems"])
    assert any("mine.yaml" in problem for problem in found["problems"])
    assert flashgen("doctor", FLASHGEN_SPECS=str(tmp_path / "specs")).exit_code == 1


def test_a_spec_without_its_template_is_a_problem(machine, flashgen, tiny_folder):
    machine()
    given = {"FLASHGEN_SPECS": str(tiny_folder / "specs")}
    assert flashgen("doctor", **given).exit_code == 0
    (tiny_folder / "templates" / "lib" / "names.j2").unlink()
    found = flashgen("doctor", **given)
    assert found.exit_code == 1
    assert "lib/names.j2 is in none of" in found.output.replace("\n", " ")


@pytest.mark.parametrize(("backend", "closed"), [("cuda", "host"), ("cpu", "gpu")])
def test_a_forced_backend_closes_the_other_path(machine, flashgen, backend, closed):
    pytest.importorskip("cupy", reason="kernels need CuPy and NVRTC")
    machine(H100)
    found = examined(flashgen, FLASHGEN_BACKEND=backend)[1]["attention"]
    assert found[closed]["path"] is None
    assert "FLASHGEN_BACKEND" in found[closed]["why"]
    assert all(found[other]["path"] for other in found.keys() - {closed})


def test_a_library_that_breaks_when_loaded_is_reported(machine, flashgen, monkeypatch):
    machine()

    def broken():
        raise RuntimeError("symbol not found")

    monkeypatch.setattr("flashgen.toolchain.compile.compiler_version", broken)
    code, found = examined(flashgen)
    assert code == 1
    assert [problem for problem in found["problems"] if "Error" in problem] == [
        "compiler: RuntimeError: symbol not found"
    ]
    assert flashgen("doctor").exit_code == 1


def test_the_simulator_and_its_compiler_are_shown(machine, flashgen, tmp_path):
    machine()
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\necho 'my compiler 1.0'\n")
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "FLASHGEN_BACKEND": "simulator", "FLASHGEN_SIMULATOR_ARCH": "sm_90"}
    code, found = examined(flashgen, **environment)
    assert code == 0
    assert found["simulator"] == {"compiler": f"{compiler}: my compiler 1.0", "arch": "sm_90", "why": None}
    assert found["attention"]["host"]["path"] == "simulator"
    text = flashgen("doctor", **environment).stdout
    assert "my compiler 1.0" in text
    assert "pretends to be sm_90" in text


def test_a_simulator_that_was_asked_for_and_cannot_work_is_a_problem(machine, flashgen):
    machine()
    environment = {"CXX": "no-such-compiler", "FLASHGEN_BACKEND": "simulator"}
    code, found = examined(flashgen, **environment, FLASHGEN_SIMULATOR_ARCH="sm_75")
    assert code == 1
    assert found["attention"]["host"]["path"] is None
    assert any("no-such-compiler" in problem for problem in found["problems"])
    assert any("sm_75" in problem for problem in found["problems"])


@pytest.mark.parametrize("device", [None, H100])
def test_a_backend_of_no_name_is_a_problem(machine, flashgen, device):
    machine(device)
    code, found = examined(flashgen, FLASHGEN_BACKEND="gpu")
    assert code == 1
    (problem,) = found["problems"]
    assert "FLASHGEN_BACKEND" in problem
    assert "'gpu'; allowed are 'cuda', 'cpu', 'simulator'" in problem
    assert {path["path"] for path in found["attention"].values()} == {None}


@pytest.mark.parametrize(
    "name", ["FLASHGEN_LOG", "FLASHGEN_CHECK", "FLASHGEN_COMPILE", "FLASHGEN_DEPENDENT_LAUNCH"]
)
def test_a_variable_that_makes_calls_fail_is_a_problem(machine, flashgen, name):
    machine()
    code, found = examined(flashgen, **{name: "loud"})
    assert code == 1
    assert [problem.partition("; ")[0] for problem in found["problems"]] == [f"{name} is 'loud'"]


def test_a_backend_that_nothing_here_serves_is_a_problem(machine, flashgen):
    machine()
    code, found = examined(flashgen, FLASHGEN_BACKEND="cuda")
    assert code == 1
    (problem,) = found["problems"]
    assert "attention() can compute nothing here" in problem
    assert "no such luck" in problem


def test_an_architecture_that_the_simulator_does_not_know(machine, flashgen):
    machine()
    for backend in ("", "simulator"):
        result = flashgen("doctor", FLASHGEN_SIMULATOR_ARCH="sm_70", FLASHGEN_BACKEND=backend)
        assert result.exit_code == 1
        assert "pretends to be" not in result.stdout
        assert "none: FLASHGEN_SIMULATOR_ARCH is 'sm_70', which the simulator cannot" in result.stdout
        assert "no problems found" not in result.stdout
    assert "host arrays  not possible here" in result.stdout


@pytest.fixture
def bare(machine, monkeypatch, tmp_path):
    """A machine on which nothing works: no compilers, no disassembler, a driver that does not answer, two
    CuPys, no network, and folders that cannot be written.
    """

    def absent(*_):
        raise NoCompilerError("NVRTC cannot be loaded")

    def offline(*_, **__):
        raise AssertionError("doctor used the network")

    machine()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no communication with the driver >&2; exit 9\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setenv("CXX", "")
    for variable in ("FLASHGEN_CACHE_DIR", "XDG_CACHE_HOME", "FLASHGEN_TUNED"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("flashgen.toolchain.compile.compiler_version", absent)
    monkeypatch.setattr("flashgen.toolchain.disassemble.nvdisasm", absent)
    monkeypatch.setattr("flashgen.host.paths.temporary_problem", lambda: "/tmp is full; TMPDIR names another")
    monkeypatch.setattr("socket.socket.connect", offline)
    monkeypatch.setattr("socket.getaddrinfo", offline)
    monkeypatch.setattr(doctor, "_version_of", lambda name: "14.0" if name.startswith("cupy-") else None)


def test_each_thing_that_does_not_work_has_its_line(bare, flashgen):
    code, found = examined(flashgen)
    assert code == 1
    texts = (
        "nvidia-smi fails: no communication with the driver; look at the driver",
        "cupy-cuda13x 14.0, cupy-cuda12x 14.0 are all installed and overwrite each other's files",
        "kernels cannot be compiled: NVRTC cannot be loaded",
        "/tmp is full; TMPDIR names another",
        "the kernel cache in /proc/nowhere/.cache/flashgen cannot be written",
    )
    assert len(found["problems"]) == len(texts)
    for text in texts:
        assert any(problem.startswith(text) for problem in found["problems"]), text
    assert found["disassembler"] == {"path": None, "why": "NVRTC cannot be loaded"}
    assert "the simulator needs a C++ compiler" in found["simulator"]["why"]
    assert found["attention"]["host"]["path"] == "cpu"
    text = flashgen("doctor").stdout
    assert "GPU           none that nvidia-smi knows of" in text
    assert "disassembler  none: NVRTC cannot be loaded" in text
    assert text.count("problem: ") == len(texts)


def test_a_gpu_without_a_compiler_takes_kernels_of_a_bundle(bare, machine, flashgen, monkeypatch, tmp_path):
    key, path = "0" * 64, tmp_path / "kernels.zip"
    bundle.write(path, "nvrtc 13.0", {key: b"code"}, [bundle.Held("kernel", "sm_90", key)])
    monkeypatch.setattr("flashgen.host.paths.kernels_bundle", lambda: path)  # as flashgen-kernels
    machine(H100, "NVIDIA H100, 580.10, 9.0, 81559\\n")
    _, found = examined(flashgen)
    assert found["attention"]["gpu"]["why"].endswith("the kernels of its bundles are there, and no others")
    assert found["bundles"] == [{"path": str(path), "kernels": 1, "compiler": "nvrtc 13.0"}]
    assert not any("cannot be compiled" in problem for problem in found["problems"])


def test_shipped_specs_are_a_number_and_those_of_the_user_have_names(machine, flashgen, tiny_folder):
    machine()
    text = flashgen("doctor", FLASHGEN_SPECS=str(tiny_folder / "specs")).stdout
    lines = text.partition("  specs ")[2].partition("  tuned ")[0].split("\n")
    assert re.fullmatch(r" +\d+ files in .*specs", lines[0])
    assert str(tiny_folder / "specs") in lines[1]
    assert lines[2:] == [""]


def test_a_read_only_cache_with_kernels_is_no_problem(machine, flashgen, monkeypatch):
    """Its kernels are used."""
    machine()
    info = CubinCache().info()._replace(entries=3, bytes=9000, problem="Read-only file system")
    monkeypatch.setattr("flashgen.toolchain.cache.CubinCache.info", lambda _: info)
    result = flashgen("doctor")
    assert result.exit_code == 0, result.output
    assert "read-only (Read-only file system): these entries are used" in result.stdout


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 9", "timed out after 0.2 seconds"),
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "version mismatch"),
        ("echo No devices were found", "it prints 'No devices were found'"),
    ],
    ids=["hangs", "another driver", "other words"],
)
def test_a_driver_that_does_not_answer_is_a_problem(machine, flashgen, monkeypatch, tmp_path, script, said):
    machine()
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr(doctor, "_TIMEOUT", 0.2)
    code, found = examined(flashgen)
    assert code == 1
    (problem,) = found["problems"]
    assert problem.startswith("nvidia-smi fails: ")
    assert said in problem
    assert problem.endswith("; look at the driver")


def test_an_old_driver_is_told_which_packages_fit(machine, flashgen, monkeypatch):
    why = (
        "the driver is for CUDA 12.0 and CuPy for CUDA 13.0; update the driver or install the flashgen extra"
    )
    machine(None, "Tesla T4, 525.10, 7.5, 15360\\n")
    monkeypatch.setattr("flashgen.runtime.device.why_unavailable", lambda: why)
    code, found = examined(flashgen)
    assert code == 1
    assert f"there is a GPU (Tesla T4), and it cannot be used: {why}" in found["problems"]
