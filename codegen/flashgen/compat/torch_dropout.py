"""Which scores dropout keeps, by PyTorch's operations on the device of the call: for PyTorch's debug mask.

`flashgen.operators.dropout` explains the numbers and the layout of blocks. Words of 32 bits are in int64,
whose products keep all 64 bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashgen.operators.dropout import FACTORS, KEYS, LANES, QUERIES, ROUNDS, WEYL, WORD, keep_threshold

# A block of 16 queries by 32 keys: query % 8 and key % 8 / 2 are lanes; key / 8, query / 8 and key % 2 bytes.
_OF_BLOCK = (8, 4, 4, 2, 2)


def debug_mask(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    state: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """The probabilities of scores, (batch, heads, seqlen_q, seqlen_kv), in the dtype of query; negative where
    dropout drops the score. query and key: (batch, heads, seqlen, head_dim); ``state`` has seed and offset.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    result = query.new_empty(*query.shape[:-1], keys)
    for entry, of_entry in enumerate(result):
        of_heads = key[entry].repeat_interleave(query.shape[1] // key.shape[1], 0)
        scores = query[entry].float() @ of_heads.float().mT * scale
        if is_causal:
            hidden = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(keys - queries + 1)
            scores = scores.masked_fill(hidden, -math.inf)
        p = torch.exp(scores - lse[entry][..., None]).to(query.dtype)
        kept = _kept(state, entry * query.shape[1], query.shape[1], queries, keys, dropout_p)
        of_entry.copy_(torch.where(kept, p, -p))
    return result


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
