"""From a rendered kernel to a function that simulates it: compiled for the host, cached on disk, loaded.

Two objects make one library: the engine, which knows no kernel and is compiled once, and a shim that includes
the rendered file as it is on disk. Both are content-addressed by all their sources, the compiler and the
options. The C structs here are as in ``include/simulator/abi.h``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import CacheWarning, InternalError
from flashgen.host import forks, paths
from flashgen.simulator import hostcompiler
from flashgen.toolchain import cache as caches
from flashgen.toolchain.parallel import processors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.families.variant import Variant
    from flashgen.simulator.hostcompiler import HostCompiler
    from flashgen.toolchain.cache import CubinCache

ABI = 7
_ELF = b"\x7fELF"
HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"

_COMMON = ("-std=c++20", "-fPIC", "-fvisibility=hidden")
_ENGINE_OPTIONS = (*_COMMON, "-O2")
# -Og compiles in four fifths of the time of -O1. Kernels run as fast, since the engine takes most of a run.
# No contraction, so that only what the source says is fused. The pattern makes a register that was never set
# recognisable. Kernels may look at numbers as other types, as CUDA lets them.
_KERNEL_OPTIONS = (
    *_COMMON,
    "-Og",
    "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-Wno-psabi",
)
# A function that is inlined by force has no frame, and no arguments, for a debugger to show.
_UNOPTIMISED = ("-O0", "-ggdb3", "-Dalways_inline=noinline")
# With these an engine has 18 MB instead of 0.3, which each library would read.
_DEBUGGED_ENGINE_OPTIONS = (*_ENGINE_OPTIONS, "-g")

_KERNEL = re.compile(
    r"__global__\s+void\s+(?:__cluster_dims__\s*\((?P<cluster>[^()]*)\)\s*)?"
    r"(?:__launch_bounds__\s*\((?P<bounds>[^()]*)\)\s*)?(?P<name>\w+)\s*\(",
    re.DOTALL,
)
_SHARED = re.compile(r"\bextern\s+__shared__\b[^;]*?(?P<name>\w+)\s*\[\s*\]\s*;")


class Region(ctypes.Structure):
    """Memory that a kernel may touch: ``access`` adds up READABLE, WRITABLE, INITIALISED, and SETTLED
    where no grid writes that the kernel may run beside.
    """

    READABLE, WRITABLE, INITIALISED, SETTLED = 1, 2, 4, 8
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("access", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class RawTensorMap(ctypes.Structure):
    """What the engine reads instead of a driver's tensor map; dimension 0 has no stride."""

    MAGIC = 0x70616D726F736E65
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("strides", ctypes.c_uint64 * 4),
        ("extents", ctypes.c_uint32 * 5),
        ("box", ctypes.c_uint32 * 5),
        ("rank", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 7),
    )


