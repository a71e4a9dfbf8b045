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
from flashgen.operators.arguments import DTYPE_BYTES
from flashgen.schedule.parameters import filled
from flashgen.schedule.tensormap import BYTES
from flashgen.schedule.workspace import buffer_of
from flashgen.simulator.library import COUNTERS, SITE_KINDS, Launch, RawReport, RawTensorMap, Region, Site
from flashgen.toolchain.parallel import processors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.runtime.arrays import Pointers
    from flashgen.schedule.plan import Step, Steps
    from flashgen.schedule.tensormap import TensorMap
    from flashgen.simulator.library import Library

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
        """Matrix instructions of all shapes, in warps; an instruction of a warpgroup counts once."""
        return sum(count for name, count in self.counters.items() if name.startswith(("mma_", "wgmma_")))


def simulate(
    libraries: Sequence[Library],
    planned: Steps,
    problem: Problem,
    pointers: Pointers,
    *,
    seed: int = 0,
    threads: int | None = None,
    overlap: bool = False,
) -> tuple[Report, ...]:
    """Run the steps of a call on host memory, in order: ``pointers`` has a pointer for each of the operator's
    arguments, 0 if absent, and then the pointer of the workspace, if there is one.

    ``libraries`` has the compiled kernel of each step. ``seed`` fixes the order in which the threads of a
    block take their turns. ``threads``, by default as many as there are cores, run blocks side by side;
    neither changes what a correct kernel computes. With ``overlap`` a dependent launch overlaps with the step
    before it: before each block of that step, its own blocks run that have not run yet and need not wait.
    Blocks, or clusters, then run one after another, on one core.

    Raises SimulationError for the first block that does something wrong, and InternalError where source and
    package disagree on the parameters.
    """
    grids = []
    written: set[str] = set()  # what an earlier step may have filled
    settled: set[str] = set()  # arguments that the step before, which has waited for others, does not write
    for library, step in zip(libraries, planned.steps, strict=True):
        variant, launch = step.variant, step.launch
        writes = {param.name for param in variant.params if not param.ctype.startswith("const ")}
        regions = _regions(problem, pointers, written, settled, writes)
        regions += _slices(planned, variant, pointers, written)
        grids.append(
            SimulatedGrid(
                library,
                _parameters(step, problem, pointers),
                (launch.blocks, 1, 1),
                (launch.threads, 1, 1),
                launch.smem_bytes,
                regions,
                max_shared_bytes=variant.max_smem,
                dependent=variant.dependent_launch,
                followed=step is not planned.steps[-1],
                cluster=variant.grid.cluster,
                seed=seed,
            )
        )
        settled = {argument.name for argument in problem.operator.arguments} - writes
        written |= writes
    if not overlap:
        return tuple(grid.run(threads) for grid in grids)
    return tuple(grid.run_overlapped(behind) for grid, behind in itertools.zip_longest(grids, grids[1:]))


class SimulatedGrid:
    """A launch of any kernel that takes one struct. Its blocks may run in several calls of the library."""

    def __init__(
        self,
        library: Library,
        params: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        regions: Sequence[Region],
        *,
        max_shared_bytes: int = 0,
        dependent: bool = False,
        followed: bool = False,
        cluster: int = 1,
        seed: int = 0,
    ) -> None:
        """``params`` is the struct; ``regions`` are all the memory that the kernel may touch.

        ``max_shared_bytes`` is the most shared memory of a block, 0 for the limit of the largest GPU. A
        ``dependent`` launch may begin before earlier ones have ended; a ``followed`` one precedes another
        step of its call. ``cluster`` is how many thread blocks a cluster has. ``seed``, and the errors of
        this function and of the methods, as in ``simulate``.
        """
        if len(params) != library.params_bytes:
            raise InternalError(
                f"{library.name} takes parameters of {library.params_bytes} bytes, and {len(params)} were "
                "given; render it again"
            )
        self._library = library
        self._dependent, self._cluster = dependent, cluster
        self._blocks = math.prod(grid)
        # The first blocks of clusters. An empty grid has one, for the engine to refuse.
        self._left: Sequence[int] = range(0, max(1, self._blocks), cluster)
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._sites: dict[tuple[int, int], list[int]] = {}
        self._params = ctypes.create_string_buffer(params, len(params))
        self._regions = (Region * len(regions))(*regions)
        self._launch = {
            "params": ctypes.addressof(self._params),
            "params_bytes": len(params),
            "grid": grid,
            "block": block,
            "shared_bytes": shared_bytes,
            "max_shared_bytes": max_shared_bytes,
            "seed": seed & (1 << 64) - 1,
            "regions": self._regions,
            "num_regions": len(self._regions),
        }
        self._flags = dependent * Launch.DEPENDENT | followed * Launch.FOLLOWED

    def run(self, threads: int | None = None) -> Report:
        """Run all blocks, shared out among ``threads``."""
        shares = _shares(self._blocks, threads or processors(), self._cluster)
        if len(shares) == 1:
            raws = [self._call(*shares[0], Launch.ALONE)]
        else:
            with ThreadPoolExecutor(len(shares)) as pool:
                raws = list(pool.map(self._call, *zip(*shares, strict=True)))
        self._add(raws)
        return self._report()

    def run_overlapped(self, behind: SimulatedGrid | None) -> Report:
        """Run the blocks that are left. Before each, run the blocks of the next grid that need not wait."""
        for first in self._left:
            if behind is not None and behind._dependent:
                behind._left = [block for block in behind._left if not behind.runs_early(block)]
            self._add([self._call(first, self._cluster, Launch.ALONE)])
        return self._report()

    def runs_early(self, first: int) -> bool:
        """Run a block, or a cluster, to its end, unless it has to wait for earlier grids."""
        raw = self._call(first, self._cluster, Launch.ALONE | Launch.EARLY)
        if raw.error == RawReport.GIVEN_UP:
            return False
        self._add([raw])
        return True

    def _call(self, first: int, count: int, flags: int = 0) -> RawReport:
        launch = Launch(first_block=first, num_blocks=count, flags=self._flags | flags, **self._launch)
        raw = RawReport(sites=(Site * _MAX_SITES)(), max_sites=_MAX_SITES)
        self._library.simulate(launch, raw)
        return raw

    def _add(self, raws: Sequence[RawReport]) -> None:
        for raw in raws:
            if raw.error:
                raise _error(raw, self._library.name)
            for name in COUNTERS:
                self._counters[name] += getattr(raw.counters, name)
            for site in raw.sites[: raw.num_sites]:
                total = self._sites.setdefault((site.line, site.kind), [0, 0, 0, 0])
                for at, value in enumerate((site.instructions, site.bytes, site.ideal, site.actual)):
                    total[at] += value

    def _report(self) -> Report:
        """Of all blocks, which have run."""
        if self._dependent and self._counters["grid_waits"] == 0:
            name = self._library.name
            raise SimulationError(
                f"{name}: no block of a dependent launch has waited for the earlier grids before it let "
                "the next one begin, so that it may run beside them",
                check="dependency",
                kernel=name,
            )
        accesses = (
            Access(line, SITE_KINDS[kind], *total) for (line, kind), total in sorted(self._sites.items())
        )
        return Report(self._counters, tuple(accesses))


