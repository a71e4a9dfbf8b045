"""compute-sanitizer finds nothing: every tile, mask type and grouping of every spec, on tiny problems.

The kernels run in programs of their own, as many at a time as there are processors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashgen.runtime.device import device
from flashgen.schedule.dispatch import runs_on
from flashgen.toolchain import build, obtain
from flashgen.toolchain.parallel import processors
from gpu.sanitized import PLANTED, VARIANTS
from simulator.covering import covering, work

pytestmark = pytest.mark.gpu

TOOLS = ("memcheck", "racecheck")
PROGRAM = Path(__file__).with_name("sanitized.py")
ROOT = PROGRAM.parents[2]
_FOUND = re.compile(r"SUMMARY: [1-9]\d* (error|hazard)")
_CLEAN = re.compile(r"SUMMARY: 0 (error|hazard)")
_SECONDS = 300


def traits(variant):
    """What the variants must have between them."""
    return {
        (variant.spec, variant.target, variant.tile, variant.head_dim),
        (variant.spec, variant.head_dim, variant.mask_type),
        (variant.spec, variant.mask_type, variant.gqa),
        (variant.spec, variant.dtype),
    }


def chosen(gpu):
    """A small set of the variants that run on ``gpu``, those that take longest first."""
    runnable = [variant for variant in VARIANTS.values() if runs_on(variant, gpu)]
    return sorted(covering(runnable, traits), key=work, reverse=True)


def find_sanitizer():
    """The program's path, or None: on PATH, else where the CUDA toolkit has it."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{toolkit}/bin" for toolkit in toolkits if toolkit)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def watched(tool, names):
    """What ``sanitized.py`` printed under the tool, with its exit code."""
    command = [find_sanitizer(), "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "99"]
    done = subprocess.run(
        [*command, sys.executable, str(PROGRAM), *names],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "codegen", *sys.path)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """A cache with the chosen variants, so that the programs that are watched compile nothing."""
    if find_sanitizer() is None:
        pytest.skip("compute-sanitizer is not installed")
    gpu = device(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        built = build.build(
            [(step, obtain.arch_for(step, gpu)) for variant in chosen(gpu) for step in variant.steps]
        )
        failures = [each.failure for each in built if each.failure]
        assert not failures, "\n".join(failures)
        yield


@pytest.fixture(params=TOOLS)
def tool(request):
    """A tool that finds the fault planted for it, so that its silence means something."""
    name = f"planted-{request.param}"
    assert name in PLANTED
    code, said = watched(request.param, [name])
    if "Device not supported" in said:
        pytest.skip(f"{request.param} does not work here: {said}")
    # Memcheck ends the kernel, and with it the program.
    assert code, said
    assert _FOUND.search(said), said
    return request.param


# All lanes of a warp read a tile. After a __syncwarp one of them arrives for all. Racecheck does not follow
# this order. The simulator does, and finds no race in this family.
_ONE_LANE_ARRIVES = {"flash_split_sm90"}


def test_the_sanitizer_finds_nothing(tool):
    unfollowed = _ONE_LANE_ARRIVES if tool == "racecheck" else set()
    names = [variant.name for variant in chosen(device(0)) if variant.spec not in unfollowed]
    workers = min(len(names), processors())
    shares = [names[first::workers] for first in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda share: watched(tool, share), shares))
    wrong = []
    for share, (code, said) in zip(shares, results, strict=True):
        missing = [name for name in share if f"done {name}\n" not in said]
        if code or missing or not _CLEAN.search(said):
            wrong.append(f"exit code {code} for {share}; did not finish: {missing}\n{said[:6000]}")
    assert not wrong, "\n\n".join(wrong)
