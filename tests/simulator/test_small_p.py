"""P far below the largest of its row: fp16 would lose it, but P uses the upper half of its exponents."""

import numpy as np
import pytest

from flashgen.simulator.example import Shape, make, run
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.covering import VARIANTS


@pytest.mark.parametrize("name", ["flash_fwd_hdim64_fp16_m128_sm90", "flash_fwd_hdim64_fp16_causal_m64_sm90"])
def test_many_small_elements_of_p_add_up(name, compiler, fresh_seed):
    """The last key has the largest score and a value of 0; the others together give the output."""
    variant = VARIANTS[name]
    example = make(variant, Shape(seqlen_q=1, seqlen_kv=600, heads=1), fresh_seed)
    ratio = 2.0**-26  # a quarter of fp16's smallest number
    example.q[...], example.k[...], example.v[...] = 0, 0, 1024
    example.q[..., 0] = 16
    example.k[:, :-1, :, 0] = np.log(ratio) / (16 * example.problem.softmax_scale)
    example.v[:, -1] = 0
    run(load(render(variant), name), variant, example, seed=fresh_seed)
    np.testing.assert_allclose(example.out.astype(np.float64), 599 * ratio * 1024, rtol=0.04)
    assert example.judge().ok
