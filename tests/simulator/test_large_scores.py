"""Scores as large as a float holds, in every loop: finite masks that stand for -inf, large biases, large
inputs. Results stay finite, and P stays within 1.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from backward_variants import MAIN
from flashgen.families.scores import load_scores
from flashgen.operators.masks import Band
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.operators.reference import attention
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import simulated
from simulator.covering import VARIANTS
from simulator.lineage import MAINS

# What padded keys get in code that people run, and the largest numbers that an array can hold.
CONSTANTS = (-1e4, -1e9, -1e10, -1e18, -1e20, -1e30, -3.3895e38, 1e10, 1e30, 3.3895e38)

FORWARD = (
    "flash_fwd_hdim32_bf16_causal_m64_sm80",
    "flash_fwd_hdim32_fp32_m64_sm80",
    "flash_fwd_hdim32_fp16_sm80",
    "flash_fwd_hdim32_fp16_causal_sm80",
    "flash_fwd_hdim64_fp16_causal_packgqa_sm80",
    "flash_fwd_hdim192_fp16_causal_sm80",
    "flash_fwd_hdim64_bf16_causal_m64_sm90",
    "flash_fwd_hdim64_fp16_local_m64_sm90",
    "flash_fwd_hdim64_bf16_dense_sm90",
    "flash_fwd_hdim64_fp16_sm90",
    "flash_decode_hdim64_bf16_sm80",
    "flash_decode_hdim64_fp16_packgqa_sm80",
    "flash_decode_hdim64_bf16_c4_sm90",
)
LINEAGE = [
    next(v for v in MAINS if (v.spec, v.dtype) == wanted)
    for wanted in itertools.product(("flash_fwd_naive", "flash_fwd_v1"), ("fp16", "bf16"))
]
BACKWARD = (
    "flash_bwd_hdim32_fp16_sm80",
    "flash_bwd_hdim32_fp32_causal_sm80",
    "flash_bwd_hdim64_bf16_sm90",
    "flash_bwd_hdim64_fp16_causal_sm90",
    "flash_bwd_hdim192_bf16_sm90",
    "flash_bwd_hdim256_bf16_pair_sm90",
    "flash_bwd_hdim64_bf16_direct_sm90",
)


def with_bias(variant):
    return variant.modified(load_scores(keywords=()).by_name["bias"])


def simulate(variant, example, seed, source_of=render):
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=2)
    simulated(variant, example, seed, source_of, device=device)


def store(x, numbers, dtype):
    x[...] = bfloat16_bits(np.asarray(numbers, np.float32)) if dtype == "bf16" else numbers


def shape_of(variant, seqlen_q=75):
    heads = {"heads": 2} if variant.gqa == "mha" else {"heads": 4, "kv_heads": 1}
    window = {"window": (70, 5)} if variant.mask_type == "local" else {}
    if variant.spec.startswith("flash_decode"):
        seqlen_q, heads = 3, heads | {"splits": 2 if variant.target != "sm90" else 1}
    return Shape(seqlen_q, 2 * 64 + 9, batch=2, **heads, **window)


def some_of(bias):
    """Where a constant takes the place of a bias of 0: in the first batch entry for all keys from the tenth
    on, in the second for all keys of every third row.
    """
    replaced = np.zeros(bias.shape, bool)
    replaced[0, ..., 10:] = True
    replaced[1, :, ::3] = True
    return replaced


def check_mask(name, seed, source_of=render):
    """A finite mask hides keys as an infinite one does, where a row also sees keys without it. Rows that see
    nothing else are finite, and within v.
    """
    variant = with_bias(VARIANTS[name])
    example = make(variant, shape_of(variant), seed)
    (bias,) = example.score_arrays
    bias[...] = np.where(some_of(bias), -np.inf, 0)
    simulate(variant, example, seed, source_of)
    assert example.judge().ok
    sees_nothing = np.isneginf(example.lse)
    assert sees_nothing.any()
    assert not sees_nothing.all()
    largest = np.abs(widened(example.v, variant.dtype)).max()
    for constant in (x for x in CONSTANTS if x < -1e4):
        bias[...] = np.where(some_of(bias), constant, 0)
        simulate(variant, example, seed, source_of)
        out = widened(example.out, variant.dtype)
        assert np.isfinite(out).all(), constant
        assert np.abs(out).max() <= 1.01 * largest, constant
        assert (example.lse[sees_nothing] < constant / 2).all(), constant
        bias[...] = np.where(some_of(bias), -np.inf, 0)
        example.lse[sees_nothing] = -np.inf
        example.out[sees_nothing.transpose(0, 2, 1)] = 0
        verdict = example.judge()
        assert verdict.ok, f"{constant}: {verdict}"


def check_bias(name, seed, source_of=render):
    """A large bias gives no NaN. The other scores rise from block to block, so that row_max is raised."""
    variant = with_bias(VARIANTS[name])
    example = make(variant, shape_of(variant), seed)
    (bias,) = example.score_arrays
    rising = np.linspace(200, 0, bias.shape[-1])
    for constant in (x for x in CONSTANTS if x > 0):
        bias[...] = np.where(some_of(bias), constant, rising)
        simulate(variant, example, seed, source_of)
        assert np.isfinite(widened(example.out, variant.dtype)).all(), constant
        assert not np.isnan(example.lse).any(), constant


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("check", [check_mask, check_bias], ids=lambda check: check.__name__)
def test_large_biases(check, name, compiler, fresh_seed):
    check(name, fresh_seed)


@pytest.mark.parametrize("variant", LINEAGE, ids=lambda variant: variant.name)
def test_large_scores_in_the_lineage(variant, compiler, fresh_seed):
    """These kernels take no bias: large inputs, whose scaled scores reach 2^30, where a float is 64 off."""
    example = make(variant, Shape(40, 70, heads=1), fresh_seed)
    for size in (300.0, 3e3, 2e4):
        for x in (example.q, example.k):
            store(x, np.full(x.shape, size), variant.dtype)
        simulate(variant, example, fresh_seed)
        assert np.isfinite(widened(example.out, variant.dtype)).all(), size
        assert not np.isnan(example.lse).any(), size


def of_equal_scores(variant, shape, size, seed):
    """An example whose scores are one large number, with the out and LSE of a forward call."""
    example = make(variant, shape, seed)
    dtype = variant.dtype
    q, k, v, dout, out = (example.array(name) for name in ("q", "k", "v", "dout", "out"))
    for x, number in ((q, size), (k, size), (v, 1.0), (dout, 1.0)):
        store(x, np.full(x.shape, number), dtype)
    inputs = [widened(x, dtype) for x in (q, k, v)]
    forward = attention(*inputs, dtype, example.problem.softmax_scale, Band.of(example.problem))
    store(out, forward.out, dtype)
    example.array("lse")[...] = forward.lse
    if example.array("dlse") is not None:
        example.array("dlse")[...] = 0
    return example


def check_p(name, seed, source_of=render, size=3000.0):
    """dv sums up P where dout is 1: over all keys no more than 1 for each row."""
    variant = MAIN[name]
    shape = Shape(50, 50, heads=2)
    example = of_equal_scores(variant, shape, size, seed)
    simulate(variant, example, seed, source_of)
    dq, dk, dv = (widened(example.array(name), variant.dtype) for name in ("dq", "dk", "dv"))
    assert np.isfinite(dq).all()
    assert np.isfinite(dk).all()
    assert (dv >= 0).all()
    assert (dv.sum(axis=1) <= shape.seqlen_q * (1 + 2.0**-7)).all()
    if size < 1000:
        verdict = example.judge()
        assert verdict.ok, str(verdict)


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0, 20000.0])
def test_p_stays_within_1_in_the_backward_pass(name, size, compiler, fresh_seed):
    check_p(name, fresh_seed, size=size)


@pytest.mark.parametrize("name", [name for name in BACKWARD if "direct" not in name])  # these take no bias
def test_gradients_are_finite_under_a_finite_mask(name, compiler, fresh_seed):
    """Also of rows that see nothing but the constant, whose LSE is as large."""
    variant = with_bias(MAIN[name])
    example = make(variant, Shape(75, 2 * 64 + 9, heads=2, batch=2), fresh_seed)
    bias = example.arrays[-1]
    dtype = variant.dtype
    q, k, v = (widened(example.array(name), dtype) for name in ("q", "k", "v"))
    visible = 0.0
    if variant.mask_type == "causal":
        visible = np.where(np.tri(75, 2 * 64 + 9, 2 * 64 + 9 - 75), 0, -np.inf)
    for constant in CONSTANTS:
        bias[...] = np.where(some_of(bias), constant, 0)
        scores = np.einsum("bihd,bjhd->bhij", q, k) * example.problem.softmax_scale + bias + visible
        row_max = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - row_max)
        row_sum = p.sum(axis=-1, keepdims=True)
        store(example.array("out"), np.einsum("bhij,bjhd->bihd", p / row_sum, v), dtype)
        example.array("lse")[...] = (row_max + np.log(row_sum))[..., 0]
        simulate(variant, example, fresh_seed)
        for gradient in ("dq", "dk", "dv"):
            assert np.isfinite(widened(example.array(gradient), dtype)).all(), (constant, gradient)


def check_rising(name, seed, source_of=render):
    """P of fp16 stays in its range where row_max is not raised. The limit for that is 2^15, and here floats
    are 2 to 16 apart: the scores rise from the first block to the others by what would make P just 2^16.
    """
    variant = with_bias(VARIANTS[name])
    example = make(variant, shape_of(variant), seed)
    (bias,) = example.score_arrays
    log2e = np.float64(np.float32(np.log2(np.e)))
    rng = np.random.default_rng(seed)
    for exponent in (24, 25, 26, 27):
        first = rng.uniform(1 / log2e, 2 / log2e, 1 << 20).astype(np.float32) * np.float32(2.0**exponent)
        row_max = (first * log2e).astype(np.float32) - np.float32(7)
        for steps in range(1, 20):
            largest = first + np.spacing(first) * np.float32(steps)
            p_exponent = largest * log2e - row_max
            near = np.flatnonzero((p_exponent < 16) & (p_exponent > 16 - 1e-4))
            for i in near[:3]:
                bias[..., :64], bias[..., 64:] = largest[i], first[i]
                simulate(variant, example, seed, source_of)
                assert np.isfinite(widened(example.out, variant.dtype)).all(), (first[i], largest[i])


@pytest.mark.parametrize("name", ["flash_fwd_hdim32_fp16_sm80", "flash_fwd_hdim64_fp16_sm90"])
def test_scores_that_rise_by_a_step_of_rounding(name, compiler, fresh_seed):
    check_rising(name, fresh_seed)


# Kernel, the text that a fault changes, what it puts there, and the check that fails then.
FAULTS = [
    ("flash_fwd_hdim64_bf16_causal_m64_sm90", "__fmul_ru(value", "__fmul_rn(value", check_mask),
    ("flash_fwd_hdim32_fp16_sm80", "__fmaf_ru(value", "__fmaf_rn(value", check_mask),
    ("flash_fwd_hdim64_fp16_sm90", "__fadd_rd(rows.row_max", "__fadd_rn(rows.row_max", check_rising),
    ("flash_fwd_hdim64_fp16_sm90", "fminf(row_max - larger, 0.0f)", "row_max - larger", check_bias),
    ("flash_decode_hdim64_bf16_sm80", "row_sum == 0.0f ? -INFINITY : (", "(", check_bias),
    ("flash_bwd_hdim64_bf16_sm90", "lse_log2 + fmaxf(", "lse_log2 + 0.0f * fmaxf(", check_p),
    ("flash_bwd_hdim64_bf16_direct_sm90", "lse_log2 + fmaxf(", "lse_log2 + 0.0f * fmaxf(", check_p),
]


@pytest.mark.parametrize(
    ("name", "right", "wrong", "check"), FAULTS, ids=[f"{name}: {right}" for name, right, _, _ in FAULTS]
)
def test_a_planted_fault_is_found(name, right, wrong, check, compiler, fixed_seed):
    planted = []

    def source_of(variant):
        source = render(variant)
        planted.extend([variant] if right in source else [])
        return source.replace(right, wrong)

    with pytest.raises(AssertionError):
        check(name, fixed_seed, source_of)
    assert planted
