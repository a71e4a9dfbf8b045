"""`flashgen doctor`: what is installed, what this machine has, and what `attention()` would do with it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from flashgen import __version__
from flashgen.tools.cli.options import json_option
from flashgen.tools.cli.output import plain, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant

# Import name of a library -> distributions that provide it.
_LIBRARIES = {
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "cuda headers": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "nvdisasm": ("nvidia-cuda-nvdisasm", "nvidia-cuda-nvcc-cu12"),
    "torch": ("torch",),
    "jax": ("jax",),
    "ml_dtypes": ("ml_dtypes",),
}
_TIMEOUT = 20.0  # seconds for nvidia-smi


@dataclass
class Report:
    """What the examination found. A problem says what is wrong and what would mend it."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def probe(self, name: str, examine: Callable[[Report], Any]) -> None:
        """Run one examination; if it breaks, that is a finding like any other."""
        try:
            self.facts[name] = examine(self)
        except Exception as error:  # noqa: BLE001 - a library may break in any way when it is loaded
            self.facts[name] = None
            self.problems.append(f"{name}: {type(error).__name__}: {error}")


@click.command(
    "doctor",
    short_help="What is installed, and what attention() would use here.",
    epilog="""
\b
Examples:
  flashgen doctor
  flashgen doctor --json | jq .attention

Exit code 1 if something that should work does not. A missing GPU is not an error: NumPy arrays run on the
CPU, and NVRTC compiles kernels without one.
""",
)
@json_option
def command(as_json: bool) -> None:
    """Show versions, GPUs, compiler and cache, and which path attention() would take here and why."""
    from flashgen.tools.cli.findings import sections
    from flashgen.tools.cli.output import print_json, print_pairs

    report = examine()
    if as_json:
        print_json(report.facts | {"problems": report.problems})
    else:
        for title, pairs in sections(report.facts):
            print_pairs(pairs, title=title)
            click.echo()
        for problem in report.problems:
            click.echo(click.style("problem: ", fg="red") + plain(problem))
        if not report.problems:
            say("no problems found")
    if report.problems:
        sys.exit(1)


def examine() -> Report:
    """Look at everything. Raises nothing: what breaks is reported."""
    report = Report()
    report.probe("versions", _versions)
    report.probe("gpus", _gpus)
    report.probe("compiler", _compiler)
    report.probe("disassembler", _disassembler)
    report.probe("simulator", _simulator)
    report.probe("temporary", _temporary)
    report.probe("specs", _specs)
    report.probe("tuned", _tuned)
    report.probe("cache", _cache)
    report.probe("bundles", _bundles)
    report.probe("attention", _attention)
    _switches(report)
    return report


def _versions(report: Report) -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "flashgen": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    }
    for library, distributions in _LIBRARIES.items():
        installed = [f"{name} {version}" for name in distributions if (version := _version_of(name))]
        versions[library] = ", ".join(installed) or None
        if library == "cupy" and len(installed) > 1:
            report.problems.append(
                f"{', '.join(installed)} are all installed and overwrite each other's files; "
                "uninstall all of them, then install one"
            )
    return versions


def _gpus(report: Report) -> list[dict[str, Any]]:
    """The GPUs by the driver's own tool, which is there whenever the driver is, CuPy or not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = "name,driver_version,compute_cap,memory.total"
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        report.problems.append(f"nvidia-smi fails: {error}; look at the driver")
        return []
    if done.returncode != 0:
        report.problems.append(
            f"nvidia-smi fails: {(done.stderr or done.stdout).strip()}; look at the driver"
        )
        return []
    gpus = []
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != query.count(",") + 1:
            report.problems.append(f"nvidia-smi fails: it prints {line!r}; look at the driver")
            return []
        name, driver, capability, memory = parts
        arch = f"sm_{capability.replace('.', '')}"
        # A GPU that shares the host's memory has no figure of its own.
        mib = int(memory) if memory.isdigit() else None
        gpus.append({"name": name, "arch": arch, "driver": driver, "memory_mib": mib})
    return gpus


def _compiler(report: Report) -> dict[str, Any]:
    """NVRTC, tried on a kernel that includes one of CUDA's own headers."""
    from flashgen.errors import FlashgenError
    from flashgen.host.paths import BUNDLE_VARIABLE, kernels_bundle
    from flashgen.toolchain.compile import compile_cubin, compiler_version, supported_archs

    probe = (
        '#include <cuda_fp16.h>\nextern "C" __global__ void probe(__half* x) { *x = __float2half(1.0f); }\n'
    )
    try:
        version = compiler_version()
        compile_cubin(probe, "probe", "sm_80")
    except FlashgenError as error:
        # Without a GPU and without CuPy nobody needs kernels yet.
        needed = report.facts["gpus"] or report.facts["versions"]["cupy"]
        if needed and not os.environ.get(BUNDLE_VARIABLE) and kernels_bundle() is None:
            report.problems.append(f"kernels cannot be compiled: {error}")
        return {"works": False, "version": None, "why": str(error), "archs": []}
    return {
        "works": True,
        "version": version,
        "why": None,
        "archs": [f"sm_{arch}" for arch in supported_archs()],
    }


