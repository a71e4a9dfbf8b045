"""The operator ``attention_weights``: the softmax of each row of scores, with all of its elements.

The log-sum-exp of each row is an input, the LSE of the forward call. So a weight follows from its own score:

    weight_ij = exp(s_ij - lse_i), and 0 where the mask hides key j from query i

A row that sees nothing has weights of 0. The result takes seqlen_q x seqlen_kv of memory for each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.operators import attention, contract
from flashgen.operators.arguments import WHOLE_FP32, Argument, check_devices
from flashgen.operators.attention import ATTENTION, SCALARS
from flashgen.operators.attention_problem import AttentionProblem
from flashgen.operators.operator import Operator, Value, by_name, extended

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score

_FORWARD = {argument.name: argument for argument in ATTENTION.without_lengths.arguments}
ARGUMENTS = (
    _FORWARD["q"]._replace(differentiable=False),
    _FORWARD["k"]._replace(differentiable=False),
    _FORWARD["mask"],
    _FORWARD["lse"]._replace(role="input", optional=False),
    Argument("weights", "output", "batch num_heads_q seqlen_q seqlen_kv", **WHOLE_FP32),
)
OPTIONS = ("causal", "mask_type", "window_size", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsProblem(AttentionProblem):
    """Shapes, strides and options of one call, as in the forward call; ``head_dim_v`` is ``head_dim``."""

    operator_name: ClassVar[str] = "attention_weights"

    @property
    def empty(self) -> bool:
        return self.batch * self.seqlen_q * self.seqlen_kv == 0

    def description(self) -> str:
        grouping = "mha" if self.group_size == 1 else "gqa"
        return f"head_dim {self.head_dim}, dtype {self.dtype}, mask_type {self.mask_type}, gqa {grouping}" + (
            "" if self.score is None else f", score {self.score.title}"
        )

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        return {
            "query_rows": self.seqlen_q,
            "key_rows": self.seqlen_kv,
            "heads": self.num_heads_q,
            "batch": self.batch,
        }


def normalise(
    q: ArrayView,
    k: ArrayView,
    lse: ArrayView,
    *,
    mask: ArrayView | None = None,
    weights: ArrayView | None = None,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    **options: Any,
) -> WeightsProblem:
    """The Problem of a call, or the error of the contract that it breaks. ``options`` are options of
    `attention.normalise`, which raises the same errors.
    """
    # No array of values: k has the rows of v.
    forward = attention.normalise(q, k, k, mask=mask, score=score, score_arrays=score_arrays, **options)
    operator = extended(WEIGHTS, score)
    views = {"lse": lse} | ({} if weights is None else {"weights": weights})
    check_devices({"q": q} | views)
    for name, view in views.items():
        argument = operator.arguments[operator.position(name)]
        contract.check_beside_q(argument, view, forward.sizes, forward.dtype, not forward.batched)
    views |= {"q": q, "k": k} | ({} if mask is None else {"mask": mask})
    views |= contract.score_views(score, score_arrays)
    kept = forward.fields_of(operator.arguments, views)
    return WeightsProblem(**kept)


WEIGHTS = Operator(
    name="attention_weights",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={name: ATTENTION.axes[name] for name in ("head_dim", "head_dim_v", "dtype", "mask_type", "gqa")},
    grid_dimensions=("query_rows", "key_rows", "heads", "batch"),
    contract=by_name(normalise),
)
