"""Lengths of sequences by Zipf's law."""

from __future__ import annotations

import numpy as np


def zipf_lengths(count: int, mean: int) -> list[int]:
    """Lengths of ``count`` sequences that fall as 1 / rank and add up to ``count`` times ``mean``, in an
    order that is always the same.
    """
    ranks = np.arange(1, count + 1)
    lengths = np.floor(count * mean / (ranks * (1 / ranks).sum())).astype(int)
    lengths[0] += count * mean - lengths.sum()
    return np.random.default_rng(0).permutation(lengths).tolist()
