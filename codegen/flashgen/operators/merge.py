"""The operator ``merge``: two results of attention over disjoint sets of keys become that over both.

With l_1 and l_2 the log-sum-exps of a row (natural logarithm) and m the larger of them,

    lse = m + log(e^(l_1 - m) + e^(l_2 - m)),  out = e^(l_1 - lse) o_1 + e^(l_2 - lse) o_2

(https://arxiv.org/abs/2501.01005, section 2.2). A part whose l is -inf has seen no key: its o is not read.

The bound. Let r_1 and r_2 be the shares e^(l - lse), d = |l_1 - l_2|, and u the unit roundoff of the dtype.

    w = 2^-21 + 2^-22 d
    |error of out| <= 1.01 u |out| + 2^-21 (r_1 |o_1| + r_2 |o_2|) + (w r_1 r_2 + 2^-125) (|o_1| + |o_2|)
                      + least_out
    |error of lse| <= 2^-22 |lse| + 2^-21 + w r_2,  part 2 being the smaller

- w: the relative error of e^-d. The subtraction, and the product with log2(e), are each wrong by 2^-24 of d
  and of 1.44 d; ex2.approx by 2^-22. It moves r_1 r_2 w from one part to the other.
- 2^-21: the reciprocal of the sum, its products with both terms, and the two products with o, in fp32.
- 2^-125: ex2.approx.ftz flushes terms below 2^-126 to 0, and their products with the reciprocal may be.
- 1.01 u |out|: the result is rounded to the dtype. least_out: half of the least step of the dtype.
- 2^-21 of lse: lg2.approx of a sum from 1 to 2, rounded; 2^-22 |lse|: the addition of m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadTensorDtype, BadTensorShape
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    Argument,
    check_array,
    check_devices,
    check_strides,
    place,
)
from flashgen.operators.contract import DTYPES, MAX_SEQLEN, check_head_dim
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.reference import Expected, Verdict

_O_SHAPE, _LSE_SHAPE = "batch seqlen_q num_heads_q head_dim_v", "batch num_heads_q seqlen_q"
_LSE = {"dtypes": ("fp32",), "layout": "contiguous", "alignment": 4}

ARGUMENTS = (
    Argument("o1", "input", _O_SHAPE),
    Argument("lse1", "input", _LSE_SHAPE, **_LSE),
    Argument("o2", "input", _O_SHAPE),
    Argument("lse2", "input", _LSE_SHAPE, **_LSE),
    Argument("out", "output", _O_SHAPE),
    Argument("lse_out", "output", _LSE_SHAPE, **_LSE),
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
    def sizes(self) -> dict[str, int]:
        return {
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "num_heads_q": self.num_heads_q,
            "head_dim_v": self.head_dim_v,
        }

    @property
    def empty(self) -> bool:
        return self.batch * self.seqlen_q == 0

    def wanted(self) -> str:
        return f"dtype {self.dtype}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``query_rows`` counts a query once for each of its heads."""
        return {"query_rows": self.seqlen_q * self.num_heads_q, "batch": self.batch}

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return {}

    def scalar_values(self) -> dict[str, Number]:
        return {}

    def with_scalars(self, given: Sequence[Any]) -> MergeProblem:
        return self


