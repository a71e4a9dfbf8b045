"""The operator ``merge``: two results of attention over disjoint sets of keys become that over both.

With l_1 and l_2 the log-sum-exps of a row (natural logarithm) and m the larger of them,

    lse = m + log(e^(l_1 - m) + e^(l_2 - m)),  out = e^(l_1 - lse) o_1 + e^(l_2 - lse) o_2

(https://arxiv.org/abs/2501.01005, section 2.2). A part whose l is -inf has seen no key: it has a weight of 0,
and its o is not read. So it is where l is +inf, flash-attn's mark of a row without keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import BadTensorDtype, BadTensorShape, arg
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    WHOLE_FP32,
    Argument,
    check_array,
    check_devices,
    check_strides,
    strides_of,
)
from flashgen.operators.contract import DTYPES, check_head_dim, check_rows
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value, by_position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView

_O_SHAPE, _LSE_SHAPE = "batch seqlen_q num_heads_q head_dim_v", "batch num_heads_q seqlen_q"
ARGUMENTS = (
    Argument("o1", "input", _O_SHAPE),
    Argument("lse1", "input", _LSE_SHAPE, **WHOLE_FP32),
    Argument("o2", "input", _O_SHAPE),
    Argument("lse2", "input", _LSE_SHAPE, **WHOLE_FP32),
    Argument("out", "output", _O_SHAPE),
    Argument("lse_out", "output", _LSE_SHAPE, **WHOLE_FP32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProblem(Problem):
    """Shapes and strides of one merge of two parts."""

    batch: int
    seqlen_q: int
    num_heads_q: int
    head_dim_v: int

    @property
    def operator(self) -> Operator:
        return MERGE

    @property
    def empty(self) -> bool:
        return self.batch * self.seqlen_q == 0

    def description(self) -> str:
        return f"dtype {self.dtype}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``query_rows`` counts a query once for each of its heads."""
        return {"query_rows": self.seqlen_q * self.num_heads_q, "batch": self.batch}

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return {}


def check_parts(parts: Sequence[tuple[ArrayView, ArrayView]]) -> tuple[dict[str, int], str]:
    """The sizes and the dtype that all parts, each an o and an lse, have in common; parts count from 1 in
    messages. Raises BadTensorShape, BadTensorDtype, BadTensorStrides or DeviceTypeNotSupported.
    """
    for number, (o, lse) in enumerate(parts, 1):
        if len(lse.shape) == len(o.shape) + 1:
            raise BadTensorShape(
                f"{arg(f'o{number}')} has shape {o.shape} and {arg(f'lse{number}')} has {lse.shape}; a part "
                "is (o, lse), not (lse, o)"
            )
    first = parts[0][0]
    batch, seqlen_q, heads, head_dim = check_rows("o1", first, "seqlen_q, num_heads_q, head_dim_v")
    check_head_dim("head_dim_v", head_dim, first.dtype)
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "num_heads_q": heads, "head_dim_v": head_dim}
    lse_shape = (*first.shape[:-3], heads, seqlen_q)
    for number, (o, lse) in enumerate(parts, 1):
        check_devices({"o1": first, f"o{number}": o, f"lse{number}": lse})
        if o.dtype != first.dtype:
            raise BadTensorDtype(
                f"{arg(f'o{number}')} has dtype {o.dtype} but {arg('o1')} has {first.dtype}; they must be "
                "the same"
            )
        if o.shape != first.shape:
            raise BadTensorShape(
                f"{arg(f'o{number}')} has shape {o.shape} but {arg('o1')} has {first.shape}; they must be "
                "the same"
            )
        check_strides(Argument(f"o{number}", "input", _O_SHAPE), o, DTYPE_BYTES[o.dtype])
        _check_lse(f"lse{number}", lse, lse_shape)
    return sizes, first.dtype


def normalise(
    o1: ArrayView,
    lse1: ArrayView,
    o2: ArrayView,
    lse2: ArrayView,
    out: ArrayView | None = None,
    lse_out: ArrayView | None = None,
) -> MergeProblem:
    """The Problem of a call, or the error of the contract that it breaks; see ``check_parts``."""
    sizes, dtype = check_parts([(o1, lse1), (o2, lse2)])
    outputs = {"out": out, "lse_out": lse_out}
    check_devices({"o1": o1} | {name: view for name, view in outputs.items() if view is not None})
    if out is not None:
        check_array(ARGUMENTS[MERGE.position("out")], out, sizes, dtype)
        if out.shape != o1.shape:
            raise BadTensorShape(
                f"{arg('out')} has shape {out.shape}; expected {o1.shape}, the shape of {arg('o1')}"
            )
    if lse_out is not None:
        _check_lse("lse_out", lse_out, lse1.shape)
    views = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2} | outputs
    return MergeProblem(
        **sizes,
        dtype=dtype,
        strides=strides_of(ARGUMENTS, views, sizes, dtype),
        batched=len(o1.shape) == 4,
        device=o1.device,
    )


def _check_lse(name: str, view: ArrayView, shape: tuple[int, ...]) -> None:
    if view.dtype != "fp32":
        raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; expected fp32")
    if view.shape != shape:
        raise BadTensorShape(f"{arg(name)} has shape {view.shape}; expected {shape}: a number for each row")
    check_strides(Argument(name, "input", _LSE_SHAPE, **WHOLE_FP32), view, DTYPE_BYTES["fp32"])


MERGE = Operator(
    name="merge",
    arguments=ARGUMENTS,
    options=(),
    scalars=(),
    axes={"dtype": Axis.equal(lambda problem: problem.dtype, DTYPES)},
    grid_dimensions=("query_rows", "batch"),
    contract=by_position(normalise),
)