def _disassembler(report: Report) -> dict[str, Any]:
    from flashgen.errors import FlashgenError
    from flashgen.toolchain.disassemble import nvdisasm

    try:
        return {"path": str(nvdisasm()), "why": None}
    except FlashgenError as error:
        return {"path": None, "why": str(error)}


def _simulator(report: Report) -> dict[str, Any]:
    """The C++ compiler that the simulator would use."""
    from flashgen.errors import FlashgenError
    from flashgen.simulator import hardware, hostcompiler

    facts: dict[str, Any] = {"compiler": None, "arch": None, "why": None}
    try:
        facts["arch"] = hardware.pretend().arch
    except FlashgenError as error:
        report.problems.append(f"{hardware.ARCH_VARIABLE} is set: {error}")
        facts["why"] = str(error)
    try:
        facts["compiler"] = str(hostcompiler.find())
    except FlashgenError as error:
        if os.environ.get("CXX"):
            report.problems.append(str(error))
        facts["why"] = str(error)
    return facts


def _temporary(report: Report) -> dict[str, Any]:
    """The folder of temporary files, in which the simulator compiles and kernels are disassembled."""
    import tempfile

    from flashgen.host.paths import temporary_problem

    problem = temporary_problem()
    if problem:
        report.problems.append(problem)
    return {"folder": None if problem else tempfile.gettempdir(), "why": problem or None}


def _specs(report: Report) -> dict[str, Any]:
    """The specs and score modifications, checked. Their variants are not made: that takes seconds."""
    from flashgen.call.fields import PLAN_KEYWORDS
    from flashgen.families.load import load_specs
    from flashgen.families.scores import load_scores
    from flashgen.source.render import check_files

    specs = load_specs()
    check_files(specs)
    load_scores(keywords=PLAN_KEYWORDS)
    return {"files": [str(spec.path) for spec in specs]}


def _tuned(report: Report) -> dict[str, Any]:
    """The tiles that were tuned on the first GPU; one that no longer fits is a problem."""
    import warnings

    from flashgen.errors import TunedWarning
    from flashgen.families.load import load_specs
    from flashgen.families.tuned import path_for, present_gpu
    from flashgen.families.variant import TUNED_TILE
    from flashgen.host.paths import tuned_dir

    gpu = present_gpu()
    if gpu is None:
        return {"folder": str(tuned_dir()), "gpu": None, "files": [], "variants": []}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", TunedWarning)
        specs = load_specs(gpu=gpu)
    report.problems += [
        str(warning.message) for warning in said if issubclass(warning.category, TunedWarning)
    ]
    files = [path for spec in specs if (path := path_for(spec.name, gpu)).is_file()]
    tuned = [v.name for spec in specs for v in spec.variants() if v.tile_name == TUNED_TILE]
    return {"folder": str(tuned_dir()), "gpu": gpu, "files": [str(path) for path in files], "variants": tuned}


def _cache(report: Report) -> dict[str, Any]:
    from flashgen.toolchain.cache import CubinCache

    info = CubinCache().info()
    if info.problem and not info.entries:
        report.problems.append(
            f"the kernel cache in {info.root} cannot be written: {info.problem}; each process compiles its "
            "kernels anew. FLASHGEN_CACHE_DIR names another folder"
        )
    return info._asdict() | {"root": str(info.root)}


