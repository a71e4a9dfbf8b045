"""Keys in several parts, and what attention over all of them gives."""

import ml_dtypes
import numpy as np

from flashgen.operators import reference
from flashgen.operators.masks import Band
from flashgen.operators.numbers import widened

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
BATCH, ROWS, HEADS, KV_HEADS, WIDTH, WIDTH_V = 3, 6, 4, 2, 16, 24


def normal(*shape, dtype=np.float32):
    return np.random.default_rng().standard_normal(shape, np.float32).astype(dtype)


def keys(count, batch=BATCH, dtype=np.float32):
    return normal(batch, count, KV_HEADS, WIDTH, dtype=dtype), normal(
        batch, count, KV_HEADS, WIDTH_V, dtype=dtype
    )


def all_keys(given):
    """k and v of all parts, a shared one once for each batch entry."""
    return tuple(
        np.concatenate([np.broadcast_to(x, (BATCH, *x.shape[1:])) for x in which], axis=1)
        for which in zip(*given, strict=True)
    )


def assert_right(out, lse, q, given, dtype, causal=False):
    """Within the bound of float64 for one attention, once for each part and its merge: a result of a part and
    a result of a merge may be off as much as one of all keys, whose P and values are as large."""
    k, v = (widened(x, dtype) for x in all_keys(given))
    band = Band(k.shape[1] - q.shape[1], right=0) if causal else Band()
    expected = reference.attention(widened(q, dtype), k, v, dtype, WIDTH**-0.5, band)
    # Of parts the mean of |v| under p is the sum of the parts' means, weighted: the bounds add up likewise.
    times = 2 * len(given)
    share = reference.largest(widened(out, dtype), expected.out, times * expected.out_bound).share
    assert share <= 1
    assert reference.largest(lse, expected.lse, times * expected.lse_bound).share <= 1
