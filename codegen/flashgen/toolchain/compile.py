"""CUDA source to machine code: NVRTC, without a GPU, a driver or a toolkit.

The binding is ``cupy.cuda.nvrtc``. It releases the GIL and NVRTC compiles concurrently, so threads scale as
processes do and `parallel` needs no worker processes. Wrapper headers are handed over in memory; nothing
is written to disk.

No option makes NVRTC faster at equal machine code: of the time for one kernel half is the optimiser, half is
ptxas and 3 % the front end, so neither fewer headers nor precompiled ones help, and ``--split-compile`` has a
single kernel to work on.
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
import time
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, CompileError, NoCompilerError
from flashgen.families.arch import arch_parts
from flashgen.host import paths, pipcommand

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BASE_OPTIONS: tuple[str, ...] = ("-std=c++17", "-default-device", "--ptxas-options=-v")
# Since CUDA 12.9 NVRTC asks the driver, where there is one, for what it compiled before. Then ptxas does not
# run, and the log says neither registers nor spills. flashgen has a cache of its own.
_NO_DRIVER_CACHE, _DRIVER_CACHE_SINCE = "-no-cache", (12, 9)

_MAX_ERRORS_SHOWN = 8
# Of `Compiled`; the other fields are integers or None.
_FIELD_TYPES = {"name": str, "arch": str, "cubin": bytes, "log": str, "seconds": (int, float)}


class Compiled(NamedTuple):
    """One kernel as the driver takes it.

    ``cubin`` is machine code for ``arch`` ("sm_90"), or NUL-terminated PTX text where ``arch`` is virtual
    ("compute_90"). ``registers`` are per thread; ``spill_stores``, ``spill_loads`` and ``stack`` are bytes
    per thread, spills summed over the kernel and the functions that it calls; ``smem_static`` is bytes per
    block. They are None where the compiler did not say, which is always so for PTX. ``seconds`` is what
    compiling took, and ``log`` what NVRTC printed.
    """

    name: str
    arch: str
    cubin: bytes
    log: str
    registers: int | None
    spill_stores: int | None
    spill_loads: int | None
    stack: int | None
    smem_static: int | None
    seconds: float

    @property
    def is_ptx(self) -> bool:
        """Whether the driver still has to translate this for the device."""
        return self.arch.startswith("compute_")

    def to_bytes(self) -> bytes:
        """One byte string for the cache: length of the description, the description as JSON, the code."""
        fields = self._asdict()
        del fields["cubin"]
        head = json.dumps(fields).encode()
        return len(head).to_bytes(4, "little") + head + self.cubin

    @classmethod
    def from_bytes(cls, data: bytes) -> Compiled:
        """Inverse of `to_bytes`. Raises ValueError for anything else."""
        end = 4 + int.from_bytes(data[:4], "little")
        try:
            compiled = cls(cubin=data[end:], **json.loads(data[4:end]))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a compiled kernel: {error}") from error
        for name, value in compiled._asdict().items():
            if not isinstance(value, _FIELD_TYPES.get(name, (int, NoneType))):
                raise ValueError(f"not a compiled kernel: its {name} is {value!r}")
        return compiled


def compile_cubin(
    source: str, name: str, arch: str, options: Sequence[str] = (), headers: Mapping[str, str] | None = None
) -> Compiled:
    """Compile ``source``, which defines ``extern "C"`` kernel ``name``, for an architecture such as "sm_90a".

    For a virtual one ("compute_90") the result carries PTX, which the driver translates when it loads it.
    ``options`` follow `BASE_OPTIONS`. ``headers`` maps the names in ``#include "..."`` to texts; by default
    `shipped_headers`. Raises CompileError with the failing lines, and NoCompilerError if CuPy or NVRTC is
    missing.
    """
    start = time.perf_counter()
    code, log = _run(source, name, arch, options, headers)
    seconds = time.perf_counter() - start
    return Compiled(name, arch, code, log, **parse_resources(log, name), seconds=seconds)


def compile_ptx(
    source: str, name: str, arch: str, options: Sequence[str] = (), headers: Mapping[str, str] | None = None
) -> str:
    """PTX text of ``source``; ``arch`` is "sm_90" or "compute_90". Raises what `compile_cubin` raises."""
    ptx, _ = _run(source, name, arch.replace("sm_", "compute_"), options, headers)
    return ptx.decode().rstrip("\0")


@functools.cache
def nvrtc() -> Any:
    """The module ``cupy.cuda.nvrtc`` with its library loaded. Raises NoCompilerError: what to install."""
    try:
        from cupy.cuda import nvrtc as binding
    except ImportError as error:
        raise NoCompilerError(f"CuPy cannot be imported ({error}); {pipcommand.compiler()}") from error
    try:
        binding.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NoCompilerError(f"NVRTC cannot be loaded ({reason}); {pipcommand.compiler()}") from error
    return binding


@functools.cache
def compiler_version() -> str:
    """Name and version, such as "nvrtc 13.0.88"; without the patch level where NVRTC is not a wheel."""
    major, minor = nvrtc().getVersion()
    return _wheel_version(major, f"{major}.{minor}.") or f"nvrtc {major}.{minor}"


@functools.cache
def installed_version() -> str | None:
    """The `compiler_version` to expect, as NVRTC's wheel says it; None where there is no wheel for this CuPy.

    NVRTC is not loaded for it, which would take longer than all else on the way to a kernel on disk. Loaded,
    it may turn out to be another one, so this names what to look for and never what was compiled.
    """
    try:
        from cupy_backends.cuda.api import driver
    except ImportError:
        return None
    major = driver.get_build_version() // 1000
    return _wheel_version(major, f"{major}.")


def _wheel_version(major: int, prefix: str) -> str | None:
    from importlib import metadata

    for wheel in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            text = metadata.distribution(wheel).read_text("METADATA")
        except metadata.PackageNotFoundError:
            continue
        # `metadata.version` would import a parser of e-mail for this line.
        match = re.search(r"^Version: *(\S+)", text or "", re.MULTILINE)
        if match and match[1].startswith(prefix):
            return f"nvrtc {match[1]}"
    return None


def supported_archs() -> tuple[int, ...]:
    """Architectures that this NVRTC can compile for, ascending, as numbers: 90 is sm_90."""
    return tuple(sorted(nvrtc().getSupportedArchs()))


def check_known(archs: Iterable[str]) -> None:
    """Raise BadParam for an architecture that this NVRTC cannot compile for."""
    supported = supported_archs()
    for arch in archs:
        if arch_parts(arch)[0] not in supported:
            names = " ".join(f"sm_{number}" for number in supported)
            raise BadParam(f"{compiler_version()} does not know {arch}; it compiles for {names}")


def shipped_headers() -> dict[str, str]:
    """Wrapper headers by the name under which a source includes them: "flashgen/sm80.cuh"."""
    root = paths.templates_dir() / "include"
    files = sorted(root.rglob("*.cuh"))
    return {file.relative_to(root).as_posix(): file.read_text("utf-8") for file in files}


def parse_resources(log: str, name: str) -> dict[str, int | None]:
    """The fields of `Compiled` that ptxas's log gives: registers, spills, stack and static shared memory.

    All are None where the log does not speak of ``name``. Functions that were not inlined count towards every
    kernel of the source, since the log does not say who calls them.
    """
    entries = set(re.findall(r"Compiling entry function '([^']+)'", log))
    if name not in entries:
        return dict.fromkeys(("registers", "spill_stores", "spill_loads", "stack", "smem_static"))
    functions = dict(re.findall(r"Function properties for (\S+)\n(.*)", log))
    mine = [line for function, line in functions.items() if function == name or function not in entries]
    used = re.search(rf"Compiling entry function '{re.escape(name)}'(?s:.*?)(Used .*)", log)
    usage = used[1] if used else ""
    return {
        "registers": _number(r"Used (\d+) registers", usage),
        "spill_stores": sum(_number(r"(\d+) bytes spill stores", line) or 0 for line in mine),
        "spill_loads": sum(_number(r"(\d+) bytes spill loads", line) or 0 for line in mine),
        "stack": _number(r"(\d+) bytes cumulative stack", usage)
        or _number(r"(\d+) bytes stack frame", functions.get(name, ""))
        or 0,
        "smem_static": _number(r"(\d+) bytes smem", usage) or 0,
    }


def _run(
    source: str, name: str, arch: str, options: Sequence[str], headers: Mapping[str, str] | None
) -> tuple[bytes, str]:
    """Cubin for sm_XX, PTX for compute_XX; and the log."""
    binding = nvrtc()
    headers = shipped_headers() if headers is None else headers
    flags = [f"-arch={arch}", *BASE_OPTIONS, *options]
    if binding.getVersion() >= _DRIVER_CACHE_SINCE:
        flags.append(_NO_DRIVER_CACHE)
    if any("#include <" in text for text in (source, *headers.values())):
        flags += [f"-I{folder}" for folder in cuda_include_dirs(binding.getVersion()[0])]
    program = binding.createProgram(
        source, f"{name}.cu", [text.encode() for text in headers.values()], [key.encode() for key in headers]
    )
    try:
        binding.compileProgram(program, flags)
        if arch.startswith("sm_"):
            code = _whole_elf(binding.getCUBIN(program))
        else:
            code = binding.getPTX(program).rstrip(b"\0") + b"\0"
        return code, _log(binding, program)
    except binding.NVRTCError as error:
        log = _log(binding, program) or str(error)
        texts = {f"{name}.cu": source, **headers}
        message = f"{name}.cu does not compile for {arch} with {compiler_version()}:\n"
        raise CompileError(message + annotated(log, texts, _ptx_so_far(binding, program, log))) from None
    finally:
        binding.destroyProgram(program)


def _whole_elf(cubin: bytes) -> bytes:
    """``cubin`` with the last byte, a zero, that CuPy 14 takes for a string's end and drops."""
    tables = struct.unpack_from("<QQ", cubin, 32)
    entry_size, entries, section_size, sections = struct.unpack_from("<4H", cubin, 54)
    end = max(tables[0] + entry_size * entries, tables[1] + section_size * sections)
    return cubin + b"\0" if len(cubin) == end - 1 else cubin


