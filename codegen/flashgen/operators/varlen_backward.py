"""The operator ``varlen_backward``: the gradients of ``varlen`` in q, k and v, without caches and pages.

Each sequence is a call of ``attention_backward`` of its own. Rows of q, k and v that are no sequence's have
gradients of 0: those behind the last packed sequence, and those of padded keys behind a length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.operators import attention, backward, contract, varlen
from flashgen.operators.arguments import Argument, Expected, check_devices, flag, view_of_shape
from flashgen.operators.attention import ATTENTION, SCALARS, AttentionProblem
from flashgen.operators.backward import BackwardProblem
from flashgen.operators.operator import Operator, Value
from flashgen.operators.varlen import VARLEN, VarlenProblem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score

_ROW_NUMBER = {"shape": "batch_q num_heads_q rows_q", "dtypes": ("fp32",), "layout": "contiguous"}
_FORWARD = {argument.name: argument for argument in VARLEN.arguments}
# The arrays of lengths that have gradients behind them.
LENGTH_ARRAYS = ("cu_seqlens_q", "cu_seqlens_kv", "kv_lengths")

ARGUMENTS = (
    Argument("dout", "input", "batch_q rows_q num_heads_q head_dim_v"),
    *(_FORWARD[name] for name in ("q", "k", "v", *LENGTH_ARRAYS)),
    Argument("out", "input", "batch_q rows_q num_heads_q head_dim_v"),
    Argument("lse", "input", alignment=4, **_ROW_NUMBER),
    Argument("dlse", "input", alignment=4, optional=True, **_ROW_NUMBER),
    Argument("dq", "output", "batch_q rows_q num_heads_q head_dim"),
    Argument("dk", "output", "batch_kv rows_kv num_heads_kv head_dim"),
    Argument("dv", "output", "batch_kv rows_kv num_heads_kv head_dim_v"),
)
OPTIONS = ("causal", "mask_type", "window_size", "max_seqlen_q", "max_seqlen_kv", "score", "deterministic")
_OF_CALL = ("dout", "out", "lse", "dlse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenBackwardProblem(VarlenProblem):
    """One call: sizes, bounds and masks as of the forward call, and whether the gradients must be the same
    bits each time.
    """

    deterministic: bool = False

    @property
    def operator(self) -> Operator:
        return operator_for(self.score)

    @property
    def empty(self) -> bool:
        return self.batch_q * self.rows_q + self.batch_kv * self.rows_kv == 0

    @property
    def paged(self) -> bool:
        return False

    def shape(self, position: int) -> tuple[int, ...]:
        argument = self.operator.arguments[position]
        return argument.extents(self.sizes)[_missing(argument, self.packed_q, self.packed_kv) :]

    def wanted(self) -> str:
        return f"{AttentionProblem.wanted(self)}, dq_order {backward.orders_serving(self.deterministic)}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``query_rows`` and ``key_rows`` are those of an entry of q and k, whatever the bounds: all are
        written. ``sequence_rows`` and ``sequence_keys`` are those of all entries, and ``sequences`` counts
        the rows behind the last sequence as one more.
        """
        return AttentionProblem.grid_extents(self, axes) | {
            "query_rows": self.rows_q,
            "key_rows": self.rows_kv,
            "sequence_rows": self.batch_q * self.rows_q,
            "sequence_keys": self.batch_kv * self.rows_kv,
            "sequences": self.batch + 1,
        }

    def of_sequence(self, q_length: int, kv_length: int) -> BackwardProblem:
        """The problem of one sequence of these lengths, with contiguous arrays of its own."""
        forward = VarlenProblem.of_sequence(self, q_length, kv_length)
        views: dict[str, ArrayView | None] = {}
        if self.strides[self.operator.position("dlse")] is not None:
            dlse = backward.BACKWARD.arguments[backward.BACKWARD.position("dlse")]
            views["dlse"] = view_of_shape(dlse.extents(forward.sizes), "fp32", self.device)
        kept = backward.kept_of(forward, backward.operator_for(self.score).arguments, views)
        return BackwardProblem(**kept, deterministic=self.deterministic)


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
) -> VarlenBackwardProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in
    ``attention_backward``.

    Raises as `attention.normalise`.
    """
    deterministic = flag("deterministic", deterministic)
    lengths = dict(zip(LENGTH_ARRAYS, (cu_seqlens_q, cu_seqlens_kv, kv_lengths), strict=True))
    forward = varlen.normalise(
        q,
        k,
        v,
        **lengths,
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
    views = dict(zip(_OF_CALL, (dout, out, lse, dlse, dq, dk, dv), strict=True))
    given = {name: view for name, view in views.items() if view is not None}
    check_devices({"q": q} | given)
    for name, view in given.items():
        argument = ARGUMENTS[_POSITIONS[name]]
        missing = _missing(argument, forward.packed_q, forward.packed_kv)
        backward.check_array(argument, view, forward, missing)
    views |= {"q": q, "k": k, "v": v} | lengths | contract.score_views(score, score_arrays)
    return VarlenBackwardProblem(
        **backward.kept_of(forward, operator_for(score).arguments, views), deterministic=deterministic
    )


def _missing(argument: Argument, packed_q: bool, packed_kv: bool) -> int:
    """How many dimensions a caller leaves out: packed rows have no batch."""
    packed = {"batch_q": packed_q, "batch_kv": packed_kv}
    return int(packed.get(argument.symbols[0] if argument.symbols else "", False))


def _check_elements(problem: VarlenBackwardProblem, lengths: Mapping[str, np.ndarray | None]) -> None:
    from flashgen.operators.sequences import sequences

    sequences(problem, dict.fromkeys(varlen.LENGTH_ARRAYS) | dict(lengths))


VARLEN_BACKWARD = Operator(
    name="varlen_backward",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={**ATTENTION.axes, "dq_order": backward.BACKWARD.axes["dq_order"]},
    grid_dimensions=(*ATTENTION.grid_dimensions, "sequence_rows", "sequence_keys", "sequences"),
    normalise=attention.by_name(normalise, ARGUMENTS, OPTIONS),
    elements_checked=LENGTH_ARRAYS,
    check_elements=_check_elements,
    differentiates=True,
)


def operator_for(score: Score | None) -> Operator:
    """``varlen_backward`` with that score modification, if any."""
    return VARLEN_BACKWARD if score is None else attention.modified(VARLEN_BACKWARD, score)


_POSITIONS = VARLEN_BACKWARD.positions
