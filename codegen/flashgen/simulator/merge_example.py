"""Random problems of merge for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.merge import MergeProblem, normalise
from flashgen.operators.merge_reference import judge
from flashgen.simulator.example import random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.reference import Verdict
    from flashgen.simulator.example import Shape

_HEAD_DIM = 128  # where the shape has none: kernels take any
_EMPTY = 0.1  # share of the rows of a part that saw no key


@dataclass(frozen=True)
class MergeExample:
    """A problem with its arrays in host memory. bfloat16 elements are their bits in uint16."""

    problem: MergeProblem
    o1: np.ndarray
    lse1: np.ndarray
    o2: np.ndarray
    lse2: np.ndarray
    out: np.ndarray
    lse: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.o1, self.lse1, self.o2, self.lse2, self.out, self.lse

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        problem = self.problem
        return {"shape": [problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim_v]}

    def judge(self) -> Verdict:
        """How far the outputs are from float64."""
        return judge(self.problem, *self.arrays)


def make(variant: Variant, shape: Shape, seed: int) -> MergeExample:
    """Normal random parts for ``variant``, their LSEs ``shape.spread`` times as wide; outputs, and what lies
    between rows, are NaN. Of ``shape`` keys and what belongs to them have no say.

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
    out, lse_out = (
        rows_within_nan(size, variant.dtype, shape.gap),
        np.full(parts[1].shape, np.nan, np.float32),
    )
    dtypes = (variant.dtype, "fp32") * 3
    arrays = (*parts, out, lse_out)
    views = [view_of(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
    return MergeExample(normalise(*views), *arrays)
