"""Hand-written kernels for the tests of the simulator's engine."""

from __future__ import annotations

import ctypes
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from flashgen.errors import SimulationError
from flashgen.simulator import library
from flashgen.simulator.execute import SimulatedGrid, encode
from flashgen.simulator.library import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flashgen.schedule.tensormap import TensorMap
    from flashgen.simulator.execute import Report

NAME = "kernel"
_TYPES = {"float32": "float", "float64": "double", "bool": "bool"}
_SOURCE = """\
#include "flashgen/{header}.cuh"

struct Params {{
{members}
}};

{functions}

extern "C" __global__ void __cluster_dims__({cluster}, 1, 1) __launch_bounds__({bounds})
{name}(const __grid_constant__ Params params) {{
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const shared_address shared = to_shared(shared_memory);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
{body}
}}
"""


def source_of(
    body: str,
    arrays: Mapping[str, np.ndarray],
    functions: str = "",
    bounds: int | str = 1024,
    header: str = "sm80",
    maps: Iterable[str] = (),
    cluster: int = 1,
) -> str:
    """A kernel whose parameters are the tensor maps ``maps``, then pointers to ``arrays``. The body also has
    lane, warp and shared.
    """
    members = [f"    tensor_map {name};" for name in maps]
    members += [
        f"    {_TYPES.get(str(array.dtype), f'{array.dtype}_t')}* {name};" for name, array in arrays.items()
    ]
    return _SOURCE.format(
        name=NAME,
        header=header,
        members="\n".join(members) or "    int nothing;",
        functions=functions,
        bounds=bounds,
        cluster=cluster,
        body=textwrap.indent(textwrap.dedent(body).strip(), "    "),
    )


def run_all(*args: object, threads: int, **options: object) -> Report:
    """Run all blocks of a ``SimulatedGrid``."""
    return SimulatedGrid(*args, **options).run(threads)


def run(
    body: str,
    inputs: Mapping[str, np.ndarray] | None = None,
    outputs: Mapping[str, np.ndarray] | None = None,
    *,
    functions: str = "",
    bounds: int | str = 1024,
    header: str = "sm80",
    maps: Mapping[str, tuple[TensorMap, np.ndarray]] | None = None,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: int | tuple[int, int, int] = 32,
    shared_bytes: int = 4096,
    max_shared_bytes: int = 0,
    dependent: bool = False,
    followed: bool = False,
    cluster: int = 1,
    seed: int = 0,
    threads: int = 1,
    launch: Callable[..., Report] = run_all,
) -> Report:
    """Compile and launch a kernel on ``inputs``, which it may only read, and ``outputs``. ``maps`` describes
    arrays, which must be among them. ``launch`` takes what ``run_all`` does.
    """
    inputs, outputs, maps = inputs or {}, outputs or {}, maps or {}
    arrays = {**inputs, **outputs}
    loaded = library.load(source_of(body, arrays, functions, bounds, header, maps, cluster), NAME)
    access = dict.fromkeys(inputs, Region.READABLE | Region.INITIALISED)
    access |= dict.fromkeys(outputs, Region.READABLE | Region.WRITABLE)
    pointers = np.array([array.ctypes.data for array in arrays.values()] or [0], np.uint64)
    regions = [
        Region(array.ctypes.data, array.nbytes, name.encode(), access[name]) for name, array in arrays.items()
    ]
    params = pointers.tobytes()[: ctypes.sizeof(ctypes.c_int) if not arrays else None]
    if maps:
        encoded = [encode(described, array.ctypes.data) for described, array in maps.values()]
        params = b"".join([*encoded, params.ljust(-(-len(params) // 64) * 64, b"\0")])
    return launch(
        loaded,
        params,
        grid,
        (block, 1, 1) if isinstance(block, int) else block,
        shared_bytes,
        regions,
        max_shared_bytes=max_shared_bytes,
        dependent=dependent,
        followed=followed,
        cluster=cluster,
        seed=seed,
        threads=threads,
    )


def check_of(function: Callable[..., object], *args: object, **options: object) -> str | None:
    """The check that finds something in a kernel that ``function`` runs, or None."""
    try:
        function(*args, **options)
    except SimulationError as error:
        return error.check
    return None


def fault(
    body: str, *args: Mapping[str, np.ndarray], functions: str = "", **options: object
) -> SimulationError:
    """The error of a kernel that must have one.

    Where a comment HERE stands in it, the error must name that line, and where there is THERE, that one too.
    """
    with pytest.raises(SimulationError) as caught:
        run(body, *args, functions=functions, **options)
    arrays = {name: array for group in args for name, array in (group or {}).items()}
    rest = options.get("bounds", 1024), options.get("header", "sm80"), options.get("maps") or ()
    lines = source_of(body, arrays, functions, *rest, options.get("cluster", 1)).splitlines()
    marked = {
        mark: number
        for number, line in enumerate(lines, 1)
        for mark in ("HERE", "THERE")
        if f"// {mark}" in line
    }
    error = caught.value
    assert NAME in str(error)
    named = {number for number in (error.line, error.other_line) if number}
    if marked:
        assert named == set(marked.values()), str(error)
        assert all(f"{NAME}.cu:{number}" in str(error) for number in named)
    return error
