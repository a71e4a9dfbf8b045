"""Random problems of score_gradient for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators.reduction import parameter, reduction
from flashgen.operators.score_gradient import normalise
from flashgen.operators.score_gradient_reference import judge
from flashgen.operators.scores import DIMENSIONS
from flashgen.simulator import randomarrays
from flashgen.simulator.attention_backward_example import fill_forward
from flashgen.simulator.attention_example import check_sizes, described, masked, sizes_of_scores
from flashgen.simulator.example import PlainExample, random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.score_gradient import ScoreGradientProblem
    from flashgen.simulator.example import Shape


def make(variant: Variant, shape: Shape, seed: int) -> PlainExample:
    """Normal random inputs for ``variant``, with the results that a forward call has for them; the gradient,
    and what is between rows, are NaN. The array is broadcast as the variant sums, and over batch entries or
    heads, as the seed will. ``shape.return_lse`` is whether LSE has a gradient.

    Raises BadParam for sizes that are not the variant's, and for an array that is not summed as the variant
    sums; and what the contract raises.
    """
    rng = np.random.default_rng(seed)
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    dtype, gap = variant.dtype, shape.gap
    rows, keys = (shape.batch, shape.seqlen_q, shape.heads), (shape.batch, shape.seqlen_kv, kv_heads)
    lse = (shape.batch, shape.heads, shape.seqlen_q)
    arrays = {
        "dout": random_rows(rng, (*rows, head_dim_v), dtype, 1.0, gap),
        "q": random_rows(rng, (*rows, head_dim), dtype, shape.spread, gap),
        "k": random_rows(rng, (*keys, head_dim), dtype, 1.0, gap),
        "v": random_rows(rng, (*keys, head_dim_v), dtype, 1.0, gap),
        "mask": randomarrays.random_mask(rng, shape) if variant.mask_type == "dense" else None,
        "out": rows_within_nan((*rows, head_dim_v), dtype, gap),
        "lse": np.zeros(lse, np.float32),
        "dlse": rng.standard_normal(lse, np.float32) if shape.return_lse else None,
    }
    score_arrays = _score_arrays(rng, variant, shape)
    dtypes = dict.fromkeys(("dout", "q", "k", "v", "out"), dtype)
    dtypes |= {"mask": "uint8", "lse": "fp32", "dlse": "fp32"}
    problem = normalise(
        **{name: view_of(x, dtypes[name]) for name, x in arrays.items() if x is not None},
        **randomarrays.score_of_call(rng, variant.score, score_arrays),
    )
    if variant.score is None:
        problem = _broadcast(problem, variant, rng)
    if problem.reduction.sums != variant.axis("sums"):
        raise BadParam(f"{variant.name} sums otherwise than {problem.reduction.sums}")
    problem = masked(problem, variant, shape)
    of_array = np.float32 if variant.score is None else parameter(variant.score).dtype
    arrays["dscore"] = _nan(problem.array_shape, of_array)
    params = variant.score.arrays if variant.score else ()
    arrays |= {param.name: x for param, x in zip(params, score_arrays, strict=True)}
    in_order = problem.operator.in_order(**arrays)
    example = PlainExample(problem, in_order, judge, described(problem, arrays["q"]))
    fill_forward(problem, example.named)
    return example


def _nan(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if dtype == "bf16":
        return np.full(shape, 0xFFFF, np.uint16)
    return np.full(shape, np.nan, {"fp16": np.float16, "fp32": np.float32}.get(dtype, dtype))


def _score_arrays(rng: np.random.Generator, variant: Variant, shape: Shape) -> tuple[np.ndarray, ...]:
    """Random arrays of the modification; the one that it is differentiated by is broadcast so that the
    variant sums it.
    """
    score = variant.score
    arrays = list(randomarrays.score_arrays_of(rng, score, sizes_of_scores(shape)))
    if score is None:
        return tuple(arrays)
    place = score.arrays.index(parameter(score))
    array, sums = arrays[place], variant.axis("sums")
    for _ in range(64):
        kept = (*(rng.integers(2, size=len(array.shape) - 1) > 0), True)
        names = parameter(score).dimensions
        some = tuple(
            slice(None) if keep or name not in DIMENSIONS else slice(0, 1)
            for name, keep in zip(names, kept, strict=True)
        )
        if reduction(score, array[some].shape).sums == sums:
            arrays[place] = np.ascontiguousarray(array[some])
            break
    return tuple(arrays)


def _broadcast(
    problem: ScoreGradientProblem, variant: Variant, rng: np.random.Generator
) -> ScoreGradientProblem:
    """The problem of the gradient of the scores themselves, summed as the variant does: no call makes it."""
    batch, heads, rows, keys = problem.array_shape
    sums = str(variant.axis("sums"))
    if sums == "diagonals":
        raise BadParam(f"{variant.name} sums by distance, which needs a score with an array of distances")
    kept = {"none": (rows, keys), "rows": (rows, 1), "columns": (1, keys), "all": (1, 1)}
    first = (batch if rng.integers(2) else 1, heads if rng.integers(2) else 1)
    return problem.of_array((*first, *kept[sums]))
