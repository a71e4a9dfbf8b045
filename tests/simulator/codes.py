"""Calls on caches of e4m3 codes, and on the numbers that the codes stand for."""

from __future__ import annotations

import numpy as np
from ml_dtypes import float8_e4m3fn

import flashgen
from flashgen import KVCache
from flashgen.simulator.example import make


def two_caches(rng, shape, element, k_scale, v_scale, lengths):
    """A cache of random codes with these scales, of all numbers, of sequences and heads or of tokens; and one
    of the numbers that its codes stand for.
    """
    codes = [(40 * rng.standard_normal(shape)).astype(float8_e4m3fn) for _ in range(2)]
    of_rows = [scale[:, None] if scale.ndim == 2 else scale for scale in (k_scale, v_scale)]
    numbers = [
        (x.astype(np.float32) * scale[..., None]).astype(element)
        for x, scale in zip(codes, of_rows, strict=True)
    ]
    return KVCache(*codes, lengths, k_scale=k_scale, v_scale=v_scale), KVCache(*numbers, lengths)


def variants_of_same_bits(q, caches, **options):
    """The variants that attend to each of the caches; AssertionError unless the results are the same bits."""
    options |= {"return_lse": True, "backend": "simulator"}
    variants = [flashgen.plan(q, cache, **options).variant for cache in caches]
    results = [flashgen.attention(q, cache, **options) for cache in caches]
    for one, other in zip(*results, strict=True):
        assert (one.view(np.uint8) == other.view(np.uint8)).all()
    return variants


def scaled(variant, shape, seed):
    """An example whose scales differ from sequence to sequence and from head to head."""
    for of in range(seed, seed + 1000):
        example = make(variant, shape, of)
        named = example.named if variant.operator == "append" else example.others
        scales = [named.get(name) for name in ("k_scale", "v_scale")]
        if all(x is not None and min(x.strides[0], x.strides[-2]) > 0 for x in scales):
            return example
    raise AssertionError("no such example")
