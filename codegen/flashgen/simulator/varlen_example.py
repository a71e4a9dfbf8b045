"""Random problems of ``varlen`` for one variant, in memory where all that is no sequence's is NaN."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators.arguments import Expected
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.reference import Largest, Verdict, judge
from flashgen.operators.sequences import sequences
from flashgen.operators.splits import AUTO
from flashgen.operators.varlen import LENGTH_ARRAYS, VARLEN, VarlenProblem, normalise
from flashgen.simulator.attention_example import (
    check_sizes,
    random_mask,
    score_arrays_of,
    score_scalars_of,
    score_views,
)
from flashgen.simulator.example import random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.splits import Splits
    from flashgen.simulator.example import Shape, Window

# Entries of a page table that no length reaches.
_GARBAGE = 1 << 30
# Rows of a packed array behind its last sequence, at most.
_MOST_BEHIND = 3
_PAGE_SIZES = (1, 3, 16, 48, 64, 256)
_MASK = VARLEN.arguments[VARLEN.position("mask")]
# Of a variant for calls that say a number, where the shape says none.
_SPLITS = 3


@dataclass(frozen=True)
class VarlenExample:
    """A problem with its arrays in host memory. bfloat16 elements are their bits in uint16."""

    problem: VarlenProblem
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: dict[str, np.ndarray | None]
    out: np.ndarray
    lse: np.ndarray | None
    mask: np.ndarray | None = None
    score_arrays: tuple[np.ndarray, ...] = ()

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        lengths = (self.lengths[name] for name in LENGTH_ARRAYS)
        return self.q, self.k, self.v, *lengths, self.mask, self.out, self.lse, *self.score_arrays

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        problem = self.problem
        return {
            "shape": list(self.q.shape),
            "head_dim_v": problem.head_dim_v,
            "seqlen_kv": problem.seqlen_kv,
            "num_heads_kv": problem.num_heads_kv,
            "sequences": problem.batch,
        }

    def judge(self) -> Verdict:
        """How far the outputs are from float64: the worst of all sequences. What belongs to none of them must
        be as it was, NaN.
        """
        problem = self.problem
        q, out = (x[None] if problem.packed_q else x for x in (self.q, self.out))
        k, v = (x[None] if problem.packed_kv else x for x in (self.k, self.v))
        lse = self.lse[None] if problem.packed_q and self.lse is not None else self.lse
        of_score = list(zip(problem.score.arrays if problem.score else (), self.score_arrays, strict=True))
        mask = None if self.mask is None else np.broadcast_to(self.mask, _MASK.extents(problem.sizes))
        worst, untouched = [], np.ones(out.shape[:2], bool)
        for each in sequences(problem, self.lengths):
            own = problem.of_sequence(each.q_length, each.kv_length)
            entry, rows = each.queries()
            untouched[entry, rows] = False
            arrays = (q[entry, rows][None], each.keys(k)[None], each.keys(v)[None])
            own_lse = None if lse is None else lse[entry, :, rows][None]
            cut = {
                "batch": slice(each.number, each.number + 1),
                "seqlen_q": slice(each.q_length),
                "seqlen_kv": slice(each.kv_length),
            }
            tables = [x[tuple(cut.get(symbol, slice(None)) for symbol in p.symbols)] for p, x in of_score]
            own_mask = None if mask is None else mask[each.number, ..., : each.kv_length][None]
            worst.append(judge(own, *arrays, own_mask, out[entry, rows][None], own_lse, *tables))
        left = np.ascontiguousarray(out)[untouched].view(np.uint8)
        if not (left == 0xFF).all():
            worst.append(Verdict(Largest(np.inf, np.nan, 0.0, ()), None))
        found_lse = [each.lse for each in worst if each.lse is not None]
        nothing = Largest(0.0, 0.0, 0.0, ())
        return Verdict(
            max((each.out for each in worst), key=lambda x: x.share, default=nothing),
            max(found_lse, key=lambda x: x.share, default=nothing) if lse is not None else None,
        )


def make(variant: Variant, shape: Shape, seed: int) -> VarlenExample:
    """Normal random inputs for ``variant``, sequences of random lengths up to those of ``shape``, the first
    of which has these. Queries and keys are packed or padded, as the seed will, or padded with a dense mask.
    The kernel may be chosen by fewer keys than sequences have, as the seed will. Outputs, what lies between
    rows, packed rows behind the last sequence, slots past a length and pages of no sequence are NaN, and
    entries of the page table past a length are garbage.

    Raises BadParam for sizes that are not the variant's, and for a diagonal that starts top left; and what
    the contract raises.
    """
    rng = np.random.default_rng(seed)
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    batch, dtype = shape.batch, variant.dtype
    q_lengths, kv_lengths = (random_lengths(rng, batch, most) for most in (shape.seqlen_q, shape.seqlen_kv))
    lengths: dict[str, np.ndarray | None] = dict.fromkeys(LENGTH_ARRAYS)
    dense = variant.mask_type == "dense"
    packed_q = bool(rng.integers(2)) and not dense
    if packed_q:
        lengths["cu_seqlens_q"] = boundaries(q_lengths)
        q_rows, used = _packed(rng, q_lengths)
    else:
        q_rows, used = (batch, shape.seqlen_q), None
    q = _rows(rng, (*q_rows, shape.heads, head_dim), used, dtype, shape.spread, shape.gap)
    if "paged" in dict(variant.axes).values():
        boxes = [param.box.rows for param in variant.params if param.name == "k" and param.box]
        sizes = [size for size in _PAGE_SIZES if not any(size % rows for rows in boxes)]
        kv_rows, used = _paged(rng, lengths, kv_lengths, sizes)
    elif rng.integers(2) and not dense:
        lengths["cu_seqlens_kv"] = boundaries(kv_lengths)
        kv_rows, used = _packed(rng, kv_lengths)
    else:
        kv_rows, used = _cache(rng, lengths, kv_lengths, shape)
    k, v = (
        _rows(rng, (*kv_rows, kv_heads, width), used, dtype, 1.0, shape.gap)
        for width in (head_dim, head_dim_v)
    )
    out = rows_within_nan((*q_rows, shape.heads, head_dim_v), dtype, shape.gap)
    lse = np.full((q_rows[0], shape.heads, q_rows[1]), np.nan, np.float32) if shape.return_lse else None
    if packed_q:
        q, out, lse = q[0], out[0], None if lse is None else lse[0]
    if lengths["cu_seqlens_kv"] is not None:
        k, v = k[0], v[0]
    sizes = {
        "batch": batch,
        "num_heads_q": shape.heads,
        "seqlen_q": shape.seqlen_q,
        "seqlen_kv": shape.seqlen_kv,
    }
    score_arrays = score_arrays_of(rng, variant.score, sizes)
    # What an array has an element for: of a call without bounds the operator takes larger ones.
    bounded = {
        symbol for param in (variant.score.arrays if variant.score else ()) for symbol in param.symbols
    }
    mask = random_mask(rng, shape) if dense else None
    fixed = variant.axis("splits") == "fixed" and shape.splits == AUTO
    splits = _SPLITS if fixed else shape.splits
    problem = normalise(
        *(view_of(x, dtype) for x in (q, k, v)),
        **{name: None if x is None else view_of(x, "int32") for name, x in lengths.items()},
        mask=None if mask is None else view_of(mask, "uint8"),
        out=view_of(out, dtype),
        window_size=window_for(variant, shape),
        max_seqlen_q=shape.seqlen_q if (packed_q and splits != AUTO) or "seqlen_q" in bounded else None,
        max_seqlen_kv=shape.seqlen_kv
        if dense or "seqlen_kv" in bounded
        else expected_keys(rng, shape, splits),
        return_lse=shape.return_lse,
        splits=splits,
        score=variant.score,
        score_arrays=score_views(score_arrays),
        score_scalars=score_scalars_of(rng, variant.score),
    )
    problem = masked(problem, variant, shape)
    return VarlenExample(problem, q, k, v, lengths, out, lse, mask, score_arrays)


def expected_keys(rng: np.random.Generator, shape: Shape, splits: Splits = AUTO) -> Expected | None:
    """A bound of keys that is smaller than ``shape.seqlen_kv`` and must cut no key; None for no bound."""
    return Expected(int(rng.integers(shape.seqlen_kv + 1))) if splits == AUTO and rng.integers(2) else None


def window_for(variant: Variant, shape: Shape) -> Window:
    """The window of a call for ``variant``. Raises BadParam for a diagonal that starts top left."""
    if shape.top_left:
        raise BadParam(
            f"{variant.name} takes sequences of several lengths, whose diagonals end bottom right; "
            "causal_top_left does not fit"
        )
    if variant.mask_type == "local":
        return shape.window or (max(1, shape.seqlen_kv // 4), 0)
    if variant.mask_type == "causal":
        return (-1, 0)
    return shape.window or (-1, -1)


def masked(problem: VarlenProblem, variant: Variant, shape: Shape) -> VarlenProblem:
    """The problem with the variant's own mask type, even where a simpler kernel would hide the same keys."""
    if problem.mask_type == variant.mask_type:
        return problem
    right = window_for(variant, shape)[1]
    return dataclasses.replace(
        problem,
        mask_type=variant.mask_type,
        diagonal_offset=problem.seqlen_kv - problem.seqlen_q,
        window_right=UNBOUNDED if right < 0 else right,
    )


