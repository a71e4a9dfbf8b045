"""What a call says of a KV cache, and of rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flashgen.host.libraryimport import after_import

if TYPE_CHECKING:
    from collections.abc import Mapping

# Arguments of the operator ``append`` that are fields of a KVCache, for messages.
FIELDS = {"k_cache": "k", "v_cache": "v"}


def arrays_instead(given: Mapping[str, Any]) -> str:
    """How a plan made with these arrays, of which some are None, takes a KVCache, for its messages: by the
    arrays of it. Nothing where the plan has no lengths of keys.
    """
    if given.get("kv_lengths") is None:
        return ""
    of_cache = ("kv_lengths", "lengths"), ("pages", "pages"), ("index", "index"), ("kv_starts", "starts")
    named = (f", {name}=cache.{field}" for name, field in of_cache if given.get(name) is not None)
    return f"; of a KVCache pass cache.k, cache.v{''.join(named)}"


class ShapesShown:
    """Printed, arrays are their shapes: their elements may be gigabytes."""

    __slots__ = ()

    def __repr__(self) -> str:
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        shown = (f"{name}={getattr(x, 'shape', x)}" for name, x in given if x is not None)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class KVCache(ShapesShown):
    """A cache of keys and values, as the caller holds it.

    k, v: (rows, capacity, num_heads_kv, head_dim), for v with head_dim_v: a row for each sequence. With pages
        (num_pages, page_size, num_heads_kv, head_dim). fp16, bf16 or fp32; any strides, but the last
        dimension is contiguous and rows are 16-byte aligned.
    lengths: int32 (batch,), contiguous, on the device of k: the tokens that each sequence has in the cache.
        No call changes it.
    pages: int32 (batch, max_pages): pages[b, j] has the keys j * page_size to (j + 1) * page_size - 1 of
        sequence b. Entries without a key that some query sees may hold anything: those after the last token,
        and those before a window.
    index: int32 (batch,): the row of k and v of each sequence; by default its own number. Not with pages.
    starts: int32 (batch,): the first key of each sequence, where its row or its pages have padding on the
        left; by default 0. ``lengths`` counts the padding.
    """

    k: Any
    v: Any
    lengths: Any
    pages: Any = None
    index: Any = None
    starts: Any = None


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Rotary(ShapesShown):
    """Rotary embedding: by which angles queries and keys are rotated.

    cos, sin: (num_positions, rotary_dim / 2), of the dtype of q, or fp32. rotary_dim is a multiple of 16; the
        elements of a head after it stay as they are.
    interleaved: whether elements 2i and 2i + 1 are a pair (as in GPT-J), instead of i and i + rotary_dim / 2
        (as in GPT-NeoX and Llama).
    positions: int32 (batch, seqlen_new), or (tokens,) where tokens are packed: the row of cos and sin for
        each new token, and for the query of the same number. By default the token's position in its sequence.
    """

    cos: Any
    sin: Any
    interleaved: bool = False
    positions: Any = None


def _register_pytrees() -> None:
    """Tell JAX that a cache goes through its functions as its arrays do."""
    import jax

    if not hasattr(jax, "tree_util"):  # flashgen is imported by a part of JAX's own import
        return
    for record in (KVCache, Rotary):
        constants = [x.name for x in fields(record) if x.type == "bool"]
        names = [x.name for x in fields(record) if x.name not in constants]
        jax.tree_util.register_dataclass(record, data_fields=names, meta_fields=constants)


after_import("jax", _register_pytrees)
