"""Random problems of sparse_latent_attention for one variant, in memory where rows that no list
names are NaN."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators import reference
from flashgen.operators.kvcodes import E4M3
from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.sparse_latent import NO_TOKEN, normalise, queries
from flashgen.simulator import randomarrays
from flashgen.simulator.attention_example import check_sizes, page_sizes_of, worst_of
from flashgen.simulator.example import random_rows, rows_within_nan, view_of
from flashgen.simulator.latent_attention_example import example_of, latent_rows, widths_of_q

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.reference import Verdict
    from flashgen.operators.sparse_latent import SparseLatentProblem
    from flashgen.simulator.example import PlainExample, Shape

# Most tokens of a sequence for each entry of a list.
_TOKENS_PER_ENTRY = 2


def judge(problem: SparseLatentProblem, arrays: dict[str, np.ndarray | None]) -> Verdict:
    """The worst verdict on the queries of the problem."""
    return worst_of(
        (reference.judge(*query) for query in queries(problem, arrays)), arrays["lse"] is not None
    )


def random_indices(rng: np.random.Generator, lengths: np.ndarray, rows: int, topk: int) -> np.ndarray:
    """Lists of tokens of sequences of these lengths: some are of different tokens, some name one twice, some
    end early, some have entries that name none anywhere, and some name none at all.
    """
    indices = np.full((len(lengths), rows, topk), NO_TOKEN, np.int32)
    for b, i in np.ndindex(indices.shape[:2]):
        length = int(lengths[b])
        kind = rng.integers(5)
        count = min(topk, length) if kind else int(rng.integers(topk + 1)) if length else 0
        tokens = rng.permutation(length)[:count] if kind else rng.integers(0, max(1, length), count)
        if kind == 1:
            tokens = tokens[: int(rng.integers(count + 1))]
        indices[b, i, : len(tokens)] = tokens
        if kind == 2:
            indices[b, i, rng.random(topk) < 0.5] = NO_TOKEN
        elif kind == 3:
            indices[b, i] = rng.permutation(indices[b, i])
    return indices


def named_rows(
    kv_rows: tuple[int, int], indices: np.ndarray, lengths: dict[str, np.ndarray | None]
) -> np.ndarray:
    """Which rows of a cache, (batch_kv, rows_kv), some list names."""
    used, pages, index = np.zeros(kv_rows, bool), lengths["pages"], lengths["index"]
    for b, lists in enumerate(indices):
        tokens = np.unique(lists[lists != NO_TOKEN])
        if pages is None:
            used[b if index is None else index[b], tokens] = True
        else:
            used[pages[b, tokens // kv_rows[1]], tokens % kv_rows[1]] = True
    return used


def make(variant: Variant, shape: Shape, seed: int) -> PlainExample:
    """Normal random q and latent rows for ``variant``; rows that no list names, outputs and what is between
    rows are NaN. ``shape.seqlen_kv`` are the entries of a list, and sequences have lengths of up to twice as
    many tokens. Errors as of `latent_attention_example.make`.
    """
    rng = np.random.default_rng(seed)
    head_dim, head_dim_v, _ = check_sizes(variant, shape)
    topk, most = shape.seqlen_kv, _TOKENS_PER_ENTRY * shape.seqlen_kv
    kv_lengths = randomarrays.random_lengths(rng, shape.batch, most)
    lengths: dict[str, np.ndarray | None] = dict.fromkeys(LENGTH_ARRAYS)
    rows = shape.batch, shape.seqlen_q, shape.heads
    of_q = {
        name: random_rows(rng, (*rows, width), variant.dtype, shape.spread, shape.gap)
        for name, width in widths_of_q(variant, head_dim, head_dim_v).items()
    }
    # Between lists are tokens that no list names.
    indices = np.zeros((*rows[:2], topk + int(rng.integers(3))), np.int32)[..., :topk]
    indices[...] = random_indices(rng, kv_lengths, shape.seqlen_q, topk)
    if variant.axis("pages") == "paged":
        kv_rows, _ = randomarrays.paged(rng, lengths, kv_lengths, page_sizes_of(variant))
    else:
        wide = dataclasses.replace(shape, seqlen_kv=most)
        kv_rows, _ = randomarrays.cache_rows(rng, lengths, kv_lengths, wide)
    used = named_rows(kv_rows, indices, lengths)
    k, of_codes = latent_rows(rng, variant, shape, (*kv_rows, 1, head_dim), used)
    scales = randomarrays.scales_of(rng, variant, shape.batch, 1)
    scales.pop("v_scale", None)
    out = rows_within_nan((*rows, head_dim_v), variant.dtype, shape.gap)
    lse = np.full((rows[0], rows[2], rows[1]), np.nan, np.float32) if shape.return_lse else None
    arrays = {name: lengths[name] for name in ("kv_lengths", "index", "pages")} | {"indices": indices}
    problem = normalise(
        k=view_of(k, variant.dtype if not of_codes else E4M3),
        **{name: view_of(x, variant.dtype) for name, x in of_q.items()},
        **{name: None if x is None else view_of(x, "int32") for name, x in arrays.items()},
        **randomarrays.array_views({name: scale[..., 0] for name, scale in scales.items()}),
        kv_dtype=of_codes,
        head_dim_v=head_dim_v,
        out=view_of(out, variant.dtype),
        softmax_scale=head_dim**-0.5,
        return_lse=shape.return_lse,
        splits=shape.splits,
    )
    of_call = {name: scale[:, None] for name, scale in scales.items()}
    return example_of(problem, {**of_q, "k": k, "out": out, "lse": lse, **of_call, **arrays}, judge)
