"""Random problems of attention_backward for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.backward import BackwardProblem, normalise
from flashgen.operators.gradients import judge
from flashgen.operators.masks import Band
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.operators.reference import attention, modification_of
from flashgen.simulator.attention_example import (
    check_sizes,
    described,
    masked,
    random_mask,
    score_arrays_of,
    score_scalars_of,
    score_views,
)
from flashgen.simulator.example import random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.gradients import GradientVerdict
    from flashgen.simulator.example import Shape


@dataclass(frozen=True)
class BackwardExample:
    """A problem with its arrays in host memory, in the operator's order. bfloat16 elements are their bits in
    uint16; mask and dlse may be None.
    """

    problem: BackwardProblem
    arrays: tuple[np.ndarray | None, ...]

    def array(self, name: str) -> np.ndarray | None:
        """One of them by its name."""
        return self.arrays[self.problem.operator.position(name)]

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        return described(self.problem)

    def judge(self) -> GradientVerdict:
        """How far the outputs are from float64."""
        return judge(self.problem, *self.arrays)


def make(variant: Variant, shape: Shape, seed: int) -> BackwardExample:
    """Normal random inputs for ``variant``, with the results that a forward call has for them; outputs, and
    what lies between rows, are NaN. ``shape.return_lse`` is whether LSE has a gradient.

    Raises as ``attention_example.make``.
    """
    rng = np.random.default_rng(seed)
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    rows = (shape.batch, shape.seqlen_q, shape.heads)
    keys = (shape.batch, shape.seqlen_kv, kv_heads)
    dtype, gap = variant.dtype, shape.gap
    q = random_rows(rng, (*rows, head_dim), dtype, shape.spread, gap)
    k = random_rows(rng, (*keys, head_dim), dtype, 1.0, gap)
    v = random_rows(rng, (*keys, head_dim_v), dtype, 1.0, gap)
    dout = random_rows(rng, (*rows, head_dim_v), dtype, 1.0, gap)
    out = rows_within_nan((*rows, head_dim_v), dtype, gap)
    dq = rows_within_nan(q.shape, dtype, gap)
    dk = rows_within_nan(k.shape, dtype, gap)
    dv = rows_within_nan(v.shape, dtype, gap)
    lse = np.empty((shape.batch, shape.heads, shape.seqlen_q), np.float32)
    dlse = rng.standard_normal(lse.shape, np.float32) if shape.return_lse else None
    mask = random_mask(rng, shape) if variant.mask_type == "dense" else None
    sizes = {"batch": shape.batch, "num_heads_q": shape.heads}
    sizes |= {"seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}
    score_arrays = score_arrays_of(rng, variant.score, sizes)
    problem = normalise(
        *(view_of(x, dtype) for x in (dout, q, k, v, out)),
        view_of(lse, "fp32"),
        mask=None if mask is None else view_of(mask, "uint8"),
        dlse=None if dlse is None else view_of(dlse, "fp32"),
        **{name: view_of(x, dtype) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))},
        deterministic=dict(variant.axes).get("dq_order") != "none",
        score=variant.score,
        score_arrays=score_views(score_arrays),
        score_scalars=score_scalars_of(rng, variant.score),
    )
    problem = masked(problem, variant, shape)
    inputs = (widened(x, dtype) for x in (q, k, v))
    modification = modification_of(problem, score_arrays)
    forward = attention(
        *inputs, dtype, problem.softmax_scale, Band.of(problem), mask, modification=modification
    )
    out[...] = bfloat16_bits(forward.out.astype(np.float32)) if dtype == "bf16" else forward.out
    lse[...] = forward.lse
    if dlse is not None:
        dlse[np.isneginf(lse)] = np.nan  # has no effect
    arrays = (dout, q, k, v, mask, out, lse, dlse, dq, dk, dv, *score_arrays)
    return BackwardExample(problem, arrays)