def _bundles(report: Report) -> list[dict[str, Any]]:
    """The bundles of FLASHGEN_BUNDLE and of flashgen-kernels; one that cannot be used is a problem."""
    from flashgen.errors import BadParam
    from flashgen.toolchain.bundle import active, installed

    bundles = []
    for source, opened in (("FLASHGEN_BUNDLE is set: ", active), ("", installed)):
        try:
            for bundle in opened():
                bundle.verify()
                bundles.append(bundle)
        except BadParam as error:
            report.problems.append(f"{source}{error}")
    return [
        {"path": str(bundle.path), "kernels": len(bundle.kernels), "compiler": bundle.compiler}
        for bundle in bundles
    ]


def _switches(report: Report) -> None:
    """Variables whose value makes calls fail."""
    from flashgen.errors import BadParam
    from flashgen.host import logs
    from flashgen.runtime import check, dependent
    from flashgen.toolchain import policy

    for read in (lambda: logs.logger("cli"), check.enabled, dependent.forbidden, policy.of_variable):
        try:
            read()
        except BadParam as error:
            if not any(str(error) in problem for problem in report.problems):
                report.problems.append(str(error))


def _attention(report: Report) -> dict[str, Any]:
    """What attention() does with arrays in host memory and with arrays on a GPU."""
    paths = {"host": _host_path(report), "gpu": _gpu_path(report)}
    if not report.problems and not any(path["path"] for path in paths.values()):
        whys = "; ".join(f"{place} arrays: {path['why']}" for place, path in paths.items())
        report.problems.append(f"attention() can compute nothing here: {whys}")
    return paths


def _host_path(report: Report) -> dict[str, Any]:
    import numpy as np

    from flashgen.call.backends import backend_for
    from flashgen.errors import BadParam, FlashgenError

    try:
        backend = backend_for(None)
    except FlashgenError as error:
        why = f"FLASHGEN_BACKEND is set: {error}"
        if isinstance(error, BadParam):  # no backend's name, so every call fails
            report.problems.append(why)
        return {"path": None, "why": why}
    if backend == "simulator":
        simulator = report.facts["simulator"] or {"why": "the simulator breaks when loaded"}
        if simulator["why"]:
            report.problems.append(f"FLASHGEN_BACKEND is simulator: {simulator['why']}")
            return {"path": None, "why": simulator["why"]}
        return {"path": "simulator", "why": "FLASHGEN_BACKEND is simulator"}
    return {"path": "cpu", "why": f"blockwise online softmax over the BLAS of NumPy {np.__version__}"}


def _gpu_path(report: Report) -> dict[str, Any]:
    from flashgen.call.backends import backend_for
    from flashgen.errors import FlashgenError
    from flashgen.runtime.device import available, device, why_unavailable

    gpus = report.facts["gpus"] or []
    if not available():
        why = why_unavailable()
        if gpus:
            report.problems.append(f"there is a GPU ({gpus[0]['name']}), and it cannot be used: {why}")
        return {"path": None, "why": why}
    here = device(0)
    if here.compute_capability < (8, 0):
        why = f"{here.name} is {here.arch}, and the lowest that any kernel runs on is sm_80"
        report.problems.append(why)
        return {"path": None, "why": why}
    compiler = report.facts["compiler"] or {"works": False, "why": "the compiler breaks when it is loaded"}
    bundles = report.facts["bundles"]
    if not compiler["works"] and not bundles:
        return {"path": None, "why": compiler["why"]}
    try:
        backend_for(0)
    except FlashgenError as error:
        return {"path": None, "why": f"FLASHGEN_BACKEND is set: {error}"}
    try:
        variant = _typical_variant(here)
    except FlashgenError as error:
        report.problems.append(f"no kernel can be chosen: {error}")
        return {"path": None, "why": str(error)}
    how = "NVRTC works" if compiler["works"] else "the kernels of its bundles are there, and no others"
    return {"path": "kernel", "why": f"{here.name} is {here.arch} and {how}", "example": variant.name}


def _typical_variant(here: Device) -> Variant:
    """What dispatch takes for a causal fp16 call of 4,096 tokens, 16 heads and head_dim 128."""
    from flashgen.operators.arguments import view_of_shape
    from flashgen.operators.attention import normalise
    from flashgen.schedule.dispatch import select
    from flashgen.tools.cli.options import variants_on_offer

    q = view_of_shape((1, 4096, 16, 128), "fp16", None)
    return select(normalise(q, q, q, causal=True), here, variants_on_offer())


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
