"""A small set of variants that has every value of every axis, every tile, and all pairs of values."""

from __future__ import annotations

import heapq
from itertools import combinations
from typing import TYPE_CHECKING

from flashgen.families.load import load_specs
from flashgen.families.params import TENSOR_MAP
from flashgen.simulator.example import Shape
from flashgen.simulator.library import supports
from flashgen.simulator.randomlists import block_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flashgen.families.variant import Variant

# The shipped forward variants that calls take and that can be simulated, by name.
VARIANTS = {
    variant.name: variant
    for spec in load_specs()
    if spec.operator == "attention" and not spec.has_lengths and not spec.on_request
    for variant in spec.variants()
    if supports(variant) and variant.is_main and (variant.mask_type != "blocks" or block_sizes(variant))
}


# Decoding in clusters.
IN_CLUSTERS = "flash_decode_sm90"


# Axes, and mask types, of what a call may have besides: kernels without it are the plain ones.
FEATURES = ("sinks", "dropout", "kv_starts", "kv_dtype", "dkv_dtype")
OF_FEATURES = ("blocks", "tree")


def is_plain(variant: Variant) -> bool:
    """Whether the variant serves calls of q, k, v and a mask alone, with or without lengths."""
    values = variant.axis_values
    has_none = all(values.get(axis, "none") == "none" for axis in FEATURES)
    return has_none and variant.mask_type not in OF_FEATURES


def traits(variant: Variant) -> set[tuple]:
    """What the set must have: each tile of a target with each mask type, and for each spec all pairs of axis
    values, target, loop and name of the tile. Decoding, and sharing out keys, has one
    loop, so there a tile is needed once. Thread
    blocks of all clusters do the same with a head dim, so in clusters that is in no pair.
    """
    values = [*variant.axes, ("target", variant.target), ("loop", dict(variant.tile).get("loop"))]
    values.append(("tile_name", variant.tile_name))
    paired = values if variant.spec != IN_CLUSTERS else [x for x in values if not x[0].startswith("head_dim")]
    pairs = {(variant.spec, *pair) for pair in combinations(paired, 2)}
    one_loop = variant.spec in ("flash_decode_sm80", IN_CLUSTERS, "flash_split_sm90")
    tile = (variant.spec, variant.target, tile_of(variant), None if one_loop else variant.mask_type)
    return {*((variant.spec, x) for x in values), *pairs, tile}


def tile_of(variant: Variant) -> tuple:
    """The tile; that of a thread block alone where clusters decode."""
    return tuple(x for x in variant.tile if variant.spec != IN_CLUSTERS or x[0] != "cluster")


def work(variant: Variant) -> int:
    """How long it takes to simulate, roughly: the cheapest of equals is taken."""
    tile = variant.tile_value("block_m") * variant.tile_value("block_n")
    return tile * (variant.head_dim + variant.head_dim_v) * (3 if variant.dtype == "fp32" else 1)


def covering(variants: Iterable[Variant], traits: Callable[[Variant], set[tuple]] = traits) -> list[Variant]:
    """Greedily, the variant with the most traits that are still missing, until none is."""
    pool = sorted(variants, key=lambda variant: (work(variant), variant.name))
    wanted = [traits(variant) for variant in pool]
    # What a variant adds only becomes less, so the first of the heap is the best if its count is still right.
    # Of equals the first in the pool, which is the cheapest, comes first.
    heap = [(-len(of_variant), at) for at, of_variant in enumerate(wanted)]
    heapq.heapify(heap)
    missing = set().union(*wanted)
    chosen = []
    while missing:
        count, at = heap[0]
        adds = len(wanted[at] & missing)
        if adds == -count:
            heapq.heappop(heap)
            chosen.append(pool[at])
            missing -= wanted[at]
        else:
            heapq.heapreplace(heap, (-adds, at))
    return sorted(chosen, key=lambda variant: variant.name)


def shapes(variant: Variant) -> list[Shape]:
    """Problems for a variant: ragged tiles with short head dims, that of v the shorter; few queries on many
    keys, in a batch, with a shorter head dim than that of v; more queries than keys, some of which see none.
    """
    rows, keys = variant.tile_value("block_m"), variant.tile_value("block_n")
    step = 4 if variant.dtype == "fp32" else 8
    smaller = max((v.head_dim for v in VARIANTS.values() if v.head_dim < variant.head_dim), default=0)
    # A tensor map of packed rows needs a group that divides the tile.
    mapped = any(param.ctype == TENSOR_MAP for param in variant.params)
    heads, kv_heads = (2, 2) if variant.gqa == "mha" else (4 if mapped else 3, 1)
    window = {"window": (keys, 3)} if variant.mask_type == "local" else {}
    # A mask alone, and one together with a causal diagonal.
    beside = {"window": (-1, 0)} if variant.mask_type == "dense" else {}
    short = {"head_dim": variant.head_dim - step, "head_dim_v": variant.head_dim_v - 2 * step}
    wide = {"head_dim": smaller + step, "head_dim_v": variant.head_dim_v}
    return [
        Shape(rows // heads + 17, 2 * keys + 5, heads, kv_heads, **short, **window),
        Shape(7, 3 * keys - 1, heads, kv_heads, batch=2, **wide, mask="k", mask_alignment=1),
        Shape(
            rows // 2 + keys, keys, heads, kv_heads, mask="hqk", mask_alignment=4, return_lse=False, **beside
        ),
    ]
