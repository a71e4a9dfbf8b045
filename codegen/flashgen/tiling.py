"""How a variant's tiles cut a problem: rows of queries, heads of the grid, tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.problem import Problem
    from flashgen.variant import Variant

# Rows of a Hopper tile that one warpgroup computes: the rows of its matrix instruction.
WARPGROUP_ROWS = 64


def shifts(variant: Variant) -> bool:
    """Whether tiles are counted from the last row, and warpgroups pass over what only others see."""
    return any(param.name == "rows_ahead" for param in variant.params)


def rows_together(variant: Variant) -> int:
    """Rows of a tile that visit the same blocks of keys: those of a warpgroup, half of a tile whose loop
    says so, or all.
    """
    if shifts(variant):
        return WARPGROUP_ROWS
    halves = dict(variant.tile).get("loop") == "halves"
    return variant.tile_value("block_m") // (2 if halves else 1)


def rows(problem: Problem, variant: Variant) -> int:
    """Rows of queries that the tiles of one (batch, head) cut: packed variants fold the group into them."""
    return problem.seqlen_q * (problem.group_size if variant.gqa == "packed" else 1)


def heads(problem: Problem, variant: Variant) -> int:
    """Heads of the grid: query heads, or kv heads where the group is folded into the rows."""
    return problem.num_heads_kv if variant.gqa == "packed" else problem.num_heads_q


def row_blocks(problem: Problem, variant: Variant) -> int:
    """Tiles of one (batch, head)."""
    return -(-rows(problem, variant) // variant.tile_value("block_m"))


def rows_ahead(problem: Problem, variant: Variant) -> int:
    """Rows of a head's first tile that lie ahead of its first row, a multiple of 64.

    Not 0 only for variants with a parameter of that name. Their tiles are counted from the last row, by whole
    warpgroups, unless a group of heads then began within one: of tiles in one place rows are missing, and the
    first has the fewest keys.
    """
    group = problem.group_size if variant.gqa == "packed" else 1
    if WARPGROUP_ROWS % group or not shifts(variant):
        return 0
    warpgroups = -(-rows(problem, variant) // WARPGROUP_ROWS)
    return row_blocks(problem, variant) * variant.tile_value("block_m") - warpgroups * WARPGROUP_ROWS


def blocks_per_sm(variant: Variant) -> int:
    """Thread blocks that a multiprocessor has room for, by the tile key ``min_blocks``, of which there may be
    more in fact; one where the spec has none.
    """
    return dict(variant.tile).get("min_blocks", 1)


def tiles(problem: Problem, variant: Variant) -> int:
    """Tiles of the grid."""
    return row_blocks(problem, variant) * heads(problem, variant) * problem.batch
