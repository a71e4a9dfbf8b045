"""The operator ``score_gradient``: the gradient of one array of a score modification.

With the names of `backward`, and s'_ij the modified score of a score s_ij, an array a has

    da_n = sum over the batch, heads and all (i, j) that read a_n of p_ij (do_i v_j - delta_i) ds'_ij / da_n

P is computed again from the log-sum-exp of the forward call. Without a modification it is the gradient of the
scores themselves, softmax_scale q k^T, as of a bias of full shape.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.operators import attention, contract
from flashgen.operators.arguments import FP32, Argument, check_devices, contiguous_strides
from flashgen.operators.attention import ATTENTION, SCALARS
from flashgen.operators.attention_problem import AttentionProblem
from flashgen.operators.backward import BACKWARD
from flashgen.operators.operator import Axis, Number, Operator, Value, by_name, extended
from flashgen.operators.reduction import SUMS, Reduction, parameter, reduction
from flashgen.operators.scores import DIMENSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score

_INPUTS = ("dout", "q", "k", "v", "mask", "out", "lse", "dlse")
_BACKWARD = {argument.name: argument for argument in BACKWARD.without_lengths.arguments}
# The gradient has the shape of the array, which broadcasts as the array does.
ARGUMENTS = (
    *(_BACKWARD[name] for name in _INPUTS),
    Argument("dscore", "output", "batch num_heads_q seqlen_q seqlen_kv", layout="broadcast", **FP32),
)
OPTIONS = ("causal", "mask_type", "window_size", "score")
# Batch entries and heads are split into parts while there are at most _ENOUGH_TILES tiles of _TILE queries
# and keys, six for each multiprocessor of an H100, and each part has _LEAST_PAIRS pairs of entry and head.
_TILE, _ENOUGH_TILES, _LEAST_PAIRS = 128, 792, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreGradientProblem(AttentionProblem):
    """Shapes, strides and options of one call, as in the forward call, and the shape of the array."""

    array_shape: tuple[int, ...]
    operator_name: ClassVar[str] = "score_gradient"

    @property
    def empty(self) -> bool:
        return 0 in self.array_shape

    @property
    def extents(self) -> tuple[int, ...]:
        """The extents of the array in all of its dimensions, 1 where it is broadcast."""
        count = len(self.operator.arguments[self.operator.position("dscore")].symbols)
        return (1,) * (count - len(self.array_shape)) + self.array_shape

    @property
    def reduction(self) -> Reduction:
        return reduction(self.score, self.extents)

    def of_array(self, shape: tuple[int, ...]) -> ScoreGradientProblem:
        """The problem of an array of another shape, which broadcasts to the shape that the operator has."""
        position = self.operator.position("dscore")
        count = len(self.operator.arguments[position].symbols)
        strides = contiguous_strides((1,) * (count - len(shape)) + shape)
        all_strides = (*self.strides[:position], strides, *self.strides[position + 1 :])
        return dataclasses.replace(self, array_shape=shape, strides=all_strides)

    def shape(self, position: int) -> tuple[int, ...]:
        if position == self.operator.position("dscore"):
            return self.array_shape
        return AttentionProblem.shape(self, position)

    def description(self) -> str:
        return (
            f"head_dim {self.head_dim}, head_dim_v {self.head_dim_v}, dtype {self.dtype}, "
            f"mask_type {self.mask_type}, sums {self.reduction.sums}"
            + ("" if self.score is None else f", score {self.score.title}")
        )

    @property
    def kept(self) -> tuple[int, int]:
        """How many batch entries and heads have sums of their own."""
        keeps = self.reduction
        return self.batch if keeps.keeps_batch else 1, self.num_heads_q if keeps.keeps_heads else 1

    @property
    def places(self) -> int:
        """The sums of a batch entry and head: queries, keys, distances, or 1; 0 where none is left."""
        counts = {
            "none": 0,
            "rows": self.seqlen_q,
            "columns": self.seqlen_kv,
            "diagonals": max(0, self.seqlen_q + self.seqlen_kv - 1),
            "all": 1,
        }
        return counts[self.reduction.sums]

    @property
    def pair_parts(self) -> int:
        """The parts into which kernels may split the batch entries and heads that share an element, 1 if
        scores are summed over queries or keys as well. It does not depend on the GPU, so neither do the bits.

        A bias of few heads and short sequences has fewer tiles than a GPU has multiprocessors.
        """
        kept_batch, kept_heads = self.kept
        tiles = kept_batch * kept_heads * -(-self.seqlen_q // _TILE) * -(-self.seqlen_kv // _TILE)
        if self.reduction.sums != "none" or not tiles:
            return 1
        pairs = self.batch // kept_batch * (self.num_heads_q // kept_heads)
        return max(1, min(_ENOUGH_TILES // tiles, pairs // _LEAST_PAIRS))

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``score_keys`` are keys that tiles of scores cut, as ``query_rows`` are; ``kept_batch`` and
        ``kept_heads`` are the batch entries and heads that have sums of their own,
        ``places`` counts their sums, and ``gathered`` the elements that are gathered from these.
        ``pair_parts`` counts the parts that split batch entries and heads, and ``joined`` the elements
        that are summed over these.
        """
        kept_batch, kept_heads = self.kept
        return {
            "query_rows": self.seqlen_q,
            "score_keys": self.seqlen_kv,
            "heads": self.num_heads_q,
            "batch": self.batch,
            "kept_batch": kept_batch,
            "kept_heads": kept_heads,
            "places": self.places,
            "gathered": math.prod(self.array_shape) if self.reduction.gathered else 0,
            "pair_parts": self.pair_parts,
            "joined": math.prod(self.array_shape) if self.pair_parts > 1 else 0,
        }

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        """Also the steps in dscore: how many elements further the next batch entry, head, query and key are,
        0 where the array is broadcast.
        """
        values = AttentionProblem.values(self, axes)
        kept_batch, kept_heads = self.kept
        dimensions = tuple(DIMENSIONS) if self.score is None else parameter(self.score).dimensions
        strides = (*contiguous_strides(self.extents), int(self.extents[-1] > 1))
        steps = dict(zip(dimensions, strides, strict=True))
        return values | {
            "kept_batch": kept_batch,
            "kept_heads": kept_heads,
            "places": self.places,
            "pair_parts": self.pair_parts,
            "dscore_elements": math.prod(self.array_shape),
            "dscore_batch_step": steps.get("b", 0),
            "dscore_head_step": steps.get("h", 0),
            "dscore_query_step": steps.get("q", 0),
            "dscore_key_step": steps.get("kv", 0),
        }


