"""The time of a first use, as a user sees it, and what it consists of. Needs a GPU.

    python benchmarks/first_use.py [--json FILE] [--samples N] [--cases N] [--arrays cupy|torch]

Every sample is a new process. The array library is imported and the arrays lie on the GPU, so CUDA has its
context; then the clock runs from `import flashgen` to the synchronised result of `flashgen.attention`. Caches
and tuned tiles are looked for where a user has them, in folders that belong to the sample:

    uncached      nothing in the disk cache; the modules have their bytecode, as pip leaves them
    cached        what an uncached process left in the disk cache; the median of the samples
    no bytecode   cached, but Python compiles every module that it imports, as in a checkout that may not be
                  written to or with PYTHONDONTWRITEBYTECODE

With --arrays torch the import of CuPy is part of what is timed: a user of PyTorch has not imported it.

Stages are exclusive: what a stage calls of another one counts for that one. `other` is what no stage has.
"""

import argparse
import builtins
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Covers the head dims and mask types, the dtypes, grouped heads, and on Hopper both families.
CASES = [
    {"head_dim": head_dim, "dtype": dtype, "mask": mask, "kv_heads": kv_heads}
    for head_dim, dtype, mask, kv_heads in (
        (64, "float16", "none", 8),
        (64, "float16", "causal", 2),
        (96, "float16", "local", 8),
        (128, "float16", "causal", 8),
        (128, "float16", "dense", 8),
        (256, "float16", "none", 2),
        (64, "float32", "causal", 8),
        (128, "float32", "dense", 8),
    )
]
SEQLEN = 128
KINDS = ("uncached", "cached", "no bytecode")
# Functions whose time is a stage, as module:name; what is missing from its module is an error.
STAGES = {
    "flashgen.families.load:load_specs": "specs",
    "flashgen.schedule.dispatch:offers": "dispatch",
    "flashgen.schedule.dispatch:select": "dispatch",
    "flashgen.source.render:source_digest": "cache key",
    "flashgen.toolchain.compile:installed_version": "cache key",
    "flashgen.toolchain.cache:CubinCache.get": "cache read",
    "flashgen.toolchain.cache:CubinCache.put": "cache write",
    "flashgen.toolchain.compile:nvrtc": "load NVRTC",
    "flashgen.source.render:render": "render",
    "flashgen.toolchain.compile:compile_cubin": "compile",
    "flashgen.runtime.tensormap:binding": "tensor maps",
    "flashgen.runtime.tensormap:encode": "tensor maps",
    "flashgen.runtime.kernel:_load": "load kernel",
}
ORDER = ("import", *dict.fromkeys(STAGES.values()), "synchronise", "other")


