"""The operator ``attention_backward``: the gradients of attention in q, k and v.

With p the softmax of a row, o its result and do the gradient of that, by the chain rule

    dv_j = sum_i p_ij do_i,  ds_ij = p_ij (do_i v_j - delta_i),  delta_i = do_i o_i - dlse_i,
    dq_i = softmax_scale sum_j ds_ij k_j,  dk_j = softmax_scale sum_i ds_ij q_i

p is computed again from q, k and the log-sum-exp of the forward call, so nothing of seqlen_q x seqlen_kv is
kept (https://arxiv.org/abs/2205.14135, appendix B). A row that sees nothing has p = 0.

With lengths, each sequence is a call by itself. Rows of q, k and v outside all sequences have gradients of 0:
rows past the last packed sequence, and padded keys past a length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadTensorDtype, BadTensorShape, arg
from flashgen.operators import attention, contract, lengths
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    Argument,
    Expected,
    check_devices,
    check_strides,
    flag,
    place,
    shown_shape,
    view_of_shape,
)
from flashgen.operators.attention import ATTENTION, SCALARS, AttentionProblem
from flashgen.operators.lengths import BOUNDS, CACHE_ARRAYS, refuse_mask
from flashgen.operators.operator import Axis, Operator, Value, by_name, modified

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score


def gradient_arguments(forward: Sequence[Argument], without: Sequence[str]) -> tuple[Argument, ...]:
    """The arguments of the gradients of an operator: the gradient of its first output, its inputs but those
    ``without`` gradients, its outputs, the gradients of its other outputs, and a gradient of each input that
    is differentiable.
    """
    inputs = [argument for argument in forward if not argument.is_output and argument.name not in without]
    outputs = [argument for argument in forward if argument.is_output]
    dout, *others = [argument._replace(name=f"d{argument.name}", role="input") for argument in outputs]
    return (
        dout,
        *(argument._replace(differentiable=False) for argument in inputs),
        *(argument._replace(role="input", optional=False) for argument in outputs),
        *others,
        *(
            argument._replace(name=f"d{argument.name}", role="output", differentiable=False)
            for argument in inputs
            if argument.differentiable
        ),
    )


ARGUMENTS = gradient_arguments(attention.ARGUMENTS, without=CACHE_ARRAYS)
LENGTH_ARRAYS = tuple(name for name in lengths.LENGTH_ARRAYS if name not in CACHE_ARRAYS)
OPTIONS = ("causal", "mask_type", "window_size", *BOUNDS, "score", "deterministic")
# In what order thread blocks add to dq: in none, or always in the same; or the one that has its rows does
# all of them.
DQ_ORDERS = ("none", "ordered", "direct")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardProblem(AttentionProblem):
    """Shapes, strides and options of one call: those of the forward call, and whether the gradients must be
    the same bits each time.
    """

    deterministic: bool = False

    @property
    def operator(self) -> Operator:
        return operator_for(self.score, self.lengths is not None)

    @property
    def return_lse(self) -> bool:
        """That the forward call had to keep its LSE, which here is an input."""
        return True

    @property
    def empty(self) -> bool:
        if self.lengths is None:
            return self.batch * (self.seqlen_q + self.seqlen_kv) == 0
        of_q, of_kv = self.lengths.batch_q * self.lengths.rows_q, self.lengths.batch_kv * self.lengths.rows_kv
        return of_q + of_kv == 0

    def description(self) -> str:
        # Not super(): a class with slots is made anew, and the function would not know which.
        orders = "ordered or direct" if self.deterministic else "none, ordered or direct"
        return f"{AttentionProblem.description(self)}, dq_order {orders}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """With lengths ``query_rows`` and ``key_rows`` are the rows of an entry of q and k, whatever the
        bounds: all are written. ``sequence_rows`` and ``sequence_keys`` are the rows of all entries, and
        ``sequences`` counts the rows past the last sequence as one more.
        """
        extents = AttentionProblem.grid_extents(self, axes)
        if self.lengths is None:
            return extents
        return extents | {
            "query_rows": self.lengths.rows_q,
            "key_rows": self.lengths.rows_kv,
            "sequence_rows": self.lengths.batch_q * self.lengths.rows_q,
            "sequence_keys": self.lengths.batch_kv * self.lengths.rows_kv,
            "sequences": self.batch + 1,
        }

    def of_sequence(self, q_length: int, kv_length: int) -> BackwardProblem:
        """The problem of one sequence of these lengths, with contiguous arrays that have no other."""
        forward = AttentionProblem.of_sequence(self, q_length, kv_length)
        arguments = operator_for(self.score).arguments
        views: dict[str, ArrayView | None] = {}
        if self.strides[self.operator.position("dlse")] is not None:
            dlse = next(argument for argument in arguments if argument.name == "dlse")
            views["dlse"] = view_of_shape(dlse.extents(forward.sizes), "fp32", self.device)
        return BackwardProblem(**kept_of(forward, arguments, views), deterministic=self.deterministic)


def normalise(
    dout: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    out: ArrayView,
    lse: ArrayView,
    *,
    cu_seqlens_q: ArrayView | None = None,
    cu_seqlens_kv: ArrayView | None = None,
    kv_lengths: ArrayView | None = None,
    mask: ArrayView | None = None,
    dlse: ArrayView | None = None,
    dq: ArrayView | None = None,
    dk: ArrayView | None = None,
    dv: ArrayView | None = None,
    causal: bool = False,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    max_seqlen_q: int | Expected | None = None,
    max_seqlen_kv: int | Expected | None = None,
    deterministic: bool = False,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    score_scalars: Sequence[Any] = (),
) -> BackwardProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in
    ``attention_backward``.

    Raises as `attention.normalise`.
    """
    deterministic = flag("deterministic", deterministic)
    arrays = dict(zip(LENGTH_ARRAYS, (cu_seqlens_q, cu_seqlens_kv, kv_lengths), strict=True))
    if any(view is not None for view in arrays.values()):
        refuse_mask(mask)
    forward = attention.normalise(
        q,
        k,
        v,
        **arrays,
        mask=mask,
        causal=causal,
        mask_type=mask_type,
        window_size=window_size,
        softmax_scale=softmax_scale,
        return_lse=True,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        score=score,
        score_arrays=score_arrays,
        score_scalars=score_scalars,
    )
    operator = operator_for(score, forward.lengths_on_device)
    views = {"dout": dout, "out": out, "lse": lse, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv}
    views = {name: view for name, view in views.items() if view is not None}
    check_devices({"q": q} | views)
    for name, view in views.items():
        check_array(operator.arguments[operator.position(name)], view, forward)
    views |= {"q": q, "k": k, "v": v, "mask": mask} | arrays | contract.score_views(score, score_arrays)
    return BackwardProblem(**kept_of(forward, operator.arguments, views), deterministic=deterministic)


