"""The stopwatch of benchmarks/first_use.py, without a GPU: its stages are there, and cover what is timed."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# From an empty disk cache to machine code, as far as that needs no GPU; then once more.
PROGRAM = """
import json, sys, time
sys.path[:0] = sys.argv[1:3]
import cupy
import first_use
from types import SimpleNamespace

def work():
    import flashgen
    from flashgen.schedule import dispatch
    from flashgen.families.load import load_specs
    from flashgen.toolchain import cache, obtain

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.attention import normalise

    view = ArrayView("cupy", 4096, (1, 64, 2, 64), (8192, 128, 64, 1), "fp16", 0)
    call = normalise(view, view, view)
    device = SimpleNamespace(compute_capability=(8, 0), smem_per_block=166912)
    variant = dispatch.offers(call, device, load_specs(cache=cache.default()))[0]
    if not obtain.recall(variant, "sm_80"):
        obtain.obtain(variant, "sm_80")

watch = first_use.Stopwatch()
start = time.perf_counter()
watch.start()
work()
watch.stop()
print(json.dumps([time.perf_counter() - start, watch.seconds]))
"""


@pytest.fixture(scope="module")
def first_use():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("first_use")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_stages_are_functions_of_flashgen(first_use):
    for place in first_use.STAGES:
        module, _, path = place.partition(":")
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        assert callable(found), place


def test_stages_add_up_to_what_was_timed_and_a_cached_use_compiles_nothing(tmp_path):
    pytest.importorskip("cupy")
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "benchmarks"), str(ROOT / "codegen")]
    env = os.environ | {"FLASHGEN_CACHE_DIR": str(tmp_path)}
    runs = []
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    for total, seconds in runs:
        assert sum(seconds.values()) == pytest.approx(total, abs=0.002, rel=0.03)  # of a busy machine too
    (_, uncached), (_, cached) = runs
    compiling = {"load NVRTC", "render", "compile", "cache write"}
    assert compiling <= uncached.keys()
    assert not compiling & cached.keys()
    assert {"import", "specs", "dispatch", "cache key", "cache read"} <= cached.keys()
    # Of these alone: what specs and imports take is another share on each machine.
    assert uncached["compile"] > 0.5 * sum(uncached[stage] for stage in compiling)


def test_a_function_that_is_no_longer_there_is_an_error(first_use, monkeypatch):
    monkeypatch.setattr(first_use, "STAGES", {"json:gone": "specs", "not.imported:there": "render"})
    watch = first_use.Stopwatch()
    watch.start()
    import json  # noqa: F401

    with pytest.raises(LookupError, match=r"STAGES names what there is not: json:gone$"):
        watch.stop()
