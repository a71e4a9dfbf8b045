"""Which scores dropout keeps, by PyTorch's operations on the device of the call: for PyTorch's debug mask.

`flashgen.operators.dropout` explains the numbers and the layout of blocks. Words of 32 bits are in int64,
whose products keep all 64 bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from flashgen.operators.dropout import FACTORS, KEYS, LANES, QUERIES, ROUNDS, WEYL, WORD, keep_threshold

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

# A block of 16 queries by 32 keys: query % 8 and key % 8 / 2 are lanes; key / 8, query / 8 and key % 2 bytes.
_OF_BLOCK = (8, 4, 4, 2, 2)


# FA2's kernels compute whole blocks, and its mask has their size.
_BLOCK = 128


def debug_mask(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    state: Tensor,
    dropout_p: float,
    options: Mapping[str, Any],
    ends: tuple[Tensor | None, Tensor | None] = (None, None),
    longest: tuple[int, int] = (0, 0),
) -> Tensor:
    """The probabilities of scores, in the dtype of query; negative where dropout drops the score.

    query, key: (batch, rows, heads, head_dim); or packed, (rows, heads, head_dim), with the ``ends`` and the
        ``longest`` of their sequences. The host waits for the ends.
    state: seed and offset.
    options: softmax_scale and window_size of `attention`.

    Returns (batch, heads, queries, keys), where queries and keys are rounded up to a multiple of 128, as
    FA2's are. Elements outside of a sequence are 0, and so are hidden scores.
    """
    queries, keys = (_sequences(x, end) for x, end in zip((query, key), ends, strict=True))
    lses = lse if ends[0] is None else (x.mT for x in _sequences(lse.mT, ends[0]))
    most = [
        max(length, *(len(x) for x in parts)) for length, parts in zip(longest, (queries, keys), strict=True)
    ]
    size = [length + -length % _BLOCK for length in most]
    result = query.new_zeros(len(queries), query.shape[-2], *size)
    for entry, (q, k, lse_of_rows) in enumerate(zip(queries, keys, lses, strict=True)):
        p = _probabilities(q, k, lse_of_rows, options).to(query.dtype)
        heads, rows, columns = p.shape
        kept = _kept(state, entry * heads, heads, rows, columns, dropout_p)
        result[entry, :, :rows, :columns] = torch.where(kept, p, -p)
    return result


def _sequences(x: Tensor, ends: Tensor | None) -> Sequence[Tensor]:
    if ends is None:
        return x.unbind()
    return x[: int(ends[-1])].split(ends.diff().tolist())


def _probabilities(query: Tensor, key: Tensor, lse: Tensor, options: Mapping[str, Any]) -> Tensor:
    """(heads, queries, keys), in fp32, of one sequence."""
    rows, heads, width = query.shape
    scale = 1 / math.sqrt(width) if options["softmax_scale"] is None else options["softmax_scale"]
    key_of_head = key.repeat_interleave(heads // key.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key_of_head.float()) * scale
    scores = scores.masked_fill(_hidden(rows, len(key), options["window_size"], query.device), -math.inf)
    sum_of_row = lse.masked_fill(lse == -math.inf, math.inf)  # of a query that sees no key
    return torch.exp(scores - sum_of_row[..., None])


def _hidden(queries: int, keys: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """Which scores a window hides, (queries, keys): the last query is at the last key, -1 is no limit."""
    left, right = window
    query = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)
    return ((left >= 0) & (key < query - left)) | ((right >= 0) & (key > query + right))


def _kept(state: Tensor, first: int, heads: int, queries: int, keys: int, dropout_p: float) -> Tensor:
    """Whether scores count, (heads, queries, keys), of ``heads`` pairs of batch entry and head."""
    device = state.device
    place = torch.arange(first * LANES, (first + heads) * LANES, device=device).view(heads, 1, 1, LANES)
    counter = state[1] + place
    row_blocks, key_blocks = -(-queries // QUERIES), -(-keys // KEYS)
    rows = torch.arange(row_blocks, device=device).view(1, -1, 1, 1)
    columns = torch.arange(key_blocks, device=device).view(1, 1, -1, 1)
    c0, c1, c2, c3 = torch.broadcast_tensors(counter & WORD, counter >> 32 & WORD, rows, columns)
    key0, key1 = state[0] & WORD, state[0] >> 32 & WORD
    for _ in range(ROUNDS):
        low, high = c0 * FACTORS[0], c2 * FACTORS[1]
        c0, c1 = (high >> 32 & WORD) ^ c1 ^ key0, high & WORD
        c2, c3 = (low >> 32 & WORD) ^ c3 ^ key1, low & WORD
        key0, key1 = key0 + WEYL[0] & WORD, key1 + WEYL[1] & WORD
    words = torch.stack((c0, c1, c2, c3), -1)[..., None] >> torch.arange(0, 32, 8, device=device) & 0xFF
    kept = words <= keep_threshold(dropout_p)
    kept = kept.view(heads, row_blocks, key_blocks, *_OF_BLOCK)
    # query / 16, query / 8 % 2, query % 8; key / 32, key / 8 % 4, key % 8 / 2, key % 2
    whole = kept.permute(0, 1, 6, 3, 2, 5, 4, 7).reshape(heads, row_blocks * QUERIES, key_blocks * KEYS)
    return whole[:, :queries, :keys]
