"""Keys that no query of their sequence sees, on a GPU: under a length, a diagonal or a window they have no
effect on results and gradients, whatever their bits in K and V, nor have entries of a page table that have no
other keys.
"""

from __future__ import annotations

import secrets

import numpy as np
import pytest

import flashgen
from flashgen.families.load import load_specs
from flashgen.runtime.device import device
from flashgen.schedule.dispatch import runs_on
from flashgen.simulator.example import Shape, make, outputs
from gpu.copies import computed
from unseen import BITS, array, fill, seen_rows

pytestmark = pytest.mark.gpu

# Each mask with a range, layout, grouping, tile and order of dQ of one head dim, and kernels for wide heads.
VARIANTS = [
    variant
    for spec in load_specs()
    if spec.operator not in ("append", "merge", "quantize", "mask_lists")
    for variant in spec.variants()
    if variant.is_main
    and variant.mask_type != "none"
    and (variant.head_dim == 64 or (variant.head_dim == variant.head_dim_v == 192 and "wide" in variant.spec))
    and variant.grid.cluster in (1, 2, 8)
    and (variant.dtype == ("bf16" if variant.target == "sm90" else "fp16") or variant.dtype == "fp32")
    and variant.target != "sm86"
    and variant.axis_values.get("sums") != "diagonals"  # of scores that take an array of distances
]


def shapes(variant):
    """Few queries on many keys, of which a window and a diagonal that starts top left hide most."""
    heads = {"heads": 2} if variant.gqa == "mha" else {"heads": 4, "kv_heads": 2}
    many = {"seqlen_q": 3, "seqlen_kv": 2000, **heads}
    if not variant.dispatch.rows_at_most:
        many = {"seqlen_q": 200, "seqlen_kv": 900, **heads}
    window = (many["seqlen_kv"] // 3, 0)
    if variant.has_lengths:
        return [Shape(**many, batch=5, window=window)] if variant.mask_type != "causal" else []
    if variant.mask_type == "causal":
        return [Shape(**many, top_left=True)]
    if variant.mask_type == "local":
        return [Shape(**many, window=window)]
    return [Shape(**many, window=window), Shape(**many, window=(-1, 0), top_left=True)]


CASES = [(variant, shape) for variant in VARIANTS for shape in shapes(variant)]


@pytest.mark.parametrize(("variant", "shape"), CASES, ids=lambda x: getattr(x, "name", None))
def test_they_have_no_effect(variant, shape):
    if not runs_on(variant, device(0)):
        pytest.skip(f"{device(0)} does not run it")
    example = make(variant, shape, secrets.randbits(32))
    rows, _ = seen_rows(example)
    assert not rows.all()
    names = [argument.name for argument in example.problem.operator.arguments if argument.is_output]
    for what in BITS:
        fill(example, what)
        found = computed(example, variant, names)
        for name in names:
            if found[name] is not None:
                array(example, name)[...] = found[name]
        verdict = example.judge()
        assert verdict.ok, f"{what}: {verdict}"
        assert len(outputs(example)) > 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("queries", [1, 4, 300])
@pytest.mark.parametrize("entry", [-1, 2**31 - 1])
def test_an_engine_may_recycle_the_pages_that_a_window_has_left(entry, queries, dtype):
    """Decoding, a few tokens and a chunk, through `attention`, which chooses the kernel."""
    import cupy as cp

    rng = np.random.default_rng(secrets.randbits(32))
    size, lengths, window = 16, [2000, 700], 500
    k, v = (rng.standard_normal((300, size, 2, 128), np.float32).astype(dtype) for _ in "kv")
    pages = rng.permutation(300)[:250].reshape(2, 125).astype(np.int32)
    q = cp.asarray(rng.standard_normal((2, queries, 8, 128), np.float32).astype(dtype))
    found = []
    for recycled in (False, True):
        if recycled:
            for b, length in enumerate(lengths):
                first = length - queries - window
                left = max(0, first // size)
                k[pages[b, :left]] = v[pages[b, :left]] = np.nan
                if first > 0:
                    k[pages[b, left], : first % size] = v[pages[b, left], : first % size] = np.nan
                pages[b, :left] = entry
        cache = flashgen.KVCache(
            *(cp.asarray(x) for x in (k, v)), cp.asarray(lengths, np.int32), pages=cp.asarray(pages)
        )
        found.append(flashgen.attention(q, cache, causal=True, window_size=(window, 0)).get())
    assert np.array_equal(*found)