class Stopwatch:
    """Exclusive seconds by stage, of functions that are wrapped as soon as their module is imported."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0
        self._waiting = dict(STAGES)
        self._genuine = builtins.__import__, importlib.import_module

    def start(self) -> None:
        """Time what happens from now on."""
        builtins.__import__, importlib.import_module = map(self._importing, self._genuine)
        self._running, self._since = ["other"], time.perf_counter()

    def stop(self) -> None:
        """Stop, and raise LookupError where a module that was imported lacks one of its functions."""
        self._count()
        builtins.__import__, importlib.import_module = self._genuine
        missing = [place for place in self._waiting if place.partition(":")[0] in sys.modules]
        if missing:
            raise LookupError(f"STAGES names what there is not: {', '.join(missing)}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def _importing(self, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def load(*arguments: Any, **options: Any) -> Any:
            with self.stage("import"):
                module = genuine(*arguments, **options)
                self._wrap()
            return module

        return load

    def _wrap(self) -> None:
        for place, stage in list(self._waiting.items()):
            module, _, path = place.partition(":")
            *outer, name = path.split(".")
            owner = sys.modules.get(module)
            for part in outer:
                owner = getattr(owner, part, None)
            function = getattr(owner, name, None)
            if function is not None:
                setattr(owner, name, self._timed(function, stage))
                del self._waiting[place]

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self.stage(stage):
                return function(*arguments, **options)

        return call


def first_use(case: dict[str, Any], library: str) -> dict[str, Any]:
    """Milliseconds from importing flashgen to a finished result in this process, by stage and in all."""
    q, k, v, mask, synchronise = _inputs(case, library)
    options = {
        "none": {},
        "causal": {"causal": True},
        "local": {"window_size": (9, 9)},
        "dense": {"mask": mask},
    }[case["mask"]]
    synchronise()
    watch = Stopwatch()
    watch.start()
    start = time.perf_counter()
    import flashgen

    flashgen.attention(q, k, v, **options)
    with watch.stage("synchronise"):
        synchronise()
    end = time.perf_counter()
    watch.stop()
    return {
        "ms": 1e3 * (end - start),
        "stages_ms": {stage: 1e3 * seconds for stage, seconds in watch.seconds.items()},
        "variant": flashgen.plan(q, k, v, **options).variant.name,
    }


def _inputs(case: dict[str, Any], library: str) -> tuple[Any, Any, Any, Any, Callable[[], None]]:
    heads, width = (8, case["kv_heads"], case["kv_heads"]), case["head_dim"]
    if library == "torch":
        import torch

        arrays = [
            torch.randn(1, SEQLEN, n, width, device="cuda").to(getattr(torch, case["dtype"])) for n in heads
        ]
        mask = torch.zeros(SEQLEN, SEQLEN, dtype=torch.bool, device="cuda")
        return (*arrays, mask, torch.cuda.synchronize)
    import cupy

    arrays = [
        cupy.random.standard_normal((1, SEQLEN, n, width), dtype=cupy.float32).astype(case["dtype"])
        for n in heads
    ]
    return (*arrays, cupy.zeros((SEQLEN, SEQLEN), bool), cupy.cuda.Device().synchronize)


def measure(case: dict[str, Any], library: str, samples: int) -> dict[str, Any]:
    """One case in new processes: the figures of each of `KINDS`, and the variant that served."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {"uncached": [_child(case, library, folder)]}
        runs["cached"] = [_child(case, library, folder) for _ in range(samples)]
        runs["no bytecode"] = [_child(case, library, folder, bytecode=False)]
    found: dict[str, Any] = case | {"arrays": library, "variant": runs["cached"][0]["variant"]}
    for kind, each in runs.items():
        stages = {stage for run in each for stage in run["stages_ms"]}
        found[kind] = {
            "ms": statistics.median(run["ms"] for run in each),
            "stages_ms": {
                stage: statistics.median(run["stages_ms"].get(stage, 0.0) for run in each)
                for stage in ORDER
                if stage in stages
            },
        }
    return found


def _child(case: dict[str, Any], library: str, folder: str, bytecode: bool = True) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHGEN_")}
    environment |= {"XDG_CACHE_HOME": folder, "XDG_CONFIG_HOME": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if not bytecode:
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": f"{folder}/none"}
    command = [sys.executable, __file__, "--child", json.dumps(case), "--arrays", library]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _print(results: list[dict[str, Any]]) -> None:
    print(f"{'variant':44}" + "".join(f"{kind:>14}" for kind in KINDS) + "   ms")
    for found in results:
        print(f"{found['variant']:44}" + "".join(f"{found[kind]['ms']:14.1f}" for kind in KINDS))
    medians = (statistics.median(found[kind]["ms"] for found in results) for kind in KINDS)
    print(f"{'median':44}" + "".join(f"{ms:14.1f}" for ms in medians))
    print(f"\n{'stage, median over the variants':44}" + "".join(f"{kind:>14}" for kind in KINDS))
    for stage in ORDER:
        times = [
            statistics.median(found[kind]["stages_ms"].get(stage, 0.0) for found in results) for kind in KINDS
        ]
        print(f"  {stage:42}" + "".join(f"{ms:14.1f}" for ms in times))


def main() -> None:
    """Measure and print two tables; with ``--json`` write the same numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--samples", type=int, default=3, help="cached processes of each variant")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of the variants")
    parser.add_argument("--arrays", choices=["cupy", "torch"], default="cupy", help="the caller's library")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(first_use(json.loads(options.child), options.arrays)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _child(CASES[0], options.arrays, folder)  # leaves the bytecode
    results = [measure(case, options.arrays, options.samples) for case in CASES[: options.cases]]
    _print(results)
    if options.json:
        from flashgen.tools.bench import environment

        report = {"environment": environment.describe(), "samples": options.samples, "first_use": results}
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
