"""Gradients under a mask by a line on Hopper, in the simulator: the order of blocks of keys, steps that the
producer passes on, and dQ that later blocks clear and the convert kernel rounds beside the last ones; planted
faults.
"""

import dataclasses

import numpy as np
import pytest

from flashgen.call.mask import rule_of
from flashgen.families.load import load_specs
from flashgen.operators.numbers import widened
from flashgen.simulator.example import Shape, make
from flashgen.simulator.hardware import pretend_for
from flashgen.source.render import render
from simulator.calls import check_on, simulated
from simulator.edits import replace
from simulator.faults import WRONG

SPECS = load_specs()
MAIN = {
    variant.name: variant
    for spec in SPECS
    if spec.name == "flash_bwd_sm90"
    for variant in spec.variants()
    if variant.is_main and variant.line_seam
}
(LISTING,) = (spec.variants() for spec in SPECS if spec.name == "mask_lists_sm80")
SINGLE, GROUPS = "flash_bwd_hdim64_bf16_blocks_sm90", "flash_bwd_hdim32_fp16_blocks_gqa_sm90"
ORDERED = "flash_bwd_hdim64_bf16_blocks_ordered_sm90"
# The first of three blocks of keys is long. Sections of two heads, and a last one of one head.
LONG = "kv < 128 or kv // 128 == q // 800"
SECTIONS = Shape(2048, 260, 5)
# The last head of four sees nothing, so no thread block adds to its dQ.
UNSEEN = "kv <= q and h < 3"
SHORT = Shape(150, 300, 4)
# Each head sees other blocks of keys.
BY_HEAD = "kv // 100 == h or kv == q"
CASES = (
    (SINGLE, LONG, SECTIONS, 40),
    (SINGLE, LONG, SECTIONS, 1),
    (SINGLE, UNSEEN, SHORT, 1),
    (SINGLE, BY_HEAD, SHORT, 1),
    (ORDERED, UNSEEN, SHORT, 1),
    (GROUPS, UNSEEN, Shape(150, 300, 4, 2), 1),
    (GROUPS, "documents", Shape(150, 300, 4, 2), 132),
    ("flash_bwd_hdim128_fp16_blocks_sm90", "documents_full", Shape(130, 260, 3), 1),
)
# So few that not all blocks are long, and with LONG none is longer than two sections; so many that one is.
FEW, SOME = 4, 8


def check_of(name, line, shape, sms, seed, source_of=render, multiprocessors=FEW, **options):
    """The check that found something on a GPU of ``sms`` multiprocessors, or None."""
    variant = MAIN[name].lined(rule_of(line), LISTING)
    device = dataclasses.replace(pretend_for(variant), num_sms=sms)

    def source(step):
        return source_of(step).replace("kMultiprocessors = 132;", f"kMultiprocessors = {multiprocessors};")

    return check_on(variant, make(variant, shape, seed), seed, source, device=device, **options)


@pytest.mark.parametrize(("name", "line", "shape", "sms"), CASES)
def test_within_the_bound(name, line, shape, sms, compiler, fresh_seed):
    """Of short sequences also with blocks of the convert kernel before the last ones of the main kernel."""
    overlap = shape is not SECTIONS
    assert check_of(name, line, shape, sms, fresh_seed, threads=1, overlap=overlap) is None


