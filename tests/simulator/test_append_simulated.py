"""append in the simulator: every variant, caches and tables that are too short, packed tokens, faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import flashgen
from flashgen.families.load import load_specs
from flashgen.simulator.append_example import Choices, make
from flashgen.simulator.example import Shape
from flashgen.source.render import render
from flashgen.tools.cli import main
from simulator.calls import check_on, simulated, with_fault
from simulator.faults import NUMBERS, RACE, WRONG, fault

VARIANTS = {
    variant.name: variant for spec in load_specs() if spec.operator == "append" for variant in spec.variants()
}
SHAPE = Shape(5, 30, heads=4, kv_heads=2, batch=3, head_dim=64)
SHAPES = (
    SHAPE,
    Shape(1, 17, heads=3, kv_heads=1, batch=2, head_dim=16, head_dim_v=8),
    Shape(4, 0, heads=2, kv_heads=2, head_dim=104, head_dim_v=136, gap=48),
    Shape(3, 40, heads=6, kv_heads=3, batch=4, head_dim=256, head_dim_v=32),
    Shape(0, 9, heads=2, kv_heads=1, batch=5, head_dim=32),
)
PLAIN, HALVES, PAGED = "append_fp16_sm80", "append_bf16_halves_sm80", "append_bf16_halves_paged_sm80"
INTERLEAVED = "append_fp16_interleaved_sm80"
CHOICES = Choices(page_size=3, rotary_dim=32)
PACKED = replace(CHOICES, packed=True)
LATENT, LATENT_PAGES = "append_bf16_halves_latent_sm80", "append_fp16_interleaved_wide_paged_latent_sm80"
LATENT_ROWS = replace(CHOICES, head_dim_v=64)
CODES, LATENT_CODES = "append_bf16_e4m3_sm80", "append_fp16_halves_wide_e4m3_latent_sm80"
PACKED_ROWS = "append_bf16_halves_paged_fp8dsmla_latent_sm80"
OF_PACKED_ROWS = Choices(page_size=3, rotary_dim=64, head_dim_v=512)
QUARTER = "largest_of_threads(chunk, kCodesOfScale / kVector)"
OUTSIDE = ("global bounds", "global access", WRONG)
ENTRY, NEXT_ENTRY = "place / params.page_size", "(place + params.page_size) / params.page_size"
ROTATED = "if (!is_value && column < params.rotary_dim)"
ROTATED_LAST = "if (column >= first_rotated)"
FIRST_ROTATED = "first_rotated = params.head_dim - params.rotary_dim;"
FAULTS = (
    (CHOICES, fault("a page's next token", PAGED, SHAPE, NUMBERS,
                    "slot = place % params.page_size;", "slot = (place + 1) % params.page_size;")),
    (CHOICES, fault("the entry behind a page's own", PAGED, SHAPE, OUTSIDE, ENTRY, NEXT_ENTRY)),
    (CHOICES, fault("a token past the last one of a row", PLAIN, SHAPE, OUTSIDE,
                    "if (uint32_t(place) >= uint32_t(params.capacity)) return -1;", "")),
    (CHOICES, fault("pages that there are not", PAGED, SHAPE, OUTSIDE,
                    "if (uint32_t(page) >= uint32_t(params.num_pages)) return;", "", ENTRY, NEXT_ENTRY)),
    (CHOICES, fault("angles past the tables", HALVES, SHAPE, OUTSIDE,
                    "if (uint32_t(position) >= uint32_t(params.num_positions)) return;", "")),
    (CHOICES, fault("the end of the rotated part left as it is", HALVES, SHAPE, NUMBERS,
                    ROTATED, ROTATED.replace("params.rotary_dim", "params.rotary_dim - kVector"))),
    (CHOICES, fault("what lies behind it rotated as well", HALVES, SHAPE, OUTSIDE,
                    ROTATED, ROTATED.replace("params.rotary_dim", "params.head_dim"))),
    (CHOICES, fault("values rotated", HALVES, SHAPE, NUMBERS, ROTATED, ROTATED.replace("!is_value && ", ""))),
    (CHOICES, fault("rotated the other way", HALVES, SHAPE, NUMBERS,
                    "upper ? others[i] : -others[i]", "upper ? -others[i] : others[i]")),
    (CHOICES, fault("pairs with the neighbour", HALVES, SHAPE, NUMBERS,
                    "row + (upper ? first_angle : column + half)", "row + (column ^ kVector)")),
    (CHOICES, fault("the angle of another pair", INTERLEAVED, SHAPE, OUTSIDE,
                    "params.sin_row_stride + column / 2", "params.sin_row_stride + column")),
    (replace(CHOICES, q_positions="first"), fault("queries one after the other", HALVES, SHAPE, NUMBERS,
                                                  "nth_token * params.q_step", "nth_token")),
    (replace(CHOICES, index=True), fault("rows of the cache by number", PLAIN, SHAPE, NUMBERS,
                                         "params.index ? ", "false ? ")),
    (PACKED, fault("a sequence's first token counted to the one before", PLAIN, SHAPE, OUTSIDE,
                   "<= token) {", "< token) {")),
    (PACKED, fault("tokens behind the last sequence", PLAIN, SHAPE, OUTSIDE,
                   " || token >= int(load_global_32(params.cu_seqlens_new + params.sequences))", "")),
    (CHOICES, fault("a total past the capacity", PLAIN, SHAPE, NUMBERS,
                    "uint32_t(min(total, params.capacity))", "uint32_t(total)")),
    (LATENT_ROWS, fault("the first elements of a latent row rotated", LATENT, SHAPE, OUTSIDE,
                        FIRST_ROTATED, "first_rotated = 0;",
                        ROTATED_LAST, "if (column < params.rotary_dim)")),
    (LATENT_ROWS, fault("the elements after the value rotated", LATENT_PAGES, SHAPE, OUTSIDE,
                        FIRST_ROTATED, FIRST_ROTATED.replace(";", " - kVector;"))),
    (LATENT_ROWS, fault("angles counted from the begin of a latent row", LATENT_PAGES, SHAPE, OUTSIDE,
                        "column - first_rotated, position", "column, position")),
    (LATENT_ROWS, fault("pairs counted from the begin of a latent row", LATENT, SHAPE, NUMBERS,
                        "source + first_rotated", "source")),
    (LATENT_ROWS, fault("the first rotated elements left as they are", LATENT, SHAPE, NUMBERS,
                        ROTATED_LAST, ROTATED_LAST.replace("first_rotated", "first_rotated + kVector"))),
    (LATENT_ROWS, fault("values of a latent cache written", PLAIN, SHAPE, OUTSIDE,
                        "(is_key ? params.head_dim : params.head_dim_v)", "params.head_dim")),
    (LATENT_ROWS, fault("a latent row of codes by no scale", LATENT_CODES, SHAPE, NUMBERS,
                        "const float* scale = params.k_scale;", "const float* scale = nullptr;")),
    (OF_PACKED_ROWS, fault("a scale of two quarters", PACKED_ROWS, SHAPE, NUMBERS,
                           QUARTER, QUARTER.replace("kCodesOfScale", "2 * kCodesOfScale"))),
    (OF_PACKED_ROWS, fault("a scale of a part of a quarter", PACKED_ROWS, SHAPE, NUMBERS,
                           QUARTER, QUARTER.replace("kVector", "kVector / 2"))),
    (OF_PACKED_ROWS, fault("all scales in one place", PACKED_ROWS, SHAPE, (*NUMBERS, *RACE),
                           "row + kCodes + column / kCodesOfScale * int(sizeof(float))", "row + kCodes")),
    (OF_PACKED_ROWS, fault("codes that their scale does not divide", PACKED_ROWS, SHAPE, NUMBERS,
                           "quantize(chunk, scale));", "quantize(chunk, 1.0f));")),
    (OF_PACKED_ROWS, fault("rotary elements where the scales are", PACKED_ROWS, SHAPE, (*NUMBERS, *RACE),
                           "kRotaryByte = kCodes + kCodes / kCodesOfScale * int(sizeof(float));",
                           "kRotaryByte = kCodes;")),
    (OF_PACKED_ROWS, fault("rotary elements as bytes", PACKED_ROWS, SHAPE, (*OUTSIDE, *RACE, "alignment"),
                           "(column - kCodes) * int(sizeof(element))", "(column - kCodes)")),
    (CHOICES, fault("does not wait for the grid ahead", PAGED, SHAPE, ("dependency",),
                    "    griddepcontrol_wait();\n", "")),
)  # fmt: skip


def check_of(variant, shape, seed, choices=None, source_of=render):
    """The check that found something, or None."""
    return check_on(variant, make(variant, shape, seed, choices), seed, source_of)


@pytest.mark.parametrize("name", VARIANTS)
def test_within_the_bound_and_nothing_else_touched(name, compiler, fresh_seed):
    variant = VARIANTS[name]
    for shape in SHAPES:
        if variant.axis("kv_dtype") == "e4m3":  # whose head dims are multiples of 16
            widths = (None if x is None else -(-x // 16) * 16 for x in (shape.head_dim, shape.head_dim_v))
            shape = replace(shape, **dict(zip(("head_dim", "head_dim_v"), widths, strict=True)))
        for seed in range(fresh_seed, fresh_seed + 4):
            assert check_of(variant, shape, seed) is None, (shape, seed)
    if name in (PLAIN, CODES):  # they take latent rows as well
        for choices in (LATENT_ROWS, replace(LATENT_ROWS, packed=True, index=True)):
            assert check_of(variant, SHAPE, fresh_seed, choices) is None, choices


@pytest.mark.parametrize(("choices", "each"), FAULTS, ids=lambda each: getattr(each, "name", ""))
def test_a_planted_fault_is_found(choices, each, compiler, fixed_seed):
    variant = VARIANTS[each.variant]
    assert check_of(variant, each.shape, fixed_seed, choices, with_fault(each.plant)) in each.caught


def test_without_them_nothing_is_found(compiler, fresh_seed):
    for choices, each in FAULTS:
        assert check_of(VARIANTS[each.variant], each.shape, fresh_seed, choices) is None


def test_two_sequences_of_one_batch_entry_a_thread_each(compiler, fresh_seed):
    """More sequences than tokens: total_lengths has an element for each all the same."""
    variant, shape = VARIANTS[PLAIN], Shape(1, 3, heads=1, kv_heads=1, batch=200, head_dim=8)
    example = make(variant, shape, fresh_seed, PACKED)
    named = example.named
    named["cu_seqlens_new"][...] = np.minimum(np.arange(201), 2)
    simulated(variant, example, fresh_seed)
    assert example.judge().ok, example.judge()


@pytest.mark.parametrize("boundaries", [[2, 3, 5], [0, 4, 2], [5, 0, 5]])
def test_boundaries_that_make_no_sense_leave_what_the_cache_has(boundaries, compiler, monkeypatch):
    monkeypatch.setenv("FLASHGEN_BACKEND", "simulator")
    rng = np.random.default_rng()
    k, v = rng.standard_normal((2, 2, 16, 2, 16), np.float32)
    before, lengths = (k.copy(), v.copy()), np.array([5, 7], np.int32)
    new = rng.standard_normal((5, 2, 16), np.float32)
    cache = flashgen.KVCache(k, v, lengths)
    total, _ = flashgen.append(cache, new, new, cu_seqlens_new=np.array(boundaries, np.int32))
    assert (total >= lengths).all()
    for one, other in zip((k, v), before, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(one[row, :length], other[row, :length])


def test_a_call_with_the_simulator_for_a_backend(compiler, monkeypatch):
    """The bits of the CPU path where nothing is rotated; and what has no place is left out, not an error."""
    rng = np.random.default_rng()
    new = rng.standard_normal((2, 3, 2, 16), np.float32)
    lengths, pages = np.array([4, 11], np.int32), np.array([[3, 1], [0, 2]], np.int32)
    found = []
    for backend in ("cpu", "simulator"):
        k, v = (np.full((4, 8, 2, 16), np.nan, np.float32) for _ in "kv")
        monkeypatch.setenv("FLASHGEN_BACKEND", backend)
        total, _ = flashgen.append(flashgen.KVCache(k, v, lengths, pages), new, -new)
        found.append((k, v, total))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    full = flashgen.KVCache(k, v, np.array([15, 16], np.int32), pages)
    before = k[2].copy()
    total, _ = flashgen.append(full, new, -new)
    assert total.tolist() == [16, 16]
    np.testing.assert_array_equal(k[1, 7], new[0, 0])
    np.testing.assert_array_equal(k[2], before)
    endless = flashgen.KVCache(k, v, np.full(2, 2**31 - 1, np.int32), pages)
    assert flashgen.append(endless, new, -new)[0].tolist() == [16, 16]


def test_the_command_shows_it(compiler):
    shown = CliRunner().invoke(main, ["simulate", INTERLEAVED, "--seqlen-q", "3", "--seeds", "2"])
    assert shown.exit_code == 0, shown.output
    assert "of its bound" in shown.output
    assert "LSE" not in shown.output
