"""Random problems of the lists of a mask by a line, and the lists that the CPU's verdicts make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.blocklists import LINE_SIDES, SIDES
from flashgen.operators.linetable import GROUP_ROWS
from flashgen.operators.maskblocks import FULL, blocks_of, seen_by_groups
from flashgen.operators.masklists import ARGUMENTS, normalise
from flashgen.operators.masks import Band
from flashgen.operators.reference import Verdict, largest
from flashgen.operators.rules import RuleOfCall, loads_by, sizes_of_tokens
from flashgen.operators.visibility import visibility_on_host
from flashgen.simulator.example import PlainExample, view_of
from flashgen.simulator.randomlines import bools_of, ends_of_pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.families.variant import Variant
    from flashgen.operators.masklists import MaskListsProblem
    from flashgen.operators.rules import Rule
    from flashgen.simulator.example import Shape

# What outputs hold before a call, and after it where no list has an entry.
UNUSED = -(2**31)
# Extents of dimensions that are an array's own.
_TABLE_EXTENT = 5
# Share of the problems whose lists may have more entries than there is room for.
_SHORT = 0.3


def judge(problem: MaskListsProblem, arrays: Mapping[str, np.ndarray]) -> Verdict:
    """How many elements differ from the lists that the CPU makes: all bits must be equal."""
    right = lists_on_host(problem, arrays)
    differs = np.concatenate([(arrays[name] != right[name]).ravel() for name in right])
    return Verdict(largest(differs.astype(np.float64), *np.zeros((2, differs.size))))


def make(variant: Variant, shape: Shape, seed: int) -> PlainExample:
    """Random arrays for the line of ``variant``, sorted or not, and blocks and room of random sizes; the
    window of ``shape`` is beside the line. Raises what the contract raises.
    """
    rng = np.random.default_rng(seed)
    rule = variant.rule
    if rule is None:
        from flashgen.families.masks import rule_of_line

        rule = rule_of_line("kv <= q")  # as kernels without a line have it
    numbers = tuple(int(rng.integers(1, 50)) for _ in rule.scalars)
    sizes = {"batch": shape.batch, "num_heads_q": shape.heads}
    sizes |= {"seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}
    ends = {} if rule.pack is None else ends_of_pack(rng, sizes)
    inputs = [
        ends[param.name] if param.name in ends else _elements(rng, rule, param, sizes)
        for param in rule.arrays
    ]
    block = shape.block or (int(rng.choice(LINE_SIDES)), int(rng.choice(SIDES)))
    options = {
        "rule": RuleOfCall(rule, numbers),
        "batch": shape.batch,
        "num_heads": shape.heads,
        "seqlen_q": shape.seqlen_q,
        "seqlen_kv": shape.seqlen_kv,
        "block": block,
        "window": shape.window or (-1, -1),
    }
    if rng.random() < _SHORT:
        blocks = -(-shape.seqlen_q // block[0]) * -(-shape.seqlen_kv // block[1])
        options["entries"] = int(rng.integers(0, blocks // 2 + 1))
    problem = normalise(rule_arrays=[view_of(x, x.dtype.name) for x in inputs], **options)
    outputs = [np.full(x.extents(problem.sizes), UNUSED, np.int32) for x in ARGUMENTS]
    return PlainExample(problem, (*outputs, *inputs), judge, dict(problem.sizes))


def _elements(rng: np.random.Generator, rule: Rule, param: Any, sizes: Mapping[str, int]) -> np.ndarray:
    """An array of the line, with elements near positions: sorted, or in any order."""
    extents_of = {**sizes, **sizes_of_tokens(sizes)}
    extents = [extents_of.get(symbol, _TABLE_EXTENT) for symbol in param.symbols]
    if param.is_bool:
        return bools_of(rng, extents)
    numbers = rng.integers(-2, max(4, sizes["seqlen_kv"] // int(rng.integers(1, 80))), extents)
    if rng.random() < 0.7:
        numbers = np.sort(numbers, -1)
    return numbers.astype(np.int32)


def lists_on_host(problem: MaskListsProblem, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the kernels write to outputs that held UNUSED, by name: from the verdicts of `maskblocks`, and the
    band of the problem.
    """
    lists, sizes = problem.block_lists, problem.sizes
    tables = {param.name: arrays[param.argument_name] for param in problem.rule.rule.arrays}
    visibility = visibility_on_host(problem.rule, tables, sizes)
    blocks = blocks_of(
        visibility, lists.batch, lists.heads, problem.seqlen_q, problem.seqlen_kv, lists.rows, lists.keys
    )
    indptr, indices, totals = (np.full(x.extents(sizes), UNUSED, np.int32) for x in ARGUMENTS)
    room = lists.entries // (lists.batch * lists.heads)
    table = lists.table(problem.seqlen_q)
    for number, (b, h) in enumerate(np.ndindex(*totals.shape)):
        verdicts = blocks.verdicts(b, h)
        of_groups = seen_by_groups(visibility, blocks, b, h)
        seen = [_seen(problem, i, verdicts[i], groups) for i, groups in enumerate(of_groups)]
        rows = [_entries(problem, i, row) for i, row in enumerate(verdicts)]
        counts = np.array([*map(len, rows)], int)
        ends = np.cumsum([0, *counts])
        entries = np.concatenate([np.zeros(0, np.int32), *rows])[:room]
        indices[number * room : number * room + len(entries)] = entries
        totals[b, h] = ends[-1]
        of_rows = visibility.key_ranges(b, h, problem.seqlen_q, problem.seqlen_kv)
        table.fill(indptr[b, h], number * room + np.minimum(ends, room), counts, indices, of_rows, seen)
    return {"line_indptr": indptr, "line_indices": indices, "line_totals": totals}


