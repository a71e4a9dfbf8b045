"""Computes requests: by the kept plan of an earlier request with the same options and layouts, or by a new
plan.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from flashgen.call import growing
from flashgen.call.backends import runner_for
from flashgen.call.kvcache import arrays_instead
from flashgen.errors import InternalError, naming
from flashgen.host import forks, logs
from flashgen.runtime import arrays, dlpack, torchkind
from flashgen.runtime.adopted import adopted, run_adopted, viewed
from flashgen.runtime.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashgen.call.request import Request
    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.operator import Problem
    from flashgen.runtime.plans import Ready
    from flashgen.runtime.torchkind import Expecting

MAX_PLANS = 1024

_log = logs.logger("api")
_plans: dict[Any, Plan] = {}
# By everything of a request except its arrays: the plan of the last such request and, if the last two had one
# layout, a guard that reads the pointers of arrays with this layout.
_recent: dict[Any, tuple[Plan, Expecting | None]] = {}
# By everything that calls which differ in the number of keys have in common: the last plan made anew.
_relatives: dict[Any, growing.Relative] = {}
_plans_lock = forks.guard()
# Called with each new plan's request, views and problem, while calls are recorded.
observer: Callable[[Request, Mapping[str, ArrayView | None], Problem], None] | None = None


def compute(request: Request, kind: arrays.Kind | None) -> Any:
    """The results of a request, by a plan that is kept. ``kind`` is the kind of its first array."""
    if request.kept is not None:
        request = with_kept_lists(request)
    values = request.arrays
    if not are_all(kind, values):
        return _compute_adopted(request)
    plan, pointers = _plan_of(request, kind)
    return plan.run(values, pointers, request.scalars, request.stream, request.workspace)


def with_kept_lists(request: Request) -> Request:
    """The request with the lists that its mask keeps; while calls are recorded as it is, to be seen whole."""
    return request if observer is not None else request.kept.added(request, make_plan)


def _compute_adopted(request: Request) -> Any:
    """`compute` where not all arrays are of one native library."""
    if all(x is None or arrays.kind_of(x) is not None for x in request.arrays):
        _refuse_mixed(request)

    def call(*, stream: Any, **native: Any) -> Any:
        first, *_ = values = tuple(native[name] for name in request.operator.positions)
        return compute(request.with_arrays(values, stream), arrays.kind_of(first))

    return run_adopted(call, request.operator, request.by_name(), request.stream)


def _refuse_mixed(request: Request) -> NoReturn:
    """Raise what is wrong with native arrays of several libraries."""
    make_plan(request)
    kinds = ", ".join(arrays.kind_of(x).name for x in request.arrays if x is not None)
    raise InternalError(f"{request.operator.name} took arrays of several libraries: {kinds}")


def are_all(kind: arrays.Kind | None, values: tuple[Any, ...]) -> bool:
    """Whether all arrays are of one native library: the first array's."""
    # Fast path: most arrays are of these types.
    if kind is None:
        return False
    if kind.types.issuperset(map(type, values)):
        return True
    # A list, as torch.compile of PyTorch 2.8 does not trace a generator here.
    return all([x is None or arrays.kind_of(x) is kind for x in values])  # noqa: C419


def _plan_of(request: Request, kind: arrays.Kind) -> tuple[Plan, tuple[int, ...]]:
    """The kept plan of a request, made on the first call, and the pointers of its arrays, of one library."""
    values, backend = request.arrays, request.backend
    if backend is None and kind.on_host(values[0]):
        # On a GPU there is one backend: a new plan checks the variable, and other calls save 1 µs.
        backend = os.environ.get("FLASHGEN_BACKEND") or None
    settings = request.operator.name, request.options, backend, request.algorithm
    expecting = kind.expecting
    if expecting is not None:
        try:
            plan, pointers = recent(settings, values)
        except TypeError:  # an option is not hashable, as below
            pointers = None
        if pointers is not None:
            return plan, pointers
    try:
        layouts, pointers = kind.read(values)
    except RuntimeError:
        make_plan(request)  # raises what is wrong, by name
        raise
    key = settings, layouts
    try:
        plan = _plans.get(key)
    except TypeError:  # an option is not hashable, such as a backend in a list
        make_plan(request)  # raises what is wrong, by name
        raise
    if plan is None:
        plan = _new_plan(request, kind, settings, layouts)
        _remember(key, plan)
    if expecting is not None:
        note(settings, plan, expecting, values)
    return plan, pointers


