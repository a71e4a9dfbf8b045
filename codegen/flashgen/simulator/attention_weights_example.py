"""Random problems of attention_weights for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import widened
from flashgen.operators.reference import attention
from flashgen.operators.weights import normalise
from flashgen.operators.weights_reference import judge
from flashgen.simulator import randomarrays
from flashgen.simulator.attention_example import check_sizes, described, masked, sizes_of_scores
from flashgen.simulator.example import PlainExample, random_rows, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.weights import WeightsProblem
    from flashgen.simulator.example import Shape


def make(variant: Variant, shape: Shape, seed: int) -> PlainExample:
    """Normal random q and k for ``variant``, with the LSE of float64; weights, and what is between rows, are
    NaN. head_dim_v, return_lse and splits of ``shape`` have no effect.

    Raises BadParam for sizes that are not the variant's, and what the contract raises.
    """
    rng = np.random.default_rng(seed)
    head_dim, _, kv_heads = check_sizes(variant, shape)
    q = random_rows(
        rng, (shape.batch, shape.seqlen_q, shape.heads, head_dim), variant.dtype, shape.spread, shape.gap
    )
    k = random_rows(rng, (shape.batch, shape.seqlen_kv, kv_heads, head_dim), variant.dtype, 1.0, shape.gap)
    mask = randomarrays.random_mask(rng, shape) if variant.mask_type == "dense" else None
    lse = np.zeros((shape.batch, shape.heads, shape.seqlen_q), np.float32)
    weights = np.full((*lse.shape, shape.seqlen_kv), np.nan, np.float32)
    score_arrays = randomarrays.score_arrays_of(rng, variant.score, sizes_of_scores(shape))
    problem = normalise(
        *(view_of(x, variant.dtype) for x in (q, k)),
        view_of(lse, "fp32"),
        mask=None if mask is None else view_of(mask, "uint8"),
        weights=view_of(weights, "fp32"),
        **randomarrays.score_of_call(rng, variant.score, score_arrays),
    )
    problem = masked(problem, variant, shape)
    arrays = (q, k, mask, lse, weights, *score_arrays)
    example = PlainExample(problem, arrays, judge, described(problem, q))
    lse[...] = _lse(problem, example.named)
    return example


def _lse(problem: WeightsProblem, arrays: dict[str, np.ndarray | None]) -> np.ndarray:
    q, k = (widened(arrays[name], problem.dtype) for name in ("q", "k"))
    of_problem = problem.dtype, problem.softmax_scale, Band.of(problem), arrays["mask"]
    return attention(q, k, k, *of_problem, modification=modification_of(problem, arrays)).lse
