"""Lists of key blocks that queries choose, in the shapes that papers publish."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Choice(NamedTuple):
    """Blocks of ``rows`` queries see ``count`` chunks of ``chunk`` keys, in blocks of ``keys``, up to their
    own position: the chunk of their last query, ``first`` chunks at the beginning, ``recent`` chunks before
    their own, and random ones. In the papers each query chooses; here the queries of a block choose
    together, and all heads alike.
    """

    rows: int
    keys: int
    chunk: int
    count: int
    first: int = 0
    recent: int = 0

    def listed(self, seqlen: int) -> np.ndarray:
        """The listed blocks, always the same: bool (blocks of queries, blocks of keys)."""
        rng = np.random.default_rng(0)
        chunks = np.zeros((-(-seqlen // self.rows), -(-seqlen // self.chunk)), bool)
        for block, chosen in enumerate(chunks):
            own = (min((block + 1) * self.rows, seqlen) - 1) // self.chunk
            chosen[max(0, own - self.recent) : own + 1] = True
            chosen[: min(self.first, own + 1)] = True
            left = np.flatnonzero(~chosen[:own])
            chosen[rng.permutation(left)[: max(0, self.count - int(chosen.sum()))]] = True
        return chunks.repeat(self.chunk // self.keys, 1)[:, : -(-seqlen // self.keys)]

    def pairs(self, seqlen: int) -> int:
        """Visible pairs of query and key."""
        total = 0
        for block, listed in enumerate(self.listed(seqlen)):
            queries = np.arange(block * self.rows, min((block + 1) * self.rows, seqlen))
            first = np.flatnonzero(listed) * self.keys
            keys = np.minimum(self.keys, seqlen - first)
            total += int(np.clip(queries[:, None] + 1 - first, 0, keys).sum())
        return total


CHOICES = {
    # arXiv 2502.13189, its scaling experiments: blocks of 512, top 3.
    "moba": Choice(rows=128, keys=128, chunk=512, count=3),
    # arXiv 2502.11089: 16 blocks of 64, of which one is the first and two are the latest.
    "nsa": Choice(rows=64, keys=64, chunk=64, count=16, first=1, recent=1),
}
