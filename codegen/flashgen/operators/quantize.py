"""The operator ``quantize``: numbers become e4m3 codes, each times a scale.

e4m3 has 4 bits of exponent and 3 of fraction: normal numbers from 2^-6 to 448, steps of 2^-9 below, no
infinity, and one NaN (https://arxiv.org/abs/2209.05433). With a the largest finite |x| that shares a scale,

    scale = max(a / 448, 2^-126), and 1 where a is 0;  code = e4m3(x * (1 / scale))

each operation rounded to nearest in fp32. A number past 448 becomes 448, an infinite one too; NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, arg
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    WHOLE_FP32,
    Argument,
    check_array,
    check_devices,
    check_strides,
    place,
    shown,
)
from flashgen.operators.contract import DTYPES, MAX_HEAD_DIM, check_rows
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value, by_position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayView

Per = Literal["given", "token", "head", "tensor"]
PER = ("given", "token", "head", "tensor")
LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-126  # the least whose reciprocal is finite in fp32
VECTOR = 8  # elements that a thread converts at once

_SCALE_SHAPE = "scale_batch scale_seqlen scale_heads"

ARGUMENTS = (
    Argument("x", "input", "batch seqlen num_heads head_dim"),
    Argument("scale", "input", _SCALE_SHAPE, optional=True, **WHOLE_FP32),
    Argument("codes", "output", "batch seqlen num_heads head_dim", ("e4m3", "uint8"), alignment=VECTOR),
    Argument("scale_out", "output", _SCALE_SHAPE, **WHOLE_FP32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeProblem(Problem):
    """Shapes and strides of one call. ``per`` is what shares a scale; "given" is a scale of the caller's."""

    batch: int
    seqlen: int
    num_heads: int
    head_dim: int
    scale_batch: int
    scale_seqlen: int
    scale_heads: int
    per: Per

    @property
    def operator(self) -> Operator:
        return QUANTIZE

    @property
    def empty(self) -> bool:
        # Of no elements there is a scale all the same.
        return self.batch * self.seqlen == 0 and self.per not in ("head", "tensor")

    @property
    def num_scales(self) -> int:
        """How many scales are computed before the codes."""
        return {"head": self.num_heads, "tensor": 1}.get(self.per, 0)

    def shape(self, position: int) -> tuple[int, ...]:
        extents = self.operator.arguments[position].extents(self.sizes)
        return extents if self.batched else extents[1:]

    def description(self) -> str:
        return f"dtype {self.dtype}, per {self.per}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``scales`` are the ones that are computed before the codes."""
        return {
            "tokens": self.seqlen,
            "heads": self.num_heads,
            "batch": self.batch,
            "scales": self.num_scales,
        }

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        """The steps are in elements of the scales."""
        per_token = self.scale_heads
        per_batch = per_token * self.scale_seqlen
        return {
            "scale_batch_step": per_batch if self.scale_batch > 1 else 0,
            "scale_row_step": per_token if self.scale_seqlen > 1 else 0,
            "scale_head_step": 1 if self.scale_heads > 1 else 0,
            "batch_size": self.batch,
        }


def normalise(
    x: ArrayView,
    scale: ArrayView | None = None,
    codes: ArrayView | None = None,
    scale_out: ArrayView | None = None,
    *,
    per: str = "tensor",
) -> QuantizeProblem:
    """The Problem of a call, or the error of the contract that it breaks.

    Raises BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides or DeviceTypeNotSupported.
    """
    if per not in PER or (per == "given") != (scale is not None):
        allowed = " or ".join(map(repr, PER[1:]))
        raise BadParam(f"{arg('per')} is {shown(per)}; expected {allowed}")
    batch, seqlen, num_heads, head_dim = _check_x(x)
    full = {"scale_batch": batch, "scale_seqlen": seqlen, "scale_heads": num_heads}
    extents = tuple(full.values())
    extents = scale_shape(extents, per) if scale is None else _scale_extents(scale, extents)
    shared = dict(zip(full, extents, strict=True))
    sizes = {"batch": batch, "seqlen": seqlen, "num_heads": num_heads, "head_dim": head_dim} | shared
    views = (x, scale, codes, scale_out)
    check_devices({a.name: view for a, view in zip(ARGUMENTS, views, strict=True) if view is not None})
    if codes is not None:
        check_array(ARGUMENTS[2], codes, sizes, x.dtype)
        if codes.shape != x.shape:
            raise BadTensorShape(
                f"{arg('codes')} has shape {codes.shape}; expected {x.shape}, the shape of {arg('x')}"
            )
    return QuantizeProblem(
        **sizes,
        per=per,
        dtype=x.dtype,
        batched=len(x.shape) == 4,
        strides=tuple(
            None
            if argument.name == ("scale" if scale is None else "scale_out")
            else place(argument, view, sizes, x.dtype).strides
            for argument, view in zip(ARGUMENTS, views, strict=True)
        ),
        device=x.device,
    )


def scale_shape(rows: Sequence[int], per: str) -> tuple[int, ...]:
    """The shape of the scales of an array with this shape, but for its head_dim."""
    *tokens, heads = rows
    if per == "token":
        return (*tokens, heads)
    return (*(1 for _ in tokens), heads if per == "head" else 1)


def _check_x(x: ArrayView) -> tuple[int, ...]:
    """The extents of x. Raises BadTensorDtype, BadTensorShape or BadTensorStrides."""
    extents = check_rows("x", x, "seqlen, num_heads, head_dim")
    head_dim = extents[-1]
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % VECTOR:
        raise BadTensorShape(
            f"{arg('x')} has a head_dim of {head_dim}; expected a multiple of {VECTOR}, at most "
            f"{MAX_HEAD_DIM}"
        )
    check_strides(ARGUMENTS[0], x, DTYPE_BYTES[x.dtype])
    return extents


def _scale_extents(scale: ArrayView, full: tuple[int, ...]) -> tuple[int, ...]:
    """The extents of a scale, which broadcasts from the right. Raises BadTensorDtype, BadTensorShape or
    BadTensorStrides.
    """
    if scale.dtype != "fp32":
        raise BadTensorDtype(f"{arg('scale')} has dtype {scale.dtype}; expected fp32")
    extents = (1,) * (len(full) - len(scale.shape)) + tuple(scale.shape)
    if len(extents) != len(full) or any(n not in (1, all_) for n, all_ in zip(extents, full, strict=True)):
        raise BadTensorShape(
            f"{arg('scale')} has shape {tuple(scale.shape)}; it must broadcast, from the right, to (batch, "
            f"seqlen, num_heads) = {full}"
        )
    check_strides(ARGUMENTS[1], scale, DTYPE_BYTES["fp32"])
    return extents


def _check_elements(problem: QuantizeProblem, arrays: Mapping[str, np.ndarray | None]) -> None:
    """Raise BadParam for a scale that is no normal number above 0: it, or its reciprocal, has no use."""
    scale = arrays["scale"]
    if scale is not None and not ((scale >= LEAST_SCALE) & (scale < 2.0**126)).all():
        raise BadParam(f"{arg('scale')} has an element that is not from 2^-126 to 2^126")


QUANTIZE = Operator(
    name="quantize",
    arguments=ARGUMENTS,
    options=("per",),
    scalars=(),
    axes={
        "dtype": Axis.equal(lambda problem: problem.dtype, DTYPES),
        "per": Axis.equal(lambda problem: problem.per, PER),
    },
    grid_dimensions=("tokens", "heads", "batch", "scales"),
    contract=by_position(normalise),
    elements_checked=("scale",),
    check_elements=_check_elements,
)
