"""Random problems of latent_attention for one variant, in memory where all that belongs to no sequence is
NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators import latentrows
from flashgen.operators.kvcodes import E4M3
from flashgen.operators.latent import normalise
from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.numbers import bfloat16_bits
from flashgen.operators.splits import AUTO
from flashgen.schedule.grid import heads
from flashgen.simulator import randomarrays
from flashgen.simulator.attention_example import (
    ROWS_AFTER,
    check_sizes,
    described,
    expected_keys,
    masked,
    page_sizes_of,
    splits_for,
    worst_of_sequences,
)
from flashgen.simulator.example import PlainExample, random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.families.variant import Variant
    from flashgen.operators.latent import LatentProblem
    from flashgen.operators.reference import Verdict
    from flashgen.simulator.example import Shape


def judge(problem: LatentProblem, arrays: dict[str, np.ndarray | None]) -> Verdict:
    """As `AttentionExample.judge`."""
    lengths = {name: x for name, x in arrays.items() if name in LENGTH_ARRAYS}
    others = {name: x for name, x in arrays.items() if name not in LENGTH_ARRAYS}
    return worst_of_sequences(problem, lengths, others)


def example_of(
    problem: LatentProblem,
    arrays: dict[str, np.ndarray | None],
    compare: Callable[[Any, dict[str, np.ndarray | None]], Verdict],
) -> PlainExample:
    """The example with these arrays by name."""
    return PlainExample(
        problem, problem.operator.in_order(**arrays), compare, described(problem, arrays["q"])
    )


def make(variant: Variant, shape: Shape, seed: int) -> PlainExample:
    """Normal random q and latent rows for ``variant``; outputs, and what is between rows, are NaN. Sequences
    are as in `attention_example.make`, and raise the same errors; keys are in a cache. Raises BadParam for
    heads that do not fill the variant's clusters.
    """
    rng = np.random.default_rng(seed)
    head_dim, head_dim_v, _ = check_sizes(variant, shape)
    q_lengths, kv_lengths = (
        randomarrays.random_lengths(rng, shape.batch, most) for most in (shape.seqlen_q, shape.seqlen_kv)
    )
    lengths: dict[str, np.ndarray | None] = dict.fromkeys(LENGTH_ARRAYS)
    packed_q = bool(rng.integers(2))
    if packed_q:
        q_rows, used = randomarrays.packed(rng, lengths, "cu_seqlens_q", q_lengths, ROWS_AFTER)
    else:
        q_rows, used = (shape.batch, shape.seqlen_q), None
    of_q = {
        name: randomarrays.used_rows(
            rng, (*q_rows, shape.heads, width), used, variant.dtype, shape.spread, shape.gap
        )
        for name, width in widths_of_q(variant, head_dim, head_dim_v).items()
    }
    if variant.axis("pages") == "paged":
        kv_rows, used = randomarrays.paged(rng, lengths, kv_lengths, page_sizes_of(variant))
    else:
        kv_rows, used = randomarrays.cache_rows(rng, lengths, kv_lengths, shape)
    k, of_codes = latent_rows(rng, variant, shape, (*kv_rows, 1, head_dim), used)
    out = rows_within_nan((*q_rows, shape.heads, head_dim_v), variant.dtype, shape.gap)
    lse = np.full((q_rows[0], shape.heads, q_rows[1]), np.nan, np.float32) if shape.return_lse else None
    if packed_q:
        of_q = {name: x[0] for name, x in of_q.items()}
        out, lse = out[0], None if lse is None else lse[0]
    splits = splits_for(variant, shape)
    scales = randomarrays.scales_of(rng, variant, shape.batch, 1)
    scales.pop("v_scale", None)
    of_call = {name: scale[:, None] for name, scale in scales.items()}
    problem = normalise(
        k=view_of(k, variant.dtype if not of_codes else "e4m3"),
        **{name: view_of(x, variant.dtype) for name, x in of_q.items()},
        **{name: None if x is None else view_of(x, "int32") for name, x in lengths.items()},
        **randomarrays.array_views({name: scale[..., 0] for name, scale in scales.items()}),
        kv_dtype=of_codes,
        head_dim_v=head_dim_v,
        out=view_of(out, variant.dtype),
        softmax_scale=head_dim**-0.5,
        causal=variant.mask_type == "causal",
        max_seqlen_q=shape.seqlen_q if packed_q and splits != AUTO else None,
        max_seqlen_kv=expected_keys(rng, shape, splits),
        return_lse=shape.return_lse,
        splits=splits,
    )
    problem = masked(problem, variant, shape)
    if heads(problem, variant) % variant.grid.cluster:
        count = 64 * variant.grid.cluster
        raise BadParam(f"heads is {shape.heads}, and clusters of {variant.name} take multiples of {count}")
    arrays = {**of_q, "k": k, "out": out, "lse": lse, **of_call, **lengths}
    return example_of(problem, arrays, judge)


def widths_of_q(variant: Variant, head_dim: int, head_dim_v: int) -> dict[str, int]:
    """The widths of the arrays that hold the queries of a call, by name."""
    if variant.axis("q_rope") == "none":
        return {"q": head_dim}
    return {"q": head_dim_v, "q_rope": head_dim - head_dim_v}


def latent_rows(
    rng: np.random.Generator, variant: Variant, shape: Shape, size: tuple[int, ...], used: np.ndarray
) -> tuple[np.ndarray, str | None]:
    """Latent rows as a variant reads them, and the kv_dtype of its calls. Rows that are not used are NaN:
    codes, scales and elements.
    """
    kv_dtype = variant.axis("kv_dtype")
    if kv_dtype == "none":
        return randomarrays.used_rows(rng, size, used, variant.dtype, 1.0, shape.gap), None
    if kv_dtype == E4M3:
        return randomarrays.used_rows(rng, size, used, E4M3, 1.0, shape.gap), E4M3
    rows = random_rows(rng, (*size[:-1], latentrows.ROW_BYTES), E4M3, 8.0, shape.gap)
    scales = np.exp(rng.uniform(-3, -1, (*size[:-1], 4))).astype(np.float32)
    rows[..., latentrows.SCALES] = scales.view(np.uint8)
    rotary = bfloat16_bits(rng.standard_normal((*size[:-1], size[-1] - latentrows.HEAD_DIM_V)))
    rows[..., latentrows.ROTARY] = rotary.view(np.uint8)
    rows[~used] = 0xFF
    return rows, latentrows.LAYOUT
