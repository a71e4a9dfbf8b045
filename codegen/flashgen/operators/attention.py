"""The operator ``attention``: its arguments, its contract, and the problems of its calls.

`normalise` makes the Problem of a call from array views; the contract is checked nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, BadTensorShape
from flashgen.operators.arguments import DTYPE_BYTES, Argument, check_devices, check_strides, flag, place
from flashgen.operators.contract import (
    DTYPES,
    MASK,
    MIN_SCALE,
    check_dtypes,
    check_extents,
    check_mask,
    check_out,
    check_rank,
    check_score_arrays,
    scale_of,
    score_views,
)
from flashgen.operators.maskoptions import mask_semantics, simplify
from flashgen.operators.masks import Band
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value
from flashgen.operators.splits import AUTO, splits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

__all__ = ["normalise"]

# What a kernel implements; see `AttentionProblem`.
KERNEL_MASKS = ("none", "causal", "local", "dense")

ARGUMENTS = (
    Argument("q", "input", "batch seqlen_q num_heads_q head_dim"),
    Argument("k", "input", "batch seqlen_kv num_heads_kv head_dim"),
    Argument("v", "input", "batch seqlen_kv num_heads_kv head_dim_v"),
    MASK,
    Argument("out", "output", "batch seqlen_q num_heads_q head_dim_v"),
    Argument(
        "lse",
        "output",
        "batch num_heads_q seqlen_q",
        dtypes=("fp32",),
        layout="contiguous",
        alignment=4,
        optional=True,
    ),
)
# Who splits keys: a kernel, into equal shares of all that there are, or the call; of a family that a call of
# either kind may take, nobody ("any").
SPLITS = ("none", "fixed")
OPTIONS = ("causal", "mask_type", "window_size", "return_lse", "splits", "score")
SCALARS = ("softmax_scale",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem(Problem):
    """Shapes, strides and options of one call of attention.

    Key j is visible to query i iff ``p - window_left <= j <= p + window_right``, where
    ``p = i + diagonal_offset``, and the dense mask, if any, is zero there; a side that is ``UNBOUNDED`` hides
    nothing. ``mask_type`` is what a kernel must implement: ``none``, ``causal`` (bounded on the right only,
    ``window_right`` 0), ``local``, or ``dense``, whose keys may be bounded too. ``score`` is the score
    modification, if any; ``score_scalars`` are its numbers, NaN until a call gives them, and ``score_sizes``
    the sizes of symbols that are its own. ``splits`` is what the call says of split-KV.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    mask_type: str
    diagonal_offset: int
    window_left: int
    window_right: int
    softmax_scale: float
    splits: Splits = AUTO
    score: Score | None = None
    score_scalars: tuple[float, ...] = ()
    score_sizes: tuple[tuple[str, int], ...] = ()

    @property
    def operator(self) -> Operator:
        return operator_for(self.score)

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_kv": self.seqlen_kv,
            "num_heads_q": self.num_heads_q,
            "num_heads_kv": self.num_heads_kv,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            **dict(self.score_sizes),
        }

    @property
    def return_lse(self) -> bool:
        return self.strides[self.operator.position("lse")] is not None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of ``out``: that of ``q``, with the head dim of ``v``."""
        return self.shape(self.operator.position("out"))

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: (batch, num_heads_q, seqlen_q), without batch if ``q`` has none."""
        return self.shape(self.operator.position("lse"))

    @property
    def seen_keys(self) -> tuple[int, int]:
        if not self.seqlen_q:
            return 0, 0
        return Band.of(self).keys_of_some(0, self.seqlen_q, self.seqlen_kv)

    @property
    def empty(self) -> bool:
        return self.batch * self.seqlen_q == 0

    def wanted(self) -> str:
        grouping = "mha" if self.group_size == 1 else "gqa or packed"
        return (
            f"head_dim {self.head_dim}, head_dim_v {self.head_dim_v}, dtype {self.dtype}, "
            f"mask_type {self.mask_type}, gqa {grouping}"
            + ("" if self.score is None else f", score {self.score.name}")
            + ("" if self.splits == AUTO else f", splits {self.splits}")
        )

    def standard(self) -> AttentionProblem:
        return dataclasses.replace(self, batch=1)

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """In packed GQA ``query_rows`` counts a query once for each head of its group, and ``heads`` are the
        kv heads.
        """
        packed = axes["gqa"] == "packed"
        return {
            "query_rows": self.seqlen_q * (self.group_size if packed else 1),
            "key_rows": self.seqlen_kv,
            "heads": self.num_heads_kv if packed else self.num_heads_q,
            "kv_heads": self.num_heads_kv,
            "batch": self.batch,
        }

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return {
            "batch_size": self.batch,
            "group_size": self.group_size,
            "diagonal_offset": self.diagonal_offset,
            "window_left": self.window_left,
            "window_right": self.window_right,
        } | self.scalar_values()

    def scalar_values(self) -> dict[str, Number]:
        """``scale_log2`` is what a kernel's scores are multiplied by for exp2: the softmax scale, or what a
        score modification leaves to be multiplied, times log2(e).
        """
        values: dict[str, Number] = {"softmax_scale": self.softmax_scale}
        if self.score is None:
            return values | {"scale_log2": self.softmax_scale * math.log2(math.e)}
        values |= self._scalars_of_score()
        values |= self.score.constants(values, self.dtype, self.operator.differentiates)
        # As with softmax_scale: a factor of 0 would turn the -inf of a masked score into NaN.
        return values | {"scale_log2": max(values["scale_log2"], MIN_SCALE)}

    def with_scalars(self, given: Sequence[Any]) -> AttentionProblem:
        softmax_scale, *rest = given
        if softmax_scale is None and self.score is None:
            return self
        scale = self.softmax_scale if softmax_scale is None else scale_of(softmax_scale, self.head_dim)
        called = dataclasses.replace(self, softmax_scale=scale, score_scalars=self._score_scalars(rest))
        if called.score is not None:
            scalars = called._scalars_of_score() | {"softmax_scale": scale}
            called.score.check(scalars, self.dtype, self.operator.differentiates)
        return called

    def _score_scalars(self, given: Sequence[Any]) -> tuple[float, ...]:
        """The numbers of the score modification, where ``given`` has None those of this problem."""
        found = []
        for param, value, known in zip(
            self.score.scalars if self.score else (), given, self.score_scalars, strict=True
        ):
            if value is None and math.isnan(known):
                raise BadParam(f"{param.name} is None; the score {self.score.name} needs a number")
            found.append(known if value is None else self.score.number(param, value))
        return tuple(found)

    def _scalars_of_score(self) -> dict[str, Number]:
        """By name; an integer that no call has given yet is 0, since a struct has no other word for it."""
        return {
            param.name: 0 if param.type == "i32" and math.isnan(value) else value
            for param, value in zip(self.score.scalars, self.score_scalars, strict=True)
        }


