"""The operator ``latent_attention``: decoding in the latent space of MLA (https://arxiv.org/abs/2405.04434).

A token has one row in the cache, ``k``, for all query heads: the latent, then its rotary part. Its key is the
whole row, and its value the first ``head_dim_v`` elements, which kernels read once for both:

    out = softmax(q k^T * softmax_scale, masked) k[:, :head_dim_v]

Sequences are as in calls of attention with lengths. The elements of q may be in two arrays: the first
``head_dim_v`` in ``q``, which meet the latent, the others in ``q_rope``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.errors import BadTensorDtype, BadTensorShape, NullPointer, arg
from flashgen.operators import attention, contract, kvcodes, latentrows
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ROW_ALIGNMENT,
    Argument,
    check_devices,
    check_strides,
    place,
    shown,
)
from flashgen.operators.attention import ATTENTION, SCALARS, AttentionProblem, check_elements
from flashgen.operators.lengths import BOUNDS, LENGTH_ARRAYS
from flashgen.operators.operator import Axis, Operator, by_name
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.arguments import ArrayLayout, ArrayView
    from flashgen.operators.operator import Number, Value

# Of DeepSeek's models: a latent of 512 elements, and 64 with a rotary embedding.
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512
_GROUP = 64  # rows of the tiles of flash_mla_decode_sm90
_NAMES = ("q", "k", *LENGTH_ARRAYS, "k_scale", "out", "lse")
_FORWARD = {argument.name: argument for argument in ATTENTION.with_lengths.arguments}
# The elements of q from head_dim_v on, where they are in an array of their own.
Q_ROPE = Argument("q_rope", "input", "batch_q rows_q num_heads_q head_dim_rope", optional=True)
ARGUMENTS = (*(_FORWARD[name]._replace(differentiable=False) for name in _NAMES), Q_ROPE)
OPTIONS = ("causal", "mask_type", "head_dim_v", "return_lse", "splits", *BOUNDS, "kv_dtype")
KV_DTYPES = (*kvcodes.KV_DTYPES, latentrows.LAYOUT.replace("_", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProblem(AttentionProblem):
    """Shapes, strides and options of one call, as of a call of attention with lengths whose values are the
    first ``head_dim_v`` elements of its keys.
    """

    operator_name: ClassVar[str] = "latent_attention"

    @staticmethod
    def check_sizes(sizes: Mapping[str, int], dtype: str) -> None:
        """As for attention, but for the head dims, which `normalise` has checked."""
        contract.check_heads_and_lengths(sizes)

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

    @property
    def sizes(self) -> dict[str, int]:
        return AttentionProblem.sizes.fget(self) | {"head_dim_rope": self.head_dim - self.head_dim_v}

    def dtype_of(self, argument: Argument) -> str:
        dtype = AttentionProblem.dtype_of(self, argument)
        return kvcodes.E4M3 if dtype == latentrows.LAYOUT else dtype

    def layout_of(self, position: int, sizes: Mapping[str, int]) -> ArrayLayout | None:
        layout = AttentionProblem.layout_of(self, position, sizes)
        if layout is None:
            return None
        width = self._width_of(layout.argument.name)
        return layout if width is None else layout._replace(extents=(*layout.extents[:-1], width))

    def shape(self, position: int) -> tuple[int, ...]:
        shape = AttentionProblem.shape(self, position)
        width = self._width_of(self.operator.arguments[position].name)
        return shape if width is None else (*shape[:-1], width)

    def _width_of(self, name: str) -> int | None:
        """The last extent of an array of the call that is not as its argument says; None: it is."""
        if name == "q" and self.has("q_rope"):
            return self.head_dim_v
        return latentrows.ROW_BYTES if name == "k" and self.has_packed_rows else None

    def of_sequence(self, q_length: int, kv_length: int) -> AttentionProblem:
        """As of attention; packed rows are unpacked there, see `sequences.arrays_of`."""
        problem = AttentionProblem.of_sequence(self, q_length, kv_length)
        return dataclasses.replace(problem, kv_dtype=None) if self.has_packed_rows else problem

    def description(self) -> str:
        paged = "paged" if self.lengths is not None and self.lengths.paged else "none"
        return (
            f"a latent cache, head_dim {self.head_dim}, head_dim_v {self.head_dim_v}, dtype {self.dtype}, "
            f"mask_type {self.mask_type}, pages {paged}"
            + (", q_rope" if self.has("q_rope") else "")
            + ("" if self.kv_dtype is None else f", kv_dtype {self.kv_dtype}")
            + ("" if self.splits == AUTO else f", splits {self.splits}")
        )


def normalise(
    q: ArrayView,
    k: ArrayView,
    *,
    head_dim_v: int,
    q_rope: ArrayView | None = None,
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
    if q_rope is not None:
        q = whole_view(q, q_rope, k, head_dim_v, kv_dtype)
        views["q"] = q
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
    problem = attention.normalise(q, k, v, out=out, kv_dtype=kv_dtype, problem_class=LatentProblem, **others)
    if problem.num_heads_kv != 1:
        raise BadTensorShape(
            f"{arg('k')} has {problem.num_heads_kv} heads; a latent cache has one, which all heads of "
            f"{arg('q')} read"
        )
    if q_rope is not None:
        of_rope = place(Q_ROPE, q_rope, problem.sizes, problem.dtype).strides
        problem = dataclasses.replace(problem, strides=(*problem.strides[:-1], of_rope))
    return dataclasses.replace(problem, kv_dtype=latentrows.LAYOUT) if is_packed else problem


def whole_view(
    q: ArrayView, q_rope: ArrayView, k: ArrayView, head_dim_v: int, kv_dtype: str | None
) -> ArrayView:
    """The view of q as if its rows had the elements of ``q_rope``, too. Raises BadTensorDtype,
    BadTensorShape, BadTensorStrides and DeviceTypeNotSupported.
    """
    check_devices({"q": q, "q_rope": q_rope})
    if q_rope.dtype != q.dtype:
        raise BadTensorDtype(
            f"{arg('q_rope')} has dtype {q_rope.dtype} but {arg('q')} has {q.dtype}; they must be the same"
        )
    if not q.shape or q.shape[-1] != head_dim_v:
        raise BadTensorShape(
            f"{arg('q')} has shape {q.shape}, and {arg('q_rope')} was given; then rows of {arg('q')} have "
            f"head_dim_v = {shown(head_dim_v)} elements"
        )
    width = latentrows.HEAD_DIM if kv_dtype == latentrows.LAYOUT else k.shape[-1] if k.shape else 0
    rotary = width - head_dim_v
    if not 1 <= rotary <= head_dim_v:
        raise BadTensorShape(
            f"{arg('q_rope')} was given, and {arg('k')} has head_dim {width} and head_dim_v {head_dim_v}; "
            f"{arg('q_rope')} has the elements of a row after its value, from 1 to as many as the value"
        )
    expected = (*q.shape[:-1], rotary)
    if q_rope.shape != expected:
        raise BadTensorShape(
            f"{arg('q_rope')} has shape {q_rope.shape}; expected {expected}: the shape of {arg('q')}, with "
            f"the rest of a row of {arg('k')}, {width} - {head_dim_v}"
        )
    check_strides(Q_ROPE, q_rope, DTYPE_BYTES.get(q_rope.dtype, 1))
    return dataclasses.replace(q, shape=(*q.shape[:-1], width))


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
        "kv_dtype": Axis.equal(kvcodes.kv_dtype_word, KV_DTYPES, "none"),
        "q_rope": Axis.either("rope", lambda problem: problem.has("q_rope")),
    },
    grid_dimensions=ATTENTION.grid_dimensions,
    contract=by_name(normalise, without=("lse",)),
    elements_checked=(*LENGTH_ARRAYS, "k_scale"),
    check_elements=check_elements,
    of_lengths=(*LENGTH_ARRAYS, *BOUNDS, "k_scale", "kv_dtype", "q_rope", "sequence_rows"),
)
