"""append: what its arguments must be, and its judge."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    DeviceTypeNotSupported,
    NullPointer,
)
from flashgen.families.load import load_specs
from flashgen.operators.append import ARGUMENTS, normalise
from flashgen.operators.append_reference import judge
from flashgen.operators.arguments import ArrayLayout, ArrayView, view_of_shape
from flashgen.operators.overlaps import interleave
from flashgen.simulator.append_example import Choices, make
from flashgen.simulator.example import Shape

NEW, CACHE, QUERIES, TABLE = (3, 5, 2, 64), (4, 40, 2, 64), (3, 7, 4, 64), (45, 16)
PLAIN = {
    "k_new": (NEW, "fp16"),
    "v_new": ((*NEW[:3], 24), "fp16"),
    "lengths": ((3,), "int32"),
    "k_cache": (CACHE, "fp16"),
    "v_cache": ((*CACHE[:3], 24), "fp16"),
}
PAGED = PLAIN | {
    "k_cache": ((9, 16, 2, 64), "fp16"),
    "v_cache": ((9, 16, 2, 24), "fp16"),
    "pages": ((3, 6), "int32"),
}
TABLES = {"cos": (TABLE, "fp32"), "sin": (TABLE, "fp32")}
ROTARY = PLAIN | TABLES | {"q": (QUERIES, "fp16")}
PACKED = ROTARY | {
    "k_new": (NEW[1:], "fp16"),
    "v_new": ((*NEW[1:3], 24), "fp16"),
    "q": ((5, 4, 64), "fp16"),
    "cu_seqlens_new": ((4,), "int32"),
}


def problem_of(given, **options):
    """Of views, or shapes with dtypes, by the names of arguments."""
    views = {
        name: view if isinstance(view, ArrayView) else view_of_shape(*view, 0)
        for name, view in given.items()
        if view is not None
    }
    return normalise(views, **options)


def test_rows_without_a_page_table_are_pages():
    problem = problem_of(PLAIN)
    assert (problem.num_pages, problem.page_size, problem.max_pages) == (4, 40, 1)
    assert (problem.capacity, problem.paged, problem.pairs, problem.num_heads_q) == (40, False, "none", 0)
    assert [ARGUMENTS[place].name for place in problem.results] == ["k_cache", "v_cache", "total_lengths"]
    assert problem.array("k_cache").strides == (40 * 128, 128, 64)
    # 8 chunks of a row, 3 of a value's; rows of k_new and v_new.
    assert problem.grid_extents({}) == {"chunks": 2 * 5 * 2 * 8, "batch": 3}


def test_pages_rotation_and_packed_tokens():
    paged = problem_of(PAGED)
    assert (paged.capacity, paged.paged) == (96, True)
    rotated = problem_of(ROTARY, interleaved=True, q_positions="first")
    assert (rotated.pairs, rotated.rotary_half, rotated.table_dtype) == ("interleaved", 16, "fp32")
    assert rotated.values({}) == {"row_chunks_log2": 3, "capacity": 40, "rotary_dim": 32, "q_step": 0}
    assert rotated.array("cos").element_bytes == 4
    assert ARGUMENTS[rotated.results[-1]].name == "q_rotated"
    packed = problem_of(PACKED)
    assert (packed.batch, packed.sequences, packed.seqlen_new, packed.batched) == (1, 3, 5, False)
    position = packed.operator.position
    assert packed.shape(position("q_rotated")) == (5, 4, 64)
    assert packed.shape(position("total_lengths")) == (3,)


def test_no_new_tokens_still_make_lengths():
    problem = problem_of(PLAIN | {"k_new": ((3, 0, 2, 64), "fp16"), "v_new": ((3, 0, 2, 24), "fp16")})
    assert not problem.empty
    assert problem.grid_extents({})["chunks"] == 1
    nothing = {"k_new": ((0, 5, 2, 64), "fp16"), "v_new": ((0, 5, 2, 24), "fp16"), "lengths": ((0,), "int32")}
    assert problem_of(PLAIN | nothing).empty


def strided(shape, strides, dtype="fp16"):
    return ArrayView("shape", 256, shape, strides, dtype, 0)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (PLAIN | {"k_cache": None}, NullPointer, "k_cache is None"),
        (PLAIN | {"lengths": None}, NullPointer, "lengths is None"),
        (PLAIN | {"k_new": (NEW, "float64")}, BadTensorDtype, "k_new has dtype float64; supported"),
        (PLAIN | {"v_cache": ((*CACHE[:3], 24), "bf16")}, BadTensorDtype, "v_cache has dtype bf16; .* fp16"),
        (PLAIN | {"k_cache": (CACHE, "bf16")}, BadTensorDtype,
         "^k_cache has dtype bf16; expected fp16, as v_c"),
        (PLAIN | {"v_cache": ((*CACHE[:3], 24), "bf16")}, BadTensorDtype,
         "v_cache has dtype bf16; expected fp16, as k_cache has dtype fp16$"),
        (PLAIN | {"k_new": (NEW, "bf16"), "v_new": ((*NEW[:3], 24), "bf16")}, BadTensorDtype,
         "^k_new has dtype bf16; expected fp16, as the cache has dtype fp16$"),
        (PLAIN | {"v_new": ((*NEW[:3], 24), "bf16")}, BadTensorDtype, "^v_new has dtype bf16; expected fp16"),
        (PLAIN | {"k_new": (NEW, "int8")}, BadTensorDtype, "k_new has dtype int8; .*; the cache has fp16$"),
        (PLAIN | {"k_cache": (CACHE, "int8")}, BadTensorDtype, "k_cache has dtype int8; supported are fp16"),
        (ROTARY | {"q": (QUERIES, "bf16")}, BadTensorDtype, "q has dtype bf16; .*, as the cache has"),
        (PLAIN | {"lengths": ((3,), "int64")}, BadTensorDtype, "lengths has dtype int64; expected int32$"),
        (PAGED | {"pages": ((3, 6), "int64")}, BadTensorDtype, "pages has dtype int64; expected int32"),
        (PLAIN | {"lengths": view_of_shape((3,), "int32", None)}, DeviceTypeNotSupported,
         "lengths is in host memory but k_new is"),
        (PLAIN | {"k_cache": view_of_shape(CACHE, "fp16", 1)}, DeviceTypeNotSupported,
         "k_cache is on GPU 1 but k_new is"),
        (PLAIN | {"lengths": ((4,), "int32")}, BadTensorShape,
         r"lengths has shape \(4,\) but k_new is for 3 sequences"),
        (PLAIN | {"k_new": (NEW[1:], "fp16")}, BadTensorShape, "packed tokens need cu_seqlens_new$"),
        (PLAIN | {"k_new": ((3, 2, 64), "fp16")}, BadTensorShape,
         r"need cu_seqlens_new, and one token of each sequence goes in as k_new\[:, None\]$"),
        (PLAIN | {"cu_seqlens_new": ((4,), "int32")}, BadTensorShape,
         r"expected \(seqlen_new, num_heads_kv, head_dim\); cu_seqlens_new was given, so tokens"),
        (PLAIN | {"k_new": ((3, 5, 3, 64), "fp16")}, BadTensorShape, "k_new has 3 heads of 64 .* 2 of 64"),
        (PLAIN | {"v_new": ((3, 5, 2, 32), "fp16")}, BadTensorShape, "v_new has 2 heads of 32 .* 2 of 24"),
        (PLAIN | {"v_new": ((3, 4, 2, 24), "fp16")}, BadTensorShape, r"v_new has shape \(3, 4, 2, 24\)"),
        (PLAIN | {"v_cache": ((4, 41, 2, 24), "fp16")}, BadTensorShape, "v_cache has shape"),
        (PLAIN | {"k_cache": ((2, 40, 2, 64), "fp16")}, BadTensorShape,
         "k_cache has 2 rows, fewer than the 3"),
        (PLAIN | {"k_new": ((3, 5, 2, 12), "fp16"), "k_cache": ((4, 40, 2, 12), "fp16")}, BadTensorShape,
         "head_dim is 12"),
        (PLAIN | {"k_new": ((3, 50, 2, 64), "fp16"), "v_new": ((3, 50, 2, 24), "fp16")}, BadTensorShape,
         "k_new has 50 tokens of a sequence but k_cache has room for 40; pass fewer"),
        (PAGED | {"k_new": ((3, 97, 2, 64), "fp16"), "v_new": ((3, 97, 2, 24), "fp16")}, BadTensorShape,
         "k_new has 97 tokens of a sequence but pages has room for 6 pages of 16"),
        (PAGED | {"pages": ((3,), "int32")}, BadTensorShape, r"pages has shape .* \(sequences, max_pages\)"),
        (PAGED | {"pages": ((2, 6), "int32")}, BadTensorShape, r"pages has shape \(2, 6\)"),
        (PAGED | {"index": ((3,), "int32")}, BadParam, "index was given together with pages"),
        (PLAIN | {"index": ((2,), "int32")}, BadTensorShape, r"index has shape \(2,\)"),
        (PLAIN | {"q": (QUERIES, "fp16")}, BadParam, "q was given without cos and sin"),
        (PLAIN | {"positions": ((3, 5), "int32")}, BadParam, "positions was given without cos and sin"),
        (PLAIN | {"cos": (TABLE, "fp32")}, NullPointer, "sin is None but cos was given"),
        (ROTARY | {"sin": ((44, 16), "fp32")}, BadTensorShape, r"sin has shape \(44, 16\)"),
        (ROTARY | {"sin": (TABLE, "fp16")}, BadTensorDtype, "sin has dtype fp16 but cos has fp32"),
        (ROTARY | {"cos": (TABLE, "bf16")}, BadTensorDtype, "cos has dtype bf16; expected fp16 or fp32"),
        (ROTARY | {"cos": ((45,), "fp32")}, BadTensorShape, r"cos has shape \(45,\)"),
        (ROTARY | dict.fromkeys(("cos", "sin"), ((45, 12), "fp32")), BadTensorShape, "rotary_dim of 24"),
        (ROTARY | dict.fromkeys(("cos", "sin"), ((45, 40), "fp32")), BadTensorShape, "up to head_dim, 64"),
        (ROTARY | dict.fromkeys(("cos", "sin"), ((45, 0), "fp32")), BadTensorShape, "rotary_dim of 0"),
        (ROTARY | dict.fromkeys(("cos", "sin"), ((4, 16), "fp32")), BadTensorShape,
         "cos has 4 rows but k_new"),
        (ROTARY | dict.fromkeys(("cos", "sin"), ((6, 16), "fp32")), BadTensorShape,
         "cos has 6 rows but q has 7 tokens"),
        (ROTARY | {"positions": ((3, 5), "int32")}, BadTensorShape, "q has 7 tokens but k_new has 5"),
        (ROTARY | {"q": None, "positions": ((3, 4), "int32")}, BadTensorShape,
         r"positions has shape \(3, 4\)"),
        (ROTARY | {"q": ((3, 7, 4, 32), "fp16")}, BadTensorShape, "q has shape"),
        (ROTARY | {"q": ((2, 7, 4, 64), "fp16")}, BadTensorShape, "q has shape"),
        (PLAIN | {"q_rotated": (QUERIES, "fp16")}, BadParam, "q_rotated was given without q"),
        (PLAIN | {"total_lengths": ((4,), "int32")}, BadTensorShape,
         r"total_lengths has shape \(4,\); expected \(sequences,\) = \(3,\)$"),
        (PLAIN | {"lengths": ((3, 1), "int32")}, BadTensorShape, r"expected \(sequences,\)$"),
        (PACKED | {"q": ((6, 4, 64), "fp16")}, BadTensorShape, "q has 6 tokens but k_new has 5; cu_seqlens"),
        (PACKED | {"cu_seqlens_new": ((0,), "int32")}, BadTensorShape, "one element more than sequences"),
        (PACKED | {"lengths": ((4,), "int32")}, BadTensorShape, r"lengths has shape \(4,\)"),
        (PACKED | {"cu_seqlens_new": ((9,), "int32")}, BadTensorShape, "cu_seqlens_new is for 8 sequences"),
        (PLAIN | dict.fromkeys(("k_new", "v_new"), ((9, 5, 2, 64), "fp16")), BadTensorShape,
         "k_new is for 9 sequences"),
        (PACKED | {"k_new": (NEW, "fp16")}, BadTensorShape, r"k_new has shape .* expected \(seqlen_new"),
        (PLAIN | {"k_cache": strided(CACHE, (5160, 129, 64, 1))}, BadTensorStrides, "k_cache has strides"),
        (PLAIN | {"k_cache": strided(CACHE, (0, 128, 64, 1))}, BadTensorStrides,
         "several elements share one"),
        (PLAIN | {"k_new": strided(NEW, (640, 128, 1, 2))}, BadTensorStrides,
         "last dimension must be contig"),
        (PLAIN | {"lengths": strided((3,), (2,), "int32")}, BadTensorStrides, "lengths has strides"),
        (ROTARY | {"cos": strided(TABLE, (18, 1), "fp32")}, BadTensorStrides, "cos has strides"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(given, error, words):
    with pytest.raises(error, match=words):
        problem_of(given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q_positions": "last"}, "q_positions is 'last'; allowed"),
        ({"q_positions": np.arange(2)}, "q_positions is .*; allowed"),
        ({"interleaved": "yes"}, "interleaved is"),
    ],
)
def test_options_that_there_are_not(options, words):
    with pytest.raises(BadParam, match=words):
        problem_of(ROTARY, **options)


VARIANT = next(v for s in load_specs() for v in s.variants() if v.name == "append_fp32_halves_paged_sm80")


def test_the_judge_refuses_what_is_off_and_what_was_touched():
    choices = Choices(page_size=3, rotary_dim=32)
    example = make(VARIANT, Shape(4, 20, heads=4, kv_heads=2, batch=2, head_dim=48), 7, choices)
    named, before, problem = example.named, example.before, example.problem
    assert not example.judge().ok  # nothing has been written yet
    from flashgen.cpu.append import append

    # The first one outgrows cache and tables, which would be an error on the CPU.
    named["lengths"][...] = [8, 0]
    append(problem, named)
    assert example.judge().ok, example.judge()

    def spoiled(name, at, value):
        kept = named[name][at]
        named[name][at] = value
        verdict = judge(problem, before, named)
        named[name][at] = kept
        return not verdict.ok

    page, slot = named["pages"][0, 9 // 3], 9 % 3
    assert spoiled("k_cache", (page, slot, 1, 5), named["k_cache"][page, slot, 1, 5] + np.float32(1e-5))
    assert spoiled("k_cache", (page, slot, 1, 40), named["k_cache"][page, slot, 1, 40] + np.float32(1e-6))
    assert spoiled("v_cache", (page, slot, 0, 0), np.nan)
    assert spoiled("v_cache", (named["pages"][0, 0], 0, 0, 0), 0.0)
    assert spoiled("q_rotated", (0, 0, 0, 31), 100.0)
    assert spoiled("total_lengths", 1, 5)
    assert example.judge().ok


def addresses(placed, start):
    grid = np.indices(placed.extents[:-1]).reshape(len(placed.strides), -1)
    rows = start + np.asarray(placed.strides) @ grid * placed.element_bytes
    return set((rows[:, None] + np.arange(placed.row_bytes)).ravel().tolist())


def test_arrays_that_interleave_share_no_byte():
    """Against all addresses, for K and V that share pages, tokens or heads, and for any others."""
    rng = np.random.default_rng()
    argument = next(each for each in ARGUMENTS if each.name == "k_cache")

    def placed(shape, strides):
        return ArrayLayout(argument, shape, strides, "fp16")

    shape = (3, 4, 2, 8)
    side_by_side = {"pages": ((128, 16, 8), 64), "tokens": ((128, 32, 8), 16), "heads": ((128, 32, 16), 8)}
    for strides, distance in side_by_side.values():
        one = placed(shape, strides)
        assert interleave(one, one, 2 * distance)
        assert interleave(one, one, -2 * distance)
        assert not interleave(one, one, 2 * distance - 2)
    found = 0
    for _ in range(2000):
        one, other = (placed((*rng.integers(1, 4, 3), 8), tuple(8 * rng.integers(1, 12, 3))) for _ in "kv")
        distance = 2 * int(rng.integers(-200, 200))
        if interleave(one, other, distance):
            found += 1
            assert not addresses(one, 0) & addresses(other, distance)
    assert found