def _new_plan(request: Request, kind: arrays.Kind, settings: Any, layouts: tuple[Any, ...]) -> Plan:
    """A plan that is not kept: it follows from a plan for fewer keys, or is made anew."""
    common = growing.key_of(settings, layouts) if observer is None else None
    relative = None if common is None else _relatives.get(common)
    plan = None if relative is None else growing.plan_of(relative, request, kind, layouts)
    if plan is None:
        plan = make_plan(request, keeps_scalars=False)
        if common is not None:
            with _plans_lock:
                _relatives[common] = growing.Relative(plan)
    return plan


def kept_plan(request: Request, kind: arrays.Kind) -> Plan | None:
    """The plan of an earlier call, if one requested the same for arrays on a GPU of these layouts."""
    settings = request.operator.name, request.options, request.backend, request.algorithm
    try:
        return _plans.get((settings, kind.read(request.arrays)[0]))
    except (RuntimeError, TypeError):  # a tensor without memory; an option that is not hashable
        return None


def recent(key: Any, values: tuple[Any, ...]) -> tuple[Plan | None, tuple[int, ...] | None]:
    """The plan that was noted last under a key, and the pointers of these arrays if they have the layouts of
    the last two calls that were noted; (..., None) otherwise.
    """
    plan, pointers_of = _recent.get(key, (None, None))
    return plan, None if pointers_of is None else pointers_of(values)


def note(key: Any, plan: Plan, expecting: Callable[..., Expecting | None], values: tuple[Any, ...]) -> None:
    """Note the plan of a call with these arrays, for `recent`."""
    before, _ = _recent.get(key, (None, None))
    pointers_of = expecting(values) if plan is before else None
    with _plans_lock:
        _recent[key] = plan, pointers_of


def _remember(key: Any, plan: Plan) -> None:
    with _plans_lock:
        for plans in (_plans, _recent, _relatives):
            while len(plans) >= MAX_PLANS:
                del plans[next(iter(plans))]
        _plans[key] = plan


def forget() -> None:
    """Drop all kept plans: the next call of each layout makes one."""
    with _plans_lock:
        _plans.clear()
        _recent.clear()
        _relatives.clear()


def ready(request: Request) -> tuple[Plan, Ready]:
    """The kept plan of a request, and its call: checked, with memory for its results, not yet queued."""
    if request.kept is not None:
        request = with_kept_lists(request)
    kind = arrays.kind_of(request.arrays[0])
    if not are_all(kind, request.arrays):
        by_name = request.by_name()
        native = tuple(adopted(request.operator, by_name, request.stream).values())
        request = request.with_arrays(native, request.stream)
        kind = arrays.kind_of(native[0])
        if not are_all(kind, native):
            with naming(dlpack.own_libraries(by_name)):
                _refuse_mixed(request)
    plan, pointers = _plan_of(request, kind)
    return plan, plan.ready(request.arrays, pointers, request.scalars, request.stream)


class planning:
    """A context in which ``function`` makes a plan: BadParam says what to do under torch.compile, or with a
    tensor that requires a gradient. ``x`` is one of the arrays.
    """

    def __init__(self, function: str, x: Any) -> None:
        kind = arrays.kind_of(x)
        if isinstance(kind, torchkind.TorchKind) and kind.is_compiling():
            raise torchkind.inside_compile(f"{function}()")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, torchkind.RequiresGradient):
            raise error.of("plans") from None


def make_plan(request: Request, keeps_scalars: bool = True) -> Plan:
    """A plan for requests like this. With ``keeps_scalars`` its calls may leave out scalars, which then have
    the values of this request.

    Each line takes the result of the line before: views of the arrays, the problem, its runner, the plan.
    """
    operator, scalars = request.operator, request.scalars
    arrays, views = viewed(operator, request.by_name())
    problem = operator.normalise(tuple(views.values()), request.options, (None,) * len(scalars))
    called = problem.with_scalars(scalars)  # raises what is wrong with them, before compiling
    if observer is not None:
        observer(request, views, called)
    begin = time.perf_counter()
    runner = runner_for(problem, request.backend, request.algorithm)
    plan = Plan(called if keeps_scalars else problem, runner, arrays, arrays_instead(views))
    _log.info(
        "%s of %s takes %s, ready in %.1f ms",
        operator.name,
        ", ".join(f"{name} {size}" for name, size in problem.sizes.items()) + f", {problem.dtype}",
        plan.variant or "the CPU path",
        1e3 * (time.perf_counter() - begin),
    )
    return plan
