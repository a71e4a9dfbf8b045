import itertools

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
    """Random o and lse; rows that saw no key have -inf or, as in flash-attn, +inf, and NaN in o."""
    batch, seqlen, heads, _ = shape
    lse = spread * rng.standard_normal((batch, heads, seqlen), np.float32)
    empty = rng.random(lse.shape) < 0.3
    lse[empty] = rng.choice([-np.inf, np.inf], empty.sum())
    o = rng.standard_normal(shape, np.float32).astype(dtype)
    o[np.isinf(lse).swapaxes(1, 2)] = np.nan
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
    both = np.isinf(flat[1]) & np.isinf(flat[3])
    assert both.any()
    assert np.isneginf(lse[both]).all()
    assert not out[both.swapaxes(1, 2)].any()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_keys_has_no_weight_whichever_infinity_marks_it(dtype, count):
    """All mixes of a part that saw keys, one marked as flashgen does, and one marked as flash-attn does."""
    rng = np.random.default_rng()
    mixes = np.array(list(itertools.product((0.0, -np.inf, np.inf), repeat=count)), np.float32)
    parts = []
    for of_part in mixes.T:
        lse = (of_part + np.where(np.isinf(of_part), 0, rng.standard_normal(len(mixes))))[None, None]
        o = rng.standard_normal((1, len(mixes), 1, 8)).astype(DTYPES[dtype])
        o[0, np.isinf(of_part)] = np.nan
        parts.append((o, lse.astype(np.float32)))
    of_flashgen = [(o, np.where(np.isinf(lse), np.float32(-np.inf), lse)) for o, lse in parts]
    out, lse = flashgen.merge(parts)
    for found, right in zip((out, lse), flashgen.merge(of_flashgen), strict=True):
        np.testing.assert_array_equal(found, right)
    nothing = np.isinf(mixes).all(axis=1)
    assert not out[0, nothing].any()
    assert np.isneginf(lse[0, 0, nothing]).all()
    assert np.isfinite(lse[0, 0, ~nothing]).all()
    alone = np.isinf(mixes[:, 1:]).all(axis=1) & np.isfinite(mixes[:, 0])
    np.testing.assert_array_equal(out[0, alone], parts[0][0][0, alone])


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
