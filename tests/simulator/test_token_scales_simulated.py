"""Caches of e4m3 codes with a scale for each token and head in the simulator: bound, bits, planted faults."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from codetiles import write_specs
from flashgen.simulator.example import Shape, make
from simulator.calls import check_on, first_check, main_kernels, small_gpu_of_shares, with_fault
from simulator.codes import two_caches, variants_of_same_bits
from simulator.edits import replace
from simulator.faults import ASYNC, BOUNDS, WRONG

MAIN = main_kernels(lambda spec: "token" in spec.axes.get("kv_scales", ()), kv_scales="token")
# Shares that end within tiles; a group of heads that does not divide a tile.
TOKENS = Shape(2, 2100, 6, 2, batch=3)
PAGES = (
    "flash_varlen_decode_hdim96_fp16_causal_paged_e4m3_token_m64_packgqa_sm80",
    Shape(9, 700, 8, 2, batch=2),
)
SPLIT = ("flash_varlen_decode_hdim64_bf16_local_fixed_sink_e4m3_token_m32_packgqa_sm80", TOKENS)
CLUSTER = ("flash_varlen_decode_hdim32_bf16_e4m3_token_packgqa_sm90", TOKENS)
CLUSTER_PAGES = ("flash_varlen_decode_hdim192_128_bf16_causal_paged_e4m3_token_c2_packgqa_sm90", TOKENS)
PROMPT = (
    "flash_fwd_varlen_hdim96_bf16_local_sink_e4m3_token_sm80",
    Shape(150, 200, 2, 2, batch=3, head_dim=80),
)
PROMPT_PAGES = (
    "flash_fwd_varlen_hdim32_fp16_causal_paged_e4m3_token_m64_packgqa_sm80",
    Shape(40, 300, 6, 2, batch=4),
)
APPEND = ("append_bf16_halves_wide_paged_e4m3_token_sm80", Shape(3, 40, 4, 2, batch=3))
CASES = (
    *(PAGES, SPLIT, CLUSTER, CLUSTER_PAGES, PROMPT, PROMPT_PAGES, APPEND),
    ("append_fp16_e4m3_token_sm80", Shape(3, 40, 4, 2, batch=3, head_dim=48)),
)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    """Codes and scales of slots that no sequence uses are NaN."""
    example = make(MAIN[name], shape, fresh_seed)
    assert check_on(MAIN[name], example, fresh_seed, device=small_gpu_of_shares(MAIN[name])) is None


@pytest.mark.parametrize("shape", [(1, 700), (70, 150)], ids=["decode", "prompt"])
@pytest.mark.parametrize("element", [np.float16, bfloat16])
def test_bits_are_those_of_the_numbers_that_codes_stand_for(
    element, shape, compiler, fresh_seed, tmp_path, monkeypatch
):
    """Where scales of K are powers of two: a kernel rounds V times any scale as the cache of numbers does."""
    queries, keys = shape
    if queries == 1:
        write_specs(tmp_path)
        monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
        monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_90")
    rng = np.random.default_rng(fresh_seed)
    q = rng.standard_normal((2, queries, 4 if queries == 1 else 2, 64)).astype(element)
    k_scale = np.exp2(rng.integers(-8, -3, (2, keys, 2))).astype(np.float32)
    v_scale = np.exp2(rng.uniform(-8, -3, (2, keys, 2))).astype(np.float32)
    lengths = np.array([keys, keys // 2], np.int32)
    caches = two_caches(rng, (2, keys, 2, 64), element, k_scale, v_scale, lengths)
    codes, numbers = variants_of_same_bits(q, caches, causal=True, softcap=20.0)
    assert codes.name.replace("_e4m3_token", "") == numbers.name


FAULTS = {
    "the scale of K of another token": (
        *SPLIT, "scale_of_keys(k_scales, 8 * j, lane)", "scale_of_keys(k_scales, 0, lane)"),
    "the scale of K of the token before": (*CLUSTER, "e % 2 == 0 ? scale.x : scale.y", "scale.x"),
    "the scale of V of another token": (*PAGES, "scale_of_keys(v_scales, 16 * j + 8, lane)", "upper_scale"),
    "the scale of K for V": (
        *CLUSTER_PAGES, "v_scales = k_scales + kBlockN * sizeof(float)", "v_scales = k_scales"),
    "the scale of K of head 0": (*CLUSTER, "tile.kv_head * params.k_scale_head_stride", "0"),
    "the scale of V of head 0": (*PAGES, "tile.kv_head * params.v_scale_head_stride", "0"),
    "the scale of K of row 0 of the cache": (*SPLIT, "entry * params.k_scale_batch_stride", "0"),
    "the scale of page 0": (*PAGES, "head + page * page_stride + row_of_page", "head + row_of_page"),
    "the scale of a page of the next block": (
        *CLUSTER_PAGES, "params.k_scale_row_stride, fetch.scale_pages",
        "params.k_scale_row_stride, fetch.pages"),
    "scales of pages that a group's other warp knows": (
        *PAGES, "first / 32 % kGroupWarps != threadIdx.x % kGroupThreads / 32",
        "threadIdx.x % kGroupThreads / 32 != 0 && first > 0"),
    "a NaN scale in an unused row": (*CLUSTER, "rows.has(key) ? 4 : 0", "4"),
    "V of a prompt without its scales": (
        *PROMPT, "convert_scaled_codes(v_codes, smem + kVOffset, scales_of(block) + kBlockN * sizeof(float))",
        "convert_codes(v_codes, smem + kVOffset)"),
    "a prompt's scales of one block at a time": (
        *PROMPT, "kScalesOffset + block % 2 *", "kScalesOffset + 0 *"),
    "the largest element of half of a row": (*APPEND, "distance = threads / 2", "distance = threads / 4"),
    "the scale of an appended token in slot 0": (*APPEND, "slot * params.v_scale_out_row_stride", "0"),
    "the scale of an appended token of head 0": (
        *APPEND, "slot * params.k_scale_out_row_stride + head", "slot * params.k_scale_out_row_stride"),
    "a prompt's scale of V of page 0": (*PROMPT_PAGES, "page * params.v_scale_batch_stride", "0"),
    "a prompt's scale of K of the next slot": (
        *PROMPT_PAGES, "row_of_page * params.k_scale_row_stride",
        "(row_of_page + 1) % params.page_size * params.k_scale_row_stride"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, old, new = FAULTS[fault]
    variant, planted = MAIN[name], with_fault(lambda source: replace(source, old, new, fault))
    seeds = range(fixed_seed, fixed_seed + 4)
    check = first_check(variant, shape, seeds, planted, device=small_gpu_of_shares(variant))
    assert check in {WRONG, *BOUNDS, *ASYNC}
