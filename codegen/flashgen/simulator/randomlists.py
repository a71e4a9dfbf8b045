"""Random lists of key blocks, in memory whose gaps are no blocks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.blocklists import NAMES, SIDES, BlockLists
from flashgen.schedule.dispatch import divides

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.simulator.example import Shape

# What no list may have, for elements that are in none.
_GARBAGE = 1 << 30


def block_sizes(variant: Variant) -> list[tuple[int, int]]:
    """The sizes of a caller's blocks that the tile of a variant divides. A tile of 192 rows divides none: it
    is for masks by a line, whose blocks are tiles.
    """
    return [size for size in itertools.product(SIDES, SIDES) if divides(variant, BlockLists(*size, 1, 1, 0))]


def lists_of(
    rng: np.random.Generator, variant: Variant, shape: Shape, kv_heads: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a call with lists by name, and its options; nothing for a variant that has none. Some
    lists are empty, some have all blocks, and some are shared by batch entries or heads. Of a shape without a
    size of blocks it is one that the tile of the variant divides.
    """
    if variant.mask_type != "blocks" or variant.rule is not None:
        return {}, {}
    fitting = block_sizes(variant)
    rows, keys = shape.block or fitting[rng.integers(len(fitting))]
    batch, heads = (int(rng.choice([1, count])) for count in (shape.batch, kv_heads))
    listed = rng.random((batch, heads, -(-shape.seqlen_q // rows), -(-shape.seqlen_kv // keys)))
    listed = listed < rng.choice([0.0, 0.4, 0.8, 1.0], (*listed.shape[:3], 1), p=[0.15, 0.4, 0.3, 0.15])
    indptr = np.zeros((batch, heads, listed.shape[2] + 1), np.int32)
    entries: list[int] = []
    for batch_entry, head in np.ndindex(batch, heads):
        entries += [_GARBAGE] * int(rng.integers(3))
        indptr[batch_entry, head, 0] = len(entries)
        for row, blocks in enumerate(listed[batch_entry, head]):
            entries += np.flatnonzero(blocks).tolist()
            indptr[batch_entry, head, row + 1] = len(entries)
    entries += [_GARBAGE] * int(rng.integers(3))
    indices = np.array(entries, np.int32)
    return dict(zip(NAMES, (indptr, indices), strict=True)), {"block_size": (rows, keys)}
