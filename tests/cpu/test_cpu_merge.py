import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam
from flashgen.operators.merge import normalise
from flashgen.operators.merge_reference import judge
from flashgen.runtime.arrays import view

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}


def part(rng, shape, dtype, spread):
    """Random o and lse; rows that saw no key have -inf, and NaN in o."""
    batch, seqlen, heads, _ = shape
    lse = spread * rng.standard_normal((batch, heads, seqlen), np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    o = rng.standard_normal(shape, np.float32).astype(dtype)
    o[np.isneginf(lse).swapaxes(1, 2)] = np.nan
    return o, lse


@pytest.mark.parametrize("spread", [0.5, 60.0, 3000.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_the_bound_of_float64(dtype, spread):
    rng = np.random.default_rng()
    parts = [part(rng, (2, 33, 3, 40), DTYPES[dtype], spread) for _ in range(2)]
    flat = [x for pair in parts for x in pair]
    out, lse = flashgen.merge(parts)
    verdict = judge(normalise(*(view(x, "x") for x in flat)), *flat, out, lse)
    assert verdict.ok, verdict
    both = np.isneginf(flat[1]) & np.isneginf(flat[3])
    assert both.any()
    assert np.isneginf(lse[both]).all()
    assert not out[both.swapaxes(1, 2)].any()


def test_a_matrix_is_an_array():
    parts = [part(np.random.default_rng(), (1, 4, 4, 8), np.float32, 1.0) for _ in range(2)]
    parts = [(o, lse[0]) for o, lse in parts]
    found = flashgen.merge([(o[0], np.matrix(lse)) for o, lse in parts])
    for x, y in zip(found, flashgen.merge([(o[0], lse) for o, lse in parts]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_strides_and_results_that_are_given():
    rng = np.random.default_rng()
    parts = [part(rng, (2, 9, 4, 16), np.float16, 1) for _ in range(2)]
    expected = flashgen.merge(parts)
    strided = [(np.ascontiguousarray(o.swapaxes(1, 2)).swapaxes(1, 2), lse) for o, lse in parts]
    memory = np.full((2, 9, 6, 24), np.nan, np.float16)
    out, lse_out = memory[:, :, :4, :16], np.full((2, 4, 9), np.nan, np.float32)
    found = flashgen.merge(strided, out=out, lse_out=lse_out)
    assert found[0] is out
    assert found[1] is lse_out
    for given, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(given, right)
    assert np.isnan(memory[:, :, 4:]).all()
    assert np.isnan(memory[..., 16:]).all()


def test_memory_that_cannot_be_written_to_is_refused():
    parts = [part(np.random.default_rng(), (1, 3, 2, 8), np.float32, 1) for _ in range(2)]
    out = np.zeros((1, 3, 2, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises(BadParam, match="out is read-only"):
        flashgen.merge(parts, out=out)
