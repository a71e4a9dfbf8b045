"""Host time of calls, and the time of first use, on CuPy arrays. Needs a GPU.

    python benchmarks/host_time.py [--json FILE]

A call's time is what it takes on the host to queue one kernel: the median of many calls, with the queue
drained between batches so that it never fills. First use is timed in a new process for each variant, from
`import flashgen` (CuPy imported and the arrays made) until the result is there: with an empty disk cache,
then with the one that this left behind.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS, BATCH = 4000, 200
# Covers each head dim and mask type, each dtype, and grouped heads.
FIRST_USES = [
    {"head_dim": head_dim, "dtype": dtype, "mask": mask, "kv_heads": kv_heads}
    for head_dim, dtype, mask, kv_heads in (
        (64, "float16", "none", 8),
        (64, "float16", "causal", 2),
        (128, "float16", "none", 8),
        (128, "float16", "causal", 8),
        (128, "float16", "dense", 8),
        (96, "float16", "local", 8),
        (192, "float16", "causal", 8),
        (256, "float16", "none", 2),
        (32, "float32", "none", 8),
        (64, "float32", "causal", 8),
        (128, "float32", "dense", 8),
    )
]


def main() -> None:
    """Measure, print a table, and write the same numbers as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--only", choices=["calls", "first"], help="measure one part")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(first_use(json.loads(options.child))))
        return
    results: dict[str, Any] = {}
    if options.only != "first":
        results["calls_us"] = calls()
        for name, (median, low) in results["calls_us"].items():
            print(f"{median:9.2f} µs  (10th percentile {low:.2f})  {name}")
    if options.only != "calls":
        results["first_use_s"] = first_uses()
        for name in ("uncached", "cached"):
            seconds = [use[name] for use in results["first_use_s"]]
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            print(f"{statistics.median(seconds):9.3f} s   ({spread})  first use, {name}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def calls() -> dict[str, tuple[float, float]]:
    """Median and 10th percentile of the host time in µs, by the kind of call."""
    import cupy

    import flashgen

    shape = (1, 128, 16, 64)
    (q, k, v, out), other = (
        [cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for _ in range(4)]
        for _ in range(2)
    )
    lse = cupy.empty((1, 16, 128), cupy.float32)
    mask = cupy.zeros((128, 128), bool)
    plan, with_lse = flashgen.plan(q, k, v), flashgen.plan(q, k, v, return_lse=True)
    stream = cupy.cuda.get_current_stream()
    turns = itertools.cycle([(q, k, v, out), other])

    def in_turn() -> None:
        a, b, c, d = next(turns)
        plan(a, b, c, out=d)

    kinds: dict[str, Callable[[], Any]] = {
        "attention(q, k, v)": lambda: flashgen.attention(q, k, v),
        "attention(q, k, v, causal=True)": lambda: flashgen.attention(q, k, v, causal=True),
        "attention(q, k, v, mask=mask)": lambda: flashgen.attention(q, k, v, mask=mask),
        "attention(q, k, v, out=out)": lambda: flashgen.attention(q, k, v, out=out),
        "attention(q, k, v, return_lse=True)": lambda: flashgen.attention(q, k, v, return_lse=True),
        "plan(q, k, v, out=out)": lambda: plan(q, k, v, out=out),
        "plan(q, k, v, out=out), two sets in turn": in_turn,
        "plan(q, k, v, out=out, stream=stream)": lambda: plan(q, k, v, out=out, stream=stream),
        "plan(q, k, v, out=out, lse=lse)": lambda: with_lse(q, k, v, out=out, lse=lse),
        "plan(q, k, v)": lambda: plan(q, k, v),
        "for scale: cupy.add(q, k, out)": lambda: cupy.add(q, k, out),
        "for scale: an empty function": lambda: None,
    }
    return {name: host_time(call, cupy.cuda.Device().synchronize) for name, call in kinds.items()}


def host_time(call: Callable[[], Any], drain: Callable[[], None]) -> tuple[float, float]:
    """Median and 10th percentile of the time of ``call`` in µs."""
    times = []
    for _ in range(CALLS // BATCH):
        drain()
        for _ in range(BATCH):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
    drain()
    times = sorted(times[BATCH:])  # the first batch warms up
    return statistics.median(times), times[len(times) // 10]


def first_uses() -> list[dict[str, Any]]:
    """For each case the seconds of its first use, without and with the disk cache."""
    results = []
    for case in FIRST_USES:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"FLASHGEN_CACHE_DIR": folder}
            # An installed package has its bytecode; without it every process would compile the modules.
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            command = [sys.executable, __file__, "--child", json.dumps(case)]
            runs = [
                json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
                for _ in range(2)
            ]
        results.append(
            case | {"uncached": runs[0]["seconds"], "cached": runs[1]["seconds"]} | runs[1]["stages"]
        )
    return results


def first_use(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds from importing flashgen to a finished result, in this process, and the variant that served."""
    import cupy

    def array(heads: int) -> Any:
        return cupy.random.standard_normal((1, 128, heads, case["head_dim"]), dtype=cupy.float32).astype(
            case["dtype"]
        )

    q, k, v = array(8), array(case["kv_heads"]), array(case["kv_heads"])
    options = {
        "none": {},
        "causal": {"causal": True},
        "local": {"window_size": (9, 9)},
        "dense": {"mask": cupy.zeros((128, 128), bool)},
    }[case["mask"]]
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    import flashgen

    plan = flashgen.plan(q, k, v, **options)
    planned = time.perf_counter()
    plan(q, k, v, mask=options.get("mask"))
    cupy.cuda.Device().synchronize()
    end = time.perf_counter()
    return {"seconds": end - start, "stages": {"variant": plan.variant.name, "cached_plan": planned - start}}


if __name__ == "__main__":
    main()
