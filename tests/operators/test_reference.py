"""The float64 reference against the formula written out, and the bound against right and wrong kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.operators import reference
from flashgen.operators.masks import UNBOUNDED, Band
from flashgen.operators.numbers import bfloat16_bits, widened

DTYPES = ("fp16", "bf16", "fp32")
LOG2E = math.log2(math.e)


# The reference.


def by_hand(q, k, v, scale, hidden):
    """softmax(q k^T scale) v row by row: (out, lse)."""
    group = q.shape[2] // k.shape[2]
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = ~hidden[b, h, i]
        if seen.any():
            weights = np.exp(k[b, seen, h // group] @ q[b, i, h] * scale)
            out[b, i, h] = weights @ v[b, seen, h // group] / weights.sum()
            lse[b, h, i] = np.log(weights.sum())
    return out, lse


sides = st.integers(0, 12) | st.just(UNBOUNDED)
bands = st.builds(Band, st.integers(-12, 12), sides, sides)


@settings(max_examples=100, deadline=None)
@given(
    st.data(),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    bands,
    st.sampled_from([None, (2, 1), (1, 1), (2, 0)]),
    st.sampled_from([1, 7, 1 << 24]),
)
def test_it_is_the_formula(data, rows, keys, heads, band, mask_shape, at_once):
    """For a band, a dense mask, and both; in pieces of any size; of all rows or some."""
    kv_heads, group = heads
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q = rng.standard_normal((2, rows, kv_heads * group, 8))
    k, v = rng.standard_normal((2, keys, kv_heads, 8)), rng.standard_normal((2, keys, kv_heads, 5))
    hidden = np.zeros((2, kv_heads * group, rows, keys), bool)
    band_hides = band.hides(np.arange(rows)[:, None], np.arange(keys))
    hidden |= False if band_hides is None else band_hides
    dense = None
    if mask_shape is not None:
        shape = (*(n or kv_heads * group for n in mask_shape), rows, keys)
        dense = rng.integers(0, 256, shape, np.uint8) * (rng.random(shape) < 0.4).astype(np.uint8)
        hidden |= dense != 0
    expected, expected_lse = by_hand(q, k, v, 0.3, hidden)
    some = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1)))) if rows else [], int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_SCORES", at_once)
        found = reference.attention(q, k, v, "fp16", 0.3, band, dense)
        part = None if dense is None else dense[:, :, some]
        of_some = reference.attention(q[:, some], k, v, "fp16", 0.3, band, part, some)
    np.testing.assert_allclose(found.out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.lse, expected_lse, rtol=1e-12, atol=1e-12)
    blind = hidden.all(axis=-1)
    assert np.array_equal(found.lse_bound == 0, blind)
    assert np.array_equal((found.out_bound == 0).all(axis=-1), blind.swapaxes(1, 2))
    for whole, piece in zip((found.out, found.out_bound), (of_some.out, of_some.out_bound), strict=True):
        np.testing.assert_allclose(piece, whole[:, some], rtol=1e-12)
    for whole, piece in zip((found.lse, found.lse_bound), (of_some.lse, of_some.lse_bound), strict=True):
        np.testing.assert_allclose(piece, whole[:, :, some], rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_gives_what_numpy_gives(dtype):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, n, h, 16)) for n, h in ((30, 6), (40, 2), (40, 2)))
    dense = (rng.random((6, 30, 40)) < 0.3).astype(np.uint8)
    dense[1, 4] = 1
    band = Band(10, 20, 3)
    expected = reference.attention(q, k, v, dtype, 0.25, band, dense)
    found = reference.attention(*map(torch.from_numpy, (q, k, v)), dtype, 0.25, band, torch.from_numpy(dense))
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-12, atol=1e-30)
    wrong = found.out.clone()
    wrong[1, 2, 3, 4] = math.nan
    worst = reference.largest(wrong, found.out, found.out_bound)
    assert (worst.share, worst.index) == (math.inf, (1, 2, 3, 4))


# What passes and what does not.


def test_what_is_never_near_enough():
    expected = np.array([0.0, 0.0, 1.0, 1.0, -math.inf, -math.inf, 2.0])
    bound = np.array([0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5])
    found = np.array([-0.0, 1e-300, 1.25, math.nan, -math.inf, -3e38, -math.inf])
    shares = reference.shares(found, expected, bound)
    np.testing.assert_array_equal(shares, [0, math.inf, 0.5, math.inf, 0, math.inf, math.inf])


def test_the_worst_element_is_named():
    expected = np.zeros((2, 3))
    worst = reference.largest(
        np.array([[0, 1, 0], [0, 0, -1.5]]), expected, np.array([[1, 2, 1], [1, 1, 2.0]])
    )
    assert worst == (0.75, 1.5, 2.0, (1, 2))
    assert reference.largest(expected[:0], expected[:0], expected[:0]).share == 0


def rounded(x, dtype):
    """Numbers rounded to a dtype, as float64; bfloat16 by way of float32, as kernels round."""
    if dtype == "bf16":
        return widened(bfloat16_bits(x), "bf16")
    with np.errstate(over="ignore"):
        return x.astype({"fp16": np.float16, "fp32": np.float32}[dtype]).astype(np.float64)


def truncated(x):
    """float64 cut off towards zero to float32, as tensor cores end a sum."""
    nearest = x.astype(np.float32).astype(np.float64)
    return np.where(
        np.abs(nearest) > np.abs(x), np.nextafter(nearest.astype(np.float32), np.float32(0)), nearest
    )


def in_bits(x, bits):
    """Numbers rounded to that many significant bits."""
    significand, exponent = np.frexp(x)
    return np.ldexp(np.round(significand * 2.0**bits) / 2.0**bits, exponent)


@dataclass(frozen=True)
class Kernel:
    """Online softmax as the kernels compute it, in their precisions, and what may be wrong with it.

    ``block``: keys of a block; ``slack``: by how much scores may exceed row_max, in log2 units. ``bias``:
    P is 2^bias times as large. ``p_bits``: to how many bits P is rounded, None for its dtype's.
    ``scale_error``: relative. ``lse_base``: of the logarithm.
    """

    dtype: str
    block: int = 64
    slack: float = 8.0
    bias: int = -25 - reference.FP16_P_EXPONENT
    p_bits: int | None = None
    scale_error: float = 0.0
    lse_base: float = math.e

    def __call__(self, q, k, v, scale, hidden):
        """(out, lse) of one head: q (rows, d), k and v (keys, d), hidden (rows, keys)."""
        f32 = np.float32
        scale_log2 = f32(scale * LOG2E * (1 + self.scale_error))
        row_max, row_sum = np.full((len(q), 1), f32(-3.4e38)), np.zeros((len(q), 1), f32)
        sums = np.zeros((len(q), v.shape[1]))
        for first in range(0, len(k), self.block):
            part = slice(first, first + self.block)
            scores = self.multiply(np.zeros((len(q), len(k[part]))), q, k[part].T).astype(f32)
            scores = np.where(hidden[:, part], f32(-np.inf), scores)
            block_max = scores.max(axis=1, keepdims=True) * scale_log2
            raised = np.where(block_max > row_max + f32(self.slack), np.maximum(block_max, row_max), row_max)
            factor = np.exp2(row_max - raised)
            row_sum, sums, row_max = row_sum * factor, rounded(sums * factor, "fp32"), raised
            # A multiply-add rounds once.
            exponent = (scores.astype(np.float64) * scale_log2 - (row_max - f32(self.bias))).astype(f32)
            p = np.exp2(exponent)
            for column in p.T:
                row_sum = row_sum + column[:, None]
            p = rounded(p, self.dtype) if self.p_bits is None else in_bits(p.astype(np.float64), self.p_bits)
            sums = self.multiply(sums, p, v[part])
        blind = row_sum == 0
        out = rounded(sums * np.where(blind, f32(0), f32(1) / np.where(blind, f32(1), row_sum)), "fp32")
        log = (row_max - f32(self.bias) + np.log2(np.where(blind, f32(1), row_sum))) * f32(
            1 / (LOG2E * math.log(self.lse_base))
        )
        return rounded(out, self.dtype), np.where(blind, -np.inf, log)[:, 0]

    def multiply(self, sums, a, b):
        """sums + a b, 16 terms to a matrix instruction of 16-bit numbers; fp32 as three products of TF32."""
        if self.dtype != "fp32":
            for first in range(0, a.shape[1], 16):
                sums = truncated(sums + a[:, first : first + 16] @ b[first : first + 16])
            return sums
        (a_high, a_low), (b_high, b_low) = split(a), split(b)
        total = np.zeros_like(sums)
        for first in range(0, a.shape[1], 8):
            part = slice(first, first + 8)
            for left, right in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
                total = truncated(total + left[:, part] @ right[part])
        return rounded(sums + total, "fp32")


def split(x):
    """A float32 as a TF32 number, rounded, and what that leaves, cut off to TF32."""
    bits = x.astype(np.float32).view(np.uint32)
    high = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    low = (x.astype(np.float32) - high).view(np.uint32) & np.uint32(0xFFFFE000)
    return high.astype(np.float64), low.view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Inputs:
    """One head: q (rows, d), k and v (keys, d), elements of a dtype; the mask, nonzero = hidden."""

    dtype: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dense: np.ndarray
    scale: float

    def verdict(self, kernel, **changes):
        """What ``kernel`` gets when these inputs are given to it with ``changes``."""
        given = replace(self, **changes)
        out, lse = kernel(given.q, given.k, given.v, given.scale, given.dense != 0)
        q, k, v = (x[None, :, None] for x in (self.q, self.k, self.v))
        expected = reference.attention(q, k, v, self.dtype, self.scale, Band(), self.dense)
        return reference.Verdict(
            reference.largest(out[None, :, None], expected.out, expected.out_bound),
            reference.largest(lse[None, None], expected.lse, expected.lse_bound),
        )


def draw(rng, dtype, keys, visible, spread=1.0, rows=400, width=32, values="normal"):
    """Random inputs whose rows see about ``visible`` keys, some none; scores are ``spread`` times normal."""
    q, k, v = (rng.standard_normal((n, width)) for n in (rows, keys, keys))
    if values == "positive":
        v = np.abs(v)
    elif values == "one sign, one size":
        v = 1 + v / 1000
    elif values == "tiny":
        v = v * 2.0**-20
    elif values == "cancelling":  # scores near 0 as sums of large terms
        q[:, width // 2 :], k[:, width // 2 :] = q[:, : width // 2], -k[:, : width // 2]
        q, k = 100 * q, 100 * k
    elif values == "large where P is small":
        depth = np.linspace(0, 30, keys)[:, None]
        q, k = 1 + q / 8, -depth / width**0.5 + k / 8
        v = np.where(depth > 15, 1000 * v, 0)
    dense = rng.integers(1, 256, (rows, keys)) * (rng.random((rows, keys)) >= visible / keys)
    return Inputs(dtype, *(rounded(x, dtype) for x in (q * spread, k, v)), dense, width**-0.5)


FEW = {"visible": 2, "keys": 200}
DRAWS = {
    "one or two keys": FEW,
    "five keys": {"keys": 500, "visible": 5},
    "few keys, scores far apart": FEW | {"visible": 4, "spread": 8.0},
    "all keys": {"keys": 300, "visible": 300},
    "half of many keys": {"keys": 3000, "visible": 1500, "rows": 64},
    "many keys of one sign": {"keys": 10000, "visible": 10000, "rows": 8, "values": "one sign, one size"},
    "positive values": {"keys": 1000, "visible": 1000, "rows": 100, "values": "positive"},
    "scores far apart": {"keys": 400, "visible": 400, "spread": 10.0},
    "scores very far apart": {"keys": 400, "visible": 400, "spread": 1000.0},
    "scores alike": {"keys": 400, "visible": 400, "spread": 0.001},
    "tiny values": {"keys": 100, "visible": 50, "values": "tiny"},
    "large where P is small": {"keys": 60, "visible": 30, "values": "large where P is small"},
    "cancelling scores": {"keys": 100, "visible": 100, "values": "cancelling"},
}


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_kernel_passes(dtype, name, rng):
    inputs = draw(rng, dtype, **DRAWS[name])
    for block in (16, 64) if dtype == "fp32" else (32, 176):
        verdict = inputs.verdict(Kernel(dtype, block))
        assert verdict.out.share < 1, verdict
        assert verdict.lse.share < 1, verdict


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_kernel_passes_where_a_row_is_all_there_is(dtype, rng):
    """However few elements there are to set an error against."""
    for _ in range(100):
        verdict = draw(rng, dtype, keys=50, visible=3, rows=1, width=8).verdict(Kernel(dtype, 32))
        assert verdict.ok, verdict


def one_mask_element(inputs, hide):
    """The mask with one element turned round, in a row that sees several keys: that of the middle score."""
    dense = inputs.dense.copy()
    row = int(np.argmax((dense == 0).sum(axis=1) >= 2))
    keys = np.flatnonzero((dense[row] == 0) == hide)
    scores = inputs.k[keys] @ inputs.q[row]
    dense[row, keys[np.argsort(scores)[len(keys) // 2]]] = hide
    return dense


def heaviest_key(inputs):
    """The key with the largest P of the first row that sees any."""
    visible = inputs.dense == 0
    row = int(np.argmax(visible.any(axis=1)))
    return int(np.argmax(np.where(visible[row], inputs.k @ inputs.q[row], -np.inf)))


FAULTS = {
    "P of another dtype": lambda i: {"p_bits": {"fp16": 8, "bf16": 4, "fp32": 11}[i.dtype]},
    "a scale off by 2^-9": lambda i: {"scale_error": 2.0**-9},
    "a logarithm of base 2": lambda i: {"lse_base": 2.0},
    "a key left out": lambda i: {"dense": one_mask_element(i, hide=True)},
    "a key too many": lambda i: {"dense": one_mask_element(i, hide=False)},
    "the keys of another head": lambda i: {"k": i.k[::-1]},
    "the values of a key left out": lambda i: {
        "v": np.where(np.arange(len(i.v))[:, None] == heaviest_key(i), 0, i.v)
    },
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("draws", ["one or two keys", "five keys"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_kernel_does_not(dtype, draws, name, rng):
    inputs = draw(rng, dtype, **DRAWS[draws])
    changes = FAULTS[name](inputs)
    fault = {key: changes.pop(key) for key in tuple(changes) if key in Kernel.__dataclass_fields__}
    verdict = inputs.verdict(Kernel(dtype, 32, **fault), **changes)
    assert not verdict.ok
    # The rounding of one result may hide an error of the scale, and has no part in the logarithm.
    assert verdict.out.share > 1 or "scale" in name or "logarithm" in name
