"""How many bytes the kernels of one algorithm read and write in global memory.

What counts is what threads and TMA ask for: each load and store, whether L2 has it or not. All heads of a
case move the same, so one is looked at. The simulator counts it where that takes seconds. For longer
sequences there is a formula for each algorithm, which counts exactly what the simulator does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.families.load import load_specs
from flashgen.families.selection import find_one
from flashgen.simulator import hostcompiler
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.tools.bench.cases import Case

__all__ = ["moved"]

# Scores of a head that the simulator goes through in a few seconds.
MOST_SCORES = 1 << 20


def moved(case: Case, name: str) -> tuple[int, str]:
    """Bytes that the call of the variant called ``name`` moves, and what says so: ``simulator`` or
    ``formula``.
    """
    specs = load_specs()
    variant = find_one([variant for spec in specs for variant in spec.variants()], name)
    (algorithm,) = (spec.algorithm for spec in specs if spec.name == variant.spec)
    heads = case.batch * case.num_heads_q
    if case.seqlen_q * case.seqlen_kv <= MOST_SCORES and not hostcompiler.why_unavailable():
        return heads * counted(case, variant), "simulator"
    return heads * FORMULAS[algorithm](case, variant), "formula"


def counted(case: Case, main: Variant) -> int:
    """What one head of the case moves, as the simulator counts it."""
    shape = Shape(
        case.seqlen_q, case.seqlen_kv, 1, head_dim=case.head_dim, head_dim_v=case.width_v, return_lse=False
    )
    libraries = [load(render(step), step.name) for step in main.steps]
    reports = run_steps(libraries, main, make(main, shape, seed=0))
    return sum(r.counters["global_bytes_read"] + r.counters["global_bytes_written"] for r in reports)


def flash(case: Case, variant: Variant) -> int:
    """v2 and v3: Q is read and O written once, K and V are read once for each tile of rows that sees them."""
    keys = sum(keys for _, keys in _tiles(case, variant, variant.tile_value("block_n")))
    return (case.seqlen_q + keys) * _widths(case) * variant.element_bytes


def naive(case: Case, variant: Variant) -> int:
    """S is written once and read twice, P written and read once; K is read once for each tile of rows that
    sees it, V once for each. Each row of O asks four times for its sum.
    """
    tiles = _tiles(case, variant, variant.tile_value("block_n"))
    scores = case.seqlen_q * (-(-case.seqlen_kv // 8) * 8)
    q_and_out = case.seqlen_q * _widths(case)
    k, v = sum(keys for _, keys in tiles) * case.head_dim, len(tiles) * case.seqlen_kv * case.width_v
    return (q_and_out + k + v + 2 * scores) * variant.element_bytes + 3 * 4 * scores + 20 * case.seqlen_q


def v1(case: Case, variant: Variant) -> int:
    """K and V are read once. Q is read, and O, l and m are read and written, for each pair of a KV block and
    a Q block that sees it; O, l and m once more when they are set up and when they become the output. A quad
    asks four times for l and m.
    """
    size = variant.element_bytes
    block_n, block_m = variant.tile_value("block_n"), variant.tile_value("block_m")
    tiles = _tiles(case, variant, block_n, block_m)
    read, written = 4 * case.width_v + 32, 4 * case.width_v + 8  # of a row of O, l and m
    visits = sum(rows * -(-keys // block_n) for rows, keys in tiles)
    keys = max((keys for _, keys in tiles), default=0)
    return (
        keys * _widths(case) * size
        + visits * (case.head_dim * size + read + written)
        + case.seqlen_q * (written + read + case.width_v * size)
    )


FORMULAS = {"naive": naive, "v1": v1, "v2": flash, "v3": flash}


def _widths(case: Case) -> int:
    return case.head_dim + case.width_v


def _tiles(case: Case, variant: Variant, block_n: int, block_m: int | None = None) -> list[tuple[int, int]]:
    """For each tile of rows of a head: how many rows there are, and keys of the KV blocks that it visits."""
    block_m = variant.tile_value("block_m") if block_m is None else block_m
    unit, count = variant.grid.from_last_row, -(-case.seqlen_q // block_m)
    ahead = count * block_m - -(-case.seqlen_q // unit) * unit if unit else 0
    tiles = []
    for first in range(-ahead, case.seqlen_q, block_m):
        last = min(first + block_m, case.seqlen_q) - 1
        end = case.seqlen_kv
        if case.mask == "causal":
            end = min(end, max(0, last + case.seqlen_kv - case.seqlen_q + 1))
        tiles.append((last + 1 - max(first, 0), min(case.seqlen_kv, -(-end // block_n) * block_n)))
    return tiles
