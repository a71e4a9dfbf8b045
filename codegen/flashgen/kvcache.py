"""A cache of keys and values whose sequences have lengths of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of a batch of sequences, in arrays that have room for more; for ``flashgen.attention``.

    k, v: (rows, capacity, num_heads_kv, head_dim) and (..., head_dim_v): row b has the keys of sequence b.
        With ``pages``: (num_pages, page_size, num_heads_kv, ...). Strides are free, as in ``attention``: a
        cache of (rows, num_heads_kv, capacity, head_dim) is one with its dimensions transposed.
    lengths: (batch,), int32, on the device of k: how many keys each sequence has. Slots past it are not read.
    pages: (batch, pages_per_sequence), int32: key j of sequence b is row j % page_size of page
        ``pages[b, j // page_size]``. Entries past the length are not read.
    index: (batch,), int32: sequence b is row ``index[b]`` of k and v. Not with ``pages``.
    """

    k: Any
    v: Any
    lengths: Any
    pages: Any = None
    index: Any = None