def _entries(problem: MaskListsProblem, i: int, verdicts: np.ndarray) -> np.ndarray:
    """The entries of a block of queries."""
    lists, band = problem.block_lists, Band.of(problem)
    rows = i * lists.rows, min((i + 1) * lists.rows, problem.seqlen_q)
    every = band.keys_of_every(*rows, problem.seqlen_kv)
    first = np.arange(len(verdicts)) * lists.keys
    end = np.minimum(first + lists.keys, problem.seqlen_kv)
    listed = np.flatnonzero(_in_band(problem, rows, verdicts > 0)).astype(np.int32)
    is_full = (verdicts == FULL) & (first >= every[0]) & (end <= every[1])
    return np.where(is_full[listed], listed, ~listed)


def _seen(problem: MaskListsProblem, i: int, verdicts: np.ndarray, of_groups: np.ndarray) -> np.ndarray:
    """Which entries of a block of queries the groups of its rows see."""
    begin, end = i * problem.block_lists.rows, min((i + 1) * problem.block_lists.rows, problem.seqlen_q)
    listed = _in_band(problem, (begin, end), verdicts > 0)
    if loads_by(problem.rule.rule, "block"):
        return of_groups[:, listed]  # the verdict of the block, the band included
    for group, first in enumerate(range(begin, end, GROUP_ROWS)):
        rows = first, min(first + GROUP_ROWS, end)
        of_groups[group] = _in_band(problem, rows, of_groups[group])
    return of_groups[:, listed]


def _in_band(problem: MaskListsProblem, rows: tuple[int, int], seen: np.ndarray) -> np.ndarray:
    """Which of some blocks of keys are in the range of keys of these rows as well."""
    lists = problem.block_lists
    some = Band.of(problem).keys_of_some(*rows, problem.seqlen_kv)
    first = np.arange(len(seen)) * lists.keys
    end = np.minimum(first + lists.keys, problem.seqlen_kv)
    return seen & (end > some[0]) & (first < some[1])
