"""``explain`` and ``warmup``: which kernels calls take, without the arrays of one."""

from __future__ import annotations

import dataclasses
import importlib
import reprlib
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from numbers import Integral
from operator import index
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from flashgen.call.backends import prepare, specs_for, specs_of
from flashgen.call.keywords import advice, unexpected
from flashgen.call.kvcache import FIELDS, KVCache
from flashgen.call.parameters import POSITIONAL, REQUIRED, defaults, parameters
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.call.recorded import is_recorded, problem_of, read
from flashgen.call.request import Request, names_of
from flashgen.call.signature import with_options
from flashgen.errors import (
    BadParam,
    BadTensorShape,
    CompileError,
    DeviceTypeNotSupported,
    NullPointer,
    arg,
    naming,
)
from flashgen.families.variant import TUNED_TILE
from flashgen.operators import latentrows
from flashgen.operators.arguments import dtype_name, shown, view_of_shape
from flashgen.runtime import arrays, dlpack
from flashgen.runtime.adopted import cache_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.schedule.explain import Explanation

# The operators that `explain` and `warmup` know by name: the module beside this one that has the
# `request_by_name` of the operator, and the function whose parameters it takes.
_EXPLAINED = {
    "attention": ("attention", "attention"),
    "attention_backward": ("backward", "attention_backward"),
    "attention_weights": ("weights", "attention"),
    "append": ("append", "append"),
}
# Their parameters that no kernel depends on, or that have arguments of their own.
_UNEXPLAINED = {"stream", "backend", "algorithm", "workspace"}
# The parameters of ``attention`` that make it two calls, and the operator of the second one.
_OF_SECOND = {"append": "append", "rotary": "append", "return_weights": "attention_weights"}


def explained_fields() -> dict[str, str]:
    """The options of `explain` and their types: what the functions that it knows take."""
    types = {}
    for function in dict.fromkeys(function for _, function in _EXPLAINED.values()):
        # What there must be has a default here.
        needed = POSITIONAL[function][: REQUIRED[function]]
        types |= {x.name: "Any" if x.name in needed else x.type for x in parameters(function)}
    unexplained = _UNEXPLAINED - {"algorithm"} | {"append", "return_weights", "dtype"}
    return {name: kind for name, kind in types.items() if name not in unexplained}


@with_options(explained_fields())
def explain(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    dtype: str = "fp16",
    arch: str | None = None,
    operator: str = "attention",
    **options: Any,
) -> Explanation:
    """Which kernel a call of ``attention``, ``attention_backward`` or ``append`` takes, and why not the
    others. Needs no GPU and compiles nothing.

    q, k, v: shapes, as in ``attention``, or arrays. k is by default as q, and v as k.
    dtype: the dtype of q, k and v, if these are shapes: "fp16", "bf16", "fp32" or, of ``attention``, "e4m3";
        or its usual name, for example "float16".
    arch: the architecture to explain for, for example "sm_90"; None: this machine's GPU. For any other
        architecture a well-known GPU is assumed: an H100 for sm_90.
    operator: the function that is called: "attention", "attention_backward" or "append". ``attention`` with
        append= calls ``append`` and ``attention``: explain each by itself. With return_weights it calls
        "attention" and "attention_weights", which has the same options.
    options: any other argument of that function. Arrays, for example mask, may be shapes as well, also in a
        ``KVCache`` or a ``Rotary``, whose cos and sin are then fp32. Required inputs, for example dout, have
        by default the shapes that follow from the other arguments.

    ``explain(...).variant`` is the kernel, ``steps`` and ``workspace_bytes`` are as in a plan; printed, the
    result says why. Raises BadParam for an unknown option, operator or architecture, SpecError for a spec
    or template of your own that is wrong or missing, and what the call raises for wrong shapes and options.
    """
    from flashgen.schedule.explain import explain as explained
    from flashgen.source.render import check_files

    device = device_of(arch)
    algorithm = options.pop("algorithm", None)
    of_arrays = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    problem = _shaped(operator, of_arrays | options, dtype)
    specs = specs_of(problem, device)
    check_files(specs)
    return explained(problem, device, specs, algorithm)