def normalise(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    *,
    mask: ArrayView | None = None,
    out: ArrayView | None = None,
    causal: bool = False,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: bool = False,
    splits: Splits = AUTO,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    score_scalars: Sequence[Any] = (),
) -> AttentionProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in ``attention``;
    ``score_arrays`` and ``score_scalars`` are in the order of the modification's.

    Raises BadTensorShape, BadTensorDtype, BadTensorStrides, DeviceTypeNotSupported, NullPointer or BadParam.
    """
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    splits = splits_of(splits)
    views = {"q": q, "k": k, "v": v}
    if out is not None:
        views["out"] = out
    own = score_views(score, score_arrays)
    check_devices((views if mask is None else views | {"mask": mask}) | own)
    dtype = check_dtypes(views)
    sizes = _check_shapes(q, k, v, out, dtype)
    for argument in ARGUMENTS:
        if argument.name in views:
            check_strides(argument, views[argument.name], DTYPE_BYTES[dtype])
    seqlen_q, seqlen_kv = sizes["seqlen_q"], sizes["seqlen_kv"]
    kind, offset, left, right = mask_semantics(
        causal, mask_type, window_size, mask is not None, seqlen_q, seqlen_kv
    )
    kind, offset, left, right = simplify(kind, seqlen_q, seqlen_kv, offset, left, right)
    if mask is not None:
        check_mask(mask, sizes)
    given = views | {"mask": mask} | own
    absent = {"mask"} if mask is None else set()
    absent |= set() if return_lse else {"lse"}
    score_sizes = check_score_arrays(score, own, sizes)
    problem = AttentionProblem(
        **sizes,
        dtype=dtype,
        mask_type=kind,
        diagonal_offset=offset,
        window_left=left,
        window_right=right,
        softmax_scale=scale_of(softmax_scale, sizes["head_dim"]),
        strides=tuple(
            None
            if argument.name in absent
            else place(argument, given.get(argument.name), sizes | dict(score_sizes), dtype).strides
            for argument in operator_for(score).arguments
        ),
        batched=len(q.shape) == 4,
        device=q.device,
        splits=splits,
        score=score,
        score_scalars=tuple(math.nan for _ in score.scalars) if score else (),
        score_sizes=score_sizes,
    )
    if any(value is not None for value in score_scalars):
        return problem.with_scalars((None, *score_scalars))
    return problem


def _check_shapes(
    q: ArrayView, k: ArrayView, v: ArrayView, out: ArrayView | None, dtype: str
) -> dict[str, int]:
    check_rank(q.shape)
    for name, view in (("k", k), ("v", v)):
        if len(view.shape) != len(q.shape):
            raise BadTensorShape(
                f"{name} has shape {view.shape} but q has {q.shape}; expected as many dimensions"
            )
    batch, seqlen_q, heads_q, head_dim = _batched(q.shape)
    batch_kv, seqlen_kv, heads_kv, head_dim_kv = _batched(k.shape)
    if k.shape[:-1] != v.shape[:-1]:
        raise BadTensorShape(
            f"v has shape {v.shape} but k has {k.shape}; all but the last dimension must be the same"
        )
    if batch_kv != batch:
        raise BadTensorShape(f"k has batch {batch_kv} but q has {batch}; they must be the same")
    if head_dim_kv != head_dim:
        raise BadTensorShape(f"k has head_dim {head_dim_kv} but q has {head_dim}; they must be the same")
    sizes = {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_kv": seqlen_kv,
        "num_heads_q": heads_q,
        "num_heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": v.shape[-1],
    }
    check_extents(sizes, dtype)
    check_out(out, q, v)
    return sizes


def _batched(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 4 else (1, *shape)


def by_name(
    normalise: Callable[..., Problem],
    arguments: Sequence[Argument],
    options: Sequence[str],
    without: Sequence[str] = (),
) -> Callable[..., Problem]:
    """`Operator.normalise` by a function that takes arrays, options and ``softmax_scale`` by their names, and
    what belongs to a score modification in ``score_arrays`` and ``score_scalars``. The
    arguments ``without`` are not passed: an LSE is there where return_lse says so.
    """

    def normalised(
        views: Sequence[ArrayView | None], given: Sequence[Any], scalars: Sequence[Any]
    ) -> Problem:
        softmax_scale, *score_scalars = scalars
        return normalise(
            **{
                argument.name: view
                for argument, view in zip(arguments, views, strict=False)
                if argument.name not in without
            },
            softmax_scale=softmax_scale,
            score_arrays=views[len(arguments) :],
            score_scalars=score_scalars,
            **dict(zip(options, given, strict=True)),
        )

    return normalised


def _serves_grouping(problem: AttentionProblem, gqa: Value) -> bool:
    return (gqa == "mha") == (problem.group_size == 1)


ATTENTION = Operator(
    name="attention",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        "head_dim": Axis(lambda problem, value: value >= problem.head_dim, size=True),
        "head_dim_v": Axis(
            lambda problem, value: value >= problem.head_dim_v, size=True, default_from="head_dim"
        ),
        "dtype": Axis(lambda problem, value: value == problem.dtype, DTYPES),
        "mask_type": Axis(lambda problem, value: value == problem.mask_type, KERNEL_MASKS, default="none"),
        "gqa": Axis(_serves_grouping, ("mha", "gqa", "packed"), default="mha"),
        "splits": Axis(
            lambda problem, value: value == "any" or (value == "fixed") == (problem.splits != AUTO),
            SPLITS,
            default="any",
        ),
    },
    grid_dimensions=("query_rows", "key_rows", "heads", "kv_heads", "batch"),
    normalise=by_name(normalise, ARGUMENTS, OPTIONS, without=("lse",)),
)


@functools.lru_cache(maxsize=64)
def modified(operator: Operator, score: Score) -> Operator:
    """``operator`` with a score modification, whose arrays are arguments behind the others."""
    return dataclasses.replace(
        operator,
        arguments=(*operator.arguments, *(param.argument() for param in score.arrays)),
        scalars=(*operator.scalars, *(param.name for param in score.scalars)),
    )


def operator_for(score: Score | None) -> Operator:
    """Attention with that score modification, if any."""
    return ATTENTION if score is None else modified(ATTENTION, score)
