"""A dense mask together with a range of keys, in both families: right numbers, and nothing read outside."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make, run
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.covering import VARIANTS

# Loops stages and turns, packed heads, fp32; aligned and not, one and two consumers, 96 keys a block, packed.
KERNELS = (
    "flash_fwd_hdim32_fp16_dense_m64_sm80",
    "flash_fwd_hdim96_fp16_dense_sm80",
    "flash_fwd_hdim32_bf16_dense_m64_packgqa_sm80",
    "flash_fwd_hdim64_fp32_dense_sm80",
    "flash_fwd_hdim64_bf16_dense_sm90",
    "flash_fwd_hdim64_fp16_dense_m64_packgqa_sm90",
    "flash_fwd_hdim192_fp16_dense_sm90",
)
BOUND = 384  # a multiple of every kernel's KV block that keeps the alignment of a mask


def simulated(source, variant, example, seed):
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=2)
    return run(load(source, variant.name), variant, example, seed=seed, device=device)


def heads(variant):
    return {"heads": 2} if variant.gqa == "mha" else {"heads": 4, "kv_heads": 1}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("alignment", [16, 4, 1])
def test_both_hold(name, alignment, compiler, fresh_seed):
    """Diagonals of both alignments, and windows, on lengths that no tile divides."""
    variant = VARIANTS[name]
    rng = np.random.default_rng(fresh_seed)
    cases = [((-1, 0), False), ((-1, 0), True), ((int(rng.integers(150)), int(rng.integers(60))), False)]
    cases += [((int(rng.integers(40)), -1), True)]
    for window, top_left in cases:
        seqlen_q, seqlen_kv = (int(2 ** rng.uniform(0, 8.5)) for _ in range(2))
        form = {"mask": rng.choice(["bhqk", "1hqk", "qk", "k"]), "mask_alignment": alignment}
        shape = Shape(seqlen_q, seqlen_kv, **heads(variant), window=window, top_left=top_left, **form)
        example = make(variant, shape, fresh_seed)
        simulated(render(variant), variant, example, fresh_seed)
        verdict = example.judge()
        assert verdict.ok, f"{shape}: {verdict}"


def cut(example, first, end):
    """The example with the keys [first, end) alone, which see the same queries."""
    problem = example.problem
    problem = dataclasses.replace(
        problem, seqlen_kv=end - first, diagonal_offset=problem.diagonal_offset - first
    )
    k, v = (x[:, first:end] for x in (example.k, example.v))
    return dataclasses.replace(example, problem=problem, k=k, v=v, mask=example.mask[..., first:end])


# (query positions, window): keys before, or behind, those that some query sees.
RANGES = {
    "behind a diagonal": (Shape(100, 900, window=(-1, 0), top_left=True), (0, BOUND)),
    "ahead of a window": (Shape(100, 900, window=(30, -1)), (2 * BOUND, 900)),
    "outside of a window": (Shape(60, 1400, window=(400, 100)), (2 * BOUND, 1400)),
}


def counted(source, variant, shape, keys, seed):
    """What the kernel executes on all keys, and on ``keys`` alone, among which is every one that a query
    sees. The others are NaN. AssertionError unless both give the same bits, and right ones.
    """
    whole = make(variant, dataclasses.replace(shape, **heads(variant)), seed)
    for x in (whole.k, whole.v):
        memory = x.view(f"u{x.itemsize}")
        memory[:, : keys[0]] = memory[:, keys[1] :] = np.iinfo(memory.dtype).max
    part = cut(whole, *keys)
    found = []
    for example in (whole, part):
        example.out.view(f"u{example.out.itemsize}")[...] = np.iinfo(f"u{example.out.itemsize}").max
        example.lse[...] = np.nan
        counters = simulated(source, variant, example, seed).counters
        found.append((counters, example.out.copy(), example.lse.copy()))
    assert part.judge().ok
    (of_whole, *results), (of_part, *others) = found
    assert all(map(np.array_equal, results, others))
    return of_whole, of_part


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("which", RANGES)
def test_nothing_is_read_or_computed_outside_of_the_range(name, which, compiler, fresh_seed):
    variant = VARIANTS[name]
    whole, part = counted(render(variant), variant, *RANGES[which], fresh_seed)
    assert whole == part


VISITS_ALL = (
    "{keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};",
    "{0, (params.seqlen_kv + kBlockN - 1) / kBlockN - 1};",
)


@pytest.mark.parametrize("name", KERNELS[:1] + KERNELS[4:5])
def test_a_kernel_that_visits_every_block_is_found(name, compiler, fixed_seed):
    """Its numbers are right: only what it reads gives it away."""
    variant = VARIANTS[name]
    source = render(variant)
    assert source.count(VISITS_ALL[0]) == 1
    whole, part = counted(source.replace(*VISITS_ALL), variant, *RANGES["behind a diagonal"], fixed_seed)
    assert whole["global_bytes_read"] > part["global_bytes_read"]
