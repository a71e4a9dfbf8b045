"""Masks by a line of packed sequences, simulated: the bits of the lists of the CPU, results and gradients of
both families, and planted faults.
"""

import dataclasses

import numpy as np
import pytest

from flashgen.call.mask import rule_of
from flashgen.operators.packedrules import packed
from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from operators.lines import random_line
from simulator.calls import check_found, first_check, simulated
from simulator.edits import replace
from simulator.faults import WRONG
from simulator.test_lines_simulated import LISTING, MAIN, device_of
from simulator.test_mask_lists_simulated import PLAIN
from simulator.test_mask_lists_simulated import simulated as lists_of

BY_SEQUENCE = "(doc[b, q] == doc[b, kv] or kv < limit[b] + far[h]) and kv // 3 <= q + b"
# Full blocks, and sequences that see nothing.
SOME_EMPTY = "kv <= q + limit[b] - 2 * last[b] and doc[b, q] < 60"
LISTS = (
    Shape(700, 900, heads=2, batch=1),
    Shape(300, 4300, heads=1, batch=1),
    Shape(129, 1, heads=1, batch=1),
)
WHOLE = Shape(200, 300, 4, 2, batch=1)
SHORT = dataclasses.replace(WHOLE, seqlen_q=70, seqlen_kv=90)

# Arrays of random lines with an element for each position, as arrays of tokens.
OF_TOKENS = {
    "start[q]": "start[b, q]",
    "last[kv]": "last[b, kv]",
    "pair[q // 3, kv]": "doc[b, kv]",
    "square[q, kv]": "doc[b, q]",
    "seen[b, q, kv]": "padded[b, kv]",
    "common[q, kv]": "padded[b, q]",
    "odd[q % 3, kv]": "padded[b, kv]",
}


def rule_of_pack(line, left=False, right=False):
    return packed(rule_of(line), left, right)


@pytest.mark.parametrize("line", ["documents", "prefix_lm", BY_SEQUENCE])
def test_lists_have_the_bits_of_the_cpu(line, compiler, fresh_seed):
    for example in lists_of(PLAIN.lined(rule_of_pack(line)), fresh_seed, LISTS):
        assert example.judge().ok, (example.problem, example.arrays)


@pytest.mark.drawn
@pytest.mark.parametrize("number", range(10))
def test_lists_of_random_lines(number, compiler, fresh_seed):
    line = random_line(np.random.default_rng(fresh_seed), 300)
    for old, new in OF_TOKENS.items():
        line = line.replace(old, new)
    for example in lists_of(PLAIN.lined(rule_of_pack(line, right=bool(number % 2))), fresh_seed, LISTS):
        assert example.judge().ok, (line, example.problem, example.arrays)


RESULTS = (
    ("flash_fwd_hdim32_fp16_blocks_m64_gqa_sm80", "documents", WHOLE),
    ("flash_fwd_hdim64_bf16_blocks_n64_gqa_sm90", BY_SEQUENCE, WHOLE),
    ("flash_fwd_hdim64_fp16_blocks_n64_gqa_sm90", "chunks", WHOLE),
    ("flash_bwd_hdim32_bf16_blocks_ordered_n64_gqa_sm80", BY_SEQUENCE, SHORT),
    ("flash_bwd_hdim32_fp16_blocks_gqa_sm90", "documents", WHOLE),
)


@pytest.mark.parametrize(("name", "line", "shape"), RESULTS, ids=lambda x: x if type(x) is str else "")
def test_results_are_within_the_bound(name, line, shape, compiler, fresh_seed):
    variant = MAIN[name].lined(rule_of_pack(line, right=True), LISTING)
    example = make(variant, shape, fresh_seed)
    simulated(variant, example, fresh_seed, device=device_of(variant))
    assert example.judge().ok, f"{variant}: {example.judge()}"


# A fault: its name, and what it replaces by what, in the text of any step of the lists.
FAULTS_OF_LISTS = (
    ("a query of the sequence before", "middle)) <= query", "middle)) < query"),
    ("the end of the sequence before", "cu_seqlens_kv + sequence + 1)", "cu_seqlens_kv + sequence)"),
    ("the first query at the last key", "sequence + 1) + row.y", "sequence) + row.y"),
    ("full across the end of a sequence of keys", "|| end_key <= all.kv_high", ""),
    ("full across the begin of a sequence of keys", "|| first_key > all.kv_low", ""),
    ("full across the end of a sequence of queries", "|| end_query < end_row", ""),
    ("one sequence a block", "if (verdict == kBlockEmpty) continue;", "if (verdict == kBlockEmpty) break;"),
    ("a sequence that ends with the block left out", "+ middle + 1)) <= key)", "+ middle + 1)) <= key + 64)"),
    ("positions of all tokens", "min(all.kv_high, end_key - 1) - first_key", "min(all.kv_high, end_key - 1)"),
    ("queries of the whole block", "min(end_row, end_query) - 1 - end_query", "end_row - 1 - end_query"),
    ("the sequences of the first query", "head, last_row).b", "head, first_row).b"),
)  # fmt: skip
FWD80, FWD90, BWD90 = (
    "flash_fwd_hdim32_fp16_blocks_m64_gqa_sm80",
    "flash_fwd_hdim64_fp16_blocks_n64_gqa_sm90",
    "flash_bwd_hdim32_fp16_blocks_gqa_sm90",
)
# By name: the kernel, the line, the step with the fault, and the edit.
FAULTS_OF_KERNELS = {
    "keys of the next sequence": (FWD80, "documents_full", "flash_fwd", " && key.kv < row.end_key", ""),
    "keys of the sequence before": (
        BWD90, "documents_full", "flash_bwd_hdim", "row.first_key <= key.kv && ", ""),
    "a range from the first token": (
        FWD90, "prefix_lm", "mask_lists_int", "begin = row.first_key;", "begin = 0;"),
    "a range to the last token": (FWD90, "kv >= q", "mask_lists_int", "end = row.end_key;", "end = 1 << 30;"),
    "the row before": (
        BWD90, "documents", "mask_lists_bounds", "row.z = uint32_t(query) -",
        "row.z = uint32_t(query) - 1 -"),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS_OF_LISTS, ids=lambda fault: fault[0])
def test_a_planted_fault_of_lists_is_found(fault, compiler, fixed_seed):
    _, old, new = fault
    variant = PLAIN.lined(rule_of_pack(SOME_EMPTY))
    assert any(old in render(step) for step in variant.steps)

    def run(seed):
        return lists_of(variant, seed, 3 * LISTS, lambda source: source.replace(old, new))

    # Each run has an example for some seeds after its own.
    check_found(run, range(fixed_seed, fixed_seed + 800, 10))


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS_OF_KERNELS)
def test_a_planted_fault_of_a_kernel_is_found(fault, compiler, fixed_seed):
    name, line, where, old, new = FAULTS_OF_KERNELS[fault]
    variant = MAIN[name].lined(rule_of_pack(line), LISTING)
    assert sum(step.name.startswith(where) for step in variant.steps) == 1

    def planted(step):
        source = render(step)
        return replace(source, old, new, fault) if step.name.startswith(where) else source

    seeds = range(fixed_seed, fixed_seed + 20)
    check = first_check(variant, WHOLE, seeds, planted, device=device_of(variant))
    assert check == WRONG
