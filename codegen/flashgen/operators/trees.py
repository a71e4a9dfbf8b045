"""A tree of drafts, for speculative decoding: which of the last keys of a sequence each query sees.

The queries of a sequence are drafts, and its last keys are theirs, in the same order: draft j is key
seqlen_kv - seqlen_q + j. A query sees all keys before the drafts, and draft j if bit j of its word is set and
the draft is not after the query's. So a draft comes after the drafts that it continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.errors import BadParam, BadTensorShape, arg
from flashgen.operators.arguments import Argument

if TYPE_CHECKING:
    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.sequences import Sequence

# The bits of a word.
MAX_DRAFTS = 64
ARGUMENT = Argument(
    "tree", "input", "batch_q rows_q", dtypes=("int64",), layout="rows", alignment=8, optional=True
)


def check_drafts(tree: ArrayView, q: ArrayView, seqlen_q: int) -> None:
    """That each query has a word, with a bit for each of the ``seqlen_q`` drafts that a sequence may have.
    Raises BadTensorShape.
    """
    if tree.shape != q.shape[:-2]:
        raise BadTensorShape(
            f"{arg('tree')} has shape {tree.shape} and {arg('q')} {q.shape}; expected {q.shape[:-2]}, a word "
            "for each query"
        )
    if seqlen_q > MAX_DRAFTS:
        raise BadTensorShape(
            f"{arg('tree')} was given and sequences have up to {seqlen_q} queries; a tree has at most "
            f"{MAX_DRAFTS} drafts: pass fewer, or a mask array. With packed queries pass their bound "
            f"{arg('max_seqlen_q')}"
        )


def hidden_by_tree(tree: np.ndarray, seqlen_kv: int) -> np.ndarray:
    """True where a tree, (batch, seqlen_q) in host memory, hides a key: (batch, 1, seqlen_q, seqlen_kv)."""
    seqlen_q = tree.shape[1]
    hidden = np.zeros((tree.shape[0], 1, seqlen_q, seqlen_kv), bool)
    drafts = np.arange(max(0, seqlen_q - seqlen_kv), seqlen_q)
    bits = tree[:, None, :, None] >> drafts & 1
    hidden[..., seqlen_kv - len(drafts) :] = bits == 0
    return hidden


def check_order(tree: np.ndarray, sequences: list[Sequence]) -> None:
    """That no draft sees a later one. ``tree`` is in host memory. Raises BadParam."""
    for sequence in sequences:
        entry, rows = sequence.queries()
        words = (tree if tree.ndim == 2 else tree[None])[entry, rows].view(np.uint64)
        later = words >> np.arange(len(words), dtype=np.uint64) >> np.uint64(1)
        if later.any():
            draft = int(np.flatnonzero(later)[0])
            seen = int(words[draft]).bit_length() - 1
            raise BadParam(
                f"{arg('tree')} says that draft {draft} of sequence {sequence.number} sees draft {seen}; a "
                "draft sees itself and earlier ones alone: put each after the draft that it continues"
            )
