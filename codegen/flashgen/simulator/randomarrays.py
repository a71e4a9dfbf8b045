"""Random inputs of attention, in memory whose gaps are NaN: masks, the arrays and numbers of score
modifications, and sequences of several lengths with the arrays that hold them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators import operator_of
from flashgen.operators.arguments import dtype_name
from flashgen.operators.dropout import NO_DROPOUT, QUERIES
from flashgen.operators.kvcodes import E4M3, SCALES
from flashgen.operators.numbers import bfloat16_bits
from flashgen.operators.scores import TYPES
from flashgen.simulator.example import ALIGNMENT, GUARD_ROWS, random_rows, view_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flashgen.families.variant import Variant
    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score
    from flashgen.simulator.example import Shape

# Entries of a page table that no length reaches.
_GARBAGE = 1 << 30


def score_arrays_of(
    rng: np.random.Generator, score: Score | None, sizes: Mapping[str, int]
) -> tuple[np.ndarray, ...]:
    """Random arrays of a score modification; a dimension of its own has 1 to 20 elements."""
    arrays = []
    for param in score.arrays if score else ():
        random_sizes = {symbol: int(rng.integers(1, 21)) for symbol in param.symbols}
        extents = tuple((random_sizes | sizes)[symbol] for symbol in param.symbols)
        if param.is_integer:
            arrays.append(rng.integers(-3, 4, extents, TYPES[param.type].dtype))
        else:
            numbers = rng.standard_normal(extents, np.float32)
            arrays.append(
                {"fp16": numbers.astype(np.float16), "bf16": bfloat16_bits(numbers)}.get(param.dtype, numbers)
            )
    return tuple(arrays)


def score_of_call(
    rng: np.random.Generator, score: Score | None, arrays: Sequence[np.ndarray]
) -> dict[str, Any]:
    """What a call says of its score modification: these arrays, and random numbers, none of them 0."""
    numbers = [
        int(rng.integers(1, 9)) if param.is_integer else float(rng.uniform(0.5, 8))
        for param in (score.scalars if score else ())
    ]
    views = [_view(x) for x in arrays]
    return {"score": score, "score_arrays": views, "score_scalars": tuple(numbers)}


def inputs_read(
    rng: np.random.Generator, variant: Variant, sizes: Mapping[str, int], others: Collection[str]
) -> dict[str, np.ndarray]:
    """Random arrays for the optional inputs but ``others`` that a kernel of ``variant`` has a pointer to."""
    pointers = {param.name for step in variant.steps for param in step.params}
    arrays = {}
    for argument in operator_of(variant.operator, variant.has_lengths).arguments:
        if argument.optional and not argument.is_output and argument.name in pointers - {*others}:
            extents = argument.extents(sizes)
            if argument.dtype(variant.dtype) == "int32":
                arrays[argument.name] = rng.integers(-3, 4, extents, np.int32)
                continue
            if argument.dtype(variant.dtype) == "int64":
                arrays[argument.name] = rng.integers(-(2**63), 2**63, extents, np.int64)
                continue
            numbers = rng.standard_normal(extents, np.float32)
            arrays[argument.name] = numbers
            if "bf16" in argument.dtypes and rng.integers(2):
                arrays[argument.name] = bfloat16_bits(numbers)
    return arrays


def scales_of(rng: np.random.Generator, variant: Variant, batch: int, heads: int) -> dict[str, np.ndarray]:
    """Random scales of k and v, (batch, heads, 1), for a variant that reads codes: of the tensor, of each
    head, of each sequence, or of each sequence and head; or none.
    """
    arrays = {}
    for name in SCALES if variant.axis("kv_dtype") == E4M3 else ():
        shapes = ((), (heads,), (batch, heads), (batch, 1))
        shape = shapes[int(rng.integers(len(shapes)))]
        scale = np.asarray(np.exp(rng.uniform(-1, 1, shape)), np.float32)
        if rng.random() < 0.8:
            arrays[name] = np.broadcast_to(scale, (batch, heads))[..., None]
    return arrays


def scales_of_tokens(
    rng: np.random.Generator, used: np.ndarray, rows: tuple[int, int], heads: int
) -> dict[str, np.ndarray]:
    """Random scales of k and v of each token and head in a cache of these ``rows``, (*rows, heads, 1); NaN
    where no sequence uses a slot. Heads may be apart in memory.
    """
    arrays = {}
    for name in SCALES:
        step = int(rng.integers(1, 3))
        memory = np.full((*rows, heads, step), np.nan, np.float32)
        scale = memory[..., :1]
        scale[...] = np.exp(rng.uniform(-1, 1, scale.shape))
        scale[~used] = np.nan
        arrays[name] = scale
    return arrays


def dropout_of_call(rng: np.random.Generator, others: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What a call with these optional inputs says of dropout: a random probability and row of its first query
    among the random numbers.
    """
    if "dropout_seed" not in others:
        return {"dropout_p": NO_DROPOUT, "dropout_row": 0}
    dropout_p = float(rng.choice((0.1, 0.25, 0.5)))
    return {"dropout_p": dropout_p, "dropout_row": QUERIES * int(rng.integers(0, 1 << 20))}


def array_views(arrays: Mapping[str, np.ndarray]) -> dict[str, ArrayView]:
    """The views of these arrays."""
    return {name: _view(x) for name, x in arrays.items()}


def _view(x: np.ndarray) -> ArrayView:
    """The view of an array; bfloat16 elements are their bits in uint16."""
    return view_of(x, "bf16" if x.dtype == np.uint16 else dtype_name(x.dtype.name))


