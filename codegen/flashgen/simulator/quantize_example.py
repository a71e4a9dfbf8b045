"""Random problems of quantize for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.operators.quantize import normalise
from flashgen.operators.quantize_reference import judge
from flashgen.simulator.example import PlainExample, random_rows, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.simulator.example import Shape

_HEAD_DIM = 128  # where the shape has none: kernels take any
_NOT_FINITE = 0.001  # share of the elements
_POISON = 0xA5


def make(variant: Variant, shape: Shape, seed: int) -> PlainExample:
    """Normal random numbers for ``variant``, some of them infinite or NaN, some rows 0. Given scales are per
    token and head, or per head, or one. Of ``shape`` keys and what belongs to them have no effect. Raises
    what the contract raises.
    """
    rng = np.random.default_rng(seed)
    width = shape.head_dim or _HEAD_DIM
    size = (shape.batch, shape.seqlen_q, shape.heads, width)
    x = random_rows(rng, size, variant.dtype, shape.spread, shape.gap)
    # The last token of the last batch entry has the largest elements: a kernel that misses it is wrong.
    numbers = widened(x, variant.dtype, np.float32)
    numbers[:, -1:] *= 2 + np.arange(shape.batch * shape.heads).reshape(shape.batch, 1, shape.heads, 1)
    strange = rng.random(size) < _NOT_FINITE
    numbers[strange] = rng.choice((np.inf, -np.inf, np.nan, 0), strange.sum())
    numbers[:, :-1][rng.random((shape.batch, shape.seqlen_q - 1, shape.heads)) < 0.1] = 0
    x[...] = bfloat16_bits(numbers) if variant.dtype == "bf16" else numbers
    per = dict(variant.axes)["per"]
    scale = None
    if per == "given":
        extents = (size[:3], (1, 1, shape.heads), (1, 1, 1))[rng.integers(3)]
        scale = np.exp(rng.normal(-3, 1, extents)).astype(np.float32)
    codes = np.full(size, _POISON, np.uint8)
    extents = {"token": size[:3], "head": (1, 1, shape.heads), "tensor": (1, 1, 1)}.get(per)
    scale_out = None if extents is None else np.full(extents, np.nan, np.float32)
    arrays = (x, scale, codes, scale_out)
    dtypes = (variant.dtype, "fp32", "e4m3", "fp32")
    views = (None if a is None else view_of(a, dtype) for a, dtype in zip(arrays, dtypes, strict=True))
    return PlainExample(normalise(*views, per=per), arrays, judge, {"shape": list(size)})