def _log(binding: Any, program: int) -> str:
    return binding.getProgramLog(program).rstrip("\0 \n")


def _ptx_so_far(binding: Any, program: int, log: str) -> str:
    """The PTX that ptxas refused, since its messages give lines of that."""
    return binding.getPTX(program).decode() if "ptxas" in log else ""


def annotated(log: str, texts: Mapping[str, str], ptx: str = "") -> str:
    """NVRTC's log with a numbered excerpt of the source, or of the PTX, under each error.

    ``texts`` maps file names of the log to their contents.
    """
    log = re.sub(r"^  .*\n +\^\n?", "", log, flags=re.MULTILINE)
    out: list[str] = []
    errors = 0
    for line in log.splitlines():
        in_source = re.match(r"(\S[^()]*)\((\d+)\): .*error", line)
        in_ptx = re.match(r"ptxas .*\bline (\d+); error", line)
        errors += bool(in_source or in_ptx)
        if errors > _MAX_ERRORS_SHOWN and (in_source or in_ptx):
            continue
        if line.strip():
            out.append(line)
        if in_source and in_source[1] in texts:
            out += _excerpt(texts[in_source[1]], int(in_source[2]))
        elif in_ptx and ptx:
            out += _excerpt(ptx, int(in_ptx[1]))
    if errors > _MAX_ERRORS_SHOWN:
        out.append(f"... and {errors - _MAX_ERRORS_SHOWN} errors more")
    return "\n".join(out)


def _excerpt(text: str, line: int) -> list[str]:
    lines = text.splitlines()
    shown = range(max(1, line - 2), min(len(lines), line + 2) + 1)
    return [f"  {'>' if n == line else ' '} {n:5d} | {lines[n - 1]}" for n in shown]


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


@functools.cache
def cuda_include_dirs(major: int) -> tuple[Path, ...]:
    """The folder of CUDA's own headers: that version's runtime wheel, else a toolkit; empty if neither."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    folders = [place / f"cu{major}" / "include" for place in wheels]
    folders += [place / "cuda_runtime" / "include" for place in wheels if major == 12]
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders += [Path(root) / "include" for root in toolkits if root]
    return tuple([folder for folder in folders if (folder / "cuda_fp16.h").is_file()][:1])