def random_mask(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Tiles of 64x64 keys that are hidden, visible and mixed, and some rows that see nothing."""
    extents = {"b": shape.batch, "h": shape.heads, "q": shape.seqlen_q, "k": shape.seqlen_kv, "1": 1}
    size = tuple(extents[letter] for letter in shape.mask)
    rows, keys = (1, *size)[-2:]
    hidden = rng.random(size) < 0.5
    kind = rng.random((*size[:-2], -(-rows // 64), -(-keys // 64)))
    kind = kind.repeat(64, -1)[..., :keys].repeat(64, -2)[..., :rows, :].reshape(size)
    hidden = (hidden | (kind < 1 / 3)) & (kind < 2 / 3)
    if rows > 1:
        hidden |= rng.random((*size[:-1], 1)) < 0.1
    alignment = shape.mask_alignment
    stride = -(-keys // alignment) * alignment
    if alignment < 16 and stride % (2 * alignment) == 0:
        stride += alignment
    count = math.prod(size[:-1]) * stride
    drawn = rng.integers(1, 256, count + GUARD_ROWS * stride + ALIGNMENT, np.uint8)
    memory = np.empty_like(drawn)
    start = -memory.ctypes.data % ALIGNMENT
    memory[...] = np.roll(drawn, start)  # so that the mask does not depend on the address
    mask = memory[start : start + count].reshape(*size[:-1], stride)[..., :keys]
    mask[...] = np.where(hidden, mask, 0)
    return mask


def random_lengths(rng: np.random.Generator, batch: int, most: int) -> np.ndarray:
    """The first is ``most``; of the others some are 0 and some 1."""
    lengths = rng.integers(0, most + 1, batch)
    lengths[rng.random(batch) < 0.15] = 0
    lengths[rng.random(batch) < 0.15] = min(1, most)
    lengths[:1] = most
    return lengths


def random_starts(rng: np.random.Generator, kv_lengths: np.ndarray) -> np.ndarray:
    """The first key of each sequence of these lengths: of the first one in its first half, of others some are
    0, and some the length, so that no key is left.
    """
    starts = rng.integers(0, kv_lengths + 1)
    starts[rng.random(len(starts)) < 0.15] = 0
    ended = rng.random(len(starts)) < 0.15
    starts[ended] = kv_lengths[ended]
    starts[:1] = rng.integers(0, kv_lengths[:1] // 2 + 1)
    return starts.astype(np.int32)


def packed(
    rng: np.random.Generator,
    lengths: dict[str, np.ndarray | None],
    name: str,
    of_sequences: np.ndarray,
    rows_after: Sequence[int],
) -> tuple[tuple[int, int], np.ndarray]:
    """Packed sequences, with as many rows after the last one as one of ``rows_after``. ``lengths[name]``
    becomes where they begin and end. Returns entries and their rows, and which are used.
    """
    lengths[name] = np.r_[0, np.cumsum(of_sequences)].astype(np.int32)
    total = int(of_sequences.sum())
    used = np.arange(total + int(rng.choice(rows_after)))[None] < total
    return used.shape, used


def paged(
    rng: np.random.Generator, lengths: dict[str, np.ndarray | None], kv_lengths: np.ndarray, sizes: list[int]
) -> tuple[tuple[int, int], np.ndarray]:
    """Pages of one of the ``sizes`` in random order, one of them nobody's. Returns pages and their size, and
    which slots are used. Sequences begin at ``lengths["kv_starts"]``, if there is such an array.
    """
    starts = np.zeros_like(kv_lengths) if lengths["kv_starts"] is None else lengths["kv_starts"]
    size = int(rng.choice(sizes))
    counts = -(-kv_lengths // size)
    order = rng.permutation(int(counts.sum()) + 1)
    table = np.full((len(kv_lengths), max(1, int(counts.max(initial=0)))), _GARBAGE, np.int32)
    used, first = np.zeros((len(order), size), bool), 0
    for b, (count, start, length) in enumerate(zip(counts, starts, kv_lengths, strict=True)):
        table[b, :count] = order[first : first + count]
        slots = np.arange(start, length)
        used[table[b, slots // size], slots % size] = True
        table[b, : start // size] = _GARBAGE
        first += count
    lengths["pages"], lengths["kv_lengths"] = table, kv_lengths.astype(np.int32)
    return used.shape, used


def cache_rows(
    rng: np.random.Generator,
    lengths: dict[str, np.ndarray | None],
    kv_lengths: np.ndarray,
    shape: Shape,
    may_have_index: bool = True,
) -> tuple[tuple[int, int], np.ndarray]:
    """Rows of a cache, as many as sequences, or more, of which an index chooses if it ``may_have_index``.
    Sequences begin at ``lengths["kv_starts"]``, if there is such an array.
    """
    batch = len(kv_lengths)
    rows = np.arange(batch)
    if may_have_index and rng.integers(2):
        rows = rng.permutation(batch + 2)[:batch]
        lengths["index"] = rows.astype(np.int32)
    lengths["kv_lengths"] = kv_lengths.astype(np.int32)
    capacity = shape.seqlen_kv + int(rng.integers(3))
    used = np.zeros((batch + (2 if lengths["index"] is not None else 0), capacity), bool)
    used[rows] = np.arange(capacity) < kv_lengths[:, None]
    if lengths["kv_starts"] is not None:
        used[rows] &= np.arange(capacity) >= lengths["kv_starts"][:, None]
    return used.shape, used


def used_rows(
    rng: np.random.Generator,
    size: tuple[int, ...],
    used: np.ndarray | None,
    dtype: str,
    spread: float,
    gap: int,
) -> np.ndarray:
    """Rows of Q, K or V; those that are not used are NaN."""
    x = random_rows(rng, size, dtype, spread, gap)
    if used is not None:
        x[~used] = {"bf16": 0xFFFF, "e4m3": 0xFF}.get(dtype, np.nan)
    return x
