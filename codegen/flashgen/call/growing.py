"""Plans for caches that grow: a plan for more keys follows from the plan for fewer.

An eager decoder concatenates its cache with each token, so each token is a call of another layout. A new plan
takes milliseconds, most of them to choose the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.operators.arguments import DTYPE_BYTES, ROW_ALIGNMENT, normal_strides
from flashgen.operators.maskoptions import NO_WINDOW

if TYPE_CHECKING:
    from flashgen.call.request import Request
    from flashgen.operators.arguments import Strides
    from flashgen.operators.operator import Problem
    from flashgen.runtime.arrays import Kind
    from flashgen.runtime.launch import Runner
    from flashgen.runtime.plans import Plan
    from flashgen.schedule.growing import Growth

# Positions of k and v among the arguments of attention, and of the rows in their shapes, from the right.
_K, _V, _ROWS = 1, 2, 3
# Strides of tensor maps, in bytes, are below 2^40.
_MAX_STRIDE = 1 << 36


@dataclass(slots=True)
class Relative:
    """A plan whose steps may serve other numbers of keys. After the second call: for which numbers of keys,
    and how the steps follow; False if they do not.
    """

    plan: Plan
    keys: range | None = None
    growth: Growth | bool | None = None


def key_of(settings: Any, layouts: tuple[Any, ...]) -> Any:
    """A key that is the same for calls that differ only in the number of keys; None for other calls."""
    if settings[0] != "attention" or layouts[_K] is None or layouts[_V] is None:
        return None
    shapes = [layouts[place][0] for place in (_K, _V)]
    if min(map(len, shapes)) < _ROWS or shapes[0][-_ROWS] != shapes[1][-_ROWS]:
        return None
    others = [(shape[:-_ROWS], shape[1 - _ROWS :]) for shape in shapes]
    kinds = [layouts[place][2:] for place in (_K, _V)]
    return settings, layouts[:_K], layouts[_V + 1 :], *map(tuple, (*others, *kinds))


def plan_of(relative: Relative, request: Request, kind: Kind, layouts: tuple[Any, ...]) -> Plan | None:
    """The plan of a request for arrays of ``layouts``, whose `key_of` is the relative's; None if it does not
    follow from the relative.
    """
    plan = relative.plan
    problem, keys = plan.problem, layouts[_K][0][-_ROWS]
    if relative.keys is None:
        relative.keys = _keys_alike(problem, plan.runner)
    if keys not in relative.keys:
        return None
    if request.options[request.operator.options.index("window_size")] != NO_WINDOW:  # it may hide many keys
        return None
    strides = [_strides(problem, place, kind, request.arrays[place]) for place in (_K, _V)]
    if None in strides:
        return None
    if relative.growth is None:
        relative.growth = _growth(problem, plan.runner, relative.keys)
    if not relative.growth:
        return None
    from flashgen.schedule.growing import with_keys

    grown = with_keys(problem, keys, *strides)
    return plan.with_layouts(grown, plan.runner.of(relative.growth.at(grown).steps), layouts, (_K, _V))


def _keys_alike(problem: Problem, runner: Runner) -> range:
    """The numbers of keys with the kernel and grid of ``problem``; empty on the CPU path."""
    offered = getattr(runner, "offered", ())
    if not offered:
        return range(0)
    from flashgen.schedule.growing import keys_alike

    return keys_alike(problem, offered)


def _growth(problem: Problem, runner: Runner, keys: range) -> Growth | bool:
    """How the steps follow, if they do from the first to the last number of keys."""
    from flashgen.schedule.growing import Growth

    growth = Growth(problem, runner.planned)
    of_arrays = [(problem.array(name).extents, problem.array(name).strides) for name in ("k", "v")]
    mapped = all(_have_maps(extents, strides, problem) for extents, strides in of_arrays)
    device = runner.device.without(problem.sm_margin)
    return growth if mapped and growth.holds(device, (keys[0], keys[-1])) else False


def _strides(problem: Problem, place: int, kind: Kind, x: Any) -> Strides | None:
    """The strides of k or v as in a problem; None for an array that some kernel may be unable to read."""
    steps = kind.strides(x)
    if steps is None or steps[-1] != 1:
        return None
    missing = len(problem.strides[place]) + 1 - len(steps)
    extents = (1,) * missing + tuple(x.shape)
    strides = normal_strides(extents, (0,) * missing + tuple(steps[:-1]))
    return strides if _have_maps(extents, strides, problem) else None


def _have_maps(extents: tuple[int, ...], strides: Strides, problem: Problem) -> bool:
    size = DTYPE_BYTES[problem.dtype]
    return all(
        extent == 1 or (0 < stride * size < _MAX_STRIDE and stride * size % ROW_ALIGNMENT == 0)
        for extent, stride in zip(extents[:-1], strides, strict=True)
    )
