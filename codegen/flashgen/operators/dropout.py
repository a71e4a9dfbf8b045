"""Dropout of attention: which scores count, as a function of a seed, an offset and the place of a score.

The random numbers are FlashAttention-2's (https://github.com/Dao-AILab/flash-attention, in its folder
csrc/flash_attn/src the files dropout.h and philox.cuh), so the same seed and offset drop the same scores. The
scores of a head are cut into blocks of 16 queries by 32 keys. Philox4x32 with 7 rounds (Salmon et al.,
https://doi.org/10.1145/2063384.2063405) gives 16 bytes for each of 32 lanes of a block, one for each score:

    key      the seed, 64 bits
    counter  offset + (batch entry * num_heads_q + head) * 32 + lane, 64 bits; query / 16; key / 32
    lane     query % 8 * 4 + key % 8 / 2
    byte     key / 8 % 4 * 4 + query / 8 % 2 * 2 + key % 2

The lane and the byte are where an accumulator of mma.sync m16n8 has the score. A score counts if its byte is
at most `keep_threshold`; O is multiplied by `keep_scale`.

A call may have a part of the queries of another call, with the random numbers of that call: ``dropout_row``
is the place of its first query there, a multiple of 16.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_DROPOUT = 0.0
QUERIES, KEYS, LANES = 16, 32, 32  # of a block of scores, and who has them
# Of Philox.
ROUNDS = 7
FACTORS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
# How far the share of scores that count may be from 1 - dropout_p, relative to it.
_MOST_BIAS = 0.01


def probability_of(dropout_p: Any) -> float:
    """The probability that a caller means. Raises BadParam for what is none. torch.compile traces it."""
    if isinstance(dropout_p, numbers.Real) and not isinstance(dropout_p, bool) and 0 <= dropout_p < 1:
        return float(dropout_p)
    raise BadParam(
        f"{arg('dropout_p')} is {shown(dropout_p)}; expected a number from 0, no dropout, up to but not 1"
    )


def keep_threshold(dropout_p: float) -> int:
    """The largest byte of a score that counts; in fp32 as in flash-attn."""
    return math.floor(float(np.float32(1) - np.float32(dropout_p)) * 255.0)


def keep_scale(dropout_p: float) -> float:
    """What O is multiplied by, 1 / (1 - dropout_p), in fp32."""
    return float(np.float32(1) / (np.float32(1) - np.float32(dropout_p)))


def check_bias(dropout_p: float) -> None:
    """That a byte can tell the probability well enough. Raises BadParam."""
    if dropout_p == NO_DROPOUT:
        return
    kept = (keep_threshold(dropout_p) + 1) / 256
    if abs(kept * keep_scale(dropout_p) - 1) > _MOST_BIAS:
        raise BadParam(
            f"{arg('dropout_p')} is {dropout_p:g}; a score has one random byte, so {kept:g} of them would "
            f"count instead of {1 - dropout_p:g}, more than 1 % off; take a smaller one, or one near "
            f"{1 - kept:g}"
        )


class Dropout(NamedTuple):
    """The dropout of a call."""

    seed: int
    offset: int
    threshold: int
    scale: float
    num_heads: int
    first_row: int = 0

    def kept(self, batch: Any, head: Any, rows: Any, keys: Any) -> np.ndarray:
        """Whether scores count, (pairs, rows, keys). ``batch`` and ``head`` are the pairs of batch entry and
        query head: integers, or arrays of one dimension; ``rows`` and ``keys`` the numbers of queries and
        keys in their sequence.
        """
        pairs = np.atleast_1d(np.asarray(batch) * self.num_heads + np.asarray(head))
        return self._bytes(pairs, np.asarray(rows) + self.first_row, np.asarray(keys)) <= self.threshold

    def factors(self, batch: Any, head: Any, rows: Any, keys: Any) -> np.ndarray:
        """What P is multiplied by: ``scale`` where a score counts, else 0; fp32, arguments as for `kept`."""
        return np.where(self.kept(batch, head, rows, keys), np.float32(self.scale), np.float32(0))

    def _bytes(self, pairs: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        row_blocks, row_block = np.unique(rows // QUERIES, return_inverse=True)
        key_blocks, key_block = np.unique(keys // KEYS, return_inverse=True)
        counter = (pairs.astype(np.uint64) * np.uint64(LANES))[:, None] + np.arange(LANES, dtype=np.uint64)
        counter += np.uint64(self.offset & (1 << 64) - 1)
        words = philox(
            self.seed,
            counter[:, None, None, :],
            row_blocks.astype(np.uint64)[:, None, None],
            key_blocks.astype(np.uint64)[:, None],
        )
        # Of a block: lane as query % 8 and key % 8 / 2, byte as key / 8, query / 8 and key % 2.
        counts = len(pairs), len(row_blocks), len(key_blocks)
        of_blocks = words.astype("<u4").view(np.uint8).reshape(*counts, 8, 4, 4, 2, 2)
        whole = of_blocks.transpose(0, 1, 6, 3, 2, 5, 4, 7)
        whole = whole.reshape(counts[0], counts[1] * QUERIES, counts[2] * KEYS)
        at_row, at_key = row_block * QUERIES + rows % QUERIES, key_block * KEYS + keys % KEYS
        return whole[:, at_row[:, None], at_key]


def philox(seed: int, counter: np.ndarray, row_block: np.ndarray, key_block: np.ndarray) -> np.ndarray:
    """Four words of 32 bits for each element of the arrays, which are uint64 and broadcast: (..., 4)."""
    word = np.uint64(WORD)
    half = np.uint64(32)
    c0, c1, c2, c3 = np.broadcast_arrays(counter & word, counter >> half, row_block, key_block)
    key0, key1 = seed & WORD, seed >> 32 & WORD
    for _ in range(ROUNDS):
        low, high = c0 * np.uint64(FACTORS[0]), c2 * np.uint64(FACTORS[1])
        c0, c1 = (high >> half) ^ c1 ^ np.uint64(key0), high & word
        c2, c3 = (low >> half) ^ c3 ^ np.uint64(key1), low & word
        key0, key1 = key0 + WEYL[0] & WORD, key1 + WEYL[1] & WORD
    return np.stack((c0, c1, c2, c3), -1).astype(np.uint32)


def seed_of_sequence(dropout_seed: np.ndarray, number: int, num_heads: int) -> np.ndarray:
    """Seed and offset for the sequence of this number as the only one of a call, with the same numbers."""
    return dropout_seed + np.array([0, number * num_heads * LANES])


class WithDropout(Protocol):
    """A problem that may have dropout; see `AttentionProblem`."""

    dropout_p: float
    dropout_row: int
    num_heads_q: int

    def has(self, name: str) -> bool:
        """Whether the call has an array for the argument called ``name``."""


def dropout_of(problem: WithDropout, arrays: Mapping[str, np.ndarray | None]) -> Dropout | None:
    """The dropout of a call among its arrays by name, in host memory; None if it has none."""
    if not problem.has("dropout_seed"):
        return None
    seed, offset = (int(x) for x in arrays["dropout_seed"])
    threshold, scale = keep_threshold(problem.dropout_p), keep_scale(problem.dropout_p)
    return Dropout(seed, offset, threshold, scale, problem.num_heads_q, problem.dropout_row)
