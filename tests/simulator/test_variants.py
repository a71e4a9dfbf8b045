"""A covering set of the shipped kernels, simulated on ragged, short, empty and masked problems."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make, run, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.covering import VARIANTS, covering, shapes, tile_of, traits

COVERING = covering(VARIANTS.values())


def simulated(variant, shape, seed, **options):
    """The example after the kernel ran on it; AssertionError if it is too far from float64."""
    example = make(variant, shape, seed)
    libraries = [load(render(step), step.name) for step in variant.steps]
    run_steps(libraries, variant, example, seed=seed, **options)
    verdict = example.judge()
    assert verdict.ok, f"{variant.name}, {shape}: {verdict}"
    return example


def test_the_set_has_every_value_of_every_axis_and_every_tile():
    for spec in {variant.spec for variant in VARIANTS.values()}:
        whole = [variant for variant in VARIANTS.values() if variant.spec == spec]
        chosen = [variant for variant in COVERING if variant.spec == spec]
        for axis in range(len(whole[0].axes)):
            assert {v.axes[axis] for v in chosen} == {v.axes[axis] for v in whole}
        assert {(v.target, tile_of(v)) for v in chosen} >= {(v.target, tile_of(v)) for v in whole}
        assert set().union(*map(traits, chosen)) == set().union(*map(traits, whole))
    assert len(COVERING) < len(VARIANTS) / 8


@pytest.mark.parametrize("variant", COVERING, ids=lambda variant: variant.name)
def test_variant(variant, compiler, fresh_seed):
    """A persistent block takes several tiles."""
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=2)
    for shape in shapes(variant):
        simulated(variant, shape, fresh_seed, device=device)


SMALL = (
    "flash_fwd_hdim32_bf16_causal_m64_sm80",
    "flash_fwd_hdim32_fp16_dense_m64_packgqa_sm80",
    "flash_fwd_hdim32_fp16_causal_sm80",
    "flash_fwd_hdim32_bf16_local_sm80",
)
EDGES = [(1, 1), (3, 0), (64, 64), (65, 63), (1, 200), (200, 1), (129, 192)]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), EDGES)
def test_lengths_at_the_edges_of_tiles(name, seqlen_q, seqlen_kv, compiler, fresh_seed):
    simulated(VARIANTS[name], Shape(seqlen_q, seqlen_kv), fresh_seed)


HOPPER = ("flash_fwd_hdim64_bf16_causal_m64_sm90", "flash_fwd_hdim64_fp16_packgqa_sm90")


@pytest.mark.parametrize("name", HOPPER)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (64, 128), (65, 127), (1, 500), (300, 129)])
def test_lengths_at_the_edges_of_tiles_that_tensor_copies_fetch(
    name, seqlen_q, seqlen_kv, compiler, fresh_seed
):
    simulated(VARIANTS[name], Shape(seqlen_q, seqlen_kv, heads=2), fresh_seed)


@pytest.mark.parametrize("multiprocessors", [1, 2, 5])
def test_how_tiles_are_shared_out_changes_no_bit(multiprocessors, compiler, fresh_seed):
    variant = VARIANTS["flash_fwd_hdim128_bf16_causal_sm90"]
    shape = Shape(400, 500, heads=2)
    own = simulated(variant, shape, fresh_seed)
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=multiprocessors)
    few = simulated(variant, shape, fresh_seed, device=device)
    assert np.array_equal(own.out, few.out)
    assert np.array_equal(own.lse, few.lse)


@pytest.mark.parametrize("window", [(0, 0), (-1, 5), (5, -1), (3, 300), (64, 0)])
def test_windows(window, compiler, fresh_seed):
    variant = VARIANTS["flash_fwd_hdim32_fp16_local_m64_sm80"]
    simulated(variant, Shape(90, 130, window=window), fresh_seed)


@pytest.mark.parametrize(
    ("name", "head_dim", "head_dim_v"),
    [
        ("flash_fwd_hdim192_128_fp16_causal_sm80", 192, 128),
        ("flash_fwd_hdim192_128_bf16_dense_packgqa_sm86", 184, 72),
        ("flash_fwd_hdim128_bf16_m64_sm80", 128, 64),
        ("flash_fwd_hdim128_fp16_causal_m64_packgqa_sm80", 64, 128),
        ("flash_fwd_hdim64_bf16_gqa_sm80", 8, 64),
        ("flash_fwd_hdim64_fp32_causal_sm80", 40, 20),
        ("flash_fwd_hdim96_fp32_dense_gqa_sm80", 40, 72),
    ],
)
def test_head_dims_of_v(name, head_dim, head_dim_v, compiler, fresh_seed):
    variant = VARIANTS[name]
    heads = 2 if variant.gqa == "mha" else 4
    simulated(variant, Shape(75, 150, heads, head_dim=head_dim, head_dim_v=head_dim_v), fresh_seed)


def test_causal_top_left(compiler, fresh_seed):
    variant = VARIANTS["flash_fwd_hdim32_bf16_causal_m64_sm80"]
    simulated(variant, Shape(150, 70, top_left=True), fresh_seed)


@pytest.mark.parametrize("mask", ["bhqk", "b1qk", "1hqk", "qk", "1k", "k"])
@pytest.mark.parametrize("alignment", [16, 4, 1])
def test_masks_that_are_broadcast_and_misaligned(mask, alignment, compiler, fresh_seed):
    variant = VARIANTS["flash_fwd_hdim32_fp16_dense_m64_packgqa_sm80"]
    shape = Shape(50, 100, heads=4, kv_heads=2, batch=2, mask=mask, mask_alignment=alignment)
    simulated(variant, shape, fresh_seed)


@pytest.mark.parametrize(
    "name", ["flash_fwd_hdim32_bf16_m64_gqa_sm80", "flash_fwd_hdim32_bf16_causal_m64_sm80"]
)
def test_the_size_of_the_cache_changes_the_order_of_tiles_only(name, compiler, fresh_seed):
    variant = VARIANTS[name]
    shape = Shape(130, 100, heads=6, kv_heads=6 if variant.gqa == "mha" else 3, batch=3)
    large = hardware.pretend()
    small = dataclasses.replace(large, l2_bytes=4 * 2 * 100 * variant.head_dim * 2)
    results = [simulated(variant, shape, fresh_seed, device=device) for device in (large, small)]
    assert np.array_equal(results[0].out, results[1].out)


def test_neither_the_order_of_threads_nor_their_number_changes_a_bit(compiler, fresh_seed):
    variant = VARIANTS["flash_fwd_hdim32_fp16_causal_sm80"]
    library = load(render(variant), variant.name)
    results = []
    for seed, threads in ((1, 1), (2, 1), (3, 2), (4, 5)):
        example = make(variant, Shape(300, 400, heads=3), fresh_seed)
        run(library, variant, example, seed=seed, threads=threads)
        results.append((example.out.tobytes(), example.lse.tobytes()))
    assert len(set(results)) == 1


# Ends of windows against blocks of keys, and against both ends of the sequence.
WINDOWS = [
    Shape(300, 520, heads=1, window=(192, 0)),
    Shape(300, 520, heads=1, window=(191, 0)),
    Shape(300, 520, heads=1, window=(200, 0)),
    Shape(400, 400, heads=1, window=(200, 0)),
    Shape(600, 600, heads=1, window=(256, 0)),
    Shape(400, 390, heads=1, window=(300, 50)),
    Shape(400, 200, heads=1, window=(150, 20)),
    Shape(700, 100, heads=1, window=(130, 10)),
    Shape(400, 400, heads=1, window=(129, -1)),
    Shape(129, 700, heads=1, window=(500, 30)),
    Shape(300, 300, heads=1, window=(0, 0)),
    Shape(300, 300, heads=1, window=(0, 100)),
    Shape(260, 300, heads=1, window=(3, 5)),
    Shape(200, 517, heads=1, window=(300, 300), spread=8.0),
]


@pytest.mark.parametrize("shape", WINDOWS, ids=lambda s: f"{s.seqlen_q}x{s.seqlen_kv} {s.window}")
@pytest.mark.parametrize(
    "name", ["flash_fwd_hdim32_fp16_local_sm80", "flash_fwd_hdim128_bf16_local_gqa_sm80"]
)
def test_ends_of_windows(name, shape, compiler, fresh_seed):
    if VARIANTS[name].gqa == "gqa":
        shape = dataclasses.replace(shape, heads=2, kv_heads=1)
    simulated(VARIANTS[name], shape, fresh_seed)


@pytest.mark.parametrize(
    "name", ["flash_fwd_hdim32_fp16_m64_sm80", "flash_fwd_hdim64_fp16_sm80", "flash_fwd_hdim256_fp16_sm80"]
)
def test_p_far_below_the_largest_of_its_row_keeps_its_bits(name, compiler):
    """P of 2^-22.5, which fp16 would round to three of its smallest steps if the largest P were 1."""
    variant = VARIANTS[name]
    example = make(variant, Shape(64, 256, heads=1), seed=0)
    example.q[...], example.k[...], example.v[...] = 0, 0, 100
    score = 22.5 / math.log2(math.e)
    example.q[..., 0] = 8
    example.k[0, -1, 0, 0] = score / (8 * example.problem.softmax_scale)
    example.v[0, -1] = 0
    run(load(render(variant), name), variant, example)
    p = math.exp(-8 * float(example.k[0, -1, 0, 0]) * example.problem.softmax_scale)
    expected = 255 * p * 100 / (1 + 255 * p)
    assert example.out == pytest.approx(expected, rel=2**-9)
