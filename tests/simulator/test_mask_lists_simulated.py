"""The kernels that list the blocks of a mask by a line, simulated: the bits of the lists of the CPU."""

import numpy as np
import pytest

from flashgen.families.load import load_specs
from flashgen.families.masks import load_masks, rule_of_line
from flashgen.operators.linetable import BY_ELEMENT
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from operators.lines import random_line
from simulator.calls import check_found

SPEC = next(spec for spec in load_specs() if spec.name == "mask_lists_sm80")
PLAIN = next(variant for variant in SPEC.variants() if variant.is_main)
# By head and batch entry; two arrays of keys, and two of queries; a table.
OF_HEADS = (
    "(doc[b, q] == doc[b, kv] or last[kv] + table[h + 1] < start[q]) and kv - q < 9 * n "
    "or kv // 99 == q // 99"
)
# Arrays by query and key: of bools, which may be read 16 at a time, and of numbers.
OF_SCORES = "not hidden[b, h, q, kv] and (odd[q, kv] or near[q, kv] < kv and doc[b, kv] <= q)"
SHAPES = (
    Shape(700, 900, heads=3, batch=2),
    Shape(1100, 4300, heads=2, batch=2, window=(900, 30)),
    Shape(300, 100, heads=2, batch=1, block=(64, 128)),
    Shape(1, 129, heads=1, batch=1, window=(-1, 0)),
    Shape(500, 600, heads=1, batch=1, window=(300, -1), block=(192, 64)),
)


def lined(line):
    return PLAIN.lined(load_masks("").get(line) or rule_of_line(line))


def simulated(variant, seed, shapes=SHAPES, edit=lambda source: source):
    """Examples with the lists of simulated kernels."""
    libraries = [load(edit(render(step)), step.name) for step in variant.steps]
    examples = [make(variant, shape, seed + number) for number, shape in enumerate(shapes)]
    for example in examples:
        run_steps(libraries, variant, example, seed=seed)
    return examples


def check(variant, seed):
    for example in simulated(variant, seed):
        assert example.judge().ok, (example.problem, example.arrays[0], example.arrays[2])


def test_the_line_of_a_kernel_without_one(compiler, fresh_seed):
    for example in simulated(PLAIN, fresh_seed):
        assert example.judge().ok


@pytest.mark.parametrize(
    "line", ["documents", "window_first", OF_HEADS, OF_SCORES, "not hidden[q, kv]", "neighbourhood"]
)
def test_lists_have_the_bits_of_the_cpu(line, compiler, fresh_seed):
    check(lined(line), fresh_seed)


@pytest.mark.parametrize("number", range(10))
def test_lists_of_random_lines(number, compiler, fresh_seed):
    check(lined(random_line(np.random.default_rng(fresh_seed), 300)), fresh_seed)


