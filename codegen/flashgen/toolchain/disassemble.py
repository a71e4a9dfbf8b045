"""Machine code to SASS, through NVIDIA's nvdisasm, and what of it is worth counting."""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import BadParam, InternalError
from flashgen.host import paths

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTABLE: dict[str, str] = {
    "HMMA": "matrix product on the tensor cores, by a warp",
    "HGMMA": "matrix product on the tensor cores, by a warpgroup",
    "QGMMA": "matrix product of FP8, by a warpgroup",
    "LDSM": "ldmatrix: shared memory to matrix fragments",
    "STSM": "stmatrix: matrix fragments to shared memory",
    "LDGSTS": "cp.async: global to shared memory",
    "UTMALDG": "tensor memory access, load",
    "UTMASTG": "tensor memory access, store",
    "LDG": "load from global memory",
    "STG": "store to global memory",
    "LDS": "load from shared memory",
    "STS": "store to shared memory",
    "LDL": "load from local memory: a spill or an array that is not in registers",
    "STL": "store to local memory: a spill or an array that is not in registers",
    "MUFU": "special functions: exp2, log2, reciprocal",
    "FFMA": "fused multiply-add in fp32",
    "FMNMX": "maximum or minimum in fp32",
    "SHFL": "shuffle within a warp",
    "BAR": "barrier of the block",
    "SYNCS": "barrier in shared memory (mbarrier)",
    "BRA": "branch",
}

_ALWAYS = ("LDL", "STL")  # that there is none is worth saying
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE
)
_TIMEOUT = 120.0  # seconds; a kernel takes one
_INSTALL = 'pip install "nvidia-cuda-nvdisasm>=13" installs it'


class NoDisassemblerError(InternalError):
    """There is no nvdisasm on this machine."""


def nvdisasm() -> Path:
    """The nvdisasm on PATH, in a toolkit (CUDA_HOME, CUDA_PATH, /usr/local/cuda), or in the PyPI wheel.

    Raises NoDisassemblerError, which says how to install one.
    """
    program = next(_installed(), None)
    if program is None:
        raise NoDisassemblerError(
            f"SASS needs nvdisasm, which is neither on PATH, nor in a CUDA toolkit, nor installed; {_INSTALL}"
        )
    return program


def _installed() -> Iterator[Path]:
    """Each nvdisasm, in the order in which they are tried."""
    for folder in (None, *_folders()):
        program = shutil.which("nvdisasm", path=None if folder is None else str(folder))
        if program:
            yield Path(program)


def sass(cubin: bytes, *, lines: bool = False) -> str:
    """The instructions of every kernel in ``cubin``, one a line with its address. With ``lines`` comments say
    which line of the source each one comes from, which a cubin knows that was compiled with
    ``--generate-line-info``.

    Raises BadParam for PTX or anything else that is not a cubin, NoDisassemblerError, and InternalError with
    nvdisasm's message, for instance when it is older than the compiler.
    """
    if not cubin.startswith(b"\x7fELF"):
        raise BadParam("only machine code has SASS; this is PTX, or no kernel at all")
    tools = dict.fromkeys((nvdisasm(), *_installed()))
    failures = []
    with paths.temporary_folder() as folder:
        file = folder / "kernel.cubin"
        file.write_bytes(cubin)
        for tool in tools:
            command = [tool, "-c", *(["--print-line-info-inline"] if lines else []), file]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
            except (OSError, subprocess.TimeoutExpired) as error:
                failures.append(f"{tool} fails: {error}")
                continue
            if done.returncode == 0:
                return done.stdout
            failures.append(f"{tool} fails: {(done.stderr or done.stdout).strip()}")
    raise InternalError(f"{'; '.join(failures)}; it may be older than the compiler. {_INSTALL}")


def mnemonics(sass: str) -> collections.Counter[str]:
    """How often each instruction occurs in the text, without its modifiers: "HMMA" for HMMA.16816.F32."""
    return collections.Counter(_INSTRUCTION.findall(sass))


def summary(sass: str) -> dict[str, int]:
    """The instructions of `NOTABLE` that occur, with how often, after the number of all but padding."""
    counts = mnemonics(sass)
    del counts["NOP"]
    kept = {name: counts[name] for name in NOTABLE if counts[name] or name in _ALWAYS}
    return {"instructions": counts.total(), **kept}


def _folders() -> Iterator[Path]:
    import importlib.util

    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    yield from (Path(root, "bin") for root in toolkits if root)
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for place in wheels:
        yield from sorted(place.glob("cu[0-9]*/bin"), reverse=True)
        yield place / "cuda_nvdisasm" / "bin"