class Launch(ctypes.Structure):
    """One launch, or a range of its blocks. ``flags`` adds up DEPENDENT, FOLLOWED, EARLY and ALONE; ``abi.h``
    says what each means.
    """

    DEPENDENT = 1
    FOLLOWED = 2
    EARLY = 4
    ALONE = 8

    _fields_ = (
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("max_shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("first_block", ctypes.c_uint64),
        ("num_blocks", ctypes.c_uint64),
        ("regions", ctypes.POINTER(Region)),
        ("num_regions", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class Site(ctypes.Structure):
    """One source line and one kind of access."""

    _fields_ = (
        ("line", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("instructions", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("ideal", ctypes.c_uint64),
        ("actual", ctypes.c_uint64),
    )


COUNTERS = (
    "blocks", "mma_m16n8k16_f16", "mma_m16n8k16_bf16", "mma_m16n8k8_tf32", "mma_m16n8k32_e4m3", "wgmma_f16",
    "wgmma_bf16", "wgmma_e4m3", "ldmatrix", "stmatrix", "cp_async", "cp_async_commit", "cp_async_wait",
    "tensor_loads", "tensor_stores", "mbarrier_arrivals", "mbarrier_waits", "barriers", "warp_syncs",
    "shuffles", "votes", "exp2", "log2", "global_bytes_read", "global_bytes_written", "shared_bytes_read",
    "shared_bytes_written", "shared_wavefronts", "shared_wavefronts_ideal", "global_sectors",
    "global_sectors_ideal", "grid_waits", "switches",
)  # fmt: skip


class Counters(ctypes.Structure):
    """What was executed, in the units that ``abi.h`` says."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTERS)


SITE_KINDS = (
    "ldmatrix",
    "shared load",
    "shared store",
    "shared copy",
    "global load",
    "global store",
    "global copy",
    "wgmma",
    "tensor load",
    "tensor store",
    "global add",
)


class RawReport(ctypes.Structure):
    """What one call of the library gives. ``error`` is GIVEN_UP, which is none, where a block of an EARLY
    launch has to wait.
    """

    GIVEN_UP = 20

    _fields_ = (
        ("error", ctypes.c_int32),
        ("line", ctypes.c_uint32),
        ("other_line", ctypes.c_uint32),
        ("thread", ctypes.c_int32),
        ("other_thread", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("message", ctypes.c_char * 2048),
        ("counters", Counters),
        ("sites", ctypes.POINTER(Site)),
        ("max_sites", ctypes.c_uint64),
        ("num_sites", ctypes.c_uint64),
    )


_FUNCTIONS = ("flashgen_simulator_abi", "flashgen_params_size", "flashgen_simulate")


class Library:
    """A compiled kernel. ``simulate`` takes pointers to a Launch and a RawReport; threads may share it.

    ``digest`` is the SHA-256 of the source that was compiled.
    """

    def __init__(self, path: Path, name: str, digest: str) -> None:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            advice = paths.temporary_problem()
            raise InternalError(
                f"{name} compiles for the simulator but cannot be loaded: {error}"
                + (f"; {advice}" if advice else "")
            ) from error
        if not all(hasattr(loaded, function) for function in _FUNCTIONS):
            raise InternalError(f"{name} can be loaded but is not a library of the simulator")
        if (version := loaded.flashgen_simulator_abi()) != ABI:
            raise InternalError(f"the simulator's engine has interface {version}; this package wants {ABI}")
        loaded.flashgen_params_size.restype = ctypes.c_uint64
        self.name = name
        self.digest = digest
        self.params_bytes = loaded.flashgen_params_size()
        self.simulate = loaded.flashgen_simulate
        self.simulate.argtypes = (ctypes.POINTER(Launch), ctypes.POINTER(RawReport))
        self.simulate.restype = ctypes.c_int


def supports(variant: Variant) -> bool:
    """Whether the PTX wrappers that the variant's kernel includes have host bodies."""
    return (INCLUDE / variant.header).is_file()


_loaded: dict[str, Library] = {}
_guard = forks.guard()


def load(source: str, name: str, cache: CubinCache | None = None) -> Library:
    """The library of the rendered kernel ``name``; compiled where neither this process nor the cache has it.

    Raises NoHostCompilerError, CompileError, and InternalError for a source without a kernel of that name.
    """
    compiler = hostcompiler.find()
    definitions = _definitions(source, name)
    digest = hashlib.sha256(source.encode()).hexdigest()
    key = _key(compiler, _KERNEL_OPTIONS, (digest, name, _tree_digest(), *definitions))
    library = _loaded.get(key)
    if library is not None:
        return library

    built: list[bool] = []

    def build() -> bytes:
        built.append(True)
        with paths.temporary_folder() as folder:
            # Messages name the file alone: the folder is gone when they are read. Stripped, an object takes
            # a twentieth of the room.
            options = (*_KERNEL_OPTIONS, "-s", f"-ffile-prefix-map={folder}/=")
            engine = _engine(compiler, _ENGINE_OPTIONS, cache)
            return _build(compiler, source, name, definitions, Path(folder), options, engine).read_bytes()

    # This is host code, and runs in this process: none of it comes from a bundle.
    cache = cache or caches.default()
    payload = cache.get_or_build(key, build, bundled=False)
    try:
        library = _opened(payload, key, name, digest)
    except InternalError as error:
        if built:
            raise
        _warn_of_garbage(key, name, error)
        payload = build()
        cache.put(key, payload)
        library = _opened(payload, key, name, digest)
    with _guard:
        return _loaded.setdefault(key, library)


def _opened(payload: bytes, key: str, name: str, digest: str) -> Library:
    with paths.temporary_folder() as folder:
        path = Path(folder, f"{name}-{key[:12]}.so")
        path.write_bytes(payload)
        return Library(path, name, digest)


def _warn_of_garbage(key: str, name: str, why: object) -> None:
    warnings.warn(f"{key} is not {name} ({why}); it is built again", CacheWarning, stacklevel=4)


def load_in(folder: Path, source: str, name: str) -> Library:
    """As ``load``, but unoptimised, for a debugger: ``NAME.cu`` and ``NAME.so`` stay in ``folder``."""
    compiler = hostcompiler.find()
    folder.mkdir(parents=True, exist_ok=True)
    options = (*_KERNEL_OPTIONS, *_UNOPTIMISED)
    engine = _engine(compiler, _DEBUGGED_ENGINE_OPTIONS, None)
    path = _build(compiler, source, name, _definitions(source, name), folder.resolve(), options, engine)
    return Library(path, name, hashlib.sha256(source.encode()).hexdigest())


def _build(
    compiler: HostCompiler,
    source: str,
    name: str,
    definitions: tuple[str, ...],
    folder: Path,
    options: tuple[str, ...],
    engine: bytes,
) -> Path:
    kernel = folder / f"{name}.cu"
    kernel.write_bytes(source.encode())
    engine_object = folder / "engine.o"
    engine_object.write_bytes(engine)
    output = folder / f"{name}.so"
    shim = HERE / "variant.cpp"
    path = str(kernel).replace("\\", "\\\\").replace('"', '\\"')
    arguments = (*options, f"-I{INCLUDE}", f'-DFLASHGEN_SOURCE="{path}"', *definitions)
    hostcompiler.build(compiler, (*arguments, "-shared"), (shim, engine_object), output, name)
    return output


def _engine(compiler: HostCompiler, options: tuple[str, ...], cache: CubinCache | None) -> bytes:
    """The relocatable object of the engine, from the cache where it is there."""

    def build() -> bytes:
        with paths.temporary_folder() as folder:
            sources = sorted((HERE / "engine").glob("*.cpp"))
            objects = [Path(folder, f"{source.stem}.o") for source in sources]
            command = (*options, "-c", f"-I{INCLUDE}")

            def compile_one(source: Path, target: Path) -> None:
                hostcompiler.build(compiler, command, (source,), target, "the simulator's engine")

            with ThreadPoolExecutor(processors()) as pool:
                list(pool.map(compile_one, sources, objects))
            output = Path(folder, "engine")
            hostcompiler.build(compiler, ("-r",), objects, output, "the simulator's engine")
            return output.read_bytes()

    key = _key(compiler, options, ("engine", _tree_digest()))
    cache = cache or caches.default()
    engine = cache.get_or_build(key, build, bundled=False)
    if not engine.startswith(_ELF):
        _warn_of_garbage(key, "the simulator's engine", "it is not an object file")
        engine = build()
        cache.put(key, engine)
    return engine


def _definitions(source: str, name: str) -> tuple[str, ...]:
    """What the shim must know of the kernel, from the text of its declaration."""
    kernel = next((match for match in _KERNEL.finditer(source) if match["name"] == name), None)
    if kernel is None:
        raise InternalError(f"the source has no __global__ function {name}")
    definitions = [f"-DFLASHGEN_KERNEL={name}"]
    if kernel["bounds"] is not None:
        definitions.append(f"-DFLASHGEN_LAUNCH_BOUNDS={' '.join(kernel['bounds'].split())}")
    if kernel["cluster"] is not None:
        definitions.append(f"-DFLASHGEN_CLUSTER_DIMS={kernel['cluster']}")
    shared = _SHARED.search(source)
    if shared is not None:
        definitions.append(f"-DFLASHGEN_SHARED_MEMORY={shared['name']}")
    return tuple(definitions)


@functools.cache
def _tree_digest() -> str:
    """SHA-256 over the engine, the shim and the headers."""
    digest = hashlib.sha256()
    for path in sorted(_sources()):
        digest.update(f"\0{path.relative_to(HERE).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterable[Path]:
    yield HERE / "variant.cpp"
    for folder in (HERE / "engine", INCLUDE):
        yield from (path for path in folder.rglob("*") if path.is_file())


def _key(compiler: HostCompiler, options: tuple[str, ...], parts: tuple[str, ...]) -> str:
    return caches.key_for("\0".join(parts), f"host {platform.machine()}", options, str(compiler))
