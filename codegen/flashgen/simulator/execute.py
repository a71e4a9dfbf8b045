"""A launch in the simulator: a problem's parameters and memory, its blocks shared out among threads, and what
came of it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashgen.errors import InternalError, SimulationError
from flashgen.operators.attention import ELEMENT_BYTES
from flashgen.runtime.launch import POINTERS, geometry, maps, pack, vector_width
from flashgen.runtime.tensormap import BYTES
from flashgen.simulator.library import COUNTERS, SITE_KINDS, Launch, RawReport, RawTensorMap, Region, Site
from flashgen.toolchain.processors import processors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.attention import Problem
    from flashgen.runtime.arrays import Pointers
    from flashgen.runtime.device import Device
    from flashgen.schedule.tensormap import TensorMap
    from flashgen.simulator.library import Library
    from flashgen.spec.variant import Variant

_MAX_SITES = 256
_CHECKS = (
    "",
    "launch",
    "divergence",
    "barrier",
    "deadlock",
    "uninitialised shared memory",
    "shared bounds",
    "alignment",
    "race",
    "copy in flight",
    "global bounds",
    "global access",
    "uninitialised global memory",
    "operand",
    "uninitialised register",
    "register in flight",
    "mbarrier",
    "proxy",
    "register pool",
    "dependency",
)
# The names of SimulationError.check.
CHECKS = _CHECKS[1:]


@dataclass(frozen=True, slots=True)
class Access:
    """What one source line did to memory. ``kind`` is one of SITE_KINDS, ``instructions`` counts warps.

    ``actual`` and ``ideal`` are wavefronts of shared memory, or 32-byte sectors of global memory: what the
    addresses cost, and the fewest for as many bytes.
    """

    line: int
    kind: str
    instructions: int
    bytes: int
    ideal: int
    actual: int

    @property
    def conflicts(self) -> int:
        """Wavefronts, or sectors, beyond the fewest."""
        return self.actual - self.ideal


@dataclass(frozen=True)
class Report:
    """What the blocks of a launch executed: ``counters`` by the names in COUNTERS, ``accesses`` by line."""

    counters: dict[str, int]
    accesses: tuple[Access, ...] = field(repr=False)

    @property
    def mma(self) -> int:
        """Matrix instructions of all shapes, in warps; those of a warpgroup count once."""
        return sum(count for name, count in self.counters.items() if name.startswith(("mma_", "wgmma_")))


def simulate(
    library: Library,
    variant: Variant,
    problem: Problem,
    pointers: Pointers,
    device: Device,
    *,
    seed: int = 0,
    threads: int | None = None,
) -> Report:
    """Run the kernel on host memory: ``pointers`` are those of q, k, v, mask, out and lse, 0 where absent.

    ``seed`` fixes the order in which the threads of a block take their turns. ``threads``, by default as many
    as there are cores, run blocks side by side; neither changes what a correct kernel computes.

    Raises SimulationError where a block does something wrong, of the first such block of the grid that was
    reached, and InternalError where source and package disagree on the parameters.
    """
    size = geometry(problem, variant, device)
    params = _parameters(problem, variant, device, pointers)
    regions = _regions(problem, pointers)
    blocks, shared = (size.blocks, 1, 1), size.smem_bytes
    return execute(
        library,
        params,
        blocks,
        (size.threads, 1, 1),
        shared,
        regions,
        max_shared_bytes=variant.max_smem,
        dependent=variant.dependent_launch,
        seed=seed,
        threads=threads,
    )


def execute(
    library: Library,
    params: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    regions: Sequence[Region],
    *,
    max_shared_bytes: int = 0,
    dependent: bool = False,
    seed: int = 0,
    threads: int | None = None,
) -> Report:
    """Launch any kernel that takes one struct, ``params``; ``regions`` are all the memory that it may touch.

    ``max_shared_bytes`` is what a block may ask for, 0 for what the largest GPU allows. A ``dependent``
    launch may begin before those ahead of it have ended. The rest, and what is raised, as in ``simulate``.
    """
    if len(params) != library.params_bytes:
        raise InternalError(
            f"{library.name} takes parameters of {library.params_bytes} bytes, and {len(params)} were given; "
            "render it again"
        )
    buffer = ctypes.create_string_buffer(params, len(params))
    table = (Region * len(regions))(*regions)

    def run(share: tuple[int, int]) -> RawReport:
        launch = Launch(
            params=ctypes.addressof(buffer),
            params_bytes=len(params),
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            max_shared_bytes=max_shared_bytes,
            seed=seed & (1 << 64) - 1,
            first_block=share[0],
            num_blocks=share[1],
            regions=table,
            num_regions=len(table),
            flags=Launch.DEPENDENT if dependent else 0,
        )
        raw = RawReport(sites=(Site * _MAX_SITES)(), max_sites=_MAX_SITES)
        library.simulate(launch, raw)
        return raw

    shares = _shares(math.prod(grid), threads or processors())
    if len(shares) == 1:
        raws = [run(shares[0])]
    else:
        with ThreadPoolExecutor(len(shares)) as pool:
            raws = list(pool.map(run, shares))
    for raw in raws:
        if raw.error:
            raise _error(raw, library.name)
    return _merged(raws)


def _parameters(problem: Problem, variant: Variant, device: Device, pointers: Pointers) -> bytes:
    """The parameter struct, as the launcher of a GPU fills it in."""
    template, slots, width = pack(problem, variant, device)
    values = bytearray(template)
    words = memoryview(values)
    for word, position in slots:
        words[8 * word : 8 * word + 8] = pointers[position].to_bytes(8, "little")
    if width is not None:
        mask = pointers[POINTERS.index("mask")]
        aligned = vector_width(mask, *(problem.mask_strides or (0, 0, 0)))
        words[4 * width : 4 * width + 4] = aligned.to_bytes(4, "little")
    for offset, position, described in maps(problem, variant):
        words[offset : offset + BYTES] = encode(described, pointers[position])
    return bytes(values)


def encode(described: TensorMap, pointer: int) -> bytes:
    """What stands for a tensor map in a simulated kernel's parameters: the twin of ``tensormap.encode``."""
    return bytes(
        RawTensorMap(
            magic=RawTensorMap.MAGIC,
            address=pointer,
            strides=described.strides,
            extents=described.extents,
            box=described.box,
            rank=len(described.extents),
            element_bytes=ELEMENT_BYTES[described.dtype],
            swizzle=described.swizzle,
        )
    )


