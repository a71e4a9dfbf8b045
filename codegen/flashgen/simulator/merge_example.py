"""Random problems of merge for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.merge import normalise
from flashgen.operators.merge_reference import judge
from flashgen.simulator.example import PlainExample, random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.simulator.example import Shape

_HEAD_DIM = 128  # where the shape has none: kernels take any
_EMPTY = 0.1  # share of the rows of a part that saw no key


def make(variant: Variant, shape: Shape, seed: int) -> PlainExample:
    """Normal random parts for ``variant``, their LSEs ``shape.spread`` times as wide; outputs, and what lies
    between rows, are NaN. The keys of ``shape``, and what belongs to them, have no effect.

    A tenth of the rows of each part saw no key: their LSE is -inf or, as in flash-attn, +inf, and their o is
    NaN. Raises what the contract raises.
    """
    rng = np.random.default_rng(seed)
    width = shape.head_dim_v or shape.head_dim or _HEAD_DIM
    size = (shape.batch, shape.seqlen_q, shape.heads, width)
    parts: list[np.ndarray] = []
    for _ in range(2):
        o = random_rows(rng, size, variant.dtype, 1.0, shape.gap)
        lse = shape.spread * rng.standard_normal((shape.batch, shape.heads, shape.seqlen_q), np.float32)
        empty = rng.random(lse.shape) < _EMPTY
        lse[empty] = rng.choice([-np.inf, np.inf], empty.sum())
        o[empty.swapaxes(1, 2)] = 0xFFFF if variant.dtype == "bf16" else np.nan
        parts += [o, lse]
    out = rows_within_nan(size, variant.dtype, shape.gap)
    arrays = (*parts, out, np.full(parts[1].shape, np.nan, np.float32))
    dtypes = (variant.dtype, "fp32") * 3
    views = [view_of(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
    compare = lambda problem, named: judge(problem, *named.values())  # noqa: E731
    return PlainExample(normalise(*views), arrays, compare, {"shape": list(size)})
