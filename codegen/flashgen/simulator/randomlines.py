"""Random arrays and integers of masks by a line, and the lists of the blocks of such a mask."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.arguments import place
from flashgen.operators.blocklists import ARGUMENTS
from flashgen.operators.maskblocks import EMPTY, blocks_of, seen_by_groups
from flashgen.operators.rules import ENDS, NOT_PACKED, PackedTokens, RuleOfCall, sizes_of_tokens
from flashgen.operators.visibility import visibility_of
from flashgen.simulator.example import view_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.families.variant import Variant
    from flashgen.operators.attention import AttentionProblem

Arrays = dict[str, np.ndarray]


def ends_of_pack(rng: np.random.Generator, sizes: Mapping[str, int]) -> Arrays:
    """Where sequences of random lengths begin and end, by the names of the arrays; some are empty, and some
    tokens may be of none.
    """
    count = int(rng.integers(1, 7))
    ends = {}
    for name, length in zip(ENDS, ("seqlen_q", "seqlen_kv"), strict=True):
        tokens = sizes[length]
        ends[name] = np.sort(rng.integers(0, tokens + 1, count + 1)).astype(np.int32)
        if rng.random() < 0.7:
            ends[name][[0, -1]] = 0, tokens
    return ends


def bools_of(rng: np.random.Generator, extents: Sequence[int]) -> np.ndarray:
    """A random array of bools or bytes, some of them nonzero: some large boxes are all 0 or all nonzero, and
    others mixed. Rows are aligned to 16 elements, or not.
    """
    *leading, last = extents
    x = np.zeros((*leading, -(-last // 16) * 16 if rng.random() < 0.7 else last + 1), np.uint8)[..., :last]
    for _ in range(int(rng.integers(1, 12))):
        box = tuple(slice(*sorted(rng.integers(0, extent + 1, 2).tolist())) for extent in extents)
        if leading and rng.random() < 0.8:
            box = (*(slice(None) for _ in extents[:-2]), *box[-2:])
        x[box] = rng.choice([0, 1, 200]) if rng.random() < 0.7 else rng.integers(0, 2, x[box].shape)
    if extents and rng.random() < 0.3:  # one element that differs from all around it
        at = tuple(int(rng.integers(0, extent)) for extent in extents if extent)
        if len(at) == len(extents):
            x[at] = x[at] == 0
    return (x != 0) if rng.random() < 0.5 else x


def line_of(
    rng: np.random.Generator, variant: Variant, sizes: Mapping[str, int], packed: PackedTokens = NOT_PACKED
) -> tuple[dict[str, Any], Arrays]:
    """The options of a call with the mask of ``variant``, and its arrays by the names of arguments; nothing
    for a variant without one. ``packed`` says how many tokens packed sequences have.
    """
    if variant.rule is None:
        return {}, {}
    rule, length = variant.rule, sizes["seqlen_kv"]
    numbers = tuple(
        int(rng.integers(1, 41) if param.name in rule.divisors else rng.integers(-3, length + 3))
        for param in rule.scalars
    )
    symbols = {**sizes, **sizes_of_tokens(sizes, packed)}
    arrays: Arrays = {}
    ends = {} if rule.pack is None else ends_of_pack(rng, sizes)
    for param in rule.arrays:
        if param.name in ends:
            arrays[param.name] = ends[param.name]
            continue
        extents = [symbols.get(symbol) or int(rng.integers(1, 21)) for symbol in param.symbols]
        tokens = packed.of_q if param.per_token == "q" else packed.of_k
        if param.per_token is not None and tokens is not None:
            extents = extents[1:]  # tokens of a pack have no batch
        if param.is_bool:
            arrays[param.argument_name] = bools_of(rng, extents)
            continue
        largest = int(rng.choice([1, 3, length + 2]))
        elements = rng.integers(0, largest + 1, extents)
        arrays[param.argument_name] = (np.sort(elements) if rng.random() < 0.7 else elements).astype(np.int32)
    views = [view_of(x, x.dtype.name) for x in arrays.values()]
    return {"rule": RuleOfCall(rule, numbers), "rule_arrays": views}, arrays


def with_lists(
    problem: AttentionProblem, variant: Variant, arrays: Mapping[str, np.ndarray | None]
) -> tuple[AttentionProblem, Arrays]:
    """The problem of a kernel that takes the lists of a mask by a line as arguments, and these by name: made
    on the host, for the tile of the variant. Of a variant whose steps make them the problem as it is.
    """
    if problem.rule is None or any(buffer.name == "line_indptr" for buffer in variant.workspace):
        return problem, {}
    rows, keys = (int(variant.tile_value(name)) for name in ("block_m", "block_n"))
    listed = problem.with_lists(rows, keys)
    blocks = blocks_of(
        *(visibility_of(problem, arrays), problem.batch, problem.num_heads_q),
        *(problem.seqlen_q, problem.seqlen_kv, rows, keys),
    )
    lists = listed.block_lists
    table = lists.table(problem.seqlen_q)
    visibility = visibility_of(problem, arrays)
    indptr = np.zeros((lists.batch, lists.heads, table.size), np.int32)
    entries: list[int] = []
    for b, h in np.ndindex(lists.batch, lists.heads):
        ends = [len(entries)]
        for row in range(blocks.num_row_blocks):
            for begin, end, is_full in blocks.of_row(row, b, h):
                entries += [key if is_full else ~key for key in range(begin, end)]
            ends.append(len(entries))
        visible = blocks.verdicts(b, h) != EMPTY
        of_groups = seen_by_groups(visibility, blocks, b, h)
        seen = [groups[:, of_block] for groups, of_block in zip(of_groups, visible, strict=True)]
        of_rows = visibility.key_ranges(b, h, problem.seqlen_q, problem.seqlen_kv)
        table.fill(indptr[b, h], np.array(ends), np.diff(ends), np.array(entries, np.int32), of_rows, seen)
    lists_by_name = {"block_indptr": indptr, "block_indices": np.array(entries, np.int32)}
    listed = dataclasses.replace(listed, block_lists=lists._replace(entries=len(entries)))
    strides = list(listed.strides)
    for argument in ARGUMENTS:
        view = view_of(lists_by_name[argument.name], "int32")
        position = listed.operator.position(argument.name)
        strides[position] = place(argument, view, listed.sizes, listed.dtype).strides
    return dataclasses.replace(listed, strides=tuple(strides)), lists_by_name