def _parameters(step: Step, problem: Problem, pointers: Pointers) -> bytes:
    """The parameter struct, as the launcher of a GPU fills it in."""
    memory = filled(step.struct, pointers, problem.scalar_values())
    for offset, source, described in step.struct.maps:
        memory[offset : offset + BYTES] = encode(described, pointers[source] + described.distance)
    return bytes(memory)


def encode(described: TensorMap, pointer: int) -> bytes:
    """A tensor map in a simulated kernel's parameters: the twin of ``runtime.tensormap.encode``."""
    return bytes(
        RawTensorMap(
            magic=RawTensorMap.MAGIC,
            address=pointer,
            strides=described.strides,
            extents=described.extents,
            box=described.box,
            rank=len(described.extents),
            element_bytes=DTYPE_BYTES[described.dtype],
            swizzle=described.swizzle,
        )
    )


def _regions(
    problem: Problem, pointers: Pointers, written: set[str], settled: set[str], writes: set[str]
) -> list[Region]:
    """The memory of the arrays, without the gaps between their rows. A kernel ``writes`` to these, be they
    inputs of the call.
    """
    inputs, outputs = Region.READABLE | Region.INITIALISED, Region.READABLE | Region.WRITABLE
    regions = []
    for array, pointer in zip(problem.array_layouts(), pointers, strict=False):
        if array is not None and pointer:
            strides = tuple(stride * array.element_bytes for stride in array.strides)
            access = outputs if array.argument.is_output else inputs
            access |= Region.WRITABLE if array.argument.name in writes else 0
            access |= Region.INITIALISED if array.argument.name in written else 0
            access |= Region.SETTLED if array.argument.name in settled else 0
            regions += [
                Region(pointer + start, stop - start, array.argument.name.encode(), access)
                for start, stop in _runs(array.extents[:-1], strides, array.row_bytes)
            ]
    return regions


def _slices(planned: Steps, variant: Variant, pointers: Pointers, written: set[str]) -> list[Region]:
    """The slices of the workspace that a step has parameters for; it may read what an earlier one wrote."""
    buffers = planned.workspace.offsets
    types = {buffer_of(param.name, buffers): param.ctype for param in variant.params}
    regions = []
    for name, offset, nbytes in planned.workspace.slices:
        if name in types and nbytes:
            access = Region.READABLE
            access |= 0 if types[name].startswith("const ") else Region.WRITABLE
            access |= Region.INITIALISED if name in written else 0
            regions.append(Region(pointers[-1] + offset, nbytes, name.encode(), access))
    return regions


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


def _shares(blocks: int, threads: int, cluster: int) -> list[tuple[int, int]]:
    """(first block, number of blocks) for each thread, in whole clusters. An empty grid is a share, for the
    engine to refuse.
    """
    clusters = blocks // cluster
    threads = max(1, min(clusters, threads))
    bounds = [clusters * thread // threads * cluster for thread in range(threads + 1)]
    return [(first, stop - first) for first, stop in itertools.pairwise(bounds)]


def _error(raw: RawReport, kernel: str) -> SimulationError:
    listed = 0 < raw.error < len(_CHECKS)
    return SimulationError(
        raw.message.decode(errors="replace"),
        check=_CHECKS[raw.error] if listed else "other",
        kernel=kernel,
        block=raw.block[0],
        thread=raw.thread if raw.thread >= 0 else None,
        line=raw.line or None,
        other_thread=raw.other_thread if raw.other_thread >= 0 else None,
        other_line=raw.other_line or None,
    )