def warmup(
    calls: Iterable[Mapping[str, Any]] | str | PathLike[str],
    *,
    arch: str | None = None,
    jobs: int | None = None,
    **unknown: Never,
) -> tuple[str, ...]:
    """Compile the kernels of later calls in parallel, and load them on this machine's GPU. Takes no arrays.

    calls: for each call the arguments of ``explain`` by name: ``{"q": (1, 4096, 16, 128), "causal": True}``;
        by default ``dtype`` is "fp16" and ``operator`` "attention". Or the path of a file that
        ``flashgen.record`` wrote.
    arch: the architecture to compile for, for example "sm_90", on any machine; nothing is loaded then. None:
        GPU 0 of this machine.
    jobs: how many kernels to compile at once; by default one for each processor.

    Returns the name of the kernel that each call takes. Afterwards the first call of such a shape compiles
    nothing. Raises what such calls raise: BadParam, BadTensorShape, CompileError, ...
    """
    from flashgen.schedule.dispatch import offers, select
    from flashgen.toolchain.parallel import in_parallel

    if unknown:
        raise unexpected(warmup, unknown)
    if jobs is not None and (not isinstance(jobs, Integral) or isinstance(jobs, bool) or jobs < 1):
        raise BadParam(f"jobs is {shown(jobs)}; expected an integer of 1 or more, or None")
    listed = problems_of(calls)
    device = device_of(arch)
    specs = specs_for(device)
    problems = [(problem, offers(problem, device, specs, algorithm)) for problem, algorithm in listed]
    mains = [select(problem, device.without(problem.sm_margin), variants) for problem, variants in problems]
    steps = dict.fromkeys(step for main in mains for step in main.steps)
    if arch is not None:
        in_parallel(partial(_compile, device=device), steps, jobs)
        return tuple(main.name for main in mains)
    from flashgen.schedule.plan import choices
    from flashgen.toolchain.policy import compiling

    with compiling("allow"):
        in_parallel(partial(_load, device=device), steps, jobs)
        runners = [prepare(choices(problem, device, variants), device) for problem, variants in problems]
    return tuple(runner.variant.name for runner in runners)


def problems_of(calls: Iterable[Mapping[str, Any]] | str | PathLike[str]) -> list[tuple[Problem, str | None]]:
    """The Problem of each call of a `warmup`, on GPU 0, and its algorithm. Raises what `warmup` raises."""
    problems = []
    for call in _calls(calls):
        if is_recorded(call):
            problems.append((problem_of(call), call["algorithm"]))
            continue
        options = dict(call)
        dtype = options.pop("dtype", "fp16")
        operator, algorithm = options.pop("operator", "attention"), options.pop("algorithm", None)
        if "q" not in options and operator != "append":
            raise BadParam(
                f"a call of warmup has no {arg('q')}: {call}; it is a shape, such as (1, 4096, 16, 128)"
            )
        problems.append((_shaped(operator, options, dtype), algorithm))
    return problems


def _compile(variant: Variant, device: Device) -> None:
    """Have a kernel in the disk cache."""
    from flashgen.toolchain.obtain import arch_for, obtain, own_arch, recall

    if recall(variant, own_arch(variant, device)) is None:
        obtain(variant, arch_for(variant, device))


def _load(variant: Variant, device: Device) -> None:
    """Have a kernel in memory; a tile tuned on this machine may fail, for which `prepare` has another one."""
    from flashgen.runtime import kernel

    try:
        kernel.load(variant, device)
    except CompileError:
        if variant.tile_name != TUNED_TILE:
            raise


def device_of(arch: str | None) -> Device:
    """This machine's GPU, or a typical one of an architecture that it does not have."""
    from flashgen.families.arch import typical
    from flashgen.runtime import device as devices

    if arch is None or (devices.available() and devices.device(0).arch == arch):
        if not devices.available():
            raise DeviceTypeNotSupported(
                f"{arg('arch')} is None, which is the GPU of this machine; pass another, for example "
                f"arch='sm_90' (--arch sm_90). The GPU cannot be used: {devices.why_unavailable()}"
            )
        return devices.device(0)
    return typical(arch)


def _shaped(function: str, options: dict[str, Any], dtype: str) -> Problem:
    """The Problem of a call on GPU 0, from its keywords; an array may be a shape. Of a call of attention, k
    is by default as q and v as k. Any other input that there must be has the shape that belongs to these.
    """
    if not isinstance(dtype, str):
        raise BadParam(f"dtype is {shown(dtype)}; expected a name, such as 'fp16'")
    dtype = dtype_name(dtype)
    if not isinstance(function, str) or function not in _EXPLAINED:
        raise BadParam(f"operator is {shown(function)}; allowed are {', '.join(map(repr, _EXPLAINED))}")
    default_values, request_by_name = _function(function)
    names = default_values.keys() - _UNEXPLAINED
    if function != "append":
        names -= _OF_SECOND.keys()
    unknown = options.keys() - names
    if unknown:
        apart = ""
        second = [name for name in _OF_SECOND if name in unknown]
        if function == "attention" and second:
            what = "its weights are" if second[0] == "return_weights" else "what it appends is"
            apart = f"; {what} a separate call, with operator {_OF_SECOND[second[0]]!r}"
        wrong = sorted(map(str, unknown))
        meant = advice(wrong[0], names)
        raise BadParam(
            f"{', '.join(wrong)}: no such option; there are {', '.join(sorted(names))}{meant}{apart}"
        )
    call = default_values | options
    if function == "append":
        if call["v_new"] is None:
            call["v_new"] = _shape_of_values(call)
        with naming(FIELDS):
            return _problem_of(request_by_name(call), dtype)
    if function == "attention" and dtype == "e4m3":
        call["dtype"] = dtype
    if call["k"] is None:
        call["k"] = call["q"]
    if call["v"] is None and not isinstance(call["k"], KVCache):
        call["v"] = call["k"]
    if call.get("dropout_p") and call["dropout_seed"] is None:
        call["dropout_seed"] = (2,)
    record = GradientCall if function == "attention_backward" else AttentionCall
    with naming(names_of(call_of(record, **call))):
        return _problem_of(request_by_name(call), dtype)