def normalise(
    dout: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    out: ArrayView,
    lse: ArrayView,
    *,
    mask: ArrayView | None = None,
    dlse: ArrayView | None = None,
    dscore: ArrayView | None = None,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    **options: Any,
) -> ScoreGradientProblem:
    """The Problem of a call, or the error of the contract that it breaks. ``options`` are options of
    `attention.normalise`, which raises the same errors; BadParam for an array that has no gradient.
    """
    forward = attention.normalise(q, k, v, mask=mask, score=score, score_arrays=score_arrays, **options)
    operator = extended(SCORE_GRADIENT, score)
    views = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    check_devices({"q": q} | views)
    for name, view in views.items():
        argument = operator.arguments[operator.position(name)]
        contract.check_beside_q(argument, view, forward.sizes, forward.dtype, not forward.batched)
    tables = contract.score_views(score, score_arrays)
    argument = operator.arguments[operator.position("dscore")]
    if score is None:
        shape = argument.extents(forward.sizes)[not forward.batched :]
    else:
        shape = tuple(tables[score.wrt].shape)
    if dscore is not None:
        contract.check_whole(argument, dscore, shape)
    views |= {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask}) | tables
    kept = forward.fields_of(operator.arguments, views)
    problem = ScoreGradientProblem(**kept, array_shape=shape).of_array(shape)
    _ = problem.reduction  # raises for an array whose gradient cannot be summed
    return problem


def _of_score(arguments: tuple[Argument, ...], score: Score) -> tuple[Argument, ...]:
    """The arguments of the gradient of the array that ``score`` is differentiated by."""
    array = parameter(score).argument()._replace(name="dscore", role="output")
    return tuple(array if x.name == "dscore" else x for x in arguments)


SCORE_GRADIENT = Operator(
    name="score_gradient",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        **{name: ATTENTION.axes[name] for name in ("head_dim", "head_dim_v", "dtype", "mask_type")},
        # One kernel serves all groupings: num_heads_q / num_heads_kv is a parameter.
        "gqa": Axis(lambda problem, value: True, ATTENTION.axes["gqa"].choices, default="gqa"),
        "sums": Axis.equal(lambda problem: problem.reduction.sums, SUMS),
    },
    grid_dimensions=(
        *("query_rows", "score_keys", "heads", "batch"),
        *("kept_batch", "kept_heads", "places", "gathered", "pair_parts", "joined"),
    ),
    contract=by_name(normalise),
    differentiates=True,
    of_score=_of_score,
)
