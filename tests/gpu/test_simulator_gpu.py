"""The simulator against the GPU: the same source, the same bytes, nearly the same numbers.

Both add the same products in the same order. What may differ is the last bits of a matrix instruction's sum
and of 2^x, and through them the rounding of a weight and of an output to 16 bits: a unit of the dtype each,
relative to the largest element of V, which bounds every output.
"""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from flashgen.operators.numbers import widened
from flashgen.runtime.device import device
from flashgen.schedule.dispatch import runs_on
from flashgen.simulator import hostcompiler
from flashgen.simulator.example import make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from gpu.copies import computed
from simulator.covering import VARIANTS, covering, shapes

pytestmark = pytest.mark.gpu

UNIT = {"fp16": 2**-10, "bf16": 2**-7, "fp32": 2**-18}


def values(variant):
    """What the set must have: every value of every axis of a family, with each loop and tile name. The host
    takes ten seconds to compile a kernel, so pairs are left to the tests against float64.
    """
    tile = ("loop", dict(variant.tile).get("loop")), ("tile_name", variant.tile_name)
    return {(variant.spec, *each) for each in (*variant.axes, ("target", variant.target), *tile)}


@pytest.mark.parametrize("variant", covering(VARIANTS.values(), values), ids=lambda variant: variant.name)
def test_simulator_and_gpu_agree(variant):
    gpu = device(0)
    if not runs_on(variant, gpu):
        pytest.skip(f"{gpu} does not run it")
    if reason := hostcompiler.why_unavailable():
        pytest.skip(reason)
    seed = secrets.randbits(32)
    libraries = [load(render(step), step.name) for step in variant.steps]
    for shape in shapes(variant):
        example = make(variant, shape, seed)
        found = computed(example, variant, ("out", "lse"))
        run_steps(libraries, variant, example, seed=seed, device=gpu)
        mine, theirs = (widened(x, variant.dtype) for x in (example.out, found["out"]))
        largest = np.abs(widened(example.v, variant.dtype)).max(initial=1.0)
        error = np.abs(mine - theirs).max(initial=0.0)
        assert error <= 2 * UNIT[variant.dtype] * largest, f"{shape}, seed {seed}"
        if example.lse is not None:
            np.testing.assert_allclose(found["lse"], example.lse, 1e-5, 1e-5)