def _shape_of_values(call: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of v_new beside k_new and the cache of a call of append; None for a latent cache."""
    cache, new = call["cache"], call["k_new"]
    if not isinstance(cache, KVCache) or cache.head_dim_v is not None:
        return None
    new, values = (arrays.shape_if_any(x, name, x) for x, name in ((new, "k_new"), (cache.v, "v")))
    are_shapes = all(isinstance(shape, tuple | list) and shape for shape in (new, values))
    return (*new[:-1], values[-1]) if are_shapes else None


def _problem_of(request: Request, dtype: str) -> Problem:
    """The Problem of a request, on GPU 0; its arrays may be shapes."""
    operator, values = request.operator, request.arrays
    shapes = {
        argument.name: shape
        for argument, x in zip(operator.arguments, values, strict=True)
        if isinstance(shape := arrays.shape_if_any(x, argument.name, x), tuple | list)
        and not argument.optional
    }
    views, of_arrays = [], {}
    kv_dtype = dict(zip(operator.options, request.options, strict=True)).get("kv_dtype")
    # A shape has no dtype: the arrays of a cache of codes have the one that its kv_dtype says.
    codes = "uint8" if kv_dtype == latentrows.LAYOUT else kv_dtype
    of_codes = {} if codes is None else dict.fromkeys(("k", "v", "k_cache", "v_cache"), codes)
    by_name = {name: x for name, x in request.by_name().items() if not isinstance(x, tuple | list | str)}
    dlpack.check_libraries(by_name, cache_arrays(by_name))
    for argument, x in zip(operator.arguments, values, strict=True):
        if x is None and not (argument.optional or argument.is_output):
            x = operator.shape_beside(argument.name, shapes)
        if x is None:
            if argument.name in ("q", "k", "v") and not argument.optional:
                raise NullPointer(f"{arg(argument.name)} is None; expected a shape or an array")
            views.append(None)
        elif isinstance(x, tuple | list | str):
            of_shape = of_codes.get(argument.name, argument.dtype(dtype))
            views.append(view_of_shape(_shape(argument.name, x), of_shape, 0))
        else:
            view = arrays.view(dlpack.adopt(x, argument.name), argument.name)
            of_arrays[argument.name] = dataclasses.replace(view, device=0)
            views.append(of_arrays[argument.name])
    if of_arrays:
        arrays.check_libraries(of_arrays)
    return operator.normalise(views, request.options, request.scalars)


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return shown(x)


def _shape(name: str, extents: tuple[Any, ...] | list[Any] | str) -> tuple[int, ...]:
    """A shape as a caller gives it. Raises BadParam for what is none, and BadTensorShape."""
    try:
        shape = None if isinstance(extents, str) else tuple(map(index, extents))
    except TypeError:
        shape = None
    if shape is None:
        raise BadParam(
            f"{arg(name)} is {_Short().repr(extents)}; expected a shape of integers, such as (1, 4096, 16, "
            "128), or an array"
        )
    if not all(0 <= extent < 1 << 63 for extent in shape):
        raise BadTensorShape(
            f"{arg(name)} has shape {shown(shape)}; expected sizes of 0 or more that fit in 64 bits"
        )
    return shape


def _calls(calls: Any) -> list[Mapping[str, Any]]:
    """The calls of a warmup. Raises BadParam."""
    example = "{'q': (1, 4096, 16, 128), 'causal': True}"
    if isinstance(calls, str | PathLike):
        if not Path(calls).is_file():
            raise BadParam(
                f"calls is {shown(fspath(calls))}, and there is no such file; expected one that "
                f"flashgen.record() wrote, or a list with the arguments of each call, such as [{example}]"
            )
        calls = read(calls)
    try:
        iterator = None if isinstance(calls, Mapping) else iter(calls)
    except TypeError:
        iterator = None
    if iterator is None:
        raise BadParam(
            f"calls has type {type(calls).__name__}; expected a list with the arguments of each call, such "
            f"as [{example}]"
        )
    calls = list(iterator)
    for place, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise BadParam(
                f"calls[{place}] is {reprlib.repr(call)}; expected the arguments of a call by name, such as "
                f"{example}"
            )
    return calls


@lru_cache(maxsize=len(_EXPLAINED))
def _function(name: str) -> tuple[Mapping[str, Any], Callable[[dict[str, Any]], Request]]:
    """The parameters of an operator in `_EXPLAINED` with their defaults, None where there is none, and its
    `request_by_name`.
    """
    module, function = _EXPLAINED[name]
    return defaults(function), importlib.import_module(f"flashgen.api.{module}").request_by_name
