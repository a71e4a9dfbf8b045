"""The kernels of quantize, simulated: within the bound, and the bits of the CPU path."""

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from flashgen import simulator
from flashgen.cpu import quantize as on_cpu
from flashgen.errors import SimulationError
from flashgen.families.load import load_specs
from flashgen.host import paths
from flashgen.operators.quantize import ARGUMENTS
from flashgen.simulator import hostcompiler
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render

SPEC = next(spec for spec in load_specs() if spec.name == "quantize_sm80")
VARIANTS = {(v.dtype, dict(v.axes)["per"]): v for v in SPEC.variants()}
RAGGED = Shape(seqlen_q=301, heads=3, batch=2, head_dim=40, gap=32)
WIDE = Shape(seqlen_q=33, heads=2, batch=1, head_dim=256, spread=300.0)
ONE = Shape(seqlen_q=1, heads=1, batch=1, head_dim=8, gap=0)


def simulated(variant, shape, seed, edit=lambda source: source):
    example = make(variant, shape, seed)
    libraries = [load(edit(render(step)), step.name) for step in variant.steps]
    run_steps(libraries, variant, example, seed=seed)
    return example


@pytest.mark.parametrize("case", VARIANTS, ids="-".join)
def test_the_bits_of_the_cpu_path_and_within_the_bound(case, compiler, fresh_seed):
    for shape in (RAGGED, WIDE, ONE):
        example = simulated(VARIANTS[case], shape, fresh_seed)
        assert example.judge().ok, (shape, str(example.judge()))
        arrays = [None if x is None else x.copy() for x in example.arrays]
        on_cpu.quantize(example.problem, *arrays)
        for argument, x, y in zip(ARGUMENTS[2:], arrays[2:], example.arrays[2:], strict=True):
            assert x is None or (x == y).all(), (shape, argument.name)


# A fault: its name, the variant, and what it replaces by what, in the text of any step.
FAULTS = (
    ("the scale of the next head", "head", "row * params.scale_row_step + head *",
     "row * params.scale_row_step + (head + 1) % params.num_heads *"),
    ("the scale of the first batch entry", "token", "batch * params.scale_batch_step + row", "row"),
    ("the last token left out", "tensor", "min(params.seqlen, ", "min(params.seqlen - 1, "),
    ("one warp's largest alone", "tensor", "threadIdx.x < kWarps ?", "threadIdx.x < 1 ?"),
    ("numbers of a head far from each other", "head", "(int64_t(head) * params.batch_size + batch)",
     "(int64_t(batch) * params.num_heads + head)"),
    ("numbers of a part of the blocks", "tensor", "i < count; i += kThreads", "i < count / 2; i += kThreads"),
    ("an infinite element decides", "token", "largest = size < INFINITY ?", "largest = size <= INFINITY ?"),
    ("240 as the largest code", "token", "kLargestCode = 448.0f", "kLargestCode = 240.0f"),
    ("a scale of 0", "token", "return largest == 0.0f ? 1.0f :", "return"),
    ("codes in the order of the bytes swapped", "given",
     "pack_e4m3(values[2] * inverse_scale, values[3] * inverse_scale) << 16",
     "pack_e4m3(values[3] * inverse_scale, values[2] * inverse_scale) << 16"),
    ("the scale instead of its inverse", "given", "inverse_scale = 1.0f / scale;", "inverse_scale = scale;"),
    ("columns past the head dim", "given", "if (column < params.head_dim) store_codes", "store_codes"),
)  # fmt: skip


@pytest.mark.parametrize(("per", "text", "edit"), [x[1:] for x in FAULTS], ids=[x[0] for x in FAULTS])
def test_a_planted_fault_is_found(per, text, edit, compiler, fixed_seed):
    variant = VARIANTS["bf16", per]
    if per == "given":
        variant = VARIANTS["fp16", per]
    assert any(render(step).count(text) == 1 for step in variant.steps)
    shape = dataclasses.replace(RAGGED, seqlen_q=530)
    for seed in range(fixed_seed, fixed_seed + 12):  # of some numbers a fault makes nothing wrong
        try:
            example = simulated(variant, shape, seed, lambda source: source.replace(text, edit))
        except SimulationError:
            return
        if not example.judge().ok:
            return
    raise AssertionError("no seed shows the fault")


_CONVERSIONS = """
#include <bit>
#include <cmath>
#include <cstdint>
#include "simulator/numbers.hpp"
static uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
static float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
static uint32_t pack_e4m3(float low, float high) { using std::fminf; %s }
extern "C" void convert(const float* x, uint8_t* integers, uint8_t* twin, int count) {
    for (int i = 0; i < count; i += 2) {
        const uint32_t pair = pack_e4m3(x[i], x[i + 1]);
        integers[i] = pair & 0xff, integers[i + 1] = pair >> 8;
        for (int j = i; j < i + 2; ++j) twin[j] = flashgen::simulator::float_to_e4m3(x[j]);
    }
}
"""


def test_conversions_give_the_codes_of_ml_dtypes(compiler, fresh_seed, tmp_path):
    """The integers that kernels compute with before sm_89, and the simulator's twin of the instruction."""
    from ml_dtypes import bfloat16, float8_e4m3fn

    header = (paths.templates_dir() / "include/flashgen/ptx.cuh").read_text()
    body = header.partition("uint32_t pack_e4m3(")[2].partition("#else")[2].partition("#endif")[0]
    (tmp_path / "convert.cpp").write_text(_CONVERSIONS % body)
    include = Path(simulator.__file__).with_name("include")
    options = ("-std=c++20", "-shared", "-fPIC", "-O1", f"-I{include}")
    hostcompiler.build(compiler, options, [tmp_path / "convert.cpp"], tmp_path / "convert.so", "convert")
    rng = np.random.default_rng(fresh_seed)
    every_bf16 = np.arange(1 << 16, dtype=np.uint16).view(bfloat16).astype(np.float32)
    x = np.concatenate([every_bf16, np.exp2(rng.uniform(-12, 10, 1 << 16)).astype(np.float32)])
    codes = np.zeros((2, x.size), np.uint8)
    ctypes.CDLL(str(tmp_path / "convert.so")).convert(
        *(ctypes.c_void_p(a.ctypes.data) for a in (x, codes[0], codes[1])), x.size
    )
    with np.errstate(all="ignore"):
        right = np.clip(x, -448, 448).astype(float8_e4m3fn).view(np.uint8)
    right[np.isnan(x)] = 0x7F
    assert (codes[0] == right).all()
    assert (codes[1] == right).all()
