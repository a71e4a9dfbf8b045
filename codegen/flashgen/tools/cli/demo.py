"""`flashgen demo`: the whole road in half a minute, on a GPU or else on the CPU."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.options import json_option, variants_on_offer
from flashgen.tools.cli.output import say

if TYPE_CHECKING:
    import numpy as np

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.reference import Largest
    from flashgen.toolchain.build import Built

_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Case:
    """One call of attention, and the kernel that a GPU would take for it.

    `tokens` is the sequence length on a GPU; the CPU takes a shorter one. `options` are passed to
    attention().
    """

    title: str
    tokens: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)


_CPU_TOKENS = 1024
_SIMULATOR_TOKENS = 256
_SIMULATED = (1, 192, 2, 64)  # shape of q, k and v for the simulator
_CASES = (
    Case("causal", 4096, 16, 16, 128, "fp16", {"causal": True}),
    Case("16 heads on 2", 4096, 16, 2, 64, "fp16"),
    Case("window of 256", 4096, 16, 16, 64, "fp16", {"causal": True, "window_size": (256, 0)}),
)


@click.command(
    "demo",
    short_help="Run and check attention on this machine.",
    epilog="""
\b
Examples:
  flashgen demo
  flashgen demo --json

Each element has a bound, the most that rounding can do to it. The table shows the error of the first head
that is largest relative to its bound. Exit code 1 if a kernel does not compile, or an error exceeds its
bound.
""",
)
@json_option
def command(as_json: bool) -> None:
    """Render and compile a few kernels, run attention, and check it against float64.

    Takes half a minute at most. Without a GPU it compiles the kernels, runs attention on the CPU, and, if
    there is a C++ compiler, runs the generated CUDA of a small problem in the simulator.
    """
    from flashgen.errors import NoCompilerError
    from flashgen.toolchain.build import build
    from flashgen.toolchain.obtain import arch_for
    from flashgen.tools.cli.kernels import places, print_kernels
    from flashgen.tools.cli.output import print_json
    from flashgen.tools.cli.progress import progress, waiting

    gpu, why = _place()
    report: dict[str, Any] = {"place": gpu.name if gpu else "CPU", "why": why, "no_compiler": ""}
    if not as_json:
        say(f"attention on the {report['place']}" + (f": {report['why']}" if report["why"] else ""))
    calls = [_call(case, gpu) for case in _CASES]
    archs = [arch_for(call.variant, gpu) if gpu else call.variant.archs[0] for call in calls]
    built: list[Built] = []
    try:
        targets = zip([call.variant for call in calls], archs, strict=True)
        with progress(len(calls), f"compiling {len(calls)} kernels") as step:
            built = build(targets, on_done=lambda kernel: step(f"{kernel.variant.name} {kernel.arch}"))
    except NoCompilerError as error:
        report["no_compiler"] = str(error)
    if not as_json:
        click.echo()
        if built:
            print_kernels(built)
        elif report["no_compiler"] == report["why"]:
            say("kernels were not compiled, for the same reason")
        else:
            say(f"kernels were not compiled: {report['no_compiler']}")
    results = []
    for call in calls:
        with waiting(f"attention, {call.case.title}, and its check against float64"):
            results.append(_run(call, gpu))
    simulated = None
    if not gpu:
        with waiting("compiling a kernel for the simulator, and running it"):
            simulated = _simulated()
    report["simulated"] = simulated
    report["kernels"] = [kernel.as_dict() for kernel in built]
    report["results"] = results
    report["sources"] = {call.variant.name: places(call.variant).generated for call in calls}
    if as_json:
        print_json(report)
    else:
        _print_results(results)
        if simulated:
            _print_simulated(simulated)
        _print_sources(report["sources"])
    results += [simulated] if simulated else []
    if any(kernel.failure for kernel in built) or not all(result["ok"] for result in results):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Call:
    """A case with its arrays in host memory, its problem, and the kernel that serves it on a GPU."""

    case: Case
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    problem: AttentionProblem
    variant: Variant


def _place() -> tuple[Device | None, str]:
    """The GPU that attention() can use, or None and why there is none."""
    from flashgen.errors import NoCompilerError
    from flashgen.runtime.device import available, device, why_unavailable
    from flashgen.schedule.dispatch import runs_on
    from flashgen.toolchain.compile import nvrtc

    if not available():
        return None, why_unavailable()
    try:
        nvrtc()
    except NoCompilerError as error:
        return None, str(error)
    here = device(0)
    if not any(runs_on(variant, here) for variant in variants_on_offer()):
        return None, f"no kernel runs on {here}"
    return here, ""


def _simulating() -> bool:
    """Whether attention() runs the generated CUDA for arrays in host memory."""
    from flashgen.call.backends import backend_for

    return backend_for(None) == "simulator"


def _call(case: Case, gpu: Device | None) -> Call:
    """Fresh inputs, and the variant that dispatch takes on this GPU, or on an H100 where there is none."""
    import numpy as np

    from flashgen.families.arch import typical
    from flashgen.operators.attention import normalise
    from flashgen.runtime.arrays import view
    from flashgen.schedule.dispatch import select as dispatch

    tokens = case.tokens if gpu else _SIMULATOR_TOKENS if _simulating() else _CPU_TOKENS
    rng = np.random.default_rng()
    q, k, v = (
        rng.standard_normal((1, tokens, heads, case.head_dim), np.float32).astype(
            "float16" if case.dtype == "fp16" else "float32"
        )
        for heads in (case.heads_q, case.heads_kv, case.heads_kv)
    )
    problem = normalise(view(q, "q"), view(k, "k"), view(v, "v"), **case.options)
    return Call(case, (q, k, v), problem, dispatch(problem, gpu or typical("sm_90"), variants_on_offer()))


def _run(call: Call, gpu: Device | None) -> dict[str, Any]:
    """Attention by the front door, timed, and how far its first head is from float64."""
    import numpy as np

    import flashgen
    from flashgen.operators.masks import visible_keys

    options = call.case.options
    by = "the CPU path"
    if gpu:
        import cupy

        by = call.variant.name

        arrays = tuple(cupy.asarray(array) for array in call.arrays)
        out = cupy.full(call.problem.out_shape, cupy.nan, arrays[0].dtype)
        flashgen.attention(*arrays, out=out, **options)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(_REPEATS):
            flashgen.attention(*arrays, out=out, **options)
        end.record()
        end.synchronize()
        milliseconds = cupy.cuda.get_elapsed_time(start, end) / _REPEATS
        computed = cupy.asnumpy(out)
    else:
        if _simulating():
            by = f"{flashgen.plan(*call.arrays, **options).variant}, simulated"
        computed = np.full(call.problem.out_shape, np.nan, call.arrays[0].dtype)
        begin = time.perf_counter()
        flashgen.attention(*call.arrays, out=computed, **options)
        milliseconds = 1e3 * (time.perf_counter() - begin)
    worst = _worst(call, computed)
    width = call.problem.head_dim + call.problem.head_dim_v
    flops = 2.0 * call.problem.num_heads_q * visible_keys(call.problem).sum() * width
    return {
        "case": call.case.title,
        "shape": list(call.problem.out_shape),
        "dtype": call.case.dtype,
        "variant": call.variant.name if gpu else None,
        "computed_by": by,
        **worst.as_dict(),
        "ok": worst.share <= 1,
        "milliseconds": milliseconds,
        "tflops": flops / milliseconds / 1e9,
    }


def _simulated() -> dict[str, Any]:
    """One small problem by the generated CUDA on the CPU, or why there is none; ``ok`` unless it is wrong."""
    import numpy as np

    import flashgen
    from flashgen.operators.reference import judge
    from flashgen.simulator import hostcompiler

    why = hostcompiler.why_unavailable()
    if why:
        return {"why": why, "ok": True}
    rng = np.random.default_rng()
    q, k, v = rng.standard_normal((3, *_SIMULATED), np.float32).astype(np.float16)
    begin = time.perf_counter()
    try:
        plan = flashgen.plan(q, k, v, causal=True, backend="simulator")
    except flashgen.CompileError as error:
        return {"why": str(error), "ok": True}
    compiled = time.perf_counter()
    out = np.full_like(q, np.nan)
    report: dict[str, Any] = {"why": "", "variant": plan.variant.name, "shape": list(q.shape)}
    report["compile_seconds"] = compiled - begin
    try:
        plan(q, k, v, out=out)
    except flashgen.SimulationError as error:
        return report | {"ok": False, "failure": str(error)}
    verdict = judge(plan.problem, {"q": q, "k": k, "v": v, "out": out})
    return report | {
        "ok": verdict.ok,
        "failure": "",
        **verdict.out.as_dict(),
        "seconds": time.perf_counter() - compiled,
    }


def _worst(call: Call, computed: np.ndarray) -> Largest:
    """The worst element of the first head against float64."""
    from flashgen.operators import reference
    from flashgen.operators.masks import Band
    from flashgen.operators.numbers import widened

    problem = call.problem
    *arrays, result = (widened(x[:, :, :1], problem.dtype) for x in (*call.arrays, computed))
    expected = reference.attention(*arrays, problem.dtype, problem.softmax_scale, Band.of(problem))
    return reference.largest(result, expected.out, expected.out_bound)


def _print_results(results: list[dict[str, Any]]) -> None:
    from flashgen.tools.cli.output import Column, print_table

    columns = [Column("case"), Column("shape"), Column("dtype")]
    columns += [Column(name, number=True) for name in ("error", "of its bound", "time", "rate")]
    columns.append(Column("computed by", optional=True))
    rows = [
        [
            result["case"],
            "x".join(map(str, result["shape"])),
            result["dtype"],
            *_error(result),
            _short(result["milliseconds"] / 1e3, (("s", 1), ("ms", 1e-3), ("µs", 1e-6))),
            _short(result["tflops"], (("TFLOP/s", 1), ("GFLOP/s", 1e-3))),
            result["computed_by"],
        ]
        for result in results
    ]
    click.echo()
    print_table(columns, rows, ["" if result["ok"] else "red" for result in results])


def _error(result: dict[str, Any]) -> tuple[str, str]:
    """The error, with a mark where it is too large, and its share of the bound."""
    if result["error"] is None:
        return "NaN !", "-"
    share = "-" if result["share"] is None else f"{result['share']:.2f}"
    return f"{result['error']:.1e}" + ("" if result["ok"] else " !"), share


def _short(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """The value in the first unit of which it is at least one, with three digits."""
    unit, factor = next(((u, f) for u, f in units if value >= f), units[-1])
    scaled = value / factor
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"


def _print_simulated(simulated: dict[str, Any]) -> None:
    click.echo()
    if simulated["why"]:
        say(f"the CUDA was not simulated: {simulated['why']}")
        return
    say(f"the CUDA of {simulated['variant']}, simulated on the CPU:")
    if simulated["failure"]:
        say(f"  {simulated['failure']} !")
        return
    shape = "x".join(map(str, simulated["shape"]))
    error, share = _error(simulated)
    times = f"{simulated['seconds']:.1f} s after {simulated['compile_seconds']:.1f} s of compiling"
    say(f"  {shape} causal: error {error}, {share} of its bound; {times}")


def _print_sources(sources: dict[str, str | None]) -> None:
    say("\nread the CUDA:")
    for name, path in sources.items():
        say(f"  {path or f'flashgen inspect {name} --source'}")
