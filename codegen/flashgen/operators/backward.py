"""The operator ``attention_backward``: the gradients of attention in q, k and v.

With p the softmax of a row, o its result and do the gradient of that, by the chain rule

    dv_j = sum_i p_ij do_i,  ds_ij = p_ij (do_i v_j - delta_i),  delta_i = do_i o_i - dlse_i,
    dq_i = softmax_scale sum_j ds_ij k_j,  dk_j = softmax_scale sum_i ds_ij q_i

p is computed again from q, k and the log-sum-exp of the forward call, so nothing of seqlen_q x seqlen_kv is
kept (https://arxiv.org/abs/2205.14135, appendix B). A row that sees nothing has p = 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadTensorDtype, BadTensorShape
from flashgen.operators import attention, contract
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    Argument,
    check_devices,
    check_strides,
    flag,
    place,
    shown_shape,
)
from flashgen.operators.attention import ATTENTION, SCALARS, AttentionProblem
from flashgen.operators.operator import Axis, Operator, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score

_ROW_NUMBER = {"shape": "batch num_heads_q seqlen_q", "dtypes": ("fp32",), "layout": "contiguous"}
_FORWARD = {argument.name: argument for argument in ATTENTION.arguments}

ARGUMENTS = (
    Argument("dout", "input", "batch seqlen_q num_heads_q head_dim_v"),
    *(_FORWARD[name] for name in ("q", "k", "v", "mask")),
    Argument("out", "input", "batch seqlen_q num_heads_q head_dim_v"),
    Argument("lse", "input", alignment=4, **_ROW_NUMBER),
    Argument("dlse", "input", alignment=4, optional=True, **_ROW_NUMBER),
    Argument("dq", "output", "batch seqlen_q num_heads_q head_dim"),
    Argument("dk", "output", "batch seqlen_kv num_heads_kv head_dim"),
    Argument("dv", "output", "batch seqlen_kv num_heads_kv head_dim_v"),
)
OPTIONS = ("causal", "mask_type", "window_size", "score", "deterministic")
# In what order thread blocks add to dq: in none, or always in the same; or the one that has its rows does
# all of them.
DQ_ORDERS = ("none", "ordered", "direct")
# What its kernels keep beside arguments: no parameter of a score modification is called so.
KEPT = ("dq_accum", "delta", "lse_log2", "turns")
_OF_CALL = ("dout", "out", "lse", "dlse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardProblem(AttentionProblem):
    """Shapes, strides and options of one call: those of the forward call, and whether the gradients must be
    the same bits each time.
    """

    deterministic: bool = False

    @property
    def operator(self) -> Operator:
        return operator_for(self.score)

    @property
    def return_lse(self) -> bool:
        """That the forward call had to keep its LSE, which here is an input."""
        return True

    @property
    def empty(self) -> bool:
        return self.batch * (self.seqlen_q + self.seqlen_kv) == 0

    def wanted(self) -> str:
        # Not super(): a class with slots is made anew, and the function would not know which.
        return f"{AttentionProblem.wanted(self)}, dq_order {orders_serving(self.deterministic)}"


def orders_serving(deterministic: bool) -> str:
    """The values of ``dq_order`` that serve a call, in words."""
    return "ordered or direct" if deterministic else "none, ordered or direct"


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
    dq: ArrayView | None = None,
    dk: ArrayView | None = None,
    dv: ArrayView | None = None,
    causal: bool = False,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
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
    forward = attention.normalise(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        mask_type=mask_type,
        window_size=window_size,
        softmax_scale=softmax_scale,
        score=score,
        score_arrays=score_arrays,
        score_scalars=score_scalars,
    )
    views = dict(zip(_OF_CALL, (dout, out, lse, dlse, dq, dk, dv), strict=True))
    given = {name: view for name, view in views.items() if view is not None}
    check_devices({"q": q} | given)
    for name, view in given.items():
        check_array(ARGUMENTS[_POSITIONS[name]], view, forward, 0 if forward.batched else 1)
    own = contract.score_views(score, score_arrays)
    views |= {"q": q, "k": k, "v": v, "mask": mask} | own
    return BackwardProblem(
        **kept_of(forward, operator_for(score).arguments, views), deterministic=deterministic
    )


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


def check_array(argument: Argument, view: ArrayView, forward: AttentionProblem, missing: int) -> None:
    """That an array belongs to the forward call, and its layout fits; the caller leaves out the first
    ``missing`` dimensions. Raises BadTensorDtype, BadTensorShape or BadTensorStrides.
    """
    name, dtype = argument.name, argument.dtype(forward.dtype)
    if view.dtype != dtype:
        why = "" if argument.dtypes else ", that of q"
        raise BadTensorDtype(f"{name} has dtype {view.dtype}; expected {dtype}{why}")
    expected = argument.extents(forward.sizes)[missing:]
    if view.shape != expected:
        symbols = shown_shape(argument.symbols[missing:])
        raise BadTensorShape(f"{name} has shape {view.shape}; these q, k and v need {symbols} = {expected}")
    check_strides(argument, view, DTYPE_BYTES[dtype])


def _serves_order(problem: BackwardProblem, order: Value) -> bool:
    return order != "none" or not problem.deterministic


BACKWARD = Operator(
    name="attention_backward",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        **ATTENTION.axes,
        "dq_order": Axis(_serves_order, DQ_ORDERS, default="none"),
    },
    grid_dimensions=ATTENTION.grid_dimensions,
    normalise=attention.by_name(normalise, ARGUMENTS, OPTIONS),
    differentiates=True,
)


def operator_for(score: Score | None) -> Operator:
    """``attention_backward`` with that score modification, if any."""
    return BACKWARD if score is None else attention.modified(BACKWARD, score)


_POSITIONS = BACKWARD.positions
