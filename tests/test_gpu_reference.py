"""The checks of tests/gpu, on the CPU: they pass what is right and catch what is wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch", reason="the checks of tests/gpu are written with PyTorch")

from flashgen.families.load import load_specs  # noqa: E402
from flashgen.operators.arguments import ArrayView  # noqa: E402
from flashgen.operators.attention import normalise  # noqa: E402
from gpu import forward_cases  # noqa: E402
from gpu.cases import (  # noqa: E402
    INPUT_LAYOUTS,
    LAYOUTS,
    MASK_SHAPES,
    VALUES,
    Case,
    Mask,
    check,
    front_door,
    make,
)

VARIANTS = [
    variant
    for spec in load_specs()
    if spec.operator == "attention" and not spec.has_lengths and not spec.on_request
    for variant in spec.variants()
    if variant.is_main and variant.mask_type != "blocks" and variant.axis("dropout") == "none"
]
LISTS = (
    "every_seqlen",
    "every_head_dim",
    "head_dims_of_v",
    "head_groups",
    "layouts",
    "dense_masks",
    "masks_and_ranges",
    "hidden_blocks",
    "windows",
    "values",
    "many_tiles",
)


def work(case):
    return case.batch * case.heads_q * case.seqlen_q * case.seqlen_kv * case.head_dim


@pytest.mark.parametrize("name", [name for name in LISTS if name != "many_tiles"])
def test_the_cpu_passes(name):
    """A part of each list; the whole of it is for a GPU."""
    cases = [case for case in getattr(forward_cases, name)() if work(case) < 2e7]
    for case in cases[:: max(1, len(cases) // 16)]:
        assert check(case, front_door, "cpu") <= 1


@pytest.mark.parametrize("seed", range(10))
def test_the_cpu_passes_random_problems(seed):
    check(forward_cases.at_random(seed), front_door, "cpu", seed)


def given(**changes):
    """``attend`` that computes something else than it was given: each change is a function of the arrays."""

    def attend(arrays):
        return front_door(
            dataclasses.replace(arrays, **{name: make(arrays) for name, make in changes.items()})
        )

    return attend


def computed_in(precision):
    """``attend`` that rounds scores, P and the result of an unmasked problem to ``precision``."""

    def attend(arrays):
        def rounded(x):
            return x.to(precision).double()

        group = arrays.q.shape[2] // arrays.k.shape[2]
        q, k, v = (x.double().transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = rounded(q @ k.transpose(2, 3) * arrays.q.shape[-1] ** -0.5)
        out = rounded(rounded(torch.softmax(scores, dim=-1)) @ v).transpose(1, 2)
        return arrays.out.copy_(out), torch.logsumexp(scores, dim=-1).float()

    return attend


def tf32(x):
    mantissa, exponent = torch.frexp(x)  # 11 bits, the one before the point among them
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def after(spoil):
    """``attend`` with ``spoil(arrays, out, lse)`` done to a right result."""

    def attend(arrays):
        out, lse = front_door(arrays)
        spoil(arrays, out, lse)
        return out, lse

    return attend


def varying():
    """``attend`` whose second call has another last bit."""
    calls = []

    def spoil(arrays, out, lse):
        if calls:
            out[0, 0, 0, :1].view(torch.int16).bitwise_xor_(1)
        calls.append(1)

    return after(spoil)


def set_to(number, name, *index):
    """Puts a number into one place of ``out`` or ``lse``."""

    def spoil(arrays, out, lse):
        {"out": out, "lse": lse}[name][index] = number

    return after(spoil)


def stray_write(name, place):
    """Puts a 0 into the memory around an output."""

    def spoil(arrays, out, lse):
        arrays.buffers[name][place] = 0

    return after(spoil)


def between_rows(arrays, out, lse):
    out.as_strided((1,), (1,), out.storage_offset() + out.shape[-1]).zero_()


def swapped_rows(arrays, out, lse):
    out[:, [64, 65]] = out[:, [65, 64]]


def scaled_tile(arrays, out, lse):
    out[:, 64:] *= 1.01


def changed_input(arrays, out, lse):
    arrays.v[0, 0, 0, 0] += 1


def base_2(arrays, out, lse):
    lse /= math.log(2)


PLAIN = Case(2, 70, 90, 4, 2, 40, "fp16")
CAUSAL = dataclasses.replace(PLAIN, causal=True)
TALL = dataclasses.replace(CAUSAL, seqlen_q=90, seqlen_kv=70)  # rows 0 to 19 see nothing
WINDOW = dataclasses.replace(PLAIN, window_size=(9, 3))
DENSE = dataclasses.replace(PLAIN, mask=Mask())
FP32 = dataclasses.replace(PLAIN, dtype="fp32")
BF16 = dataclasses.replace(PLAIN, dtype="bf16")

# What is done, to which case, and what is said of it.
ERRORS = {
    "the last key left out": (
        given(k=lambda a: a.k[:, :-1], v=lambda a: a.v[:, :-1]), PLAIN, "is .*, expected .* within"),
    "kv heads mixed up": (given(k=lambda a: a.k.flip(2)), PLAIN, "is .*, expected .* within"),
    "the scale of a padded head dim": (
        given(options=lambda a: {"softmax_scale": 64**-0.5}), PLAIN, "is .*, expected .* within"),
    "a diagonal off by one": (
        given(options=lambda a: {"window_size": (-1, 1)}), CAUSAL, "is .*, expected .* within"),
    "the other alignment": (given(options=lambda a: {"mask_type": 2}), CAUSAL, "is .*, expected .* within"),
    "a window short of a key": (
        given(options=lambda a: {"window_size": (8, 3)}), WINDOW, "is .*, expected .* within"),
    "a window with a key more": (
        given(options=lambda a: {"window_size": (9, 4)}), WINDOW, "is .*, expected .* within"),
    "only 1 hides": (given(mask=lambda a: a.mask == 1), DENSE, "lse is"),
    "the mask of another head": (given(mask=lambda a: a.mask.flip(1)), DENSE, "lse is"),
    "fp16 rounded to bf16": (computed_in(torch.bfloat16), PLAIN, "is .*, expected .* within"),
    "fp32 rounded to fp16": (computed_in(torch.float16), FP32, "is .*, expected .* within"),
    "fp32 through TF32": (
        given(q=lambda a: tf32(a.q), k=lambda a: tf32(a.k), v=lambda a: tf32(a.v)), FP32,
        "is .*, expected .* within"),
    "fp32 values through TF32": (given(v=lambda a: tf32(a.v)), FP32, "is .*, expected .* within"),
    "large scores rounded": (
        computed_in(torch.bfloat16), dataclasses.replace(BF16, values="large"), "is .*, expected .* within"),
    "an element left unwritten": (set_to(math.nan, "out", 1, 69, 3, 39), PLAIN, "out is nan in 1 of"),
    "an overflow": (set_to(math.inf, "out", 0, 0, 0, 0), PLAIN, "out is inf in 1 of"),
    "a row without keys that is not 0": (
        set_to(1e-7, "out", 0, 0, 0, 0), TALL, r"out is 1.19.*e-07, expected 0.0 within 0 in 1 of"),
    "a row without keys with a finite lse": (
        set_to(-3e38, "lse", 0, 0, 0), TALL, "expected -inf within 0 in 1 of"),
    "a row with keys and lse -inf": (set_to(-math.inf, "lse", 0, 0, 20), TALL, "lse is -inf, expected"),
    "a later tile one percent too large": (after(scaled_tile), PLAIN, "is .*, expected .* within"),
    "two rows swapped": (after(swapped_rows), PLAIN, "is .*, expected .* within"),
    "a logarithm in base 2": (after(base_2), PLAIN, "lse is"),
    "one wrong logarithm": (set_to(0.0, "lse", 1, 3, 69), PLAIN, "lse is 0.0"),
    "a write past out": (stray_write("out", -1), PLAIN, "wrote outside out"),
    "a write before out": (stray_write("out", 0), PLAIN, "wrote outside out"),
    "a write between rows of out": (after(between_rows), PLAIN, "wrote outside out"),
    "a write past lse": (stray_write("lse", -1), PLAIN, "wrote outside lse"),
    "a changed input": (after(changed_input), PLAIN, "v was changed"),
    "a bit that varies": (varying(), PLAIN, "other bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_caught(name):
    attend, case, message = ERRORS[name]
    with pytest.raises(AssertionError, match=message):
        check(case, attend, "cpu")


@pytest.mark.parametrize("layout", INPUT_LAYOUTS)
def test_what_lies_between_the_inputs_is_nan(layout):
    """A read beside an input cannot go unnoticed, because there is nothing there but NaN."""
    arrays = make(dataclasses.replace(PLAIN, layout=layout), "cpu", 1)
    for name in ("q", "k", "v"):
        view, buffer = getattr(arrays, name), arrays.buffers[name]
        inside = len(view.flatten().unique()) if "broadcast" in layout else view.numel()
        numbers = buffer.view(view.dtype)
        finite = numbers[torch.isfinite(numbers)]
        assert len(finite.unique() if "broadcast" in layout else finite) == inside
        assert bool(torch.isnan(numbers).any())
        assert bool(torch.isfinite(view).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_of_out_is_poisoned(layout):
    arrays = make(dataclasses.replace(PLAIN, out_layout=layout), "cpu", 1)
    assert bool(torch.isnan(arrays.out).all())
    assert bool(torch.isnan(arrays.lse).all())
    assert arrays.written_outside() == []
    front_door(arrays)
    assert arrays.written_outside() == []


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("seqlen_kv", [64, 1000, 4095])
def test_masks_have_the_alignment_they_say(alignment, offset, seqlen_kv):
    case = Case(1, 3, seqlen_kv, 1, 1, 8, "fp16", mask=Mask("qk", "uint8", alignment, offset, "random"))
    mask = make(case, "cpu", 1).mask
    assert math.gcd(mask.stride(0), 16) == alignment
    assert mask.data_ptr() % 16 == offset
    assert len(mask.unique()) > 2


def test_tiles_of_a_mask_are_hidden_visible_and_mixed():
    mask = make(Case(1, 512, 512, 1, 1, 8, "fp16", mask=Mask("qk")), "cpu", 1).mask != 0
    tiles = mask.view(8, 64, 8, 64).float().mean((1, 3))
    assert bool((tiles == 1).any())
    assert bool((tiles < 0.2).any())
    assert bool(((tiles > 0.4) & (tiles < 0.7)).any())
    assert bool(mask.all(dim=1).any())


@pytest.mark.parametrize("name", LISTS)
def test_cases_are_told_apart_by_name(name):
    cases = getattr(forward_cases, name)()
    assert len({str(case) for case in cases}) == len(cases)


def test_lists_cover_what_they_promise():
    cases = forward_cases.every_seqlen()
    for masking in forward_cases.MASKINGS.values():
        kinds = {name: value for name, value in masking.items() if name != "mask"}
        alike = [case for case in cases if all(getattr(case, name) == value for name, value in kinds.items())]
        assert {(case.seqlen_q, case.seqlen_kv) for case in alike} == {
            (a, b) for a in forward_cases.SEQLENS for b in forward_cases.SEQLENS
        }
    assert {(case.dtype, case.head_dim) for case in cases} >= {
        (dtype, width) for dtype, widths in forward_cases.HEAD_DIMS.items() for width in widths
    }
    assert {case.heads_kv for case in cases} == set(forward_cases.KV_HEADS)
    assert {case.mask.shape for case in forward_cases.dense_masks()} == set(MASK_SHAPES)
    assert {case.layout for case in forward_cases.layouts()} == set(INPUT_LAYOUTS)
    assert {case.values for case in forward_cases.values()} >= set(VALUES)


def test_each_variant_can_be_launched_on_its_cases():
    """Its cases are such that dispatch, too, could take the variant for them."""
    for variant in VARIANTS:
        smaller = forward_cases.smaller_head_dims(variant, VARIANTS)
        cases = forward_cases.of_variant(variant, smaller)
        for case in cases:
            problem = problem_without_memory(case)
            assert (problem.dtype, problem.mask_type) == (variant.dtype, variant.mask_type), (
                variant.name,
                case,
            )
            assert (problem.group_size == 1) == (variant.gqa == "mha")
            assert smaller[0] < problem.head_dim <= variant.head_dim
            assert smaller[1] < problem.head_dim_v <= variant.head_dim_v
        assert max(case.seqlen_q for case in cases) > 2 * variant.tile_value("block_m")
        assert max(case.seqlen_kv for case in cases) > 4 * variant.tile_value("block_n")


def problem_without_memory(case):
    def view(shape, dtype):
        strides = torch.empty(shape, device="meta").stride()
        return ArrayView("torch", 256, shape, strides, dtype, 0)

    q = view((case.batch, case.seqlen_q, case.heads_q, case.head_dim), case.dtype)
    k, v = (
        view((case.batch, case.seqlen_kv, case.heads_kv, width), case.dtype)
        for width in (case.head_dim, case.width_v)
    )
    mask = view((case.seqlen_q, case.seqlen_kv), "uint8") if case.mask else None
    options = {"causal": case.causal, "mask_type": case.mask_type, "window_size": case.window_size}
    return normalise(q, k, v, mask=mask, **options)