def kept_of(
    forward: AttentionProblem, arguments: Sequence[Argument], views: Mapping[str, ArrayView | None]
) -> dict[str, Any]:
    """The fields of a forward call's problem, with the strides of these arguments of its gradients. Without a
    view an optional one is absent, and any other contiguous.
    """
    kept = {field.name: getattr(forward, field.name) for field in dataclasses.fields(forward)}
    kept["strides"] = tuple(
        None
        if argument.optional and views.get(argument.name) is None
        else place(argument, views.get(argument.name), forward.sizes, forward.dtype).strides
        for argument in arguments
    )
    return kept


def check_array(argument: Argument, view: ArrayView, forward: AttentionProblem) -> None:
    """That an array belongs to the forward call, and its layout fits. Raises BadTensorDtype, BadTensorShape
    or BadTensorStrides.
    """
    missing = forward.missing(argument)
    name, dtype = argument.name, argument.dtype(forward.dtype)
    if view.dtype != dtype:
        why = "" if argument.dtypes else ", that of q"
        raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; expected {dtype}{why}")
    expected = argument.extents(forward.sizes)[missing:]
    if view.shape != expected:
        symbols = shown_shape(argument.symbols[missing:])
        raise BadTensorShape(
            f"{arg(name)} has shape {view.shape}; these {arg('q')}, {arg('k')} and {arg('v')} need {symbols} "
            f"= {expected}"
        )
    check_strides(argument, view, DTYPE_BYTES[dtype])


def _serves_order(problem: BackwardProblem, order: Value) -> bool:
    return order != "none" or not problem.deterministic


BACKWARD = Operator(
    name="attention_backward",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        **{name: axis for name, axis in ATTENTION.axes.items() if name not in CACHE_ARRAYS},
        "dq_order": Axis(_serves_order, DQ_ORDERS, default="none"),
    },
    grid_dimensions=(*ATTENTION.grid_dimensions, "sequence_keys", "sequences"),
    contract=by_name(normalise),
    elements_checked=LENGTH_ARRAYS,
    check_elements=attention.check_elements,
    differentiates=True,
    of_lengths=(*LENGTH_ARRAYS, *BOUNDS, "sequence_rows", "sequence_keys", "sequences"),
    of_plain=("mask",),
)
_WITH_LENGTHS, _PLAIN = BACKWARD.with_lengths, BACKWARD.without_lengths


def operator_for(score: Score | None, lengths: bool = False) -> Operator:
    """``attention_backward`` with that score modification, if any, for calls with or without lengths."""
    operator = _WITH_LENGTHS if lengths else _PLAIN
    return operator if score is None else modified(operator, score)