def check_parts(parts: Sequence[tuple[ArrayView, ArrayView]]) -> tuple[dict[str, int], str]:
    """The sizes and the dtype that all parts, each an o and an lse, have in common; parts count from 1 in
    messages. Raises BadTensorShape, BadTensorDtype, BadTensorStrides or DeviceTypeNotSupported.
    """
    for number, (o, lse) in enumerate(parts, 1):
        if len(lse.shape) == len(o.shape) + 1:
            raise BadTensorShape(
                f"o{number} has shape {o.shape} and lse{number} has {lse.shape}; a part is (o, lse), "
                "not (lse, o)"
            )
    first = parts[0][0]
    if first.dtype not in DTYPES:
        raise BadTensorDtype(f"o1 has dtype {first.dtype}; supported are {', '.join(DTYPES)}")
    if len(first.shape) not in (3, 4):
        raise BadTensorShape(
            f"o1 has shape {first.shape}; expected (batch, seqlen_q, num_heads_q, head_dim_v), or that "
            "without batch"
        )
    batch, seqlen_q, heads, head_dim = first.shape if len(first.shape) == 4 else (1, *first.shape)
    check_head_dim("head_dim_v", head_dim, first.dtype)
    if heads < 1 or seqlen_q > MAX_SEQLEN:
        raise BadTensorShape(
            f"o1 has shape {first.shape}; it needs a head, and sequence lengths are at most {MAX_SEQLEN}"
        )
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "num_heads_q": heads, "head_dim_v": head_dim}
    lse_shape = (*first.shape[:-3], heads, seqlen_q)
    for number, (o, lse) in enumerate(parts, 1):
        check_devices({"o1": first, f"o{number}": o, f"lse{number}": lse})
        if o.dtype != first.dtype:
            raise BadTensorDtype(
                f"o{number} has dtype {o.dtype} but o1 has {first.dtype}; they must be the same"
            )
        if o.shape != first.shape:
            raise BadTensorShape(
                f"o{number} has shape {o.shape} but o1 has {first.shape}; they must be the same"
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
    given = {"out": out, "lse_out": lse_out}
    check_devices({"o1": o1} | {name: view for name, view in given.items() if view is not None})
    if out is not None:
        check_array(ARGUMENTS[4], out, sizes, dtype)
        if out.shape != o1.shape:
            raise BadTensorShape(f"out has shape {out.shape}; expected that of o1, {o1.shape}")
    if lse_out is not None:
        _check_lse("lse_out", lse_out, lse1.shape)
    views = (o1, lse1, o2, lse2, out, lse_out)
    return MergeProblem(
        **sizes,
        dtype=dtype,
        strides=tuple(
            place(argument, view, sizes, dtype).strides
            for argument, view in zip(ARGUMENTS, views, strict=True)
        ),
        batched=len(o1.shape) == 4,
        device=o1.device,
    )


def _check_lse(name: str, view: ArrayView, shape: tuple[int, ...]) -> None:
    if view.dtype != "fp32":
        raise BadTensorDtype(f"{name} has dtype {view.dtype}; expected fp32")
    if view.shape != shape:
        raise BadTensorShape(f"{name} has shape {view.shape}; expected {shape}: a number for each row")
    check_strides(Argument(name, "input", _LSE_SHAPE, **_LSE), view, DTYPE_BYTES["fp32"])


def _normalise(views: Sequence[ArrayView | None], options: Sequence[Any], scalars: Sequence[Any]) -> Problem:
    return normalise(*views)


MERGE = Operator(
    name="merge",
    arguments=ARGUMENTS,
    options=(),
    scalars=(),
    axes={"dtype": Axis(lambda problem, value: value == problem.dtype, DTYPES)},
    grid_dimensions=("query_rows", "batch"),
    normalise=_normalise,
)


def expected(o1: Any, lse1: Any, o2: Any, lse2: Any, dtype: str) -> Expected:
    """The result in float64, and the bound for a kernel that computes in ``dtype``. Each o is (batch,
    seqlen_q, num_heads_q, head_dim_v), each lse (batch, num_heads_q, seqlen_q), of NumPy, in float64, with
    elements as the kernel got them.
    """
    import numpy as np

    from flashgen.operators.reference import LEAST_OUT, UNIT_ROUNDOFF, Expected

    larger, smaller = np.maximum(lse1, lse2), np.minimum(lse1, lse2)
    sees_nothing, alone = larger == -np.inf, smaller == -np.inf
    difference = np.where(alone, 0.0, np.where(alone, 0.0, larger) - np.where(alone, 0.0, smaller))
    lse = larger + np.log1p(np.where(alone, 0.0, np.exp(-difference)))
    base = np.where(sees_nothing, 0.0, lse)
    share1, share2 = np.exp(lse1 - base), np.exp(lse2 - base)
    weight_error = 2.0**-21 + 2.0**-22 * difference
    lse_bound = 2.0**-22 * np.abs(base) + 2.0**-21 + weight_error * np.minimum(share1, share2)

    def of_rows(x: Any) -> Any:
        return x.swapaxes(1, 2)[..., None]

    of_part1 = np.where(of_rows(lse1) == -np.inf, 0.0, o1)
    of_part2 = np.where(of_rows(lse2) == -np.inf, 0.0, o2)
    r1, r2 = of_rows(share1), of_rows(share2)
    out = r1 * of_part1 + r2 * of_part2
    size1, size2 = np.abs(of_part1), np.abs(of_part2)
    out_bound = 1.01 * UNIT_ROUNDOFF[dtype] * np.abs(out) + 2.0**-21 * (r1 * size1 + r2 * size2)
    out_bound += (of_rows(weight_error) * r1 * r2 + 2.0**-125) * (size1 + size2) + LEAST_OUT[dtype]
    return Expected(
        out,
        lse,
        np.where(of_rows(sees_nothing), 0.0, out_bound),
        np.where(sees_nothing, 0.0, lse_bound),
    )


def judge(
    problem: MergeProblem,
    o1: np.ndarray,
    lse1: np.ndarray,
    o2: np.ndarray,
    lse2: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
) -> Verdict:
    """Compare the results of a call with float64, on the host. Arrays have the shapes of the contract;
    bfloat16 elements may be of ml_dtypes, their bits in uint16, or numbers.
    """
    import numpy as np

    from flashgen.operators.numbers import widened
    from flashgen.operators.reference import Verdict, largest

    def batched(x: np.ndarray) -> np.ndarray:
        return x if problem.batched else x[None]

    o1, o2, out = (batched(widened(x, problem.dtype)) for x in (o1, o2, out))
    lse1, lse2, lse = (batched(x).astype(np.float64) for x in (lse1, lse2, lse))
    right = expected(o1, lse1, o2, lse2, problem.dtype)
    return Verdict(largest(out, right.out, right.out_bound), largest(lse, right.lse, right.lse_bound))
