"""A call of any operator: by the plan kept of an earlier one whose arrays lay alike, or by a new one."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from flashgen.api.backends import runner_for
from flashgen.api.kvcache import arrays_instead
from flashgen.errors import InternalError, naming
from flashgen.host import forks, logs
from flashgen.runtime import arrays, dlpack, torchkind
from flashgen.runtime.plans import Plan, adopted, cache_arrays, run_adopted

if TYPE_CHECKING:
    from flashgen.operators.operator import Operator
    from flashgen.runtime.plans import Ready
    from flashgen.runtime.torchkind import Expecting

MAX_PLANS = 1024

_log = logs.logger("api")
_plans: dict[Any, Plan] = {}
# By all of a call but its arrays: the plan of the last one and, once two of one layout followed each other,
# what gives the pointers of such arrays.
_recent: dict[Any, tuple[Plan, Expecting | None]] = {}
_plans_lock = forks.guard()


def call(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...] = (),
    scalars: tuple[Any, ...] = (),
    *,
    stream: Any,
    backend: str | None,
    algorithm: str | None = None,
    workspace: Any = None,
) -> Any:
    """Compute ``given``, an array or None for each argument of an operator."""
    kind = arrays.kind_of(given[0])
    return call_of(kind, operator, given, options, scalars, stream, backend, algorithm, workspace)


def call_of(
    kind: arrays.Kind | None,
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    algorithm: str | None,
    workspace: Any = None,
) -> Any:
    """Compute ``given``, an array or None for each argument of the operator, with a plan that is kept.
    ``kind`` is that of the first.
    """
    # Most arrays are of these types: no need to ask for the kind of each.
    if kind is None or not (kind.types.issuperset(map(type, given)) or are_all(kind, given)):
        return _call_adopted(operator, given, options, scalars, stream, backend, algorithm, workspace)
    known, pointers = _known(kind, operator, given, options, scalars, backend, algorithm)
    return known.run(given, pointers, scalars, stream, workspace)


def _call_adopted(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    algorithm: str | None,
    workspace: Any = None,
) -> Any:
    """`call_of` where not all arrays are of one native library."""
    if all(x is None or arrays.kind_of(x) is not None for x in given):
        _refuse_mixed(operator, given, options, scalars, backend, algorithm)
    names = [argument.name for argument in operator.arguments]

    def call(*, stream: Any, **native: Any) -> Any:
        arrays_of = tuple(native[name] for name in names)
        kind = arrays.kind_of(arrays_of[0])
        return call_of(kind, operator, arrays_of, options, scalars, stream, backend, algorithm, workspace)

    return run_adopted(call, operator, dict(zip(names, given, strict=True)), stream)


def _refuse_mixed(operator: Operator, given: tuple[Any, ...], *rest: Any) -> NoReturn:
    """Raise what is wrong with native arrays of several libraries."""
    make_plan(operator, given, *rest)
    kinds = ", ".join(arrays.kind_of(x).name for x in given if x is not None)
    raise InternalError(f"{operator.name} took arrays of several libraries: {kinds}")


def are_all(kind: arrays.Kind | None, given: tuple[Any, ...]) -> bool:
    """Whether all arrays are of one native library, that of the first."""
    # A list, as torch.compile of PyTorch 2.8 does not trace a generator here.
    return kind is not None and all([x is None or arrays.kind_of(x) is kind for x in given])  # noqa: C419


def _known(
    kind: arrays.Kind,
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    backend: str | None,
    algorithm: str | None,
) -> tuple[Plan, tuple[int, ...]]:
    """The kept plan of a call, made if it is the first, and the pointers of its arrays, of one library."""
    if backend is None and kind.on_host(given[0]):
        # On a GPU there is one backend, and only a new plan asks whether it is forbidden: a look takes 1 µs.
        backend = os.environ.get("FLASHGEN_BACKEND") or None
    wanted = operator.name, options, backend, algorithm
    expecting, recent = kind.expecting, None
    if expecting is not None:
        recent, expected = _recent_of(wanted)
        if expected is not None:
            pointers = expected(given)
            if pointers is not None:
                return recent, pointers
    try:
        layouts, pointers = kind.read(given)
    except RuntimeError:
        make_plan(operator, given, options, scalars, backend, algorithm)  # raises what is wrong, by name
        raise
    key = wanted, layouts
    try:
        known = _plans.get(key)
    except TypeError:  # an option is not hashable, such as a backend in a list
        make_plan(operator, given, options, scalars, backend, algorithm)  # raises what is wrong, by name
        raise
    if known is None:
        known = make_plan(operator, given, options, scalars, backend, algorithm, keeps_scalars=False)
        _remember(key, known)
    if expecting is not None:
        expected = expecting(given) if known is recent else None
        with _plans_lock:
            _recent[wanted] = known, expected
    return known, pointers


def _recent_of(wanted: tuple[Any, ...]) -> tuple[Plan | None, Expecting | None]:
    try:
        return _recent.get(wanted, (None, None))
    except TypeError:  # as in `_known`
        return None, None


def _remember(key: Any, known: Plan) -> None:
    with _plans_lock:
        for kept in (_plans, _recent):
            while len(kept) >= MAX_PLANS:
                del kept[next(iter(kept))]
        _plans[key] = known


def ready(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    algorithm: str | None,
) -> tuple[Plan, Ready]:
    """The kept plan of a call, and the call itself: checked, with memory for its results, not yet queued."""
    kind = arrays.kind_of(given[0])
    if not are_all(kind, given):
        named = {argument.name: x for argument, x in zip(operator.arguments, given, strict=True)}
        given = tuple(adopted(operator, named, stream).values())
        kind = arrays.kind_of(given[0])
        if not are_all(kind, given):
            with naming(**dlpack.own_libraries(named)):
                _refuse_mixed(operator, given, options, scalars, backend, algorithm)
    known, pointers = _known(kind, operator, given, options, scalars, backend, algorithm)
    return known, known.ready(given, pointers, scalars, stream)


class planning:
    """While a plan is made by ``function``: BadParam says what to do in a graph of torch.compile, or with a
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


def make_plan(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    backend: str | None,
    algorithm: str | None,
    keeps_scalars: bool = True,
) -> Plan:
    """A plan whose scalars are these, or, where it does not keep them, those that a call leaves out."""
    names = [argument.name for argument in operator.arguments]
    named = dict(zip(names, given, strict=True))
    dlpack.check_libraries(named, cache_arrays(named))
    native = tuple(
        None if x is None and (argument.optional or argument.is_output) else dlpack.adopt(x, argument.name)
        for argument, x in zip(operator.arguments, given, strict=True)
    )
    views = tuple(
        None if x is None else arrays.view(x, argument.name)
        for argument, x in zip(operator.arguments, native, strict=True)
    )
    by_name = dict(zip(names, views, strict=True))
    with naming(**dlpack.own_libraries(named)):
        arrays.check_libraries(by_name)
    problem = operator.normalise(views, options, (None,) * len(scalars))
    called = problem.with_scalars(scalars)  # raises what is wrong with them, ahead of compiling
    begin = time.perf_counter()
    runner = runner_for(problem, backend, algorithm)
    made = Plan(called if keeps_scalars else problem, runner, native, arrays_instead(by_name))
    _log.info(
        "%s of %s takes %s, ready in %.1f ms",
        operator.name,
        ", ".join(f"{name} {size}" for name, size in problem.sizes.items()) + f", {problem.dtype}",
        made.variant or "the CPU path",
        1e3 * (time.perf_counter() - begin),
    )
    return made
