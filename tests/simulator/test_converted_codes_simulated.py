"""Prefill on caches of e4m3 codes for Hopper in the simulator: bound, bits of other kernels, faults."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flashgen.simulator.example import Shape, make
from simulator.calls import check_on, first_check, main_kernels, small_gpu, with_fault
from simulator.codes import scaled, two_caches, variants_of_same_bits
from simulator.edits import replace
from simulator.faults import ASYNC, BOUNDS, WRONG

MAIN = main_kernels(
    lambda spec: spec.operator == "attention" and spec.axes.get("kv_dtype") == ("e4m3",),
    lambda variant: "converts_codes" in variant.features,
)
# Several KV blocks and tiles to a thread block; queries that see nothing; head dims that leave columns over.
SEVERAL = Shape(150, 300, 8, 2, batch=3)
ROWS = ("flash_fwd_varlen_hdim64_fp16_e4m3_sm90", Shape(200, 150, 2, 2, batch=2))
PAGES = ("flash_fwd_varlen_hdim128_bf16_causal_paged_e4m3_packgqa_sm90", SEVERAL)
NARROW = (
    "flash_fwd_varlen_hdim96_bf16_local_sink_e4m3_gqa_sm90",
    Shape(150, 300, 4, 2, batch=3, head_dim=80),
)
TREE = ("flash_fwd_varlen_hdim192_128_bf16_tree_e4m3_packgqa_sm90", Shape(60, 300, 4, 2, batch=2))
WIDE = ("flash_fwd_varlen_hdim256_fp16_paged_e4m3_gqa_sm90", Shape(100, 300, 4, 2, batch=2))
SHARES = ("flash_varlen_split_hdim128_bf16_causal_e4m3_packgqa_sm90", Shape(150, 700, 4, 2, batch=2))
TOKENS = ("flash_fwd_varlen_hdim64_fp16_local_e4m3_token_sm90", Shape(200, 450, 2, 2, batch=3))
TOKENS_IN_PAGES = ("flash_fwd_varlen_hdim128_bf16_causal_paged_e4m3_token_packgqa_sm90", SEVERAL)
SHARES_OF_TOKENS = (
    "flash_varlen_split_hdim64_fp16_local_paged_sink_e4m3_token_packgqa_sm90",
    Shape(300, 700, 2, 1, batch=2),
)
CASES = (ROWS, PAGES, NARROW, TREE, WIDE, SHARES, TOKENS, TOKENS_IN_PAGES, SHARES_OF_TOKENS)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    """Codes and scales of slots that no sequence uses are NaN."""
    example = make(MAIN[name], shape, fresh_seed)
    assert check_on(MAIN[name], example, fresh_seed, device=small_gpu(MAIN[name])) is None


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("element", [np.float16, bfloat16])
def test_bits_are_those_of_the_numbers_that_codes_stand_for(
    element, tokens, compiler, fresh_seed, monkeypatch
):
    """Where scales are powers of two; of V with a scale of each token any scale will do."""
    monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_90")
    rng = np.random.default_rng(fresh_seed)
    q = rng.standard_normal((2, 140, 2, 64)).astype(element)
    shape = (2, 300, 2) if tokens else (2, 2)
    k_scale, v_scale = (np.exp2(rng.integers(-8, -3, shape)).astype(np.float32) for _ in range(2))
    if tokens:
        v_scale = np.exp2(rng.uniform(-8, -3, shape)).astype(np.float32)
    lengths = np.array([300, 180], np.int32)
    caches = two_caches(rng, (2, 300, 2, 64), element, k_scale, v_scale, lengths)
    for options in ({"causal": True, "softcap": 20.0}, {"window_size": (50, 10)}):
        variants = variants_of_same_bits(q, caches, **options)
        assert ["converts_codes" in variant.features for variant in variants] == [True, False]
        assert len({dict(variant.tile)["block_n"] for variant in variants}) == 1


PASS_ON = "fence_proxy_async(); __syncwarp(); if (threadIdx.x % 32 == 0) { mbarrier_arrive(full);"
SCALE_SCORES = "scale_scores(scores, shared.k_scales(k_ring.stage), lane);"
RELEASE_K = "release(shared.k_empty(k_ring.stage));"
FINISH_SCORES = "k_ring.advance(); finish_scores(scores, kv_block);"
FAULTS = {
    "the scale of K of head 0": (*PAGES, "tile.kv_head * params.k_scale_head_stride", "0"),
    "the scale of V of sequence 0": (*ROWS, "tile.batch * params.v_scale_batch_stride", "0"),
    "no scale of V": (*PAGES, "factor[half] *= value_scale;", ""),
    "no scale of V of a part": (
        *SHARES, "output[4 * n + 2 * half] * value_scale", "output[4 * n + 2 * half]"),
    "the left half of a chunk twice": (*ROWS, "unpack(words.z >> 16)", "unpack(words.x >> 16)"),
    "codes without their swizzle": (*PAGES, "16 * (lane / 8 ^ row / 2 % 4)", "16 * (lane / 8)"),
    "elements without their swizzle": (*WIDE, "16 * (lane / 8 * 2 ^ row % 8)", "16 * (lane / 8 * 2)"),
    "rows of half of the warps": (*ROWS, "row = 8 * warp + lane % 8;", "row = 8 * (warp / 2) + lane % 8;"),
    "one panel for all": (*PAGES, "words[panel % 2][i], i, left", "words[0][i], i, left"),
    "elements that wgmma does not see": (*PAGES, PASS_ON, PASS_ON.replace("fence_proxy_async();", "")),
    "elements of other lanes not awaited": (*ROWS, PASS_ON, PASS_ON.replace("__syncwarp();", "")),
    "K converted before it is here": (
        *PAGES, "mbarrier_wait(shared.k_codes_full(code_ring.stage), code_ring.parity);", ""),
    "V converted into a buffer that is read": (
        *PAGES, "await_empty(shared.v_empty(ring.stage), ring.parity ^ 1);", ""),
    "codes of K over codes that are read": (
        *ROWS, "await_empty(shared.k_codes_empty(ring.stage), ring.parity ^ 1);", ""),
    "a tile handed back before all have read it": (
        *ROWS, "4 * kConsumers + kConverters + kProducers", "4 * kConsumers"),
    "K full with the first warp": (
        *PAGES, "mbarrier_init(shared.k_full(stage), kConverters);",
        "mbarrier_init(shared.k_full(stage), 1);"),
    "the scale of K of the key before": (*TOKENS, "e % 2 == 0 ? scale.x : scale.y", "scale.x"),
    "scales of K over scales that are read": (
        *TOKENS_IN_PAGES, f"{SCALE_SCORES} __syncwarp(); {RELEASE_K} {FINISH_SCORES} const bool moved",
        f"{RELEASE_K} {SCALE_SCORES} {FINISH_SCORES} const bool moved"),
    "the scale of V of another unit": (*TOKENS, "scales.v, 8 * i + lane % 8", "scales.v, lane % 8"),
    "the scales of one block for all": (*TOKENS_IN_PAGES, "scales = next_scales;", ""),
    "the scales of page 0": (*TOKENS_IN_PAGES, "entry * params.k_scale_batch_stride", "0"),
    "the scales of head 0": (*TOKENS_IN_PAGES, "kv_head * params.v_scale_head_stride", "0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, old, new = FAULTS[fault]
    variant, planted = MAIN[name], with_fault(lambda source: replace(source, old, new, fault))
    seeds = range(fixed_seed, fixed_seed + 4)
    check = first_check(variant, shape, seeds, planted, scaled, device=small_gpu(variant))
    assert check in {WRONG, "deadlock", "mbarrier", "proxy", *BOUNDS, *ASYNC}