# A fault: its name, and what it replaces by what, in the text of any step.
FAULTS = (
    ("the first keys of a block alone", "i < kKeyLoads;", "i < 1;"),
    ("the largest of the least elements", "high = warp_largest(high)", "high = warp_largest(low)"),
    ("the array of another list", "list >= params.block_indptr_batch", "list > params.block_indptr_batch"),
    ("the other array", "if (span == 0)", "if (span == 1)"),
    ("rows of half a block", "row_block.num_rows, params.seqlen_q) - 1;\n    LineRows",
     "row_block.num_rows / 2, params.seqlen_q) - 1;\n    LineRows"),
    ("positions that count from the first query", "first_row + head.seqlen_kv - head.seqlen_q", "first_row"),
    ("bounds of the first list", "int64_t(list) * num_blocks * (2 * kKeySpans)", "0"),
    ("empty where a bound touches", "keys.kv_low >= some.end", "keys.kv_low >= some.end - 1"),
    ("full beside the range", "kBlockFull && !in_range", "kBlockFull && in_range"),
    ("the head of another list", "list - batch * params.block_indptr_num_heads,", "0,"),
    ("the count of the block itself", "(other < row_block.block) end", "(other <= row_block.block) end"),
    ("the shortest lists first", "of_other > own_class", "of_other < own_class"),
    ("earlier blocks of a class first", "other > row_block.block);", "other < row_block.block);"),
    ("the last entry that the last rows see", "last_seen = max(last_seen, groups", "last_seen = (groups"),
    ("a group without its last entry", "groups[group].last + 1 :", "groups[group].last :"),
    ("rows of the next group", "kGroupRows * group;", "kGroupRows * (group + 1);"),
    ("the rows of a group for all", "min(kGroupRows, end_row", "min(params.block_rows, end_row"),
    ("the entries of a lane alone", "warp_least(groups[group].first)", "groups[group].first"),
    ("counts of the first list", "params.line_counts + row_block.list * num_blocks", "params.line_counts"),
    ("entries after the room", "verdict != kBlockEmpty && place < room;", "verdict != kBlockEmpty;"),
    ("an end after the room", "first + min(end, room)", "first + end"),
    ("kinds exchanged", "verdict == kBlockPartial ? ~", "verdict == kBlockFull ? ~"),
    ("places in the order of lanes", "__popc(listed & ((1u << lane) - 1))", "lane"),
    ("a total of the room", "row_block.list, uint32_t(end)", "row_block.list, uint32_t(min(end, room))"),
    ("the first block left out", "int key_block = threadIdx.x;", "int key_block = threadIdx.x + 1;"),
    ("half of the rows in flight", "i < kRowLoads;", "i < kRowLoads / 2;"),
    ("the count of a warp", "block_sum(count, to_shared(shared_memory))", "warp_sum(count)"),
    ("places of a warp", "warp_sum(lane < warp ? of_warp : 0)", "0"),
    ("places after the warp's own", "lane < warp ? of_warp", "lane <= warp ? of_warp"),
    ("no barrier before places", "__popc(listed));\n        __syncthreads();", "__popc(listed));"),
    ("entries of a warp for the last", "of_warps + 4 * kGroups * kWarps", "of_warps"),
)  # fmt: skip


# Faults of the bounds of blocks of scores.
FAULTS_OF_SCORES = (
    ("a byte of zeros of four", "zero_bytes(elements.w)", "0"),
    ("ones of three words", "| elements.z | elements.w", "| elements.z"),
    ("half of the chunks", "block.num_rows << chunks_log2;", "block.num_rows << chunks_log2 >> 1;"),
    ("the columns of the first chunk", "chunks_log2) * row_stride + column", "chunks_log2) * row_stride"),
    ("ones for zeros in a tail", "zeros |= element == 0;", "zeros |= element != 0;"),
    ("zeros where a byte is large", "& ~word & 0x80808080u", "& 0x80808080u"),
    ("rows past the last query", "params.seqlen_q - block.first_row)", "1 << 30)"),
    ("the bounds of the other array", "return bounds_of_hidden(", "return bounds_of_odd("),
    ("the blocks of the first list", "row_block.list * kBlockSpans * num_blocks", "0"),
    ("the block before", "(params) + key_block;", "(params) + max(key_block - 1, 0);"),
    ("bounds on those of keys", "2 * (first_block_bounds(params) + index)", "2 * index"),
    ("rows by half their size", "(params) * params.block_rows", "(params) * 64"),
)  # fmt: skip
# Faults of the ranges of queries.
OF_RUNS = "doc[b, q] == doc[b, kv] or kv < 9"
FAULTS_OF_RANGES = (
    ("runs that begin a key late", "first >= element; };", "first > element; };"),
    ("runs without the keys after the row", "near_end, params.seqlen_kv, is", "near_end, near_end, is"),
    ("runs of the nearest keys alone", "if (run.begin == near_begin)", "if (false)"),
    ("a step too far", "begin += (before - 1) * step + 1;", "begin += before * step;"),
    ("elements counted from 0", "- first;\n            const uint32_t", ";\n            const uint32_t"),
    ("ranges of the row before", "head, min(row, params.seqlen_q - 1));", "head, max(row - 1, 0));"),
    ("one range for two", "* kRanges + i) + 1", "* kRanges + i) + 2 * kRanges - 1 - 2 * i"),
)  # fmt: skip
PLANTED = [(OF_HEADS, *x) for x in FAULTS] + [(OF_SCORES, *x) for x in FAULTS_OF_SCORES]
PLANTED += [(OF_RUNS, *x) for x in FAULTS_OF_RANGES]


