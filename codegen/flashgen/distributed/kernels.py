"""One launch of a rank, with the kernel that one GPU would take for the whole call.

Dispatch chooses tiles by the sizes of a call. The segments of a rank are smaller, and their masks may be
simpler than the whole mask. So the whole call is dispatched, and its kernel computes the segments: the same
blocks of keys in the same order, and so the same bits. Kernels that share the keys of one tile among thread
blocks are left out, because their shares follow from the sizes of a launch.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.call.backends import backend_for, prepare, runner_for, specs_for
from flashgen.call.request import names_of, request_of
from flashgen.errors import FlashgenError, naming
from flashgen.host import forks
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.masks import UNBOUNDED
from flashgen.runtime.adopted import viewed
from flashgen.runtime.arrays import kind_of
from flashgen.runtime.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flashgen.call.record import Call
    from flashgen.call.request import Request
    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.runtime.plans import Runner
    from flashgen.schedule.plan import Steps

MAX_PLANS = 1024
# The keys of a tile that decide in what order a row of the forward pass is computed.
_KEYS_OF_ROWS = ("block_m", "block_n", "warps", "loop")

_plans: dict[Any, Plan | None] = {}
_lock = forks.guard()


class Whole(NamedTuple):
    """Sizes of the call of one GPU: ``tokens`` in all, ``longest`` in the longest of ``documents``, which is
    0 for a batch of equal sequences. ``window`` are both sides as in ``attention``, right 0 under a causal
    mask.
    """

    batch: int
    tokens: int
    documents: int
    longest: int
    heads_q: int
    heads_kv: int
    window: tuple[int, int]


def attend(
    call: Call, whole: Whole, shift: int, like: Callable[[], Call] | None = None
) -> tuple[Any, Any] | None:
    """out and lse of a launch; ``call`` has its arrays, and ``shift`` is the shift of its segments.

    For a launch with a table of segments ``like`` makes a call with arrays as of the whole call. Then the
    result is None if no kernel of tables has the tile of the whole call's kernel. Raises what ``attention``
    raises.
    """
    request = request_of(call)
    kind = kind_of(call.q)
    layouts, pointers = kind.read(request.arrays)
    backend = os.environ.get("FLASHGEN_BACKEND")
    key = request.operator.name, request.options, whole, shift, layouts, backend
    plan = _plans.get(key)
    if key not in _plans:
        with naming(names_of(call)):
            plan = _planned(request, whole, shift, like)
        with _lock:
            while len(_plans) >= MAX_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    if plan is None:
        return None
    try:
        return plan.run(request.arrays, pointers, request.scalars, None)
    except FlashgenError as error:
        error.rename(names_of(call))
        raise


def _planned(request: Request, whole: Whole, shift: int, like: Callable[[], Call] | None) -> Plan | None:
    """The plan of a launch, with the kernel of the whole call."""
    arrays, views = viewed(request.operator, request.by_name())
    part = problem_of(request, views)
    if like is not None:
        request = request_of(like())
        _, views = viewed(request.operator, request.by_name())
    one = problem_of(request, whole_views(views, whole), whole)
    problem = masked_like(part, one, shift)
    runner = runner_like(problem, one)
    return None if runner is None else Plan(problem, runner, arrays)


def problem_of(request: Request, views: dict[str, Any], whole: Whole | None = None) -> AttentionProblem:
    """The problem of these views; of the ``whole`` call with its window and bounds."""
    options = dict(zip(request.operator.options, request.options, strict=True))
    if whole is not None:
        options["window_size"] = whole.window
        options |= {name: whole.longest for name in ("max_seqlen_q", "max_seqlen_kv") if name in options}
    problem = request.operator.normalise(
        tuple(views.values()), tuple(options.values()), (None,) * len(request.scalars)
    )
    return problem.with_scalars(request.scalars)


def whole_views(views: dict[str, Any], whole: Whole) -> dict[str, Any]:
    """Views as the arrays of the whole call would have them, contiguous."""
    sizes = {"q": (whole.heads_q, whole.tokens), "out": (whole.heads_q, whole.tokens)}
    sizes |= dict.fromkeys(("k", "v"), (whole.heads_kv, whole.tokens))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (heads, tokens) in sizes.items():
        if views[name] is not None:
            leading = () if whole.documents else (whole.batch,)
            shapes[name] = (*leading, tokens, heads, views[name].shape[-1])
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if views.get(name) is not None:
            shapes[name] = (whole.documents + 1,)
    for name in ("sinks", "slope"):  # the last dimension has heads
        if views.get(name) is not None:
            shapes[name] = (*views[name].shape[:-1], whole.heads_q)
    return {
        name: view_of_shape(shapes[name], view.dtype, view.device) if name in shapes else view
        for name, view in views.items()
    }


def masked_like(part: AttentionProblem, one: AttentionProblem, shift: int) -> AttentionProblem:
    """The problem ``part`` with the kind of mask of the whole call, where its own may be simpler: of one row
    a causal mask hides nothing. Hides the same keys.
    """
    if one.mask_type == "none":
        return part
    diagonal = part.seqlen_kv - part.seqlen_q
    if one.mask_type == "causal":
        right = one.diagonal_offset - (one.seqlen_kv - one.seqlen_q)
        offset, left, right = diagonal + right - shift, UNBOUNDED, 0
    else:
        offset, left, right = diagonal, one.window_left, one.window_right
        left = left + shift if left < UNBOUNDED else left
        right = right - shift if right < UNBOUNDED else right
    return dataclasses.replace(
        part, mask_type=one.mask_type, diagonal_offset=offset, window_left=left, window_right=right
    )


def runner_like(problem: AttentionProblem, one: AttentionProblem) -> Runner | None:
    """The runner of a launch on the backend of its arrays, with the kernel of the whole call ``one``; None if
    the launch has a table and no kernel of tables has the same tile.
    """
    backend = backend_for(problem.device)
    if backend == "cpu":
        return runner_for(problem, backend, None)
    if backend == "simulator":
        from flashgen.simulator import hardware
        from flashgen.simulator.backend import Runner as Simulated
        from flashgen.simulator.library import supports

        pretended = hardware.pretend()
        variants = (x for x in kernels_of(problem, one, pretended) if supports(x))
        steps = next(steps_like(problem, variants, pretended.without(problem.sm_margin)), None)
        return steps and Simulated(steps)
    from flashgen.runtime.device import device

    here = device(problem.device)
    kernels = tuple(kernels_of(problem, one, here))
    seen = here.without(problem.sm_margin)
    return prepare(steps_like(problem, iter(kernels), seen), here) if kernels else None


def kernels_of(problem: AttentionProblem, one: AttentionProblem, device: Device) -> Iterator[Variant]:
    """The kernels for a launch of the whole call ``one``, the best first. For a table of segments they have
    the tile and the axes of the first kernel of the whole call, and so its bits: in all families a row goes
    through the same KV blocks.
    """
    from flashgen.schedule.dispatch import offers

    mains = mains_of(one, device)
    if not problem.has("kv_starts"):
        return mains
    main = next(mains)
    specs = specs_for(device, problem.operator.name, problem.lengths_on_device)
    return (x for x in offers(problem, device, specs) if _same_rows(x, main))


def _same_rows(x: Variant, y: Variant) -> bool:
    """Whether two kernels compute a row in the same way, wherever their keys are."""
    axes = [z.axis_values | {"kv_starts": "none"} for z in (x, y)]
    tiles = [(z.target, *(dict(z.tile).get(key) for key in _KEYS_OF_ROWS)) for z in (x, y)]
    return axes[0] == axes[1] and tiles[0] == tiles[1]


def mains_of(one: AttentionProblem, device: Device) -> Iterator[Variant]:
    """The kernels of a whole call that compute each tile in one thread block, the best first."""
    from flashgen.schedule.dispatch import offers, select

    specs = specs_for(device, one.operator.name, one.lengths_on_device)
    left = tuple(
        variant
        for variant in offers(one, device, specs)
        if not (variant.grid.shares or variant.grid.shared_tiles)
    )
    while left:
        main = select(one, device, left)
        yield main
        left = tuple(variant for variant in left if variant != main)


def steps_like(problem: AttentionProblem, mains: Iterator[Variant], device: Device) -> Iterator[Steps]:
    """The steps of a launch with each of these kernels."""
    from flashgen.schedule.plan import plan_steps

    return (plan_steps(problem, main, device) for main in mains)