_LAUNCHED = "find_key_block_in_order(params, block_index())"
_BACKWARDS = "find_key_block_in_order(params, int(gridDim.x) - 1 - block_index())"
_PASSES = "pass_step(step, shared, ring.stage);"
_LOADS = " ".join(f"load_{x}(params, rows, shared, barriers, ring.stage);" for x in ("q", "dout"))
STUCK, TOO_EARLY = ("deadlock",), ("dependency",)
FAULTS = {
    # The order.
    "long blocks of a section twice": (
        *(SINGLE, LONG, SECTIONS, 40, "main", (WRONG, *STUCK)),
        "return {(section + 1) * size + index % next_size, index / next_size, !all_long_first};",
        "return {section * size + index % next_size, index / next_size, !all_long_first};"),
    "short blocks among the long ones of the next section": (
        *(SINGLE, LONG, SECTIONS, 40, "main", (WRONG, *STUCK)), "index -= next_long * next_size;", ""),
    "a last section of as many heads as the others": (
        *(SINGLE, LONG, SECTIONS, 40, "main", (WRONG, *STUCK, "global bounds", "tensor map")),
        "max(0, min(size, heads - (section + 1) * size));", "size;"),
    "the last section left out": (
        *(SINGLE, LONG, SECTIONS, 40, "main", (WRONG, *STUCK)),
        "return {(section + 1) * size + index % next_size, num_long + index / next_size, !all_long_first};",
        "return {section * size + index % size, num_long, !all_long_first};"),
    "places in the list of the first head": (
        *(SINGLE, BY_HEAD, SHORT, 1, "main", (WRONG, *STUCK)),
        "params.key_order + 4 * (1 + int64_t(list) * params.num_listed_keys + place)",
        "params.key_order + 4 * (1 + place)"),
    "places written to the list of the first head": (
        *(SINGLE, BY_HEAD, SHORT, 1, "order", (WRONG, "race", "operand")),
        "4 * int64_t(1 + first + earlier)", "4 * int64_t(1 + earlier)"),
    "a list that ends an entry early": (
        *(SINGLE, "documents", SHORT, 1, "order", (WRONG,)),
        "uint32_t(begin + count), last_entry", "uint32_t(begin + max(count - 1, 0)), last_entry"),
    "the first entry for the last one": (
        *(SINGLE, "documents", SHORT, 1, "order", (WRONG,)), "(begin + count - 1)", "(begin)"),
    # Steps.
    "the step of the other stage": (
        *(SINGLE, "documents", SHORT, 1, "main", (WRONG, "race", "uninitialised shared memory")),
        "passed_step(shared, ring.stage)", "passed_step(shared, ring.stage ^ 1)"),
    "a step passed on without its kind": (
        *(SINGLE, "documents", SHORT, 1, "main", (WRONG,)),
        "step.partial ? ~step.block : step.block", "step.block"),
    "a step passed on after its loads": (
        *(SINGLE, "documents", SHORT, 1, "main", ("race",)), f"{_PASSES} {_LOADS}", f"{_LOADS} {_PASSES}"),
    "the first step of all": (
        *(SINGLE, "documents", SHORT, 1, "main", ("uninitialised shared memory",)), _PASSES, ""),
    "the head of the first step": (
        *(GROUPS, "documents", Shape(150, 300, 4, 2), 1, "main", (WRONG,)),
        "uint32_t(step.head)", "uint32_t(step.head & ~1)"),
    # What is cleared and rounded.
    "zeros of a head that comes later": (
        *(SINGLE, UNSEEN, SHORT, 1, "main", STUCK),
        "+ params.clear_distance;", "+ params.clear_distance + 1;"),
    "zeros awaited from blocks that are launched later": (
        *(SINGLE, UNSEEN, SHORT, 1, "main", STUCK), _LAUNCHED, _BACKWARDS),
    "thread blocks do not count": (
        *(SINGLE, UNSEEN, SHORT, 1, "main", STUCK),
        "add_release_32(params.added", "add_release_32(params.cleared"),
    "a head is rounded before its last addition": (
        *(SINGLE, "documents", SHORT, 1, "convert", (WRONG,)),
        "!= params.key_blocks_of_head", "< params.key_blocks_of_head - 1"),
    "the count of the head before": (
        *(SINGLE, "documents", SHORT, 1, "convert", (WRONG,)),
        "params.added + head_of_batch;", "params.added + max(0, head_of_batch - 1);"),
    "nothing is awaited": (
        *(SINGLE, "documents", SHORT, 1, "convert", TOO_EARLY),
        "while (int(load_acquire_32(added)) != params.key_blocks_of_head) {}", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, line, shape, sms, step, caught, old, new = FAULTS[fault]

    def planted(of_step):
        is_it = of_step.is_main if step == "main" else of_step.step == step
        return replace(render(of_step), old, new, fault) if is_it else render(of_step)

    found = (
        check_of(name, line, shape, sms, seed, planted, threads=1, overlap=step == "convert")
        for seed in range(fixed_seed, fixed_seed + 3)
    )
    assert next(filter(None, found), None) in caught


LONGER = {
    "zeros of the first heads alone": ("preprocess", "clears = clears_all ||", "clears ="),
    "zeros awaited that nobody writes": (
        *("main", "if (!block.clears_ahead) return; const int head = head_of_grid(params, block); if"),
        "const int head = head_of_grid(params, block); if"),
    "long blocks of a section first": (
        "main", "num_long * (all_long_first ? heads : size);", "num_long * size;"),
    "long blocks of the next section again": ("main", "all_long_first ? 0 : num_long;", "num_long;"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *LONGER])
def test_blocks_longer_than_two_sections_are_launched_first(fault, compiler, fixed_seed):
    """The preprocess kernel clears dQ of all heads then."""
    step, old, new = LONGER.get(fault, ("", "", ""))

    def planted(of_step):
        is_it = fault and (of_step.is_main if step == "main" else of_step.step == step)
        return replace(render(of_step), old, new, fault) if is_it else render(of_step)

    found = check_of(SINGLE, LONG, SECTIONS, 40, fixed_seed, planted, SOME, threads=1)
    assert found is None if fault is None else found in (WRONG, "deadlock", "global bounds", "operand")


@pytest.mark.parametrize("fault", [False, True])
def test_a_head_that_sees_nothing_is_cleared_before_it_is_rounded(fault, compiler, fixed_seed):
    """With thread blocks in the opposite order, which may wait for ever, those of later heads alone."""
    waits = "if (lane == 0) { await_cleared(params, block); add_release_32(params.added"
    counts = "if (lane == 0) { add_release_32(params.added"

    def planted(step):
        text = render(step)
        if not step.is_main:
            return text
        text = replace(text, _LAUNCHED, _BACKWARDS, "order")
        text = replace(text, "await_cleared(params, block); if (count == 1)", "if (count == 1)", "steps")
        return replace(text, waits, counts, "counts") if fault else text

    found = check_of(SINGLE, "kv < 0 * q", SHORT, 1, fixed_seed, planted, threads=1, overlap=True)
    assert found == (WRONG if fault else "deadlock")


@pytest.mark.parametrize("fault", [False, True])
def test_keys_past_the_last_one_in_a_block_that_is_shown(fault, compiler, fresh_seed):
    """All scores are so low that 2^(0 - lse) is infinite: P of a key that is not there would be NaN in dQ."""
    variant = MAIN[SINGLE].lined(rule_of("kv < 1000 + 0 * q"), LISTING)
    example = make(variant, Shape(150, 300, 2), fresh_seed)
    named = {x: example.array(x) for x in ("q", "k", "v", "out", "lse", "dq")}
    named["q"][...], named["k"][...] = (
        (np.full(named[x].shape, number, np.float32).view(np.uint32) >> 16).astype(named[x].dtype)
        for x, number in (("q", 8.0), ("k", -8.0))
    )
    named["lse"][...] = -64 * 64 / 8 + np.log(300)
    mean = widened(named["v"], "bf16").mean(axis=1, keepdims=True).astype(np.float32)
    named["out"][...] = (mean.view(np.uint32) >> 16).astype(named["out"].dtype)

    def planted(step):
        tail = "step.partial || block.first_key + kBlockN > params.seqlen_kv", "step.partial"
        return replace(render(step), *tail, "tail") if fault and step.is_main else render(step)

    simulated(variant, example, fresh_seed, planted)
    assert np.isfinite(widened(named["dq"], "bf16")).all() != fault