@pytest.mark.parametrize(
    ("line", "text", "edit"), [(x[0], *x[2:]) for x in PLANTED], ids=[x[1] for x in PLANTED]
)
def test_a_planted_fault_is_found(line, text, edit, compiler, fixed_seed):
    variant = lined(line)
    sources = [render(step) for step in variant.steps]
    assert any(text in source for source in sources)

    def run(seed):
        return simulated(variant, seed, 3 * SHAPES, lambda source: source.replace(text, edit))

    # Each run has examples for some seeds after its own.
    check_found(run, range(fixed_seed, fixed_seed + 1000, 20))


# More blocks of keys than a thread block has threads, and more blocks of queries than a warp has.
MANY_KEYS = (Shape(64 * 34, 64 * 300, heads=1, batch=1, block=(64, 64)),)
OF_PASSES = {
    "entries of the first pass alone": ("        end += warp_sum(of_warp);\n", ""),
    "one buffer for all passes": ("listed_of_warps = next;", "listed_of_warps = of_pass_before;"),
    "the longest list of a warp": ("return warp_largest(int(load", "return value; return (int(load"),
    "counts of the first pass alone": ("key_block += kThreads) {", "key_block += 1 << 20) {"),
}


@pytest.mark.parametrize("fault", [None, *OF_PASSES])
def test_lists_of_many_blocks_of_keys(fault, compiler, fresh_seed):
    text, edit = OF_PASSES.get(fault, ("", ""))
    variant = lined("kv <= 8 * (19250 - q)")  # lists of 279 to 7 blocks
    assert fault is None or any(text in render(step) for step in variant.steps)

    def run(seed):
        return simulated(variant, seed, MANY_KEYS, lambda x: x.replace(text, edit) if fault else x)

    if fault is None:
        assert all(example.judge().ok for example in run(fresh_seed))
    else:
        check_found(run, range(fresh_seed, fresh_seed + 20))


FALL = {
    "elements that fall within a block alone": (
        "min(key + 1, params.seqlen_kv - 1)",
        "min(key + 1, last_key)",
    ),
    "falls of the last block of a thread alone": ("falls |= load_global_32", "falls = load_global_32"),
    "falls of the last warp alone": ("return block_sum(falls, words) != 0;", "return warp_sum(falls) != 0;"),
}


@pytest.mark.parametrize("fault", [None, *FALL])
def test_one_fall_between_blocks_leaves_no_runs(fault, compiler, fresh_seed):
    variant = lined("documents_full")
    text, edit = FALL.get(fault, ("", ""))
    sources = {step.name: render(step) for step in variant.steps}
    assert any(text in source for source in sources.values())
    libraries = [
        load(source.replace(text, edit) if fault else source, name) for name, source in sources.items()
    ]
    example = make(variant, Shape(64, 64 * 300, heads=1, batch=1, block=(64, 64)), fresh_seed)
    doc = example.arrays[-1]
    doc[:], doc[..., :128], doc[..., 0] = 1, 2, 0  # no other element falls
    run_steps(libraries, variant, example, seed=fresh_seed)
    table = example.problem.block_lists.table(64)
    assert example.judge().ok is (fault is None)
    first_begin = table.of_queries(example.arrays[0][0, 0])[0, 0, 0]
    assert fault is not None or first_begin == BY_ELEMENT
