"""Random problems of attention of e4m3 codes for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.arguments import ROW_ALIGNMENT
from flashgen.operators.fp8 import CODES, OUT_DTYPES, SCALES, arrays_of_sequence, normalise
from flashgen.operators.fp8_reference import judge
from flashgen.simulator import randomarrays, randomlines, randomlists
from flashgen.simulator.attention_example import (
    AttentionExample,
    check_sizes,
    expected_keys,
    inputs_read,
    masked,
    random_sequences,
    sizes_of_scores,
    window_for,
    worst_of_sequences,
)
from flashgen.simulator.example import random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.reference import Verdict
    from flashgen.simulator.example import Shape

# The dimensions of v in memory where its tokens are contiguous, which is its own inverse.
_BY_COLUMNS = (0, 3, 2, 1)


class Fp8Example(AttentionExample):
    """A problem with its arrays in host memory; codes are bytes, bfloat16 elements their bits."""

    def judge(self) -> Verdict:
        """How far the outputs are from float64."""
        problem, arrays = self.problem, self._without_lengths
        if problem.lengths is None:
            return judge(problem, arrays)
        return worst_of_sequences(problem, self.lengths, arrays, arrays_of_sequence, judge)


def make(variant: Variant, shape: Shape, seed: int) -> Fp8Example:
    """Codes of normal random numbers for ``variant``, and random scales of some of q, k and v, of the tensor,
    of heads, or of batch entries and heads. Outputs, and what is between rows, are NaN. Sequences are as in
    `attention_example.make`.

    Raises BadParam for sizes that are not the variant's, and what the contract raises.
    """
    rng = np.random.default_rng(seed)
    by_columns = variant.axis("v_layout") == "vt"
    if by_columns:
        shape = _with_whole_tokens(variant, shape)
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    of_codes = variant.axis("out_codes") == "codes"
    out_dtype = CODES if of_codes else str(rng.choice(OUT_DTYPES[:2]))
    lengths: dict[str, np.ndarray | None] = {}
    options: dict[str, Any] = {}
    if variant.has_lengths:
        q, k, v, out, lse, lengths, *_ = random_sequences(rng, variant, shape, "e4m3", out_dtype)
        options = {"window_size": window_for(variant, shape), "max_seqlen_kv": expected_keys(rng, shape)}
        if variant.mask_type == "dense":  # a mask has a column for each key of that many
            options["max_seqlen_kv"] = shape.seqlen_kv
        if variant.score is not None:  # its arrays may have an element for each query or key
            options |= {"max_seqlen_q": shape.seqlen_q, "max_seqlen_kv": shape.seqlen_kv}
    else:
        q, k = (
            random_rows(rng, (shape.batch, seqlen, heads, head_dim), "e4m3", spread, shape.gap)
            for seqlen, heads, spread in (
                (shape.seqlen_q, shape.heads, shape.spread),
                (shape.seqlen_kv, kv_heads, 1.0),
            )
        )
        of_v = (shape.batch, shape.seqlen_kv, kv_heads, head_dim_v)
        in_memory = tuple(of_v[dimension] for dimension in (_BY_COLUMNS if by_columns else range(4)))
        v = random_rows(rng, in_memory, "e4m3", 1.0, shape.gap)
        v = v.transpose(_BY_COLUMNS) if by_columns else v
        out = rows_within_nan((*q.shape[:-1], head_dim_v), out_dtype, shape.gap)
        size = (shape.batch, shape.heads, shape.seqlen_q)
        lse = np.full(size, np.nan, np.float32) if shape.return_lse else None
    mask = randomarrays.random_mask(rng, shape) if variant.mask_type == "dense" else None
    others = {name: _scale(rng, shape.batch, _heads(rng, name, shape.heads, kv_heads)) for name in SCALES}
    if of_codes:
        others["out_scale"] = _scale(rng, shape.batch, shape.heads)
    others = {name: scale for name, scale in others.items() if scale is not None}
    others |= inputs_read(rng, variant, shape)
    lists, block_size = randomlists.lists_of(rng, variant, shape, kv_heads)
    line, of_line = randomlines.line_of(rng, variant, sizes_of_scores(shape))
    others |= lists
    score_arrays = randomarrays.score_arrays_of(rng, variant.score, sizes_of_scores(shape))
    problem = normalise(
        *(view_of(x, "e4m3") for x in (q, k, v)),
        **{name: None if x is None else view_of(x, "int32") for name, x in lengths.items()},
        mask=None if mask is None else view_of(mask, "uint8"),
        out=view_of(out, out_dtype),
        return_lse=shape.return_lse,
        accumulate=variant.axis("accumulate"),
        **options,
        **block_size,
        **line,
        **randomarrays.array_views(others),
        **randomarrays.score_of_call(rng, variant.score, score_arrays),
    )
    problem, lists = randomlines.with_lists(masked(problem, variant, shape), variant, of_line)
    others |= of_line | lists
    lengths = {name: x for name, x in lengths.items() if name in problem.operator.positions}
    return Fp8Example(problem, q, k, v, mask, out, lse, score_arrays, lengths, others)


def _with_whole_tokens(variant: Variant, shape: Shape) -> Shape:
    """A shape near this one for a v whose tokens are contiguous: the keys, and the first key that a window
    shows, are multiples of 16.
    """
    keys = shape.seqlen_kv + -shape.seqlen_kv % ROW_ALIGNMENT
    shape = dataclasses.replace(shape, seqlen_kv=keys)
    if shape.window is None and variant.mask_type != "local":
        return shape
    left, right = window_for(variant, shape)
    if left >= 0:
        left += -(shape.seqlen_q + left) % ROW_ALIGNMENT
    return dataclasses.replace(shape, window=(left, right))


def _heads(rng: np.random.Generator, name: str, heads: int, kv_heads: int) -> int:
    """How many heads have a scale of their own: of q its heads, or kv heads."""
    return heads if name == "q_scale" and rng.integers(2) else kv_heads


def _scale(rng: np.random.Generator, batch: int, heads: int) -> np.ndarray | None:
    """A scale of up to ``batch`` entries and ``heads``, or none; from 1/2 to 2."""
    shapes = (None, (1,), (heads,), (batch, heads), (batch, heads))
    shape = shapes[rng.integers(len(shapes))]
    return None if shape is None else np.exp2(rng.uniform(-1, 1, shape)).astype(np.float32)