def random_lengths(rng: np.random.Generator, batch: int, most: int) -> np.ndarray:
    """The first is ``most``; of the others some are 0 and some 1."""
    found = rng.integers(0, most + 1, batch)
    found[rng.random(batch) < 0.15] = 0
    found[rng.random(batch) < 0.15] = min(1, most)
    found[:1] = most
    return found


def boundaries(lengths: np.ndarray) -> np.ndarray:
    """Where packed sequences of these lengths begin and end."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _packed(rng: np.random.Generator, lengths: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
    """Packed sequences, with a few rows behind the last one. Returns entries and their rows, and which are
    used.
    """
    total = int(lengths.sum())
    used = np.arange(total + int(rng.integers(_MOST_BEHIND + 1)))[None] < total
    return used.shape, used


def _paged(
    rng: np.random.Generator, lengths: dict[str, np.ndarray | None], kv_lengths: np.ndarray, sizes: list[int]
) -> tuple[tuple[int, int], np.ndarray]:
    """Pages of one of the ``sizes`` in random order, one of them nobody's. Returns pages and their size, and
    which slots are used.
    """
    size = int(rng.choice(sizes))
    counts = -(-kv_lengths // size)
    order = rng.permutation(int(counts.sum()) + 1)
    table = np.full((len(kv_lengths), max(1, int(counts.max(initial=0)))), _GARBAGE, np.int32)
    used, first = np.zeros((len(order), size), bool), 0
    for b, (count, length) in enumerate(zip(counts, kv_lengths, strict=True)):
        table[b, :count] = order[first : first + count]
        slots = np.arange(length)
        used[table[b, slots // size], slots % size] = True
        first += count
    lengths["pages"], lengths["kv_lengths"] = table, kv_lengths.astype(np.int32)
    return used.shape, used


def _cache(
    rng: np.random.Generator, lengths: dict[str, np.ndarray | None], kv_lengths: np.ndarray, shape: Shape
) -> tuple[tuple[int, int], np.ndarray]:
    """Rows of a cache, as many as sequences, or more, of which an index chooses."""
    batch = len(kv_lengths)
    rows = np.arange(batch)
    if rng.integers(2):
        rows = rng.permutation(batch + 2)[:batch]
        lengths["index"] = rows.astype(np.int32)
    lengths["kv_lengths"] = kv_lengths.astype(np.int32)
    capacity = shape.seqlen_kv + int(rng.integers(3))
    used = np.zeros((batch + (2 if lengths["index"] is not None else 0), capacity), bool)
    used[rows] = np.arange(capacity) < kv_lengths[:, None]
    return used.shape, used


def _rows(
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
        x[~used] = 0xFFFF if dtype == "bf16" else np.nan
    return x
