"""Keys that no query of their sequence sees, whatever a dense mask says, and what they may hold."""

import itertools

import numpy as np

from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.masks import visible_keys
from flashgen.operators.sequences import sequences
from flashgen.simulator.example import outputs

# What engines leave in pages that they recycle: all bits set, which is a NaN in each dtype, infinities, or
# the largest numbers of e4m3.
BITS = {
    "NaN": {"fp16": 0xFFFF, "bf16": 0xFFFF, "fp32": 0xFFFFFFFF, "e4m3": 0xFF},
    "Inf": {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000, "e4m3": 0x7E},
    "-Inf": {"fp16": 0xFC00, "bf16": 0xFF80, "fp32": 0xFF800000, "e4m3": 0xFE},
    "0": {"fp16": 0, "bf16": 0, "fp32": 0, "e4m3": 0},
}
# Entries of a page table: none of them is a page.
ENTRIES = {"NaN": -1, "Inf": 2**31 - 1, "-Inf": -(2**31), "0": 1 << 30}


def array(example, name):
    """One of an example's arrays by its name."""
    return example.arrays[example.problem.operator.position(name)]


def seen_rows(example):
    """Which rows of k some query sees, bool, (entries, rows); and which entries of the page table have such
    keys, None where keys do not lie in pages.
    """
    problem = example.problem
    if not problem.lengths_on_device:
        return np.broadcast_to(visible_keys(problem).any(axis=0), (problem.batch, problem.seqlen_kv)), None
    known = problem.operator.positions.keys()
    lengths = {name: array(example, name) if name in known else None for name in LENGTH_ARRAYS}
    table = lengths["pages"]
    rows = np.zeros((problem.lengths.batch_kv, problem.lengths.rows_kv), bool)
    entries = None if table is None else np.zeros(table.shape, bool)
    for each in sequences(problem, lengths):
        keys = visible_keys(problem.of_sequence(each.q_length, each.kv_length)).any(axis=0)
        if table is None:
            rows[each.kv_entry, each.kv_begin : each.kv_begin + each.kv_length] |= keys
            continue
        of_row = np.flatnonzero(keys) + each.kv_begin
        places = of_row // problem.lengths.rows_kv
        entries[each.number, places] = True
        rows[table[each.number, places], of_row % problem.lengths.rows_kv] = True
    return rows, entries


def fill(example, what):
    """Put one of BITS into all rows of k and v that no query sees, and one of ENTRIES into the page table."""
    rows, entries = seen_rows(example)
    for name in ("k", "v"):
        x = array(example, name)
        memory = x.view(f"u{x.itemsize}")
        memory = memory if memory.ndim == 4 else memory[None]
        memory[~rows] = BITS[what]["e4m3" if x.itemsize == 1 else example.problem.dtype]
    if entries is not None:
        array(example, "pages")[~entries] = ENTRIES[what]


def bits_of_outputs(example):
    return [np.ascontiguousarray(x).tobytes() for x in outputs(example)]


def reset(example):
    """Make all outputs NaN."""
    for x in outputs(example):
        x.view(f"u{x.itemsize}")[...] = np.iinfo(f"u{x.itemsize}").max


def differing(example, run):
    """What, of BITS, changes the bits of a result that ``run(example)`` leaves in the outputs where no query
    sees it. AssertionError unless the result is right where unseen keys are 0, and there are such keys.
    """
    rows, _ = seen_rows(example)
    assert not rows.all()
    found = {}
    for what in reversed(BITS):
        fill(example, what)
        reset(example)
        run(example)
        found[what] = bits_of_outputs(example)
        if what == "0":
            verdict = example.judge()
            assert verdict.ok, verdict
    return [what for what, bits in found.items() if bits != found["0"]]


def example_where(make, accepts, seed):
    """The first of the examples of ``make(seed)``, ``make(seed + 1)``, ... that is accepted."""
    return next(each for each in map(make, itertools.count(seed)) if accepts(each))
