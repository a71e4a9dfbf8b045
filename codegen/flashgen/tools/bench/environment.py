"""What a figure depends on: the GPU, the driver, the libraries and the kernels that were measured."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_LIBRARIES = {
    "flashgen": ("flashgen",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "torch": ("torch",),
    "flash-attn-4": ("flash-attn-4",),
    "flashinfer": ("flashinfer-python",),
    "numpy": ("numpy",),
}

_TIMEOUT = 20.0  # seconds


def describe() -> dict[str, Any]:
    """Versions and device facts as plain types; what cannot be found is None. Needs no GPU."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        **{name: _version(distributions) for name, distributions in _LIBRARIES.items()},
        "commit": _commit(),
        "kernels": kernels_digest(),
        "nvrtc": _nvrtc(),
        **_torch(),
        **gpu(),
    }


def kernels_digest() -> str:
    """Twelve hex digits over every spec and template, so that figures can be tied to kernels without git."""
    from flashgen.host import paths

    digest = hashlib.sha256()
    for root in (paths.specs_dir(), paths.templates_dir()):
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _commit() -> str | None:
    """The checkout's commit, marked when tracked files differ from it."""
    from flashgen.host import paths

    root = paths.checkout()
    commit = root and _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return f"{commit}+changes" if _output("git", "-C", str(root), "status", "--porcelain", "-uno") else commit


def _nvrtc() -> str | None:
    from flashgen.errors import NoCompilerError
    from flashgen.toolchain.compile import compiler_version

    try:
        return compiler_version()
    except NoCompilerError:
        return None


def _torch() -> dict[str, Any]:
    """CUDA and cuDNN as PyTorch sees them."""
    if _version(("torch",)) is None:
        return {"torch_cuda": None, "cudnn": None}
    import torch

    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {"torch_cuda": torch.version.cuda, "cudnn": cudnn}


def gpu() -> dict[str, Any]:
    """The current device and its driver; None for each where there is no device."""
    from flashgen.runtime import device

    if not device.available():
        return dict.fromkeys(("gpu", "arch", "sms", "clock_mhz", "memory_gbps", "driver"))
    import cupy
    from cupy.cuda import runtime

    here = device.device(cupy.cuda.Device().id)
    clock_khz = runtime.deviceGetAttribute(runtime.cudaDevAttrClockRate, here.ordinal)
    driver = _output(
        "nvidia-smi", f"--id={here.ordinal}", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    return {
        "gpu": here.name,
        "arch": here.arch,
        "sms": here.num_sms,
        "clock_mhz": clock_khz // 1000,
        "memory_gbps": here.memory_gbps,
        "driver": driver,
    }


def _output(program: str, *arguments: str) -> str | None:
    """What the program prints, or None when it is missing, fails, or does not end."""
    path = shutil.which(program)
    if path is None:
        return None
    command = [path, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path.home(), timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