def _regions(problem: Problem, pointers: Pointers) -> list[Region]:
    """The memory of the arrays, without the gaps between their rows."""
    size = problem.element_bytes
    row, row_v = problem.head_dim * size, problem.head_dim_v * size
    q = (problem.batch, problem.seqlen_q, problem.num_heads_q)
    kv = (problem.batch, problem.seqlen_kv, problem.num_heads_kv)
    rows = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    lse = (problem.num_heads_q * problem.seqlen_q * 4, problem.seqlen_q * 4, 4)
    inputs, outputs = Region.READABLE | Region.INITIALISED, Region.READABLE | Region.WRITABLE
    arrays = {
        b"q": (q, problem.q_strides, size, row, inputs),
        b"k": (kv, problem.k_strides, size, row, inputs),
        b"v": (kv, problem.v_strides, size, row_v, inputs),
        b"mask": (rows, problem.mask_strides or (0, 0, 0), 1, problem.seqlen_kv, inputs),
        b"out": (q, problem.out_strides, size, row_v, outputs),
        b"lse": (rows, lse, 1, 4, outputs),
    }
    found = []
    for (name, (shape, strides, unit, length, access)), pointer in zip(arrays.items(), pointers, strict=True):
        if pointer:
            found += [
                Region(pointer + start, stop - start, name, access)
                for start, stop in _runs(shape, tuple(stride * unit for stride in strides), length)
            ]
    return found


def _runs(shape: Sequence[int], strides: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Bytes from the pointer, as (start, stop), that rows of ``length`` bytes cover; adjacent ones joined."""
    import numpy as np

    if 0 in shape or length == 0:
        return []
    starts = np.zeros(1, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        steps = np.arange(extent if stride else 1, dtype=np.int64) * stride
        starts = (starts[:, None] + steps).ravel()
    starts = np.unique(starts)
    first = np.flatnonzero(np.diff(starts, prepend=starts[0] - length - 1) > length)
    stops = starts[np.append(first[1:] - 1, len(starts) - 1)] + length
    return list(zip(starts[first].tolist(), stops.tolist(), strict=True))


def _shares(blocks: int, threads: int) -> list[tuple[int, int]]:
    """(first block, number of blocks) for each thread. An empty grid is a share, for the engine to refuse."""
    threads = max(1, min(blocks, threads))
    bounds = [blocks * thread // threads for thread in range(threads + 1)]
    return [(first, stop - first) for first, stop in itertools.pairwise(bounds)]


def _error(raw: RawReport, kernel: str) -> SimulationError:
    known = 0 < raw.error < len(_CHECKS)
    return SimulationError(
        raw.message.decode(errors="replace"),
        check=_CHECKS[raw.error] if known else "other",
        kernel=kernel,
        block=raw.block[0],
        thread=raw.thread if raw.thread >= 0 else None,
        line=raw.line or None,
        other_thread=raw.other_thread if raw.other_thread >= 0 else None,
        other_line=raw.other_line or None,
    )


def _merged(raws: Sequence[RawReport]) -> Report:
    counters = {name: sum(getattr(raw.counters, name) for raw in raws) for name in COUNTERS}
    sites: dict[tuple[int, int], list[int]] = {}
    for raw in raws:
        for site in raw.sites[: raw.num_sites]:
            total = sites.setdefault((site.line, site.kind), [0, 0, 0, 0])
            for at, value in enumerate((site.instructions, site.bytes, site.ideal, site.actual)):
                total[at] += value
    accesses = tuple(Access(line, SITE_KINDS[kind], *total) for (line, kind), total in sorted(sites.items()))
    return Report(counters, accesses)
