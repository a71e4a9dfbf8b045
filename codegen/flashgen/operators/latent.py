"""The operator ``latent_attention``: decoding in the latent space of MLA (https://arxiv.org/abs/2405.04434).

A token has one row in the cache, ``k``, for all query heads: the latent, then its rotary part. Its key is the
whole row, and its value the first ``head_dim_v`` elements, which kernels read once for both:

    out = softmax(q k^T * softmax_scale, masked) k[:, :head_dim_v]

Sequences are as in calls of attention with lengths.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadTensorShape, NullPointer, arg
from flashgen.operators import attention, contract, kvcodes, latentrows
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ROW_ALIGNMENT,
    shown,
)
from flashgen.operators.attention import ATTENTION, SCALARS, AttentionProblem, check_elements
from flashgen.operators.lengths import BOUNDS, LENGTH_ARRAYS
from flashgen.operators.operator import Axis, Operator, by_name
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.arguments import Argument, ArrayLayout, ArrayView
    from flashgen.operators.operator import Number, Value
    from flashgen.operators.scores import Score

# Of DeepSeek's models: a latent of 512 elements, and 64 with a rotary embedding.
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512
_GROUP = 64  # rows of the tiles of flash_mla_decode_sm90
_NAMES = ("q", "k", *LENGTH_ARRAYS, "k_scale", "out", "lse")
_FORWARD = {argument.name: argument for argument in ATTENTION.with_lengths.arguments}
ARGUMENTS = tuple(_FORWARD[name]._replace(differentiable=False) for name in _NAMES)
OPTIONS = ("causal", "mask_type", "head_dim_v", "return_lse", "splits", *BOUNDS, "kv_dtype")
KV_DTYPES = (*kvcodes.KV_DTYPES, latentrows.LAYOUT.replace("_", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProblem(AttentionProblem):
    """Shapes, strides and options of one call, as of a call of attention with lengths whose values are the
    first ``head_dim_v`` elements of its keys.
    """

    @property
    def operator(self) -> Operator:
        return LATENT

    @property
    def group_size(self) -> int:
        """Query heads that are rows of one tile. Tiles of other groups read the same keys, as if each group
        had a kv head: thread blocks go through them side by side, and find them in L2.
        """
        return _GROUP if self.num_heads_q % _GROUP == 0 else self.num_heads_q

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        groups = self.num_heads_q // self.group_size
        return AttentionProblem.grid_extents(self, axes) | {"heads": groups, "kv_heads": groups}

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        groups = self.num_heads_q // self.group_size
        return AttentionProblem.values(self, axes) | {"num_heads_kv": groups}

    @property
    def has_packed_rows(self) -> bool:
        """Whether rows of the cache carry their scales, see `latentrows`."""
        return self.kv_dtype == latentrows.LAYOUT

    def dtype_of(self, argument: Argument) -> str:
        dtype = AttentionProblem.dtype_of(self, argument)
        return kvcodes.E4M3 if dtype == latentrows.LAYOUT else dtype

    def layout_of(self, position: int, sizes: Mapping[str, int]) -> ArrayLayout | None:
        return latentrows.with_packed_rows(
            AttentionProblem.layout_of(self, position, sizes), self.kv_dtype, "k"
        )

    def shape(self, position: int) -> tuple[int, ...]:
        shape = AttentionProblem.shape(self, position)
        is_packed = self.has_packed_rows and ARGUMENTS[position].name == "k"
        return (*shape[:-1], latentrows.ROW_BYTES) if is_packed else shape

    def of_sequence(self, q_length: int, kv_length: int) -> AttentionProblem:
        """As of attention; packed rows are unpacked there, see `sequences.arrays_of`."""
        problem = AttentionProblem.of_sequence(self, q_length, kv_length)
        return dataclasses.replace(problem, kv_dtype=None) if self.has_packed_rows else problem

    def description(self) -> str:
        paged = "paged" if self.lengths is not None and self.lengths.paged else "none"
        return (
            f"a latent cache, head_dim {self.head_dim}, head_dim_v {self.head_dim_v}, dtype {self.dtype}, "
            f"mask_type {self.mask_type}, pages {paged}"
            + ("" if self.kv_dtype is None else f", kv_dtype {self.kv_dtype}")
            + ("" if self.splits == AUTO else f", splits {self.splits}")
        )


def normalise(
    q: ArrayView,
    k: ArrayView,
    *,
    head_dim_v: int,
    out: ArrayView | None = None,
    kv_dtype: str | None = None,
    **others: Any,
) -> LatentProblem:
    """The Problem of a call, or the error of the contract that it breaks. ``others`` has arrays of lengths
    and options of `attention.normalise`, which raises the same errors. A call has a softmax_scale, see
    `call.latent`; a plan may be made without.
    """
    views = {"q": q, "k": k} | ({} if out is None else {"out": out})
    arrays = {name: others[name] for name in LENGTH_ARRAYS if others.get(name) is not None}
    if "kv_lengths" not in arrays:
        raise NullPointer(f"{arg('kv_lengths')} is None; a latent cache needs it, int32, (batch,)")
    is_packed = kv_dtype == latentrows.LAYOUT
    scale = others.get("k_scale")
    if scale is not None and len(scale.shape) > 2:
        raise BadTensorShape(
            f"{arg('k_scale')} has shape {scale.shape}; a latent cache takes (), or (batch, 1)"
        )
    if is_packed:
        k = latentrows.unpacked_view(q, k, head_dim_v, others.get("k_scale") is not None)
        kv_dtype = kvcodes.E4M3
    of_codes = kvcodes.kv_dtype_of({"q": q, "k": k, "v": k}, kv_dtype, has_lengths=True) is not None
    if not of_codes:
        contract.check_dtypes(views)
    step = kvcodes.HEAD_DIM_STEP if of_codes else ROW_ALIGNMENT // DTYPE_BYTES[q.dtype]
    v = _values(k, head_dim_v, step)
    problem = attention.normalise(
        q, k, v, out=out, kv_dtype=kv_dtype, latent=(LatentProblem, LATENT), **others
    )
    if problem.num_heads_kv != 1:
        raise BadTensorShape(
            f"{arg('k')} has {problem.num_heads_kv} heads; a latent cache has one, which all heads of "
            f"{arg('q')} read"
        )
    return dataclasses.replace(problem, kv_dtype=latentrows.LAYOUT) if is_packed else problem


def _values(k: ArrayView, head_dim_v: int, step: int) -> ArrayView:
    """The values of a cache, within its rows. Raises BadTensorShape."""
    check_widths(k.shape[-1] if k.shape else 0, head_dim_v, step)
    return dataclasses.replace(k, shape=(*k.shape[:-1], head_dim_v))


def check_widths(width: int, head_dim_v: int, step: int) -> None:
    """Limits of the elements of a row, and of the ones that are its value: multiples of ``step``. Raises
    BadTensorShape.
    """
    for name, size, most in (
        ("head_dim", width, MAX_HEAD_DIM),
        ("head_dim_v", head_dim_v, min(width, MAX_HEAD_DIM_V)),
    ):
        if not 1 <= size <= most or size % step:
            raise BadTensorShape(
                f"{arg(name)} is {shown(size)}; a latent cache needs a multiple of {step} from {step} to "
                f"{most}" + ("" if name == "head_dim" else ", within a row")
            )


LATENT = Operator(
    name="latent_attention",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    # All query heads read one row of the cache, so they are rows of one tile, also where there is one head.
    axes={
        **ATTENTION.axes,
        "gqa": Axis(lambda _, value: value == "packed", ("packed",), default="packed"),
        "kv_dtype": Axis(
            lambda problem, value: value == (problem.kv_dtype or "none").replace("_", ""),
            KV_DTYPES,
            default="none",
        ),
    },
    grid_dimensions=ATTENTION.grid_dimensions,
    contract=by_name(normalise, without=("lse",)),
    elements_checked=(*LENGTH_ARRAYS, "k_scale"),
    check_elements=check_elements,
    of_lengths=(*LENGTH_ARRAYS, *BOUNDS, "k_scale", "kv_dtype", "sequence_rows"),
)


def operator_for(score: Score | None, lengths: bool = True) -> Operator:
    """``latent_attention``; there is no call with a score modification, nor one without lengths."""
    assert score is None
    assert lengths
    return LATENT
