"""Caches of e4m3 codes in the simulator: within the bound, bits of 16-bit kernels, conversions, faults."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

from codetiles import write_specs
from flashgen import simulator
from flashgen.host import paths
from flashgen.simulator import hostcompiler
from flashgen.simulator.example import Shape, make
from simulator.calls import check_on, first_check, main_kernels, small_gpu_of_shares, with_fault
from simulator.codes import scaled, two_caches, variants_of_same_bits
from simulator.edits import replace
from simulator.faults import ASYNC, BOUNDS, WRONG
from simulator.kernels import run

MAIN = main_kernels(lambda spec: "e4m3" in spec.axes.get("kv_dtype", ()), kv_dtype="e4m3")

# Shares that end within tiles; a group of heads that does not divide a tile.
TOKENS = Shape(2, 2100, 6, 2, batch=3)
CASES = (
    ("flash_varlen_decode_hdim32_fp16_paged_e4m3_packgqa_sm80", TOKENS),
    ("flash_varlen_decode_hdim64_bf16_local_fixed_sink_e4m3_m32_packgqa_sm80", TOKENS),
    ("flash_varlen_decode_hdim96_fp16_causal_e4m3_m64_packgqa_sm80", Shape(9, 700, 8, 2, batch=2)),
    ("flash_varlen_decode_hdim32_bf16_e4m3_packgqa_sm90", TOKENS),
    (
        "flash_varlen_decode_hdim192_128_bf16_causal_paged_e4m3_c2_packgqa_sm90",
        dataclasses.replace(TOKENS, head_dim=176, head_dim_v=112),
    ),
    ("flash_fwd_varlen_hdim32_fp16_causal_paged_e4m3_m64_packgqa_sm80", Shape(40, 300, 6, 2, batch=4)),
    ("flash_fwd_varlen_hdim96_bf16_local_sink_e4m3_sm80", Shape(150, 200, 2, 2, batch=3, head_dim=80)),
    ("append_bf16_halves_wide_paged_e4m3_sm80", Shape(3, 40, 4, 2, batch=3)),
    ("append_fp16_e4m3_sm80", Shape(3, 40, 4, 2, batch=3)),
)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[name for name, _ in CASES])
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    """Slots that no sequence uses hold a NaN code."""
    for seed in (fresh_seed, fresh_seed + 1):
        example = make(MAIN[name], shape, seed)
        assert check_on(MAIN[name], example, seed, device=small_gpu_of_shares(MAIN[name])) is None


@pytest.mark.parametrize("splits", ["auto", 3])
@pytest.mark.parametrize("element", [np.float16, bfloat16])
def test_bits_are_those_of_the_numbers_that_codes_stand_for(
    element, splits, compiler, fresh_seed, tmp_path, monkeypatch
):
    write_specs(tmp_path)
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_90")
    rng = np.random.default_rng(fresh_seed)
    q = rng.standard_normal((2, 1, 4, 64)).astype(element)
    scales = [np.exp2(rng.integers(-8, -3, (2, 2))).astype(np.float32) for _ in range(2)]
    caches = two_caches(rng, (2, 700, 2, 64), element, *scales, np.array([700, 333], np.int32))
    codes, numbers = variants_of_same_bits(q, caches, splits=splits, softcap=20.0)
    assert codes.name.replace("_e4m3", "") == numbers.name


@pytest.mark.parametrize("element", [np.float16, bfloat16])
def test_bits_of_a_chunk_of_a_prompt(element, compiler, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q = rng.standard_normal((2, 70, 2, 64)).astype(element)
    scale, lengths = np.array(2.0**-6, np.float32), np.array([150, 80], np.int32)
    caches = two_caches(rng, (2, 150, 2, 64), element, scale, scale, lengths)
    codes, numbers = variants_of_same_bits(q, caches, causal=True)
    assert codes.name.replace("_e4m3", "") == numbers.name


@pytest.mark.parametrize("element", ["fp16", "bf16"])
def test_each_code_becomes_its_number(element, compiler):
    codes, pairs = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    run(
        "for (int i = lane; i < 256; i += 32)\n"
        f"    params.pairs[i] = unpack_e4m3<{element}>(params.codes[i] | 0x3c00);",
        {"codes": codes},
        {"pairs": pairs},
    )
    halves = pairs.view(np.uint16).reshape(-1, 2).view({"fp16": np.float16, "bf16": bfloat16}[element])
    expected = codes.astype(np.uint8).view(float8_e4m3fn).astype(np.float32)
    assert np.array_equal(halves[:, 0].astype(np.float32), expected, equal_nan=True)
    assert (halves[:, 1].astype(np.float32) == 1.5).all()


_CONVERSION = """\
#include <cstdint>
#include "simulator/numbers.hpp"
static uint32_t mul_f16x2(uint32_t a) {
    using namespace flashgen::simulator;
    auto of = [](uint16_t half) { return uint32_t{float_to_fp16(fp16_to_float(half) * 256.0f)}; };
    return of(a & 0xffff) | of(a >> 16) << 16;
}
static uint32_t unpack(uint32_t codes) { uint32_t pair; %s return pair; }
extern "C" void convert(const uint32_t* codes, uint32_t* pairs, int count) {
    for (int i = 0; i < count; ++i) pairs[i] = unpack(codes[i]);
}
"""


def test_integers_convert_codes_where_no_instruction_does(compiler, tmp_path):
    header = (paths.templates_dir() / "include/flashgen/ptx.cuh").read_text()
    body = header.partition("unpack_e4m3<fp16>(uint32_t codes) {")[2].partition("#else")[2]
    body = body.partition("#endif")[0]
    multiplication = 'asm("mul.f16x2 %0, %1, %2;\\n" : "=r"(pair) : "r"(size), "r"(0x5c005c00));'
    (tmp_path / "convert.cpp").write_text(
        _CONVERSION % replace(body, multiplication, "pair = mul_f16x2(size);", "the product")
    )
    include = Path(simulator.__file__).with_name("include")
    options = ("-std=c++20", "-shared", "-fPIC", "-O1", f"-I{include}")
    hostcompiler.build(compiler, options, [tmp_path / "convert.cpp"], tmp_path / "convert.so", "convert")
    codes, pairs = np.arange(1 << 16, dtype=np.uint32), np.zeros(1 << 16, np.uint32)
    ctypes.CDLL(str(tmp_path / "convert.so")).convert(
        *(ctypes.c_void_p(a.ctypes.data) for a in (codes, pairs)), codes.size
    )
    numbers = codes.astype(np.uint16).view(np.uint8).view(float8_e4m3fn).astype(np.float32)
    assert np.array_equal(pairs.view(np.float16).astype(np.float32), numbers, equal_nan=True)


ROWS, SPLIT, TILE64, CLUSTER, WIDE, PROMPT, APPEND = (CASES[place] for place in (3, 0, 2, 3, 4, 5, 7))
COLUMNS = "order_columns(rows, scales.v, lane);"
FAULTS = {
    "the scale of K of head 0": (*CLUSTER, "tile.kv_head * params.k_scale_head_stride", "0"),
    "the scale of V of head 0": (*SPLIT, "tile.kv_head * params.v_scale_head_stride", "0"),
    "the scale of K of sequence 0": (*SPLIT, "tile.batch * params.k_scale_batch_stride", "0"),
    "the scale of V of sequence 0": (*WIDE, "tile.batch * params.v_scale_batch_stride", "0"),
    "no scale of K": (*TILE64, "scale_scores(scores, scales.k);", ""),
    "no scale of V": (*CLUSTER, COLUMNS, "order_columns(rows, 1.0f, lane);"),
    "the scale of K for V": (*SPLIT, COLUMNS, "order_columns(rows, scales.k, lane);"),
    "columns in the order of fragments": (*TILE64, "exchange(odd[0], odd[1], 2, lane);", ""),
    "a NaN code in an unused row": (*ROWS, "rows_left.has(first) && ", ""),
    "half of K's codes twice": (*CLUSTER, "load_shared_16(codes + 8)", "load_shared_16(codes)"),
    "neighbouring dims of V mixed up": (*SPLIT, "codes[2 * half], 0, 0x3120", "codes[2 * half], 0, 0x3210"),
    "Q without its swizzle": (*TILE64, "16 * (lane / 16 ^ q_swizzle_key(lane % 16))", "16 * (lane / 16)"),
    "Q past head_dim": (*WIDE, " && chunk * kQChunkElements < params.head_dim", ""),
    "half of a chunk converted twice": (*PROMPT, "first == 0 ? right : left", "left"),
    "codes converted before they are here": (
        *PROMPT, "cp_async_wait<1>(); convert_codes(k_codes, smem + kKOffset);",
        "cp_async_wait<2>(); convert_codes(k_codes, smem + kKOffset);"),
    "V of a prompt without its scale": (
        *PROMPT, "scale_output(rows, load_scales(params, stored_tile).v);", ""),
    "codes of K by the scale of V": (
        *APPEND, "const float* scale = params.k_scale;", "const float* scale = params.v_scale;"),
    "codes of V by the scale of head 0": (*APPEND, "head * params.v_scale_head_stride", "0"),
    "codes past head_dim": (*WIDE, " && panel * kPanelElements + chunk * kChunkElements < head_dim", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, old, new = FAULTS[fault]
    variant, planted = MAIN[name], with_fault(lambda source: replace(source, old, new, fault))
    seeds = range(fixed_seed, fixed_seed + 4)
    check = first_check(variant, shape, seeds, planted, scaled, device=small_gpu_of_shares(variant))
    assert check in {WRONG, *BOUNDS, *ASYNC}
